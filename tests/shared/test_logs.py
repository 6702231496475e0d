"""Each line on stderr is one JSON object, from our code and from libraries, and shows no local variable."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from shared.logs import configure_logging

SCRIPT = textwrap.dedent("""
    import logging, structlog
    from shared.logs import configure_logging

    log = structlog.get_logger()
    {configure}
    structlog.contextvars.bind_contextvars(request_id="r1")
    log.debug("thing.hidden")
    log.info("thing.happened", size_bytes=1, raw=b"x", odd=object)
    logging.getLogger("some.library").warning("100%% of %s", "it")
    logging.getLogger("httpx2").info("a line per request")

    def fail(token):
        raise ExceptionGroup("both", [ValueError("one"), OSError("two")])

    try:
        fail("hunter" + str(2))
    except Exception:
        log.exception("thing.failed")
        logging.getLogger("some.library").exception("library failed")
""")


def run(configure: str) -> str:
    script = SCRIPT.format(configure=configure)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    assert "hunter2" not in done.stderr
    return done.stderr


def test_json_lines() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in run("configure_logging('info')").splitlines()]
    happened, library, failed, library_failed = lines
    assert list(happened)[:3] == ["time", "level", "event"]
    assert happened["event"] == "thing.happened"
    assert (happened["size_bytes"], happened["request_id"], happened["level"]) == (1, "r1", "info")
    assert happened["time"].endswith("Z")
    assert (library["event"], library["logger"], library["request_id"]) == ("100% of it", "some.library", "r1")
    for event in (failed, library_failed):
        group = event["exception"][0]
        assert [inner[0]["exc_type"] for inner in group["exceptions"]] == ["ValueError", "OSError"]
        assert group["frames"][-1]["name"] == "fail"


def test_console_lines() -> None:
    text = run("configure_logging('INFO', json=False)")
    assert "thing.happened" in text
    assert "ExceptionGroup: both (2 sub-exceptions)" in text
    assert "\x1b[" not in text  # stderr is a pipe here: no colours


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ValueError, match="unknown log level 'LOUD'"):
        configure_logging("LOUD")
