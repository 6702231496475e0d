"""What the running agent writes down for ``bcd status``: one JSON file, replaced when something changes.

The agent listens on nothing, so a file is how it speaks to the machine's administrator. It is not
synced to disk: after a power cut it is worth nothing, and the agent writes it again.
"""

from __future__ import annotations

import os
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from shared.status import Condition

if TYPE_CHECKING:
    from pathlib import Path

STATUS_FILE = "status.json"
FILE_MODE = 0o600


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """The session, or the last one. `since` is when it was opened, `ended` how it ended if it has."""

    connected: bool
    gateway: str
    epoch: int
    since: datetime | None
    ended: str


class BoundView(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation that is bound; `cdi_name` is what its user types after ``--device``."""

    reservation_id: str
    cdi_name: str
    gpu_uuids: list[str]
    ends_at: datetime | None = None


class DiagnosisView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest ``diag.nvml`` that the control plane asked for."""

    passed: bool
    detail: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that ``bcd status`` shows."""

    written_at: datetime
    pid: int
    agent_version: str
    node_id: str
    server: str
    journal_id: str
    machine: str
    cdi_dir: str
    certificate_ends_at: datetime
    session: SessionView
    incarnation: int
    generation: int
    bound: list[BoundView]
    conditions: list[Condition]
    diagnosis: DiagnosisView | None = None


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Replace the file. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(snapshot), indent=2) + b"\n")
    temporary.chmod(FILE_MODE)
    temporary.replace(path)


def read_snapshot(path: Path) -> Snapshot | None:
    """Return what the agent wrote last, or None if there is nothing that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Snapshot)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
