"""`bcctl dev`, before anything is started."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
import trio

from controlplane.cli.dev import DevSettings, first_command, run_dev
from controlplane.cli.profiles import CONFIG_VARIABLE, write_profile
from controlplane.cli.serve import reporting
from controlplane.cli.session import Failed

if TYPE_CHECKING:
    from pathlib import Path


def test_a_port_that_is_taken_is_seen_before_anything_is_started() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = DevSettings(data_dir=None, sim=0, variant="h100", port=port, analyze_every_s=60)
        with pytest.raises(Failed, match=f"--port: 127.0.0.1:{port} is in use") as failure, reporting():
            trio.run(run_dev, settings, said.append)
    assert failure.value.hints == ("stop that one, or choose another with --port; 0 is any that is free",)
    assert said == []


def test_the_first_command_names_a_profile_that_is_not_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "config.toml"))
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/bcctl")
    write_profile("dev", "http://127.0.0.1:3000", "bck_x.y")
    assert first_command("dev", "cpu") == "bcctl reserve --pool cpu --vcpus 4 --for 1h"
    assert first_command("dev-3001", "cpu").startswith("bcctl --profile dev-3001 reserve ")
    (tmp_path / "config.toml").unlink()
    write_profile("production", "https://compute.example.com", "bck_x.z")
    write_profile("dev", "http://127.0.0.1:3000", "bck_x.y")
    assert first_command("dev", "cpu") == "bcctl --profile dev reserve --pool cpu --vcpus 4 --for 1h"
