"""Joining and renewing: everything that both ends of it say and check, without network or database.

The order protects the token. The agent asks a gateway for the trust bundle over TLS that it
cannot judge yet, compares the bundle's SHA-256 with the *pin* that the operator pasted, and only
a bundle that passed (`PinnedBundle`) can seal a token or verify an answer: there is no other way
to make one. From then on TLS is verified against the bundle's serving CA.

1.  ``GET /bc/v1/bundle``   the bytes of the `TrustBundle`; `open_bundle` checks the pin.
2.  ``POST /bc/v1/join``    a `JoinRequest` in JSON: the certificate request, the token sealed to
    the JoinService's key (JWE, ECDH-ES and A256GCM) with the request's SHA-256 in the protected
    header, and what the host says about itself. A gateway relays it and can neither read the
    token nor put another request beside it.
3.  The answer is an `Envelope` in JSON around a `JoinAnswer`, signed by the pinned join key.
    `verify_answer` checks signature, request, SPIFFE id and key before anything is stored.
4.  ``POST /bc/v1/renew``   a `RenewRequest`: a new certificate request and a proof by the node's
    present key that names the node, the present certificate and that request. The answer is as
    in 3.

Bodies are JSON so that a person can read one while debugging. Every refusal, of a join or a
renewal and whatever its cause, is `REFUSED_STATUS` with `REFUSED_BODY`: a caller learns nothing
from it, the audit row has the reason (`IdentityError.reason`, `BadSignature.reason`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from joserfc import jwe
from joserfc.errors import JoseError
from joserfc.jwk import ECKey
from joserfc.registry import HeaderParameter

from shared.identity import (
    BadCertificate,
    BadSpiffeId,
    CertificateRequest,
    IdentityError,
    NodeName,
    certificate_key_id,
    certificate_name,
    certificate_serial,
    check_trust_domain,
    load_chain,
    parse_csr_pem,
)
from shared.ids import is_ulid, new_ulid
from shared.signing import (
    BadKey,
    BadSignature,
    Context,
    Envelope,
    IntentKeySet,
    JoinSigner,
    KeyClass,
    NodeSigner,
    PublicKey,
    Verifier,
    decode_public_key,
)

if TYPE_CHECKING:
    from cryptography import x509

    from shared.identity import NodeIdentity

BUNDLE_PATH = "/bc/v1/bundle"
JOIN_PATH = "/bc/v1/join"
RENEW_PATH = "/bc/v1/renew"
# Requests are about 2 KiB and answers about 4 KiB; anyone may post, so a gateway buffers no more.
BODY_BYTES_MAX = 64 * 1024
# A sealed token is about 600 bytes.
SEALED_LENGTH_MAX = 2 * 1024
GPUS_MAX = 64  # the largest servers have 16

REFUSED_STATUS = 403
REFUSED_BODY = (
    b'{"error":{"code":"JOIN_REFUSED","message":'
    b'"The control plane refused this request. Its operator finds the reason in the audit log."}}'
)

T = TypeVar("T")


class JoiningError(IdentityError):
    """Base of what is wrong with what one end of a join sent the other."""


class BadBody(JoiningError):
    """A body that is no request or answer of this protocol."""


class BadToken(JoiningError):
    """Text that is not a join token. The message never repeats it."""


class BadSeal(JoiningError):
    """A sealed token that was not sealed to us, or not for this certificate request."""


class BadPin(JoiningError):
    """Text that is not a pin."""


class PinMismatch(JoiningError):
    """The trust bundle is not the one that the operator pinned: nothing secret may be sent to whoever served it."""

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__("pin_mismatch", f"the server's trust bundle has the pin {actual}, expected {expected}")
        self.expected = expected
        self.actual = actual


class BadAnswer(JoiningError):
    """An answer that is not the control plane's answer to this request."""


# --- join tokens -----------------------------------------------------------------------------

TOKEN_PREFIX = "bcjt_"  # noqa: S105  the public part
SECRET_BYTES = 32
_SECRET_LENGTH = 43  # base64url without padding
TOKEN_FORM = "a join token looks like bcjt_<26 characters>.<43 characters>"  # noqa: S105


@dataclass(frozen=True, slots=True)
class JoinToken:
    """``bcjt_<ulid>.<secret>``. The id is public (it is listed and revoked by it), the secret is shown once."""

    token_id: str
    secret: bytes = field(repr=False)

    @property
    def text(self) -> str:
        """What the operator pastes."""
        return f"{self.token_id}.{base64.urlsafe_b64encode(self.secret).rstrip(b'=').decode()}"

    @property
    def hash(self) -> bytes:
        """What the database keeps."""
        return hash_secret(self.secret)


def make_token() -> JoinToken:
    """Return a new token."""
    return JoinToken(TOKEN_PREFIX + new_ulid(), secrets.token_bytes(SECRET_BYTES))


def parse_token(text: str) -> JoinToken:
    """Read a pasted token; white space around it is ignored. Raises BadToken."""
    text = text.strip()
    if not text:
        raise BadToken("token_empty", f"the join token is empty; {TOKEN_FORM}")
    token_id, dot, encoded = text.partition(".")
    if not token_id.startswith(TOKEN_PREFIX):
        raise BadToken("token_malformed", f"{TOKEN_FORM}; this does not start with bcjt_")
    if not is_ulid(token_id.removeprefix(TOKEN_PREFIX)):
        raise BadToken("token_malformed", f"{TOKEN_FORM}; the part before the dot is not an id")
    if not dot:
        raise BadToken("token_malformed", f"{TOKEN_FORM}; the secret after the dot is missing")
    try:
        secret = base64.b64decode(encoded + "=", altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    token = JoinToken(token_id, secret)
    # one text per token: base64 has spare bits in the last character
    if len(encoded) != _SECRET_LENGTH or len(secret) != SECRET_BYTES or token.text != text:
        raise BadToken("token_malformed", f"{TOKEN_FORM}; the secret after the dot is damaged or cut short")
    return token


def hash_secret(secret: bytes) -> bytes:
    """Return the SHA-256. No salt or stretching: the secret is 256 random bits, not a password."""
    return hashlib.sha256(secret).digest()


def secret_matches(secret: bytes, stored_hash: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(hash_secret(secret), stored_hash)


# --- the seal --------------------------------------------------------------------------------


class _EphemeralKey(msgspec.Struct, forbid_unknown_fields=True):
    kty: Literal["EC"]
    crv: Literal["P-256"]
    x: str
    y: str


class _SealHeader(msgspec.Struct, forbid_unknown_fields=True):
    """The only protected header that is opened: no other algorithm, no compression, no critical extension."""

    alg: Literal["ECDH-ES"]
    enc: Literal["A256GCM"]
    epk: _EphemeralKey
    csr_sha256: str


_seal_registry = jwe.JWERegistry(
    header_registry={"csr_sha256": HeaderParameter("SHA-256 of the certificate request", "str", required=True)},
    algorithms=["ECDH-ES", "A256GCM"],
)


def seal_token(token: JoinToken, csr: CertificateRequest, bundle: PinnedBundle) -> str:
    """Return the token as a compact JWE that only the pinned JoinService opens, and only beside this request."""
    header = {"alg": "ECDH-ES", "enc": "A256GCM", "csr_sha256": csr.sha256}
    key = ECKey.import_key(bundle.sealing_key)
    return jwe.encrypt_compact(header, token.text.encode(), key, registry=_seal_registry)


def open_sealed(sealed: str, csr: CertificateRequest, sealing_key: ec.EllipticCurvePrivateKey) -> JoinToken:
    """Return the token that was sealed for this certificate request. Raises BadSeal, BadToken."""
    if len(sealed) > SEALED_LENGTH_MAX:
        raise BadSeal("seal_too_large", f"a sealed token has at most {SEALED_LENGTH_MAX} characters")
    encoded_header = sealed.partition(".")[0]
    try:
        header = msgspec.json.decode(
            base64.urlsafe_b64decode(encoded_header + "=" * (-len(encoded_header) % 4)), type=_SealHeader
        )
    except (ValueError, msgspec.DecodeError) as exc:
        raise BadSeal("seal_malformed", "the token is not sealed as ECDH-ES with A256GCM") from exc
    # the header is authenticated by the decryption below: a relay cannot move the seal to its own request
    if not hmac.compare_digest(header.csr_sha256.encode(), csr.sha256.encode()):
        raise BadSeal("seal_other_csr", "the token was sealed for another certificate request")
    try:
        opened = jwe.decrypt_compact(sealed, ECKey.import_key(sealing_key), registry=_seal_registry)
        text = (opened.plaintext or b"").decode("ascii")
    except (JoseError, ValueError, UnsupportedAlgorithm) as exc:
        raise BadSeal("seal_unopened", "the token was not sealed to this JoinService, or was changed") from exc
    return parse_token(text)


# --- the trust bundle ------------------------------------------------------------------------

_PIN = re.compile(r"sha256:[0-9a-f]{64}\Z")


class TrustBundle(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent trusts: the CA of the gateways' TLS, the key to seal to, the key that signs answers.

    `serving_ca` is PEM, the keys are SubjectPublicKeyInfo (base64 of DER in JSON). `url` is the
    address that the operator published; it tells a person which deployment this is.
    """

    v: Literal[1] = 1
    trust_domain: str
    url: str
    serving_ca: str
    sealing_key: bytes
    join_signing_key: bytes

    def encode(self) -> bytes:
        """Return the canonical bytes: what is served, stored and pinned."""
        return msgspec.json.encode(self)


@dataclass(frozen=True, slots=True)
class PinnedBundle:
    """A trust bundle whose pin was right; made by `open_bundle` alone. `data` are the pinned bytes."""

    data: bytes
    bundle: TrustBundle
    serving_ca: x509.Certificate
    sealing_key: ec.EllipticCurvePublicKey
    join_verifier: Verifier

    @property
    def pin(self) -> str:
        return pin(self.data)


def pin(data: bytes) -> str:
    """Return ``sha256:<hex>`` of a bundle's bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def check_pin(data: bytes, expected: str) -> None:
    """Raise PinMismatch unless the bytes have this pin, BadPin if it is none."""
    expected = expected.strip().lower()
    if _PIN.match(expected) is None:
        raise BadPin("pin_malformed", "a pin looks like sha256:<64 hexadecimal digits>")
    actual = pin(data)
    if not hmac.compare_digest(actual.encode(), expected.encode()):
        raise PinMismatch(expected, actual)


def open_bundle(data: bytes, expected_pin: str) -> PinnedBundle:
    """Check the pin, and only then read the bundle. Raises PinMismatch, BadPin, BadBody."""
    if len(data) > BODY_BYTES_MAX:
        raise BadBody("body_too_large", f"a trust bundle has at most {BODY_BYTES_MAX} bytes")
    check_pin(data, expected_pin)
    bundle = _decode_json(data, TrustBundle)
    try:
        check_trust_domain(bundle.trust_domain)
        sealing_key = decode_public_key(bundle.sealing_key)
        join_key = decode_public_key(bundle.join_signing_key)
        serving_ca = load_chain(bundle.serving_ca.encode())[0]
    except (BadKey, IdentityError) as exc:
        raise BadBody("bundle_malformed", f"the trust bundle is damaged: {exc}") from exc
    if not isinstance(sealing_key, ec.EllipticCurvePublicKey) or not isinstance(join_key, Ed25519PublicKey):
        raise BadBody("bundle_malformed", "the trust bundle's keys are not of the expected kinds")
    return PinnedBundle(data, bundle, serving_ca, sealing_key, Verifier({KeyClass.JOIN: [join_key]}))


# --- requests --------------------------------------------------------------------------------

_Word = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[!-~]*\Z")]
_Text = Annotated[str, msgspec.Meta(max_length=2 * SEALED_LENGTH_MAX)]
_Pem = Annotated[str, msgspec.Meta(max_length=8 * 1024)]


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says about itself when it joins. Nothing is granted on the word of it.

    `gpu_uuids` lets a token that expects a certain machine be checked, and a machine that joins
    twice be noticed, before the first inventory.
    """

    agent_version: _Word
    hostname: Annotated[str, msgspec.Meta(max_length=253, pattern=r"^[!-~]*\Z")]
    machine_id: _Word
    boot_id: _Word
    gpu_uuids: Annotated[list[_Word], msgspec.Meta(max_length=GPUS_MAX)]


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a join. `csr` is PEM, `sealed_token` a compact JWE."""

    v: Literal[1] = 1
    csr: _Pem
    sealed_token: _Text
    host: HostFacts


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a renewal: the new request in PEM and the present key's word for it."""

    v: Literal[1] = 1
    csr: _Pem
    proof: Envelope


class RenewalProof(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of a renewal's proof. `serial` is that of the certificate to be replaced, so an old one is no use."""

    node_id: str
    serial: str
    csr_sha256: str


@dataclass(frozen=True, slots=True)
class RenewalClaim:
    """A renewal that was read and not verified yet: whom it claims to be from says whose key must verify it."""

    node_id: str
    serial: str
    csr: CertificateRequest
    proof: Envelope

    def verify(self, node_key: PublicKey) -> None:
        """Raise BadSignature unless this key of the node's signed the claim; ValueError for a key that is no node's."""
        Verifier({KeyClass.NODE: [node_key]}).verify(self.proof, Context.NODE_RENEWAL)


def make_join_request(token: JoinToken, csr: CertificateRequest, bundle: PinnedBundle, host: HostFacts) -> bytes:
    """Return the body of a join."""
    request = JoinRequest(csr=csr.pem, sealed_token=seal_token(token, csr, bundle), host=host)
    return msgspec.json.encode(request)


def read_join_request(data: bytes) -> JoinRequest:
    """Read the body of a join. Raises BadBody. The parts are then read by `parse_csr_pem` and `open_sealed`."""
    return _decode_json(data, JoinRequest)


def make_renew_request(identity: NodeIdentity, csr: CertificateRequest) -> bytes:
    """Return the body of a renewal of `identity`'s certificate. Raises BadCertificate, BadSpiffeId."""
    proof = RenewalProof(
        node_id=identity.name.node_id, serial=certificate_serial(identity.certificate), csr_sha256=csr.sha256
    )
    envelope = NodeSigner(identity.key).sign(Context.NODE_RENEWAL, msgspec.json.encode(proof))
    return msgspec.json.encode(RenewRequest(csr=csr.pem, proof=envelope))


def read_renew_request(data: bytes) -> RenewalClaim:
    """Read the body of a renewal. Raises BadBody, BadCsr. Believe nothing of it before `RenewalClaim.verify`."""
    request = _decode_json(data, RenewRequest)
    proof = _decode_json(request.proof.payload, RenewalProof)
    csr = parse_csr_pem(request.csr)
    if not hmac.compare_digest(proof.csr_sha256.encode(), csr.sha256.encode()):
        raise BadBody("renewal_other_csr", "the proof is for another certificate request")
    return RenewalClaim(proof.node_id, proof.serial, csr, request.proof)


# --- answers ---------------------------------------------------------------------------------


class JoinAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a joined or renewed node gets. `certificate` is a PEM chain, leaf first; `gateways` are https URLs."""

    node_id: str
    site: str
    spiffe_id: str
    certificate: str
    csr_sha256: str
    intent_keys: IntentKeySet
    gateways: Annotated[list[str], msgspec.Meta(min_length=1, max_length=64)]
    issued_at: Annotated[datetime, msgspec.Meta(tz=True)]


@dataclass(frozen=True, slots=True)
class VerifiedAnswer:
    """An answer that is the control plane's, to our request, for our key."""

    answer: JoinAnswer
    name: NodeName
    chain: list[x509.Certificate]


def sign_answer(answer: JoinAnswer, signer: JoinSigner) -> bytes:
    """Return the body of the answer to a join or renewal; stored as it is, it can be replayed."""
    return msgspec.json.encode(signer.sign(Context.JOIN_ANSWER, msgspec.json.encode(answer)))


def verify_answer(data: bytes, bundle: PinnedBundle, csr: CertificateRequest) -> VerifiedAnswer:
    """Return the answer if it is signed by the pinned key and is about this request and key.

    The validity period is left to TLS: a node with a wrong clock should hear of it there.
    Raises BadAnswer; its `reason` says which check failed.
    """
    try:
        payload = bundle.join_verifier.verify(_decode_json(data, Envelope), Context.JOIN_ANSWER)
        answer = _decode_json(payload, JoinAnswer)
    except BadSignature as exc:
        raise BadAnswer("answer_signature", f"the answer is not signed by the pinned join key ({exc})") from exc
    except BadBody as exc:
        raise BadAnswer("answer_malformed", "the answer is not understood") from exc
    if not hmac.compare_digest(answer.csr_sha256.encode(), csr.sha256.encode()):
        raise BadAnswer("answer_other_csr", "the answer is to another certificate request")
    try:
        chain = load_chain(answer.certificate.encode())
        name = certificate_name(chain[0])
        expected = NodeName(bundle.bundle.trust_domain, answer.site, answer.node_id)
        leaf_key_id = certificate_key_id(chain[0])
        answer.intent_keys.verifier(answer.issued_at)
        for issued, issuer in pairwise(chain):
            issued.verify_directly_issued_by(issuer)
    except (BadCertificate, BadSpiffeId, BadKey) as exc:
        raise BadAnswer("answer_malformed", f"the answer is damaged: {exc}") from exc
    except (ValueError, TypeError, InvalidSignature) as exc:
        raise BadAnswer("answer_chain", "the certificates of the answer do not form a chain") from exc
    if name != expected or answer.spiffe_id != str(expected):
        raise BadAnswer("answer_name", f"the certificate is for {name}, the answer for {expected}")
    if leaf_key_id != csr.key_id:
        raise BadAnswer("answer_key", "the certificate is for another key")
    return VerifiedAnswer(answer, expected, chain)


def _decode_json(data: bytes, kind: type[T]) -> T:
    if len(data) > BODY_BYTES_MAX:
        raise BadBody("body_too_large", f"a body has at most {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadBody("body_malformed", str(exc)) from exc
