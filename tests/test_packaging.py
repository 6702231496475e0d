"""The unit files are what systemd takes, and start what they say."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[1] / "packaging" / "systemd"
PROGRAMS = {"bcd.service": "/opt/bettercompute/bin/bcd", "bettercompute@.service": "/opt/bettercompute/bin/bcctl"}


def test_every_unit_is_tested() -> None:
    assert sorted(path.name for path in UNITS.glob("*.service")) == sorted(PROGRAMS)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="not installed: systemd")
@pytest.mark.parametrize("name", PROGRAMS)
def test_systemd_takes_it(name: str, tmp_path: Path) -> None:
    text = (UNITS / name).read_text(encoding="utf-8")
    assert f"\nExecStart={PROGRAMS[name]} " in text
    # systemd looks whether the program is there, and on this machine it is not
    (tmp_path / name).write_text(text.replace(f"ExecStart={PROGRAMS[name]} ", "ExecStart=/bin/true "), encoding="utf-8")
    unit = tmp_path / name.replace("@", "@server")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if name.partition(".")[0] in line]
    assert (done.returncode, ours) == (0, [])
