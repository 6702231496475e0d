"""What a transaction's function may count on, against a real server."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import pytest
import trio

from controlplane.db import tx as tx_module
from controlplane.db.pool import DatabaseConfig, TxRecord, open_database
from controlplane.db.tx import (
    ATTEMPTS_MAX,
    AbortedTransaction,
    CheckConflict,
    Conflict,
    Contention,
    DatabaseError,
    DatabaseUnavailable,
    DiskFull,
    ExclusionConflict,
    Forbidden,
    LockTimeout,
    ReferenceConflict,
    SerializationFailure,
    TooManyRows,
    TransactionTooLong,
    Tx,
    UniqueConflict,
    UnknownCommit,
)

INSERT = "insert into entry values (%s, %s, %s::int4range)"
WAIT_S = 10


@dataclass(frozen=True)
class Account:
    id: int
    balance: int


def balance(tx: Tx, account: int) -> int:
    found = tx.row(Account, "select id, balance from account where id = %s", [account])
    assert found is not None
    return found.balance


def entries(tx: Tx) -> list[int]:
    return [row[0] for row in tx.tuples("select id from entry order by id")]


async def test_results_come_in_each_shape(scratch: str) -> None:
    def fn(tx: Tx, limit: int, *, start: int) -> None:
        assert tx.rows(
            Account, "select id, balance from account where id between %s and %s order by id", (start, limit)
        ) == [
            Account(2, 100),
            Account(3, 100),
        ]
        assert tx.row(Account, "select id, balance from account where id = %(id)s", {"id": 1}) == Account(1, 100)
        assert tx.row(Account, "select id, balance from account where id = 99") is None
        assert tx.value("select sum(balance) from account") == 400
        assert tx.value("select balance from account where id = 99") is None
        assert tx.tuples("select 1, 'a'") == [(1, "a")]
        assert tx.execute("update account set balance = 0") == 4
        assert tx.executemany(INSERT, [(n, 1, f"[{n},{n + 1})") for n in range(600)]) == 600
        with pytest.raises(TooManyRows):
            tx.row(Account, "select id, balance from account")
        with pytest.raises(TooManyRows):
            tx.value("select id from account")

    async with open_database(DatabaseConfig(scratch)) as database:
        await database.run_tx(fn, 3, start=2)
        assert await database.run_tx(lambda tx: len(entries(tx))) == 600


async def test_columns_go_to_the_fields_of_their_names(scratch: str) -> None:
    @dataclass(frozen=True)
    class Optional:
        id: int
        balance: int = -1

    def fn(tx: Tx) -> None:
        assert tx.rows(Account, "select 5 as balance, 1 as id") == [Account(1, 5)]
        assert tx.rows(Account, "select 1 as id, 5 as balance") == [Account(1, 5)]
        assert tx.rows(Optional, "select 7 as id") == [Optional(7)]
        assert tx.rows(Account, "select 1 as id, 5 as balance where false") == []
        with pytest.raises(TypeError):
            tx.rows(Account, "select 1 as id, 5 as amount")

    async with open_database(DatabaseConfig(scratch)) as database:
        await database.run_tx(fn)


async def test_what_is_prepared_stays_prepared_through_rollbacks(scratch: str) -> None:
    def ask(tx: Tx) -> int:
        for _ in range(10):
            tx.value("select balance from account where id = %s", [1])
        with pytest.raises(CheckConflict), tx.savepoint():
            tx.execute("update account set balance = -1 where id = 1")
        assert balance(tx, 1) == 100
        prepared = tx.value("select count(*) from pg_prepared_statements where starts_with(statement, 'select bal')")
        assert isinstance(prepared, int)
        return prepared

    def fail(tx: Tx) -> None:
        tx.execute("update account set balance = 7 where id = 1")
        raise LookupError

    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database:
        assert await database.run_tx(ask) == 1
        with pytest.raises(LookupError):
            await database.run_tx(fail)
        assert await database.run_tx(ask) == 1


async def test_savepoints_nest(scratch: str) -> None:
    def fn(tx: Tx) -> list[int]:
        with tx.savepoint():
            tx.execute(INSERT, (1, 1, "[0,1)"))
            with pytest.raises(UniqueConflict), tx.savepoint():
                inner(tx)
            tx.execute(INSERT, (3, 1, "[3,4)"))
        return entries(tx)

    def inner(tx: Tx) -> None:
        tx.execute(INSERT, (2, 1, "[1,2)"))
        with tx.savepoint():
            tx.execute(INSERT, (1, 1, "[2,3)"))

    async with open_database(DatabaseConfig(scratch)) as database:
        assert await database.run_tx(fn) == [1, 3]
        assert await database.run_tx(entries) == [1, 3]


async def test_an_error_of_the_function_rolls_back(scratch: str) -> None:
    def fn(tx: Tx) -> None:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        raise LookupError("a bug")

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(LookupError):
            await database.run_tx(fn)
        assert await database.run_tx(entries) == []


@pytest.mark.parametrize(
    ("statement", "outcome", "constraint"),
    [
        ("insert into entry values (2, 1, '[5,15)')", ExclusionConflict, "entry_no_overlap"),
        ("insert into entry values (1, 2, '[0,1)')", UniqueConflict, "entry_id"),
        ("insert into entry values (2, 99, '[0,1)')", ReferenceConflict, "entry_account"),
        ("update account set balance = -1 where id = 1", CheckConflict, "balance_positive"),
        ("do $$ begin raise check_violation using constraint = 'counted'; end $$", CheckConflict, "counted"),
        ("do $$ begin raise check_violation; end $$", CheckConflict, ""),
    ],
)
async def test_refused_writes_name_their_constraint(
    scratch: str, statement: str, outcome: type[Conflict], constraint: str
) -> None:
    def fn(tx: Tx) -> list[int]:
        tx.execute(INSERT, (1, 1, "[0,10)"))
        with pytest.raises(outcome) as caught, tx.savepoint():
            tx.execute(statement)  # pyright: ignore[reportArgumentType] - a literal in the list above
        assert caught.value.constraint == constraint
        tx.execute(INSERT, (3, 1, "[20,30)"))
        return entries(tx)

    async with open_database(DatabaseConfig(scratch)) as database:
        assert await database.run_tx(fn) == [1, 3]


@pytest.mark.parametrize(
    ("sqlstate", "outcome"),
    [
        ("42501", Forbidden),
        ("53100", DiskFull),
        ("55P03", LockTimeout),
        ("57014", TransactionTooLong),
        ("57P01", DatabaseUnavailable),
        ("57P03", DatabaseUnavailable),
        ("25006", DatabaseUnavailable),
        ("08006", DatabaseUnavailable),
    ],
)
async def test_the_servers_refusals_have_our_names(scratch: str, sqlstate: str, outcome: type[DatabaseError]) -> None:
    def fn(tx: Tx) -> None:
        tx.execute(
            "create function fail(code text) returns void language plpgsql as"
            " $$ begin raise exception using errcode = code; end $$"
        )
        tx.value("select fail(%s)", [sqlstate])

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(outcome):
            await database.run_tx(fn)


async def test_role_timeouts(scratch: str) -> None:
    def fn(tx: Tx) -> None:
        tx.execute("set local statement_timeout = '10ms'")
        tx.execute("select pg_sleep(5)")

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(TransactionTooLong):
            await database.run_tx(fn)


async def test_a_savepoint_commits_nothing(scratch: str) -> None:
    def fn(tx: Tx) -> None:
        with tx.savepoint():
            tx.execute(INSERT, (1, 1, "[0,1)"))
        raise LookupError("after the savepoint")

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(LookupError):
            await database.run_tx(fn)
        assert await database.run_tx(entries) == []


async def test_a_swallowed_error_is_not_a_success(scratch: str) -> None:
    def fn(tx: Tx) -> str:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        with pytest.raises(UniqueConflict):
            tx.execute(INSERT, (1, 1, "[2,3)"))
        return "done"

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(AbortedTransaction):
            await database.run_tx(fn)
        assert await database.run_tx(entries) == []


async def test_a_serialization_failure_is_retried_in_a_new_transaction(scratch: str) -> None:
    both_have_read = threading.Barrier(2)
    seen: list[tuple[str, int]] = []

    def add(tx: Tx, who: str) -> None:
        tx.execute("set transaction isolation level repeatable read")
        before = balance(tx, 1)
        seen.append((who, before))
        if len(seen) <= 2:
            both_have_read.wait(WAIT_S)
        tx.execute("update account set balance = %s where id = 1", [before + 1])

    observed: list[TxRecord] = []
    async with open_database(DatabaseConfig(scratch), observe=observed.append) as database:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(database.run_tx, partial(add, who="a"))
            nursery.start_soon(database.run_tx, partial(add, who="b"))
        assert await database.run_tx(balance, 1) == 102
        assert database.statistics().retries == 1
    assert sorted(record.retries for record in observed) == [0, 0, 1]
    # The second attempt of the loser reads what the winner wrote.
    assert [value for _, value in seen] == [100, 100, 101]


async def test_a_deadlock_is_retried(scratch: str) -> None:
    both_hold_one = threading.Barrier(2)
    starts: list[int] = []

    def move(tx: Tx, source: int, target: int) -> None:
        starts.append(source)
        first_try = len(starts) <= 2
        tx.execute("update account set balance = balance - 10 where id = %s", [source])
        if first_try:
            both_hold_one.wait(WAIT_S)
        tx.execute("update account set balance = balance + 10 where id = %s", [target])

    async with open_database(DatabaseConfig(scratch)) as database:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(database.run_tx, partial(move, source=1, target=2))
            nursery.start_soon(database.run_tx, partial(move, source=2, target=1))
        assert await database.run_tx(balance, 1) == 100
        assert database.statistics().retries >= 1


async def test_retries_are_bounded(scratch: str) -> None:
    attempts: list[int] = []

    def fn(tx: Tx) -> None:
        attempts.append(1)
        tx.execute("do $$ begin raise serialization_failure; end $$")

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(SerializationFailure):
            await database.run_tx(fn)
        assert database.statistics().retries == ATTEMPTS_MAX - 1
    assert len(attempts) == ATTEMPTS_MAX


async def test_the_whole_transaction_has_a_deadline(scratch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fn(tx: Tx) -> None:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        tx.execute("select pg_sleep(0.3)")
        tx.execute(INSERT, (2, 1, "[1,2)"))

    async with open_database(DatabaseConfig(scratch)) as database:
        monkeypatch.setattr(tx_module, "TX_DEADLINE_S", 0.2)
        with pytest.raises(TransactionTooLong):
            await database.run_tx(fn)
        monkeypatch.undo()
        assert await database.run_tx(entries) == []


async def test_cancellation_between_statements_rolls_back(scratch: str) -> None:
    inserted, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()

    def fn(tx: Tx) -> None:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        token.run_sync_soon(inserted.set)
        go_on.wait(WAIT_S)
        tx.execute(INSERT, (2, 1, "[1,2)"))

    async with open_database(DatabaseConfig(scratch)) as database:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(database.run_tx, fn)
            await inserted.wait()
            nursery.cancel_scope.cancel()
            go_on.set()
        assert nursery.cancel_scope.cancelled_caught
        assert await database.run_tx(entries) == []


async def test_cancellation_after_the_last_statement_comes_too_late(scratch: str) -> None:
    inserted, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    outcomes: list[str] = []

    def fn(tx: Tx) -> str:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        token.run_sync_soon(inserted.set)
        go_on.wait(WAIT_S)
        return "committed"

    async with open_database(DatabaseConfig(scratch)) as database:

        async def run() -> None:
            outcomes.append(await database.run_tx(fn))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await inserted.wait()
            nursery.cancel_scope.cancel()
            go_on.set()
        assert outcomes == ["committed"]
        assert await database.run_tx(entries) == [1]


async def test_a_connection_lost_before_commit_means_that_nothing_happened(scratch: str) -> None:
    def fn(tx: Tx) -> None:
        tx.execute(INSERT, (1, 1, "[0,1)"))
        tx.execute("select pg_terminate_backend(pg_backend_pid())")

    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database:
        with pytest.raises(DatabaseUnavailable):
            await database.run_tx(fn)
        assert await database.run_tx(entries) == []
        assert database.statistics().unavailable == 1


async def test_a_connection_lost_before_another_attempt_means_that_nothing_happened(scratch: str) -> None:
    def fn(tx: Tx) -> None:
        with suppress(DatabaseUnavailable):
            tx.execute("select pg_terminate_backend(pg_backend_pid())")
        raise Contention("somebody was faster, and then the connection was gone")

    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database:
        with pytest.raises(DatabaseUnavailable):
            await database.run_tx(fn)
        assert await database.run_tx(entries) == []


async def test_a_connection_lost_in_commit_is_an_unknown_outcome(scratch: str) -> None:
    def prepare(tx: Tx) -> None:
        tx.execute(
            "create function die() returns trigger language plpgsql as"
            " $$ begin perform pg_terminate_backend(pg_backend_pid()); return new; end $$"
        )
        tx.execute(
            "create constraint trigger die after insert on entry deferrable initially deferred"
            " for each row execute function die()"
        )

    observed: list[TxRecord] = []
    async with open_database(DatabaseConfig(scratch), observe=observed.append) as database:
        await database.run_tx(prepare)
        with pytest.raises(UnknownCommit):
            await database.run_tx(lambda tx: tx.execute(INSERT, (1, 1, "[0,1)")))
    assert [record.unknown for record in observed] == [False, True]


async def test_a_constraint_that_fails_in_commit_is_a_known_outcome(scratch: str) -> None:
    def prepare(tx: Tx) -> None:
        tx.execute("alter table entry add constraint late unique (account_id) deferrable initially deferred")

    async with open_database(DatabaseConfig(scratch)) as database:
        await database.run_tx(prepare)
        with pytest.raises(UniqueConflict) as caught:
            await database.run_tx(lambda tx: tx.executemany(INSERT, [(1, 1, "[0,1)"), (2, 1, "[1,2)")]))
        assert caught.value.constraint == "late"
        assert await database.run_tx(entries) == []


async def test_what_is_written_late_is_written_once_with_the_commit(scratch: str) -> None:
    written: list[list[int]] = []

    def write(tx: Tx, items: list[int]) -> None:
        tx.execute("select 1")
        written.append(items)

    def change(tx: Tx) -> None:
        tx.late(write, [1])
        tx.late(write, [2, 3])
        assert written == []

    async with open_database(DatabaseConfig(scratch)) as database:
        await database.run_tx(change)
    assert written == [[1, 2, 3]]


@pytest.mark.parametrize(("may_be_lost", "waits"), [(False, "on"), (True, "off")])
async def test_only_a_commit_that_may_be_lost_does_not_wait_for_the_disk(
    scratch: str, *, may_be_lost: bool, waits: str
) -> None:
    def prepare(tx: Tx) -> None:
        tx.execute("create table seen (setting text)")
        tx.execute(
            "create function see() returns trigger language plpgsql as"
            " $$ begin insert into seen values (current_setting('synchronous_commit')); return new; end $$"
        )
        tx.execute(
            "create constraint trigger see after insert on entry deferrable initially deferred"
            " for each row execute function see()"
        )

    def change(tx: Tx) -> None:
        if may_be_lost:
            tx.allow_loss()
        tx.execute(INSERT, (1, 1, "[0,1)"))

    async with open_database(DatabaseConfig(scratch, pool_size=1)) as database:
        await database.run_tx(prepare)
        await database.run_tx(change)
        # as the trigger found it in the commit, and as the next transaction of the connection finds it
        assert await database.run_tx(lambda tx: tx.tuples("select setting from seen")) == [(waits,)]
        assert await database.run_tx(lambda tx: tx.value("show synchronous_commit")) == "on"


@pytest.mark.parametrize("fails", [False, True])
async def test_memory_is_told_how_a_transaction_ended(scratch: str, *, fails: bool) -> None:
    told: list[bool] = []

    def change(tx: Tx) -> None:
        tx.on_end(told.append)
        assert told == []
        if fails:
            raise LookupError

    async with open_database(DatabaseConfig(scratch)) as database:
        with pytest.raises(LookupError) if fails else nullcontext():
            await database.run_tx(change)
    assert told == [not fails]


@pytest.mark.parametrize("fails", [False, True])
async def test_how_long_locks_are_held_counts_to_the_end_of_the_commit(scratch: str, *, fails: bool) -> None:
    held: list[float] = []

    def prepare(tx: Tx) -> None:
        tx.execute(
            "create function doze() returns trigger language plpgsql as"
            " $$ begin perform pg_sleep(0.2); return new; end $$"
        )
        tx.execute(
            "create constraint trigger doze after insert on entry deferrable initially deferred"
            " for each row execute function doze()"
        )

    def change(tx: Tx) -> None:
        tx.execute("select pg_sleep(1)")  # nothing is locked yet
        tx.time_locks(held.append)
        tx.execute("select pg_sleep(0.1)")
        tx.time_locks(lambda _: pytest.fail("it counts from the first lock on"))
        tx.execute(INSERT, (1, 1, "[0,1)"))
        if fails:
            raise LookupError

    async with open_database(DatabaseConfig(scratch)) as database:
        await database.run_tx(prepare)
        with pytest.raises(LookupError) if fails else nullcontext():
            await database.run_tx(change)
    (seconds,) = held
    assert (0.1 if fails else 0.3) <= seconds < 1
