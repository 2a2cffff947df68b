"""Workers forked from the warm pool run a program as a fresh interpreter does."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenplexrun.agent.script import Command
from tenplexrun.ports import WorkerExit, WorkerSpec

WORLD = """
import gc, inspect, json, logging, os, resource, signal, sys, threading, __main__
import helper, agent
print(json.dumps({
    "main": {name: repr(value) for name, value in vars(__main__).items() if name.startswith("__")},
    "is main": __main__.__dict__ is globals(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "env": dict(os.environ),
    "signals": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "fds": sorted(os.listdir("/proc/self/fd")),
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through, s.fileno(), s.mode]
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "flags": str(sys.flags), "gc": gc.isenabled(), "main thread": threading.current_thread() is threading.main_thread(),
    "threads": threading.active_count(), "umask": os.umask(0o22),
    "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
    "group": os.getpgid(0) == os.getpid() or "not the leader", "recursion": sys.getrecursionlimit(),
    "helper": helper.__file__, "agent": agent.__file__,
    "source": inspect.getsource(inspect.currentframe()).splitlines()[:2],
    "root handlers": logging.getLogger().handlers, "hook": sys.excepthook is sys.__excepthook__,
}))
"""


@pytest.mark.parametrize("kind", ["script", "symlink", "module", "package", "directory"])
def test_the_world_is_that_of_a_fresh_interpreter(kind: str, driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    for folder in ("sub", "pkg", "tenplexrun", "store", "torch.d"):
        (tmp_path / folder).mkdir()
    for name in ("sub/world.py", "world_module.py", "pkg/__main__.py"):
        (tmp_path / name).write_text(WORLD)
    for name in (
        "helper.py",
        "agent.py",
        "sub/helper.py",
        "sub/agent.py",
        "pkg/helper.py",
        "pkg/agent.py",
        "pkg/__init__.py",
    ):
        (tmp_path / name).touch()
    (tmp_path / "tenplexrun" / "__init__.py").write_text("raise ImportError('the wrong one')")
    (tmp_path / "link.py").symlink_to("sub/world.py")
    arguments = ["a", "--r=16", "$$", "", "x y", "*"]
    argv = {
        "script": "sub/world.py",
        "symlink": "link.py",
        "module": "world_module",
        "package": "pkg",
        "directory": "pkg",
    }[kind]
    is_module = kind in ("module", "package")
    expected = driver.fresh([*(["-m"] if is_module else []), argv, *arguments], tmp_path, env)
    command = Command("module" if is_module else "script", (argv, *arguments), str(tmp_path))
    [outcome] = driver.run(command, [env])
    assert outcome.err == expected.err == ""
    ours, theirs = (json.loads(re.sub(" at 0x[0-9a-f]+", "", each.out)) for each in (outcome, expected))
    theirs["group"] = True  # our workers lead a process group each
    assert ours == theirs


ENDINGS = {
    "zero": "print('done')",
    "code": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('went wrong')",
    "none": "raise SystemExit",
    "hard": "import os; os._exit(4)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "segv": "import ctypes; ctypes.string_at(0)",
    "raises": "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError:\n    raise ValueError('second')",
    "interrupt": "raise KeyboardInterrupt",
    "syntax": "x = 1\ny = = 2",
    "not utf-8": "x = '\udcff'",
    "cookie": "# -*- coding: latin-1 -*-\nprint(ascii('\udce9'))",
    "atexit": "import atexit; atexit.register(print, 'at exit'); print('first'); 1 / 0",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.2), print(2))).start(); print(1)",
    "thread raises": "import threading; t = threading.Thread(target=lambda: 1 / 0, name='t'); t.start(); t.join()",
    "buffered": "f = open('kept-' + str(len(__file__)), 'w'); f.write('text'); print('open')",
    "hook": "import sys; sys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno); 1 / 0",
    "hook exits": "import sys; sys.excepthook = lambda *a: sys.exit(9); 1 / 0",
    "stream": "import sys; sys.stdout.write('no newline'); sys.stderr.write('here neither')",
    "chained": "import helper",
    "stack": "import sys; sys.setrecursionlimit(100)\ndef f(): f()\ntry: f()\nexcept RecursionError as e: print(e)",
    "warning": "import warnings; warnings.warn('careful')",
    "signal": "import signal, os; signal.signal(15, lambda *a: print('handled')); os.kill(os.getpid(), 15)",
    "term": "import os; os.kill(os.getpid(), 15)",
    "unittest": "import unittest; unittest.main()",
    "deleted": "class A:\n    def __del__(self): print('deleted', __name__)\na = A()\nb = [a]; b.append(b)",
    "generator": "def g():\n    try: yield 1\n    finally: print('closed')\nx = g(); next(x)",
    "kept elsewhere": "import json\nclass A:\n    def __del__(self): print('gone')\njson.kept = lambda: a\na = A()",
    "module state": "import stateful; print('end')",
    "daemon": "import threading, time\ndef f():\n    while True: time.sleep(0.0001)\n"
    "for _ in range(8): threading.Thread(target=f, daemon=True).start()\nprint('main ends')",
    "exit in thread": "import threading, sys; threading.Thread(target=lambda: sys.exit(5)).start()",
    "atexit raises": "import atexit; atexit.register(lambda: 1 / 0); print('x')",
    "atexit exits": "import atexit, sys; atexit.register(lambda: sys.exit(6)); print('x')",
    "large code": "import sys; sys.exit(2**40 + 7)",
    "negative": "import sys; sys.exit(-1)",
    "executor": "from concurrent.futures import ThreadPoolExecutor as E\nE().submit(print, 'from a thread')",
    "temporary": "import tempfile, atexit, os; d = tempfile.TemporaryDirectory(); open('kept', 'w').write(d.name)",
    "logging": "import logging.handlers as h, logging\nm = h.MemoryHandler(99, target=logging.StreamHandler())\n"
    "logging.getLogger().addHandler(m); logging.warning('buffered')",
    "closed": "import os, sys; os.close(1); print('nowhere')",
    "no stdout": "import sys; sys.stdout = None; sys.stderr.close()",
    "buffered stdout": "import sys, io; sys.stdout = open(1, 'w', 4096, closefd=False); print('kept back')",
    "pickle": "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
    "dataclass": "from __future__ import annotations\nimport dataclasses as d, typing as t\n"
    "@d.dataclass\nclass A:\n    x: t.ClassVar[int]\nprint(A())",
}


def files(directory: Path) -> dict[str, str]:
    """What a program has left in kept-*; taken away."""
    return {path.name: path.read_text() + str(path.unlink() or "") for path in directory.glob("kept-*")}


def test_endings_are_those_of_a_fresh_interpreter(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "helper.py").write_text("import json\ntry:\n    json.loads('{')\nfinally:\n    print('finally')\n")
    (tmp_path / "stateful.py").write_text(
        "import json\nfile = open('kept-module', 'w')\nfile.write('text')\njson.kept_too = lambda: file\n"
        "class A:\n    def __del__(self): print('deleted', __name__)\na = A()\n"
    )
    dispatch, ours, theirs = {}, {}, {}
    for number, (name, text) in enumerate(ENDINGS.items()):
        path = tmp_path / f"ending{number}.py"
        path.write_bytes(text.encode(errors="surrogateescape") + b"\n")
        dispatch[name] = path.name
    for name, script in dispatch.items():
        theirs[name] = light_driver.fresh([script], tmp_path, env)
        kept = files(tmp_path)
        [ours[name]] = light_driver.run(Command("script", (script,), str(tmp_path)), [env])
        assert files(tmp_path) == kept, name
    for outcomes in (ours, theirs):
        assert "SyntaxError" in outcomes["not utf-8"].err  # in other words
        outcomes["not utf-8"] = replace(outcomes["not utf-8"], err="")
        for name, outcome in outcomes.items():
            outcomes[name] = replace(outcome, err=re.sub(r" at 0x\w+|(?<=Ran 0 tests in ).*", "", outcome.err))
    different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not different


def test_what_is_missing_is_said_in_one_line(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    def end(kind: Any, *argv: str, cwd: Path = tmp_path) -> Any:
        [outcome] = light_driver.run(Command(kind, argv, str(cwd)), [env])
        assert outcome.out == ""
        assert len(outcome.err.splitlines()) == 1
        return outcome

    script = end("script", "nowhere.py")
    assert (script.code, script.err) == (
        2,
        "tenplexrun: can't open the script 'nowhere.py': No such file or directory\n",
    )
    module = end("module", "no_such_module_here")
    assert module == light_driver.fresh(["-m", "no_such_module_here"], tmp_path, env)
    program = end("program", "no-such-program")
    assert (program.code, program.err) == (127, "tenplexrun: cannot run 'no-such-program': No such file or directory\n")
    (tmp_path / "plain").write_text("text")
    assert end("program", "./plain").code == 126


def test_a_missing_working_directory_is_said(light_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    cwd = tmp_path / "gone"
    cwd.mkdir()
    pid = light_driver.do(_spawn_after_removal(light_driver, cwd, env))
    assert light_driver.exit() == WorkerExit(pid, 1, pytest.approx(time.time(), abs=60))
    light_driver.do(light_driver.pool.sweep())


async def _spawn_after_removal(light_driver: Any, cwd: Path, env: dict[str, str]) -> int:
    cwd.rmdir()
    light_driver.pool.command = Command("script", ("x.py",), str(cwd))
    null = os.open(os.devnull, os.O_WRONLY)
    [pid] = await light_driver.pool.spawn([WorkerSpec(0, env, null, null)], False)
    os.close(null)
    return pid


def test_random_streams_differ_as_in_fresh_interpreters(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "draw.py").write_text(
        "import random, numpy, torch, uuid, json\n"
        "print(json.dumps([random.random(), numpy.random.rand(), numpy.random.default_rng().random(), uuid.uuid4().hex,"
        " torch.rand(1).item(), torch.initial_seed()]))"
    )
    outcomes = driver.run(Command("script", ("draw.py",), str(tmp_path)), [env, env])
    first, second = (json.loads(outcome.out) for outcome in outcomes)
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_multiprocessing_of_every_kind(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "mp.py").write_text(
        "import multiprocessing as mp\n"
        "class Squares:\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): return i * i\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        with mp.get_context(method).Pool(1) as pool:\n"
        "            print(method, pool.map(square, range(4)))\n"
        "    from torch.utils.data import DataLoader\n"
        "    for method in ('fork', 'spawn', 'forkserver'):\n"
        "        loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)\n"
        "        print(method, [batch.tolist() for batch in loader])\n"
    )
    [outcome] = driver.run(Command("script", ("mp.py",), str(tmp_path)), [env])
    lines = [f"{method} [0, 1, 4, 9]" for method in ("fork", "spawn", "forkserver")]
    lines += [f"{method} [[0, 1, 4, 9], [16, 25, 36, 49]]" for method in ("fork", "spawn", "forkserver")]
    assert (outcome.code, outcome.out.splitlines()) == (0, lines), outcome.err


def test_torch_compile_compiles(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "compiled.py").write_text(
        "import torch\n"
        "@torch.compile\n"
        "def f(x):\n"
        "    return torch.sin(x) ** 2 + torch.cos(x) ** 2\n"
        "x = torch.randn(1000, requires_grad=True)\n"
        "y = f(x)\n"
        "y.sum().backward()\n"
        "print(torch.allclose(y, torch.ones(1000)), x.grad.abs().max().item() < 1e-5)\n"
        "print(torch._dynamo.utils.counters['stats']['unique_graphs'])\n"
    )
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    [outcome] = driver.run(Command("script", ("compiled.py",), str(tmp_path)), [{**env, **cache}])
    assert (outcome.code, outcome.out) == (0, "True True\n1\n"), outcome.err


PAIRS = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def train(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = DDP(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()

os.environ["RANK"] = "0"
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/alone", rank=0, world_size=1)
DDP(torch.nn.Linear(4, 4))  # the first one imports a lot
dist.destroy_process_group()
for pair in range(20):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            train(rank, f"{os.getcwd()}/store-{pair}")
            sys.exit()
        children.append(child)
    print(*[os.waitpid(child, 0)[1] for child in children], flush=True)
"""


def test_a_group_that_is_destroyed_right_after_its_last_collective_ends(
    driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    (tmp_path / "pairs.py").write_text(PAIRS)
    [outcome] = driver.run(Command("script", ("pairs.py",), str(tmp_path)), [env])
    assert outcome.out.splitlines() == ["0 0"] * 20, outcome.err


def test_stdin_faulthandler_and_late_environment(driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    """What a script may do with its own process, as in a fresh interpreter."""
    (tmp_path / "own.py").write_text(
        "import faulthandler, os, signal, sys\n"
        "print(sys.stdin.fileno(), sys.stdin.isatty(), os.path.samestat(os.fstat(0), os.stat('/dev/null')))\n"
        "faulthandler.register(signal.SIGUSR2, file=sys.stderr)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '3'\n"
        "import torch\n"
        "print(torch.cuda._parse_visible_devices(), torch.cuda.is_initialized())\n"
        "faulthandler.enable()\n"
        "import ctypes; ctypes.string_at(0)\n"
    )
    [outcome] = driver.run(Command("script", ("own.py",), str(tmp_path)), [env])
    first, second = outcome.out.splitlines()
    assert first.startswith("0 ")
    assert second == "[3] False"
    assert outcome.code == -11
    assert outcome.err.count("most recent call first") == 2
    assert "Segmentation fault" in outcome.err


def test_cold_workers_are_fresh_interpreters(new_cold_driver: Any, tmp_path: Path, env: dict[str, str]) -> None:
    (tmp_path / "cold.py").write_text(
        "import sys; print('torch' in sys.modules, sys.orig_argv, sys.argv, __file__)\n"
        "import os; os.environ['OMP_NUM_THREADS'] = '2'; import torch; print(torch.get_num_threads())\n"
        "import torch.distributed as dist; dist.init_process_group('gloo'); print(dist.get_world_size()); sys.exit(5)\n"
    )
    driver = new_cold_driver
    port = driver.do(driver.pool.listen("127.0.0.1"))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    command = Command("script", ("cold.py", "a b"), str(tmp_path))
    [outcome] = driver.run(command, [{**env, **address, **rank}], host_store=True)
    assert outcome.code == 5, outcome.err
    assert outcome.out.splitlines()[0].startswith("False ")
    assert outcome.out.splitlines()[0].endswith(
        "'-u', 'cold.py', 'a b'] ['cold.py', 'a b'] " + str(tmp_path / "cold.py")
    )
    assert outcome.out.splitlines()[1:] == ["2", "1"]


def test_late_imports_are_learnt_for_the_next_round(
    new_learning_driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    """Of site-packages; what the user has beside the script stays the user's, under the same name, too."""
    (tmp_path / "pluggy.py").write_text("WHOSE = 'mine'")
    (tmp_path / "late.py").write_text(
        "import sys, time\n"
        "print('iniconfig' in sys.modules, 'pluggy' in sys.modules)\n"
        "import iniconfig, pluggy\n"
        "print(pluggy.WHOSE)\n"
        "time.sleep(600 if sys.argv[1:] else 0)\n"
    )
    driver, learnt = new_learning_driver
    driver.spawn(Command("script", ("late.py", "stay"), str(tmp_path)), [env, env])
    driver.until(lambda: bool(learnt), "something has been learnt")
    driver.do(driver.pool.sweep())
    for _ in range(2):
        driver.exit()
    [outcome] = driver.run(Command("script", ("late.py",), str(tmp_path)), [env])
    assert (outcome.code, outcome.out) == (0, "True False\nmine\n"), outcome.err
    assert "pluggy" not in learnt[-1]


def test_a_preload_that_would_spoil_forks_is_refused(
    preloading_driver: Any, tmp_path: Path, env: dict[str, str]
) -> None:
    driver = preloading_driver
    assert driver.pool.failed_imports.keys() >= {"spoils_forks", "not_there_at_all"}
    assert driver.pool.failed_imports["spoils_forks"] == "starts threads"
    (tmp_path / "which.py").write_text("import sys; print([n in sys.modules for n in ('iniconfig', 'spoils_forks')])")
    [outcome] = driver.run(Command("script", ("which.py",), str(tmp_path)), [env])
    assert outcome.out == "[True, False]\n"
