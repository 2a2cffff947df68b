"""Workers' output: whole lines, progress bars, files, tails, slow and broken outputs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tenplexrun.agent import logs as logs_module
from tenplexrun.agent.logs import WorkerLogs
from tenplexrun.core.output import Output

Test = Callable[[WorkerLogs], Awaitable[None]]


def shown(test: Test, tmp_path: Path, log_dir: Path | None = None, prefix: str = "[${rank}]: ") -> tuple[str, str]:
    """What a test's workers show on stdout and stderr."""
    paths = tmp_path / "shown.out", tmp_path / "shown.err"

    async def run() -> None:
        fds = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in paths]
        logs = WorkerLogs(Output(log_dir and str(log_dir), prefix=prefix), (fds[0], fds[1]))
        try:
            await asyncio.wait_for(test(logs), 60)
            await logs.close()
        finally:
            for fd in fds:
                os.close(fd)

    asyncio.run(run())
    return paths[0].read_text(errors="replace"), paths[1].read_text(errors="replace")


def write(fd: int, *pieces: str) -> None:
    for piece in pieces:
        os.write(fd, piece.encode())


def test_lines_are_whole_and_streams_kept_apart(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        out, err = logs.open(0, 3)
        other, other_err = logs.open(0, 12)
        write(out, "one\ntw")
        await asyncio.sleep(0.05)
        write(other, "between\n")
        write(err, "bad\n", "\n")
        await asyncio.sleep(0.05)
        write(out, "o\nno newline")
        for fd in (out, err, other, other_err):
            os.close(fd)

    out, err = shown(test, tmp_path)
    assert out.splitlines() == ["[3]: one", "[12]: between", "[3]: two", "[3]: no newline"]
    assert err == "[3]: bad\n[3]: \n"


def test_torchruns_prefix_and_none(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        for fd in logs.open(0, 3):
            write(fd, "x\n")
            os.close(fd)

    assert shown(test, tmp_path, prefix="[default$rank]:")[0] == "[default3]:x\n"
    assert shown(test, tmp_path, prefix="")[0] == "x\n"


def test_progress_bars_show_their_newest_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "PROGRESS_S", 0.2)

    async def test(logs: WorkerLogs) -> None:
        out, err = logs.open(0, 0)
        for percent in range(0, 50):
            write(err, f"\r{percent}%")
        await asyncio.sleep(0.5)
        write(err, "\r60%\r70%")
        await asyncio.sleep(0.5)
        write(err, *(f"\r{percent}%" for percent in range(70, 101)), "\ndone\r\n")
        write(err, "5 of 9\r", "9 of 9\r")
        await asyncio.sleep(0.5)
        os.close(out)
        os.close(err)

    assert shown(test, tmp_path)[1].splitlines() == ["[0]: 49%", "[0]: 70%", "[0]: 100%", "[0]: done", "[0]: 9 of 9"]


def test_files_keep_every_byte_of_every_round(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        for round_number in range(4):
            out, err = logs.open(round_number, 11)
            write(out, f"\r{round_number}\r\n\0 raw")
            os.write(err, b"\xff\n")
            os.close(out)
            os.close(err)
            logs.close_round(round_number)

    shown(test, tmp_path, tmp_path / "logs")
    for round_number in range(4):
        directory = tmp_path / "logs" / f"round_{round_number}" / "rank_11"
        assert (directory / "stdout.log").read_bytes() == f"\r{round_number}\r\n\0 raw".encode()
        assert (directory / "stderr.log").read_bytes() == b"\xff\n"


def test_tail_has_what_a_dead_worker_said_last(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        assert logs.tail(0, 0) == []
        out, err = logs.open(0, 0)
        write(err, *(f"line {n}\n" for n in range(100)), "\r1%\r2%\n", "the end")
        os.close(out)
        os.close(err)
        expected = [*(f"line {n}" for n in range(82, 100)), "2%", "the end"]
        assert logs.tail(0, 0) == expected, "at once, without waiting for the loop"
        logs.close_round(0)
        assert logs.tail(0, 0) == expected

    shown(test, tmp_path)


def test_a_pipe_that_somebody_still_holds_is_given_up(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        write(logs.open(0, 0)[0], "last words")
        logs.close_round(0)

    assert shown(test, tmp_path)[0] == "[0]: last words\n"


def test_a_very_long_line_is_passed_on_in_pieces(tmp_path: Path) -> None:
    async def test(logs: WorkerLogs) -> None:
        out, err = logs.open(0, 0)
        os.close(err)
        await asyncio.to_thread(write, out, *["x" * 50_000] * 60, "\n")
        os.close(out)

    out, _ = shown(test, tmp_path, prefix="")
    assert out.replace("\n", "") == "x" * 3_000_000
    assert 1 < len(out.splitlines()) < 10


def test_nothing_is_lost_of_many_lines(tmp_path: Path) -> None:
    count = 50_000

    async def test(logs: WorkerLogs) -> None:
        pairs = [logs.open(0, rank) for rank in range(4)]
        fds = [out for out, _ in pairs]
        for _, err in pairs:
            os.close(err)

        def work(rank: int) -> None:
            with open(fds[rank], "w") as file:
                for number in range(count):
                    file.write(f"{rank} says {number}\n")

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            await asyncio.sleep(0.01)
        logs.close_round(0)

    lines = shown(test, tmp_path)[0].splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}]: ")]
        assert mine == [f"[{rank}]: {rank} says {number}" for number in range(count)]
    assert len(lines) == 4 * count


def test_a_stuck_terminal_holds_workers_up_but_not_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "MAX_UNWRITTEN_BYTES", 1 << 20)
    total = 8 << 20

    async def run() -> int:
        read_end, write_end = os.pipe()
        logs = WorkerLogs(Output(prefix=""), (write_end, write_end))
        out, err = logs.open(0, 0)
        os.close(err)
        worker = asyncio.ensure_future(asyncio.to_thread(write, out, *["y" * 1023 + "\n"] * (total >> 10)))
        late = 0.0
        for _ in range(50):
            start = time.monotonic()
            await asyncio.sleep(0.01)
            late = max(late, time.monotonic() - start)
        assert not worker.done()
        assert late < 5

        def consume() -> int:
            with open(read_end, "rb") as file:
                return len(file.read())

        consumer = asyncio.ensure_future(asyncio.to_thread(consume))
        await worker
        os.close(out)
        await logs.close()
        os.close(write_end)
        return await consumer

    assert asyncio.run(asyncio.wait_for(run(), 60)) == total


def test_a_closed_output_does_not_stop_workers_or_files(tmp_path: Path) -> None:
    async def run() -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        logs = WorkerLogs(Output(str(tmp_path), prefix=""), (write_end, write_end))
        out, err = logs.open(0, 0)
        await asyncio.to_thread(write, out, *["z" * 999 + "\n"] * 500)
        os.close(out)
        os.close(err)
        await logs.close()
        os.close(write_end)

    asyncio.run(asyncio.wait_for(run(), 60))
    assert (tmp_path / "round_0" / "rank_0" / "stdout.log").stat().st_size == 500_000


def test_sixteen_ranks_at_once_and_torchruns_names(tmp_path: Path) -> None:
    """Every line whole and in its rank's order, on the terminal and in the files of both rounds."""
    count, ranks, text = 2000, 16, "x" * 40

    async def run() -> None:
        fd = os.open(tmp_path / "shown", os.O_WRONLY | os.O_CREAT)
        logs = WorkerLogs(Output(str(tmp_path), prefix="[${rank}]: "), (fd, fd), alias="run_node")
        for round_number in range(2):
            fds = [logs.open(round_number, 10 + rank, rank) for rank in range(ranks)]

            def speak(rank: int, out: int) -> None:
                with open(out, "w", buffering=1 << 12) as file:
                    for number in range(count):
                        file.write(f"{rank} {number} {text}\n")

            threads = [threading.Thread(target=speak, args=(rank, out)) for rank, (out, _) in enumerate(fds)]
            for thread in threads:
                thread.start()
            for _, err in fds:
                os.close(err)
            while any(thread.is_alive() for thread in threads):
                await asyncio.sleep(0.01)
            logs.close_round(round_number)
        await logs.close()
        os.close(fd)

    asyncio.run(run())
    shown = (tmp_path / "shown").read_text().splitlines()
    for rank in range(ranks):
        said = [f"{rank} {number} {text}" for number in range(count)]
        assert [line for line in shown if line.startswith(f"[{10 + rank}]: ")] == [
            f"[{10 + rank}]: {line}" for line in said * 2
        ]
        for round_number in range(2):
            own = tmp_path / f"round_{round_number}" / f"rank_{10 + rank}" / "stdout.log"
            theirs = tmp_path / "run_node" / f"attempt_{round_number}" / str(rank) / "stdout.log"
            assert own.read_text().splitlines() == theirs.read_text().splitlines() == said
