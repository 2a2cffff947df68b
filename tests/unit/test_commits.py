"""A snapshot is committed once every node of its round has sealed it."""

from __future__ import annotations

from tenplexrun.core.commits import Commits


def test_the_last_report_commits() -> None:
    commits = Commits(1)
    assert commits.expect(["a", "b"]) is None
    assert commits.sealed("a", 5) is None
    assert commits.sealed("b", 5) == 5
    assert commits.committed == 5


def test_reports_may_come_before_the_round_is_known() -> None:
    commits = Commits(1)
    assert commits.sealed("a", 5) is None
    assert commits.sealed("b", 4) is None
    assert commits.expect(["a", "b"]) == 4
    assert commits.sealed("b", 5) == 5


def test_what_is_said_again_changes_nothing() -> None:
    commits = Commits(1)
    commits.expect(["a"])
    assert commits.sealed("a", 5) == 5
    assert commits.sealed("a", 5) is None
    assert commits.sealed("a", 4) is None
    assert commits.committed == 5
