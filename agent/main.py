"""The command line of `bcd`. What each command does is elsewhere; here are its flags, its words, its exit code."""

from __future__ import annotations

import functools
import os
import random
import shlex
import sqlite3
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, cast

import click
import msgspec
import trio

from agent.app import agent_version, describe_machine
from agent.config import DEFAULT_CONFIG, DRIVERS, VARIANTS, Config, ConfigError, load_config
from agent.doctor import examine, find_refusal, is_shut_out
from agent.drivers.base import DriverError
from agent.exits import CommandFailed, ExitCode
from agent.joiner import (
    Joining,
    compare_with_membership,
    describe_host,
    fetch_bundle,
    forget_node,
    join,
    store,
)
from agent.journal import JOURNAL_FILE, JournalError, JournalInUse, is_in_use
from agent.machine import choose_machine, open_machine
from agent.membership import BadMembership, Membership, NotJoined, load_membership
from agent.running import parse_server, run_agent, wait_for_acceptance
from agent.snapshot import STATUS_FILE, read_snapshot
from agent.status import format_snapshot
from agent.tokens import CREDENTIAL_SOURCE, NOT_FORGOTTEN, WARNING, NoToken, find_token, forget_spent
from shared.clocks import SystemClock
from shared.instruments import SlowSteps
from shared.joining import BadToken
from shared.logs import configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from agent.config import DriverName
    from agent.drivers.fake import Variant
    from agent.machine import Hardware
    from agent.membership import Machine

LEVEL_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


# What an administrator can mend. Everything else is a bug and keeps its traceback.
_EXPLAINED = (
    CommandFailed,
    ConfigError,
    NoToken,
    BadToken,
    JournalError,
    BadMembership,
    DriverError,
    OSError,
    sqlite3.Error,
)


@contextmanager
def explained_errors() -> Generator[None]:
    """Turn what an administrator can mend into words and an exit code, also from inside nurseries."""
    try:
        yield
    except _EXPLAINED as exc:
        _end(exc)
    except BaseExceptionGroup as group:
        explained, rest = group.split((*_EXPLAINED, KeyboardInterrupt))
        if rest is not None or explained is None:
            raise
        _end(_first(explained))


def _first(exc: BaseException) -> BaseException:
    return _first(cast("BaseException", exc.exceptions[0])) if isinstance(exc, BaseExceptionGroup) else exc


def _end(exc: BaseException) -> NoReturn:
    """End the program with words for a person."""
    match exc:
        case CommandFailed(hint=hint, exit_code=code):
            pass
        case ConfigError() | NoToken() | BadToken():
            hint, code = "", ExitCode.USAGE
        case JournalInUse():
            hint, code = "one agent runs on a state directory; for a second one, give --state-dir", ExitCode.FAILED
        case KeyboardInterrupt():
            raise click.Abort from exc
        case _:
            hint, code = "see `bcd doctor`", ExitCode.FAILED
    click.echo(f"error: {exc}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)
    sys.exit(code)


_COMMON = (
    click.option("--config", "config_file", type=click.Path(path_type=Path), help="Settings [/etc/bcd/bcd.toml]."),
    click.option("--state-dir", type=click.Path(path_type=Path), help="Key, journal [/var/lib/bcd; BCD_STATE_DIR]."),
    click.option("--cdi-dir", type=click.Path(path_type=Path), help="CDI files [/var/run/cdi; BCD_CDI_DIR]."),
    click.option("--driver", type=click.Choice(DRIVERS), help="What finds the GPUs [auto; BCD_DRIVER]."),
    click.option("--simulate", type=click.Choice(VARIANTS), help="Stand in for such a server [BCD_SIMULATE]."),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags that every command has; they arrive as one `Config`, the first argument."""

    @functools.wraps(command)
    def wrapped(
        config_file: Path | None,
        state_dir: Path | None,
        cdi_dir: Path | None,
        driver: DriverName | None,
        simulate: Variant | None,
        **flags: object,
    ) -> None:
        with explained_errors():
            config = load_config(config_file, os.environ)
            config = replace(
                config,
                state_dir=state_dir or config.state_dir,
                cdi_dir=cdi_dir or config.cdi_dir,
                driver=driver or config.driver,
                simulate=simulate or config.simulate,
            )
            command(config, **flags)

    result: Callable[..., None] = wrapped
    for option in reversed(_COMMON):
        result = option(result)
    return result


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(agent_version(), prog_name="bcd")
def main() -> None:
    """The Better Compute agent: makes this machine part of a fleet, and its GPUs what reservations say."""


# --- join ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JoinFlags:
    """The flags of ``bcd join``."""

    url: str
    pin: str
    token: str | None
    token_file: str | None
    name: str
    dry_run: bool
    wait: bool
    force: bool


@main.command("join")
@click.argument("url")
@click.option("--pin", required=True, help="The trust bundle's pin, sha256:...")
@click.option("--token", help="The join token. Readable by everybody on this machine: prefer one of the others.")
@click.option("--token-file", help="A file with the token; - is standard input. Else BCD_JOIN_TOKEN.")
@click.option("--name", default="", help="The node's name, instead of the host's.")
@click.option("--dry-run", is_flag=True, help="Check the pin and show what would be sent; send nothing.")
@click.option("--wait", is_flag=True, help="Wait until the node is accepted, running the agent if nothing else does.")
@click.option("--force", is_flag=True, help="Join again, or another fleet, and forget the node that this was.")
@common_options
def join_command(config: Config, **flags: object) -> None:
    """Join the fleet behind URL, a gateway's address.

    Repeating it is safe. Exit codes: 0 joined, 2 usage, 3 token refused, 4 wrong pin, 5 unreachable, 6 not accepted,
    7 joined elsewhere, 1 anything else.
    """
    configure_logging("WARNING")
    trio.run(_join, config, JoinFlags(**flags))  # pyright: ignore[reportArgumentType]


async def _join(config: Config, flags: JoinFlags) -> None:
    parse_server(flags.url)
    if flags.token is not None:
        click.echo(f"warning: {WARNING}", err=True)
    standing, membership = ("new", None) if flags.force else compare_with_membership(config.state_dir, flags.pin)
    if standing == "other":
        assert membership is not None
        hint = "to leave that fleet: bcd leave; to join this one all the same: --force"
        message = f"this machine is {membership.node_id} of {membership.server}"
        raise CommandFailed(ExitCode.JOINED_ELSEWHERE, message, hint)
    machine = choose_machine(config, _joined_machine(config), name=flags.name)
    async with open_machine(config, machine, config.state_dir, os.environ) as hardware:
        if flags.dry_run:
            await _show_join(flags, hardware)
            return
        if membership is None:
            membership = await _join_now(config, flags, machine, hardware)
            click.echo(f"joined as {membership.node_id}; key and certificate are in {config.state_dir}")
        else:
            click.echo(f"already joined as {membership.node_id} to {membership.server}; nothing to do")
            for words in _ignored(config, membership.machine):
                click.echo(f"warning: {words}", err=True)
        if flags.wait:
            await wait_for_acceptance(config, hardware, click.echo)
        elif not is_in_use(config.state_dir / JOURNAL_FILE):
            click.echo(f"next: {_how_to_run(config)}")


def _ignored(config: Config, joined: Machine) -> Iterator[str]:
    """What was said that is not what the machine joined with, and that `bcd run` will not know of either."""
    service = load_config(None, {})
    for name, said, known, stored in (
        ("simulate", config.simulate, service.simulate, joined.variant),
        ("driver", config.driver, service.driver, joined.driver),
        ("cdi-dir", config.cdi_dir and str(config.cdi_dir), service.cdi_dir and str(service.cdi_dir), joined.cdi_dir),
    ):
        if said and said not in (known, stored):
            key = "cdi.dir" if name == "cdi-dir" else name
            yield (
                f"--{name} {said} is ignored: it joined with {stored or 'none'}; give it to `bcd run`,"
                f" set {key} in {DEFAULT_CONFIG}, or join again with --force and another token"
            )


def _how_to_run(config: Config) -> str:
    """What starts the agent on this state directory; the service knows of no flags and of no environment."""
    if config.state_dir == load_config(None, {}).state_dir:
        return "systemctl enable --now bcd (or: bcd run)"
    return f"bcd run --state-dir {shlex.quote(str(config.state_dir))}"


async def _join_now(config: Config, flags: JoinFlags, machine: Machine, hardware: Hardware) -> Membership:
    token = find_token(flags.token, flags.token_file, os.environ, sys.stdin)
    server = parse_server(flags.url)
    inventory = await hardware.devices.probe()
    bundle = await fetch_bundle(server, flags.pin)
    host = describe_host(inventory, name=flags.name or machine.name, agent_version=agent_version())
    rng = random.Random()  # noqa: S311  jitter
    joining = Joining(server, token, host, machine)
    membership = await join(joining, bundle, config.state_dir, clock=SystemClock(), rng=rng)
    await store(membership, config.state_dir, hardware.assignments)
    try:
        if forget_spent(token):
            click.echo(f"removed the spent token from {CREDENTIAL_SOURCE}")
    except OSError as exc:
        click.echo(f"warning: {exc.strerror}: {NOT_FORGOTTEN}", err=True)
    return membership


async def _show_join(flags: JoinFlags, hardware: Hardware) -> None:
    inventory = await hardware.devices.probe()
    host = describe_host(inventory, name=flags.name, agent_version=agent_version())
    bundle = await fetch_bundle(parse_server(flags.url), flags.pin)
    click.echo(f"machine      {describe_machine(inventory)}")
    click.echo(f"driver       {inventory.driver.state} {inventory.driver.version}".rstrip())
    for gpu in inventory.gpus:
        click.echo(f"  {gpu.pci_bus_id}  {gpu.uuid}  {gpu.model}")
    click.echo(f"server       {bundle.bundle.url}, trust domain {bundle.bundle.trust_domain}; the pin is right")
    click.echo(f"would send   {msgspec.json.encode(host).decode()}")
    click.echo("             a certificate request, and the token sealed to the control plane's key")


# --- run, status, doctor, leave --------------------------------------------------------------


def _load_joined(config: Config) -> Membership:
    try:
        return load_membership(config.state_dir)
    except NotJoined as exc:
        message = f"{config.state_dir}: this machine has not joined"
        raise CommandFailed(ExitCode.FAILED, message, "run `bcd join`, or give --state-dir") from exc


def _joined_machine(config: Config) -> Machine | None:
    try:
        return load_membership(config.state_dir).machine
    except (NotJoined, BadMembership):
        return None


@main.command("run")
@common_options
def run_command(config: Config) -> None:
    """Run the agent until it is told to stop; what is bound stays bound."""
    configure_logging(config.log_level, json=None if config.log_format == "auto" else config.log_format == "json")
    code = trio.run(run_agent, config, os.environ, sys.stdin, instruments=[SlowSteps()])
    sys.exit(code)


@main.command("status")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@common_options
def status_command(config: Config, as_json: bool) -> None:  # noqa: FBT001  a flag, as click gives it
    """Show how the agent is: session, spec, reservations, conditions. Exit code 1 if it does not run."""
    running = is_in_use(config.state_dir / JOURNAL_FILE)
    snapshot = read_snapshot(config.state_dir / STATUS_FILE)
    if snapshot is None:
        membership = _load_joined(config)
        message = f"{membership.node_id} has joined {membership.server}, and the agent has not run yet"
        raise CommandFailed(ExitCode.FAILED, message, f"start it: {_how_to_run(config)}")
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(snapshot), indent=2).decode())
    else:
        click.echo(format_snapshot(snapshot, running=running))
    if not running:
        sys.exit(ExitCode.FAILED)


@main.command("doctor")
@common_options
def doctor_command(config: Config) -> None:
    """Look for what would keep this machine from working. Exit code 1 if there is something."""
    configure_logging("ERROR")
    trio.run(_doctor, config)


async def _doctor(config: Config) -> None:
    machine = choose_machine(config, _joined_machine(config))
    async with open_machine(config, machine, config.state_dir, os.environ) as hardware:
        findings = await examine(config.state_dir, hardware, config.cdi_max_version, clock=SystemClock())
    for finding in findings:
        click.echo(f"{LEVEL_MARKS[finding.level]}  {finding.check}: {finding.text}")
        if finding.fix and finding.level != "ok":
            click.echo(f"         fix: {finding.fix}")
    if any(finding.level == "failed" for finding in findings):
        sys.exit(ExitCode.FAILED)


@main.command("leave")
@click.option("--force", is_flag=True, help="Leave although reservations are bound here.")
@common_options
def leave_command(config: Config, force: bool) -> None:  # noqa: FBT001  a flag, as click gives it
    """Take away every assignment and forget the node's key. The control plane must be told: see the last line."""
    configure_logging("WARNING")
    trio.run(partial(_leave, config, force=force))


async def _leave(config: Config, *, force: bool) -> None:
    if is_in_use(config.state_dir / JOURNAL_FILE):
        raise CommandFailed(
            ExitCode.FAILED, f"an agent runs on {config.state_dir}", "stop it first: systemctl stop bcd"
        )
    membership = _load_joined(config)
    shut_out = is_shut_out(find_refusal(config.state_dir, membership))
    machine = choose_machine(config, membership.machine)
    async with open_machine(config, machine, config.state_dir, os.environ) as hardware:
        bound = await hardware.assignments.list_bound()
        if bound and not force:
            names = ", ".join(entry.reservation_id for entry in bound)
            hint = f"drain it first (bcctl nodes drain {membership.node_id}), or give --force"
            if shut_out:
                hint = "it was revoked or decommissioned, and nothing can be drained from it: bcd leave --force"
            raise CommandFailed(ExitCode.FAILED, f"{len(bound)} reservations are bound here: {names}", hint)
        released = await forget_node(config.state_dir, hardware.assignments)
    click.echo(f"left {membership.server}: {len(released)} assignments taken away, key and journal removed")
    click.echo("running containers keep their GPUs until they end")
    known = "unless it has been decommissioned, " if shut_out else ""
    click.echo(f"{known}the control plane still knows the node; tell it: bcctl nodes decommission {membership.node_id}")
