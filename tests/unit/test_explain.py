"""`tenplexctl plan`: golden plans of named resizes, its options, its errors.

New golden files: TENPLEX_GOLDEN=write pytest tests/unit/test_explain.py; look at the difference before you commit it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import pytest

from tenplexrun import ctl, explain
from tenplexrun.core import models
from tenplexrun.core.layout import Layout, Shard, TensorSpec
from tenplexrun.core.planner import ReconfigurationPlan
from tenplexrun.core.validation import check_coverage
from tenplexrun.errors import LayoutError, StateLostError, UsageError

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"

SMALL = models.with_adam(models.parameters(models.Transformer(4, 64, 256, 8, 4, 1000)))
EXPERTS = models.with_adam(models.parameters(models.Transformer(4, 64, 128, 8, 4, 1000, experts=8)))
TIED = models.with_adam(
    models.parameters(models.Transformer(8, 64, 256, 8, 8, 1000, gated=False, bias=True, tied=True, positions=32))
)
MODELS = {"small": SMALL, "experts": EXPERTS, "tied": TIED}

RESIZES = {
    "unchanged": "--model small --from dp=2,tp=4 --to dp=2,tp=4",
    "a-replica-joins": "--model small --from dp=2,tp=8 --to dp=3,tp=8",
    "a-replica-is-lost": "--model small --from dp=3,tp=8 --to dp=2,tp=8 --lost node1",
    "tp-doubles": "--model small --from dp=4,tp=2 --to dp=2,tp=4 --nproc-per-node 4",
    "tp-halves": "--model small --from dp=2,tp=4 --to dp=4,tp=2 --nproc-per-node 4",
    "pp-halves-with-a-loss": "--model tied --from pp=4,dp=2,tp=2 --to pp=2,dp=3,tp=2 --nproc-per-node 2 --lost node1",
    "pp-doubles": "--model tied --from pp=2,dp=2,tp=2 --to pp=4,dp=1,tp=2 --nproc-per-node 2",
    "vocabulary-padding": "--model tied --from tp=1,dp=4 --to tp=4,dp=1 --nproc-per-node 4",
    "ep-doubles": "--model experts --from dp=8,ep=2 --to dp=8,ep=4 --nproc-per-node 2",
    "ep-and-etp": "--model experts --from dp=4,ep=2,tp=2 --to dp=2,ep=4,tp=2,etp=1 --nproc-per-node 4",
    "unequal-nodes": "--model small --from dp=4,tp=2 --to dp=3,tp=2 --nodes-from a:2,b:4,c:2 --nodes-to c:2,b:4",
    "all-new-nodes": "--model small --from pp=2,tp=4 --to pp=2,tp=4 --nodes-from a:4,b:4 --nodes-to c:4,d:4",
    "order-kept": "--model small --from pp=2,tp=4 --to pp=2,tp=4 --nodes-from a:4,b:4 --nodes-to b:4,a:4 --keep-order",
    "another-order-of-axes": "--model small --from pp=2,dp=2,tp=2 --to pp=2,dp=2,tp=2,order=dp-pp-cp-tp"
    " --nproc-per-node 4",
}


def arguments(line: str, folder: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    words = line.split()
    model = words[words.index("--model") + 1]
    if model in MODELS:
        path = folder / f"{model}.json"
        path.write_text(json.dumps(MODELS[model].to_json()))
        words[words.index("--model") + 1] = str(path)
    return parser.parse_args(words)


@pytest.mark.parametrize("name", RESIZES)
def test_a_named_resize_is_planned_as_ever(name: str, tmp_path: Path) -> None:
    resize = explain.resize_of(arguments(RESIZES[name], tmp_path))
    found = explain.explain(resize)
    record = explain.to_json(resize, found, fetches=True)
    assert record["num_bytes"] == record["lower_bound_bytes"]
    assert sum(one["bytes"] for one in record["operations"].values()) == record["num_bytes"]
    assert ReconfigurationPlan.from_json(record.pop("plan")) == found.plan
    shown = f"tenplexctl plan {RESIZES[name]}\n\n{explain.text(resize, found)}\n\n{json.dumps(record, indent=1)}\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("TENPLEX_GOLDEN") == "write":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        path.write_text(shown)
    assert path.read_text() == shown


def test_the_order_of_nodes_that_moves_least_is_taken(tmp_path: Path) -> None:
    line = RESIZES["order-kept"].removesuffix("--keep-order")
    resize = explain.resize_of(arguments(line, tmp_path))
    assert explain.explain(resize).plan.num_bytes == 0


def test_the_catalogue_has_the_published_numbers_of_parameters() -> None:
    for name, billions in (("gpt3-175b", 175), ("llama3-70b", 71), ("mixtral-8x7b", 47)):
        layout = models.layout(name)
        counted = sum(spec.whole.num_elements for spec in layout.tensors if spec.fqn.startswith("model."))
        assert round(counted / 1e9) == billions
    with pytest.raises(LayoutError, match="no model is called"):
        models.layout("gpt5")
    check_coverage(EXPERTS, explain._config("pp=2,dp=2,ep=2,tp=2"))


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("--model nothing --from dp=1 --to dp=1", UsageError, "none of gpt3-175b"),
        ("--model absent.json --from dp=1 --to dp=1", UsageError, "cannot read a layout"),
        ("--model small --from mp=1 --to dp=1", UsageError, "no size of an axis"),
        ("--model small --from dp=0 --to dp=1", UsageError, "at least 1"),
        ("--model small --from dp=8 --to dp=8 --lost node9", UsageError, "not among the nodes now"),
        ("--model small --from dp=8 --to dp=8 --nodes-to node0 --lost node0", UsageError, "cannot be lost"),
        ("--model small --from dp=8 --to dp=8 --nodes-from 2", LayoutError, "8 ranks, 2 nodes 16"),
        ("--model small --from dp=8 --to dp=8 --nodes-from a:2", LayoutError, "correct --nodes-from"),
        ("--model small --from dp=8 --to dp=8 --nodes-from a:4,a:4", UsageError, "named twice"),
        ("--model small --from dp=8 --to dp=8 --nodes-from a:x", UsageError, "no NODE"),
        ("--model small --from dp=8 --to dp=8 --link 0", UsageError, "more than 0"),
        ("--model small --from dp=8 --to dp=8 --link nan", UsageError, "more than 0"),
        ("--model small --from dp=8,dp=4 --to dp=8", UsageError, "given twice"),
        ("--model small --from dp=² --to dp=8", UsageError, "no size of an axis"),
        ("--model small --from dp=99999999999 --to dp=8", UsageError, "are the most"),
        ("--model small --from dp=8 --to dp=8 --nodes-from 9999999999", LayoutError, "has 8 ranks"),
        ("--model empty.json --from dp=1 --to dp=1", LayoutError, "lacks schema, tensors.*docs/layouts.md"),
        ("--model deep.json --from dp=1 --to dp=1", UsageError, "cannot read a layout"),
        ("--model small --from tp=3 --to tp=4", LayoutError, "does not divide by tp=3"),
    ],
)
def test_what_is_asked_wrongly_is_refused(line: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "empty.json").write_text("{}")
    for name in ("deep.json", "empty.json"):
        line = line.replace(name, str(tmp_path / name))
    if "tp=3" in line:
        line += " --nproc-per-node 3"
    with pytest.raises(error, match=message):
        explain.resize_of(arguments(line, tmp_path))


def test_lost_state_is_named(tmp_path: Path) -> None:
    resize = explain.resize_of(arguments("--model small --from pp=2,tp=4 --to pp=1,dp=2,tp=4 --nproc-per-node 4"
                                         " --lost node0", tmp_path))  # fmt: skip
    with pytest.raises(StateLostError, match=r"model\.embed\.weight"):
        explain.explain(resize)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layout.json"
    path.write_text(json.dumps(Layout((TensorSpec("w", (4,), "float32", (Shard(0, "tp"),)),)).to_json()))
    line = ["plan", "--model", str(path), "--from", "tp=2", "--to", "tp=4", "--nproc-per-node", "2", "--link", "1e-9"]
    with pytest.raises(SystemExit) as ended:
        ctl.main([*line, "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["num_bytes"], record["seconds"]) == (8, 8.0)
    assert record["operations"]["split"] == {"fetches": 2, "bytes": 8}
    with pytest.raises(SystemExit):
        ctl.main([*line, "--baselines"])
    told = capsys.readouterr().out
    assert "bound      8 B must cross the network at least: met" in told
    assert "central    " in told
