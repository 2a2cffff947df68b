"""Files mapped end to end, so that numpy gathers from all of them as from one array."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

_MAP_FIXED = 0x10  # Linux; the module mmap has no way to say where
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


class EndToEnd:
    """`num_bytes` of reserved addresses, which files take piece by piece; `data` [num_bytes] uint8 is all of them.

    What no file has been put at must not be touched (SIGSEGV). Raises OSError where so many cannot be reserved.
    """

    def __init__(self, num_bytes: int) -> None:
        reserved = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        self.data: npt.NDArray[np.uint8] = np.frombuffer(reserved, dtype=np.uint8)

    def put(self, path: str, offset: int, num_bytes: int) -> None:
        """Map the first `num_bytes` of a file at `offset`, a multiple of the page size.

        Raises OSError, ValueError for a file that is shorter.
        """
        file = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(file).st_size < num_bytes:
                raise ValueError(f"it has not the {num_bytes} bytes that it should have")
            place = self.data.ctypes.data + offset
            if _libc.mmap(place, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != place:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(file)

    def clear(self, offset: int, num_bytes: int) -> None:
        """Take away what was put at `offset`. Raises OSError."""
        place, flags = self.data.ctypes.data + offset, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _libc.mmap(place, num_bytes, 0, flags, -1, 0) != place:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
