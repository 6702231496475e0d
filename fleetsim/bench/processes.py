"""How much memory processes hold and how much CPU they have used, from /proc.

RSS counts a page in every process that maps it. The processes of a PostgreSQL server share most of
theirs, so their sum says little; PSS divides each shared page among its users and can be summed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

_PROC = Path("/proc")
_KIB = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of some processes in MiB. `pss_mib` is None where the kernel does not let us see it."""

    processes: int
    rss_mib: float
    pss_mib: float | None


def find_tree(pid: int, *, proc: Path = _PROC) -> list[int]:
    """Return a process and all below it, those that exist now."""
    children: dict[int, list[int]] = {}
    for path in proc.glob("[0-9]*"):
        parent = _parent_of(path)
        if parent is not None:
            children.setdefault(parent, []).append(int(path.name))
    found = [pid] if (proc / str(pid)).exists() else []
    for known in found:  # grows while it is walked
        found += sorted(children.get(known, ()))
    return found


def _parent_of(path: Path) -> int | None:
    try:
        text = (path / "stat").read_text(encoding="utf-8")
    except OSError:
        return None  # has ended
    # the name in parentheses may hold anything, so what follows the last one counts
    return int(text.rpartition(")")[2].split()[1])


def read_memory(pids: list[int], *, proc: Path = _PROC) -> Memory:
    """Sum up the processes; one that has ended counts nothing."""
    count, rss_kib, pss_kib = 0, 0, 0
    pss_seen = True
    for pid in pids:
        try:
            status = _fields(proc / str(pid) / "status")
        except OSError:
            continue
        count += 1
        rss_kib += status.get("VmRSS", 0)
        try:
            pss_kib += _fields(proc / str(pid) / "smaps_rollup").get("Pss", 0)
        except OSError:
            pss_seen = False
    return Memory(processes=count, rss_mib=rss_kib / 1024, pss_mib=pss_kib / 1024 if pss_seen else None)


def read_cpu_s(pid: int, *, proc: Path = _PROC) -> float:
    """Return the CPU seconds, user and system, of a process and all below it, those that have ended included."""
    ticks = 0
    for member in find_tree(pid, proc=proc):
        try:
            text = (proc / str(member) / "stat").read_text(encoding="utf-8")
        except OSError:
            continue  # its parent has it now
        # utime, stime, and those of children that were waited for
        ticks += sum(int(field) for field in text.rpartition(")")[2].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _fields(path: Path) -> dict[str, int]:
    return {name: int(kib) for name, kib in _KIB.findall(path.read_text(encoding="utf-8"))}
