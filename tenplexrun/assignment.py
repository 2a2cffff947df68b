"""The assignment problem, by the `lap` library (Jonker-Volgenant): what `core.placement` asks for."""

from __future__ import annotations

from collections.abc import Sequence

import lap
import numpy as np


def least_cost(costs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """For each row of a square matrix its column, all different, with the least sum. Costs below 2**52 are exact."""
    _, columns, _ = lap.lapjv(np.asarray(costs, dtype=np.float64))
    return tuple(int(column) for column in columns)
