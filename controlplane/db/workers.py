"""The worker processes that are alive, by their heartbeats."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from controlplane.db.tx import Tx


def heartbeat(tx: Tx, worker_id: str, roles: Collection[str]) -> None:
    """Say that the worker lives; the first time, that it exists."""
    tx.execute(
        """
        insert into worker (worker_id, roles) values (%s, %s)
        on conflict (worker_id) do update set roles = excluded.roles, heartbeat_at = compute_now()
        """,
        (worker_id, sorted(roles)),
    )


def live_workers(tx: Tx, role: str, ttl_s: float) -> list[str]:
    """Return the workers of a role whose heartbeat is younger than `ttl_s` seconds, in the order of their ids."""
    found = tx.tuples(
        """
        select worker_id from worker
        where %(role)s = any (roles) and heartbeat_at > compute_now() - make_interval(secs => %(ttl_s)s)
        order by worker_id
        """,
        {"role": role, "ttl_s": ttl_s},
    )
    return [worker_id for (worker_id,) in found]


def leave(tx: Tx, worker_id: str) -> None:
    """Forget a worker that stops, so that the others take over at their next pass."""
    tx.execute("delete from worker where worker_id = %s", (worker_id,))


def prune(tx: Tx, *, silent_s: float, limit: int) -> int:
    """Forget workers that ended without saying so, and have been silent for `silent_s` seconds."""
    return tx.execute(
        """
        delete from worker where worker_id in (
          select worker_id from worker where heartbeat_at < compute_now() - make_interval(secs => %s)
          order by worker_id limit %s for update skip locked
        )
        """,
        (silent_s, limit),
    )
