"""The agents' process as its parent sees it, without a control plane; with one, see the integration tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent.exits import CommandFailed, ExitCode
from agent.membership import BadMembership
from fleetsim.agents import LOG_BYTES_MAX, LOG_FILE, Unusable, describe_failure
from shared.joining import make_token

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
NOBODY = "https://127.0.0.1:1"  # a port that nobody listens on and nobody is given
PIN = "sha256:" + "00" * 32


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "fleet"


@pytest.fixture
def process(state_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "fleetsim", "agents", "--spec", "-"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT) as started:
        yield started
        started.kill()


def tell(process: subprocess.Popen[bytes], spec: dict[str, Any] | bytes) -> list[dict[str, Any]]:
    """Hand over the specification, keep stdin open, and return what the process says until it ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write((spec if isinstance(spec, bytes) else json.dumps(spec).encode()) + b"\n")
    process.stdin.flush()
    return [json.loads(line) for line in process.stdout]


def test_machines_that_cannot_join_say_which_and_why(process: subprocess.Popen[bytes], state_dir: Path) -> None:
    token = make_token().text
    nodes = [{"name": "sim-01"}, {"name": "sim-02", "token": token}]
    said = tell(process, {"gateway": NOBODY, "pin": PIN, "state_dir": str(state_dir), "nodes": nodes})
    assert process.wait(30) == 1
    failed = {line["name"]: line for line in said if line["event"] == "failed"}
    assert failed["sim-01"]["code"] == "NO_TOKEN"
    assert failed["sim-02"]["code"] == "UNREACHABLE"
    assert NOBODY in failed["sim-02"]["reason"]
    assert [line["event"] for line in said if "name" not in line] == ["starting", "ready", "stopping"]
    (ready,) = [line for line in said if line["event"] == "ready"]
    assert (ready["connected"], ready["failed"]) == (0, 2)
    log = (state_dir / LOG_FILE).read_text()
    assert "node.failed" in log
    assert token not in log + json.dumps(said)


def test_a_specification_that_is_none_is_a_usage_error_on_stderr(process: subprocess.Popen[bytes]) -> None:
    assert tell(process, b"{}") == []
    assert process.wait(30) == 2
    assert process.stderr is not None
    assert b"gateway" in process.stderr.read()


def test_a_state_directory_that_others_may_enter_is_refused(process: subprocess.Popen[bytes], state_dir: Path) -> None:
    state_dir.mkdir(mode=0o755)
    nodes = [{"name": "sim-01"}]
    assert tell(process, {"gateway": NOBODY, "pin": PIN, "state_dir": str(state_dir), "nodes": nodes}) == []
    assert process.wait(30) == 2
    assert process.stderr is not None
    assert b"chmod 700" in process.stderr.read()


def test_a_large_log_is_put_aside(process: subprocess.Popen[bytes], state_dir: Path) -> None:
    state_dir.mkdir(mode=0o700)
    with (state_dir / LOG_FILE).open("wb") as file:
        file.truncate(LOG_BYTES_MAX + 1)
    tell(process, {"gateway": NOBODY, "pin": PIN, "state_dir": str(state_dir), "nodes": [{"name": "sim-01"}]})
    assert (state_dir / "agents.log.1").stat().st_size > LOG_BYTES_MAX
    assert 0 < (state_dir / LOG_FILE).stat().st_size < LOG_BYTES_MAX


@pytest.mark.parametrize(
    ("error", "described"),
    [
        (CommandFailed(ExitCode.TOKEN_REFUSED, "refused", "look"), ("TOKEN_REFUSED", "refused; look")),
        (CommandFailed(ExitCode.FAILED, "broken"), ("FAILED", "broken")),
        (Unusable("NO_TOKEN", "none"), ("NO_TOKEN", "none")),
        (BadMembership("damaged"), ("BAD_MEMBERSHIP", "damaged")),
    ],
)
def test_a_failure_has_a_stable_code(error: Exception, described: tuple[str, str]) -> None:
    assert describe_failure(ExceptionGroup("", [ExceptionGroup("", [error])])) == described
