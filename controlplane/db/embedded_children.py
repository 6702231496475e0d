"""Runs the programs of an installation to their end, out of the reach of a Ctrl-C at the terminal.

A child has a session of its own, but a moment after it is made. A Ctrl-C that reaches it in between is its owner's to
handle, like any other, and says nothing about the program: it is run again.
"""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INTERRUPTED: Final = -signal.SIGINT


def run_apart(
    command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in the root directory; its output is kept as text. Raises OSError, TimeoutExpired."""

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603 - programs of an installation, no input of others
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            cwd="/",
            env=env,
            start_new_session=True,
        )

    done = run()
    return run() if done.returncode == INTERRUPTED else done
