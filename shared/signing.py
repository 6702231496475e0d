"""Signatures that a relay cannot make: intent downward, evidence upward.

Everything that changes what a node holds travels as an `Envelope`: opaque payload bytes and a
signature over ``context || 0x00 || key id || 0x00 || payload``. The context says what kind of
statement it is, so a signed command can never be shown as a signed spec; the key id is inside
the signature, so it cannot be swapped. Payload bytes are signed and stored as they were sent:
nothing is encoded a second time, so nothing can encode differently.

Three classes of keys never stand in for one another (`KeyClass`):

* *intent* keys (Ed25519; api and workers) sign specs and commands;
* the *join* key (Ed25519; api alone, pinned by every agent) signs join answers and the list of
  intent keys;
* *node* keys (ECDSA P-256, which a TPM can hold) sign what only the node can know.

A context belongs to one class. `Verifier` looks a key up by (class of the expected context, key
id), so a node's key is unknown when a spec is checked, however genuine its signature is.
Signatures are 64 bytes for both algorithms (P-256 as r || s, as JOSE does), and an envelope has
one encoding only, so flipping any bit of it makes it another envelope, which is refused.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeGuard

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SIGNATURE_BYTES = 64
P256_NUMBER_BYTES = 32
# No lane carries a larger single message (shared.wire.MESSAGE_BYTES_MAX).
ENVELOPE_BYTES_MAX = 256 * 1024
# A list of intent keys holds the current one and those still in their overlap.
INTENT_KEYS_MAX = 16

PublicKey = Ed25519PublicKey | ec.EllipticCurvePublicKey
BadSignatureReason = Literal["unknown_key", "wrong_context", "bad_signature", "malformed"]


class KeyClass(StrEnum):
    """Who may say a thing."""

    INTENT = "intent"
    JOIN = "join"
    NODE = "node"


class Context(StrEnum):
    """What kind of statement a signature makes. The strings are part of the protocol: never change one, add one."""

    INTENT_SPEC = "bettercompute/intent/spec/1"
    INTENT_COMMAND = "bettercompute/intent/command/1"
    JOIN_ANSWER = "bettercompute/join/answer/1"
    NODE_ALLOCATION_BOUND = "bettercompute/node/allocation-bound/1"
    NODE_ALLOCATION_FAILED = "bettercompute/node/allocation-failed/1"
    NODE_ALLOCATION_RELEASED = "bettercompute/node/allocation-released/1"
    NODE_COMMAND_RESULT = "bettercompute/node/command-result/1"
    NODE_RENEWAL = "bettercompute/node/renewal/1"


CLASS_OF: Mapping[Context, KeyClass] = {
    Context.INTENT_SPEC: KeyClass.INTENT,
    Context.INTENT_COMMAND: KeyClass.INTENT,
    Context.JOIN_ANSWER: KeyClass.JOIN,
    Context.NODE_ALLOCATION_BOUND: KeyClass.NODE,
    Context.NODE_ALLOCATION_FAILED: KeyClass.NODE,
    Context.NODE_ALLOCATION_RELEASED: KeyClass.NODE,
    Context.NODE_COMMAND_RESULT: KeyClass.NODE,
    Context.NODE_RENEWAL: KeyClass.NODE,
}


class BadSignature(Exception):
    """An envelope that must not be acted on. `reason` is stable and safe to store."""

    def __init__(self, reason: BadSignatureReason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason: BadSignatureReason = reason


class BadKey(Exception):
    """Bytes that are no public key of ours: neither Ed25519 nor ECDSA on P-256."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signed bytes and who signed them as what. Nothing in it is true before a `Verifier` says so."""

    v: Literal[1] = 1
    context: Annotated[str, msgspec.Meta(max_length=64)]
    key_id: Annotated[str, msgspec.Meta(max_length=64)]
    payload: bytes
    signature: bytes


_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    return msgspec.msgpack.encode(envelope)


def decode_envelope(data: bytes) -> Envelope:
    """Read an envelope without believing it. Raises BadSignature("malformed")."""
    if len(data) > ENVELOPE_BYTES_MAX:
        raise BadSignature("malformed", f"more than {ENVELOPE_BYTES_MAX} bytes")
    try:
        envelope = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise BadSignature("malformed", "not an envelope") from exc
    # msgpack can write one value in several ways; what is stored must not be one of many twins
    if encode_envelope(envelope) != data:
        raise BadSignature("malformed", "not in its one encoding")
    return envelope


def key_id(public_key: PublicKey) -> str:
    """Return the key's name: its algorithm and the first 16 bytes of the SHA-256 of its SPKI."""
    return f"{_algorithm(public_key)}-{hashlib.sha256(encode_public_key(public_key)).hexdigest()[:32]}"


def encode_public_key(public_key: PublicKey) -> bytes:
    """Return the key as SubjectPublicKeyInfo, DER."""
    return public_key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def decode_public_key(data: bytes) -> PublicKey:
    """Read a SubjectPublicKeyInfo, DER. Raises BadKey."""
    try:
        public_key = serialization.load_der_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise BadKey("not a public key in DER") from exc
    if isinstance(public_key, Ed25519PublicKey) or is_p256(public_key):
        return public_key
    raise BadKey("the key is neither Ed25519 nor ECDSA on P-256")


def is_p256(public_key: object) -> TypeGuard[ec.EllipticCurvePublicKey]:
    return isinstance(public_key, ec.EllipticCurvePublicKey) and isinstance(public_key.curve, ec.SECP256R1)


def _algorithm(public_key: PublicKey) -> str:
    return "ed25519" if isinstance(public_key, Ed25519PublicKey) else "p256"


def _signed_bytes(context: str, signer_key_id: str, payload: bytes) -> bytes:
    return b"\0".join((context.encode(), signer_key_id.encode(), payload))


class Signer(ABC):
    """Signs the contexts of one class of keys."""

    key_class: ClassVar[KeyClass]

    def __init__(self, public_key: PublicKey) -> None:
        self.public_key = public_key
        self.key_id = key_id(public_key)

    def sign(self, context: Context, payload: bytes) -> Envelope:
        """Return the signed payload. Raises ValueError for a context that is not this class's."""
        if CLASS_OF[context] is not self.key_class:
            raise ValueError(f"a key of class {self.key_class} does not sign {context}")
        signature = self._sign(_signed_bytes(context, self.key_id, payload))
        return Envelope(context=context, key_id=self.key_id, payload=payload, signature=signature)

    @abstractmethod
    def _sign(self, message: bytes) -> bytes: ...


class _Ed25519Signer(Signer):
    def __init__(self, private_key: Ed25519PrivateKey) -> None:
        super().__init__(private_key.public_key())
        self._private_key = private_key

    def _sign(self, message: bytes) -> bytes:
        return self._private_key.sign(message)


class IntentSigner(_Ed25519Signer):
    """Signs specs and commands, in api and workers."""

    key_class = KeyClass.INTENT


class JoinSigner(_Ed25519Signer):
    """Signs join answers and the list of intent keys, in api alone."""

    key_class = KeyClass.JOIN


class NodeSigner(Signer):
    """Signs what the node has done. The key may be any P-256 key with the interface, one in a TPM too."""

    key_class = KeyClass.NODE

    def __init__(self, private_key: ec.EllipticCurvePrivateKey) -> None:
        public_key = private_key.public_key()
        if not is_p256(public_key):
            raise ValueError("a node key is on P-256")
        super().__init__(public_key)
        self._private_key = private_key

    def _sign(self, message: bytes) -> bytes:
        r, s = decode_dss_signature(self._private_key.sign(message, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(P256_NUMBER_BYTES, "big") + s.to_bytes(P256_NUMBER_BYTES, "big")


class Verifier:
    """The public keys that are believed, each for its own class of statements."""

    def __init__(self, keys: Mapping[KeyClass, Iterable[PublicKey]]) -> None:
        """Raises ValueError for a key whose algorithm is not that of its class."""
        self._keys: dict[tuple[KeyClass, str], PublicKey] = {}
        for key_class, public_keys in keys.items():
            for public_key in public_keys:
                if is_p256(public_key) is not (key_class is KeyClass.NODE):
                    raise ValueError(f"an {_algorithm(public_key)} key is not a key of class {key_class}")
                self._keys[key_class, key_id(public_key)] = public_key

    def verify(self, envelope: Envelope, context: Context) -> bytes:
        """Return the payload if a key of the context's class signed it as that context. Raises BadSignature."""
        if envelope.context != context:
            raise BadSignature("wrong_context", f"signed as {envelope.context!r}, expected {context}")
        public_key = self._keys.get((CLASS_OF[context], envelope.key_id))
        if public_key is None:
            raise BadSignature("unknown_key", repr(envelope.key_id))
        if len(envelope.signature) != SIGNATURE_BYTES:
            raise BadSignature("malformed", f"a signature has {SIGNATURE_BYTES} bytes")
        message = _signed_bytes(envelope.context, envelope.key_id, envelope.payload)
        try:
            _verify_signature(public_key, envelope.signature, message)
        except InvalidSignature as exc:
            raise BadSignature("bad_signature") from exc
        return envelope.payload

    def open(self, data: bytes, context: Context) -> bytes:
        """Decode and verify in one step: the payload of an encoded envelope. Raises BadSignature."""
        return self.verify(decode_envelope(data), context)


def _verify_signature(public_key: PublicKey, signature: bytes, message: bytes) -> None:
    if isinstance(public_key, Ed25519PublicKey):
        public_key.verify(signature, message)
        return
    r, s = (int.from_bytes(half, "big") for half in (signature[:P256_NUMBER_BYTES], signature[P256_NUMBER_BYTES:]))
    public_key.verify(encode_dss_signature(r, s), message, ec.ECDSA(hashes.SHA256()))


# --- the list of intent keys -----------------------------------------------------------------


class IntentKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key whose specs and commands are obeyed, for ever or until `accepted_until`. `public_key` is SPKI, DER."""

    key_id: str
    public_key: bytes
    accepted_until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


class IntentKeySet(msgspec.Struct, frozen=True, kw_only=True):
    """All intent keys. A larger `sequence` is newer; an agent never goes back to a smaller one."""

    sequence: int
    keys: Annotated[list[IntentKey], msgspec.Meta(min_length=1, max_length=INTENT_KEYS_MAX)]

    def public_keys(self, now: datetime) -> list[PublicKey]:
        """Return the keys accepted at `now`. Raises BadKey if one does not decode, is of another kind or misnamed."""
        accepted: list[PublicKey] = []
        for entry in self.keys:
            public_key = decode_public_key(entry.public_key)
            if not isinstance(public_key, Ed25519PublicKey) or key_id(public_key) != entry.key_id:
                raise BadKey(f"{entry.key_id} is not an intent key")
            if entry.accepted_until is None or now < entry.accepted_until:
                accepted.append(public_key)
        return accepted

    def verifier(self, now: datetime) -> Verifier:
        """Return a verifier of specs and commands as of `now`. Raises BadKey."""
        return Verifier({KeyClass.INTENT: self.public_keys(now)})
