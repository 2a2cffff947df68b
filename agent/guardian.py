"""The guardian: one small process between the agent and everything else on its node.

It starts every other process of the node, and outlives the agent just long enough to leave nothing behind: however
the agent ends (kill -9 too), the guardian kills all descendants, setsid'ed and double-forked ones included (it is
their reaper: PR_SET_CHILD_SUBREAPER), unmounts, removes the node directory and deletes the member key.

Runs as `python -I -S guardian.py CONTROL_FD AGENT_PIDFD NODE_DIR`: standard library only, no site, so that it is up in
milliseconds and nothing a user installs can break it. One JSON object a packet over an inherited AF_UNIX
SOCK_SEQPACKET socket, descriptors beside it (SCM_RIGHTS):

    agent -> guardian  {"id", "op": "spawn", "name", "argv", "env": {name: value|null}, "cwd", "targets": [fd, ...]}
                       {"op": "kill", "pid", "signum"}   {"op": "cleanup", "removals", "mounts"}   {"op": "end"}
    guardian -> agent  {"re", "ok": {"pid"}} or {"re", "error": {"kind", "message"}}
                       {"op": "exit", "pid", "name", "code"}       (code as in `subprocess`: -N is signal N)

`env` is what differs from the agent's own environment; null removes. `targets` are the numbers that the descriptors
sent along get in the new process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow, and seldom needed
    import http.client

Record = dict[str, Any]

INLINE_BYTES = 32 << 10  # larger packets travel in a memfd: a socket buffer holds 200 KiB only
MAX_FDS = 250
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
MNT_DETACH = 2
KILL_DEADLINE_S = 10.0  # a process in uninterruptible sleep must not keep the rest from being cleaned up
CLEAN_UP_S = 4.0  # for those who remove what the killed have left in shared memory: torch's waits 2 s first
HTTP_TIMEOUT_S = 0.5
STRAY_POLL_MS = 20
IDLE_POLL_MS = 1000
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

libc = ctypes.CDLL(None, use_errno=True)


def send_packet(sock: socket.socket, record: Record, fds: Sequence[int] = ()) -> None:
    """Send one packet. Raises OSError (BlockingIOError on a full non-blocking socket)."""
    body = json.dumps(record, separators=(",", ":")).encode()
    if len(body) <= INLINE_BYTES:
        socket.send_fds(sock, [body], list(fds)) if fds else sock.send(body)
        return
    memory = os.memfd_create("tenplexrun")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(body)
        socket.send_fds(sock, [b"@"], [memory, *fds])
    finally:
        os.close(memory)


def receive_packet(sock: socket.socket) -> tuple[Record, list[int]] | None:
    """The next packet and its descriptors (close-on-exec), or None when the other end is gone."""
    try:
        body, fds, _, _ = socket.recv_fds(sock, INLINE_BYTES + 1, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None
    if not body:
        return None
    if body == b"@":
        memory = fds.pop(0)
        body = os.pread(memory, os.fstat(memory).st_size, 0)
        os.close(memory)
    return json.loads(body), fds


def become_subreaper() -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the parent's forking thread ends; at once if that has happened already."""
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def own_children() -> set[int]:
    """Direct children, living or dead but not reaped. (/proc/*/children is not in every kernel.)"""
    me, found = os.getpid(), set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == me:
                    found.add(int(name))
    return found


def cleans_up(pid: int) -> bool:
    """Whether it is multiprocessing's resource tracker or torch's manager of shared memory: they remove what killed
    processes have left there, and end when the last of those has gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command
    return False


def kill_children(spare: Collection[int] = (), deadline_s: float = KILL_DEADLINE_S) -> bool:
    """SIGKILL and reap the children of this subreaper, and those that come to it as their parents die.

    Returns whether none but `spare` is left; False after the deadline (a process in uninterruptible sleep).
    """
    begin, pause = time.monotonic(), 0.0005
    while found := own_children().difference(spare):
        patient = time.monotonic() < begin + CLEAN_UP_S
        for pid in found:
            if not (patient and cleans_up(pid)):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        for pid in found:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > begin + deadline_s:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True


def mounts_below(directory: str) -> list[str]:
    """Mount points at or below a directory, deepest first; stacked ones as often as they are stacked."""
    found = []
    with open("/proc/self/mounts", "rb") as file:
        for line in file:
            point = line.split()[1].decode("unicode_escape").encode("latin-1").decode(errors="surrogateescape")
            if point == directory or point.startswith(directory + "/"):
                found.append(point)
    return sorted(found, reverse=True)


def unmount(point: str) -> bool:
    """Detach a mount at once, even a dead or busy one. Without CAP_SYS_ADMIN through fusermount3."""
    if libc.umount2(os.fsencode(point), MNT_DETACH) == 0:
        return True
    with contextlib.suppress(OSError):
        return os.spawnlp(os.P_WAIT, "fusermount3", "fusermount3", "-u", "-z", "-q", "--", point) == 0
    return False


def remove_node_dir(directory: str) -> None:
    """Unmount all below a node directory, then remove it; never reaches into something still mounted."""
    import shutil

    for point in mounts_below(directory):
        unmount(point)
    if not mounts_below(directory):
        shutil.rmtree(directory, ignore_errors=True)


def remove_key(removals: Sequence[Record]) -> bool:
    """Plain HTTP requests at the first of the etcd servers that answers.

    A removal: {"url": "https://host:port", "tls": {"ca_cert", "cert", "key"} (paths or null), "requests":
    [[method, path, headers, body], ...]}; a "token" in an answer (of a login) is sent along with the next request.
    """
    import http.client

    for removal in removals:
        try:
            connection = _connection(removal["url"], removal["tls"])
            token: dict[str, str] = {}
            for method, path, headers, body in removal["requests"]:
                connection.request(method, path, body, {**headers, **token})
                answer = connection.getresponse().read()
                if b'"token"' in answer:
                    token = {"Authorization": json.loads(answer)["token"]}
            return True
        except (OSError, ValueError, http.client.HTTPException):
            continue
    return False


def _connection(url: str, tls: Mapping[str, str | None]) -> http.client.HTTPConnection:
    import http.client
    import ssl
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "http":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HTTP_TIMEOUT_S)
    context = ssl.create_default_context(cafile=tls["ca_cert"])
    if tls["cert"] is not None:
        context.load_cert_chain(tls["cert"], tls["key"])
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=HTTP_TIMEOUT_S, context=context)


class Guardian:
    """The process's state. `run` returns when the agent has ended and nothing is left."""

    def __init__(self, control: socket.socket, agent_pidfd: int, node_dir: str) -> None:
        self._control, self._agent, self._node_dir = control, agent_pidfd, node_dir
        self._names: dict[int, str] = {}  # by pid, of the processes the agent asked for
        self._pidfds: dict[int, int] = {}  # by pid
        self._removals: list[Record] = []
        self._mounts: list[str] = []
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(agent_pidfd, select.POLLIN)

    def run(self) -> None:
        timeout_ms = IDLE_POLL_MS
        while True:
            ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
            lost_one = self._harvest()
            # What an ended process leaves behind belongs to us now; stray children are nobody's.
            strays = (lost_one or timeout_ms == STRAY_POLL_MS) and self._kill_strays()
            timeout_ms = STRAY_POLL_MS if strays else IDLE_POLL_MS
            if self._agent in ready or (self._control.fileno() in ready and not self._obey()):
                break
        kill_children()
        self._clean_up()

    def _obey(self) -> bool:
        packet = receive_packet(self._control)
        if packet is None or packet[0]["op"] == "end":
            return False
        record, fds = packet
        try:
            if record["op"] == "spawn":
                self._spawn(record, fds)
            elif record["op"] == "kill" and record["pid"] in self._names:  # not reaped: the number is still its own
                with contextlib.suppress(OSError):
                    os.kill(record["pid"], record["signum"])
            elif record["op"] == "cleanup":
                self._removals, self._mounts = record["removals"], record["mounts"]
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _spawn(self, record: Record, fds: Sequence[int]) -> None:
        try:
            pid = start_process(
                record["argv"], record["env"], record["cwd"], dict(zip(record["targets"], fds, strict=True))
            )
            self._pidfds[pid] = os.pidfd_open(pid)
        except OSError as error:
            message = f"cannot start {record['argv'][0]}: {error.strerror}"
            self._tell({"re": record["id"], "error": {"kind": "ProcessError", "message": message}})
            return
        self._names[pid] = record["name"]
        self._poll.register(self._pidfds[pid], select.POLLIN)
        self._tell({"re": record["id"], "ok": {"pid": pid}})

    def _harvest(self) -> bool:
        lost_one = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return lost_one
            if pid == 0:
                return lost_one
            if pid in self._names:
                lost_one = True
                pidfd = self._pidfds.pop(pid)
                self._poll.unregister(pidfd)
                os.close(pidfd)
                code = os.waitstatus_to_exitcode(status)
                self._tell({"op": "exit", "pid": pid, "name": self._names.pop(pid), "code": code})

    def _kill_strays(self) -> bool:
        strays = {pid for pid in own_children().difference(self._names) if not cleans_up(pid)}
        for pid in strays:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return bool(strays)

    def _tell(self, record: Record) -> None:
        with contextlib.suppress(OSError):  # an agent that is gone is seen by its pidfd
            send_packet(self._control, record)

    def _clean_up(self) -> None:
        for point in self._mounts:
            unmount(point)
        remove_key(self._removals)
        remove_node_dir(self._node_dir)


def start_process(argv: Sequence[str], env: Mapping[str, str | None], cwd: str, fds: Mapping[int, int]) -> int:
    """fork and exec in a process group of its own. `fds`: target number -> descriptor here. Raises OSError."""
    told, tell = os.pipe2(os.O_CLOEXEC)
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(guardian)
            _exec(argv, env, cwd, fds)
        except OSError as error:
            os.write(tell, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(tell)
    try:
        failure = os.read(told, 16)
    finally:
        os.close(told)
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), os.strerror(int(failure)))
    return pid


def _exec(argv: Sequence[str], env: Mapping[str, str | None], cwd: str, fds: Mapping[int, int]) -> None:
    os.setpgid(0, 0)
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and exec would keep that
        signal.signal(signum, signal.SIG_DFL)
    above = max(fds, default=0) + 1  # out of the way of the targets first, then into place
    for target, fd in [(target, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)) for target, fd in fds.items()]:
        os.dup2(fd, target)
    os.chdir(cwd)
    environment = {**os.environ, **env}
    os.execvpe(argv[0], list(argv), {name: value for name, value in environment.items() if value is not None})


def main() -> None:
    control, agent_pidfd, node_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    for signum in DEAF_TO:
        # A handler, since what is ignored stays so over exec. Only SIGHUP may (nohup): the agent does hear the SIGINT
        # that a shell ignores for what it starts with `&`, and so its workers must.
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    become_subreaper()
    os.set_inheritable(control, False)
    os.set_inheritable(agent_pidfd, False)
    Guardian(socket.socket(fileno=control), agent_pidfd, node_dir).run()


if __name__ == "__main__":
    main()
