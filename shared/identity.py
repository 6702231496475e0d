"""Who a machine is: its key, its certificate request, its SPIFFE id, its certificate.

A node makes a P-256 key that never leaves it and asks for a certificate with a PKCS#10 request.
The request proves possession of the key and says nothing else: every name in the certificate is
the control plane's decision, so names in a request are ignored rather than checked.

A node's id is the one URI in its certificate, ``spiffe://<trust domain>/site/<site>/node/<id>``;
our own processes have ``spiffe://<trust domain>/service/<service>`` from another CA, so that
neither can pass for the other even if a name were ever issued wrongly.

On disk the key and the chain are one PEM file (`NodeIdentity`): a renewal replaces both in one
rename, and `ssl.SSLContext.load_cert_chain` reads it as it is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from shared.files import read_private, write_atomic
from shared.ids import is_id
from shared.signing import NodeSigner, encode_public_key, is_p256, key_id

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

# A P-256 request is about 250 bytes of DER; a TPM's with attributes stays well under this.
CSR_BYTES_MAX = 4 * 1024
SPIFFE_ID_LENGTH_MAX = 512  # the standard allows 2048; ours are under 200
# Renew when this part of the life is over: eight hours are left of a day's certificate.
RENEW_AFTER_LIFE = 2 / 3
# How long after expiry a node may still renew with its own key: a fleet that was off must come back.
RENEWAL_GRACE = timedelta(days=30)

_TRUST_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,253}[a-z0-9])?\Z")
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")


class IdentityError(Exception):
    """Base of what is wrong with a request, an id or a certificate. `reason` is a stable word for the audit."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class BadCsr(IdentityError):
    """A certificate request that cannot be granted."""


class BadSpiffeId(IdentityError):
    """Not a SPIFFE id of the form that we use."""


class BadCertificate(IdentityError):
    """A certificate that does not say what ours say."""


class BadKeyFile(IdentityError):
    """A key file that holds no P-256 key, or no matching certificate."""


# --- keys ------------------------------------------------------------------------------------


def make_key() -> ec.EllipticCurvePrivateKey:
    """Return a new P-256 key."""
    return ec.generate_private_key(ec.SECP256R1())


def encode_private_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def decode_private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Read the P-256 key in a PEM text. Raises BadKeyFile."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise BadKeyFile("not_a_key", "no readable private key in the file") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not is_p256(key.public_key()):
        raise BadKeyFile("not_p256", "the private key is not on P-256")
    return key


# --- certificate requests --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """A request whose signature and key have been checked."""

    der: bytes
    public_key: ec.EllipticCurvePublicKey

    @property
    def sha256(self) -> str:
        """The hex SHA-256 of the DER: what sealed tokens and answers are bound to."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def key_id(self) -> str:
        return key_id(self.public_key)

    @property
    def pem(self) -> str:
        request = x509.load_der_x509_csr(self.der)
        return request.public_bytes(serialization.Encoding.PEM).decode()


def make_csr(key: ec.EllipticCurvePrivateKey) -> CertificateRequest:
    """Return a request that names nothing but the key."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return CertificateRequest(request.public_bytes(serialization.Encoding.DER), key.public_key())


def parse_csr_pem(pem: str) -> CertificateRequest:
    """Read a request in PEM and check its proof of possession. Raises BadCsr."""
    # PEM is a third longer than DER
    if len(pem) > 2 * CSR_BYTES_MAX:
        raise BadCsr("csr_too_large", f"a certificate request is at most {CSR_BYTES_MAX} bytes")
    try:
        request = x509.load_pem_x509_csr(pem.encode())
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion) as exc:
        raise BadCsr("csr_malformed", "not a PKCS#10 certificate request in PEM") from exc
    return _check_csr(request)


def _check_csr(request: x509.CertificateSigningRequest) -> CertificateRequest:
    der = request.public_bytes(serialization.Encoding.DER)
    if len(der) > CSR_BYTES_MAX:
        raise BadCsr("csr_too_large", f"a certificate request is at most {CSR_BYTES_MAX} bytes")
    try:
        public_key = request.public_key()
        digest = request.signature_hash_algorithm
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise BadCsr("csr_key", "the key of the certificate request is not understood") from exc
    if not is_p256(public_key):
        raise BadCsr("csr_key", "the key of a certificate request is ECDSA on P-256")
    if not isinstance(digest, hashes.SHA256) or not request.is_signature_valid:
        raise BadCsr("csr_signature", "the certificate request is not signed by its own key with SHA-256")
    return CertificateRequest(der, public_key)


# --- SPIFFE ids ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeName:
    """``spiffe://<trust domain>/site/<site>/node/<node id>``."""

    trust_domain: str
    site: str
    node_id: str

    def __post_init__(self) -> None:
        check_trust_domain(self.trust_domain)
        _check_segment(self.site)
        if not is_id(self.node_id, "node"):
            raise BadSpiffeId("spiffe_node", f"{self.node_id!r} is not a node id")

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/site/{self.site}/node/{self.node_id}"


@dataclass(frozen=True, slots=True)
class ServiceName:
    """``spiffe://<trust domain>/service/<service>``: one of our own processes, such as ``gateway`` or ``api``."""

    trust_domain: str
    service: str

    def __post_init__(self) -> None:
        check_trust_domain(self.trust_domain)
        _check_segment(self.service)

    def __str__(self) -> str:
        return f"spiffe://{self.trust_domain}/service/{self.service}"


def check_trust_domain(text: str) -> None:
    """Raise BadSpiffeId unless `text` may be a trust domain."""
    if _TRUST_DOMAIN.match(text) is None:
        raise BadSpiffeId(
            "trust_domain", f"{text!r} is not a trust domain: lower-case letters, digits, '.', '-' and '_', at most 255"
        )


def _check_segment(text: str) -> None:
    if _SEGMENT.match(text) is None:
        raise BadSpiffeId("spiffe_segment", f"{text!r} cannot be part of a SPIFFE id")


def parse_spiffe_id(uri: str) -> NodeName | ServiceName:
    """Read a SPIFFE id of ours. Raises BadSpiffeId."""
    if len(uri) > SPIFFE_ID_LENGTH_MAX or not uri.startswith("spiffe://"):
        raise BadSpiffeId("spiffe_form", "not a SPIFFE id")
    match uri.removeprefix("spiffe://").split("/"):
        case [trust_domain, "site", site, "node", node_id]:
            return NodeName(trust_domain, site, node_id)
        case [trust_domain, "service", service]:
            return ServiceName(trust_domain, service)
        case _:
            raise BadSpiffeId("spiffe_form", f"{uri!r} names neither a node nor a service")


# --- certificates ----------------------------------------------------------------------------


def load_chain(pem: bytes) -> list[x509.Certificate]:
    """Read the certificates of a PEM text, leaf first; at least one. Raises BadCertificate."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as exc:
        raise BadCertificate("certificate_malformed", "no readable certificate") from exc


def encode_chain(chain: list[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in chain)


def certificate_name(certificate: x509.Certificate) -> NodeName | ServiceName:
    """Return the SPIFFE id of a certificate: its one and only URI. Raises BadCertificate, BadSpiffeId."""
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, ValueError) as exc:
        raise BadCertificate("certificate_san", "the certificate has no readable subject alternative name") from exc
    uris = extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise BadCertificate("certificate_san", f"the certificate has {len(uris)} URIs and must have one")
    return parse_spiffe_id(uris[0])


def certificate_key(certificate: x509.Certificate) -> ec.EllipticCurvePublicKey:
    """Return the P-256 key of a certificate. Raises BadCertificate."""
    try:
        public_key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise BadCertificate("certificate_key", "the certificate's key is not understood") from exc
    if not is_p256(public_key):
        raise BadCertificate("certificate_key", "the certificate's key is not on P-256")
    return public_key


def certificate_key_id(certificate: x509.Certificate) -> str:
    """Return the key id that the node's signatures carry. Raises BadCertificate."""
    return key_id(certificate_key(certificate))


def certificate_serial(certificate: x509.Certificate) -> str:
    """Return the serial number in lower-case hex without leading zeros: how it is stored and named everywhere."""
    return format(certificate.serial_number, "x")


def certificate_fingerprint(certificate: x509.Certificate) -> str:
    """Return the hex SHA-256 of the DER."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def renewal_due_at(certificate: x509.Certificate) -> datetime:
    """Return when two thirds of the certificate's life are over."""
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return begin + (end - begin) * RENEW_AFTER_LIFE


# --- the identity on disk --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """A node's key and the chain that names it."""

    key: ec.EllipticCurvePrivateKey
    chain: list[x509.Certificate]

    @property
    def certificate(self) -> x509.Certificate:
        return self.chain[0]

    @property
    def name(self) -> NodeName:
        """Raises BadCertificate, BadSpiffeId."""
        name = certificate_name(self.certificate)
        if not isinstance(name, NodeName):
            raise BadCertificate("certificate_san", "the certificate does not name a node")
        return name

    def signer(self) -> NodeSigner:
        return NodeSigner(self.key)


def save_identity(path: Path, identity: NodeIdentity) -> None:
    """Store key and chain in one file, mode 0600, in one step. Raises OSError."""
    write_atomic(path, encode_private_key(identity.key) + encode_chain(identity.chain))


def load_identity(path: Path) -> NodeIdentity:
    """Read what `save_identity` wrote. Raises UnsafeFile, BadKeyFile, BadCertificate, OSError."""
    pem = read_private(path)
    identity = NodeIdentity(decode_private_key(pem), load_chain(pem))
    if encode_public_key(certificate_key(identity.certificate)) != encode_public_key(identity.key.public_key()):
        raise BadKeyFile("key_mismatch", f"{path}: the key and the certificate do not belong together")
    return identity
