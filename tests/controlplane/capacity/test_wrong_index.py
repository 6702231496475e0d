"""An index that takes GPUs for what they are not, with the node's generation right, sells none of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from controlplane.db.time import load_now
from tests.controlplane.capacity.test_indexes import put_wrong
from tests.controlplane.capacity.test_mig import THREES, WHOLE, partition
from tests.controlplane.capacity.test_shares import share
from tests.support.ledgers import LedgerFleet, open_fleet

if TYPE_CHECKING:
    import pytest

    from controlplane.db.tx import Tx
    from controlplane.model.nodeview import NodeView
    from tests.support.postgres import Dsn


async def only_view(fleet: LedgerFleet) -> NodeView:
    def look(tx: Tx) -> NodeView:
        (node,) = fleet.tools.indexes.nodes(tx, fleet.pool_id, load_now(tx))
        return node

    return await fleet.run(look)


async def assert_not_sold(fleet: LedgerFleet, view: NodeView, gpus: int, monkeypatch: pytest.MonkeyPatch, **asked: Any):
    """What the view makes of the node is planned, refused by the commit, and planned anew from the rows."""
    reservation_id = await fleet.draft(gpus, **asked)
    ((generation,),) = fleet.execute("select placement_gen from node")
    await only_view(fleet)
    put_wrong(fleet.tools.indexes, fleet.pool_id, replace(view, placement_gen=generation))
    monkeypatch.setattr(fleet.tools.indexes, "_read_changes", lambda *_: False)
    await fleet.try_place(reservation_id)
    assert fleet.execute("select count(*) from booking") == [(0,)]
    fleet.assert_sound()


async def test_a_gpu_in_mig_mode_is_not_sold_whole(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        before = await only_view(fleet)
        await partition(fleet, 0, THREES)
        await assert_not_sold(fleet, before, 8, monkeypatch)


async def test_a_gpu_in_time_slots_is_not_sold_whole(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        before = await only_view(fleet)
        await share(fleet, 0, 4)
        await assert_not_sold(fleet, before, 8, monkeypatch)


async def test_a_whole_gpu_is_not_sold_in_time_slots(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await share(fleet, 0, 4)
        before = await only_view(fleet)
        await share(fleet, 0, 1)
        await assert_not_sold(fleet, before, 0, monkeypatch, parts=["slot.1/4=1"])


async def test_a_mig_instance_of_another_layout_is_not_sold(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        await partition(fleet, 7, THREES)
        before = await only_view(fleet)
        await partition(fleet, 7, WHOLE)
        await assert_not_sold(fleet, before, 0, monkeypatch, parts=["mig.3g.40gb/24=1"])


async def test_gpus_that_no_link_joins_are_not_sold_as_joined(dsn: Dsn, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        before = await only_view(fleet)
        assert before.groups, "all of them are joined"
        fleet.execute("update device set nvlink_group = slot / 2")
        await assert_not_sold(fleet, before, 4, monkeypatch, topology="nvlink-all")


async def test_a_node_without_the_label_is_not_sold_as_one_that_has_it(
    dsn: Dsn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fleet(dsn, nodes=1) as fleet:
        labelled = replace(await only_view(fleet), labels=(("zone", "a"),))
        await assert_not_sold(fleet, labelled, 1, monkeypatch, selector=["zone=a"])
