"""`bcctl dev` as a process: what a person at a terminal does to it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support.stack import BIN, PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

# What is promised of Ctrl-C.
STOP_S = 10.0


@pytest.mark.parametrize(
    "stage", ["Starting PostgreSQL", "PostgreSQL", "Schema", "API listening", "Profile", "Nodes joining: 0"]
)
def test_ctrl_c_at_any_stage_is_a_clean_stop(tmp_path: Path, stage: str) -> None:
    environment = dict(os.environ, HOME=str(tmp_path), BCCTL_CONFIG=str(tmp_path / "bcctl.toml"), PYTHONUNBUFFERED="1")
    process = subprocess.Popen(
        [BIN / "bcctl", "dev", "--memory", "--sim", "1", "--port", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(stage):
                break
        os.killpg(process.pid, signal.SIGINT)  # a terminal tells the whole group
        said, errors = process.communicate(timeout=STOP_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)
    assert (process.returncode, errors) == (0, "")
    assert said.splitlines()[-1] == "Stopped"
