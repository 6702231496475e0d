"""Joins a machine to a fleet: the agent's half of `shared.joining`.

The trust bundle is fetched from a server that nobody has vouched for yet. Only when its SHA-256 is the
pin that the operator pasted is there a key to seal the token to, and only a server whose TLS certificate
is of the bundle's CA is sent anything more. So whoever stands between sees no secret.

A join may be repeated: key and request are on disk before they are sent, and the control plane answers
the same key and token again for a while. An answer that was lost is therefore simply asked for again, by
this run or by the next. The error of a join has the exit code and says what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import structlog
import trio

from agent.connect import ConnectFailed, open_tls, stranger_context
from agent.endpoints import BadEndpoint, dial_tcp
from agent.exits import CommandFailed, ExitCode
from agent.journal import JOURNAL_FILE, is_in_use
from agent.membership import (
    BadMembership,
    Membership,
    NotJoined,
    forget_membership,
    load_membership,
    read_gateways,
    save_membership,
)
from agent.pending import forget_request, load_or_make_request
from agent.snapshot import STATUS_FILE
from agent.unary import Answer, NoAnswer, request
from shared.backoff import full_jitter
from shared.files import UnsafeFile
from shared.identity import IdentityError, NodeIdentity
from shared.joining import (
    BUNDLE_PATH,
    JOIN_PATH,
    BadAnswer,
    BadBody,
    BadPin,
    HostFacts,
    PinMismatch,
    make_join_request,
    open_bundle,
    verify_answer,
)
from shared.tls import client_context

if TYPE_CHECKING:
    import ssl
    from pathlib import Path
    from random import Random

    from agent.drivers.base import AssignmentDriver
    from agent.endpoints import Dial, Endpoint
    from agent.membership import Machine
    from shared.clocks import Clock
    from shared.inventory import Inventory
    from shared.joining import JoinToken, PinnedBundle

_log = structlog.get_logger()

PENDING_FILE: Final = "join.pem"
REQUEST_S: Final = 60.0
"""One attempt; a gateway that a whole fleet joins through takes its time."""
ATTEMPTS: Final = 5
RETRY_FIRST_S: Final = 1.0
RETRY_CAP_S: Final = 10.0
# As `shared.joining.HostFacts` has it; a gateway refuses others as it refuses everything, without a word.
_NAME: Final = re.compile(r"[!-~]{0,253}\Z")


@dataclass(frozen=True, slots=True)
class Joining:
    """What is asked for: whom to join, with what, as what."""

    server: Endpoint
    token: JoinToken
    host: HostFacts
    machine: Machine


def describe_host(inventory: Inventory, *, name: str, agent_version: str) -> HostFacts:
    """Return what the machine says of itself when it joins; `name` replaces the host's, if given.

    Raises:
        CommandFailed: no fleet takes such a name.
    """
    hostname = name or inventory.host.hostname
    if not _NAME.match(hostname):
        raise CommandFailed(
            ExitCode.USAGE,
            f"{hostname!r} cannot be a node's name",
            "give one with --name: up to 253 ASCII letters, digits and signs, without spaces",
        )
    return HostFacts(
        agent_version=agent_version,
        hostname=hostname,
        machine_id=inventory.host.machine_id,
        boot_id=inventory.host.boot_id,
        gpu_uuids=[gpu.uuid for gpu in inventory.gpus],
    )


def compare_with_membership(state_dir: Path, pin: str) -> tuple[Literal["new", "same", "other"], Membership | None]:
    """Return whether the machine has joined, and if so the fleet with this pin or another one.

    Raises:
        CommandFailed: the state directory cannot be used.
    """
    try:
        membership = load_membership(state_dir)
    except NotJoined:
        return "new", None
    except BadMembership as exc:
        raise CommandFailed(
            ExitCode.FAILED, str(exc), "repair the state directory, or join again with --force"
        ) from exc
    return ("same" if membership.bundle.pin == pin.strip().lower() else "other"), membership


async def fetch_bundle(server: Endpoint, pin: str, dial: Dial = dial_tcp) -> PinnedBundle:
    """Return the server's trust bundle if it has the pin. Raises CommandFailed."""
    try:
        with trio.fail_after(REQUEST_S):
            stream = await open_tls(server, stranger_context(), dial)
            answer = await request(stream, server, "GET", BUNDLE_PATH)
    except (ConnectFailed, NoAnswer, trio.TooSlowError) as exc:
        raise _unreachable(server, str(exc) or f"no answer within {REQUEST_S:g} s") from exc
    if answer.status != 200:
        raise _unreachable(server, f"HTTP status {answer.status} for the trust bundle: is this a gateway?")
    try:
        return open_bundle(answer.body, pin)
    except PinMismatch as exc:
        raise CommandFailed(
            ExitCode.PIN_MISMATCH,
            f"{server}: {exc}; nothing secret was sent",
            "compare the pin with `bcctl join-tokens create`; if it is right, somebody else answers at this address",
        ) from exc
    except BadPin as exc:
        raise CommandFailed(
            ExitCode.USAGE, f"--pin: {exc}", "copy it from the output of `bcctl join-tokens create`"
        ) from exc
    except BadBody as exc:
        hint = "this agent and the control plane are of different versions; update bcd"
        raise CommandFailed(ExitCode.FAILED, f"{server}: {exc}", hint) from exc


async def join(
    joining: Joining, bundle: PinnedBundle, state_dir: Path, *, clock: Clock, rng: Random, dial: Dial = dial_tcp
) -> Membership:
    """Ask to join until there is an answer, and return what it grants; `store` then keeps it.

    Raises:
        CommandFailed: refused, or no answer after `ATTEMPTS`.
    """
    try:
        key, csr = load_or_make_request(state_dir / PENDING_FILE)
    except (OSError, UnsafeFile, IdentityError) as exc:
        raise CommandFailed(ExitCode.FAILED, str(exc), "give a directory of your own with --state-dir") from exc
    body = make_join_request(joining.token, csr, bundle, joining.host)
    answer = await _ask_until_answered(joining.server, bundle, body, rng, dial)
    if answer.status == 403:
        raise CommandFailed(
            ExitCode.TOKEN_REFUSED,
            f"{joining.server} refused token {joining.token.token_id}",
            "it is expired, used, revoked or for another machine, or this machine's name or GPUs are taken; "
            "the audit log says which: bcctl audit list",
        )
    if answer.status != 200:
        raise CommandFailed(
            ExitCode.FAILED, f"{joining.server} answered with HTTP status {answer.status}", "update bcd to its version"
        )
    try:
        verified = verify_answer(answer.body, bundle, csr)
        gateways = read_gateways(verified)
    except (BadAnswer, BadEndpoint) as exc:
        raise CommandFailed(
            ExitCode.PIN_MISMATCH,
            f"{joining.server}: {exc}",
            "the answer is not the pinned control plane's; somebody else answers at this address",
        ) from exc
    return Membership(
        server=str(joining.server),
        bundle=bundle,
        identity=NodeIdentity(key, verified.chain),
        gateways=gateways,
        intent_keys=verified.answer.intent_keys,
        joined_at=clock.now(),
        machine=joining.machine,
    )


async def _ask_until_answered(server: Endpoint, bundle: PinnedBundle, body: bytes, rng: Random, dial: Dial) -> Answer:
    context = client_context(bundle.bundle.serving_ca)
    detail = ""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with trio.fail_after(REQUEST_S):
                answer = await _post_join(server, context, body, dial)
            if answer.status < 500:
                return answer
            detail = f"HTTP status {answer.status}"
        except ConnectFailed as exc:
            if exc.untrusted:
                raise CommandFailed(
                    ExitCode.PIN_MISMATCH,
                    f"{server} shows the pinned trust bundle and another TLS certificate ({exc.detail})",
                    "use the address that is in the gateway's certificate, or find out who answers at this one",
                ) from exc
            detail = exc.detail
        except (NoAnswer, trio.TooSlowError) as exc:
            # It may have been granted: the same request is answered again.
            detail = str(exc) or f"no answer within {REQUEST_S:g} s"
        _log.info("join.no_answer", server=str(server), attempt=attempt, reason=detail)
        if attempt < ATTEMPTS:
            await trio.sleep(full_jitter(RETRY_FIRST_S, RETRY_CAP_S, attempt, rng))
    raise _unreachable(server, detail)


async def _post_join(server: Endpoint, context: ssl.SSLContext, body: bytes, dial: Dial) -> Answer:
    stream = await open_tls(server, context, dial)
    return await request(stream, server, "POST", JOIN_PATH, body)


def _unreachable(server: Endpoint, detail: str) -> CommandFailed:
    return CommandFailed(
        ExitCode.UNREACHABLE,
        f"{server} cannot be reached: {detail}",
        "check the address and that this machine may connect to it, then run the same command again: "
        "the token is still good",
    )


async def store(membership: Membership, state_dir: Path, assignments: AssignmentDriver) -> None:
    """Keep what was granted. A machine that was another node before forgets that one first.

    Raises:
        CommandFailed: an agent runs on this state directory, or it cannot be written.
        BindFailed: an old assignment could not be taken away.
    """
    if is_in_use(state_dir / JOURNAL_FILE):
        raise CommandFailed(
            ExitCode.FAILED, f"an agent runs on {state_dir}", "stop it first (systemctl stop bcd), then join again"
        )
    try:
        before = load_membership(state_dir)
    except (NotJoined, BadMembership):
        before = None
    try:
        if before is not None and before.node_id != membership.node_id:
            await forget_node(state_dir, assignments)
        save_membership(state_dir, membership)
        forget_request(state_dir / PENDING_FILE)
    except (OSError, UnsafeFile) as exc:
        raise CommandFailed(ExitCode.FAILED, str(exc), "make room or repair the directory, and run it again") from exc


async def forget_node(state_dir: Path, assignments: AssignmentDriver) -> list[str]:
    """Take away every assignment, and forget who this node was; return the reservations that were bound.

    Raises:
        BindFailed: an assignment is still there, and so is everything else.
        OSError: a file could not be removed.
    """
    bound = [entry.reservation_id for entry in await assignments.list_bound()]
    for reservation_id in bound:
        await assignments.unbind(reservation_id)
    for name in (JOURNAL_FILE, f"{JOURNAL_FILE}-wal", f"{JOURNAL_FILE}-shm", STATUS_FILE):
        (state_dir / name).unlink(missing_ok=True)
    forget_membership(state_dir)
    return bound
