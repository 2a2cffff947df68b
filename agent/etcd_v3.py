"""etcd's v3 API through its JSON gateway (served by etcd itself, 3.4 and newer): plain HTTP POSTs of JSON, where keys
and values are base64 and 64-bit numbers are strings. https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/

All keys begin with `/tenplexrun/`, as under v2.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from typing import Any, cast

import urllib3

from tenplexrun.agent import etcd as shared
from tenplexrun.agent.etcd import (
    NO_TRUST,
    PLAIN,
    ROOT,
    Access,
    Content,
    Deliver,
    Etcd,
    Grant,
    Unavailable,
    parsed,
    stored,
)
from tenplexrun.errors import CompareFailedError, CoordinationError
from tenplexrun.ports import KeyValue

Record = dict[str, Any]

# gRPC status codes, https://grpc.io/docs/guides/status-codes/
CANCELLED, DEADLINE_EXCEEDED, NOT_FOUND, PERMISSION_DENIED = 1, 4, 5, 7
RESOURCE_EXHAUSTED, UNAVAILABLE, UNAUTHENTICATED = 8, 14, 16
MAY_PASS = (CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE)
LOGIN = "/v3/auth/authenticate"


class EtcdV3(Etcd):
    """Implements `tenplexrun.ports.Coordination`."""

    def __init__(self, endpoints: Sequence[str], access: Access = PLAIN) -> None:
        tokens: dict[str, str] = {}  # of logins, by endpoint: a login costs the server 50 ms of its processor
        super().__init__(endpoints, lambda endpoint, timeout_s: V3Server(endpoint, timeout_s, access, tokens))

    async def call(self, path: str, body: Record) -> Record:
        """Ask any server for what is no matter of keys, as `V3Server.call`."""
        return await self._run(lambda server: cast(V3Server, server).call(path, body))


class V3Server:
    """Implements `Server`."""

    def __init__(self, endpoint: str, timeout_s: float, access: Access, tokens: dict[str, str]) -> None:
        self._endpoint, self._access, self._tokens, self._timeout_s = endpoint, access, tokens, timeout_s
        self._http = urllib3.connection_from_url(f"{access.scheme}://{endpoint}", maxsize=4, **access.tls_options())

    def get(self, key: str) -> KeyValue | None:
        return _found(self.call("kv/range", {"key": _key(key)})).get(key)

    def put(self, new: KeyValue) -> None:
        self.call("kv/put", _item(new))

    def create(self, new: KeyValue) -> None:
        self._create(new, "0")

    def swap(self, new: KeyValue, token: str) -> None:
        current = self._if(_is_token(new.key, token), {"request_put": _item(new)}, new.key)
        if current is None or parsed_item(current).token != new.token:
            raise CompareFailedError(f"somebody else has changed the key {new.key} first")

    def delete(self, key: str, token: str | None) -> None:
        if token is None:
            self.call("kv/deleterange", {"key": _key(key)})
            return
        current = self._if(_is_token(key, token), {"request_delete_range": {"key": _key(key)}}, key)
        if current is not None:
            raise CompareFailedError(f"somebody else has changed the key {key} first")

    def delete_folder(self, prefix: str) -> None:
        self.call("kv/deleterange", _folder(prefix))

    def list(self, prefix: str) -> Content:
        return self._tree(prefix)[0]

    def hold(self, new: KeyValue, ttl_s: int) -> Grant:
        granted = self.call("lease/grant", {"TTL": str(ttl_s)})
        try:
            lease = self._create(new, granted["ID"])
        except CompareFailedError:
            self.call("lease/revoke", {"ID": granted["ID"]})
            raise
        return Grant(new, lease, float(granted["TTL"]))

    def refresh(self, grant: Grant) -> bool:
        """The lease lives on whatever becomes of its key, so both are asked for."""
        kept = self.call("lease/keepalive", {"ID": grant.id})["result"]
        return int(kept.get("TTL", 0)) > 0 and self.get(grant.held.key) == grant.held

    def release(self, grant: Grant) -> None:
        """With its lease goes the key, if it is still the one of this lease."""
        try:
            self.call("lease/revoke", {"ID": grant.id})
        except NotFoundError:
            pass

    def follow(self, prefix: str, deliver: Deliver) -> None:
        content, revision = self._tree(prefix)
        # From the key to the end of its folder; the few foreign names between ("a-b" of "a") are passed over.
        span = {"key": _key(prefix), "range_end": _folder(prefix)["range_end"]}
        while deliver(content):
            for message in self._stream("watch", {"create_request": {**span, "start_revision": str(revision + 1)}}):
                if message.get("canceled"):
                    if "compact_revision" in message:  # history that has not been seen is gone: read all anew
                        return
                    raise Unavailable(message.get("cancel_reason", "the watch was cancelled"))
                content = dict(content)
                for event in message.get("events", ()):
                    name, revision = _name(event["kv"]), int(event["kv"]["mod_revision"])
                    if event.get("type") == "DELETE":
                        content.pop(name, None)
                    elif name == prefix or name.startswith(f"{prefix}/"):
                        content[name] = parsed_item(event["kv"])
                if not deliver(content):
                    return
            # Quiet. A server that is cut off from the others is so, too, but does not answer this.
            self.call("kv/range", {**span, "limit": "1", "keys_only": True})

    def removal(self, key: str) -> dict[str, Any]:
        requests = [["POST", "/v3/kv/deleterange", {}, json.dumps({"key": _key(key)})]]
        if self._access.user is not None:  # its answer has the token for the next
            requests.insert(0, ["POST", LOGIN, {}, json.dumps(self._login())])
        return self._access.removal(self._endpoint, requests)

    # --- transactions ---------------------------------------------------------------------------------------------

    def _create(self, new: KeyValue, lease: str) -> str:
        """Returns the lease of the key: another one if an earlier attempt, whose answer was lost, has made it."""
        missing = [{"key": _key(new.key), "target": "CREATE", "create_revision": "0"}]
        current = self._if(missing, {"request_put": {**_item(new), "lease": lease}}, new.key)
        if current is None or parsed_item(current).token != new.token:
            raise CompareFailedError(f"the key {new.key} exists already")
        return str(current.get("lease", "0"))

    def _if(self, compare: Sequence[Record], then: Record, key: str) -> Record | None:
        """If all compares hold, do it. Returns the key as it is after that."""
        read = {"request_range": {"key": _key(key)}}
        answer = self.call("kv/txn", {"compare": compare, "success": [then, read], "failure": [read]})
        found = answer["responses"][-1]["response_range"].get("kvs", [])
        return found[0] if found else None

    def _tree(self, prefix: str) -> tuple[dict[str, KeyValue], int]:
        """The key and all keys below it, and the store's revision when they were read."""
        reads = [{"request_range": {"key": _key(prefix)}}, {"request_range": _folder(prefix)}]
        answer = self.call("kv/txn", {"success": reads})
        content: dict[str, KeyValue] = {}
        for response in answer["responses"]:
            content.update(_found(response["response_range"]))
        return content, int(answer["header"]["revision"])

    # --- HTTP -----------------------------------------------------------------------------------------------------

    def call(self, path: str, body: Record) -> Record:
        """Any request of the API, https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/."""
        response = self._open(path, body, self._timeout_s)
        try:
            answer: Record = json.loads(response.data)
        except (urllib3.exceptions.HTTPError, ValueError) as error:
            raise Unavailable from error
        if "error" in answer:  # of a stream, in its first message
            raise _fault(answer["error"])
        return answer

    def _stream(self, path: str, body: Record) -> Iterator[Record]:
        """The messages of a streamed answer, until it has been quiet for WATCH_TIMEOUT_S or has ended."""
        response = self._open(path, body, shared.WATCH_TIMEOUT_S)
        partial = b""
        try:
            for chunk in response.read_chunked():
                *lines, partial = (partial + chunk).split(b"\n")
                for line in filter(None, lines):
                    message = json.loads(line)
                    if "error" in message:
                        raise _fault(message["error"])
                    yield message["result"]
        except urllib3.exceptions.ReadTimeoutError:
            return
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable from error
        finally:
            response.close()

    def _open(self, path: str, body: Record, read_timeout_s: float) -> urllib3.BaseHTTPResponse:
        """The answer, its body unread. Logs in where it has to: servers forget logins."""
        if self._access.user is not None and self._endpoint not in self._tokens:
            self._log_in()
        token = self._tokens.get(self._endpoint)
        response = self._post(f"/v3/{path}", body, read_timeout_s, token)
        if response.status == 200:
            return response
        fault = _fault(_error(response))
        if not isinstance(fault, StaleLoginError) or token is None:
            raise fault
        self._log_in()
        response = self._post(f"/v3/{path}", body, read_timeout_s, self._tokens[self._endpoint])
        if response.status != 200:
            raise _fault(_error(response))
        return response

    def _log_in(self) -> None:
        response = self._post(LOGIN, self._login(), self._timeout_s, None)
        if response.status != 200:
            raise _fault(_error(response))
        self._tokens[self._endpoint] = json.loads(response.data)["token"]

    def _login(self) -> Record:
        return {"name": self._access.user, "password": self._access.password}

    def _post(self, path: str, body: Record, read_timeout_s: float, token: str | None) -> urllib3.BaseHTTPResponse:
        timeout = urllib3.Timeout(connect=self._timeout_s, read=read_timeout_s)
        headers = {"Content-Type": "application/json", **({"Authorization": token} if token else {})}
        try:
            return self._http.urlopen(
                "POST", path, json.dumps(body), headers, retries=False, timeout=timeout, preload_content=False
            )
        except urllib3.exceptions.SSLError as error:
            raise CoordinationError(f"{NO_TRUST}: {error}") from None
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable from error


class NotFoundError(CoordinationError):
    """What is asked for does not exist (a lease that has expired)."""


class StaleLoginError(CoordinationError):
    """The login is not known any more: the server has restarted, or time or a change of rights has ended it."""


def _error(response: urllib3.BaseHTTPResponse) -> Record:
    try:
        text = response.data.decode(errors="replace")
    except urllib3.exceptions.HTTPError as error:
        raise Unavailable from error
    try:
        return {"code": 0, **json.loads(text)}
    except (ValueError, TypeError):
        return {"code": 0, "message": f"HTTP status {response.status}: {text.strip()}"}


def _fault(error: Record) -> Exception:
    """The message of a CoordinationError goes on from "the etcd at ... "."""
    code, text = error.get("grpc_code", error.get("code", 0)), str(error.get("message", error))
    if code in MAY_PASS and "space exceeded" not in text:
        return Unavailable(text)
    if code == NOT_FOUND:
        return NotFoundError(f"does not know it: {text}")
    if code == UNAUTHENTICATED or "revision of auth store is old" in text or "auth revision" in text:
        return StaleLoginError(f"refuses this login: {text}")
    if code == PERMISSION_DENIED or "authentication failed" in text or "user name is empty" in text:
        return CoordinationError(f"refuses this user; check user name, password and role: {text}")
    if "404 page not found" in text:
        return CoordinationError("does not serve the v3 API at /v3; use an etcd of 3.4 or newer")
    return CoordinationError(f"refuses: {text}")


# --- wire form ----------------------------------------------------------------------------------------------------


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def _key(key: str) -> str:
    return _base64(ROOT + key)


def _folder(prefix: str) -> Record:
    """All keys that begin with the prefix and a slash; "0" follows "/"."""
    return {"key": _key(prefix + "/"), "range_end": _key(prefix + "0")}


def _item(new: KeyValue) -> Record:
    return {"key": _key(new.key), "value": _base64(stored(new))}


def _is_token(key: str, token: str) -> list[Record]:
    """That what is stored begins with the token and a space: it lies between "token" and "token!", which follows."""
    compare = {"key": _key(key), "target": "VALUE"}
    return [
        {**compare, "result": "GREATER", "value": _base64(token)},
        {**compare, "result": "LESS", "value": _base64(token + "!")},
    ]


def _name(record: Record) -> str:
    return b64decode(record["key"]).decode().removeprefix(ROOT)


def parsed_item(record: Record) -> KeyValue:
    return parsed(_name(record), b64decode(record.get("value", "")).decode())


def _found(answer: Record) -> dict[str, KeyValue]:
    return {_name(record): parsed_item(record) for record in answer.get("kvs", ())}
