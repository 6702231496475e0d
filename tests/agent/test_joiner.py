"""Joining over real TLS: the pin first, the secret only to whom it is for, and every failure with its exit code."""

from __future__ import annotations

import random
import sqlite3
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

from agent.blocking import InThread
from agent.drivers.base import Assignment
from agent.drivers.cdi import CdiDriver
from agent.drivers.cdi_sources import SimulatedEdits
from agent.drivers.fake import FakeDevices
from agent.endpoints import BadEndpoint, Endpoint, parse_endpoint
from agent.exits import CommandFailed, ExitCode
from agent.joiner import Joining, compare_with_membership, describe_host, fetch_bundle, join, store
from agent.journal import JOURNAL_FILE, open_journal
from agent.membership import Machine, NotJoined, load_membership
from agent.pending import load_or_make_request
from controlplane.fleet.pki import make_authority
from shared.clocks import SystemClock
from shared.joining import JOIN_PATH, JoinToken, make_token
from tests.support.stub_gateway import StubGateway, serve_tls
from tests.support.stub_plane import StubPlane

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from agent.endpoints import Dial
    from agent.membership import Membership


@dataclass
class Site:
    """A stub control plane on a port of this machine, and a machine that may join it."""

    plane: StubPlane
    gateway: StubGateway
    endpoint: Endpoint
    directory: Path
    devices: FakeDevices

    @property
    def state_dir(self) -> Path:
        return self.directory / "state"

    @property
    def assignments(self) -> CdiDriver:
        return CdiDriver(self.directory / "cdi", SimulatedEdits(), InThread())

    async def join(self, token: JoinToken | None = None, pin: str | None = None) -> Membership:
        """Join as `bcd join` does, without storing it."""
        bundle = await fetch_bundle(self.endpoint, pin or self.plane.pin)
        host = describe_host(await self.devices.probe(), name="", agent_version="1")
        joining = Joining(self.endpoint, token or self.plane.token, host, Machine())
        return await join(joining, bundle, self.state_dir, clock=SystemClock(), rng=random.Random(1))


@asynccontextmanager
async def open_site(directory: Path, *, foreign_certificate: bool = False) -> AsyncGenerator[Site]:
    plane = StubPlane()
    gateway = StubGateway(plane)
    authority = make_authority("somebody's CA", "evil.test", plane.now) if foreign_certificate else None
    certificate = plane.write_serving_certificate(directory / "gateway.pem", authority)
    async with serve_tls(gateway, certificate) as port:
        plane.gateway_urls = [f"https://127.0.0.1:{port}"]
        devices = FakeDevices("gpu-7", "h100")
        yield Site(plane, gateway, Endpoint("127.0.0.1", port), directory, devices)


@pytest.mark.parametrize("name", ["é", "two words", "\x1b[31mred", "x" * 254])
async def test_a_name_that_no_fleet_takes_is_refused_before_anything_is_sent(name: str):
    inventory = await FakeDevices("gpu-7", "h100").probe()
    with pytest.raises(CommandFailed, match="cannot be a node's name") as refused:
        describe_host(inventory, name=name, agent_version="1")
    assert refused.value.exit_code == ExitCode.USAGE


async def test_a_machine_joins_and_knows_its_place(tmp_path: Path):
    async with open_site(tmp_path) as site:
        with trio.fail_after(30):
            membership = await site.join()
        await store(membership, site.state_dir, site.assignments)
        stored = load_membership(site.state_dir)
        assert (stored.node_id, stored.bundle.pin) == (membership.node_id, site.plane.pin)
        assert stored.identity.chain == membership.identity.chain
        assert stored.intent_keys == site.plane.intent_keys()
        assert [str(gateway) for gateway in stored.gateways] == site.plane.gateway_urls
        (request,) = site.plane.requests
        inventory = await site.devices.probe()
        assert request.host.hostname == "gpu-7"
        assert request.host.gpu_uuids == [gpu.uuid for gpu in inventory.gpus]
        assert (site.state_dir / "identity.pem").stat().st_mode & 0o777 == 0o600
        assert site.state_dir.stat().st_mode & 0o777 == 0o700
        assert not (site.state_dir / "join.pem").exists()


async def test_the_wrong_pin_is_found_before_anything_secret_is_sent(tmp_path: Path):
    async with open_site(tmp_path) as site:
        with pytest.raises(CommandFailed, match="nothing secret was sent") as caught:
            await site.join(pin="sha256:" + "0" * 64)
        assert caught.value.exit_code == ExitCode.PIN_MISMATCH
        assert JOIN_PATH not in site.gateway.paths
        assert not (site.state_dir / "join.pem").exists()


async def test_a_relay_that_shows_the_right_bundle_gets_no_token(tmp_path: Path):
    """Whoever stands between can fetch the public bundle and show it; TLS by its CA is what it cannot do."""
    async with open_site(tmp_path, foreign_certificate=True) as site:
        with pytest.raises(CommandFailed, match="another TLS certificate") as caught:
            await site.join()
        assert caught.value.exit_code == ExitCode.PIN_MISMATCH
        assert JOIN_PATH not in site.gateway.paths


async def test_a_refused_token_has_its_own_code_and_is_not_tried_again(tmp_path: Path):
    async with open_site(tmp_path) as site:
        with pytest.raises(CommandFailed, match="refused token bcjt_") as caught:
            await site.join(token=make_token())
        assert caught.value.exit_code == ExitCode.TOKEN_REFUSED
        assert "audit" in caught.value.hint
        assert site.gateway.paths.count(JOIN_PATH) == 1


async def test_a_lost_answer_is_asked_for_with_the_same_key_and_token(tmp_path: Path):
    async with open_site(tmp_path) as site:
        site.gateway.lost_answers = 1
        with trio.fail_after(60):
            membership = await site.join()
        first, second = site.plane.requests
        assert first.csr == second.csr
        assert membership.node_id == site.plane.node_ids[first.host.machine_id]


async def test_a_run_that_was_cut_is_taken_up_by_the_next(tmp_path: Path):
    async with open_site(tmp_path) as site:
        _, csr = load_or_make_request(site.state_dir / "join.pem")
        membership = await site.join()
        assert site.plane.requests[0].csr == csr.pem
        assert membership.identity.key.public_key() == csr.public_key


async def test_an_answer_by_another_key_is_not_believed(tmp_path: Path):
    async with open_site(tmp_path) as site:
        site.plane.join_signer = StubPlane().join_signer
        with pytest.raises(CommandFailed, match="not signed by the pinned join key") as caught:
            await site.join()
        assert caught.value.exit_code == ExitCode.PIN_MISMATCH


async def test_nobody_at_the_address_is_unreachable(tmp_path: Path):
    with pytest.raises(CommandFailed, match="cannot be reached") as caught:
        await fetch_bundle(Endpoint("127.0.0.1", 1), "sha256:" + "0" * 64)
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    assert "refused" in str(caught.value)


async def test_something_that_is_no_gateway_is_unreachable(tmp_path: Path):
    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(trio.serve_tcp, hang_up, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(CommandFailed) as caught:
            await fetch_bundle(Endpoint("127.0.0.1", port), "sha256:" + "0" * 64)
        nursery.cancel_scope.cancel()
    assert caught.value.exit_code == ExitCode.UNREACHABLE


async def test_a_server_that_never_answers_is_given_up(tmp_path: Path, autojump_clock: object):
    async def dial(endpoint: Endpoint, /) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return trio.testing.memory_stream_pair()[0]

    silent: Dial = dial
    with pytest.raises(CommandFailed, match="no answer within 60 s") as caught:
        await fetch_bundle(Endpoint("gw.test", 443), "sha256:" + "0" * 64, silent)
    assert caught.value.exit_code == ExitCode.UNREACHABLE


async def test_joined_here_or_elsewhere_is_told_apart(tmp_path: Path):
    async with open_site(tmp_path) as site:
        assert compare_with_membership(site.state_dir, site.plane.pin)[0] == "new"
        site.plane.enrol(site.state_dir)
        assert compare_with_membership(site.state_dir, site.plane.pin.upper().replace("SHA", "sha"))[0] == "same"
        assert compare_with_membership(site.state_dir, "sha256:" + "0" * 64)[0] == "other"
        (site.state_dir / "membership.json").write_text("{}")
        with pytest.raises(CommandFailed, match="damaged"):
            compare_with_membership(site.state_dir, site.plane.pin)


async def test_another_node_on_this_machine_is_forgotten_first(tmp_path: Path):
    async with open_site(tmp_path) as site:
        site.plane.enrol(site.state_dir)
        await site.assignments.bind(Assignment("rsv_1", ("GPU-1",)))
        async with open_journal(site.state_dir / JOURNAL_FILE, InThread()) as journal:
            first = journal.journal_id
        await store(await site.join(), site.state_dir, site.assignments)
        assert await site.assignments.list_bound() == []
        async with open_journal(site.state_dir / JOURNAL_FILE, InThread()) as journal:
            assert journal.journal_id != first


async def test_the_same_node_keeps_what_it_holds(tmp_path: Path):
    async with open_site(tmp_path) as site:
        membership = site.plane.enrol(site.state_dir)
        site.plane.node_ids[(await site.devices.probe()).host.machine_id] = membership.node_id
        await site.assignments.bind(Assignment("rsv_1", ("GPU-1",)))
        await store(await site.join(), site.state_dir, site.assignments)
        assert [bound.reservation_id for bound in await site.assignments.list_bound()] == ["rsv_1"]
        assert load_membership(site.state_dir).node_id == membership.node_id


async def test_a_running_agent_is_not_pulled_from_under(tmp_path: Path):
    async with open_site(tmp_path) as site:
        membership = await site.join()
        async with open_journal(site.state_dir / JOURNAL_FILE, InThread()):
            with pytest.raises(CommandFailed, match="an agent runs"):
                await store(membership, site.state_dir, site.assignments)
        with pytest.raises(NotJoined):
            load_membership(site.state_dir)
        assert sqlite3.connect(site.state_dir / JOURNAL_FILE)


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("https://gw.example", Endpoint("gw.example", 443)),
        ("https://gw.example:7443/", Endpoint("gw.example", 7443)),
        ("https://[2001:db8::1]:7443", Endpoint("2001:db8::1", 7443)),
        (" https://10.0.0.1 ", Endpoint("10.0.0.1", 443)),
    ],
)
def test_addresses_of_gateways(url: str, endpoint: Endpoint):
    assert parse_endpoint(url) == endpoint
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "gw.example",
        "http://gw.example",
        "https://",
        "https://gw.example:0",
        "https://gw.example:70000",
        "https://gw.example/join",
        "https://user@gw.example",
        "https://gw example",
        "https://gw.example?x",
    ],
)
def test_what_is_no_address_says_what_one_looks_like(url: str):
    with pytest.raises(BadEndpoint, match="https://host"):
        parse_endpoint(url)
