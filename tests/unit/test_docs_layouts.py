"""Every example of docs/layouts.md, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from numpy.testing import assert_array_equal

from tenplexrun import ctl
from tenplexrun.core import layout as language
from tenplexrun.core.layout import Layout
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.validation import check_coverage
from tenplexrun.errors import LayoutError

TEXT = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## (.+?)$.*?```python\n(.*?)```", TEXT, re.MULTILINE | re.DOTALL)


def array(layout: Layout, fqn: str, config: ParallelConfig, rank: int) -> Any:
    """A rank's own array, when each element of the global tensor is its row-major index, and padding -1."""
    spec, own = layout.spec(fqn), layout.local(fqn, config, config.coord(rank))
    if own is None:
        return None
    check_coverage(layout, config)
    numbers = np.arange(spec.whole.num_elements).reshape(spec.shape)
    stored = np.full(own.shape, -1)
    flat = stored.reshape(-1)
    for part in own.parts:
        strides = tuple(stride * flat.itemsize for stride in part.strides)
        view = as_strided(flat[part.offset :], part.region.lengths, strides)
        assert (view == -1).all(), "parts are disjoint"
        view[...] = numbers[part.region.slices]
    return stored


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_an_example_of_the_documentation_is_true(title: str, code: str) -> None:
    names = {
        **{name: getattr(language, name) for name in language.__all__},
        "ParallelConfig": ParallelConfig,
        "LayoutError": LayoutError,
        "array": array,
        "np": np,
        "pytest": pytest,
        "assert_equal": assert_array_equal,
    }
    exec(compile(code, f"docs/layouts.md: {title}", "exec"), names)


def test_the_plan_that_is_shown_is_the_one_that_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [command, *shown] = re.findall(r"```\n\$ tenplexctl (.*?)```", TEXT, re.DOTALL)[0].splitlines()
    names: dict[str, Any] = {**vars(language), "ParallelConfig": ParallelConfig}
    exec(dict(EXAMPLES)["A file for `tenplexctl plan`"], names)
    path = tmp_path / "model.json"
    path.write_text(names["saved"])
    with pytest.raises(SystemExit) as ended:
        ctl.main(command.replace("model.json", str(path)).split())
    assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines() == shown


def test_each_heading_has_its_example() -> None:
    assert len(EXAMPLES) == len(re.findall(r"^## ", TEXT, re.MULTILINE)) >= 17
