"""Whether a script asks for what a process that has torch imported already cannot give it any more.

Libraries read some variables when they are loaded. A script that sets one of them first (`os.environ["OMP_NUM_THREADS"]
= "4"` above `import torch`) means a fresh interpreter. It is read, not run: statements in their order, into modules of
the user's own that it imports and functions of theirs that it calls by name, up to the first import of somebody else's
that is not the standard library.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from tenplexrun.agent.script import Command

# Read at the import of torch, numpy and what they link, or of torch._dynamo and inductor. CUDA's and NCCL's are read
# when they are first used, which is never before the fork.
READ_AT_IMPORT = re.compile(
    r"(OMP|KMP|GOMP|MKL|OPENBLAS|GOTO|BLIS|VECLIB|NUMEXPR|ATEN|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|NPY|MALLOC)_.*"
    r"|LD_PRELOAD|LD_LIBRARY_PATH|TORCHINDUCTOR.*"
)
READ_LATE = re.compile(r"TORCH_NCCL_.*|TORCH_DISTRIBUTED_DEBUG|TORCH_CPP_LOG_LEVEL|PYTORCH_(CUDA_)?ALLOC_CONF")
MAX_FILES = 50


@dataclass(frozen=True, slots=True)
class Setting:
    """A statement that sets an environment variable; `value` is None where it is computed."""

    name: str
    value: str | None
    only_if_unset: bool
    file: str
    line: int


class _Stop(Exception):
    """The first import of a library: what is set after it is too late in any interpreter."""


def reason_for_cold_start(command: Command, env: Mapping[str, str]) -> str | None:
    """Why this program needs a fresh interpreter, in words; None if a warm one will do. `env`: of its workers."""
    for setting in settings_before_libraries(command):
        late = READ_LATE.fullmatch(setting.name) is not None
        if late or READ_AT_IMPORT.fullmatch(setting.name) is None:
            continue
        if setting.only_if_unset and setting.name in env:
            continue
        if setting.value is None or env.get(setting.name) != setting.value:
            where = f"{os.path.basename(setting.file)}, line {setting.line}"
            return f"the script sets {setting.name} before it imports what reads it ({where})"
    return None


def settings_before_libraries(command: Command) -> list[Setting]:
    """In the order of their execution. Files that cannot be read or parsed give none: the interpreter will tell."""
    found: list[Setting] = []
    try:
        if command.kind == "script":
            path = Path(command.cwd, command.argv[0])
            path = path / "__main__.py" if path.is_dir() else path
            _Reader(os.path.dirname(os.path.realpath(path)), found).read(str(path))
        elif command.kind == "module":
            _Reader(command.cwd, found).enter(command.argv[0], as_main=True)
    except _Stop:
        pass
    return found


class _Reader:
    """Walks statements. `folder` is the first of the script's sys.path."""

    def __init__(self, folder: str, found: list[Setting]) -> None:
        self._folder, self._found = folder, found
        self._read: set[str] = set()
        self._functions: dict[str, tuple[list[ast.stmt], str]] = {}  # not yet called; body and file by name

    def read(self, file: str) -> None:
        if file in self._read or len(self._read) >= MAX_FILES:
            return
        self._read.add(file)
        try:
            tree = ast.parse(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        self._functions.update(
            (statement.name, (statement.body, file))
            for statement in tree.body
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef))
        )
        self._follow(tree.body, file)

    def _follow(self, body: list[ast.stmt], file: str) -> None:
        for statement in _in_order(body):
            self._take(statement, file)
            for call in ast.walk(statement):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self._functions:
                    self._follow(*self._functions.pop(call.func.id))

    def enter(self, name: str, as_main: bool = False) -> None:
        """An import. Raises _Stop if it is a library's."""
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names:
            return
        path: list[str] | None = [self._folder]
        spec = None
        for part in name.split("."):
            spec = PathFinder.find_spec(part, path)
            if spec is None:
                break
            self._read_spec(spec.origin)
            path = list(spec.submodule_search_locations or [])
        if spec is None and path == [self._folder]:
            raise _Stop
        if as_main and spec is not None and spec.submodule_search_locations is not None:
            self.read(os.path.join(next(iter(spec.submodule_search_locations)), "__main__.py"))

    def _read_spec(self, origin: str | None) -> None:
        if origin is not None and origin.endswith(".py"):
            self.read(origin)

    def _take(self, statement: ast.stmt, file: str) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self.enter(alias.name)
        elif isinstance(statement, ast.ImportFrom):
            if statement.module and not statement.level:
                self.enter(statement.module)
        else:
            self._found += _settings(statement, file)


def _in_order(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module or function is executed, whatever the conditions."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        parts = [getattr(statement, name, []) for name in ("body", "handlers", "orelse", "finalbody")]
        if isinstance(statement, ast.If) and _is_type_checking(statement.test):
            parts = [[], [], statement.orelse, []]
        if not any(parts):
            yield statement
        for part in parts:
            for inner in part:
                yield from _in_order(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _settings(statement: ast.stmt, file: str) -> Iterator[Setting]:
    """`os.environ[N] = V`, `environ.setdefault(N, V)`, `environ.update({N: V}, N=V)`, `os.putenv(N, V)`."""
    line = statement.lineno
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                name = _text(target.slice)
                if name is not None:
                    yield Setting(name, _text(statement.value), False, file, line)
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return
    method = call.func.attr
    if method == "update" and _is_environ(call.func.value):
        for keyword in call.keywords:
            if keyword.arg is not None:
                yield Setting(keyword.arg, _text(keyword.value), False, file, line)
        for argument in call.args:
            if isinstance(argument, ast.Dict):
                for key, value in zip(argument.keys, argument.values, strict=True):
                    name = None if key is None else _text(key)
                    if name is not None:
                        yield Setting(name, _text(value), False, file, line)
    elif (method == "setdefault" and _is_environ(call.func.value)) or method == "putenv":
        name = _text(call.args[0]) if call.args else None
        if name is not None and len(call.args) == 2:
            yield Setting(name, _text(call.args[1]), method == "setdefault", file, line)


def _is_environ(expression: ast.expr) -> bool:
    return "environ" in (getattr(expression, "attr", ""), getattr(expression, "id", ""))


def _text(expression: ast.expr) -> str | None:
    return expression.value if isinstance(expression, ast.Constant) and isinstance(expression.value, str) else None
