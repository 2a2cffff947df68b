"""A snapshot is committed once every node of its round has sealed it, and holds what it owes of it."""

from __future__ import annotations

from tenplexrun.core.commits import Commits, News

NOTHING = News()


def test_the_last_report_commits() -> None:
    commits = Commits(1)
    assert commits.expect(["a", "b"]) == NOTHING
    assert commits.report("a", 5, held=True) == NOTHING
    assert commits.report("b", 5, held=True) == News(commit=5)
    assert commits.committed == 5


def test_reports_may_come_before_the_round_is_known() -> None:
    commits = Commits(1)
    assert commits.report("a", 5, held=True) == NOTHING
    assert commits.report("b", 4, held=True) == NOTHING
    assert commits.expect(["a", "b"]) == News(commit=4)
    assert commits.report("b", 5, held=True) == News(commit=5)


def test_what_is_said_again_changes_nothing() -> None:
    commits = Commits(1)
    commits.expect(["a"])
    assert commits.report("a", 5, held=True) == News(commit=5)
    assert commits.report("a", 5, held=True) == NOTHING
    assert commits.report("a", 4, held=False) == NOTHING
    assert commits.known == News(commit=5)


def test_what_somebody_owes_is_replicated_before_it_is_committed() -> None:
    commits = Commits(1)
    commits.expect(["a", "b", "c"])
    assert commits.report("a", 5, held=False) == NOTHING
    assert commits.report("b", 5, held=True) == NOTHING
    assert commits.report("c", 5, held=False) == News(replicate=5)
    assert commits.report("a", 5, held=True) == NOTHING
    assert commits.known == News(replicate=5)
    assert commits.report("c", 5, held=True) == News(commit=5)


def test_a_later_decider_hears_of_a_commit_that_not_all_have_heard_of() -> None:
    """The one before told a, and died: b waits for that commit before it goes on."""
    commits = Commits(1)
    commits.expect(["a", "b"])
    assert commits.report("b", 5, held=True) == NOTHING
    assert commits.report("a", 6, held=False, committed=5) == News(commit=5)
    assert commits.report("b", 6, held=False, committed=5) == News(replicate=6)
    assert commits.report("a", 6, held=True) == NOTHING
    assert commits.report("b", 6, held=True) == News(commit=6)
