"""The command line against torch's own parser, against docs/torchrun.md, and by itself."""

from __future__ import annotations

import os
import re
import signal
from argparse import Action
from pathlib import Path

import pytest

from tenplexrun import flags
from tenplexrun.agent.etcd import Access
from tenplexrun.config import JobSpec, parse
from tenplexrun.core.output import STDERR, STDOUT
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent.parent
README, DOC = ROOT / "README.md", ROOT / "docs" / "torchrun.md"
ENV = {"OMP_NUM_THREADS": "1"}
OWN_DEFAULT = {"--node-rank", "--shutdown-timeout"}  # None here: "not given" is told apart, and then means torchrun's


@pytest.fixture(scope="module")
def theirs() -> dict[str, Action]:
    run = pytest.importorskip("torch.distributed.run")
    found = {}
    for action in run.get_args_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--") and "_" not in name]
        if names and names != ["--help"]:
            found[names[0]] = action
    return found


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def spec(*argv: str, **environ: str) -> JobSpec:
    return parse([*argv, "train.py"], {**ENV, **environ})


def test_every_flag_of_torchrun_is_here_in_every_spelling(theirs: dict[str, Action]) -> None:
    ours = flags.parser({})._option_string_actions
    for name, action in theirs.items():
        for spelling in action.option_strings:
            assert spelling in ours, f"torchrun has {spelling}"
        mine = ours[name]
        assert mine.dest == action.dest
        assert mine.nargs == action.nargs, name
        if name not in OWN_DEFAULT:
            default = list(mine.default) if isinstance(mine.default, tuple) else mine.default
            assert default == action.default, name
        if action.choices and name != "--numa-binding":
            assert list(mine.choices or ()) == list(action.choices), name
    own = {name for rows in flags.OURS.values() for name in (row.name for row in rows)}
    assert not own & theirs.keys()
    assert {row.name for rows in flags.TORCHRUN.values() for row in rows} == theirs.keys()


def test_the_documented_table_is_that_of_torch(theirs: dict[str, Action]) -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (?:`(.*?)`)? *\| (\w+) \| (.*?) ?\|$", DOC.read_text(), re.MULTILINE)
    assert [name for name, *_ in rows] == list(theirs)
    for name, default, verdict, why in rows:
        assert verdict in ("same", "better", "differs", "refused"), name
        assert why or verdict == "same", name
        expected = theirs[name].default
        assert default == ("" if expected is None else str(expected)), name
    by_verdict = {verdict: [name for name, _, word, _ in rows if word == verdict] for _, _, verdict, _ in rows}
    short = re.findall(r"^\| (\w+)[:,] .*? \| (`--.*`) \|$", README.read_text(), re.MULTILINE)
    assert {verdict: re.findall(r"`(.*?)`", names) for verdict, names in short} == by_verdict, "README's short form"


def test_variables_of_torchrun_and_ours(train: None, theirs: dict[str, Action]) -> None:
    assert spec(PET_NNODES="2:3").max_nodes == 3
    assert spec(PET_NNODES="2:3", TENPLEXRUN_NNODES="4").min_nodes == 4
    assert spec("--nnodes=5", PET_NNODES="2:3", TENPLEXRUN_NNODES="4").min_nodes == 5
    assert spec(PET_MAX_RESTARTS="").max_restarts == 0
    assert spec(TENPLEXRUN_TP="2", PET_NPROC_PER_NODE="4").sizes.tp == 2
    for word, standalone in (("1", True), ("true", True), ("Yes", True), ("0", False), ("no", False), ("FALSE", False)):
        assert (spec(PET_STANDALONE=word, PET_NNODES="2").max_nodes == 1) is standalone
    for bad in ({"PET_STANDALONE": "perhaps"}, {"PET_MAX_RESTARTS": "many"}, {"TENPLEXRUN_VIEW": "none"}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            spec(**bad)
    assert spec(PET_LOGS_SPECS="x").command == ("train.py",), "torchrun reads no variable for it"


def test_every_flag_has_its_variables(train: None, theirs: dict[str, Action]) -> None:
    for rows in (*flags.TORCHRUN.values(), *flags.OURS.values()):
        for row in rows:
            choices = row.options.get("choices")
            text = "true" if row.switch else choices[-1] if choices else "3"
            assert flags.parser({f"TENPLEXRUN_{row.dest.upper()}": text}).get_default(row.dest) != row.options.get(
                "default", False
            )


REFUSED = [
    (["--numa-binding=node"], "numa-binding"),
    (["--logs-specs=mine"], "plug-ins"),
    (["--rdzv-backend=zeus"], "plug-ins"),
    (["--rdzv-endpoint=a:1", "--rdzv-conf=protocol=https"], "runs already"),
    (["--rdzv-backend=etcd"], "needs --rdzv-endpoint"),
    (["--event-log-handler=mine"], "plug-ins"),
    (["--no-python", "-m"], "contradict"),
    (["--redirects=4"], "--redirects"),
    (["--tee=0:1,x:3"], "--tee"),
    (["--local-ranks-filter=a"], "--local-ranks-filter"),
    (["--signals-to-handle=SIGKILL"], "SIGKILL"),
    (["--signals-to-handle=TERM"], "'TERM'"),
    (["--rdzv-conf=store_type=file"], "store_type"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=cacert=none.pem"], "none.pem"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=key=train.py"], "cert=FILE"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=protocol=ftp"], "https"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=cacert=train.py,protocol=http"], "https"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=user=me"], "password_file"),
    (["--rdzv-backend=etcd", "--rdzv-endpoint=a", "--rdzv-conf=user=me,password_file=none"], "'none'"),
    (["--rdzv-conf=join_timeout"], "KEY=VALUE"),
    (["--rdzv-conf=is_host=perhaps"], "is_host"),
    (["--rdzv-endpoint=a:b"], "HOST:PORT"),
    (["--rdzv-endpoint=::1:5"], "brackets"),
    (["--max-restarts=-1"], "--max-restarts"),
    (["--shutdown-timeout=-1"], "--shutdown-timeout"),
    (["--hang-timeout=soon"], "auto, off"),
    (["--hang-timeout=nan"], "nan"),
    (["--hang-timeout=9"], "2 * lease"),
    (["--hang-timeout=20", "--rdzv-conf=lease=11"], "2 * lease"),
    (["--checkpoint-every=50"], "needs --checkpoint-dir"),
    *(
        (["--checkpoint-dir=d", f"--checkpoint-every={text}"], "--checkpoint-every")
        for text in ("0s", "1.5", "5m", "auto")
    ),
    (["--checkpoint-dir=no-such://bucket"], "fsspec knows no no-such://"),
    (["--nproc-per-node=²"], "whole number"),
    (["--local-ranks-filter=²"], "--local-ranks-filter"),
    (["--checkpoint-dir="], "is empty"),
    (["--checkpoint-from="], "is empty"),
    (["--nproc=2"], "--nproc"),
    (["--nproc-per-n=2"], "write --nproc-per-node in full"),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED, ids=[" ".join(argv) for argv, _ in REFUSED])
def test_what_cannot_be_is_refused_in_one_line(train: None, argv: list[str], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        spec(*argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


MEETINGS = [
    ([], None),
    (["--standalone", "--rdzv-endpoint=h:1"], None),
    (["--master-port=4"], "127.0.0.1:4"),
    (["--nnodes=2"], "127.0.0.1:29500"),
    (["--nnodes=2", "--master-addr=h"], "h:29500"),
    (["--nnodes=2", "--master-addr=[::2]", "--master-port=5"], "[::2]:5"),
    (["--nnodes=1:2", "--rdzv-backend=c10d"], "127.0.0.1:29400"),
    (["--rdzv-backend=c10d"], None),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=h"], "h:29400"),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=a:1,b"], "a:1,b:29400"),
    (["--rdzv-endpoint=[::1]:0"], "[::1]:0"),
    (["--rdzv-endpoint=[::1]"], "[::1]:29400"),
    (["--rdzv-backend=etcd-v2", "--rdzv-endpoint=h"], "h:2379"),
    (["--rdzv-backend=etcd-v3", "--rdzv-endpoint=h:1,[::1],k"], "h:1,[::1]:2379,k:2379"),
]


@pytest.mark.parametrize(("argv", "endpoint"), MEETINGS, ids=[" ".join(argv) or "nothing" for argv, _ in MEETINGS])
def test_where_the_nodes_meet(train: None, argv: list[str], endpoint: str | None) -> None:
    found = spec(*argv)
    assert ",".join(found.meeting.endpoints) == (endpoint or "")
    assert found.meeting.api == {"etcd-v2": "v2", "etcd-v3": "v3"}.get(argv[0].partition("=")[2] if argv else "")
    assert found.meeting.hosted is ("etcd" not in argv[0] if argv else True)
    assert (found.run_id == "none") is (endpoint is not None)
    assert spec("--rdzv-id=mine", *argv).run_id == "mine"


def test_access_to_the_etcd(train: None) -> None:
    Path("password").write_text("hush-hush\n")
    where = ["--rdzv-backend=etcd", "--rdzv-endpoint=h"]
    assert spec(*where).meeting.access == Access()
    assert spec(*where, "--rdzv-conf=protocol=https").meeting.access == Access(tls=True)
    for names in (
        "cacert=train.py,cert=train.py,key=train.py",
        "ca_cert=train.py,ssl_cert=train.py,ssl_cert_key=train.py",
    ):
        assert spec(*where, f"--rdzv-conf={names}").meeting.access == Access(True, "train.py", "train.py", "train.py")
    found = spec(*where, "--rdzv-conf=user=me,password_file=password")
    assert found.meeting.access == Access(user="me", password="hush-hush")
    assert "hush-hush" not in repr(found)


def test_time_outs(train: None) -> None:
    conf = "timeout=100,join_timeout=90,last_call_timeout=7,keep_alive_interval=2,read_timeout=5,foo=1"
    found = spec(f"--rdzv-conf={conf}", "--shutdown-timeout=8", "--nproc-per-node=2")
    times = found.timeouts
    assert (times.rendezvous_s, times.join_window_s, times.lease_s, times.grace_s) == (90, 7, 6, 8)
    assert [note for note in found.notes if "foo" in note]
    assert not [note for note in found.notes if "OMP" in note]
    assert spec(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="4").timeouts.grace_s == 4
    assert spec().timeouts.grace_s == 30


def test_output_and_signals(train: None) -> None:
    output = spec("-r", "0:1,12:3", "-t3", "--local-ranks-filter=0,12", "--duplicate-stderr-filters=a,,b,c").output
    assert output.redirects.has(12, STDERR)
    assert not output.redirects.has(0, STDERR)
    assert output.on_terminal(12, STDERR), "tee wins over redirects"
    assert not output.on_terminal(1, STDOUT), "filtered"
    assert output.words(STDERR) == ("a,b", "c")
    assert spec(TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="$rank:").output.prefix == "$rank:"
    only = spec("-r3").output
    assert not only.on_terminal(0, STDOUT)
    assert only.needs_files
    assert spec("--signals-to-handle=SIGTERM,SIGUSR1").signals == (signal.SIGTERM, signal.SIGUSR1)


def test_what_is_run(train: None) -> None:
    assert (spec("--run-path", "--no-python").entry, spec().entry) == ("path", "path")
    assert (spec("--no-python").entry, spec("-m").entry) == ("exec", "module")
    found = parse(["-m", "mod", "x"], {**ENV, "PYTHON_EXEC": "/bin/other"})
    assert (found.entry, found.command) == ("exec", ("/bin/other", "-u", "-m", "mod", "x"))
    assert spec("--nproc-per-node=cpu").num_workers == len(os.sched_getaffinity(0))


def test_a_script_that_cannot_be_read_again_and_a_folder_that_is_gone(train: None, tmp_path: Path) -> None:
    os.mkfifo("pipe.py")
    with pytest.raises(UsageError, match=r"pipe\.py' is a pipe"):
        parse(["pipe.py"], ENV)
    script, gone = tmp_path / "train.py", tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(UsageError, match="folder that this was started in is gone"):
        parse([str(script)], ENV)


def test_a_name_of_the_run_that_no_file_or_key_can_have(train: None) -> None:
    assert spec(f"--rdzv-id={'x' * 128}").run_id == "x" * 128
    with pytest.raises(UsageError, match="128 bytes at most"):
        spec(f"--rdzv-id={'ü' * 65}")


def test_sizes_of_the_mesh_and_the_rack(train: None) -> None:
    found = spec(
        "--nnodes=2", "--nproc-per-node=8", "--ep=8", "--etp=1", "--tp=2", "--dp-shard=2", "--mesh-order=dp-pp-cp-tp"
    )
    assert found.sizes == ParallelConfig(dp=4, ep=8, etp=1, tp=2, dp_shard=2, order=("dp", "pp", "cp", "tp"))
    assert found.sizes.at_world(16) == ParallelConfig(dp=8, ep=8, etp=1, tp=2, dp_shard=2, order=found.sizes.order)
    assert spec("--nproc-per-node=4", "--ep=4").sizes == ParallelConfig(dp=4, ep=4), "dp is what the nodes give"
    assert spec(TENPLEXRUN_NODE_LABELS="rack=r1").rack == "r1"
    assert spec().rack is None
    for wrong, says in (
        (("--ep=3", "--nproc-per-node=4"), "ep=3"),
        (("--etp=3", "--nproc-per-node=4"), "etp=3"),
        (("--dp-shard=3", "--nproc-per-node=4"), "dp_shard=3"),
        (("--dp-shard=-1",), "dp_shard=-1"),
        (("--ep=0", "--tp=0"), "impossible layout"),
        (("--mesh-order=tp-pp-dp-cp",), "ends with tp"),
        (("--mesh-order=pp-tp",), "name each of"),
        (("--node-labels=zone=1",), "rack=NAME"),
        (("--node-labels=rack=",), "rack=NAME"),
    ):
        with pytest.raises(UsageError, match=says):
            spec(*wrong)
