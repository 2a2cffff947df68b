"""Random streams, one for each mesh coordinate: the state of a coordinate goes on, whichever process runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from tenplexrun.core.layout import TensorSpec
from tenplexrun.core.parallel import AXES
from tenplexrun.worker import device


class Streams:
    """The global generators of the rank at `coord`, as state tensors `rng.<kind>.<coordinate>`.

    Kinds: cpu and cuda (torch's), python (`random`), numpy (`numpy.random`)."""

    def __init__(self, where: torch.device, coord: Mapping[str, int]) -> None:
        self._device, self._coord = where, dict(coord)
        self._label = ".".join(f"{axis}{coord[axis]}" for axis in AXES)

    def names(self) -> dict[str, str]:
        """Kind → fqn."""
        return {kind: f"rng.{kind}.{self._label}" for kind in device.rng_states(self._device)}

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(fqn, tuple(state.shape), "uint8", at=self._coord) for fqn, state in self.read().items()]

    def read(self) -> dict[str, torch.Tensor]:
        return {f"rng.{kind}.{self._label}": state for kind, state in device.rng_states(self._device).items()}

    def adopt(self, filled: Mapping[str, torch.Tensor]) -> None:
        device.set_rng_states(self._device, {kind: filled[fqn] for kind, fqn in self.names().items()})

    def derive(self, seed: int, step: int) -> int:
        """Start new streams for a coordinate that did not exist at `step`. Returns their seed."""
        derived = derived_seed(seed, step, self._label)
        device.seed_all(derived)
        return derived


def derived_seed(*parts: object) -> int:
    """A seed below 2**63 that depends on all of `parts`."""
    text = "/".join(map(str, ("tenplexrun", *parts)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
