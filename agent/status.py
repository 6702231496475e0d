"""``bcd status`` in words: a snapshot as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from agent.snapshot import BoundView, SessionView, Snapshot


def format_snapshot(snapshot: Snapshot, *, running: bool) -> str:
    """Return the lines of ``bcd status``; `running` is whether an agent has the journal now."""
    agent = f"running, pid {snapshot.pid}" if running else f"stopped; this is from {_at(snapshot.written_at)}"
    rows = [
        ("node", snapshot.node_id),
        ("server", snapshot.server),
        ("agent", f"{agent}, version {snapshot.agent_version}"),
        ("session", _describe_session(snapshot.session, running=running)),
        ("spec", f"generation {snapshot.generation}, incarnation {snapshot.incarnation}"),
        ("certificate", f"until {_at(snapshot.certificate_ends_at)}"),
        ("machine", snapshot.machine),
        ("cdi files", snapshot.cdi_dir),
        ("journal", snapshot.journal_id),
    ]
    if snapshot.diagnosis is not None:
        rows.append(("diag.nvml", snapshot.diagnosis.detail))
    lines = [f"{name:<12} {value}" for name, value in rows]
    lines += ["", "reservations" if snapshot.bound else "reservations  none bound"]
    lines += [line for bound in snapshot.bound for line in _describe_bound(bound)]
    lines += ["", "conditions" if snapshot.conditions else "conditions    none"]
    for condition in snapshot.conditions:
        subject = f" {condition.subject}" if condition.subject else ""
        lines.append(f"  {condition.severity:<8} {condition.name}{subject}: {condition.text}")
    return "\n".join(lines)


def _describe_session(session: SessionView, *, running: bool) -> str:
    if session.connected and running:
        since = f" since {_at(session.since)}" if session.since else ""
        return f"connected to {session.gateway}{since}, epoch {session.epoch}"
    last = f"; last epoch {session.epoch}, opened {_at(session.since)}" if session.since else ""
    ended = f" ({session.ended})" if session.ended else ""
    return f"not connected{ended}{last}"


def _describe_bound(bound: BoundView) -> Iterator[str]:
    ends = f", until {_at(bound.ends_at)}" if bound.ends_at else ""
    yield f"  {bound.cdi_name}  {len(bound.gpu_uuids)} GPUs{ends}"
    for uuid in bound.gpu_uuids:
        yield f"    {uuid}"


def _at(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
