"""The directory that holds the control plane's private keys, and who may read which part of it.

    keys_dir/            0700, files 0600; anything wider is refused
      keys.json          trust domain, and whether creation has finished
      ca/                node-ca.pem serving-ca.pem service-ca.pem      the api
      api/               sealing.pem join-signing.pem join-server.pem
                         service-ca.crt trust-bundle.json               the api
      signing/           intent.json                                    the api and the workers
      gateway/           serving.pem service-client.pem node-ca.crt
                         service-ca.crt trust-bundle.json               a gateway

A process reads its own part: `load_or_create_keys` (api, and everything-in-one), `load_intent_keys`
(worker), `load_gateway_keys` (gateway; the part may be copied to another machine, and nothing in
it can issue a certificate or sign intent).

CAs, sealing key, join-signing key and intent keys are *permanent*: they are made once, and once
`keys.json` says so a missing one is an error, because a silently new one would lock every node
out. The others are derived from them and made anew whenever settings or dates ask for it.

Every file is replaced atomically and a key shares its file with its certificate, so a crash
leaves pairs that fit. Creation holds a file lock: two processes that start at once end
with the same keys. All functions block.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from controlplane.db.key_records import KeyRecord
from controlplane.fleet.pki import (
    Authority,
    Leaf,
    covers_hosts,
    issue_service_certificate,
    make_authority,
)
from shared.files import check_private_directory, make_private_directory, read_private, write_atomic
from shared.identity import (
    IdentityError,
    ServiceName,
    certificate_key,
    certificate_key_id,
    certificate_name,
    check_trust_domain,
    decode_private_key,
    encode_chain,
    encode_private_key,
    load_chain,
    make_key,
    renewal_due_at,
)
from shared.joining import TrustBundle, pin
from shared.signing import (
    INTENT_KEYS_MAX,
    IntentKey,
    IntentKeySet,
    IntentSigner,
    JoinSigner,
    encode_public_key,
    key_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec

    from controlplane.db.key_records import Purpose
    from controlplane.fleet.pki import Usage
    from shared.clocks import Clock
    from shared.signing import PublicKey

MARKER = "keys.json"
NODE_CA = "ca/node-ca.pem"
SERVING_CA = "ca/serving-ca.pem"
SERVICE_CA = "ca/service-ca.pem"
SEALING_KEY = "api/sealing.pem"
JOIN_KEY = "api/join-signing.pem"
INTENT_KEYS = "signing/intent.json"
PERMANENT = (NODE_CA, SERVING_CA, SERVICE_CA, SEALING_KEY, JOIN_KEY, INTENT_KEYS)
PARTS = ("ca", "api", "signing", "gateway")

OTHER_KEYS_FIX = "correct keys_dir, or restore the keys directory that the servers have joined with"

S = TypeVar("S")


class KeysError(Exception):
    """The keys directory cannot be used as it is; the message names the path and what to do."""

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        super().__init__(f"{path} {problem}; {fix}")
        self.path = path
        self.problem = problem
        self.fix = fix


@dataclass(frozen=True, slots=True)
class KeySettings:
    """What certificates and bundle say. Raises ValueError, BadSpiffeId for settings that cannot be.

    `url` is the https address that operators give to `bcd join`. `gateway_hosts` are the DNS names
    and addresses of all gateways that share these keys, `api_hosts` those of the join URL.
    """

    trust_domain: str
    url: str
    gateway_hosts: tuple[str, ...]
    api_hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        check_trust_domain(self.trust_domain)
        if not self.url.startswith("https://"):
            raise ValueError(f"the gateway URL {self.url!r} does not start with https://")
        if not self.gateway_hosts or not self.api_hosts:
            raise ValueError("gateway and api need at least one host name or address each")


@dataclass(frozen=True, slots=True)
class IntentKeyring:
    """The key that signs specs and commands now, and all keys that agents should accept."""

    signer: IntentSigner
    key_set: IntentKeySet


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """What a gateway process has. The paths are PEM files for `ssl`; `bundle` is served as it is."""

    serving: Path
    service_client: Path
    node_ca: Path
    node_ca_key_id: str
    service_ca: Path
    bundle: bytes


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """What JoinService and the signing of intent need. `join_server` and `service_ca` are PEM files for `ssl`.

    `records` are the public halves of all permanent keys, for the database.
    """

    node_ca: Authority
    sealing_key: ec.EllipticCurvePrivateKey
    join_signer: JoinSigner
    intent: IntentKeyring
    join_server: Path
    service_ca: Path
    bundle: bytes
    records: tuple[KeyRecord, ...]

    @property
    def pin(self) -> str:
        """The pin that `bcctl join-tokens create` prints."""
        return pin(self.bundle)


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    v: Literal[1] = 1
    trust_domain: str
    created_at: datetime
    complete: bool


class _StoredIntentKey(msgspec.Struct, frozen=True, kw_only=True):
    private_key: str
    created_at: Annotated[datetime, msgspec.Meta(tz=True)]
    accepted_until: Annotated[datetime, msgspec.Meta(tz=True)] | None


class _StoredIntentKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Oldest first; the last one signs."""

    v: Literal[1] = 1
    sequence: int
    keys: Annotated[list[_StoredIntentKey], msgspec.Meta(min_length=1, max_length=INTENT_KEYS_MAX)]


# --- load or create --------------------------------------------------------------------------


def load_or_create_keys(keys_dir: Path, settings: KeySettings, clock: Clock, *, may_create: bool = True) -> ApiKeys:
    """Return the api's keys, after making whatever is missing or out of date in any part.

    Waits for another process that is doing the same. Where not `may_create`, a directory without keys
    is an error and left alone. Raises KeysError, UnsafeFile, AuthorityExpired, ValueError for a host that is none.
    """
    with _usable(keys_dir):
        if not may_create and not any((keys_dir / name).exists() for name in (MARKER, *PERMANENT)):
            raise KeysError(keys_dir, "holds no keys, and this database has been served with some", OTHER_KEYS_FIX)
        make_private_directory(keys_dir)
        with _locked(keys_dir):
            now = clock.now()
            for part in PARTS:
                make_private_directory(keys_dir / part)
            _ensure_permanent(keys_dir, settings, now)
            _ensure_derived(keys_dir, settings, now)
            return _load_api_keys(keys_dir)


def load_intent_keys(directory: Path) -> IntentKeyring:
    """Return what signs intent, from the ``signing`` part. Raises KeysError, UnsafeFile."""
    with _usable(directory):
        check_private_directory(directory)
        return _keyring(_load_stored_intent(directory / "intent.json"))


def load_gateway_keys(directory: Path) -> GatewayKeys:
    """Return a gateway's keys from the ``gateway`` part, wherever it lies, and read nothing else.

    Raises KeysError, UnsafeFile.
    """
    with _usable(directory):
        check_private_directory(directory)
        node_ca = directory / "node-ca.crt"
        keys = GatewayKeys(
            serving=directory / "serving.pem",
            service_client=directory / "service-client.pem",
            node_ca=node_ca,
            node_ca_key_id=_parsed(node_ca, lambda data: certificate_key_id(load_chain(data)[0])),
            service_ca=directory / "service-ca.crt",
            bundle=_read(directory / "trust-bundle.json"),
        )
        for path in (keys.serving, keys.service_client):
            _load_pair(path)
        _parsed(keys.service_ca, load_chain)
        return keys


@contextmanager
def _usable(directory: Path) -> Generator[None]:
    """Turn what the file system refuses into an error that says what to do."""
    try:
        yield
    except FileNotFoundError as exc:
        fix = "correct keys_dir, or copy this part from where an api has made it"
        raise KeysError(directory, "is missing", fix) from exc
    except OSError as exc:
        fix = "give the directory to the user that this process runs as, or correct keys_dir"
        raise KeysError(directory, f"cannot be used: {exc.strerror}", fix) from exc


@contextmanager
def _locked(keys_dir: Path) -> Generator[None]:
    descriptor = os.open(keys_dir / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # and with it the lock


# --- permanent keys --------------------------------------------------------------------------


def _ensure_permanent(keys_dir: Path, settings: KeySettings, now: datetime) -> None:
    marker_path = keys_dir / MARKER
    marker = (
        _parsed(marker_path, lambda data: msgspec.json.decode(data, type=_Marker)) if marker_path.exists() else None
    )
    if marker is None:
        _refuse_foreign(keys_dir)
        marker = _Marker(trust_domain=settings.trust_domain, created_at=now, complete=False)
        write_atomic(marker_path, msgspec.json.encode(marker))
    if marker.trust_domain != settings.trust_domain:
        raise KeysError(
            keys_dir,
            f"was made for the trust domain {marker.trust_domain!r}, the configuration says {settings.trust_domain!r}",
            "correct the trust domain, or give another keys_dir",
        )
    missing = [name for name in PERMANENT if not (keys_dir / name).exists()]
    if marker.complete:
        if missing:
            raise KeysError(
                keys_dir / missing[0],
                "is missing, and a new one would lock out every node that has joined",
                "restore it from a backup of the keys directory",
            )
        return
    for name in missing:
        write_atomic(keys_dir / name, _make_permanent(name, settings.trust_domain, now))
    write_atomic(marker_path, msgspec.json.encode(msgspec.structs.replace(marker, complete=True)))


def _refuse_foreign(keys_dir: Path) -> None:
    """Keys without a marker are half a backup, not a new directory."""
    for name in PERMANENT:
        if (keys_dir / name).exists():
            raise KeysError(
                keys_dir / MARKER,
                f"is missing beside {name}",
                "restore the whole keys directory from a backup, or give an empty one",
            )


def _make_permanent(name: str, trust_domain: str, now: datetime) -> bytes:
    match name:
        case "ca/node-ca.pem":
            return make_authority("node CA", trust_domain, now).encode()
        case "ca/serving-ca.pem":
            return make_authority("serving CA", trust_domain, now).encode()
        case "ca/service-ca.pem":
            return make_authority("service CA", trust_domain, now).encode()
        case "api/sealing.pem":
            return encode_private_key(make_key())
        case "api/join-signing.pem":
            return _encode_ed25519(Ed25519PrivateKey.generate())
        case "signing/intent.json":
            return msgspec.json.encode(_StoredIntentKeys(sequence=1, keys=[_make_intent_key(now)]))
        case _:
            raise AssertionError(name)


def _make_intent_key(now: datetime) -> _StoredIntentKey:
    pem = _encode_ed25519(Ed25519PrivateKey.generate()).decode()
    return _StoredIntentKey(private_key=pem, created_at=now, accepted_until=None)


# --- derived files ---------------------------------------------------------------------------


def _ensure_derived(keys_dir: Path, settings: KeySettings, now: datetime) -> None:
    node_ca, serving_ca, service_ca = (_load_authority(keys_dir / name) for name in (NODE_CA, SERVING_CA, SERVICE_CA))
    gateway = ServiceName(settings.trust_domain, "gateway")
    api = ServiceName(settings.trust_domain, "api")
    _ensure_leaf(keys_dir / "gateway/serving.pem", serving_ca, gateway, "server", hosts=settings.gateway_hosts, now=now)
    _ensure_leaf(keys_dir / "gateway/service-client.pem", service_ca, gateway, "client", hosts=(), now=now)
    _ensure_leaf(keys_dir / "api/join-server.pem", service_ca, api, "server", hosts=settings.api_hosts, now=now)
    bundle = TrustBundle(
        trust_domain=settings.trust_domain,
        url=settings.url,
        serving_ca=encode_chain([serving_ca.certificate]).decode(),
        sealing_key=encode_public_key(_load_key(keys_dir / SEALING_KEY).public_key()),
        join_signing_key=encode_public_key(_load_ed25519(keys_dir / JOIN_KEY).public_key()),
    ).encode()
    service_ca_pem = encode_chain([service_ca.certificate])
    for name, data in (
        ("gateway/node-ca.crt", encode_chain([node_ca.certificate])),
        ("gateway/service-ca.crt", service_ca_pem),
        ("api/service-ca.crt", service_ca_pem),
        ("gateway/trust-bundle.json", bundle),
        ("api/trust-bundle.json", bundle),
    ):
        path = keys_dir / name
        if not path.exists() or read_private(path) != data:
            write_atomic(path, data)


def _ensure_leaf(
    path: Path, authority: Authority, name: ServiceName, usage: Usage, *, hosts: Sequence[str], now: datetime
) -> None:
    if path.exists():
        leaf = _load_pair(path)
        if (
            certificate_name(leaf.certificate) == name
            and covers_hosts(leaf.certificate, hosts)
            and now < renewal_due_at(leaf.certificate)
            and _is_issued_by(leaf, authority)
        ):
            return
    write_atomic(path, issue_service_certificate(authority, name, usage, hosts, now).encode())


def _is_issued_by(leaf: Leaf, authority: Authority) -> bool:
    try:
        leaf.certificate.verify_directly_issued_by(authority.certificate)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


# --- reading ---------------------------------------------------------------------------------


def _load_api_keys(keys_dir: Path) -> ApiKeys:
    node_ca, serving_ca, service_ca = (_load_authority(keys_dir / name) for name in (NODE_CA, SERVING_CA, SERVICE_CA))
    sealing_key, join_key = _load_key(keys_dir / SEALING_KEY), _load_ed25519(keys_dir / JOIN_KEY)
    intent = load_intent_keys(keys_dir / "signing")
    return ApiKeys(
        node_ca=node_ca,
        sealing_key=sealing_key,
        join_signer=JoinSigner(join_key),
        intent=intent,
        join_server=keys_dir / "api/join-server.pem",
        service_ca=keys_dir / "api/service-ca.crt",
        bundle=_read(keys_dir / "api/trust-bundle.json"),
        records=(
            _record("node_ca", certificate_key(node_ca.certificate)),
            _record("serving_ca", certificate_key(serving_ca.certificate)),
            _record("service_ca", certificate_key(service_ca.certificate)),
            _record("sealing", sealing_key.public_key()),
            _record("join_signing", join_key.public_key()),
            *(KeyRecord(key.key_id, "intent", key.public_key) for key in intent.key_set.keys),
        ),
    )


def _record(purpose: Purpose, public_key: PublicKey) -> KeyRecord:
    return KeyRecord(key_id(public_key), purpose, encode_public_key(public_key))


def _keyring(stored: _StoredIntentKeys) -> IntentKeyring:
    private_keys = [_decode_ed25519(key.private_key.encode()) for key in stored.keys]
    public = [
        IntentKey(
            key_id=key_id(private_key.public_key()),
            public_key=encode_public_key(private_key.public_key()),
            accepted_until=key.accepted_until,
        )
        for private_key, key in zip(private_keys, stored.keys, strict=True)
    ]
    return IntentKeyring(IntentSigner(private_keys[-1]), IntentKeySet(sequence=stored.sequence, keys=public))


def _load_stored_intent(path: Path) -> _StoredIntentKeys:
    return _parsed(path, lambda data: msgspec.json.decode(data, type=_StoredIntentKeys))


def _load_authority(path: Path) -> Authority:
    pair = _load_pair(path)
    return Authority(pair.key, pair.certificate)


def _load_pair(path: Path) -> Leaf:
    leaf = _parsed(path, lambda data: Leaf(decode_private_key(data), load_chain(data)[0]))
    if leaf.certificate.public_key() != leaf.key.public_key():
        raise KeysError(path, "holds a key and a certificate that do not belong together", "restore it from a backup")
    return leaf


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey:
    return _parsed(path, decode_private_key)


def _load_ed25519(path: Path) -> Ed25519PrivateKey:
    return _parsed(path, _decode_ed25519)


def _encode_ed25519(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _decode_ed25519(pem: bytes) -> Ed25519PrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("the private key is not Ed25519")  # noqa: TRY004  the content is wrong, not the call
    return key


def _parsed(path: Path, parse: Callable[[bytes], S]) -> S:
    """Read a private file and parse it, turning what parsers raise into one error that names the file."""
    data = _read(path)
    try:
        return parse(data)
    except (ValueError, UnsupportedAlgorithm, msgspec.DecodeError, IdentityError) as exc:
        raise KeysError(path, "is damaged", "restore it from a backup of the keys directory") from exc


def _read(path: Path) -> bytes:
    try:
        return read_private(path)
    except FileNotFoundError as exc:
        raise KeysError(path, "is missing", "restore it, or copy this part of the keys directory again") from exc
