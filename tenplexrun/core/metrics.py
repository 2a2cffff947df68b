"""Numbers for Prometheus, in its text format 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
