"""Files that must never be half written or readable by others.

`write_atomic` writes beside the target, syncs, and renames, so after a crash the old content or
the new one is there and nothing in between; the directory is synced too, because a rename that
is not on disk yet can be lost with it. `read_private` refuses a file that group or others may
touch, and says which `chmod` mends it: a secret that was readable once is not one any more, and
an operator should hear of it before the fleet relies on it.

All functions block; call them in a worker thread where the event loop matters.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OTHERS_MASK = 0o077
PRIVATE_FILE_MODE = 0o600
PRIVATE_DIRECTORY_MODE = 0o700
# Keys, certificate chains and key lists are a few KiB; anything larger is not one of ours.
PRIVATE_FILE_BYTES_MAX = 256 * 1024


class UnsafeFile(Exception):
    """A secret's file or directory is not as private as it must be."""

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        super().__init__(f"{path} {problem}; {fix}")
        self.path = path
        self.problem = problem
        self.fix = fix


def write_atomic(path: Path, data: bytes, mode: int = PRIVATE_FILE_MODE) -> None:
    """Replace the content of `path`, whatever the umask. Raises OSError, and then `path` is as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and removals in this directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_directory(path: Path) -> None:
    """Create `path` with mode 0700, or check that it has it. Raises UnsafeFile, OSError."""
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True)
    except FileExistsError:
        check_private_directory(path)


def check_private_directory(path: Path) -> None:
    """Raise UnsafeFile unless `path` is a directory that only its owner may enter. Raises OSError if there is none."""
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise UnsafeFile(path, "is not a directory", "give another path")
    if status.st_mode & OTHERS_MASK:
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFile(path, f"has mode {mode:04o} and must be 0700", f"run: chmod 700 {path}")


def read_private(path: Path) -> bytes:
    """Return the content of a secret's file. Raises UnsafeFile, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFile(path, "is not a regular file", "give another path")
        if status.st_mode & OTHERS_MASK:
            mode = stat.S_IMODE(status.st_mode)
            raise UnsafeFile(path, f"has mode {mode:04o} and must be 0600", f"run: chmod 600 {path}")
        data = file.read(PRIVATE_FILE_BYTES_MAX + 1)
    if len(data) > PRIVATE_FILE_BYTES_MAX:
        raise UnsafeFile(path, f"is larger than {PRIVATE_FILE_BYTES_MAX} bytes", "give another path")
    return data
