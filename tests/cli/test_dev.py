"""`bcctl dev`, before anything is started."""

from __future__ import annotations

import socket

import pytest
import trio

from controlplane.cli.dev import DevSettings, run_dev
from controlplane.cli.serve import reporting
from controlplane.cli.session import Failed


def test_a_port_that_is_taken_is_seen_before_anything_is_started() -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = DevSettings(data_dir=None, sim=0, variant="h100", port=port, analyze_every_s=60)
        with pytest.raises(Failed, match=f"--port: 127.0.0.1:{port} is in use") as failure, reporting():
            trio.run(run_dev, settings, said.append)
    assert failure.value.hints == ("stop that one, or choose another with --port; 0 is any that is free",)
    assert said == []
