"""``bcd doctor``: looks for what would keep this machine from working, and says how to mend each thing.

Every check is on its own and never raises; what it could not look at is a finding too. Nothing is
changed, and it works with the agent running or not.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import trio

from agent.connect import ConnectFailed, open_tls
from agent.drivers.base import BindFailed, ProbeFailed
from agent.drivers.cdi_sources import load_spec
from agent.drivers.cdi_spec import VERSIONS, CdiError
from agent.endpoints import dial_tcp
from agent.health import SESSION_REFUSED, list_machine_conditions
from agent.journal import JOURNAL_FILE, is_in_use
from agent.membership import BadMembership, NotJoined, load_membership
from agent.snapshot import STATUS_FILE, read_snapshot
from agent.unary import NoAnswer, request
from shared.files import UnsafeFile, check_private_directory
from shared.identity import renewal_due_at
from shared.joining import BUNDLE_PATH, pin
from shared.tls import client_context

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from agent.endpoints import Dial, Endpoint
    from agent.machine import Hardware
    from agent.membership import Membership
    from shared.clocks import Clock

Level = Literal["ok", "warning", "failed"]

GATEWAY_S = 10.0
PROBE_S = 130.0  # a driver that initialises eight GPUs without the persistence daemon
ENGINE_S = 5.0

# The newest CDI version that an engine reads, by its own version; an engine before the first has no CDI.
ENGINES: Mapping[str, tuple[tuple[tuple[int, int], str], ...]] = {
    "podman": (((4, 1), "0.5.0"), ((5, 0), "0.8.0")),
    "docker": (((25, 0), "0.6.0"), ((26, 0), "0.7.0")),
}
_VERSION = re.compile(r"version (\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; `fix` says what to do about it, and is empty where there is nothing to do."""

    check: str
    level: Level
    text: str
    fix: str = ""


async def examine(
    state_dir: Path, hardware: Hardware, cdi_max_version: str, *, clock: Clock, dial: Dial = dial_tcp
) -> list[Finding]:
    """Run every check, in the order in which things depend on one another."""
    findings = check_state_dir(state_dir)
    membership: Membership | None = None
    try:
        membership = load_membership(state_dir)
    except NotJoined:
        fix = "run `bcd join` with the line that `bcctl join-tokens create` prints"
        findings.append(Finding("identity", "failed", "this machine has not joined", fix))
    except BadMembership as exc:
        findings.append(Finding("identity", "failed", str(exc), "join again with `bcd join --force`"))
    if membership is not None:
        findings += check_membership(membership, clock)
        findings += check_session(membership.node_id, find_refusal(state_dir, membership))
        for endpoint in membership.gateways:
            findings.append(await check_gateway(endpoint, membership, dial))
    findings += check_cdi_directory(hardware.cdi_dir)
    findings += check_cdi_names([Path("/etc/cdi"), hardware.cdi_dir])
    findings.append(await check_assignments(hardware))
    findings += [await check_engine(name, cdi_max_version) for name in ENGINES]
    return [*findings, *await check_machine(hardware)]


def check_state_dir(state_dir: Path) -> list[Finding]:
    try:
        check_private_directory(state_dir)
        running = is_in_use(state_dir / JOURNAL_FILE)
    except UnsafeFile as exc:
        return [Finding("state", "failed", f"{exc.path} {exc.problem}", exc.fix)]
    except FileNotFoundError:
        return [Finding("state", "warning", f"{state_dir} is not there yet", "`bcd join` makes it")]
    except OSError as exc:
        return [Finding("state", "failed", f"{state_dir}: {exc.strerror}", "run this as the agent's user (root)")]
    if running:
        return [Finding("state", "ok", f"{state_dir}"), Finding("agent", "ok", "it runs")]
    return [
        Finding("state", "ok", f"{state_dir}"),
        Finding("agent", "warning", "it does not run", "systemctl enable --now bcd"),
    ]


def check_membership(membership: Membership, clock: Clock) -> list[Finding]:
    certificate = membership.identity.certificate
    begin, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, clock.now()
    findings = [Finding("identity", "ok", f"{membership.node_id} of {membership.server}")]
    if now < begin:
        text = f"it says {now:%Y-%m-%d %H:%M} UTC, and the certificate begins {begin:%Y-%m-%d %H:%M}"
        return [*findings, Finding("clock", "failed", text, "set the clock: timedatectl set-ntp true")]
    if now >= end:
        fix = "start bcd, which renews it; if the clock is ahead, set it: timedatectl set-ntp true"
        return [*findings, Finding("certificate", "failed", f"it ended {end:%Y-%m-%d %H:%M} UTC", fix)]
    if now >= renewal_due_at(certificate):
        text = f"it ends {end:%Y-%m-%d %H:%M} UTC and its renewal is due"
        return [*findings, Finding("certificate", "warning", text, "see `bcd status` for why it was not renewed")]
    return [*findings, Finding("certificate", "ok", f"until {end:%Y-%m-%d %H:%M} UTC")]


def find_refusal(state_dir: Path, membership: Membership) -> str:
    """What the gateway said to the agent when it last refused it a session, as ``CODE: text``; empty if it has not.

    The agent writes that down. `check_gateway` cannot learn it: it is said to the node's certificate alone.
    """
    last = read_snapshot(state_dir / STATUS_FILE)
    if last is None or last.node_id != membership.node_id or last.written_at < membership.joined_at:
        return ""
    return next((condition.text for condition in last.conditions if condition.name == SESSION_REFUSED), "")


def is_shut_out(refusal: str) -> bool:
    """Whether the node is refused because its certificates were ended: it was revoked, or decommissioned."""
    return refusal.startswith("REVOKED:")


def check_session(node_id: str, refusal: str) -> list[Finding]:
    if not refusal:
        return []
    fix = "see the gateway's log"
    if is_shut_out(refusal):
        fix = (
            f"ask why: bcctl nodes get {node_id}; to be let in again: `bcd join --force` with a token of"
            f" bcctl join-tokens create --expect {node_id}; if it was decommissioned: bcd leave --force"
        )
    return [Finding("session", "failed", f"the gateway refused it: {refusal}", fix)]


async def check_gateway(endpoint: Endpoint, membership: Membership, dial: Dial) -> Finding:
    name = f"gateway {endpoint.authority}"
    context = client_context(membership.bundle.bundle.serving_ca)
    try:
        with trio.fail_after(GATEWAY_S):
            stream = await open_tls(endpoint, context, dial)
            answer = await request(stream, endpoint, "GET", BUNDLE_PATH)
    except trio.TooSlowError:
        return Finding(name, "failed", f"no answer within {GATEWAY_S:g} s", "check routes and firewalls to it")
    except ConnectFailed as exc:
        fix = (
            "its certificate is not the pinned CA's: who answers there?" if exc.untrusted else "is it up? check routes"
        )
        return Finding(name, "failed", exc.detail, fix)
    except NoAnswer as exc:
        return Finding(name, "failed", str(exc), "look at the gateway's log")
    if answer.status != 200 or pin(answer.body) != membership.bundle.pin:
        return Finding(name, "warning", "it serves another trust bundle than the pinned one", "ask the operator")
    return Finding(name, "ok", "reachable, and the pin is right")


def check_cdi_directory(directory: Path) -> list[Finding]:
    findings: list[Finding] = []
    if directory.is_relative_to("/var/run") and Path("/var/run").resolve() != Path("/run").resolve():
        text = "/var/run is not /run on this machine, and engines may look in either"
        findings.append(Finding("cdi directory", "warning", text, "ln -s /run /var/run, or set cdi.dir"))
    nearest = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    if not os.access(nearest, os.W_OK | os.X_OK):
        fix = f"run bcd as root, install packaging/systemd/bcd.tmpfiles.conf, or give --cdi-dir (now {directory})"
        return [*findings, Finding("cdi directory", "failed", f"{nearest} is not writable", fix)]
    return [*findings, Finding("cdi directory", "ok", str(directory))]


def check_cdi_names(directories: Sequence[Path]) -> list[Finding]:
    """Two files of one directory that define one name make it unusable, with no word from the engine."""
    findings: list[Finding] = []
    for directory in dict.fromkeys(directories):
        owners: dict[str, list[str]] = {}
        for path in sorted(directory.glob("*")):
            if path.suffix not in (".json", ".yaml"):
                continue
            try:
                spec = load_spec(path)
            except CdiError as exc:
                findings.append(Finding("cdi files", "warning", f"no engine loads {path}: {exc}", "remove or mend it"))
                continue
            for device in spec.devices or ():
                owners.setdefault(f"{spec.kind}={device.name}", []).append(path.name)
        for name, files in owners.items():
            if len(files) > 1:
                text = f"{name} is defined by {' and '.join(files)} in {directory}, so engines know neither"
                findings.append(Finding("cdi files", "failed", text, f"remove one of them from {directory}"))
    return findings or [Finding("cdi files", "ok", "no name is defined twice")]


async def check_assignments(hardware: Hardware) -> Finding:
    try:
        bound = await hardware.assignments.list_bound()
    except BindFailed as exc:
        return Finding("assignments", "failed", exc.detail, "check the CDI directory")
    broken = [entry.reservation_id for entry in bound if not entry.intact]
    if broken:
        return Finding("assignments", "failed", f"damaged: {', '.join(broken)}", "restart bcd, which writes them anew")
    return Finding("assignments", "ok", f"{len(bound)} bound")


async def check_engine(name: str, cdi_max_version: str) -> Finding:
    """Whether this container engine, if it is installed, reads what we write."""
    program = shutil.which(name)
    if program is None:
        return Finding(name, "ok", "not installed")
    output = ""
    with trio.move_on_after(ENGINE_S):
        done = await trio.run_process(
            [program, "--version"], capture_stdout=True, stderr=subprocess.DEVNULL, check=False
        )
        output = done.stdout.decode(errors="replace").strip()
    return judge_engine(name, output, cdi_max_version)


def judge_engine(name: str, output: str, cdi_max_version: str) -> Finding:
    """Judge by what the engine prints for ``--version``."""
    match = _VERSION.search(output)
    if match is None:
        return Finding(name, "warning", f"its version is not understood: {output!r}")
    found = (int(match[1]), int(match[2]))
    text = f"{found[0]}.{found[1]}"
    readable = [newest for first, newest in ENGINES[name] if found >= first]
    if not readable:
        return Finding(name, "warning", f"{text} knows no CDI", f"install {name} {ENGINES[name][0][0][0]} or newer")
    if VERSIONS.index(cdi_max_version) > VERSIONS.index(readable[-1]):
        text = f"{text} reads CDI up to {readable[-1]}, and bcd may write {cdi_max_version}"
        return Finding(name, "failed", text, f'set cdi.max_version = "{readable[-1]}" in /etc/bcd/bcd.toml')
    return Finding(name, "ok", f"{text} reads CDI up to {readable[-1]}")


async def check_machine(hardware: Hardware) -> list[Finding]:
    try:
        with trio.fail_after(PROBE_S):
            inventory = await hardware.devices.probe()
    except (ProbeFailed, trio.TooSlowError) as exc:
        return [Finding("machine", "failed", str(exc) or f"no answer within {PROBE_S:g} s", "see the kernel's log")]
    conditions = list_machine_conditions(inventory)
    if not conditions:
        return [Finding("machine", "ok", f"driver {inventory.driver.state}, {len(inventory.gpus)} GPUs")]
    levels: dict[str, Level] = {"critical": "failed", "warning": "warning", "info": "ok"}
    return [
        Finding(
            f"machine {condition.subject}".rstrip(), levels[condition.severity], f"{condition.name}: {condition.text}"
        )
        for condition in conditions
    ]
