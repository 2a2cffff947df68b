"""Hosts that are really apart, on one machine: each a network namespace with its own loopback, address and /dev/shm.

All hang on one router, so that a cable can be pulled and one direction between two hosts be made to drop packets
silently. Needs root.
"""

from __future__ import annotations

import os
import subprocess

PRIVATE = 'mount -t tmpfs tmpfs /dev/shm && { mount --bind /dev/null /etc/resolv.conf || :; } 2>/dev/null && exec "$@"'
"""No name server: one that cannot be reached from there would be waited for, for 5 s, at each connection of gloo's."""


def missing() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"tpx{os.getpid()}-probe"
    try:
        subprocess.run(["ip", "netns", "add", probe], check=True, capture_output=True, text=True)
    except FileNotFoundError:
        return "the ip command is missing (package iproute2)"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


class Hosts:
    """A network; `add` makes a host and returns its address, `enter` the words before a command that runs there."""

    def __init__(self) -> None:
        self._prefix = f"tpx{os.getpid()}"
        self._router = f"{self._prefix}-router"
        self._names: dict[str, int] = {}

    def __enter__(self) -> Hosts:
        _ip("netns", "add", self._router)
        _ip("-n", self._router, "link", "set", "lo", "up")
        self._run(self._router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in [*map(self._namespace, self._names), self._router]:
            _ip("netns", "del", namespace)

    def add(self, name: str) -> str:
        index = self._names[name] = len(self._names) + 1
        namespace, cable, subnet = self._namespace(name), f"to{index}", f"10.77.{index}"
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self._router, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._router, "addr", "add", f"{subnet}.1/24", "dev", cable)
        _ip("-n", self._router, "link", "set", cable, "up")
        _ip("-n", namespace, "addr", "add", f"{subnet}.2/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{subnet}.1")
        return self.address(name)

    def address(self, name: str) -> str:
        return f"10.77.{self._names[name]}.2"

    def enter(self, name: str) -> list[str]:
        return ["ip", "netns", "exec", self._namespace(name), "unshare", "-m", "sh", "-c", PRIVATE, "sh"]

    def limit(self, name: str, mbit: int) -> None:
        """Rate of what the host sends and of what it is sent, Mbit/s each."""
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
        for namespace, device in ((self._namespace(name), "eth0"), (self._router, f"to{self._names[name]}")):
            self._run(namespace, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def unplug(self, name: str) -> None:
        """Pull the cable: nothing is refused or reset, there is silence."""
        _ip("-n", self._router, "link", "set", f"to{self._names[name]}", "down")

    def plug(self, name: str) -> None:
        _ip("-n", self._router, "link", "set", f"to{self._names[name]}", "up")

    def block(self, source: str, target: str) -> None:
        """What `source` sends to `target` is lost from now on; the other direction still works."""
        self._rule("add", source, target)

    def unblock(self, source: str, target: str) -> None:
        self._rule("del", source, target)

    def _rule(self, action: str, source: str, target: str) -> None:
        _ip("-n", self._router, "rule", action, "from", self.address(source), "to", self.address(target), "blackhole")

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    @staticmethod
    def _run(namespace: str, *argv: str) -> None:
        subprocess.run(["ip", "netns", "exec", namespace, *argv], check=True, capture_output=True)
