"""Which of its APIs an etcd serves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import urllib3

from tenplexrun.agent.etcd import NO_TRUST, PLAIN, Access
from tenplexrun.errors import CoordinationError

PROBE_TIMEOUT_S = 2.0


async def served_api(endpoints: Sequence[str], access: Access = PLAIN) -> str | None:
    """ "v2" where all servers that answer serve it, else "v3"; None where none answers.

    The two do not see each other's keys, so all nodes of a job have to find the same. Raises CoordinationError if
    something else listens there, or there is no trust.
    """
    found = await asyncio.gather(*(asyncio.to_thread(_ask, endpoint, access) for endpoint in endpoints))
    apis = [api for api in found if api is not None]
    return min(apis, default=None) if all(api == "v2" for api in apis) else "v3"


def _ask(endpoint: str, access: Access) -> str | None:
    timeout = urllib3.Timeout(PROBE_TIMEOUT_S)
    with urllib3.connection_from_url(f"{access.scheme}://{endpoint}", timeout=timeout, **access.tls_options()) as http:
        try:
            version = http.urlopen("GET", "/version", retries=False)
            keys = http.urlopen("GET", "/v2/keys/tenplexrun", retries=False)
        except (urllib3.exceptions.SSLError, urllib3.exceptions.ProtocolError) as error:
            if access.tls and "ssl" in str(error).lower():
                raise CoordinationError(f"the etcd at {endpoint} {NO_TRUST}: {error}") from None
            if isinstance(error.args[-1], ConnectionError):
                return None
            raise _no_etcd(endpoint) from None
        except urllib3.exceptions.HTTPError:  # refused, no route, no such name, no answer in time
            return None
    if b"etcdserver" not in version.data:
        raise _no_etcd(endpoint)
    return "v2" if keys.data.startswith(b"{") else "v3"  # where it is off: "404 page not found"


def _no_etcd(endpoint: str) -> CoordinationError:
    return CoordinationError(f"what listens at {endpoint} is not an etcd; name another --rdzv-endpoint")
