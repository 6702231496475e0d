"""JoinService: trades a join token for a certificate, and a certificate for the next one.

A gateway relays what a machine posts and understands none of it; everything is decided here, in one
transaction each. A join locks its token, so of many that come with the last use one wins. The
checks are made in a fixed order and every failure is the same `JoinRefused` to the caller; the
reason is a word in the audit row that the same transaction writes.

A lost answer is asked for again with the same token and key: for `REPLAY_S` the stored answer is
given once more, and no use is spent. A request that was made anew (ECDSA signatures differ each time)
gets the same certificate, in an answer that names the new request.

A *re-join* brings a token that expects a certain node: the machine begins again in that node's row.
What the node holds stays, its earlier certificates are revoked, its session is over, and it must
pass acceptance again.

A *renewal* is signed by the key of the certificate that it replaces, which must be the node's and
not revoked; it may have lapsed for up to `RENEWAL_GRACE`. Any such certificate will do, because the
answer to an earlier renewal may have been lost with the key that it was for.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from controlplane.db import audit, certificates, outbox, tokens
from controlplane.db.certificates import Admission, NewCertificate
from controlplane.db.tx import UniqueConflict
from controlplane.fleet.pki import issue_node_certificate
from shared.identity import RENEWAL_GRACE, IdentityError, NodeName, parse_csr_pem
from shared.joining import (
    JoinAnswer,
    open_sealed,
    read_join_request,
    read_renew_request,
    secret_matches,
    sign_answer,
)
from shared.signing import BadKey, BadSignature, Envelope, decode_public_key, encode_public_key

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from cryptography.hazmat.primitives.asymmetric import ec

    from controlplane.db.audit import Decision
    from controlplane.db.certificates import ExpectedNode, Renewable
    from controlplane.db.pool import Database
    from controlplane.db.tokens import LockedToken, Surroundings
    from controlplane.db.tx import Tx
    from controlplane.fleet.keys import ApiKeys
    from controlplane.fleet.pki import IssuedCertificate
    from shared.identity import CertificateRequest
    from shared.ids import IdSource
    from shared.joining import HostFacts, JoinToken, RenewalClaim

_log = structlog.get_logger()

# An agent that lost its answer asks again within seconds; an operator who types, within minutes.
REPLAY_S = 600.0
# A node renews every 16 hours. An agent that crashes in the middle again and again, and a relay that
# repeats an old request, end here.
RENEWALS_PER_HOUR_MAX = 10
# Transactions of joins and renewals at once: the rest of the api's connections stay the API's.
AT_ONCE = 4
# Each waits with a request of a few KiB; at 4 x 50 a second this is five seconds' worth.
WAITING_MAX = 1000

# Compared with when there is no such token, so that the time taken does not tell.
_NO_SECRET = bytes(32)


class JoinRefused(Exception):
    """The request is refused; `reason` is for the log and the audit, never for the caller."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class JoinBusy(Exception):
    """More requests wait than can be answered in time; come again."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that was refused and audited. `subject` is what is known of who asked."""

    reason: str
    subject: str


@dataclass(frozen=True, slots=True)
class Granted:
    """What the caller gets, and whose it is."""

    answer: bytes
    node: str


class _No(Exception):
    """A check failed; `resource` is the node that stands in the way, if one does."""

    def __init__(self, reason: str, resource: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.resource = resource


@dataclass(frozen=True, slots=True)
class _Place:
    """Who the machine becomes."""

    node_id: str
    name: str
    site: str


@dataclass(frozen=True, slots=True)
class Issuer:
    """What makes certificates and answers."""

    keys: ApiKeys
    trust_domain: str
    gateways: tuple[str, ...]
    ids: IdSource

    def issue(
        self, node_id: str, site: str, public_key: ec.EllipticCurvePublicKey, now: datetime
    ) -> tuple[IssuedCertificate, NodeName]:
        name = NodeName(self.trust_domain, site, node_id)
        return issue_node_certificate(self.keys.node_ca, public_key, name, now), name

    def answer(self, issued: IssuedCertificate, name: NodeName, csr_sha256: str, now: datetime) -> bytes:
        return self._sign(
            JoinAnswer(
                node_id=name.node_id,
                site=name.site,
                spiffe_id=str(name),
                certificate=issued.chain_pem,
                csr_sha256=csr_sha256,
                intent_keys=self.keys.intent.key_set,
                gateways=list(self.gateways),
                issued_at=now,
            )
        )

    def answer_again(self, stored: bytes, csr_sha256: str) -> bytes:
        """The stored answer, byte for byte unless the request was made anew."""
        envelope = msgspec.json.decode(stored, type=Envelope)
        answer = msgspec.json.decode(envelope.payload, type=JoinAnswer)
        if answer.csr_sha256 == csr_sha256:
            return stored
        return self._sign(msgspec.structs.replace(answer, csr_sha256=csr_sha256))

    def _sign(self, answer: JoinAnswer) -> bytes:
        return sign_answer(answer, self.keys.join_signer)


@dataclass(frozen=True, slots=True)
class JoinAttempt:
    """A request whose parts have been read: the token was sealed for this certificate request."""

    token: JoinToken
    csr: CertificateRequest
    host: HostFacts


# --- joins -----------------------------------------------------------------------------------


def read_attempt(body: bytes, issuer: Issuer) -> JoinAttempt:
    """Read the body of a join. Raises IdentityError."""
    request = read_join_request(body)
    csr = parse_csr_pem(request.csr)
    return JoinAttempt(open_sealed(request.sealed_token, csr, issuer.keys.sealing_key), csr, request.host)


def admit(tx: Tx, issuer: Issuer, attempt: JoinAttempt) -> Granted | Refusal:
    """Decide one join and write all of it. Raises UniqueConflict (node_name) if a name was taken meanwhile."""
    try:
        return _admit(tx, issuer, attempt)
    except _No as no:
        return refuse_join(tx, attempt, no.reason, resource=no.resource)


def _admit(tx: Tx, issuer: Issuer, attempt: JoinAttempt) -> Granted:
    token = tokens.lock_token(tx, attempt.token.token_id)
    matches = secret_matches(attempt.token.secret, token.secret_sha256 if token else _NO_SECRET)
    if token is None or not matches:
        raise _No("token_secret" if token else "token_unknown")
    name = token.node_name or attempt.host.hostname
    around = tokens.look_around(
        tx, token_id=token.token_id, site_id=token.site_id, name=name, key_id=attempt.csr.key_id
    )
    if token.revoked:
        raise _No("token_revoked")
    if around.replay is not None:
        return Granted(issuer.answer_again(around.replay, attempt.csr.sha256), around.key_used_by or "")
    _check_token(token, around.now)
    if token.expect_node_id is None:
        _check_free(around)
        place = _Place(issuer.ids.new("node"), name, token.site_slug)
        admission = _prepare(issuer, attempt, token, around.now, place)
        written = certificates.admit_node(tx, admission)
    else:
        node = certificates.lock_expected(tx, token.expect_node_id)
        _check_expected(node, attempt.host, around)
        place = _Place(node.public_id, node.name, node.site_slug)
        admission = _prepare(issuer, attempt, token, around.now, place)
        written = certificates.readmit_node(tx, node.node_id, admission)
    assert written is not None, "the locked token had a use left, and the locked node is not decommissioned"
    _announce(tx, attempt, token, admission, rejoined=token.expect_node_id is not None)
    return Granted(admission.answer, admission.node_public_id)


def _check_token(token: LockedToken, now: datetime) -> None:
    for fault, reason in (
        (token.expires_at <= now, "token_expired"),
        (token.uses_left < 1, "token_used"),
        (token.role != "node", "token_role"),
        (token.pool_deleted, "pool_deleted"),
    ):
        if fault:
            raise _No(reason)


def _check_free(around: Surroundings) -> None:
    if around.name_taken_by is not None:
        raise _No("name_taken", around.name_taken_by)
    if around.key_used_by is not None:
        raise _No("key_in_use", around.key_used_by)


def _check_expected(node: ExpectedNode, host: HostFacts, around: Surroundings) -> None:
    if node.provision_state == "decommissioned":
        raise _No("expect_decommissioned", node.public_id)
    if _is_other_machine(node, host):
        raise _No("expect_other_machine", node.public_id)
    if around.key_used_by not in (None, node.public_id):
        raise _No("key_in_use", around.key_used_by or "")


def _is_other_machine(node: ExpectedNode, host: HostFacts) -> bool:
    """Whether the host shows GPUs and none of them, nor its machine id, is the expected node's.

    A server that was installed anew has another machine id, and one whose driver is not there yet
    shows no GPUs: both are let in, and acceptance looks again.
    """
    known, shown = set(node.gpu_uuids), set(host.gpu_uuids)
    return bool(known and shown) and not known & shown and node.machine_id != host.machine_id


def _prepare(issuer: Issuer, attempt: JoinAttempt, token: LockedToken, now: datetime, place: _Place) -> Admission:
    issued, spiffe = issuer.issue(place.node_id, place.site, attempt.csr.public_key, now)
    return Admission(
        token_id=token.token_id,
        node_public_id=place.node_id,
        site_id=token.site_id,
        pool_id=token.pool_id,
        name=place.name or place.node_id,
        machine_id=attempt.host.machine_id,
        agent_version=attempt.host.agent_version,
        certificate=_row_of(issued, spiffe, attempt.csr),
        answer=issuer.answer(issued, spiffe, attempt.csr.sha256, now),
        replay_s=REPLAY_S,
    )


def _row_of(issued: IssuedCertificate, name: NodeName, csr: CertificateRequest) -> NewCertificate:
    return NewCertificate(
        serial=issued.serial,
        key_id=issued.key_id,
        public_key=encode_public_key(csr.public_key),
        spiffe_id=str(name),
        not_before=issued.not_before,
        not_after=issued.not_after,
    )


def _announce(tx: Tx, attempt: JoinAttempt, token: LockedToken, admission: Admission, *, rejoined: bool) -> None:
    outbox.publish(
        tx,
        "node.joined",
        admission.node_public_id,
        {"name": admission.name, "site": token.site_slug, "pool": token.pool_slug, "rejoined": rejoined},
        tenant_id=None,
    )
    audit.record(
        tx,
        principal=token.public_id,
        action="node.join",
        decision="allow",
        resource=admission.node_public_id,
        tenant_id=None,
        detail={"rejoined": rejoined, "serial": admission.certificate.serial, **_describe(attempt)},
    )


def refuse_join(tx: Tx, attempt: JoinAttempt, reason: str, *, resource: str = "") -> Refusal:
    """Write why a join was refused. `resource` is the node that stands in its way, if one does."""
    audit.record(
        tx,
        principal=attempt.token.token_id,
        action="node.join",
        decision="refuse",
        resource=resource,
        tenant_id=None,
        reason=reason,
        detail=_describe(attempt),
    )
    return Refusal(reason, attempt.token.token_id)


def refuse_unread(tx: Tx, action: str, reason: str) -> Refusal:
    """Write that a body was no request at all."""
    audit.record(
        tx, principal="anonymous", action=action, decision="refuse", resource="", tenant_id=None, reason=reason
    )
    return Refusal(reason, "anonymous")


def _describe(attempt: JoinAttempt) -> Mapping[str, object]:
    host = attempt.host
    return {
        "hostname": host.hostname,
        "machine_id": host.machine_id,
        "agent_version": host.agent_version,
        "gpus": len(host.gpu_uuids),
        "key_id": attempt.csr.key_id,
    }


# --- renewals --------------------------------------------------------------------------------


def renew(tx: Tx, issuer: Issuer, claim: RenewalClaim) -> Granted | Refusal:
    """Decide one renewal and write the next certificate."""
    hour_s = timedelta(hours=1).total_seconds()
    node = certificates.lock_renewable(tx, claim.node_id, claim.serial, recent_s=hour_s)
    try:
        if node is None:
            raise _No("node_unknown")
        _check_renewal(node, claim)
    except _No as no:
        # the id is the caller's word, so it is the subject only if there is such a node
        subject = node.public_id if node else "anonymous"
        _audit_renewal(tx, subject, "refuse", reason=no.reason)
        return Refusal(no.reason, subject)
    issued, name = issuer.issue(node.public_id, node.site_slug, claim.csr.public_key, node.now)
    certificates.add_renewal(tx, node.node_id, _row_of(issued, name, claim.csr))
    _audit_renewal(tx, node.public_id, "allow", serial=issued.serial, key_id=issued.key_id)
    return Granted(issuer.answer(issued, name, claim.csr.sha256, node.now), node.public_id)


def _check_renewal(node: Renewable, claim: RenewalClaim) -> None:
    if node.public_key is None or node.not_after is None:
        raise _No("certificate_unknown")
    for fault, reason in (
        (node.provision_state == "decommissioned", "node_decommissioned"),
        (not node.authorized, "node_revoked"),
        (node.certificate_revoked, "certificate_revoked"),
        (node.now > node.not_after + RENEWAL_GRACE, "certificate_lapsed"),
        (node.issued_recently >= RENEWALS_PER_HOUR_MAX, "too_many_renewals"),
    ):
        if fault:
            raise _No(reason)
    try:
        claim.verify(decode_public_key(node.public_key))
    except BadSignature as exc:
        raise _No(f"proof_{exc.reason}") from exc
    except (BadKey, ValueError) as exc:
        raise _No("certificate_key") from exc


def _audit_renewal(tx: Tx, subject: str, decision: Decision, *, reason: str = "", **detail: str) -> None:
    audit.record(
        tx,
        principal=subject,
        action="node.renew",
        decision=decision,
        resource="" if subject == "anonymous" else subject,
        tenant_id=None,
        reason=reason,
        detail=detail,
    )


# --- the service -----------------------------------------------------------------------------


class JoinService:
    """Answers joins and renewals. All methods may be called at once; `AT_ONCE` transactions run."""

    def __init__(self, db: Database, issuer: Issuer) -> None:
        self._db = db
        self._issuer = issuer
        self._limiter = trio.CapacityLimiter(AT_ONCE)

    def bundle(self) -> bytes:
        """The trust bundle, whose pin operators hand out."""
        return self._issuer.keys.bundle

    async def join(self, body: bytes) -> bytes:
        """Return the answer to a join.

        Raises:
            JoinRefused: whatever the cause.
            JoinBusy: too many are waiting.
            DatabaseError: nothing is known; the same request may be repeated.
        """
        async with self._turn():
            try:
                attempt = read_attempt(body, self._issuer)
            except IdentityError as exc:
                return self._settle(await self._db.run_tx(refuse_unread, "node.join", exc.reason))
            try:
                result = await self._db.run_tx(admit, self._issuer, attempt)
            except UniqueConflict as exc:
                # two machines of one name came at once with different tokens
                result = await self._db.run_tx(refuse_join, attempt, f"taken_{exc.constraint}")
            return self._settle(result)

    async def renew(self, body: bytes) -> bytes:
        """Return the answer to a renewal. Raises as `join` does."""
        async with self._turn():
            try:
                claim = read_renew_request(body)
            except IdentityError as exc:
                return self._settle(await self._db.run_tx(refuse_unread, "node.renew", exc.reason))
            return self._settle(await self._db.run_tx(renew, self._issuer, claim))

    def _turn(self) -> trio.CapacityLimiter:
        if self._limiter.statistics().tasks_waiting >= WAITING_MAX:
            raise JoinBusy
        return self._limiter

    def _settle(self, result: Granted | Refusal) -> bytes:
        if isinstance(result, Refusal):
            _log.warning("join.refused", subject=result.subject, reason=result.reason)
            raise JoinRefused(result.reason)
        _log.info("join.granted", node=result.node)
        return result.answer
