"""Runs the user's program in this (forked) process as a fresh interpreter would: as the real `__main__`, from its
first line, with none of our frames in its tracebacks."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Literal

from tenplexrun.errors import TenplexError


@dataclass(frozen=True, slots=True)
class Command:
    """What a worker runs: `argv[0]` is a script (or a directory or zip file with a `__main__.py`), a module's name
    (-m) or a program (--no-python); `cwd` the directory it runs in."""

    kind: Literal["script", "module", "program"]
    argv: tuple[str, ...]
    cwd: str


def run(command: Command) -> None:
    """Run it to its end. Its SystemExit passes through; any other exception has been reported when it does."""
    runner = {"script": _run_script, "module": _run_module, "program": _run_program}[command.kind]
    runner(list(command.argv))


def fresh_interpreter(command: Command) -> Command:
    """The same, in an interpreter of its own."""
    if command.kind == "program":
        return command
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    argv = (sys.executable, *flags, "-u", *(("-m",) if command.kind == "module" else ()), *command.argv)
    return Command("program", argv, command.cwd)


def _run_script(argv: list[str]) -> None:
    path = argv[0]
    sys.argv[:] = argv
    sys.orig_argv[:] = [sys.executable, "-u", *argv]
    if os.path.isdir(path) or zipfile.is_zipfile(path):
        _fresh_main()
        sys.path.insert(0, os.path.abspath(path))
        _report(_run_module_as_main, "__main__", False)
        return
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        print(f"tenplexrun: can't open the script {path!r}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    _prepend_to_path(os.path.dirname(os.path.realpath(path)))
    _report(_execute, source, os.path.abspath(path))


def _execute(source: bytes, path: str) -> None:
    code = pkgutil.read_code(io.BytesIO(source)) or compile(source, path, "exec", dont_inherit=True)  # type: ignore[attr-defined]
    main = _fresh_main()
    main["__file__"], main["__cached__"] = path, None
    main["__loader__"] = SourceFileLoader("__main__", path)
    exec(code, main)


def _run_module(argv: list[str]) -> None:
    _fresh_main()
    sys.argv[:] = ["-m", *argv[1:]]
    sys.orig_argv[:] = [sys.executable, "-u", "-m", *argv]
    _prepend_to_path(os.getcwd())
    _report(_run_module_as_main, argv[0], True)


def _run_program(argv: list[str]) -> None:
    for signum in (signal.SIGPIPE, signal.SIGXFSZ):  # the interpreter ignores them, and exec would keep that
        signal.signal(signum, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, os.environ)
    except OSError as error:
        print(f"tenplexrun: cannot run {argv[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


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


def _report(function: Callable[..., None], *args: object) -> None:
    """Call it; show an uncaught exception as the interpreter does, and let it end the process as it would."""
    try:
        function(*args)
    except SystemExit:
        raise
    except TenplexError as error:  # of our own interface: its one line says what to do, a traceback would bury it
        print(f"tenplexrun: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BaseException as error:
        traceback = error.__traceback__
        while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
            traceback = traceback.tb_next
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.excepthook = lambda *_: None  # shown; what follows (threads, atexit, the exit code) is the interpreter's
        raise


def substitute_local_rank(argv: Sequence[str], local_rank: int) -> list[str]:
    """torchrun's one documented macro, and nothing else: `${local_rank}` in an argument."""
    return [argument.replace("${local_rank}", str(local_rank)) for argument in argv]
