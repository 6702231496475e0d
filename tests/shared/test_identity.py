"""Requests prove their key, ids have one form, and the identity on disk is whole and private."""

from __future__ import annotations

import base64
import stat
import textwrap
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from shared.files import UnsafeFile, write_atomic
from shared.identity import (
    CSR_BYTES_MAX,
    BadCertificate,
    BadCsr,
    BadKeyFile,
    BadSpiffeId,
    NodeIdentity,
    NodeName,
    ServiceName,
    certificate_key,
    certificate_key_id,
    certificate_name,
    certificate_serial,
    decode_private_key,
    encode_chain,
    encode_private_key,
    load_chain,
    load_identity,
    make_csr,
    make_key,
    parse_csr_pem,
    parse_spiffe_id,
    renewal_due_at,
    save_identity,
)
from shared.ids import new_id
from shared.signing import Context, KeyClass, Verifier, key_id

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NODE_ID = "node_01jd000000000000000000000a"
CSR = make_csr(make_key())


def request_pem(key: CertificateIssuerPrivateKeyTypes, digest: hashes.HashAlgorithm | None, name: str = "") -> str:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, digest)  # type: ignore[arg-type]
    return request.public_bytes(Encoding.PEM).decode()


def certificate(key: ec.EllipticCurvePrivateKey, *uris: str, days: int = 1) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")]))
        .public_key(key.public_key())
        .serial_number(0xABC)
        .not_valid_before(NOW)
        .not_valid_after(NOW + timedelta(days=days))
    )
    if uris:
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=True)
    return builder.sign(key, hashes.SHA256())


# --- requests


def test_a_request_is_read_back() -> None:
    key = make_key()
    made = make_csr(key)
    read = parse_csr_pem(made.pem)
    assert read.der == made.der
    assert read.sha256 == made.sha256
    assert read.public_key == key.public_key()
    assert read.key_id == key_id(key.public_key())


def test_text_around_the_request_is_not_part_of_it() -> None:
    made = make_csr(make_key())
    assert parse_csr_pem(f"a comment\n{made.pem}\nmore\n").sha256 == made.sha256


def test_names_in_a_request_are_ignored() -> None:
    assert parse_csr_pem(request_pem(make_key(), hashes.SHA256(), "spiffe://td/site/x/node/y")).der


@pytest.mark.parametrize(
    ("key", "digest"),
    [
        (ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()),
        (ec.generate_private_key(ec.SECP256K1()), hashes.SHA256()),
        (rsa.generate_private_key(65537, 2048), hashes.SHA256()),
        (ed25519.Ed25519PrivateKey.generate(), None),
    ],
    ids=["p384", "secp256k1", "rsa", "ed25519"],
)
def test_other_keys_are_refused(key: CertificateIssuerPrivateKeyTypes, digest: hashes.HashAlgorithm | None) -> None:
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem(request_pem(key, digest))
    assert caught.value.reason == "csr_key"


def test_another_digest_is_refused() -> None:
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem(request_pem(make_key(), hashes.SHA512()))
    assert caught.value.reason == "csr_signature"


def test_a_request_for_a_key_one_does_not_have_is_refused() -> None:
    mine, theirs = make_csr(make_key()), make_csr(make_key())
    # the same request with another public key of the same length: its signature is mine
    my_point, their_point = (_point(csr.public_key) for csr in (mine, theirs))
    forged = mine.der.replace(my_point, their_point)
    assert forged != mine.der
    request = x509.load_der_x509_csr(forged)
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem(request.public_bytes(Encoding.PEM).decode())
    assert caught.value.reason == "csr_signature"


def _point(public_key: ec.EllipticCurvePublicKey) -> bytes:
    numbers = public_key.public_numbers()
    return numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")


def test_a_large_request_is_refused() -> None:
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem("x" * (2 * CSR_BYTES_MAX + 1))
    assert caught.value.reason == "csr_too_large"
    names = [x509.DNSName(f"host{number}.example.org") for number in range(220)]
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    large = request.sign(make_key(), hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    assert CSR_BYTES_MAX < len(large) <= 2 * CSR_BYTES_MAX
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem(large)
    assert caught.value.reason == "csr_too_large"


def damaged(der: bytes) -> Iterator[bytes]:
    """Every byte with one bit changed, with all of them changed, and with none set."""
    for at, byte in enumerate(der):
        for other in {byte ^ 1 << bit for bit in range(8)} | {byte ^ 0xFF, 0} - {byte}:
            yield der[:at] + bytes([other]) + der[at + 1 :]


def armour(label: str, der: bytes) -> str:
    body = "\n".join(textwrap.wrap(base64.b64encode(der).decode(), 64))
    return f"-----BEGIN {label}-----\n{body}\n-----END {label}-----\n"


def test_a_damaged_request_is_refused_or_for_the_same_key() -> None:
    """Wherever it is damaged: what the library raises for each is not all of one kind.

    How many bits of the signature's last byte are unused may be changed where these are zero.
    """
    made = make_csr(make_key())
    accepted = 0
    for der in damaged(made.der):
        with suppress(BadCsr):
            assert parse_csr_pem(armour("CERTIFICATE REQUEST", der)).public_key == made.public_key
            accepted += 1
    assert accepted <= 7


@given(position=st.integers(0, 1000), bit=st.integers(0, 7))
def test_a_request_with_a_damaged_armour_is_refused_or_the_same(position: int, bit: int) -> None:
    text = bytearray(CSR.pem.encode())
    text[position % len(text)] ^= 1 << bit
    try:
        read = parse_csr_pem(text.decode("latin-1"))
    except BadCsr:
        return
    assert read.sha256 == CSR.sha256  # only what is outside the PEM's body may change


# a serial number that is no longer positive is read, for now, and warned of
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_damaged_certificate_names_nobody_or_somebody_and_is_no_fault_of_the_program() -> None:
    """Whether it is signed is for TLS to find; nothing but these errors may come of reading one."""
    made = certificate(make_key(), f"spiffe://td.example/site/x/node/{NODE_ID}")
    for der in damaged(made.public_bytes(Encoding.DER)):
        with suppress(BadCertificate, BadSpiffeId):
            (read,) = load_chain(armour("CERTIFICATE", der).encode())
            certificate_name(read)
            certificate_key(read)


@pytest.mark.parametrize(
    "text", ["", "noise", "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----"]
)
def test_noise_is_malformed(text: str) -> None:
    with pytest.raises(BadCsr) as caught:
        parse_csr_pem(text)
    assert caught.value.reason == "csr_malformed"


# --- SPIFFE ids


def test_ids_are_written_and_read() -> None:
    node = NodeName("fleet.example.org", "fra1", NODE_ID)
    service = ServiceName("fleet.example.org", "gateway")
    assert str(node) == f"spiffe://fleet.example.org/site/fra1/node/{NODE_ID}"
    assert str(service) == "spiffe://fleet.example.org/service/gateway"
    assert parse_spiffe_id(str(node)) == node
    assert parse_spiffe_id(str(service)) == service


_slug = st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9]", fullmatch=True)


@given(trust_domain=_slug, site=_slug)
def test_any_site_of_any_domain_survives(trust_domain: str, site: str) -> None:
    name = NodeName(trust_domain, site, new_id("node"))
    assert parse_spiffe_id(str(name)) == name


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://td/site/a/node/" + NODE_ID,
        "spiffe://td",
        "spiffe:///site/a/node/" + NODE_ID,
        "spiffe://TD/site/a/node/" + NODE_ID,
        "spiffe://td:443/site/a/node/" + NODE_ID,
        "spiffe://user@td/site/a/node/" + NODE_ID,
        "spiffe://td/site//node/" + NODE_ID,
        "spiffe://td/site/../node/" + NODE_ID,
        "spiffe://td/site/a%2Fb/node/" + NODE_ID,
        "spiffe://td/site/a/node/" + NODE_ID + "/",
        "spiffe://td/site/a/node/" + NODE_ID + "?x=1",
        "spiffe://td/site/a/node/" + NODE_ID + "\n",
        "spiffe://td/site/a/node/gateway",
        "spiffe://td/site/a/pool/" + NODE_ID,
        "spiffe://td/service/a/b",
        "spiffe://td/service/" + "a" * 600,
    ],
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(BadSpiffeId):
        parse_spiffe_id(uri)


# --- certificates


def test_a_certificate_names_its_node() -> None:
    key = make_key()
    cert = certificate(key, f"spiffe://td/site/a/node/{NODE_ID}")
    assert certificate_name(cert) == NodeName("td", "a", NODE_ID)
    assert certificate_key_id(cert) == key_id(key.public_key())
    assert certificate_serial(cert) == "abc"


@pytest.mark.parametrize("uris", [(), (f"spiffe://td/site/a/node/{NODE_ID}", "spiffe://td/service/gateway")])
def test_a_certificate_with_no_or_two_ids_names_nobody(uris: tuple[str, ...]) -> None:
    with pytest.raises(BadCertificate):
        certificate_name(certificate(make_key(), *uris))


def test_renewal_is_due_after_two_thirds() -> None:
    assert renewal_due_at(certificate(make_key(), days=3)) == NOW + timedelta(days=2)


# --- on disk


def test_an_identity_that_was_readable_is_refused(tmp_path: Path) -> None:
    key = make_key()
    path = tmp_path / "identity.pem"
    save_identity(path, NodeIdentity(key, [certificate(key, f"spiffe://td/site/a/node/{NODE_ID}")]))
    path.chmod(0o644)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        load_identity(path)


def test_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    write_atomic(path, b"noise")
    with pytest.raises(BadKeyFile):
        load_identity(path)


def test_a_key_on_another_curve_is_refused() -> None:
    other = ec.generate_private_key(ec.SECP384R1())
    with pytest.raises(BadKeyFile, match="P-256"):
        decode_private_key(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def test_the_identity_survives_storage(tmp_path: Path) -> None:
    key = make_key()
    identity = NodeIdentity(key, [certificate(key, f"spiffe://td/site/a/node/{NODE_ID}")])
    path = tmp_path / "identity.pem"
    save_identity(path, identity)
    loaded = load_identity(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert loaded.name == NodeName("td", "a", NODE_ID)
    assert loaded.chain == identity.chain
    envelope = loaded.signer().sign(Context.NODE_COMMAND_RESULT, b"x")
    assert Verifier({KeyClass.NODE: [key.public_key()]}).verify(envelope, Context.NODE_COMMAND_RESULT) == b"x"


def test_a_key_beside_anothers_certificate_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    pem = encode_private_key(make_key()) + encode_chain([certificate(make_key())])
    write_atomic(path, pem)
    with pytest.raises(BadKeyFile, match="belong together"):
        load_identity(path)
    with pytest.raises(BadCertificate):
        load_chain(b"noise")


def test_a_service_certificate_is_no_node_identity() -> None:
    key = make_key()
    with pytest.raises(BadCertificate, match="node"):
        _ = NodeIdentity(key, [certificate(key, "spiffe://td/service/gateway")]).name
