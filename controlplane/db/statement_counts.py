"""How many statements a database has been sent, from `pg_stat_statements`: for benchmarks.

The module must be preloaded (`shared_preload_libraries`) and its extension made by a superuser. It counts
what clients send; what a function runs inside is part of its call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controlplane.db.tx import Tx

PRELOAD_SETTING = {"shared_preload_libraries": "pg_stat_statements"}


@dataclass(frozen=True, slots=True)
class StatementCounts:
    """Since the server started. `transactions` are explicit ones that ended, and in `statements` is no part of them."""

    statements: int
    transactions: int

    def __sub__(self, earlier: StatementCounts) -> StatementCounts:
        return StatementCounts(self.statements - earlier.statements, self.transactions - earlier.transactions)


@dataclass(frozen=True, slots=True)
class StatementCalls:
    """How often one statement was sent; `query` has its constants replaced."""

    query: str
    calls: int


def load_statement_calls(tx: Tx) -> list[StatementCalls]:
    """Return the calls of each statement since the server started, most first. Needs a superuser."""
    return tx.rows(
        StatementCalls,
        """
        select query, sum(calls)::bigint as calls
          from pg_stat_statements
         where dbid = (select oid from pg_database where datname = current_database())
         group by query order by calls desc, query
        """,
    )


def enable_statement_counts(tx: Tx) -> None:
    """Begin to count in this database. Needs a superuser."""
    tx.execute("create extension if not exists pg_stat_statements")


def load_statement_counts(tx: Tx) -> StatementCounts:
    """Return the counts of this database. Needs a superuser."""
    counts = tx.row(
        StatementCounts,
        """
        select coalesce(sum(calls) filter (where control is null), 0)::bigint as statements,
               coalesce(sum(calls) filter (where control in ('commit', 'rollback')), 0)::bigint as transactions
          from (
            select calls, substring(lower(query) from '^\\s*(begin|commit|rollback|savepoint|release)\\M') as control
              from pg_stat_statements
             where dbid = (select oid from pg_database where datname = current_database())
          ) as counted
        """,
    )
    assert counts is not None, "an aggregate has one row"
    return counts
