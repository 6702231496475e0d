"""Gives GPUs to reservations: one Container Device Interface file per reservation.

`CdiDriver` is an `AssignmentDriver`. Binding writes ``bettercompute.dev-reservation_<id>.json`` with
one device named as the reservation, so that a user types ``--device
bettercompute.dev/reservation=rsv_…``; unbinding removes the file. The file is the whole state: what
is bound is what is there, and only files with our own name are looked at.

The engines watch the directory, which decides how a file is written: a temporary file in the same
directory (a rename from elsewhere goes unnoticed), without a suffix that an engine loads, world
readable before it appears (a rootless engine reads it too), then renamed, with file and directory
synced. An engine sees it a moment later and acknowledges nothing, so *bound* means *written*.

Removing the file stops nobody: a running container keeps its GPUs until it ends, and cannot be
started again afterwards.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agent.drivers.base import BindFailed, Bound
from agent.drivers.cdi_sources import load_spec
from agent.drivers.cdi_spec import (
    VERSIONS,
    CdiError,
    ContainerEdits,
    Device,
    Spec,
    encode,
    is_device_name,
    merge,
    min_version,
    validate,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.blocking import Blocking
    from agent.drivers.base import Assignment
    from agent.drivers.cdi_sources import EditsSource

VENDOR = "bettercompute.dev"
CLASS = "reservation"
KIND = f"{VENDOR}/{CLASS}"
FILE_PREFIX = f"{VENDOR}-{CLASS}_"
FILE_SUFFIX = ".json"
TEMPORARY_SUFFIX = ".tmp"
FILE_MODE = 0o644
MAX_VERSION = "0.5.0"
"""What podman 4.3 of Debian 12 reads, the oldest engine that is supported."""
RESERVATION_ENV = "BCD_RESERVATION"
GPUS_ENV = "BCD_GPU_UUIDS"

_UUID = re.compile(r"[A-Za-z0-9][A-Za-z0-9/_-]{0,127}\Z")


def cdi_name(reservation_id: str) -> str:
    """Return what a user asks a container engine for."""
    return f"{KIND}={reservation_id}"


class CdiDriver:
    """Writes to one directory, which it makes if it is not there.

    Args:
        directory: a spec directory of the node's engines, ``/var/run/cdi`` or a directory of a user's.
        source: what containers need to use the GPUs.
        blocking: where file operations run.
        max_version: no file needs a newer CDI version than this.
    """

    def __init__(
        self, directory: Path, source: EditsSource, blocking: Blocking, *, max_version: str = MAX_VERSION
    ) -> None:
        self._directory = directory
        self._source = source
        self._blocking = blocking
        self._max_version = max_version

    async def bind(self, assignment: Assignment) -> Bound:
        return await self._blocking.run(lambda: self._bind(assignment))

    async def unbind(self, reservation_id: str) -> None:
        await self._blocking.run(lambda: self._unbind(reservation_id))

    async def list_bound(self) -> list[Bound]:
        return await self._blocking.run(self._list_bound)

    def _bind(self, assignment: Assignment) -> Bound:
        path = self._path(assignment.reservation_id)
        for uuid in assignment.gpu_uuids:
            if not _UUID.match(uuid):
                raise BindFailed("unknown_device", f"{uuid!r} is no device UUID")
        edits = self._source.read_edits(assignment.gpu_uuids)
        data = encode(plan_spec(assignment, edits, max_version=self._max_version))
        try:
            self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not _holds(path, data):
                _write_atomically(path, data)
        except OSError as exc:
            raise BindFailed("write_failed", str(exc)) from exc
        return Bound(assignment.reservation_id, cdi_name(assignment.reservation_id), assignment.gpu_uuids)

    def _unbind(self, reservation_id: str) -> None:
        path = self._path(reservation_id)
        try:
            path.unlink(missing_ok=True)
            if self._directory.is_dir():
                _sync_directory(self._directory)
        except OSError as exc:
            raise BindFailed("write_failed", str(exc)) from exc

    def _list_bound(self) -> list[Bound]:
        try:
            # What a killed agent left half written; no engine has loaded it.
            for path in self._directory.glob(f".{FILE_PREFIX}*{TEMPORARY_SUFFIX}"):
                path.unlink()
            paths = sorted(self._directory.glob(f"{FILE_PREFIX}*{FILE_SUFFIX}"))
        except OSError as exc:
            raise BindFailed("write_failed", str(exc)) from exc
        return [_read_bound(path) for path in paths]

    def _path(self, reservation_id: str) -> Path:
        # The id comes from a signed spec; a "/" in it would still leave the directory.
        if not is_device_name(reservation_id):
            raise BindFailed("spec_invalid", f"{reservation_id!r} is no device name")
        return self._directory / f"{FILE_PREFIX}{reservation_id}{FILE_SUFFIX}"


def plan_spec(assignment: Assignment, edits: ContainerEdits, *, max_version: str = MAX_VERSION) -> Spec:
    """Return the file for an assignment, in the lowest version that its content needs.

    Raises:
        BindFailed: no engine would load it, or one limited to `max_version` would not.
    """
    named = ContainerEdits(
        env=[f"{RESERVATION_ENV}={assignment.reservation_id}", f"{GPUS_ENV}={','.join(assignment.gpu_uuids)}"]
    )
    device = Device(name=assignment.reservation_id, container_edits=merge(edits, named))
    spec = Spec(cdi_version=VERSIONS[0], kind=KIND, devices=[device])
    version = min_version(spec)
    spec = Spec(cdi_version=version, kind=KIND, devices=[device])
    try:
        validate(spec)
    except CdiError as exc:
        raise BindFailed("spec_invalid", str(exc)) from exc
    if VERSIONS.index(version) > VERSIONS.index(max_version):
        raise BindFailed("spec_invalid", f"it needs CDI {version}, and this node's engines read {max_version}")
    return spec


def _read_bound(path: Path) -> Bound:
    reservation_id = path.name.removeprefix(FILE_PREFIX).removesuffix(FILE_SUFFIX)
    uuids = _read_uuids(path, reservation_id)
    return Bound(reservation_id, cdi_name(reservation_id), uuids or (), intact=uuids is not None)


def _read_uuids(path: Path, reservation_id: str) -> tuple[str, ...] | None:
    """Return the GPUs in one of our files, or None if it is not as `plan_spec` makes it."""
    try:
        spec = load_spec(path)
    except CdiError:
        return None
    match spec.devices:
        case [Device(name=name, container_edits=ContainerEdits(env=list(env)))] if name == reservation_id:
            return _find_uuids(env) if spec.kind == KIND else None
        case _:
            return None


def _find_uuids(env: Sequence[str]) -> tuple[str, ...] | None:
    for entry in env:
        name, _, value = entry.partition("=")
        if name == GPUS_ENV:
            return tuple(value.split(",")) if value else ()
    return None


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False


def _write_atomically(path: Path, data: bytes) -> None:
    # The leading dot alone hides nothing from an engine; the suffix does.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=TEMPORARY_SUFFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            os.fchmod(file.fileno(), FILE_MODE)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
