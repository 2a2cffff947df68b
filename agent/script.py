"""Runs the user's program in this (forked) process as a fresh interpreter would: as the real `__main__`, from its
first line, with none of our frames in its tracebacks, and to the same end."""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import threading
import types
import zipfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Literal, NoReturn

from tenplexrun.agent import error_file
from tenplexrun.errors import TenplexError


@dataclass(frozen=True, slots=True)
class Command:
    """What a worker runs: `argv[0]` is a script (or a directory or zip file with a `__main__.py`), a module's name
    (-m) or a program (--no-python); `cwd` the directory it runs in."""

    kind: Literal["script", "module", "program"]
    argv: tuple[str, ...]
    cwd: str


def run(command: Command) -> NoReturn:
    """Run the program to its end, and end this process as the interpreter would."""
    before = frozenset(sys.modules)
    runner = {"script": _run_script, "module": _run_module, "program": _run_program}[command.kind]
    try:
        code = runner(list(command.argv))
    except SystemExit as end:
        code = _exit_code(end.code)
    _leave(code, before)


def fresh_interpreter(command: Command) -> Command:
    """The same, in an interpreter of its own."""
    if command.kind == "program":
        return command
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    argv = (sys.executable, *flags, "-u", *(("-m",) if command.kind == "module" else ()), *command.argv)
    return Command("program", argv, command.cwd)


def _run_script(argv: list[str]) -> int:
    path = argv[0]
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, "-u", *argv]
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _fresh_main()
        sys.path.insert(0, os.path.abspath(path))
        return _report(_run_module_as_main, "__main__", False)
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        print(f"tenplexrun: can't open the script {path!r}: {error.strerror}", file=sys.stderr)
        return 2
    _prepend_to_path(os.path.dirname(os.path.realpath(path)))
    return _report(_execute, source, os.path.abspath(path))


def _execute(source: bytes, path: str) -> None:
    code = pkgutil.read_code(io.BytesIO(source)) or compile(source, path, "exec", dont_inherit=True)
    main = _fresh_main()
    main["__file__"], main["__cached__"] = path, None
    main["__loader__"] = SourceFileLoader("__main__", path)
    exec(code, main)


def _run_module(argv: list[str]) -> int:
    _fresh_main()
    sys.argv[:] = ["-m", *argv[1:]]
    sys.orig_argv[:] = [sys.executable, "-u", "-m", *argv]
    _prepend_to_path(os.getcwd())
    return _report(_run_module_as_main, argv[0], True)


def _run_program(argv: list[str]) -> int:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and exec would keep that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"tenplexrun: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


# What `python -m` and `python DIRECTORY` call in C: it executes in the namespace of sys.modules["__main__"].
_run_module_as_main: Callable[[str, bool], None] = runpy._run_module_as_main  # type: ignore[attr-defined]


def _fresh_main() -> dict[str, object]:
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    return main.__dict__


def _prepend_to_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, directory)


def _report(function: Callable[..., None], *args: object) -> int:
    """Call it and return the exit code it comes to (-SIGINT for an uncaught KeyboardInterrupt). Shows an uncaught
    exception as the interpreter does."""
    try:
        function(*args)
        return 0
    except SystemExit:
        raise
    except TenplexError as error:  # of our own interface: its one line says what to do, a traceback would bury it
        print(f"tenplexrun: {error}", file=sys.stderr)
        error_file.leave(error, os.environ)
        return error.exit_code
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def _exit_code(value: object) -> int:
    """What `sys.exit(value)` means."""
    if value is None or isinstance(value, int):
        return (value or 0) & 0xFF
    print(value, file=sys.stderr)
    return 1


def _leave(code: int, before: Collection[str]) -> NoReturn:
    """What the interpreter does at its end, in its order, but for the modules that the pool had imported `before`:
    to tear those down would copy all their pages, and take longer than a whole restart."""
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]
        try:
            step()
        except BaseException:  # an interrupt, for example: shown, and on to the end
            sys.excepthook(*sys.exc_info())
    flushed = _flush()
    threading.excepthook = lambda _: None  # daemon threads end in the middle of things, and do not say so
    own = {name for name in sys.modules if name not in before or name == "__main__"}
    for name in own:
        del sys.modules[name]
    gc.collect()  # closes files, runs __del__
    for namespace in gc.get_objects():  # of modules that something still holds
        if type(namespace) is dict and "__builtins__" in namespace and str(namespace.get("__name__")) in own:
            namespace.update(dict.fromkeys(name for name in [*namespace] if not name.startswith("__")))
    gc.collect()
    if not (_flush() and flushed) and code == 0:
        code = 120  # as the interpreter
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _flush() -> bool:
    done = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except Exception:
            done = False
    return done


def substitute_local_rank(argv: Sequence[str], local_rank: int) -> list[str]:
    """torchrun's one documented macro, and nothing else: `${local_rank}` in an argument."""
    return [argument.replace("${local_rank}", str(local_rank)) for argument in argv]
