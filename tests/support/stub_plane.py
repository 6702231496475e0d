"""A control plane without a database: it seals, signs and issues like the real one, with keys of its own."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final, cast

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.endpoints import parse_endpoint
from agent.membership import Machine, Membership, save_membership
from controlplane.fleet.pki import issue_node_certificate, issue_service_certificate, make_authority
from shared.identity import (
    NodeIdentity,
    NodeName,
    ServiceName,
    encode_chain,
    load_chain,
    make_key,
    parse_csr_pem,
)
from shared.ids import new_id
from shared.joining import (
    REFUSED_BODY,
    JoinAnswer,
    TrustBundle,
    make_token,
    open_bundle,
    open_sealed,
    pin,
    read_join_request,
    read_renew_request,
    sign_answer,
)
from shared.signing import (
    Context,
    IntentKey,
    IntentKeySet,
    IntentSigner,
    JoinSigner,
    KeyClass,
    Verifier,
    encode_envelope,
    encode_public_key,
    key_id,
)
from shared.wire import (
    AllocationBound,
    AllocationFailed,
    AllocationReleased,
    Assignment,
    Command,
    CommandPayload,
    CommandUpdate,
    Report,
    Spec,
    SpecPayload,
    Tombstone,
    decode_payload,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec

    from controlplane.fleet.pki import Authority
    from shared.joining import JoinRequest
    from shared.wire import Lane

Statement = AllocationBound | AllocationFailed | AllocationReleased | CommandUpdate

TRUST_DOMAIN: Final = "stub.test"
SITE: Final = "here"
FAR: Final = timedelta(days=3650)
CONTEXTS: Final[Mapping[str, tuple[Context, type[Statement]]]] = {
    "allocation_bound": (Context.NODE_ALLOCATION_BOUND, AllocationBound),
    "allocation_failed": (Context.NODE_ALLOCATION_FAILED, AllocationFailed),
    "allocation_released": (Context.NODE_ALLOCATION_RELEASED, AllocationReleased),
    "command_update": (Context.NODE_COMMAND_RESULT, CommandUpdate),
}


class StubPlane:
    """Signs, seals and issues. `now` is its clock, which a test may set."""

    def __init__(self, url: str = "https://gw.test:7443", hosts: tuple[str, ...] = ("gw.test", "127.0.0.1")) -> None:
        self.now = datetime.now(UTC)
        self.url = url
        self.node_ca = make_authority("node CA", TRUST_DOMAIN, self.now)
        self.serving_ca = make_authority("serving CA", TRUST_DOMAIN, self.now)
        self.sealing_key = make_key()
        self.join_signer = JoinSigner(Ed25519PrivateKey.generate())
        self.intent_signer = IntentSigner(Ed25519PrivateKey.generate())
        self.intent_sequence = 1
        self.gateway_urls = [url]
        self.hosts = hosts
        self.token = make_token()
        self.requests: list[JoinRequest] = []
        self.renewals = 0
        self.refuse = False
        self.node_keys: list[ec.EllipticCurvePublicKey] = []
        self.node_ids: dict[str, str] = {}  # by machine id
        self.bundle_data = TrustBundle(
            trust_domain=TRUST_DOMAIN,
            url=url,
            serving_ca=encode_chain([self.serving_ca.certificate]).decode(),
            sealing_key=encode_public_key(self.sealing_key.public_key()),
            join_signing_key=encode_public_key(self.join_signer.public_key),
        ).encode()
        self.bundle = open_bundle(self.bundle_data, self.pin)

    @staticmethod
    def make_ed25519() -> Ed25519PrivateKey:
        return Ed25519PrivateKey.generate()

    @property
    def pin(self) -> str:
        return pin(self.bundle_data)

    def rotate_intent_key(self) -> None:
        self.intent_signer = IntentSigner(self.make_ed25519())
        self.intent_sequence += 1

    @property
    def node_ca_pem(self) -> str:
        return encode_chain([self.node_ca.certificate]).decode()

    def intent_keys(self) -> IntentKeySet:
        key = IntentKey(key_id=self.intent_signer.key_id, public_key=encode_public_key(self.intent_signer.public_key))
        return IntentKeySet(sequence=self.intent_sequence, keys=[key])

    def write_serving_certificate(self, path: Path, authority: Authority | None = None) -> Path:
        name = ServiceName(TRUST_DOMAIN, "gateway")
        leaf = issue_service_certificate(authority or self.serving_ca, name, "server", self.hosts, self.now)
        path.write_bytes(leaf.encode())
        return path

    def answer(self, node_id: str, csr_pem: str) -> bytes:
        csr = parse_csr_pem(csr_pem)
        name = NodeName(TRUST_DOMAIN, SITE, node_id)
        issued = issue_node_certificate(self.node_ca, csr.public_key, name, self.now)
        self.node_keys.append(csr.public_key)
        answer = JoinAnswer(
            node_id=node_id,
            site=SITE,
            spiffe_id=str(name),
            certificate=issued.chain_pem,
            csr_sha256=csr.sha256,
            intent_keys=self.intent_keys(),
            gateways=self.gateway_urls,
            issued_at=self.now,
        )
        return sign_answer(answer, self.join_signer)

    def join(self, body: bytes) -> tuple[int, bytes]:
        request = read_join_request(body)
        token = open_sealed(request.sealed_token, parse_csr_pem(request.csr), self.sealing_key)
        if self.refuse or token != self.token:
            return 403, REFUSED_BODY
        self.requests.append(request)
        node_id = self.node_ids.setdefault(request.host.machine_id, new_id("node"))
        return 200, self.answer(node_id, request.csr)

    def renew(self, body: bytes) -> tuple[int, bytes]:
        claim = read_renew_request(body)
        self.renewals += 1
        claim.verify(next(key for key in self.node_keys if key_id(key) == claim.proof.key_id))
        if self.refuse:
            return 403, REFUSED_BODY
        return 200, self.answer(claim.node_id, claim.csr.pem)

    def enrol(self, state_dir: Path, machine: Machine | None = None) -> Membership:
        """Put into a state directory what a join would have left there."""
        key = make_key()
        name = NodeName(TRUST_DOMAIN, SITE, new_id("node"))
        issued = issue_node_certificate(self.node_ca, key.public_key(), name, self.now)
        self.node_keys.append(key.public_key())
        membership = Membership(
            server=self.url,
            bundle=self.bundle,
            identity=NodeIdentity(key, load_chain(issued.chain_pem.encode())),
            gateways=tuple(parse_endpoint(url) for url in self.gateway_urls),
            intent_keys=self.intent_keys(),
            joined_at=self.now,
            machine=machine or Machine(),
        )
        save_membership(state_dir, membership)
        return membership

    # --- intent ---

    def spec(
        self,
        node_id: str,
        generation: int,
        assignments: list[Assignment] | None = None,
        tombstones: list[Tombstone] | None = None,
        *,
        incarnation: int = 1,
        signer: IntentSigner | None = None,
    ) -> Spec:
        payload = SpecPayload(
            node_id=node_id,
            incarnation=incarnation,
            generation=generation,
            issued_at=self.now,
            assignments=assignments or [],
            tombstones=tombstones or [],
        )
        envelope = (signer or self.intent_signer).sign(Context.INTENT_SPEC, encode(payload))
        return Spec(incarnation=incarnation, generation=generation, envelope=encode_envelope(envelope))

    def command(
        self,
        node_id: str,
        kind: str,
        *,
        arguments: bytes = b"{}",
        lane: Lane = "control",
        journal_id: str = "",
        deadline: datetime | None = None,
        command_id: str = "",
        signer: IntentSigner | None = None,
    ) -> Command:
        payload = CommandPayload(
            node_id=node_id,
            command_id=command_id or new_id("cmd"),
            kind=kind,
            lane=lane,
            journal_id=journal_id,
            issued_at=self.now,
            deadline=deadline or self.now + FAR,
            arguments=arguments,
        )
        envelope = (signer or self.intent_signer).sign(Context.INTENT_COMMAND, encode(payload))
        return Command(command_id=payload.command_id, envelope=encode_envelope(envelope))

    # --- evidence ---

    def read_report(self, report: Report) -> Statement:
        """Verify a report with every key that was ever issued."""
        context, kind = CONTEXTS[report.kind]
        verifier = Verifier({KeyClass.NODE: self.node_keys})
        return cast("Statement", decode_payload(kind, verifier.open(report.envelope, context)))


def assignment(reservation_id: str, *gpu_uuids: str, allocation_id: str = "") -> Assignment:
    return Assignment(
        allocation_id=allocation_id or new_id("alloc"),
        reservation_id=reservation_id,
        device_uuids=list(gpu_uuids),
        vcpus=0,
        memory_mib=0,
        starts_at=datetime(2030, 1, 1, tzinfo=UTC),
        ends_at=None,
    )


def tombstone(entry: Assignment) -> Tombstone:
    return Tombstone(allocation_id=entry.allocation_id, reservation_id=entry.reservation_id)
