"""Bytes that are damaged on their way between stores, or where they lie: found out, asked for again, never taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from proxies import FlippingProxy

from tenplexrun.core.snapshots import SnapshotId
from tenplexrun.errors import WireError
from tenplexrun.store.pulls import Order, PullJob
from tenplexrun.store.transfer import Peers
from tenplexrun.store.wire import PREFIX

from .test_store_transfer import LAYOUT, ONE, TOKEN, WHOLE, Node, Nodes, nodes, tensor_files

__all__ = ["nodes"]


@pytest.fixture
def proxy(nodes: Nodes) -> Iterator[FlippingProxy]:
    made = FlippingProxy(nodes.add("a").address)
    yield made
    made.close()


def order(nodes: Nodes, snapshot: SnapshotId, **change: Any) -> Order:
    """All that a new node "c" needs."""
    fetches = [{**fetch, **change} for fetch in nodes.fetches("c", snapshot, WHOLE)]
    record = {"round": 2, "snapshot": snapshot.to_json(), "layout": LAYOUT.to_json(), "claim": WHOLE.to_json()}
    return Order.from_json({**record, "fetches": fetches})


def pull(joiner: Node, wanted: Order) -> None:
    PullJob(joiner.arena, Peers(TOKEN, 1.0), wanted, patience_s=20.0).run()


POSITIONS = [0, 5, 7, 10, 15, 19, 20, 60, 200, 1000, 100_000, 1_500_000, 3_500_000]


@pytest.mark.parametrize("position", [*POSITIONS, -1, -10, -15, -PREFIX.size - 30, -PREFIX.size - 200])
def test_a_bit_that_flips_on_its_way_from_the_only_holder_is_asked_for_again(
    nodes: Nodes, proxy: FlippingProxy, position: int
) -> None:
    """In the frame of an answer, its header, a region or a checksum; and in the request."""
    snapshot = nodes.all["a"].hold(ONE, (0,))
    joiner = nodes.add("c")
    proxy.position, proxy.flips = position, 1
    pull(joiner, order(nodes, snapshot, address=proxy.address, alternatives=[]))
    assert proxy.flipped == 1
    joiner.check(snapshot, WHOLE)


def test_a_way_that_damages_everything_is_given_up_and_another_holder_asked(nodes: Nodes, proxy: FlippingProxy) -> None:
    snapshot = nodes.all["a"].hold(ONE, (0,))
    other, joiner = nodes.add("b"), nodes.add("c")
    other.hold(ONE, (0,))
    proxy.position, proxy.flips = 2000, 1 << 30
    alone = order(nodes, snapshot, address=proxy.address, alternatives=[])
    with pytest.raises(WireError, match=r"the first is \w+ .* failed its checksum"):
        pull(joiner, alone)
    assert tensor_files(joiner) == []
    pull(joiner, order(nodes, snapshot, address=proxy.address, alternatives=[other.address]))
    joiner.check(snapshot, WHOLE)
