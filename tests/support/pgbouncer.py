"""A real PgBouncer in transaction mode, in front of the test's own database.

`pooled` is the test's `dsn` with the strings of the three login roles leading through it; the admin's and the owner's
stay direct, as migrations and LISTEN do. For each role it has `SERVER_CONNECTIONS` sessions of PostgreSQL, fewer than
any pool of ours has connections, so that these change their session from one transaction to the next.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

if TYPE_CHECKING:
    from collections.abc import Iterator

    from controlplane.db.embedded import EmbeddedPostgres
    from tests.support.postgres import Dsn

BINARY = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
SERVER_CONNECTIONS = 2
# How long a transaction waits for one of them until PgBouncer refuses it.
QUERY_WAIT_S = 3
PORT = 6432  # of the socket's name
STOP_S = 10
USERS = ("bc_owner", "bc_api", "bc_worker", "bc_gateway")

_CONFIG = """
[databases]
* = host={server[host]} port={server[port]}
[pgbouncer]
unix_socket_dir = {directory}
listen_port = {port}
auth_type = trust
auth_file = {directory}/users
pool_mode = transaction
default_pool_size = {size}
max_client_conn = 200
query_wait_timeout = {wait_s}
server_login_retry = 1
log_connections = 0
log_disconnections = 0
"""


@pytest.fixture
def pooled(postgres: EmbeddedPostgres, dsn: Dsn, place: Path) -> Iterator[Dsn]:
    if BINARY is None:
        pytest.skip("not installed: pgbouncer")
    directory = place / "pgbouncer"
    directory.mkdir()
    config = directory / "pgbouncer.ini"
    config.write_text(
        _CONFIG.format(
            server=conninfo_to_dict(dsn.admin),
            directory=directory,
            port=PORT,
            size=SERVER_CONNECTIONS,
            wait_s=QUERY_WAIT_S,
        )
    )
    users = directory / "users"
    users.write_text("".join(f'"{user}" ""\n' for user in USERS))
    if postgres._user is not None:  # it refuses root, as PostgreSQL does, and shares PostgreSQL's user
        for path in (directory, config, users):
            os.chown(path, postgres._user.uid, postgres._user.gid)
    # ends with this process, whatever becomes of it
    with subprocess.Popen(postgres._command(Path(BINARY), str(config)), stderr=subprocess.PIPE, text=True) as process:
        try:
            _wait_up(process)
            # what it says later is read and dropped, so that it never waits for a reader
            with subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL):
                through = {"host": str(directory), "port": PORT}
                yield replace(
                    dsn,
                    api=make_conninfo(dsn.api, **through),
                    worker=make_conninfo(dsn.worker, **through),
                    gateway=make_conninfo(dsn.gateway, **through),
                    pgbouncer=True,
                )
                process.terminate()
                process.wait(STOP_S)
        finally:
            process.kill()


def _wait_up(process: subprocess.Popen[str]) -> None:
    said: list[str] = []
    assert process.stderr is not None
    for line in process.stderr:
        said.append(line)
        if "process up" in line:
            return
    raise AssertionError(f"pgbouncer ended: {''.join(said)}")
