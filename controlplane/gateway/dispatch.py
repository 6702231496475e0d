"""Dispatch: what the database has for this gateway's sessions, sent while their lanes have credit.

One task looks every second, and when it is poked: by LISTEN (somebody wrote a spec or a command), by
a session that opened a lane or got credit. Pokes within `poke_window_s` are one. A poke that names
nodes looks at those alone, one that does not and the tick look at all, so a lost poke costs a second.

*Specs* are a latest-wins slot: a session is sent a spec that is newer than the last one it was sent,
whatever became of those between. *Commands* are noted as delivered before they are sent; one for
which a lane has no credit stays in the database.

Every `sweep_s` it also ends sessions that have a newer one at another gateway, or whose authorization is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog
import trio

from controlplane.db.delivery import load_due_commands, load_due_specs, load_specs, record_deliveries
from controlplane.db.sessions import find_ended
from controlplane.db.tx import OPERATING_ERRORS, UnknownCommit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controlplane.db.delivery import DueCommand, DueSpec, Handout
    from controlplane.db.leases import Fence
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.gateway.registry import Registry
    from controlplane.gateway.settings import GatewaySettings
    from shared.metrics import GatewayMetrics
    from shared.wire import Lane

_log = structlog.get_logger()

# A look at all of 10,000 nodes costs the database 5 ms. However often it is asked for, this part of the
# time at most goes into it.
LOOKING_MAX: Final = 0.5
# More nodes than this in one poke are looked up as "all of them".
POKED_NODES_MAX: Final = 256
# Specs fetched in one transaction: at most 10 MiB.
SPECS_PER_FETCH: Final = 200
# Bytes of commands in one transaction.
HANDOUT_BYTES_MAX: Final = 8 * 1024 * 1024
# Sends in one turn of the loop, at 50 us each.
SENDS_PER_TURN: Final = 200
# Between attempts to find out whether deliveries were noted.
RECORD_RETRY_S: Final = 0.5


class Dispatcher:
    """Sends specs and commands to the sessions of one registry."""

    def __init__(
        self, db: Database, fence: Fence, registry: Registry, settings: GatewaySettings, metrics: GatewayMetrics
    ) -> None:
        self._db = db
        self._fence = fence
        self._registry = registry
        self._settings = settings
        self._metrics = metrics
        self._poked = trio.Event()
        self._poked_nodes: set[int] = set()
        self._poked_all = False

    def poke(self) -> None:
        """Something may be to be sent, to anybody."""
        self._poked_all = True
        self._poked.set()

    def poke_node(self, node_id: int) -> None:
        """Something may be to be sent to one node."""
        self._poked_nodes.add(node_id)
        self._poked.set()

    async def run(self) -> None:
        """Send until cancelled. Raises StaleEpoch."""
        swept_at = quiet_until = trio.current_time()
        while True:
            with trio.move_on_after(self._settings.dispatch_every_s) as tick:
                await self._poked.wait()
                # The first poke is answered at once, those that follow it closely together.
                await trio.sleep_until(quiet_until)
            began = trio.current_time()
            nodes = self._take_pokes(tick=tick.cancelled_caught)
            if self._registry:
                try:
                    await self._send(nodes)
                    if began - swept_at >= self._settings.sweep_s:
                        await self._end_sessions()
                        swept_at = began
                except OPERATING_ERRORS as exc:
                    _log.warning("dispatch.postponed", error=repr(exc))
            quiet_until = began + self._settings.poke_window_s
            if nodes is None:
                took_s = trio.current_time() - began
                quiet_until = max(quiet_until, began + took_s / LOOKING_MAX)

    def _take_pokes(self, *, tick: bool) -> set[int] | None:
        """Return the nodes to look at, None for all."""
        nodes, poked_all = self._poked_nodes, self._poked_all
        self._poked_nodes, self._poked_all, self._poked = set(), False, trio.Event()
        return None if tick or poked_all or len(nodes) > POKED_NODES_MAX else nodes

    async def _send(self, nodes: set[int] | None) -> None:
        full: set[tuple[int, Lane]] = set()
        specs, commands = await self._db.run_tx(self._load_due, nodes)
        await self._send_specs(specs)
        while True:
            for part in _parts(self._choose(commands, full)):
                await self._hand_out(part)
            if len(commands) < self._settings.dispatch_batch:
                return
            # More may be behind those for whom there was no room. Each round sends some or names full lanes.
            commands = await self._db.run_tx(self._load_commands, nodes, full)

    def _load_due(self, tx: Tx, nodes: set[int] | None) -> tuple[list[DueSpec], list[DueCommand]]:
        specs = load_due_specs(tx, self._fence, self._settings.gateway_id, node_ids=nodes)
        return specs, self._load_commands(tx, nodes, set())

    def _load_commands(self, tx: Tx, nodes: set[int] | None, full: set[tuple[int, Lane]]) -> list[DueCommand]:
        limit = self._settings.dispatch_batch
        return load_due_commands(tx, self._fence, self._settings.gateway_id, limit=limit, node_ids=nodes, full=full)

    # --- specs -------------------------------------------------------------------------------

    async def _send_specs(self, due: Sequence[DueSpec]) -> None:
        unsent = [
            spec.node_id
            for spec in due
            if (session := self._registry.find(spec.node_id, spec.epoch)) is not None
            and session.sent_spec < (spec.incarnation, spec.generation)
        ]
        for start in range(0, len(unsent), SPECS_PER_FETCH):
            specs = await self._db.run_tx(load_specs, self._fence, unsent[start : start + SPECS_PER_FETCH])
            for spec in specs:
                session = self._registry.find_any(spec.node_id)
                if session is None or session.sent_spec >= (spec.incarnation, spec.generation):
                    continue
                if session.send_spec(spec):
                    self._metrics.dispatch_latency.observe(spec.age_s)

    # --- commands ----------------------------------------------------------------------------

    def _choose(self, due: Sequence[DueCommand], full: set[tuple[int, Lane]]) -> list[DueCommand]:
        """Pick what the lanes have room for; note in `full` which have no more."""
        room: dict[tuple[int, Lane], int] = {}
        chosen: list[DueCommand] = []
        for command in due:
            place = command.node_id, command.lane
            session = self._registry.find(command.node_id, command.epoch)
            if place not in room:
                room[place] = session.room(command.lane) if session is not None else 0
            if room[place]:
                room[place] -= 1
                chosen.append(command)
            else:
                full.add(place)
        return chosen

    async def _hand_out(self, commands: Sequence[DueCommand]) -> None:
        handouts = await self._record(commands)
        for number, handout in enumerate(handouts, 1):
            session = self._registry.find(handout.node_id, handout.epoch)
            if session is not None and session.send_command(handout):
                self._metrics.dispatch_latency.observe(handout.age_s)
            if number % SENDS_PER_TURN == 0:
                await trio.lowlevel.checkpoint()

    async def _record(self, commands: Sequence[DueCommand]) -> list[Handout]:
        """Note the commands as delivered.

        When it is not known whether they are, it is asked until it is: in this epoch nobody would
        send them again. The end of the lease ends the asking, and the epoch with it.
        """
        unknown = False
        while True:
            try:
                return await self._db.run_tx(record_deliveries, self._fence, commands)
            except OPERATING_ERRORS as exc:
                unknown = unknown or isinstance(exc, UnknownCommit)
                if not unknown:
                    raise
                _log.warning("dispatch.commit_unknown", commands=len(commands), error=repr(exc))
                await trio.sleep(RECORD_RETRY_S)

    # --- sessions that are no more -----------------------------------------------------------

    async def _end_sessions(self) -> None:
        ended = await self._db.run_tx(find_ended, self._fence, self._registry.epochs())
        for node_id, revoked in ended.items():
            session = self._registry.find_any(node_id)
            if session is not None:
                session.end("revoked" if revoked else "superseded")


def _parts(commands: Sequence[DueCommand]) -> Iterator[list[DueCommand]]:
    part: list[DueCommand] = []
    size = 0
    for command in commands:
        if part and size + command.size > HANDOUT_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(command)
        size += command.size
    if part:
        yield part
