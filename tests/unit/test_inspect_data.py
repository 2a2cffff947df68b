"""`tenplexctl data`: index, verify and show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tenplexrun import ctl

IMAGE = "uint8 [20, 30, 3], label 0"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            ctl.main(["data", *argv])
        code = ended.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "x.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(30)))
    return tmp_path / "x.jsonl"


def test_an_index_finds_every_change(run: Run, lines: Path) -> None:
    spec = f"jsonl:{lines}"
    code, out, err = run("verify", spec)
    assert (code, out) == (69, "")
    assert "there is no index" in err
    code, out, _ = run("index", spec)
    assert code == 0
    assert "30 samples, 260 bytes, xxh3-" in out
    assert run("verify", spec) == (0, "30 samples, each as it was\n", "")
    good = lines.read_text()
    lines.write_text(good.replace('"n": 7', '"n": 8'))
    code, out, err = run("verify", spec)
    assert (code, out) == (69, f"sample 7: {lines} at byte 63: its 8 bytes are others\n")
    assert "is not what it was" in err
    lines.write_text(good.replace('"n": 29', '"n":29'))
    assert run("verify", spec)[1] == f"sample 29: {lines} at byte 280: had 9 bytes, has 8\n".replace(": had", " had")
    lines.write_text(good.replace("\n", " \n")[:-11])
    code, out, _ = run("verify", spec)
    assert out.startswith("there were 30 samples, there are 29\nsample 0:")
    assert len(out.splitlines()) == 11
    assert out.endswith("... and 20 more\n")


def test_an_index_elsewhere_and_of_samples_of_one_size(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(12, dtype="f4").reshape(4, 3))
    spec, where = f"npy:{tmp_path}/x.npy", str(tmp_path / "there")
    assert run("index", spec, "--index", where)[0] == 0
    assert run("verify", spec, "--index", where)[0] == 0
    np.save(tmp_path / "x.npy", np.arange(12, dtype="i4").reshape(4, 3))
    assert run("verify", spec, "--index", where)[1].startswith("samples were of <f4 [3], are of <i4 [3]\nsample 0:")
    (tmp_path / "there").write_text("text")
    assert "is no index of a dataset" in run("verify", spec, "--index", where)[2]
    assert "cannot write the index" in run("index", spec, "--index", "/nowhere/x")[2]


def test_show(run: Run, lines: Path, tmp_path: Path) -> None:
    code, out, _ = run("show", f"jsonl:{lines}", "--sample", "-1")
    shown = out.splitlines()
    assert (code, shown[0]) == (0, "30 samples of different sizes")
    assert shown[2:] == [f"sample 29: 9 bytes, {lines} at byte 280", "n: 29"]
    np.save(tmp_path / "x.npy", np.arange(12, dtype="f4").reshape(4, 3))
    out = run("show", f"npy:{tmp_path}/x.npy")[1]
    assert "4 samples of float32 [3], 12 bytes" in out
    assert out.endswith("float32 [3] [0. 1. 2.]\n")
    Image.fromarray(np.full((20, 30, 3), 7, np.uint8)).save(tmp_path / "x.png")
    shown = run("show", f"images:{tmp_path}?glob=*.png")[1].splitlines()
    assert shown[2:] == [f"sample 0: {(tmp_path / 'x.png').stat().st_size} bytes, {tmp_path}/x.png at byte 0", IMAGE]
    assert "--sample 4 is none of them" in run("show", f"npy:{tmp_path}/x.npy", "--sample", "4")[2]
    assert run("show", "npy:/none.npy")[0] == 69


def test_behind_a_file_that_has_gone_nothing_is_compared(tmp_path: Path, run: Run) -> None:
    """Else each sample there would be one that has changed."""
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(bytes([number]) * (10 + number))
    spec = f"images:{tmp_path}"
    assert run("index", spec)[0] == 0
    (tmp_path / "4.png").unlink()
    code, out, _ = run("verify", spec)
    assert code == 69
    assert out.splitlines() == [
        "there were 9 samples, there are 8",
        "samples from 5 on are not compared: the file before them has another length than it had",
        f"sample 4: {tmp_path}/5.png at byte 0 had 14 bytes, has 15",
    ]
