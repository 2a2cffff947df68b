"""TLS with client certificates, users, several servers, and which API is served. The CA is thrown away."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
import urllib3
from etcd_servers import HOST, EtcdServer, scratch
from stores import adapter
from test_coordination import until, values

from tenplexrun.agent.etcd import PLAIN, Access
from tenplexrun.agent.guardian import remove_key
from tenplexrun.agent.meeting import find_running
from tenplexrun.agent.probing import served_api
from tenplexrun.errors import CoordinationError
from tenplexrun.rdzv import Meeting


@pytest.fixture(scope="module")
def files() -> Iterator[Path]:
    """PEM files: the authority's `ca`, `server`, `client`, and `stranger`, which another authority has signed."""
    with scratch() as directory:
        authority, other = trustme.CA(), trustme.CA()
        authority.cert_pem.write_to_path(str(directory / "ca.pem"))
        names = {"server": authority.issue_cert(HOST), "client": authority.issue_cert("client")}
        for name, issued in {**names, "stranger": other.issue_cert("client")}.items():
            issued.private_key_pem.write_to_path(str(directory / f"{name}.key"))
            issued.cert_chain_pems[0].write_to_path(str(directory / f"{name}.pem"))
        yield directory


@pytest.fixture(scope="module")
def over_tls(files: Path) -> Iterator[EtcdServer]:
    """Asks its clients for a certificate, and serves both APIs."""
    tls = ["--client-cert-auth", f"--trusted-ca-file={files}/ca.pem"]
    tls += [f"--cert-file={files}/server.pem", f"--key-file={files}/server.key"]
    with scratch() as directory:
        server = EtcdServer(directory, flags=tls, scheme="https")
        server.start()
        yield server
        server.kill()


def access(files: Path, who: str = "client") -> Access:
    return Access(True, str(files / "ca.pem"), str(files / f"{who}.pem"), str(files / f"{who}.key"))


async def exercise(api: str, endpoints: Sequence[str], way: Access) -> None:
    """Write, watch, hold, and have the guardian remove."""
    client, folder = adapter(api)(endpoints, way), uuid.uuid4().hex
    try:
        watch = client.watch(folder)
        assert await anext(watch) == {}
        await client.put(f"{folder}/k", "v")
        await until(watch, {f"{folder}/k": "v"})
        lease = await client.hold(f"{folder}/members/n", "me", 12)  # v2 hashes the password at each request: 0.3 s
        await asyncio.sleep(4.5)  # a refresh
        assert not lease.lost.is_set()
        removals = json.loads(json.dumps(client.removals(lease.key)))
        while not await asyncio.to_thread(remove_key, removals):  # it has little patience, a busy server is slow
            pass
        assert values(await client.list(folder)) == {f"{folder}/k": "v"}
        await lease.lost.wait()
    finally:
        await client.close()


async def refused(api: str, server: EtcdServer, way: Access, words: str) -> None:
    client = adapter(api)([server.endpoint], way)
    with pytest.raises(CoordinationError, match=words):
        await client.get("k")
    await client.close()


def test_tls_with_client_certificates(over_tls: EtcdServer, files: Path, api: str) -> None:
    assert asyncio.run(served_api([over_tls.endpoint], access(files))) == "v2"
    asyncio.run(exercise(api, [over_tls.endpoint], access(files)))


@pytest.mark.parametrize("how", ["no CA", "no certificate", "a stranger's certificate"])
def test_without_trust_the_certificates_are_named(over_tls: EtcdServer, files: Path, api: str, how: str) -> None:
    ways = {
        "no CA": replace(access(files), ca_cert=None),
        "no certificate": Access(True, str(files / "ca.pem")),
        "a stranger's certificate": access(files, "stranger"),
    }
    with pytest.raises(CoordinationError, match="check the certificates"):
        asyncio.run(served_api([over_tls.endpoint], ways[how]))
    asyncio.run(refused(api, over_tls, ways[how], "check the certificates"))


def test_plain_http_to_an_etcd_over_tls(over_tls: EtcdServer) -> None:
    with pytest.raises(CoordinationError, match="protocol=https"):
        asyncio.run(find_running(Meeting((over_tls.endpoint,), hosted=False), timeout_s=0))


# --- users --------------------------------------------------------------------------------------------------------


def ask(server: EtcdServer, method: str, path: str, **body: object) -> None:
    headers = urllib3.make_headers(basic_auth="root:top") if path.startswith("/v2") else None
    answer = urllib3.request(method, f"http://{server.endpoint}{path}", json=body, headers=headers)
    assert answer.status < 300, answer.data


def with_users(server: EtcdServer, api: str) -> None:
    """`root` and `job`, who may use our folder only; nobody else may anything."""
    if api == "v2":
        ask(server, "PUT", "/v2/auth/users/root", user="root", password="top")
        ask(server, "PUT", "/v2/auth/enable")
        kv = {"read": ["/*"], "write": ["/*"]}
        ask(server, "PUT", "/v2/auth/roles/guest", role="guest", revoke={"kv": kv})
        kv = {"read": ["/tenplexrun*"], "write": ["/tenplexrun*"]}
        ask(server, "PUT", "/v2/auth/roles/ours", role="ours", permissions={"kv": kv})
        ask(server, "PUT", "/v2/auth/users/job", user="job", password="pw:/ü", roles=["ours"])
        return
    for name, password in (("root", "top"), ("job", "pw:/ü")):
        ask(server, "POST", "/v3/auth/user/add", name=name, password=password)
        ask(server, "POST", "/v3/auth/role/add", name=name)
        ask(server, "POST", "/v3/auth/user/grant", user=name, role=name)
    ours = {"permType": "READWRITE", "key": "L3RlbnBsZXhydW4v", "range_end": "L3RlbnBsZXhydW4w"}
    ask(server, "POST", "/v3/auth/role/grant", name="job", perm=ours)
    ask(server, "POST", "/v3/auth/enable")


def test_user_and_password(own_etcd: EtcdServer, api: str) -> None:
    with_users(own_etcd, api)
    access = Access(user="job", password="pw:/ü")
    asyncio.run(asyncio.wait_for(exercise(api, [own_etcd.endpoint], access), 90))
    asyncio.run(refused(api, own_etcd, Access(user="job", password="wrong"), "user name, password"))
    asyncio.run(refused(api, own_etcd, PLAIN, "user name, password"))
    assert asyncio.run(served_api([own_etcd.endpoint])) == api


@pytest.mark.parametrize("api", ["v3"])
def test_a_login_that_the_server_has_forgotten_is_renewed(own_etcd: EtcdServer, api: str) -> None:
    """It lives in the server's memory, and for five minutes. v2 asks for the password each time."""
    with_users(own_etcd, api)

    async def test() -> None:
        client = adapter(api)([own_etcd.endpoint], Access(user="job", password="pw:/ü"))
        lease = await client.hold("members/n", "me", 12)
        watch = client.watch("w")
        await anext(watch)
        own_etcd.kill()
        own_etcd.start()
        await client.put("w/k", "v")
        await until(watch, {"w/k": "v"})
        await asyncio.sleep(4.5)
        assert not lease.lost.is_set()
        await lease.release()
        await client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


# --- which API ----------------------------------------------------------------------------------------------------


def test_which_api_is_served(own_etcd: EtcdServer, api: str) -> None:
    assert asyncio.run(served_api([own_etcd.endpoint])) == api
    assert asyncio.run(served_api(["127.0.0.1:1", own_etcd.endpoint])) == api
    assert asyncio.run(served_api(["127.0.0.1:1"])) is None


def test_v2_only_where_all_serve_it(over_tls: EtcdServer, files: Path) -> None:
    """Two nodes that reach different servers would otherwise never meet."""
    tls = ["--client-cert-auth", f"--trusted-ca-file={files}/ca.pem"]
    tls += [f"--cert-file={files}/server.pem", f"--key-file={files}/server.key"]
    with scratch() as directory:
        server = EtcdServer(directory, v2=False, flags=tls, scheme="https")
        server.start()
        try:
            assert asyncio.run(served_api([over_tls.endpoint, server.endpoint], access(files))) == "v3"
        finally:
            server.kill()


@pytest.mark.parametrize("api", ["v3"])
def test_v2_that_is_asked_for_and_off(own_etcd: EtcdServer, api: str) -> None:
    asyncio.run(refused("v2", own_etcd, PLAIN, "does not serve the v2 API; use --rdzv-backend etcd-v3"))
