"""Scripts that ask for what a warm process cannot give."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenplexrun.agent.cold import reason_for_cold_start
from tenplexrun.agent.script import Command

ENV = {"OMP_NUM_THREADS": "1", "HOME": "/"}


def reason(tmp_path: Path, text: str) -> str | None:
    (tmp_path / "train.py").write_text(text)
    return reason_for_cold_start(Command("script", ("train.py",), str(tmp_path)), ENV)


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch",
        "from os import environ\nif True:\n    environ['OMP_NUM_THREADS'] = str(4)\nimport torch",
        "import os, torch_is_not_yet_here_so_this_is_a_library_too",
        "import os\nos.environ.setdefault('MKL_NUM_THREADS', '1')\nfrom torch import nn",
        "import os\ntry:\n    os.environ.update({'TORCH_LOGS': 'dynamo'}, KMP_AFFINITY='none')\nfinally:\n    pass",
        "import os\nos.putenv('GOMP_SPINCOUNT', '0')",
        "import os\ndef f():\n    os.environ['OMP_NUM_THREADS'] = '4'\nf()\nimport torch",
        "import os, sys\ndef g():\n    import torch\ndef main():\n    os.environ['OMP_NUM_THREADS'] = '4'\n    g()\n"
        "if __name__ == '__main__':\n    sys.exit(main())",
    ],
)
def test_what_is_read_at_import(tmp_path: Path, text: str) -> None:
    found = reason(tmp_path, text)
    if "library" in text:
        assert found is None
    else:
        assert found is not None
        assert "train.py, line" in found


@pytest.mark.parametrize(
    "text",
    [
        "import torch, os\nos.environ['OMP_NUM_THREADS'] = '4'",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch",  # what it is already
        "import os\nos.environ.setdefault('OMP_NUM_THREADS', '8')\nimport torch",  # set already
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = os.environ['LOCAL_RANK']\nimport torch",  # read at first use
        "import os\nos.environ['TOKENIZERS_PARALLELISM'] = 'false'\nos.environ['NCCL_DEBUG'] = 'INFO'\nimport torch",
        "import os\ndef f():\n    os.environ['OMP_NUM_THREADS'] = '4'\nimport torch\nf()",
        "import os\ndef f():\n    import torch\n    os.environ['OMP_NUM_THREADS'] = '4'\n    f()\nf()",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nx = 1",
        "x = = 1",
        "",
    ],
)
def test_what_a_warm_process_can_do(tmp_path: Path, text: str) -> None:
    assert reason(tmp_path, text) is None


def test_modules_of_the_user_are_followed_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "setup_env.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import package.deep\n")
    (tmp_path / "package" / "deep.py").write_text("import setup_env\n")
    found = reason(tmp_path, "import package\nimport torch")
    assert found is not None
    assert "setup_env.py, line 2" in found
    assert reason(tmp_path, "import torch\nimport package") is None
    (tmp_path / "setup_env.py").write_text("import os\ndef threads():\n    os.environ['OMP_NUM_THREADS'] = '4'\n")
    found = reason(tmp_path, "from setup_env import threads\nthreads()\nimport torch")
    assert found is not None
    assert "setup_env.py, line 3" in found
    (tmp_path / "package" / "deep.py").write_text("import numpy\nimport setup_env\n")
    assert reason(tmp_path, "import package\nimport torch") is None


def test_modules_and_folders(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__init__.py").touch()
    (tmp_path / "job" / "__main__.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch")
    for kind in ("module", "script"):
        found = reason_for_cold_start(Command(kind, ("job",), str(tmp_path)), ENV)  # type: ignore[arg-type]
        assert found is not None
        assert "__main__.py, line 2" in found
    assert reason_for_cold_start(Command("program", ("sh", "-c", "x"), str(tmp_path)), ENV) is None
    assert reason_for_cold_start(Command("script", ("nowhere.py",), str(tmp_path)), ENV) is None
