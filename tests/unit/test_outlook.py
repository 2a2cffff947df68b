"""What a decider makes of what it watched and wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from tenplexrun.core import rounds
from tenplexrun.core.outlook import Outlook
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.rounds import Ack, Cause, Member, Round

BOTH = ("a", "b")
GATHERING = Round(2, "gathering", Cause("start", "", 0.0), "a:1", ParallelConfig())


@dataclass(frozen=True)
class Entry:
    value: str
    token: str


def entry(record: Member | Round | Ack, token: str) -> Entry:
    return Entry(json.dumps(rounds.to_json(record)), token)


def content(**more: Entry) -> dict[str, Entry]:
    members = {f"e/members/{n}": entry(Member(n, "h", f"{n}:1", f"{n}:2", 1), n) for n in ("a", "b")}
    return {"e/round": entry(GATHERING, "7"), **members, **{key.replace("__", "/"): one for key, one in more.items()}}


def test_it_goes_on_from_its_own_word_while_the_watch_is_behind() -> None:
    outlook = Outlook("e")
    outlook.observe(content())
    running = entry(replace(GATHERING, phase="running"), "8")
    outlook.wrote("7", running)
    assert outlook.current is running
    outlook.observe({**content(), "e/round": entry(replace(GATHERING, number=3), "9")})  # another's: it is newer
    assert outlook.round is not None
    assert outlook.round.number == 3


def test_it_remembers_since_when_things_are_as_they_are() -> None:
    outlook = Outlook("e")
    outlook.observe(content())
    assert outlook.view("a:1", 10.0, 0.0, BOTH).since == 10.0
    acked = content(e__acks__2__b=entry(Ack("b", "done"), "8"), e__acks__1__b=entry(Ack("b", "holding"), "3"))
    del acked["e/members/a"]
    outlook.observe(acked)
    view = outlook.view("a:1", 20.0, 0.0, BOTH)
    assert (view.since, view.seen, set(view.acks), view.acks["b"].state) == (10.0, {"b": 10.0}, {"b"}, "done")
    outlook.observe({**acked, "e/round": entry(replace(GATHERING, phase="running"), "9")})
    assert outlook.view("a:1", 30.0, 0.0, BOTH).since == 30.0


def test_keys_of_the_evicted_are_to_be_removed() -> None:
    outlook = Outlook("e")
    outlook.observe(content(e__round=entry(replace(GATHERING, evicted=("b", "c")), "8")))
    assert outlook.condemned == ["e/members/b"]


def test_it_knows_since_when_a_member_has_no_link() -> None:
    outlook = Outlook("e")
    outlook.observe(content())
    assert outlook.view("a:1", 10.0, 0.0, ["a"]).unlinked == {"b": 10.0}
    assert outlook.view("a:1", 12.0, 0.0, ["a"]).unlinked == {"b": 10.0}
    assert outlook.view("a:1", 13.0, 0.0, BOTH).unlinked == {}
    assert outlook.view("a:1", 14.0, 0.0, ["a"]).unlinked == {"b": 14.0}
