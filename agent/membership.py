"""What a machine has once it has joined: its name, its key, whom it trusts, where its gateways are.

Two files of the state directory, which is readable by its owner alone. ``identity.pem`` is the key
with its certificate, replaced in one step by a renewal; ``membership.json`` is the rest of the
answer and the pinned trust bundle. Each is whole on its own and either may be the newer one after a
crash: the identity is written last by a join, so a machine has joined exactly if both are there.

`Standing` is the membership as the running agent has it. A renewal replaces it, and whoever works
with the old one (a session) is told.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import trio

from agent.config import DriverName
from agent.drivers.fake import Variant
from agent.endpoints import BadEndpoint, parse_endpoint
from shared.files import UnsafeFile, make_private_directory, read_private, sync_directory, write_atomic
from shared.identity import IdentityError, load_identity, save_identity
from shared.joining import open_bundle
from shared.signing import BadKey, IntentKeySet, Verifier

if TYPE_CHECKING:
    from pathlib import Path

    from agent.endpoints import Endpoint
    from shared.clocks import Clock
    from shared.identity import NodeIdentity
    from shared.joining import PinnedBundle, VerifiedAnswer
    from shared.signing import NodeSigner

IDENTITY_FILE = "identity.pem"
MEMBERSHIP_FILE = "membership.json"


class NotJoined(Exception):
    """This machine has not joined, or has left."""


class BadMembership(Exception):
    """The state directory cannot be used; the message says which file, and what to do."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Which driver a machine joined with, so that ``bcd run`` needs no flag.

    For a simulated one, `name` and `seed` are what its GPUs are made of, and `variant` which.
    """

    driver: DriverName = "auto"
    variant: Variant | None = None
    name: str = ""
    seed: str = ""
    cdi_dir: str = ""


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    """The file. `bundle` are the pinned bytes; `server` is the URL that the operator gave."""

    v: Literal[1] = 1
    server: str
    pin: str
    bundle: bytes
    gateways: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    intent_keys: IntentKeySet
    joined_at: Annotated[datetime, msgspec.Meta(tz=True)]
    machine: Machine


@dataclass(frozen=True, slots=True)
class Membership:
    """A machine's place in a fleet."""

    server: str
    bundle: PinnedBundle
    identity: NodeIdentity
    gateways: tuple[Endpoint, ...]
    intent_keys: IntentKeySet
    joined_at: datetime
    machine: Machine

    @property
    def node_id(self) -> str:
        return self.identity.name.node_id


def load_membership(state_dir: Path) -> Membership:
    """Return what a join left.

    Raises:
        NotJoined: there is nothing, or a join that never got its answer.
        BadMembership: a file is damaged, too open, or not readable.
    """
    try:
        data = read_private(state_dir / MEMBERSHIP_FILE)
        identity = load_identity(state_dir / IDENTITY_FILE)
        record = msgspec.json.decode(data, type=_Record)
        return Membership(
            server=record.server,
            bundle=open_bundle(record.bundle, record.pin),
            identity=_checked(identity),
            gateways=tuple(parse_endpoint(url) for url in record.gateways),
            intent_keys=record.intent_keys,
            joined_at=record.joined_at,
            machine=record.machine,
        )
    except FileNotFoundError as exc:
        raise NotJoined(str(state_dir)) from exc
    except UnsafeFile as exc:
        raise BadMembership(str(exc)) from exc
    except OSError as exc:
        raise BadMembership(f"{exc.filename}: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, IdentityError, BadEndpoint) as exc:
        raise BadMembership(f"{state_dir} is damaged ({exc}); join again with `bcd join --force`") from exc


def _checked(identity: NodeIdentity) -> NodeIdentity:
    """Read the name once, so that every later look at it succeeds."""
    assert identity.name.node_id
    return identity


def save_membership(state_dir: Path, membership: Membership) -> None:
    """Write both files. Raises UnsafeFile, OSError."""
    make_private_directory(state_dir)
    record = _Record(
        server=membership.server,
        pin=membership.bundle.pin,
        bundle=membership.bundle.data,
        gateways=[str(endpoint) for endpoint in membership.gateways],
        intent_keys=membership.intent_keys,
        joined_at=membership.joined_at,
        machine=membership.machine,
    )
    write_atomic(state_dir / MEMBERSHIP_FILE, msgspec.json.format(msgspec.json.encode(record), indent=2))
    save_identity(state_dir / IDENTITY_FILE, membership.identity)


def forget_membership(state_dir: Path) -> None:
    """Remove both files, the key first. Raises OSError."""
    for name in (IDENTITY_FILE, MEMBERSHIP_FILE):
        (state_dir / name).unlink(missing_ok=True)
    sync_directory(state_dir)


def read_gateways(answer: VerifiedAnswer) -> tuple[Endpoint, ...]:
    """Return where an answer says that the gateways are. Raises BadEndpoint."""
    return tuple(parse_endpoint(url) for url in answer.answer.gateways)


class Standing:
    """The membership of the running agent, which a renewal replaces."""

    def __init__(self, membership: Membership, clock: Clock) -> None:
        self.membership = membership
        self.signer: NodeSigner = membership.identity.signer()
        self._clock = clock
        self._replaced = trio.Event()

    @property
    def node_id(self) -> str:
        return self.membership.node_id

    def intent_verifier(self) -> Verifier:
        """Return a verifier of specs and commands, with the keys that are accepted now."""
        try:
            return self.membership.intent_keys.verifier(self._clock.now())
        except BadKey:
            # checked by whoever stored them; a damaged file is a node that obeys nobody
            return Verifier({})

    def replace(self, membership: Membership) -> None:
        """Go on with another certificate."""
        assert membership.node_id == self.node_id
        self.membership = membership
        self.signer = membership.identity.signer()
        self._replaced.set()
        self._replaced = trio.Event()

    async def wait_replaced(self) -> None:
        """Wait for the next replacement."""
        await self._replaced.wait()
