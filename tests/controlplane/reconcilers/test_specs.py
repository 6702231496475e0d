"""A stored spec is what the rows say, in the present incarnation, by the present key; else it is written anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.capacity.place import LedgerTools
from controlplane.reconcilers.specs import rewrite_if_stale
from shared.signing import IntentSigner, KeyClass, Verifier
from tests.support.ledgers import open_fleet

if TYPE_CHECKING:
    from tests.support.ledgers import LedgerFleet
    from tests.support.postgres import Dsn


async def rewrite(fleet: LedgerFleet) -> bool:
    return await fleet.run(rewrite_if_stale, fleet.tools, fleet.nodes[0].node_id)


def generation(fleet: LedgerFleet) -> tuple[int, int]:
    return fleet.execute("select incarnation, generation from node_spec")[0]


async def test_a_spec_that_is_right_is_left_alone(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        assert not await rewrite(fleet)
        assert fleet.execute("select count(*) from node_spec") == [(0,)]
        held = await fleet.reserve(4)
        assert not await rewrite(fleet)
        await fleet.bound(held)
        await fleet.release(held)
        assert not await rewrite(fleet)
        await fleet.released(held)
        assert not await rewrite(fleet)


async def test_a_new_incarnation(dsn: Dsn) -> None:
    """After a restore the rows are older than what the nodes have seen; the incarnation goes before the generation."""
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(4)
        before = generation(fleet)
        fleet.execute("update cluster set incarnation = incarnation + 1")
        assert await rewrite(fleet)
        assert generation(fleet) == (before[0] + 1, before[1] + 1)
        assert (await fleet.spec(fleet.nodes[0])).incarnation == before[0] + 1
        assert not await rewrite(fleet)


async def test_a_new_intent_key(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(4)
        signer = IntentSigner(Ed25519PrivateKey.generate())
        fleet.tools = LedgerTools(signer, fleet.tools.ids, fleet.tools.indexes)
        fleet.verifier = Verifier({KeyClass.INTENT: [signer.public_key]})
        assert await rewrite(fleet)
        assert len((await fleet.spec(fleet.nodes[0])).assignments) == 1
        assert not await rewrite(fleet)


async def test_rows_that_were_changed_by_hand(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(2)
        fleet.execute("update allocation set device_uuids = array['GPU-0000-6', 'GPU-0000-7']")
        assert await rewrite(fleet)
        (assignment,) = (await fleet.spec(fleet.nodes[0])).assignments
        assert assignment.device_uuids == ["GPU-0000-6", "GPU-0000-7"]


async def test_a_spec_that_nobody_can_read(dsn: Dsn) -> None:
    async with open_fleet(dsn) as fleet:
        await fleet.reserve(2)
        fleet.execute("alter table node_spec disable trigger user")
        fleet.execute("update node_spec set envelope = 'damaged'")
        fleet.execute("alter table node_spec enable trigger user")
        assert await rewrite(fleet)
        assert len((await fleet.spec(fleet.nodes[0])).assignments) == 1
