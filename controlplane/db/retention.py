"""Statements that forget: what is old goes in chunks, each small enough for one transaction.

History that is partitioned goes by whole months instead, which costs nothing per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from controlplane.db.tx import Tx

History = Literal["audit_event", "inventory_snapshot", "usage_window", "booking_history"]


def make_partitions(tx: Tx) -> None:
    """Make the history tables' partitions for this month and the next two."""
    tx.execute("select compute_housekeeping()")


def drop_months(tx: Tx, history: History, keep_months: int) -> int:
    """Drop whole months of a history table, except this one and the `keep_months` before it; return how many."""
    dropped = tx.value("select compute_drop_months(%s, %s)", (history, keep_months))
    assert isinstance(dropped, int)
    return dropped


def prune_idempotency(tx: Tx, *, older_than_s: float, limit: int) -> int:
    """Forget idempotency keys: from then on a repeat is a new request."""
    return tx.execute(
        """
        delete from idempotency where (principal, method, key) in (
          select principal, method, key from idempotency
          where created_at < compute_now() - make_interval(secs => %s)
          order by created_at, principal, method, key limit %s for update skip locked
        )
        """,
        (older_than_s, limit),
    )


def prune_join_replays(tx: Tx, *, limit: int) -> int:
    """Forget answers of joins that may no longer be replayed."""
    return tx.execute(
        """
        delete from join_replay where (token_id, key_id) in (
          select token_id, key_id from join_replay where expires_at <= compute_now()
          order by expires_at, token_id, key_id limit %s for update skip locked
        )
        """,
        (limit,),
    )


def prune_commands(tx: Tx, *, older_than_s: float, limit: int) -> int:
    """Forget commands that ended that long ago, and their deliveries."""
    return tx.execute(
        """
        with old as materialized (
          select command_id from command
          where finished_at < compute_now() - make_interval(secs => %(older_than_s)s)
          order by command_id limit %(limit)s for update skip locked
        ), deliveries as (
          delete from command_delivery d using old where d.command_id = old.command_id
        )
        delete from command c using old where c.command_id = old.command_id
        """,
        {"older_than_s": older_than_s, "limit": limit},
    )
