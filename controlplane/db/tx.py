"""One transaction: what a function may do in it, how it ends, and what can be known when it fails.

A transaction is a plain synchronous function `fn(tx, ...)`, run as a whole in one worker thread by
`Database.run_tx`.  Nothing in it can await, so nothing waits on the event loop while row locks are
held, and the loop stays free while rows are parsed.

`run_transaction` is that whole life on one connection: call the function, commit, and after a
serialization failure or a deadlock call it again in a *new* transaction (a retry inside the old one
would see its own failed writes).  Hence a function may run several times: it has no effect but its
statements.

A transaction may say that a crash of the server can take it back (`Tx.allow_loss`); its commit then does not wait
for the disk.  One that commits after it and does wait brings both there.

Between statements the transaction's total deadline and the caller's cancellation are checked; both
roll back.  Once COMMIT has been sent there are three outcomes: committed, refused with an error
from the server (a deferred constraint), or `UnknownCommit` if the connection was lost before the
answer.  The last is resolved by reading, never by assuming.

BEGIN, COMMIT and the savepoints' commands go to libpq itself. After a ROLLBACK psycopg forgets what
it has prepared, in case the transaction had made the tables; no transaction of ours makes any, and
under contention, where savepoints are rolled back all the time, nothing would ever stay prepared.

`run_reading` is for functions that only read: without BEGIN and COMMIT each of their statements is a
transaction of its own and sees what is committed when it begins, which is all that READ COMMITTED gives
the statements of one.

psycopg's errors end here: callers see the classes below, one per outcome that they can treat
differently.  A psycopg error that gets through is a bug in a statement.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, LiteralString, NoReturn, TypeVar

import psycopg
from psycopg import errors
from psycopg.pq import ExecStatus, TransactionStatus

from controlplane.db.rows import make_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from random import Random

    from psycopg.sql import Composed

    Statement = LiteralString | Composed
    Parameters = Mapping[str, object] | Sequence[object]

R = TypeVar("R")
T = TypeVar("T")

# With the 5 s that the roles allow one statement, a transaction is over in 10 s whatever happens,
# which is what a stopping process waits for its threads.
TX_DEADLINE_S = 5.0
# A deadlock or serialization failure that comes back five times is not a race but a design fault.
ATTEMPTS_MAX = 5
# Long enough for the winner of a race to commit; doubled per attempt, and a random part of it.
RETRY_PAUSE_MAX_S = 0.010


class DatabaseError(Exception):
    """Base of everything that `run_tx` raises for the database's sake."""


class Conflict(DatabaseError):
    """A constraint refused the write; `constraint` is its name, empty if a trigger raised without one."""

    def __init__(self, message: str, *, constraint: str) -> None:
        super().__init__(message)
        self.constraint = constraint


class ExclusionConflict(Conflict):
    """Another live row holds it: the double booking that was refused."""


class UniqueConflict(Conflict):
    """There is one already."""


class CheckConflict(Conflict):
    """A CHECK, or a trigger that counts, says no."""


class ReferenceConflict(Conflict):
    """A row that is referred to does not exist, or is still referred to."""


class Forbidden(DatabaseError):
    """The connection's role may not do this (SQLSTATE 42501)."""


class Contention(DatabaseError):
    """Lost against other transactions; retried in a new one, so callers see it only after ATTEMPTS_MAX."""


class SerializationFailure(Contention):
    """SQLSTATE 40001."""


class Deadlock(Contention):
    """SQLSTATE 40P01."""


class LockTimeout(DatabaseError):
    """A lock was not free within the role's lock_timeout, or at all for NOWAIT."""


class TransactionTooLong(DatabaseError):
    """A statement ran into the role's statement_timeout, or the whole into TX_DEADLINE_S; rolled back."""


class DatabaseUnavailable(DatabaseError):
    """No connection, or it was lost before COMMIT was sent: nothing happened."""


class UnknownCommit(DatabaseError):
    """The connection was lost after COMMIT was sent: it happened or it did not.  Read to find out."""


class DiskFull(DatabaseError):
    """The server has no room to write."""


class TooManyRows(DatabaseError):
    """A statement that finds at most one row found several: an invariant is broken."""


class AbortedTransaction(DatabaseError):
    """The function swallowed a failed statement outside a savepoint; nothing was committed."""


class NestedTransaction(DatabaseError):
    """A transaction was started inside another; it would wait for its own locks."""


# What fails for reasons outside the program: a service is restarted on these, and on nothing else.
OPERATING_ERRORS: tuple[type[DatabaseError], ...] = (
    Contention,
    LockTimeout,
    TransactionTooLong,
    DatabaseUnavailable,
    UnknownCommit,
    DiskFull,
)

_CONFLICTS: dict[type[psycopg.Error], type[Conflict]] = {
    errors.ExclusionViolation: ExclusionConflict,
    errors.UniqueViolation: UniqueConflict,
    errors.CheckViolation: CheckConflict,
    errors.ForeignKeyViolation: ReferenceConflict,
}
_OTHERS: dict[type[psycopg.Error], type[DatabaseError]] = {
    errors.InsufficientPrivilege: Forbidden,
    errors.SerializationFailure: SerializationFailure,
    errors.DeadlockDetected: Deadlock,
    errors.LockNotAvailable: LockTimeout,
    errors.QueryCanceled: TransactionTooLong,
    errors.IdleInTransactionSessionTimeout: TransactionTooLong,
    errors.DiskFull: DiskFull,
    errors.TooManyConnections: DatabaseUnavailable,
    errors.ReadOnlySqlTransaction: DatabaseUnavailable,  # a standby, in the middle of a failover
    errors.AdminShutdown: DatabaseUnavailable,
    errors.CrashShutdown: DatabaseUnavailable,
    errors.CannotConnectNow: DatabaseUnavailable,
}


def translated(exc: psycopg.Error) -> Exception:
    """Return our error for psycopg's, or the same one if callers have no business with it."""
    if conflict := _CONFLICTS.get(type(exc)):
        return conflict(exc.diag.message_primary or str(exc), constraint=exc.diag.constraint_name or "")
    if other := _OTHERS.get(type(exc)):
        return other(exc.diag.message_primary or str(exc))
    # Without a SQLSTATE the error is libpq's own: the socket failed. It comes as the base class where psycopg was given
    # a result that says so, which is before libpq calls the connection bad.
    lost = type(exc) is psycopg.DatabaseError or isinstance(exc, psycopg.OperationalError)
    if lost and (exc.sqlstate is None or exc.sqlstate.startswith("08")):
        return DatabaseUnavailable(str(exc))
    return exc


class Tx:
    """One open transaction; lives in one thread, and only while its function runs.

    Statements take `%s` or `%(name)s` parameters.  All raise DatabaseError's subclasses.
    """

    def __init__(self, conn: psycopg.Connection[Any], *, give_up: float, check: Callable[[], None]) -> None:
        self._conn = conn
        # One for all statements: each is over before the next begins, and making one costs as much as half a statement.
        try:
            self._cursor = conn.cursor()
        except psycopg.Error as exc:  # lost since it was looked at, or in the attempt before
            _raise_translated(exc)
        self._give_up = give_up
        self._check = check
        self._savepoints = 0
        self.wakes: dict[tuple[str, str], None] = {}
        self.may_be_lost = False
        self._late: dict[Callable[[Tx, list[Any]], None], list[Any]] = {}
        self._on_end: list[Callable[[bool], None]] = []
        self._locked: tuple[float, Callable[[float], None]] | None = None

    def allow_loss(self) -> None:
        """Do not wait for the disk with the commit: if the database's server crashes, this may not have happened."""
        self.may_be_lost = True

    def late(self, write: Callable[[Tx, list[T]], None], items: Iterable[T]) -> None:
        """Have `write` called once before the commit, with the items of all such calls.

        For rows that many transactions write: they are locked for the commit alone. What was given inside
        a savepoint is written even if that is undone.
        """
        self._late.setdefault(write, []).extend(items)

    def write_late(self) -> None:
        while self._late:
            write = next(iter(self._late))
            write(self, self._late.pop(write))

    def on_end(self, told: Callable[[bool], None]) -> None:
        """Have this called, in the transaction's thread, with whether it is known to have been committed.

        For memory that went ahead of the database. It must not raise.
        """
        self._on_end.append(told)

    def time_locks(self, told: Callable[[float], None]) -> None:
        """Have this called with how long locks were held: seconds from now to the end of the commit or rollback.

        Only the first call of a transaction counts. It must not raise.
        """
        if self._locked is None:
            self._locked = (time.monotonic(), told)

    def end(self, *, committed: bool) -> None:
        if self._locked is not None:
            since, told_held = self._locked
            told_held(time.monotonic() - since)
        for told in self._on_end:
            told(committed)

    def wake(self, channel: str, payload: str = "") -> None:
        """Have whoever waits on the channel woken once this is committed; the functions that write do it."""
        self.wakes[channel, payload] = None

    def execute(self, sql: Statement, params: Parameters = ()) -> int:
        """Run a statement; return the number of rows that it touched."""
        return self._run(sql, params).rowcount

    def rows(self, cls: type[R], sql: Statement, params: Parameters = ()) -> list[R]:
        """Return the result as objects of a dataclass whose fields are the columns."""
        cursor = self._run(sql, params)
        values = cursor.fetchall()
        assert cursor.pgresult is not None, "there was something to fetch"
        return make_rows(cls, cursor.pgresult, values)

    def row(self, cls: type[R], sql: Statement, params: Parameters = ()) -> R | None:
        """Return the only row, None if there is none; raises TooManyRows if there are more."""
        found = self.rows(cls, sql, params)
        if len(found) > 1:
            raise TooManyRows(f"{len(found)} rows of {cls.__name__}")
        return found[0] if found else None

    def value(self, sql: Statement, params: Parameters = ()) -> Any | None:  # noqa: ANN401 - the column says
        """Return the first column of the only row, None if there is none; raises TooManyRows if there are more."""
        found = self.tuples(sql, params)
        if len(found) > 1:
            raise TooManyRows(f"{len(found)} rows for one value")
        return found[0][0] if found else None

    def tuples(self, sql: Statement, params: Parameters = ()) -> list[tuple[Any, ...]]:
        """Return the result as tuples: the cheapest form, for many rows."""
        return self._run(sql, params).fetchall()

    def executemany(self, sql: Statement, params_seq: Iterable[Parameters]) -> int:
        """Run a statement once per element, in one pipeline; return the number of rows touched by all."""
        self._check_time()
        try:
            self._cursor.executemany(sql, params_seq)
        except psycopg.Error as exc:
            _raise_translated(exc)
        return self._cursor.rowcount

    @contextmanager
    def savepoint(self) -> Generator[None]:
        """Undo only what is inside if it raises, so that a Conflict can be caught around it."""
        self._check_time()
        self._savepoints += 1
        name = b"s%d" % self._savepoints
        _send_command(self._conn, b"savepoint " + name)
        try:
            yield
        except BaseException:
            # A connection that cannot even do this is lost, and what raised says so.
            with contextlib.suppress(psycopg.Error, DatabaseError):
                _send_command(self._conn, b"rollback to " + name)
                _send_command(self._conn, b"release " + name)
            raise
        _send_command(self._conn, b"release " + name)

    def _run(self, sql: Statement, params: Parameters) -> psycopg.Cursor[tuple[Any, ...]]:
        self._check_time()
        try:
            return self._cursor.execute(sql, params)
        except psycopg.Error as exc:
            _raise_translated(exc)

    def _check_time(self) -> None:
        self._check()
        if time.monotonic() > self._give_up:
            raise TransactionTooLong(f"over {TX_DEADLINE_S:.0f} s in all")


def _raise_translated(exc: psycopg.Error) -> NoReturn:
    ours = translated(exc)
    if ours is exc:
        raise exc
    raise ours from exc


def _nobody_waits(_: Iterable[tuple[str, str]]) -> None:
    pass


def run_transaction(
    conn: psycopg.Connection[Any],
    fn: Callable[[Tx], T],
    *,
    check: Callable[[], None],
    rng: Random,
    on_retry: Callable[[], None],
    on_written: Callable[[Iterable[tuple[str, str]]], None] = _nobody_waits,
) -> T:
    """Run `fn` in a transaction of its own and commit it; see the module for the outcomes.

    The connection is in autocommit mode: BEGIN is ours, so that `savepoint` never begins one.
    Blocks for at most TX_DEADLINE_S plus one statement.  `check` is called between statements and
    may raise; `on_retry` is called before each further attempt, and `on_written` before the commit
    with whom to wake after it.
    """
    give_up = time.monotonic() + TX_DEADLINE_S
    attempt = 1
    while True:
        tx = Tx(conn, give_up=give_up, check=check)
        try:
            _begin(conn)
            result = fn(tx)
            tx.write_late()
            on_written(tx.wakes)
            _commit(conn, may_be_lost=tx.may_be_lost)
        except Contention:
            _roll_back(conn)
            tx.end(committed=False)
            if attempt == ATTEMPTS_MAX:
                raise
        except BaseException:
            _roll_back(conn)
            tx.end(committed=False)
            raise
        else:
            tx.end(committed=True)
            return result
        time.sleep(rng.uniform(0.0, RETRY_PAUSE_MAX_S * 2**attempt))
        attempt += 1
        on_retry()


def run_reading(conn: psycopg.Connection[Any], fn: Callable[[Tx], T], *, check: Callable[[], None]) -> T:
    """Run a function that writes nothing and locks nothing; raises what a transaction's statements raise."""
    assert conn.autocommit
    return fn(Tx(conn, give_up=time.monotonic() + TX_DEADLINE_S, check=check))


def _begin(conn: psycopg.Connection[Any]) -> None:
    assert conn.autocommit
    _send_command(conn, b"begin")


def _commit(conn: psycopg.Connection[Any], *, may_be_lost: bool) -> None:
    status = conn.pgconn.transaction_status
    if status == TransactionStatus.UNKNOWN:
        raise DatabaseUnavailable("the connection is closed")
    # The server answers COMMIT in a failed transaction with a friendly ROLLBACK.
    if status == TransactionStatus.INERROR:
        raise AbortedTransaction("a statement had failed and its error was swallowed")
    try:
        # in one message: the setting is this transaction's, and costs no round trip
        _send_command(conn, b"set local synchronous_commit = off; commit" if may_be_lost else b"commit")
    except DatabaseUnavailable as exc:
        raise UnknownCommit(str(exc)) from exc


def _roll_back(conn: psycopg.Connection[Any]) -> None:
    # A connection that cannot even do this is found dead by the pool.
    with contextlib.suppress(psycopg.Error, DatabaseError):
        if conn.pgconn.transaction_status != TransactionStatus.IDLE:
            _send_command(conn, b"rollback")


def _send_command(conn: psycopg.Connection[Any], command: bytes) -> None:
    """Have a command without parameters and result done; raises like a statement."""
    try:
        result = conn.pgconn.exec_(command)
        if result.status == ExecStatus.COMMAND_OK:
            return
        raise errors.error_from_result(result)
    except psycopg.Error as exc:
        _raise_translated(exc)
