"""`bcctl dev` as a process: what a person at a terminal does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from controlplane.db.embedded_state import socket_dir
from tests.support.stack import BIN, PATIENCE_S, POLL_S

if TYPE_CHECKING:
    from pathlib import Path

# What is promised of Ctrl-C.
STOP_S = 10.0
_OFTEN_ANALYZED = "select analyze_count > 1 from pg_stat_user_tables where relname = 'worker'"


def start_dev(home: Path, *options: str | Path) -> subprocess.Popen[str]:
    environment = dict(os.environ, HOME=str(home), BCCTL_CONFIG=str(home / "bcctl.toml"), PYTHONUNBUFFERED="1")
    return subprocess.Popen(
        [BIN / "bcctl", "dev", "--port", "0", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "stage", ["Starting PostgreSQL", "PostgreSQL", "Schema", "API listening", "Profile", "Nodes joining: 0"]
)
def test_ctrl_c_at_any_stage_is_a_clean_stop(tmp_path: Path, stage: str) -> None:
    process = start_dev(tmp_path, "--memory", "--sim", "1")
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


def test_the_planner_knows_the_tables(tmp_path: Path, place: Path) -> None:
    """After the migrations each of them, and then what changes: the workers' heartbeats do."""
    process = start_dev(tmp_path, "--data-dir", place / "dev", "--sim", "0", "--analyze-every", "1")
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("Profile"):
                break
        dsn = make_conninfo(host=str(socket_dir(place / "dev/postgres")), user="postgres", dbname="bettercompute")
        with psycopg.connect(dsn, autocommit=True) as conn:
            unknown = conn.execute("select relname from pg_stat_user_tables where last_analyze is null").fetchall()
            assert unknown == []
            give_up = time.monotonic() + PATIENCE_S
            while conn.execute(_OFTEN_ANALYZED).fetchall() != [(True,)]:
                assert time.monotonic() < give_up
                time.sleep(POLL_S)  # sleeps: between two looks at a state of another process
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=STOP_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(PATIENCE_S)
    assert process.returncode == 0
