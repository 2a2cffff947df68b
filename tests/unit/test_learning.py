"""What a pool learns of scripts' imports, and what it refuses."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tenplexrun.agent import learning
from tenplexrun.agent.learning import Learner, Notes, NotingFinder, trial, wanted
from tenplexrun.agent.learnt import LearntModules
from tenplexrun.agent.script import Command

BAD = {
    "starts threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "opens sockets": "import socket; s = socket.socket()",
    "reads the variables of a rank": "import os; rank = os.environ.get('LOCAL_RANK', 0)",
    "changes the environment": "import os; os.environ['ANYTHING'] = '1'",
    "prints": "print('welcome', flush=True)",
    "handles signals": "import signal; signal.signal(signal.SIGUSR1, lambda *a: None)",
    "sets a hook of sys": "import sys; sys.excepthook = print",
    "sets up logging": "import logging; logging.basicConfig()",
    "changes the directory": "import os; os.chdir('/')",
    "imports modules of a user": "x = 1",
    "ValueError: two words": "raise ValueError('two words')",
    "ends the process": "import os; os._exit(3)",
}


def tried(names: Sequence[str]) -> list[list[str]]:
    notes = Notes()
    pid = os.fork()
    if pid == 0:  # as a pool is, not as pytest is
        sys.stdout = sys.__stdout__
        logging.getLogger().handlers.clear()
        trial(names, notes)
    os.waitpid(pid, 0)
    return notes.read()


@pytest.mark.parametrize("reason", BAD)
def test_what_a_fork_must_not_inherit_is_refused(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tried_module.py").write_text(BAD[reason] + "\n")
    lines = tried(["tried_module", "never_reached"])
    assert lines[0] == ["try", "tried_module"]
    assert lines[1:] == ([] if reason == "ends the process" else [["no", "tried_module", reason]])


def test_finder_notes_imports_and_where_they_were_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("noted_one", "noted_two", "asked_for"):
        (tmp_path / f"{name}.py").touch()
    notes = Notes()
    monkeypatch.setattr(sys, "meta_path", [NotingFinder(notes), *sys.meta_path])
    importlib.import_module("noted_one")
    assert importlib.util.find_spec("asked_for") is not None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("not_there_at_all")
    if (pid := os.fork()) == 0:
        importlib.import_module("noted_two")
        os._exit(0)
    os.waitpid(pid, 0)
    assert notes.read() == [["noted_one", str(tmp_path / "noted_one.py")]]


def test_only_what_this_process_would_find_in_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, user = tmp_path / "site", tmp_path / "user"
    for folder in (site, user, site / "parent"):
        folder.mkdir()
    for file in ("learn_a.py", "shadowed.py", "parent/__init__.py", "parent/child.py"):
        (site / file).touch()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(learning, "folders", lambda *names: (f"{site}/",))
    noted = [
        ("learn_a", f"{site}/learn_a.py"),
        ("learn_a", f"{site}/learn_a.py"),
        ("shadowed", f"{user}/shadowed.py"),
        ("parent", f"{site}/parent/__init__.py"),
        ("parent.child", f"{site}/parent/child.py"),
        ("gone.child", f"{site}/gone/child.py"),
        ("os", f"{site}/os.py"),
    ]
    assert wanted(noted, {}) == ["learn_a", "parent", "parent.child"]
    assert wanted(noted, {"parent": "prints"}) == ["learn_a"]


def test_learner_tries_when_it_is_quiet_and_again_after_a_sweep() -> None:
    learner, forks = Learner(), iter([101, 102])
    notes = learner.new_notes()
    assert notes is not None
    notes.write("learning_test_module", f"{learning.OURS}learning_test_module.py")
    now = time.monotonic()
    wanted_before, learning.wanted = learning.wanted, lambda noted, refused: [n for n, _ in noted if n not in refused]
    try:
        for later in (0.0, learning.QUIET_S - 0.1):
            learner.step(now + later, lambda: pytest.fail("too early"))
        learner.step(now + learning.QUIET_S, forks.__next__)
        assert learner.ended(101, -9)  # swept away with its round
        learner.forget()
        learner.step(now + 10, forks.__next__)
        assert not learner.ended(1, 0)
        assert learner.ended(102, -11)  # said nothing: there was nothing it had begun
        assert learner.refused == {}
    finally:
        learning.wanted = wanted_before


def test_notes_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "NOTES_BYTES", 4096)
    notes = Notes()
    for number in range(200):
        notes.write(f"module{number}", "x" * 30)
    assert notes.read() == [[f"module{number}", "x" * 30] for number in range(len(notes.read()))]
    assert 80 < len(notes.read()) < 120


def test_cache_is_of_one_state_of_one_script(tmp_path: Path) -> None:
    script, environ = tmp_path / "train.py", {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    script.write_text("one")
    command = Command("script", ("train.py",), str(tmp_path))
    known = LearntModules(command, environ)
    assert known.modules == []
    known.add(["a", "b"], {"c": "prints"})
    known.add(["b", "d"], {})
    assert LearntModules(command, environ).modules == ["a", "b", "d"]
    script.write_text("another")
    assert LearntModules(command, environ).modules == []
    script.unlink()
    LearntModules(command, {"XDG_CACHE_HOME": "/proc/nowhere"}).add(["a"], {})
