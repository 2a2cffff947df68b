"""`tenplexctl`: what users ask of a running job, and of what it wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tenplexrun import explain, inspect_data, rdzv
from tenplexrun.agent.meeting import find_running
from tenplexrun.agent.rendezvous import current_epoch, launch_token, read_secret, run_ids
from tenplexrun.core import report, rounds
from tenplexrun.core.control import NONE
from tenplexrun.core.parallel import OPTIONAL
from tenplexrun.core.rounds import Request, Round
from tenplexrun.errors import LayoutError, RendezvousTimeoutError, TenplexError, UsageError
from tenplexrun.ports import Coordination, KeyValue
from tenplexrun.rdzv import Meeting

POLL_S = 0.1


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the command."""
    try:
        args = _parser().parse_args(argv)
        sys.exit(args.run(args))
    except TenplexError as error:
        print(f"tenplexctl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(0)


def _parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="tenplexctl", allow_abbrev=False, description="Looks at and steers jobs.")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    def job_command(name: str, text: str, run: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        command.add_argument("--rdzv-endpoint", required=True, metavar="HOST:PORT,...", help="the job's etcd")
        command.add_argument(
            "--rdzv-backend", choices=rdzv.HOSTED + rdzv.RUNNING, default="static", help="as the job's"
        )
        command.add_argument("--rdzv-conf", default="", metavar="K=V,...", help="as the job's: TLS and user")
        command.add_argument("--rdzv-id", metavar="ID", help="name of the job (default: the only one)")
        command.set_defaults(run=run)
        return command

    status = job_command("status", "what the job is doing now", _status)
    status.add_argument("--json", action="store_true", help="the records themselves")
    token = job_command("token", "what the job's ports ask for, as in curl -H 'Authorization: Bearer …'", _token)
    token.add_argument("--secret-file", default=str(Path.home() / ".tenplexrun" / "secret"), help="as the job's")
    resize = job_command("resize", "change the parallelism; the job goes on from the same step", _resize)
    for axis in ("pp", "cp", "ep", "tp"):
        resize.add_argument(f"--{axis}", type=int, default=None, help=f"new size of the axis {axis}")
    for name in OPTIONAL:
        help_ = f"new {name}, as tenplexrun's (0: its default)"
        resize.add_argument(f"--{name.replace('_', '-')}", type=int, default=None, help=help_)
    resize.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="seconds to wait for its round (default 60)"
    )
    table = commands.add_parser("report", help="what each round cost, from the nodes' event files")
    table.add_argument("events", nargs="+", help="files written with --events or --log-dir")
    table.set_defaults(run=_report)
    tail = commands.add_parser("events", help="the events of all nodes in order, for people")
    tail.add_argument("events", nargs="+", help="files written with --events or --log-dir")
    tail.set_defaults(run=_events)
    plan = commands.add_parser("plan", help="what a change of layout would move, without a job", allow_abbrev=False)
    explain.add_arguments(plan)
    plan.set_defaults(run=explain.run)
    data = commands.add_parser("data", help="what is in a dataset, and whether it still is", allow_abbrev=False)
    inspect_data.add_arguments(data)
    return root


# --- of a running job ---------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> int:
    content = asyncio.run(_with_job(args, _content))
    if args.json:
        print(json.dumps({key: json.loads(found.value) for key, found in content.items()}, indent=2))
        return 0
    members = {
        key.rsplit("/", 1)[1]: rounds.member_from_json(record) for key, record in _in(content, "members").items()
    }
    round_ = _round(content)
    if round_ is None:
        print(f"waiting for nodes; {len(members)} here")
    else:
        snapshot = f", went on from step {round_.start_step}" if round_.start_step else ""
        print(f"round {round_.number} {round_.phase} at {round_.parallel}{snapshot}; {round_.cause.detail}")
        if round_.saved is not None:
            print(f"  last durable checkpoint: step {round_.saved}")
        for progress in _in(content, "progress").values():
            if progress["round"] == round_.number:
                step = "" if progress["step"] is None else f"in step {progress['step']}; "
                print(f"  {step}{progress['restarts_left']} restart(s) left")
                for line in _snapshots(progress):
                    print(f"  {line}")
    for node, member in sorted(members.items()):
        part = None if round_ is None else round_.participant(node)
        ranks = "waits" if part is None else f"ranks {', '.join(map(str, part.ranks))}"
        print(f"  node {node} [{member.host}]  {member.num_workers} worker(s)  {ranks}  store {member.store}")
        for line in _datasets(content, node):
            print(f"    {line}")
    return 0


def _token(args: argparse.Namespace) -> int:
    if not Path(args.secret_file).exists():
        raise UsageError(f"there is no secret in {args.secret_file}; name the job's with --secret-file")

    async def run_id(_: Coordination, folder: str) -> str:
        return folder.split("/")[1]

    print(launch_token(read_secret(Path(args.secret_file)), asyncio.run(_with_job(args, run_id))))
    return 0


def _snapshots(progress: Mapping[str, Any]) -> list[str]:
    """The newest snapshots of a round, if it has any."""
    committed, sealed, copies = progress["committed"], progress["sealed"], progress["copies"]
    found = [] if committed is None else [f"snapshot of step {committed} committed, on {copies} node(s) each part"]
    if sealed > (NONE if committed is None else committed):
        found.append(f"snapshot of step {sealed} sealed here, not yet on all {copies}")
    return found


def _datasets(content: Mapping[str, KeyValue], node: str) -> list[str]:
    """What a node keeps of each dataset."""
    found = next((value for key, value in content.items() if key.endswith(f"/datasets/{node}")), None)
    return [_kept(one) for one in (json.loads(found.value) if found else [])]


def _kept(one: Mapping[str, Any]) -> str:
    here, wanted, budget = (one[name] / 2**20 for name in ("here_bytes", "wanted_bytes", "budget"))
    return (
        f"{one['dataset']}: {one['owned']} of {one['extents']} extents, {here:.1f} of {wanted:.1f} MiB here"
        + ("" if one["whole"] else ", more on the way")
        + f" (of all datasets up to {budget:.1f} MiB may be)"
        + (f"; {one['unowned']} extents fit into no node" if one["unowned"] else "")
    )


def _resize(args: argparse.Namespace) -> int:
    names = ("pp", "cp", "ep", "tp", *OPTIONAL)
    sizes = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if not sizes or any(size < int(name not in OPTIONAL) for name, size in sizes.items()):
        raise UsageError("resize needs at least one of --pp, --cp, --ep, --tp, each at least 1, --etp, --dp-shard")

    async def ask(coordination: Coordination, folder: str) -> str:
        request = Request(uuid.uuid4().hex[:8], "resize", sizes=sizes)
        before = _round(await coordination.list(folder))
        await coordination.put(f"{folder}/requests/{request.id}", json.dumps(rounds.to_json(request)))
        deadline = time.monotonic() + args.wait
        while time.monotonic() < deadline:
            content = await coordination.list(folder)
            answer, round_ = content.get(f"{folder}/answers/{request.id}"), _round(content)
            if answer is not None and answer.value.startswith("refused"):
                raise LayoutError(answer.value)
            if answer is not None and answer.value.startswith("unchanged"):
                return answer.value
            newer = round_ is not None and before is not None and round_.number > before.number
            if answer is not None and round_ is not None and newer and round_.phase != "gathering":
                return f"round {round_.number} {round_.phase} at {round_.parallel}"
            await asyncio.sleep(POLL_S)
        raise RendezvousTimeoutError(f"not done within {args.wait:g} s; look at status")

    print(asyncio.run(_with_job(args, ask)))
    return 0


async def _with_job(args: argparse.Namespace, work: Any) -> Any:
    access = rdzv.find_access(rdzv.read_conf(args.rdzv_conf))
    port = rdzv.ETCD_PORT if args.rdzv_backend in rdzv.RUNNING else rdzv.C10D_PORT  # as tenplexrun's
    wanted = Meeting(
        rdzv.find_endpoints(args.rdzv_endpoint, port), False, None, rdzv.APIS.get(args.rdzv_backend), access
    )
    coordination = (await find_running(wanted)).connect()
    try:
        names = [args.rdzv_id] if args.rdzv_id else await run_ids(coordination)
        folders = [folder for name in names if (folder := await current_epoch(coordination, name)) is not None]
        if len(folders) != 1:
            if not folders:
                job = f"no job {args.rdzv_id!r}" if args.rdzv_id else "no job"
                raise UsageError(f"{job} runs at {args.rdzv_endpoint}; correct --rdzv-endpoint or --rdzv-id")
            raise UsageError(
                f"{len(folders)} jobs run at {args.rdzv_endpoint}; name one with --rdzv-id ({', '.join(names)})"
            )
        [folder] = folders
        return await work(coordination, folder)
    finally:
        await coordination.close()


async def _content(coordination: Coordination, folder: str) -> Mapping[str, KeyValue]:
    return await coordination.list(folder)


def _in(content: Mapping[str, KeyValue], kind: str) -> dict[str, dict[str, Any]]:
    return {key: json.loads(found.value) for key, found in content.items() if f"/{kind}/" in f"{key}/"}


def _round(content: Mapping[str, KeyValue]) -> Round | None:
    found = next((value for key, value in content.items() if key.endswith("/round")), None)
    return None if found is None else rounds.round_from_json(json.loads(found.value))


# --- of event files -----------------------------------------------------------------------------------------------


def read_events(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The events of several files, in order of time; a last line that a crash cut off is left out."""
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise UsageError(f"cannot read events from {path}: {error.strerror}") from None
        for number, line in enumerate(lines):
            try:
                event = json.loads(line)
                found.append({**event, "t": float(event["t"]), "node": event["node"], "event": event["event"]})
            except (ValueError, TypeError, KeyError):
                if number != len(lines) - 1:
                    raise UsageError(f"{path}:{number + 1} is no JSON event") from None
    return sorted(found, key=lambda event: event["t"])


def _report(args: argparse.Namespace) -> int:
    print(report.table(report.rows(read_events(args.events))))
    return 0


def _events(args: argparse.Namespace) -> int:
    for event in read_events(args.events):
        stamp = time.strftime("%H:%M:%S", time.localtime(event["t"])) + f".{int(event['t'] * 1000) % 1000:03d}"
        shown = {key: _shown(value) for key, value in event.items() if value is not None}
        rest = " ".join(f"{key}={value}" for key, value in shown.items() if key not in ("t", "node", "event"))
        print(f"{stamp} {event['node']} {event['event']} {rest}")
    return 0


def _shown(value: Any) -> Any:
    """A field of an event, for people."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ",".join(value)
    if isinstance(value, dict):
        return ",".join(f"{key}:{item}" for key, item in value.items())
    return value
