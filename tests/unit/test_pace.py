"""When snapshots are taken: rank 0's decisions."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tenplexrun.core.pace import MAX_GAP, Interval, Pace, Turns, Word


@pytest.mark.parametrize("text", ["1", "20", "30s", "0.5s", "auto"])
def test_what_people_write_comes_back(text: str) -> None:
    assert str(Interval.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "1.5", "0s", "-2s", "infs", "nans", "s", "", "x", "1m", "-5", "ten", "5m", "1e3s", "1_0", " 5", "²"],
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"steps|above 0"):
        Interval.parse(text)


def play(every: str, until: int, step_s: float, cost_s: float = 0.0, commit_s: float = 0.0) -> tuple[list[int], int]:
    """The steps whose snapshots are taken, and how many words it needs. `commit_s`: from taking one to its commit."""
    pace, turns = Pace(Interval.parse(every), 0, 0.0), Turns(Interval.parse(every), 0, by_word=True)
    taken, words, now, committed_at = [], 0, 0.0, 0.0
    for step in range(1, until):
        now += step_s
        if turns.asks(step):
            word, words = pace.decide(step, now, now < committed_at), words + 1
            turns.hear(word)
            if word.take:
                taken.append(step)
                now += cost_s
                committed_at = now + commit_s
                pace.cost(cost_s)
    return taken, words


def test_steps_are_multiples_but_for_the_first_of_a_round() -> None:
    assert play("5", 22, 1.0) == ([1, 5, 10, 15, 20], 5)
    assert play("1", 6, 1.0, commit_s=0.5)[0] == [1, 2, 3, 4, 5], "what is committed in time costs no step"


def test_a_slow_replication_is_waited_for_by_skipping_and_its_links_rest_as_long() -> None:
    taken, _ = play("1", 40, 1.0, commit_s=3.5)
    assert taken == [1, 9, 17, 25, 33]
    assert play("10", 42, 1.0, commit_s=12.5)[0][:2] == [1, 27]


def test_seconds_are_kept_within_a_step_and_few_words_are_said() -> None:
    taken, words = play("30s", 1000, 0.5)
    gaps = {after - before for before, after in pairwise(taken)}
    assert gaps <= {60, 61}
    assert words < 1000 / 5
    assert play("0.1s", 5, 1.0)[0] == [1, 2, 3, 4]


def test_steps_that_become_slower_are_noticed() -> None:
    pace = Pace(Interval.parse("100s"), 0, 0.0)
    assert pace.decide(1, 0.001, False).take
    assert pace.decide(1 + MAX_GAP, 1.0, False) == Word(False, 1 + 2 * MAX_GAP)
    assert pace.decide(1 + 2 * MAX_GAP, 99.0, False) == Word(False, 2 + 2 * MAX_GAP)
    assert pace.decide(2 + 2 * MAX_GAP, 101.0, False).take


def test_auto_costs_two_percent() -> None:
    taken, _ = play("auto", 2000, 0.1, cost_s=0.2)
    spent = 0.2 * len(taken)
    assert 0.015 < spent / (2000 * 0.1 + spent) <= 0.021
    assert play("auto", 10, 1.0, cost_s=0.001)[0] == list(range(1, 10)), "each step, where that is cheap enough"


def test_slots_take_turns_and_without_words_steps_alone_decide() -> None:
    turns = Turns(Interval.parse("3"), 4, by_word=False)
    assert [step for step in range(4, 13) if turns.due(step)] == [6, 9, 12]
    assert [turns.take(step) for step in (6, 9, 12)] == [0, 1, 0]
    assert turns.sealed == 12
    assert not turns.asks(5)
