"""The little that differs between devices."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import torch

from tenplexrun.errors import UsageError

Bytes = npt.NDArray[np.uint8]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that carry an element's bits, by size: torch has types that numpy lacks."""


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
    return flat(tensor.cpu()).numpy()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as uint8 [bytes] in row-major order, on its own device; a copy only where it is not dense."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copy(dest: torch.Tensor, source: torch.Tensor) -> None:
    """`dest.copy_(source)` of one type. On the CPU by numpy, whose copies take about half of torch's processor time."""
    bits = _BITS.get(dest.element_size())
    if dest.device.type == source.device.type == "cpu" and bits is not None:
        np.copyto(dest.detach().view(bits).numpy(), source.detach().view(bits).numpy())
    else:
        dest.detach().copy_(source)


def tensor_of(data: Bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The inverse of `bytes_of`, over the same memory. `dtype`: torch's name without "torch."."""
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rng_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the global generators of torch, by device type, Python and numpy; uint8 tensors [bytes]."""
    states = {"cpu": torch.get_rng_state(), "python": _python_state(), "numpy": _numpy_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rng_states(device: torch.device, states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    words, (gauss,) = states["python"].numpy()[:-9], states["python"].numpy()[-8:].view(np.float64)
    kept = float(gauss) if states["python"][-9] else None
    random.setstate((3, tuple(words.view(np.uint32).tolist()), kept))
    keys, position, has_gauss, cached = np.split(states["numpy"].numpy(), (-16, -12, -8))
    np.random.set_state(
        (
            "MT19937",
            keys.view(np.uint32),
            int(position.view(np.uint32)[0]),
            int(has_gauss.view(np.uint32)[0]),
            float(cached.view(np.float64)[0]),
        )
    )
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_all(seed: int) -> None:
    """Start the global generators of torch, Python and numpy from `seed`, a whole number below 2**63."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(np.array([seed & 0xFFFFFFFF, seed >> 32]))


def _python_state() -> torch.Tensor:
    """[words and position uint32, whether half of a pair of Gaussians is kept uint8, that one float64]."""
    _, words, kept = random.getstate()
    gauss = np.array([kept or 0.0]).tobytes()
    return _bytes(np.array(words, dtype=np.uint32).tobytes() + bytes([kept is not None]) + gauss)


def _numpy_state() -> torch.Tensor:
    """[words uint32, position uint32, whether a Gaussian is kept uint32, that one float64].

    Raises UsageError where numpy's global generator is not the one it comes with."""
    name, words, position, has_gauss, cached = np.random.get_state()
    if name != "MT19937":
        raise UsageError(
            f"numpy's global generator is {name}: only its own MT19937 is kept over rounds; use a Generator"
        )
    counts = np.array([position, has_gauss], dtype=np.uint32).tobytes()
    return _bytes(np.asarray(words, dtype=np.uint32).tobytes() + counts + np.array([cached]).tobytes())


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
