"""The little that differs between devices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


def pick(local_rank: int) -> torch.device:
    """The device of this process: its own GPU where there are any, else the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backend(device: torch.device) -> str:
    """The process group's backend."""
    return "nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """Return when all that was queued on the device has been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """A tensor's elements as bytes in row-major order: its own memory where it is dense on the CPU, else a copy."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def tensor_of(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `bytes_of`, over the same memory. `dtype`: torch's name without "torch."."""
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's generators by device type; uint8 tensors [bytes]."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
