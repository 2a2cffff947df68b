"""Numbers for Prometheus, in its text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from tenplexrun.core.rounds import Round

Metric = tuple[str, Literal["counter", "gauge"], str, float | None]
"""Name, kind, what it is, and its value; None while that is not known."""


def exposition(prefix: str, metrics: Iterable[Metric]) -> str:
    """Raises nothing: what is not known is left out."""
    return "".join(
        f"# HELP {prefix}_{name} {what}\n# TYPE {prefix}_{name} {kind}\n{prefix}_{name} {value}\n"
        for name, kind, what, value in metrics
        if value is not None
    )


def of_round(round_: Round, progress: Mapping[str, Any]) -> str:
    """What an agent knows of its job. `progress`: "step", "sealed", "committed", None or negative if there is none."""

    def step(name: str) -> int | None:
        found = progress.get(name)
        return found if found is not None and found >= 0 else None

    return exposition(
        "tenplex",
        [
            ("round", "gauge", "Number of the round that runs.", round_.number),
            ("nodes", "gauge", "Nodes that take part in it.", len(round_.participants)),
            ("workers", "gauge", "Workers of these nodes.", len(round_.rank_nodes())),
            ("spares", "gauge", "Nodes that wait to be taken in.", len(round_.spares)),
            ("failures_total", "counter", "Rounds of this run that a failure has ended.", round_.failures),
            ("churn_total", "counter", "How often nodes have come or gone.", round_.churn),
            ("step", "gauge", "The newest step begun on this node.", step("step")),
            ("sealed_step", "gauge", "Step of the newest snapshot that is whole on this node.", step("sealed")),
            ("committed_step", "gauge", "Step of the newest snapshot that is on enough nodes.", step("committed")),
            ("checkpoint_step", "gauge", "Step of the newest durable checkpoint.", round_.saved),
        ],
    )


def of_datasets(records: Collection[Mapping[str, Any]]) -> str:
    """What this node keeps of datasets, all together; "" where it keeps none. `records`: `vfs.extents.Keeper`'s."""

    def total(name: str) -> int:
        return sum(record[name] for record in records)

    if not records:
        return ""
    return exposition(
        "tenplex_extents",
        [
            ("owned", "gauge", "Extents of datasets that this node owns.", total("owned")),
            ("unowned", "gauge", "Extents of datasets that fit into no node.", total("unowned")),
            ("wanted_bytes", "gauge", "Bytes of datasets that this node is to keep.", total("wanted_bytes")),
            ("here_bytes", "gauge", "Bytes of these that are here.", total("here_bytes")),
            ("budget_bytes", "gauge", "Bytes that they may have.", max(record["budget"] for record in records)),
        ],
    )
