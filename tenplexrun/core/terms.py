"""What the nodes of a job have to have in common: their flags, as each was started with them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

BINDING = frozenset(
    {
        *("--pp", "--cp", "--ep", "--tp", "--etp", "--dp-shard", "--mesh-order", "--tls-ca"),
        *("--snapshot-every", "--state-files", "--checkpoint-dir", "--checkpoint-from"),
        *("--global-batch", "--micro-batch", "--data-seed", "--view-window"),
    }
)
"""With others than the job's a node would wait for what never comes, or compute something else. The rest may differ: of
some the node that decides has the say, others are each node's own."""
NONE = "none"


class Difference(NamedTuple):
    """What the job has, and what this node."""

    name: str
    job: str
    here: str

    def __str__(self) -> str:
        return f"{self.name} is {self.here} here, {self.job} there"


def differences(job: Mapping[str, str], here: Mapping[str, str]) -> tuple[list[Difference], list[Difference]]:
    """Those that cannot be, and those that merely are. A name that one side lacks is `NONE` there."""
    found = [Difference(name, job.get(name, NONE), here.get(name, NONE)) for name in sorted({*job, *here})]
    unlike = [one for one in found if one.job != one.here]
    return [one for one in unlike if one.name in BINDING], [one for one in unlike if one.name not in BINDING]
