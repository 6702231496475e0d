"""Two ways to the database: connections that really block each other, and one in virtual time."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import psycopg
import pytest

from controlplane.db.tx import Tx, run_transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.postgres import Dsn

P = ParamSpec("P")
T = TypeVar("T")


class Session:
    """One connection, for tests that hold a transaction open while another tries."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self.conn = conn

    def run(self, fn: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return run_transaction(
            self.conn,
            lambda tx: fn(tx, *args, **kwargs),
            check=lambda: None,
            rng=random.Random(0),
            on_retry=lambda: None,
        )


@pytest.fixture
def connect(dsn: Dsn) -> Iterator[Callable[[], Session]]:
    with ExitStack() as stack:
        yield lambda: Session(stack.enter_context(psycopg.connect(dsn.worker, autocommit=True)))


@pytest.fixture
def session(connect: Callable[[], Session]) -> Session:
    return connect()
