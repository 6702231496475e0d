"""A token reaches the JoinService and nobody else; an answer comes from the pinned key or not at all."""

from __future__ import annotations

import base64
from datetime import UTC, datetime

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from joserfc import jwe
from joserfc.jwk import ECKey

from controlplane.fleet.pki import issue_node_certificate, make_authority
from shared import joining
from shared.identity import (
    CertificateRequest,
    IdentityError,
    NodeIdentity,
    NodeName,
    encode_chain,
    load_chain,
    make_csr,
    make_key,
    parse_csr_pem,
)
from shared.joining import (
    BODY_BYTES_MAX,
    REFUSED_BODY,
    BadAnswer,
    BadBody,
    BadPin,
    BadSeal,
    BadToken,
    HostFacts,
    JoinAnswer,
    JoinRequest,
    JoinToken,
    PinMismatch,
    RenewRequest,
    TrustBundle,
    make_join_request,
    make_renew_request,
    make_token,
    open_bundle,
    open_sealed,
    parse_token,
    pin,
    read_join_request,
    read_renew_request,
    seal_token,
    secret_matches,
    sign_answer,
    verify_answer,
)
from shared.signing import (
    BadSignature,
    Context,
    IntentKey,
    IntentKeySet,
    IntentSigner,
    JoinSigner,
    NodeSigner,
    encode_public_key,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODE_ID = "node_01jd000000000000000000000a"
SEALING_KEY = ec.derive_private_key(0xFEEDFACE, ec.SECP256R1())
JOIN_SIGNER = JoinSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
NODE_CA = make_authority("node CA", "golden.test", NOW)
HOST = HostFacts(
    agent_version="0.1.0", hostname="gpu-17", machine_id="0" * 32, boot_id="b" * 36, gpu_uuids=["GPU-1", "GPU-2"]
)

# What the first version wrote. Tokens and pins are on paper and in scripts; both ends may be a release apart.
GOLDEN_CSR = """-----BEGIN CERTIFICATE REQUEST-----
MIG6MGICAQAwADBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJ+thK6uCLvvfwEA
FNgs72oJ3isM+HG1zgxPHROlmlk0B8tFdp8QcOLCRw/lsb/mMTPAsM3GTqS/N5Go
7CoH/U+gADAKBggqhkjOPQQDAgNIADBFAiEA8sdchl18cDT5oaiqxqrDtof6tKRA
VBbbB2pbCI70RbkCIEk2hSVakYuBE79JOyDvpXWn8V6C8udhzuIgL1+xpT5D
-----END CERTIFICATE REQUEST-----
"""
GOLDEN_SEALED = (
    "eyJhbGciOiJFQ0RILUVTIiwiZW5jIjoiQTI1NkdDTSIsImNzcl9zaGEyNTYiOiJjNTA5OWY5MjU2ZmJlOTk5MmZhMmNjMDE2YWNlYTk2NWY3ZmM1"
    "OWYzOWQ3Y2I5YTZjNGE5YmU5MDIyZWQ3MzU4IiwiZXBrIjp7ImNydiI6IlAtMjU2IiwieCI6Ik9FWnBhMlBXNjZMYU8ybWN4WEtzSUE2RFdneHBz"
    "Y3RqYUw3b1JRZ25pNWciLCJ5IjoiMmNDRjR5dW9NbUNySEY3WDNUV3N4ZTVBZ0ZYTHNqM0tfY3BOWXFoT21DTSIsImt0eSI6IkVDIn19..QvO3dCw"
    "X7-WAg--p.xuihMNSKq43hrJKkE_Oj36TfJzCF9nc6_ZCdeGhahvmp8cROTDGzHPQsFWB-jEvXyJ3Q-SZhwDQ8Gf_K3555I4F1zqpm4v0bmOxA.vX"
    "CvNDNTzP5avWkKg436Sg"
)
GOLDEN_TOKEN = "bcjt_01jd0000000000000000000000.AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"
GOLDEN_BUNDLE = (
    rb'{"v":1,"trust_domain":"golden.test","url":"https://gw.golden.test:8443","serving_ca":"-----BEGIN CERTIFICATE---'
    rb"--\nMIIBwzCCAWqgAwIBAgIUCfRgTwdr951T6pjpwlR+ZnfFNL8wCgYIKoZIzj0EAwIw\nLjEXMBUGA1UECgwOQmV0dGVyIENvbXB1dGUxEzARBgNV"
    rb"BAMMCnNlcnZpbmcgQ0Ew\nHhcNMjUxMjMxMjM1NTAwWhcNNDUxMjI3MDAwMDAwWjAuMRcwFQYDVQQKDA5CZXR0\nZXIgQ29tcHV0ZTETMBEGA1UE"
    rb"AwwKc2VydmluZyBDQTBZMBMGByqGSM49AgEGCCqG\nSM49AwEHA0IABB7jOSxgHvPNnVI7ZszPkUh8kzCr0MjBLIFHgiYlRSEOrOabg4vR\nVYfb6v"
    rb"vzvNnZejyM8ji3DzXw8AJc32yfXfCjZjBkMBIGA1UdEwEB/wQIMAYBAf8C\nAQAwDgYDVR0PAQH/BAQDAgEGMB8GA1UdEQQYMBaGFHNwaWZmZTovL"
    rb"2dvbGRlbi50\nZXN0MB0GA1UdDgQWBBQLh26/bAwRf9qgP0RBRSM8Er7aVTAKBggqhkjOPQQDAgNH\nADBEAiAay5FkE8NFoh9yV4ySB6eAK3PiGW"
    rb"CeYvfO0ZK0BohuPAIgcXoG8I4vKdLr\nXAwZtW9Vij40aGmn+Pj+MbPVsEljr98=\n-----END CERTIFICATE-----\n"
    rb'","sealing_key":"MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEJXDCnjE4bYDUfqVs8TcFE9Tj7cnrzctXie5m7/ccbPy92sBofWkQ1p9SBsUi'
    rb'LfeIDgKp5VEkQXsgdnUK60mtfw==","join_signing_key":"MCowBQYDK2VwAyEAO2onvM62pC1io6jQKm8Nc2UyFXcd4kOmOsBIoYtZ2ik="}'
)
GOLDEN_PIN = "sha256:fd381f09ae008a53569d18048c7f1fcac0f7b290d1b43b9a4bb4f47ba86c22c4"
BUNDLE = open_bundle(GOLDEN_BUNDLE, GOLDEN_PIN)


# --- tokens


def test_a_token_is_written_and_read() -> None:
    token = make_token()
    assert parse_token(f"  {token.text}\n") == token
    assert len(token.secret) == 32
    assert secret_matches(token.secret, token.hash)
    assert not secret_matches(make_token().secret, token.hash)


def test_the_first_versions_token_is_read() -> None:
    token = JoinToken("bcjt_01jd0000000000000000000000", bytes(range(32)))
    assert parse_token(GOLDEN_TOKEN) == token
    assert token.text == GOLDEN_TOKEN
    assert token.hash.hex() == "630dcd2966c4336691125448bbb25b4ff412a49c732db2c8abc1b8581bd710dd"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("hello", "does not start with bcjt_"),
        ("bcjt_short.AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", "before the dot"),
        (GOLDEN_TOKEN.replace("01jd", "01JD"), "before the dot"),
        (GOLDEN_TOKEN.partition(".")[0], "missing"),
        (GOLDEN_TOKEN[:-1], "cut short"),
        (GOLDEN_TOKEN + "A", "cut short"),
        (GOLDEN_TOKEN[:-1] + "9", "damaged"),  # the same bytes in another spelling
        (GOLDEN_TOKEN[:-2] + "/8", "damaged"),
        (GOLDEN_TOKEN[:-1] + "\u00e9", "damaged"),
    ],
)
def test_a_damaged_token_says_what_is_wrong_and_not_what_it_is(text: str, hint: str) -> None:
    with pytest.raises(BadToken, match=hint) as caught:
        parse_token(text)
    assert "AAECAwQF" not in str(caught.value)


def test_a_token_does_not_show_its_secret() -> None:
    token = JoinToken("bcjt_01jd0000000000000000000000", b"visible!" * 4)
    assert "visible" not in repr(token)
    assert token.text.partition(".")[2] not in repr(token)


# --- the seal


def test_a_sealed_token_is_opened_beside_its_request() -> None:
    token, csr = make_token(), make_csr(make_key())
    sealed = seal_token(token, csr, BUNDLE)
    assert open_sealed(sealed, csr, SEALING_KEY) == token
    assert base64.urlsafe_b64encode(token.secret).decode() not in sealed


def test_the_first_versions_seal_is_opened() -> None:
    assert open_sealed(GOLDEN_SEALED, parse_csr_pem(GOLDEN_CSR), SEALING_KEY) == parse_token(GOLDEN_TOKEN)


def reason_of_seal(sealed: str, csr: CertificateRequest, key: ec.EllipticCurvePrivateKey = SEALING_KEY) -> str:
    with pytest.raises((BadSeal, BadToken)) as caught:
        open_sealed(sealed, csr, key)
    return caught.value.reason


def test_a_seal_for_another_request_is_refused() -> None:
    sealed = seal_token(make_token(), make_csr(make_key()), BUNDLE)
    assert reason_of_seal(sealed, make_csr(make_key())) == "seal_other_csr"


def test_a_relay_cannot_rename_the_request_in_the_header() -> None:
    mine, theirs = make_csr(make_key()), make_csr(make_key())
    header, *rest = seal_token(make_token(), theirs, BUNDLE).split(".")
    text = base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)).decode().replace(theirs.sha256, mine.sha256)
    renamed = base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()
    assert reason_of_seal(".".join([renamed, *rest]), mine) == "seal_unopened"


def test_a_seal_to_another_key_is_refused() -> None:
    csr = make_csr(make_key())
    assert reason_of_seal(seal_token(make_token(), csr, BUNDLE), csr, make_key()) == "seal_unopened"


@given(position=st.integers(0, len(GOLDEN_SEALED) - 1), character=st.characters(max_codepoint=0x17F))
def test_a_changed_seal_is_refused(position: int, character: str) -> None:
    changed = GOLDEN_SEALED[:position] + character + GOLDEN_SEALED[position + 1 :]
    csr = parse_csr_pem(GOLDEN_CSR)
    try:
        token = open_sealed(changed, csr, SEALING_KEY)
    except (BadSeal, BadToken):
        return
    # base64 has spare bits in a segment's last character: the same bytes in another spelling
    assert token == parse_token(GOLDEN_TOKEN)


@given(st.text(max_size=300))
def test_noise_is_no_seal(noise: str) -> None:
    reason_of_seal(noise, parse_csr_pem(GOLDEN_CSR))


_number = st.binary(min_size=0, max_size=40).map(lambda number: base64.urlsafe_b64encode(number).rstrip(b"=").decode())


@given(x=st.one_of(_number, st.text(max_size=10)), y=_number, rest=st.text("AZaz09-_.", max_size=60))
def test_a_strange_ephemeral_key_is_refused(x: str, y: str, rest: str) -> None:
    csr = parse_csr_pem(GOLDEN_CSR)
    epk = {"kty": "EC", "crv": "P-256", "x": x, "y": y}
    header = msgspec.json.encode({"alg": "ECDH-ES", "enc": "A256GCM", "epk": epk, "csr_sha256": csr.sha256})
    sealed = f"{base64.urlsafe_b64encode(header).rstrip(b'=').decode()}.{rest}"
    assert reason_of_seal(sealed, csr) == "seal_unopened"


@pytest.mark.parametrize(
    "change",
    [
        {"alg": "ECDH-ES+A256KW"},
        {"alg": "dir"},
        {"enc": "A128GCM"},
        {"enc": "A256CBC-HS512"},
        {"zip": "DEF"},
        {"crit": ["x"], "x": 1},
        {"apu": "QQ"},
        {"kid": "a"},
    ],
)
def test_only_one_algorithm_and_one_header_is_opened(change: dict[str, object]) -> None:
    csr = make_csr(make_key())
    header = {"alg": "ECDH-ES", "enc": "A256GCM", "csr_sha256": csr.sha256, **change}
    registry = jwe.JWERegistry(
        algorithms=["ECDH-ES", "ECDH-ES+A256KW", "dir", "A128GCM", "A256GCM", "A256CBC-HS512", "DEF"],
        strict_check_header=False,
    )
    key = ECKey.import_key(SEALING_KEY.public_key())
    if change.get("alg") == "dir" or "crit" in change:
        encoded = base64.urlsafe_b64encode(msgspec.json.encode(header)).rstrip(b"=").decode()
        sealed = f"{encoded}..AAAA.AAAA.AAAA"
    else:
        sealed = jwe.encrypt_compact(header, make_token().text.encode(), key, registry=registry)
    assert reason_of_seal(sealed, csr) == "seal_malformed"


def test_a_sealed_thing_that_is_no_token_is_refused() -> None:
    csr = make_csr(make_key())
    header = {"alg": "ECDH-ES", "enc": "A256GCM", "csr_sha256": csr.sha256}
    key = ECKey.import_key(SEALING_KEY.public_key())
    for plaintext, reason in ((b"", "token_empty"), (b"\xff", "seal_unopened"), (b"hello", "token_malformed")):
        sealed = jwe.encrypt_compact(header, plaintext, key, registry=joining._seal_registry)
        assert reason_of_seal(sealed, csr) == reason
    assert reason_of_seal("x" * 5000, csr) == "seal_too_large"


# --- bundle and pin


def test_the_bundle_and_its_pin_are_stable() -> None:
    assert pin(GOLDEN_BUNDLE) == GOLDEN_PIN
    assert BUNDLE.bundle.encode() == GOLDEN_BUNDLE
    assert BUNDLE.pin == GOLDEN_PIN
    assert BUNDLE.bundle.url == "https://gw.golden.test:8443"
    assert open_bundle(GOLDEN_BUNDLE, f" {GOLDEN_PIN.upper()}\n").bundle == BUNDLE.bundle


@given(position=st.integers(0, len(GOLDEN_BUNDLE) - 1), bit=st.integers(0, 7))
def test_no_changed_bundle_passes_the_pin(position: int, bit: int) -> None:
    changed = bytearray(GOLDEN_BUNDLE)
    changed[position] ^= 1 << bit
    with pytest.raises(PinMismatch) as caught:
        open_bundle(bytes(changed), GOLDEN_PIN)
    assert caught.value.expected == GOLDEN_PIN
    assert caught.value.actual == pin(bytes(changed))


def test_the_pin_is_checked_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object) -> None:
        pytest.fail("looked into a bundle that was not pinned")

    monkeypatch.setattr(joining, "_decode_json", read)
    monkeypatch.setattr(joining, "decode_public_key", read)
    monkeypatch.setattr(joining.ECKey, "import_key", read)
    with pytest.raises(PinMismatch):
        open_bundle(GOLDEN_BUNDLE, "sha256:" + "0" * 64)


@pytest.mark.parametrize("text", ["", "sha256:", "sha256:" + "g" * 64, "fd381f09", GOLDEN_PIN[7:], GOLDEN_PIN + "0"])
def test_what_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(BadPin, match="sha256:<64"):
        open_bundle(GOLDEN_BUNDLE, text)


@pytest.mark.parametrize(
    "change",
    [
        {"sealing_key": b"noise"},
        {"sealing_key": encode_public_key(JOIN_SIGNER.public_key)},
        {"join_signing_key": encode_public_key(SEALING_KEY.public_key())},
        {"serving_ca": ""},
        {"trust_domain": "Golden Test"},
        {"v": 2},
    ],
)
def test_a_pinned_bundle_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    data = msgspec.json.encode(msgspec.structs.asdict(BUNDLE.bundle) | change)
    with pytest.raises(BadBody):
        open_bundle(data, pin(data))


def test_a_later_versions_extra_field_is_no_obstacle() -> None:
    data = msgspec.json.encode(msgspec.structs.asdict(BUNDLE.bundle) | {"more": 1})
    assert open_bundle(data, pin(data)).bundle == BUNDLE.bundle


# --- requests


def test_a_join_request_carries_everything_and_no_secret() -> None:
    token, csr = make_token(), make_csr(make_key())
    body = make_join_request(token, csr, BUNDLE, HOST)
    assert token.text.partition(".")[2].encode() not in body
    request = read_join_request(body)
    assert request.host == HOST
    read = parse_csr_pem(request.csr)
    assert read.der == csr.der
    assert open_sealed(request.sealed_token, read, SEALING_KEY) == token


@pytest.mark.parametrize(
    "change",
    [
        {"hostname": "h" * 254},
        {"hostname": "two words"},
        {"machine_id": "m" * 129},
        {"boot_id": "b\n"},
        {"agent_version": "v" * 129},
        {"gpu_uuids": ["GPU"] * 65},
        {"gpu_uuids": ["G" * 129]},
        {"gpu_uuids": [1]},
    ],
)
def test_what_a_host_says_is_bounded(change: dict[str, object]) -> None:
    host = msgspec.structs.asdict(HOST) | change
    body = msgspec.json.encode({"v": 1, "csr": GOLDEN_CSR, "sealed_token": GOLDEN_SEALED, "host": host})
    with pytest.raises(BadBody, match="host"):
        read_join_request(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b"[" * 2000, b"x" * (BODY_BYTES_MAX + 1)])
def test_other_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(BadBody):
        read_join_request(body)
    with pytest.raises(BadBody):
        read_renew_request(body)


@given(st.binary(max_size=400))
def test_noise_is_an_ordinary_error(noise: bytes) -> None:
    for read in (read_join_request, read_renew_request):
        with pytest.raises(IdentityError):
            read(noise)


def test_a_refusal_says_nothing() -> None:
    assert msgspec.json.decode(REFUSED_BODY)["error"]["code"] == "JOIN_REFUSED"


# --- answers


def answer_for(csr: CertificateRequest, **changes: object) -> JoinAnswer:
    name = NodeName("golden.test", "fra1", NODE_ID)
    issued = issue_node_certificate(NODE_CA, csr.public_key, name, NOW)
    intent = IntentSigner(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
    key = IntentKey(key_id=intent.key_id, public_key=encode_public_key(intent.public_key))
    answer = JoinAnswer(
        node_id=NODE_ID,
        site="fra1",
        spiffe_id=str(name),
        certificate=issued.chain_pem,
        csr_sha256=csr.sha256,
        intent_keys=IntentKeySet(sequence=1, keys=[key]),
        gateways=["https://gw.golden.test:8443"],
        issued_at=NOW,
    )
    return msgspec.structs.replace(answer, **changes)


def reason_of_answer(body: bytes, csr: CertificateRequest) -> str:
    with pytest.raises(BadAnswer) as caught:
        verify_answer(body, BUNDLE, csr)
    return caught.value.reason


def test_an_answer_is_verified() -> None:
    csr = make_csr(make_key())
    answer = answer_for(csr)
    verified = verify_answer(sign_answer(answer, JOIN_SIGNER), BUNDLE, csr)
    assert verified.answer == answer
    assert verified.name == NodeName("golden.test", "fra1", NODE_ID)
    assert len(verified.chain) == 2
    assert verified.chain[0].public_key() == csr.public_key


def test_an_answer_by_another_key_is_refused() -> None:
    csr = make_csr(make_key())
    other = JoinSigner(Ed25519PrivateKey.generate())
    assert reason_of_answer(sign_answer(answer_for(csr), other), csr) == "answer_signature"


def test_an_answer_signed_as_something_else_is_refused() -> None:
    csr = make_csr(make_key())
    envelope = JOIN_SIGNER.sign(Context.JOIN_ANSWER, msgspec.json.encode(answer_for(csr)))
    envelope = msgspec.structs.replace(envelope, context=Context.INTENT_SPEC)
    assert reason_of_answer(msgspec.json.encode(envelope), csr) == "answer_signature"


def test_an_answer_to_another_request_is_refused() -> None:
    key = make_key()
    first, second = make_csr(key), make_csr(key)
    assert first.sha256 != second.sha256
    assert reason_of_answer(sign_answer(answer_for(first), JOIN_SIGNER), second) == "answer_other_csr"


def test_a_certificate_for_another_key_is_refused() -> None:
    csr, other = make_csr(make_key()), make_csr(make_key())
    answer = answer_for(other, csr_sha256=csr.sha256)
    assert reason_of_answer(sign_answer(answer, JOIN_SIGNER), csr) == "answer_key"


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": "node_01jd000000000000000000000b"},
        {"site": "fra2"},
        {"spiffe_id": f"spiffe://golden.test/site/fra2/node/{NODE_ID}"},
    ],
)
def test_a_certificate_for_another_name_is_refused(change: dict[str, object]) -> None:
    csr = make_csr(make_key())
    assert reason_of_answer(sign_answer(answer_for(csr, **change), JOIN_SIGNER), csr) == "answer_name"


def test_a_certificate_of_another_trust_domain_is_refused() -> None:
    csr = make_csr(make_key())
    name = NodeName("other.test", "fra1", NODE_ID)
    certificate = issue_node_certificate(NODE_CA, csr.public_key, name, NOW).chain_pem
    answer = answer_for(csr, certificate=certificate, spiffe_id=str(name))
    assert reason_of_answer(sign_answer(answer, JOIN_SIGNER), csr) == "answer_name"


def test_a_broken_chain_is_refused() -> None:
    csr = make_csr(make_key())
    leaf = load_chain(answer_for(csr).certificate.encode())[0]
    stranger = make_authority("node CA", "golden.test", NOW).certificate
    answer = answer_for(csr, certificate=encode_chain([leaf, stranger]).decode())
    assert reason_of_answer(sign_answer(answer, JOIN_SIGNER), csr) == "answer_chain"


def test_an_answer_without_sense_is_refused() -> None:
    csr = make_csr(make_key())
    assert reason_of_answer(sign_answer(answer_for(csr, certificate="noise"), JOIN_SIGNER), csr) == "answer_malformed"
    assert reason_of_answer(sign_answer(answer_for(csr, gateways=[]), JOIN_SIGNER), csr) == "answer_malformed"
    assert reason_of_answer(REFUSED_BODY, csr) == "answer_malformed"


# --- renewal


def identity() -> NodeIdentity:
    key = make_key()
    chain = load_chain(answer_for(make_csr(key)).certificate.encode())
    return NodeIdentity(key, chain)


def test_a_renewal_is_proved_by_the_present_key() -> None:
    node, csr = identity(), make_csr(make_key())
    claim = read_renew_request(make_renew_request(node, csr))
    claim.verify(node.key.public_key())
    assert claim.node_id == NODE_ID
    assert claim.serial == format(node.certificate.serial_number, "x")
    assert claim.csr.der == csr.der


def test_a_renewal_by_another_key_is_refused() -> None:
    node, thief = identity(), make_key()
    claim = read_renew_request(make_renew_request(NodeIdentity(thief, node.chain), make_csr(thief)))
    with pytest.raises(BadSignature, match="unknown_key"):
        claim.verify(node.key.public_key())


def test_a_renewals_proof_is_for_one_request_only() -> None:
    node = identity()
    request = msgspec.json.decode(make_renew_request(node, make_csr(make_key())), type=RenewRequest)
    swapped = msgspec.structs.replace(request, csr=make_csr(make_key()).pem)
    with pytest.raises(BadBody) as caught:
        read_renew_request(msgspec.json.encode(swapped))
    assert caught.value.reason == "renewal_other_csr"


def test_another_statement_of_the_node_is_no_renewal() -> None:
    node, csr = identity(), make_csr(make_key())
    request = msgspec.json.decode(make_renew_request(node, csr), type=RenewRequest)
    proof = NodeSigner(node.key).sign(Context.NODE_COMMAND_RESULT, request.proof.payload)
    claim = read_renew_request(msgspec.json.encode(msgspec.structs.replace(request, proof=proof)))
    with pytest.raises(BadSignature, match="wrong_context"):
        claim.verify(node.key.public_key())


def test_a_join_body_is_no_renewal() -> None:
    request = JoinRequest(csr=GOLDEN_CSR, sealed_token=GOLDEN_SEALED, host=HOST)
    with pytest.raises(BadBody):
        read_renew_request(msgspec.json.encode(request))


def test_the_golden_bundle_is_of_the_tests_keys() -> None:
    assert (
        TrustBundle(
            trust_domain="golden.test",
            url="https://gw.golden.test:8443",
            serving_ca=BUNDLE.bundle.serving_ca,
            sealing_key=encode_public_key(SEALING_KEY.public_key()),
            join_signing_key=encode_public_key(JOIN_SIGNER.public_key),
        ).encode()
        == GOLDEN_BUNDLE
    )
