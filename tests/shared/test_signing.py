"""Only the right key, for the right kind of statement, over exactly these bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from shared.signing import (
    CLASS_OF,
    ENVELOPE_BYTES_MAX,
    BadKey,
    BadSignature,
    Context,
    Envelope,
    IntentKey,
    IntentKeySet,
    IntentSigner,
    JoinSigner,
    KeyClass,
    NodeSigner,
    Signer,
    Verifier,
    decode_envelope,
    decode_public_key,
    encode_envelope,
    encode_public_key,
    key_id,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
INTENT = IntentSigner(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
JOIN = JoinSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
NODE = NodeSigner(ec.derive_private_key(0x1234567890ABCDEF, ec.SECP256R1()))
SIGNERS: dict[KeyClass, Signer] = {KeyClass.INTENT: INTENT, KeyClass.JOIN: JOIN, KeyClass.NODE: NODE}
EVERYONE = Verifier({key_class: [signer.public_key] for key_class, signer in SIGNERS.items()})

# Envelopes that are stored must stay readable by every later version: these were written by the first.
GOLDEN_INTENT = bytes.fromhex(
    "85a17601a7636f6e74657874bb626574746572636f6d707574652f696e74656e742f737065632f31a66b65795f6964d9286564323535"
    "31392d6130353038333764383530373035383263636637333934623039383838343763a77061796c6f6164c4077061796c6f6164a973"
    "69676e6174757265c440175bca844b2830c95fd05775f068b7484f022589947c4d03c8b62ee9a86937b601ab4cf54c6a0acff2ecc22a"
    "d2df851864d69e2c0d197677951e66b8ca939e07"
)
GOLDEN_NODE = bytes.fromhex(
    "85a17601a7636f6e74657874d925626574746572636f6d707574652f6e6f64652f616c6c6f636174696f6e2d626f756e642f31a66b65"
    "795f6964d925703235362d3261323261393166643734616339623966346232633166623932663131303936a77061796c6f6164c40770"
    "61796c6f6164a97369676e6174757265c440533a97fbc19aa0a78235d760f999602fffcf1e642e6f0fec79e95059fc4d9f9df40a7fa2"
    "c8ff4e874348a367e15696d7e2faaf6db17585a0e808a12a54a18865"
)


def reason_of(verifier: Verifier, data: bytes, context: Context) -> str:
    with pytest.raises(BadSignature) as caught:
        verifier.open(data, context)
    return caught.value.reason


def test_the_first_versions_envelopes_still_verify() -> None:
    assert EVERYONE.open(GOLDEN_INTENT, Context.INTENT_SPEC) == b"payload"
    assert EVERYONE.open(GOLDEN_NODE, Context.NODE_ALLOCATION_BOUND) == b"payload"


def test_ed25519_envelopes_are_made_as_before() -> None:
    assert encode_envelope(INTENT.sign(Context.INTENT_SPEC, b"payload")) == GOLDEN_INTENT


def test_key_ids_are_stable() -> None:
    assert INTENT.key_id == "ed25519-a050837d85070582ccf7394b0988847c"
    assert NODE.key_id == "p256-2a22a91fd74ac9b9f4b2c1fb92f11096"


def test_the_signed_bytes_are_context_key_id_and_payload() -> None:
    envelope = INTENT.sign(Context.INTENT_SPEC, b"pay\0load")
    message = b"bettercompute/intent/spec/1\0" + INTENT.key_id.encode() + b"\0pay\0load"
    Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().verify(envelope.signature, message)


@pytest.mark.parametrize("context", list(Context))
@given(payload=st.binary(max_size=300))
def test_what_was_signed_is_what_is_read(context: Context, payload: bytes) -> None:
    data = encode_envelope(SIGNERS[CLASS_OF[context]].sign(context, payload))
    assert EVERYONE.open(data, context) == payload
    assert encode_envelope(decode_envelope(data)) == data


@pytest.mark.parametrize("golden", [(GOLDEN_INTENT, Context.INTENT_SPEC), (GOLDEN_NODE, Context.NODE_ALLOCATION_BOUND)])
def test_every_bit_counts(golden: tuple[bytes, Context]) -> None:
    data, context = golden
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadSignature):
            EVERYONE.open(bytes(changed), context)


@given(payload=st.binary(max_size=200), context=st.sampled_from(list(Context)), data=st.data())
def test_any_flipped_bit_is_refused(payload: bytes, context: Context, data: st.DataObject) -> None:
    envelope = bytearray(encode_envelope(SIGNERS[CLASS_OF[context]].sign(context, payload)))
    bit = data.draw(st.integers(0, len(envelope) * 8 - 1))
    envelope[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadSignature):
        EVERYONE.open(bytes(envelope), context)


@given(st.binary(max_size=200))
def test_noise_is_malformed(noise: bytes) -> None:
    assert reason_of(EVERYONE, noise, Context.INTENT_SPEC) == "malformed"


@pytest.mark.parametrize("signed", list(Context))
def test_a_statement_is_never_another_kind(signed: Context) -> None:
    data = encode_envelope(SIGNERS[CLASS_OF[signed]].sign(signed, b"payload"))
    for expected in set(Context) - {signed}:
        assert reason_of(EVERYONE, data, expected) == "wrong_context"


@pytest.mark.parametrize("context", list(Context))
def test_a_relabelled_statement_is_refused_too(context: Context) -> None:
    for signed in set(Context) - {context}:
        envelope = SIGNERS[CLASS_OF[signed]].sign(signed, b"payload")
        relabelled = msgspec.structs.replace(envelope, context=context)
        with pytest.raises(BadSignature) as caught:
            EVERYONE.verify(relabelled, context)
        same_class = CLASS_OF[signed] is CLASS_OF[context]
        assert caught.value.reason == ("bad_signature" if same_class else "unknown_key")


@pytest.mark.parametrize("context", list(Context))
def test_signers_refuse_what_is_not_theirs_to_say(context: Context) -> None:
    for key_class, signer in SIGNERS.items():
        if key_class is not CLASS_OF[context]:
            with pytest.raises(ValueError, match="does not sign"):
                signer.sign(context, b"payload")


def forge(private_key: Ed25519PrivateKey, context: Context, payload: bytes) -> Envelope:
    """Sign as any class, as a thief of a key would."""
    name = key_id(private_key.public_key())
    signature = private_key.sign(b"\0".join((context.encode(), name.encode(), payload)))
    return Envelope(context=context, key_id=name, payload=payload, signature=signature)


def test_a_key_of_one_class_is_unknown_in_another() -> None:
    intent_key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    for context in Context:
        envelope = forge(intent_key, context, b"payload")
        if CLASS_OF[context] is KeyClass.INTENT:
            assert EVERYONE.verify(envelope, context) == b"payload"
            continue
        with pytest.raises(BadSignature) as caught:
            EVERYONE.verify(envelope, context)
        assert caught.value.reason == "unknown_key"


def test_another_nodes_key_is_unknown() -> None:
    other = NodeSigner(ec.generate_private_key(ec.SECP256R1()))
    data = encode_envelope(other.sign(Context.NODE_ALLOCATION_BOUND, b"payload"))
    assert reason_of(EVERYONE, data, Context.NODE_ALLOCATION_BOUND) == "unknown_key"


def test_a_claimed_key_id_does_not_help() -> None:
    other = NodeSigner(ec.generate_private_key(ec.SECP256R1()))
    envelope = other.sign(Context.NODE_ALLOCATION_BOUND, b"payload")
    claimed = encode_envelope(msgspec.structs.replace(envelope, key_id=NODE.key_id))
    assert reason_of(EVERYONE, claimed, Context.NODE_ALLOCATION_BOUND) == "bad_signature"


@pytest.mark.parametrize("signature", [b"", b"\0" * 63, b"\0" * 65])
def test_a_signature_of_another_length_is_malformed(signature: bytes) -> None:
    envelope = msgspec.structs.replace(NODE.sign(Context.NODE_RENEWAL, b"x"), signature=signature)
    assert reason_of(EVERYONE, encode_envelope(envelope), Context.NODE_RENEWAL) == "malformed"


@pytest.mark.parametrize("signature", [b"\0" * 64, b"\xff" * 64])
def test_numbers_outside_the_curve_are_a_bad_signature(signature: bytes) -> None:
    envelope = msgspec.structs.replace(NODE.sign(Context.NODE_RENEWAL, b"x"), signature=signature)
    assert reason_of(EVERYONE, encode_envelope(envelope), Context.NODE_RENEWAL) == "bad_signature"


def test_a_second_encoding_of_an_envelope_is_malformed() -> None:
    envelope = INTENT.sign(Context.INTENT_SPEC, b"payload")
    members = msgspec.structs.asdict(envelope)
    reordered = msgspec.msgpack.encode(dict(reversed(members.items())))
    assert msgspec.msgpack.decode(reordered, type=Envelope) == envelope
    assert reason_of(EVERYONE, reordered, Context.INTENT_SPEC) == "malformed"
    assert reason_of(EVERYONE, msgspec.msgpack.encode(members | {"more": 1}), Context.INTENT_SPEC) == "malformed"


def test_an_envelope_of_another_version_is_malformed() -> None:
    members = msgspec.structs.asdict(INTENT.sign(Context.INTENT_SPEC, b"payload")) | {"v": 2}
    assert reason_of(EVERYONE, msgspec.msgpack.encode(members), Context.INTENT_SPEC) == "malformed"


def test_an_envelope_has_a_largest_size() -> None:
    data = encode_envelope(INTENT.sign(Context.INTENT_SPEC, bytes(ENVELOPE_BYTES_MAX)))
    assert reason_of(EVERYONE, data, Context.INTENT_SPEC) == "malformed"


def test_a_verifier_refuses_keys_of_the_wrong_algorithm() -> None:
    with pytest.raises(ValueError, match="not a key of class node"):
        Verifier({KeyClass.NODE: [INTENT.public_key]})
    with pytest.raises(ValueError, match="not a key of class intent"):
        Verifier({KeyClass.INTENT: [NODE.public_key]})


def test_a_node_signer_refuses_another_curve() -> None:
    with pytest.raises(ValueError, match="P-256"):
        NodeSigner(ec.generate_private_key(ec.SECP384R1()))


def test_public_keys_survive_encoding() -> None:
    for signer in SIGNERS.values():
        assert decode_public_key(encode_public_key(signer.public_key)) == signer.public_key


def test_other_public_keys_are_refused() -> None:
    for foreign in (ec.generate_private_key(ec.SECP384R1()), rsa.generate_private_key(65537, 2048)):
        data = foreign.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(BadKey, match="neither"):
            decode_public_key(data)
    with pytest.raises(BadKey):
        decode_public_key(b"noise")


# --- the list of intent keys


def intent_key(signer: Signer, until: datetime | None = None) -> IntentKey:
    return IntentKey(key_id=signer.key_id, public_key=encode_public_key(signer.public_key), accepted_until=until)


def test_keys_are_accepted_until_their_time() -> None:
    old, new = IntentSigner(Ed25519PrivateKey.generate()), IntentSigner(Ed25519PrivateKey.generate())
    until = NOW + timedelta(days=30)
    key_set = IntentKeySet(sequence=2, keys=[intent_key(old, until), intent_key(new)])
    envelope = old.sign(Context.INTENT_COMMAND, b"go")
    assert key_set.verifier(until - timedelta(seconds=1)).verify(envelope, Context.INTENT_COMMAND) == b"go"
    with pytest.raises(BadSignature, match="unknown_key"):
        key_set.verifier(until).verify(envelope, Context.INTENT_COMMAND)
    newer = new.sign(Context.INTENT_COMMAND, b"go")
    assert key_set.verifier(until).verify(newer, Context.INTENT_COMMAND) == b"go"


def test_a_misnamed_or_foreign_key_spoils_the_list() -> None:
    misnamed = msgspec.structs.replace(intent_key(INTENT), key_id=JOIN.key_id)
    for entry in (misnamed, intent_key(NODE)):
        with pytest.raises(BadKey):
            IntentKeySet(sequence=1, keys=[entry]).verifier(NOW)
