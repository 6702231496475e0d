"""Certificates for tests of TLS: a server's from trustme, a node's with a SPIFFE id from a CA of its own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path


class NodeCa:
    """Issues client certificates that name whatever URIs the test wants."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"node CA {x509.random_serial_number()}")])
        self._certificate = (
            self._builder(self._key.public_key(), self._name, timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, key: ec.EllipticCurvePublicKey, name: x509.Name, life: timedelta) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=2))
            .not_valid_after(now + life)
        )

    def issue(self, path: Path, *uris: str, life: timedelta = timedelta(hours=1)) -> Path:
        """Write a key and its certificate to `path`; a negative life has ended."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
        certificate = (
            self._builder(key.public_key(), x509.Name([]), life)
            .add_extension(names, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        return path


@dataclass(frozen=True)
class ServerCertificate:
    """A server's chain and key in one file, and the CA that clients trust."""

    path: Path
    ca_pem: str


def issue_server_certificate(directory: Path, *names: str) -> ServerCertificate:
    ca = trustme.CA()
    certificate = ca.issue_cert(*names)
    path = directory / "server.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(path))
    return ServerCertificate(path, ca.cert_pem.bytes().decode())
