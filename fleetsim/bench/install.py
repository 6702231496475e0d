"""What a new user waits for: installing, starting, and the first GPUs.

The environment is new and its directory empty; the rest of the machine is as it is, pip's cache included.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from fleetsim.bench.children import ChildFailed, read_tail
from fleetsim.bench.processes import find_tree, read_memory
from fleetsim.bench.server import open_dev

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetsim.bench.server import Dev

GPUS: Final = 4
INSTALL_S: Final = 600.0
COMMAND_S: Final = 60.0


class NoProject(Exception):
    """There is no source tree to install from."""


@dataclass(frozen=True, slots=True)
class FirstUse:
    """Seconds. `pip_s` is None if nothing was installed; `active_s` counts from the end of the installation."""

    pip_s: float | None
    start_s: float
    active_s: float
    memory_mib: float


def find_project() -> Path:
    """Return the source tree that this module is of. Raises NoProject."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise NoProject(f"{root} has no pyproject.toml: run this from a source tree, or with --no-install")
    return root


async def measure_first_use(directory: Path, *, nodes: int, install: bool) -> FirstUse:
    """Install, start `bcctl dev`, reserve. Raises ChildFailed, NoProject."""
    bin_dir, pip_s = Path(sys.executable).parent, None
    if install:
        bin_dir = directory / "venv" / "bin"
        await _run("venv", (sys.executable, "-m", "venv", str(directory / "venv")), directory, within_s=INSTALL_S)
        pip = (str(bin_dir / "python"), "-m", "pip", "install", "--quiet", str(find_project()))
        pip_s = await _run("pip install", pip, directory, within_s=INSTALL_S)
    bcctl = bin_dir / "bcctl"
    began = trio.current_time()
    async with open_dev(directory, bcctl=bcctl, nodes=nodes) as dev:
        start_s = trio.current_time() - began
        await _reserve(dev, bcctl, directory)
        active_s = trio.current_time() - began
        memory = read_memory(find_tree(dev.child.pid))
    total = memory.rss_mib if memory.pss_mib is None else memory.pss_mib
    return FirstUse(pip_s, start_s, active_s, total)


async def _reserve(dev: Dev, bcctl: Path, directory: Path) -> None:
    """Do what the README says; the command waits until the GPUs are active."""
    command = (str(bcctl), "reserve", "--pool", "h100", "--gpus", str(GPUS), "--for", "1h")
    await _run("bcctl reserve", command, directory, within_s=COMMAND_S, environment=dev.environment)


async def _run(
    name: str,
    command: Sequence[str],
    directory: Path,
    *,
    within_s: float,
    environment: Mapping[str, str] | None = None,
) -> float:
    """Run a command to its end and return how long it took. Raises ChildFailed."""
    log = directory / f"{name.replace(' ', '-')}.log"
    began = trio.current_time()
    with log.open("ab") as output, trio.move_on_after(within_s) as waiting:
        done = await trio.run_process(
            list(command), stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=directory, check=False
        )
        if done.returncode:
            raise ChildFailed(f"{name} ended with {done.returncode}; {log}:\n{read_tail(log)}")
    if waiting.cancelled_caught:
        raise ChildFailed(f"{name} did not end within {within_s:g} s; {log}:\n{read_tail(log)}")
    return trio.current_time() - began
