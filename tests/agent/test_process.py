"""`bcd` as a process of its own, over real TLS: joining, running, being told to stop, being killed."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

import agent.running
from agent.config import Config
from agent.drivers.host import HostPaths
from agent.drivers.hostonly import HostDevices, library_loads
from agent.exits import ExitCode
from agent.machine import Hardware, NewProcessNeeded, run_library_watch
from agent.membership import Machine
from agent.running import run_agent
from agent.tokens import forget_spent
from shared.wire import AllocationBound, CommandUpdate, Hello, Report
from tests.support.agents import open_rig
from tests.support.stub_gateway import StubGateway, serve_tls
from tests.support.stub_plane import StubPlane, assignment

if TYPE_CHECKING:
    import subprocess
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from agent.drivers.fake import Variant
    from tests.support.logs import LogRecorder

DEADLINE_S = 60  # the machine may be busy; nothing here takes more than two or three seconds
BCD = (sys.executable, "-c", "from agent.main import main; main()")


@dataclass
class Host:
    """A machine with `bcd` on it, and the gateway it may join."""

    plane: StubPlane
    gateway: StubGateway
    url: str
    directory: Path
    variant: Variant = "h100"

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    @property
    def cdi_dir(self) -> Path:
        return self.state_dir / "cdi"

    def environment(self, **extra: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("BCD_", "NOTIFY_"))}
        return {**clean, "BCD_STATE_DIR": str(self.state_dir), **extra}

    async def call(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        with trio.fail_after(DEADLINE_S):
            return await trio.run_process(
                [*BCD, *arguments],
                env=self.environment(**environment),
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )

    async def join(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
        token = {"BCD_JOIN_TOKEN": self.plane.token.text}
        arguments = ("join", self.url, "--pin", self.plane.pin, "--simulate", self.variant, *flags)
        return await self.call(*arguments, **{**token, **environment})

    @asynccontextmanager
    async def running(self, **environment: str) -> AsyncGenerator[trio.Process]:
        """`bcd run`, which is killed when the block is left."""
        process = await trio.lowlevel.open_process([*BCD, "run"], env=self.environment(**environment))
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            with trio.move_on_after(10, shield=True):
                await process.wait()

    async def wait_open(self, count: int = 1) -> None:
        await self.gateway.wait_open(count)


@asynccontextmanager
async def open_host(directory: Path) -> AsyncGenerator[Host]:
    plane = StubPlane()
    gateway = StubGateway(plane)
    gateway.wait_s = DEADLINE_S
    async with serve_tls(gateway, plane.write_serving_certificate(directory / "gateway.pem")) as port:
        url = f"https://127.0.0.1:{port}"
        plane.gateway_urls = [url]
        yield Host(plane, gateway, url, directory)


async def test_join_run_bind_and_stop(tmp_path: Path):
    async with open_host(tmp_path) as host:
        joined = await host.join("--name", "gpu-17")
        assert joined.returncode == 0, joined.stderr
        assert b"joined as node_" in joined.stdout
        assert host.plane.requests[0].host.hostname == "gpu-17"
        again = await host.join()
        assert again.returncode == 0
        assert b"already joined" in again.stdout
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(tmp_path / "notify"))
            notify.setblocking(False)
            environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "3000000"}
            async with host.running(**environment) as process:
                await host.wait_open()
                (hello,) = host.gateway.session.of(Hello)
                gpus = host.plane.requests[0].host.gpu_uuids
                host.gateway.session.send(host.plane.spec(hello.node_id, 1, [assignment("rsv_1", *gpus[:2])]))
                (bound,) = await host.gateway.wait_statement(AllocationBound)
                (file,) = host.cdi_dir.glob("*.json")
                spec: dict[str, Any] = json.loads(file.read_text())
                assert f"{spec['kind']}={spec['devices'][0]['name']}" == bound.cdi_name
                status = await host.call("status", "--json")
                assert status.returncode == 0
                assert json.loads(status.stdout)["bound"][0]["cdi_name"] == bound.cdi_name
                second = await host.call("run")
                assert second.returncode == 1
                assert b"for a second one, give --state-dir" in second.stderr
                process.send_signal(signal.SIGTERM)
                with trio.fail_after(DEADLINE_S):
                    assert await process.wait() == 0
            assert file.exists()  # stopping the agent ends no workload
            lines = read_datagrams(notify)
        assert lines.index("READY=1") < lines.index("STOPPING=1")
        assert "WATCHDOG=1" in lines
        assert any(line.startswith(f"STATUS={hello.node_id}") for line in lines)


def read_datagrams(notify: socket.socket) -> list[str]:
    lines: list[str] = []
    while True:
        try:
            lines.append(notify.recv(4096).decode())
        except BlockingIOError:
            return lines


async def test_killed_while_a_command_runs_it_is_indeterminate_and_never_run_again(tmp_path: Path):
    faults = tmp_path / "faults.json"
    faults.write_text('{"delays_s": {"diagnose": 3600}}')
    async with open_host(tmp_path) as host:
        assert (await host.join()).returncode == 0
        async with host.running(BCD_SIMULATED_FAULTS=str(faults)) as process:
            await host.wait_open()
            (hello,) = host.gateway.session.of(Hello)
            command = host.plane.command(hello.node_id, "diag.nvml", lane="provision")
            host.gateway.session.send(command, "provision")
            (running,) = await host.gateway.wait_statement(CommandUpdate)
            assert running.state == "running"
            process.kill()
            with trio.fail_after(DEADLINE_S):
                assert await process.wait() == -signal.SIGKILL
        async with host.running():
            await host.wait_open(2)
            session = host.gateway.session
            (again,) = session.of(Hello)
            assert again.journal_id == hello.journal_id
            (told,) = await host.gateway.wait_statement(CommandUpdate)
            assert (told.command_id, told.state) == (command.command_id, "indeterminate")
            session.send(command, "provision")  # run now, it would succeed at once
            await host.gateway.wait_statement(CommandUpdate, 2)
            assert {update.state for update in session.statements(CommandUpdate)} == {"indeterminate"}
            reports = len(session.of(Report))
            probe = host.plane.command(hello.node_id, "diag.echo", lane="provision")
            session.send(probe, "provision")  # and the lane goes on
            await host.gateway.wait(lambda: len(session.of(Report)) > reports)
            assert host.gateway.session.statements(CommandUpdate)[-1].command_id == probe.command_id


async def test_a_deleted_journal_is_a_new_one_and_refuses_the_old_ones_commands(tmp_path: Path):
    async with open_host(tmp_path) as host:
        assert (await host.join()).returncode == 0
        async with host.running():
            await host.wait_open()
            (hello,) = host.gateway.session.of(Hello)
        for path in host.state_dir.glob("journal.db*"):
            path.unlink()
        async with host.running():
            await host.wait_open(2)
            (again,) = host.gateway.session.of(Hello)
            assert again.journal_id != hello.journal_id
            command = host.plane.command(hello.node_id, "diag.nvml", journal_id=hello.journal_id)
            host.gateway.session.send(command)
            (refused,) = await host.gateway.wait_statement(CommandUpdate)
            assert (refused.state, refused.code) == ("failed", "STALE_JOURNAL")


async def test_a_machine_with_a_credential_joins_by_itself(tmp_path: Path):
    async with open_host(tmp_path) as host:
        credentials = tmp_path / "credentials"
        credentials.mkdir()
        (credentials / "join-token").write_text(host.plane.token.text)
        config = tmp_path / "bcd.toml"
        config.write_text(f'simulate = "cpu"\n[join]\nurl = "{host.url}"\npin = "{host.plane.pin}"\n')
        process = await trio.lowlevel.open_process(
            [*BCD, "run", "--config", str(config)], env=host.environment(CREDENTIALS_DIRECTORY=str(credentials))
        )
        try:
            await host.wait_open()
        finally:
            process.kill()
            with trio.move_on_after(10, shield=True):
                await process.wait()
        assert len(host.plane.requests) == 1


@pytest.mark.parametrize("removable", [True, False])
async def test_the_token_of_a_credential_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: LogRecorder, *, removable: bool
):
    async with open_host(tmp_path) as host:
        source = tmp_path / "join-token"
        source.write_text(host.plane.token.text)
        # a directory can be neither read nor unlinked
        path = source if removable else tmp_path
        monkeypatch.setattr("agent.running.forget_spent", partial(forget_spent, path=path))
        config = Config(state_dir=host.state_dir, simulate="cpu", join_url=host.url, join_pin=host.plane.pin)
        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
                nursery.start_soon(run_agent, config, environment, io.StringIO())
                await host.wait_open()
                nursery.cancel_scope.cancel("seen")
        assert source.exists() != removable
        warned = log.named("token.not_removed")
        assert ["remove it" in event["fix"] for event in warned] == ([] if removable else [True])


@pytest.mark.parametrize("code", [ExitCode.OK, ExitCode.NOT_ACCEPTED])
async def test_joining_can_wait_for_acceptance(tmp_path: Path, code: ExitCode):
    healthy = code == ExitCode.OK
    async with open_host(tmp_path) as host, trio.open_nursery() as nursery:

        async def accept() -> None:
            """What the control plane does with a new node: checks it, then writes its first spec."""
            await host.wait_open()
            (hello,) = host.gateway.session.of(Hello)
            # a GPU that was promised and is not there fails the checks
            expected = b"" if healthy else PROMISED
            host.gateway.session.send(host.plane.command(hello.node_id, "diag.nvml", arguments=expected or b"{}"))
            await host.gateway.wait(
                lambda: any(u.state in ("succeeded", "failed") for u in host.gateway.session.statements(CommandUpdate))
            )
            if healthy:
                host.gateway.session.send(host.plane.spec(hello.node_id, 1))

        nursery.start_soon(accept)
        done = await host.join("--wait")
        assert done.returncode == code, done.stderr
        if healthy:
            assert b"checks passed - adopted" in done.stdout
        else:
            assert b"accepted GPU-promised is missing" in done.stderr
        nursery.cancel_scope.cancel()


PROMISED = json.dumps(
    {
        "expected": [
            {
                "uuid": "GPU-promised",
                "serial": "1",
                "model": "NVIDIA H100 80GB HBM3",
                "pci_bus_id": "0000:ff:00.0",
                "minor": 0,
                "memory_mib": 81559,
            }
        ]
    }
).encode()


# --- a driver that was installed later --------------------------------------------------------


async def test_a_driver_that_appears_asks_for_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def appeared(hardware: Hardware) -> None:
        await trio.lowlevel.checkpoint()
        raise NewProcessNeeded("the NVIDIA driver was installed")

    monkeypatch.setattr(agent.running, "run_library_watch", appeared)
    StubPlane().enrol(tmp_path, Machine(driver="simulated", variant="cpu", name="cpu-1"))
    with trio.fail_after(DEADLINE_S):
        code = await run_agent(Config(state_dir=tmp_path), {}, sys.stdin)
    assert code == ExitCode.NEW_PROCESS == 78


async def test_the_library_is_looked_for_only_where_it_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
):
    answers = [False, False, True]

    async def loads() -> bool:
        await trio.lowlevel.checkpoint()
        return answers.pop(0)

    monkeypatch.setattr("agent.machine.library_loads", loads)
    async with open_rig(tmp_path) as rig:
        bare = Hardware(HostDevices(HostPaths()), rig.bound, tmp_path, is_bare=True)
        with pytest.raises(NewProcessNeeded):
            await run_library_watch(bare)
        assert trio.current_time() == 180
        await run_library_watch(Hardware(HostDevices(HostPaths()), rig.bound, tmp_path))


async def test_whether_the_library_loads_is_asked_in_another_process(library: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    assert await library_loads()
    assert "libnvidia-ml" not in await trio.Path("/proc/self/maps").read_text()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library / "nowhere"))
    assert not await library_loads()
