"""The one exception tree. Every message says what happened and what to do next.

    TenplexError                exit  what
    ├── UsageError                 2  a flag, script or variable that cannot be right
    ├── LayoutError               64  a layout that cannot be: sizes, names, coverage
    │   └── StateLostError        65  regions of the state have no living copy
    ├── StoreError                66  the tensor store refused or failed
    │   ├── ArenaFullError        67  shared memory does not hold what is asked
    │   └── WireError             68  a peer spoke nonsense, or went away in mid-stream
    │       └── PeerLostError     68  it cannot be reached, or stalls: it may come back
    ├── DataError                 69  the dataset, its order or its view
    │   ├── DataChangedError       69  its files are not what they were: no restart would mend that
    │   └── DataModifiedError      69  a file was written to: whether it is what it was is to be looked at
    ├── CoordinationError         70  etcd unreachable or refusing
    │   ├── CompareFailedError    70  a compare-and-swap was lost
    │   └── RunGoneError          70  the run has ended, or was started anew, without this node
    ├── RendezvousTimeoutError    71  too few nodes came in time
    ├── QuorumLostError           72  too few nodes are left
    ├── ProcessError              73  a process of ours could not be started or has died
    ├── WorkerHungError           74  a worker hangs
    ├── CheckpointError           75  a durable checkpoint cannot be read or written
    └── ReplicasDifferError       76  replicas that should be equal are not, and --replica-check is strict

Exit codes of the launcher: 0; the first failing worker's own code; 128 + N for signal N; the codes above.
"""

from __future__ import annotations


class TenplexError(Exception):
    """Base of all errors of this project. `exit_code` is what the launcher exits with."""

    exit_code = 1


class UsageError(TenplexError):
    exit_code = 2


class LayoutError(TenplexError):
    exit_code = 64


class StateLostError(LayoutError):
    exit_code = 65


class StoreError(TenplexError):
    exit_code = 66


class ArenaFullError(StoreError):
    exit_code = 67


class WireError(StoreError):
    exit_code = 68


class PeerLostError(WireError):
    """The peer is away or silent, for all we know: asked again later it may well answer."""


class DataError(TenplexError):
    exit_code = 69


class DataChangedError(DataError):
    """A file of the dataset has gone, or is not what it was when the job began: it would not be later, either."""


class DataModifiedError(DataError):
    """A file of the dataset was written to, or another one put in its place, since it was listed."""


class CoordinationError(TenplexError):
    exit_code = 70


class CompareFailedError(CoordinationError):
    """The key's token was not the expected one: somebody else wrote first."""


class RunGoneError(CoordinationError):
    """This node's run is no longer there to come back to."""


class RendezvousTimeoutError(TenplexError):
    exit_code = 71


class QuorumLostError(TenplexError):
    exit_code = 72


class ProcessError(TenplexError):
    exit_code = 73


class WorkerHungError(TenplexError):
    exit_code = 74


class CheckpointError(TenplexError):
    exit_code = 75


class ReplicasDifferError(TenplexError):
    exit_code = 76


def _tree(root: type[TenplexError]) -> dict[str, type[TenplexError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


_KINDS = _tree(TenplexError)


def to_wire(error: BaseException) -> dict[str, str]:
    """`{"kind", "message"}` of an error, to send it to another process."""
    kind = type(error).__name__
    if kind in _KINDS:
        return {"kind": kind, "message": str(error)}
    return {"kind": "TenplexError", "message": f"{kind}: {error}"}


def from_wire(record: object) -> TenplexError:
    """The error that `to_wire` described; unknown kinds become plain `TenplexError`s."""
    if not isinstance(record, dict):
        return TenplexError(f"malformed error record: {record!r}")
    return _KINDS.get(str(record.get("kind")), TenplexError)(str(record.get("message", "no message")))
