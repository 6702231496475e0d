"""`bcctl serve` as a process: it starts, stops in time, and says what keeps it from starting."""

from __future__ import annotations

import re
import signal
import socket
from typing import TYPE_CHECKING

import httpx2
import psycopg
import pytest

from controlplane.fleet.keys import KeySettings, load_or_create_keys
from shared.clocks import SystemClock
from tests.support.ledgers import insert_node
from tests.support.stack import eventually, open_stack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.postgres import Dsn

KEYS_OF_TD = 'trust_domain = "td.test"\nkeys_dir'


async def test_it_serves_and_stops_on_sigterm(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        await stack.make_pool()
        assert "h100" in await stack.bcctl("pools", "list")
        # an open event stream, and a client that never reads, do not hold it up
        with socket.create_connection(("127.0.0.1", stack.ports[0])) as silent:
            silent.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
            stack.server.kill(signal.SIGTERM)
            assert await stack.server.wait(10) == 0
        assert "Traceback" not in stack.server.text()


async def test_every_part_reports_to_one_page(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack, httpx2.AsyncClient() as client:
        url = f"http://127.0.0.1:{stack.ports[0]}/metrics"
        wanted = {f'better_compute_db_pool_waiting{{role="bc_{role}"}}' for role in ("api", "gateway", "worker")}
        wanted |= {f'better_compute_tx_duration_seconds_count{{role="bc_{role}"}}' for role in ("gateway", "worker")}
        wanted |= {"better_compute_loop_lag_seconds_count", "better_compute_slow_steps_total"}
        wanted |= {"better_compute_gateway_sessions", 'better_compute_queue_depth{queue="node"}'}

        async def all_there() -> bool:
            text = (await client.get(url)).text
            return all(f"\n{name} " in text for name in wanted)

        await eventually(all_there, what="all metrics on the page")


@pytest.mark.parametrize("placer", ["inline", "pool-lease"])
async def test_the_page_tells_for_how_long_placements_lock(dsn: Dsn, tmp_path: Path, placer: str) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack, httpx2.AsyncClient() as client:
        config = tmp_path / "config.toml"
        config.write_text(f'{config.read_text()}[capacity]\nplacer = "{placer}"\n')
        await stack.start_server()
        await stack.make_pool()
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            insert_node(conn, 1, 0, 8)
        await stack.wait_state(await stack.reserve(4), "binding")
        text = (await client.get(f"http://127.0.0.1:{stack.ports[0]}/metrics")).text
        name = "better_compute_placement_lock_held_seconds"
        assert f'\n{name}_count{{placer="{placer}"}} 1.0\n' in text
        (held_s,) = re.findall(rf'^{name}_sum{{placer="{placer}"}} (\S+)$', text, re.MULTILINE)
        assert 0 < float(held_s) < 5
        assert len(re.findall(rf"^{name}_count{{", text, re.MULTILINE)) == 1


async def test_a_scheduler_places_as_many_at_once_as_it_is_told(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack, httpx2.AsyncClient() as client:
        config = tmp_path / "config.toml"
        config.write_text(f"{config.read_text()}[capacity]\nmax_batch = 2\n")
        await stack.start_server()
        await stack.make_pool()
        with psycopg.connect(dsn.admin, autocommit=True) as conn:
            insert_node(conn, 1, 0, 8)
            conn.execute("update node set cordoned = true")
        waiting = [await stack.reserve(1) for _ in range(6)]
        await stack.client.change("nodes/uncordon", {"node": "node-0"})
        for reservation in waiting:
            await stack.wait_state(reservation, "binding")
        text = (await client.get(f"http://127.0.0.1:{stack.ports[0]}/metrics")).text
        name = 'better_compute_placement_lock_held_seconds_count{placer="pool-lease"}'
        (batches,) = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert float(batches) >= 3


async def test_leases_are_free_after_a_clean_stop(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        stack.server.kill(signal.SIGTERM)
        assert await stack.server.wait(10) == 0
        assert stack.sql("select name from lease where expires_at > compute_now()") == []
        assert stack.sql("select worker_id from worker") == []


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (('[log]\nlevel = "info"', '[log]\nlevle = "info"'), ["CONFIG", "levle", "$.log"]),
        (('join_listen = "127.0.0.1:', 'join_listen = "127.0.0.1'), ["CONFIG", "api.join_listen", "host:port"]),
        (("keys_dir", 'roles = ["apis"]\nkeys_dir'), ["CONFIG", "apis", "$.roles[0]"]),
        (("keys_dir", "keys_dri"), ["CONFIG", "keys_dri"]),
        (("[database]\ndsn", "[database]\ndns"), ["CONFIG", "dns"]),
        (("https://", "http://"), ["CONFIG", "gateway.endpoints", "https://"]),
        (("host=", "host=/nowhere"), ["DATABASE", "login as bc_api: ", "nowhere", "is PostgreSQL up"]),
        (("dbname=", "dbnam="), ["CONFIG", "database.dsn", "dbnam", "hint:"]),
    ],
)
async def test_a_configuration_that_cannot_be_used_is_named(
    dsn: Dsn, tmp_path: Path, edit: tuple[str, str], said: list[str]
) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack:
        config = tmp_path / "config.toml"
        text = config.read_text()
        assert edit[0] in text
        config.write_text(text.replace(*edit, 1))
        refused = await stack.run("bcctl", "serve", "--config", str(config))
        assert refused.returncode == 1
        for word in said:
            assert word in refused.stderr
        assert "Traceback" not in refused.stderr


async def test_a_port_in_use_is_named(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack:
        with socket.create_server(("127.0.0.1", stack.ports[2])):
            refused = await stack.run("bcctl", "serve", "--config", str(tmp_path / "config.toml"))
        assert refused.returncode == 1
        assert f"gateway.listen: 127.0.0.1:{stack.ports[2]} is in use" in refused.stderr


async def test_tls_files_are_tried_before_anything_is_started(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack:
        config = tmp_path / "config.toml"
        tls = f'tls_certificate = "{tmp_path}/api.crt"\ntls_key = "{tmp_path}/api.key"\n'
        config.write_text(config.read_text().replace("[api]\n", f"[api]\n{tls}"))
        refused = await stack.run("bcctl", "serve", "--config", str(config))
        assert refused.returncode == 1
        assert f"CONFIG: api.tls_certificate: {tmp_path}/api.crt: No such file" in refused.stderr
        assert stack.sql("select name from lease") == []
        assert not (tmp_path / "keys").exists()


async def test_keys_that_others_can_read_are_refused(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        stack.server.kill(signal.SIGTERM)
        await stack.server.wait(10)
        (tmp_path / "keys").chmod(0o755)
        refused = await stack.run("bcctl", "serve", "--config", str(tmp_path / "config.toml"))
        assert refused.returncode == 1
        assert "chmod 700" in refused.stderr


@pytest.mark.parametrize("roles", ["api,gateway,controllers,scheduler,sinks,iam", "gateway", "controllers"])
async def test_keys_of_another_authority_are_refused(dsn: Dsn, tmp_path: Path, roles: str) -> None:
    """Each process compares its own part; with the right keys the same database is served as before."""
    async with open_stack(dsn, tmp_path) as stack:
        stack.server.kill(signal.SIGTERM)
        await stack.server.wait(10)
        other = tmp_path / "kyes"
        load_or_create_keys(
            other, KeySettings("td.test", "https://gw.test", ("gw.test",), ("api.test",)), SystemClock()
        )
        config = tmp_path / "config.toml"
        right = config.read_text()
        config.write_text(right.replace(f"{tmp_path}/keys", str(other)).replace("keys_dir", KEYS_OF_TD, 1))
        refused = await stack.run("bcctl", "serve", "--config", str(config), "--roles", roles)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"KEYS: {other}"), refused.stderr
        assert "another authority" in refused.stderr
        assert "correct keys_dir" in refused.stderr
        config.write_text(right)
        await stack.start_server()


async def test_a_mistyped_keys_dir_makes_no_new_authority(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path) as stack:
        stack.server.kill(signal.SIGTERM)
        await stack.server.wait(10)
        config = tmp_path / "config.toml"
        config.write_text(config.read_text().replace(f"{tmp_path}/keys", f"{tmp_path}/kyes"))
        refused = await stack.run("bcctl", "serve", "--config", str(config))
        assert refused.returncode == 1
        assert f"KEYS: {tmp_path}/kyes holds no keys" in refused.stderr
        assert "correct keys_dir" in refused.stderr
        assert not (tmp_path / "kyes").exists()


async def test_a_database_that_is_not_migrated_is_not_served(dsn: Dsn, tmp_path: Path) -> None:
    async with open_stack(dsn, tmp_path, serve=False) as stack:
        stack.sql("delete from schema_migration")
        refused = await stack.run("bcctl", "serve", "--config", str(tmp_path / "config.toml"))
        assert refused.returncode == 1
        assert "NOT_MIGRATED" in refused.stderr
        assert "bcctl db migrate" in refused.stderr
