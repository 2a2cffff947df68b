"""A TCP proxy on the way between two stores, which damages what passes."""

from __future__ import annotations

import contextlib
import socket
import threading

from tenplexrun.channel import split_host_port


class FlippingProxy:
    """Passes everything on, at `address`. The next `flips` answers that are long enough have one bit of their byte
    `position` flipped; the requests, if it is negative: of their byte -1 - position."""

    def __init__(self, address: str) -> None:
        self._target = split_host_port(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.flips, self.position = 0, 0
        self.flipped = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for ends in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, asks: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                place = (-1 - self.position if asks else self.position) - passed
                if (self.position < 0) == asks and 0 <= place < len(data):
                    with self._lock:
                        flip = self.flipped < self.flips
                        self.flipped += flip
                    data[place] ^= 16 * flip
                passed += len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
