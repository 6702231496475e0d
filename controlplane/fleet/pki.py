"""The certificates that we issue. Pure: keys and a date in, certificates out.

Three self-signed CAs, because each is trusted for one thing only:

* the *node CA* signs node certificates; gateways trust it for client certificates;
* the *serving CA* signs what gateways show to agents; agents pin it in the trust bundle;
* the *service CA* signs what our own processes show one another: the gateway's client
  certificate for the api's join URL, and that URL's server certificate. Were it the node CA, a
  node's certificate would open the door that only gateways may use.

Everything is ECDSA P-256 with SHA-256. Node certificates live a day and are renewed by the
node; their names are decided here and never taken from the request.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shared.identity import (
    certificate_fingerprint,
    certificate_key_id,
    certificate_serial,
    encode_chain,
    encode_private_key,
    make_key,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cryptography.hazmat.primitives.asymmetric import ec

    from shared.identity import NodeName, ServiceName

NODE_CERTIFICATE_LIFETIME = timedelta(hours=24)
# Clocks of servers that were just racked are minutes off; a certificate "from the future" is refused by TLS.
BACKDATE = timedelta(minutes=5)
# Replacing a CA means every pin and every agent, so it outlives the machines.
CA_LIFETIME = timedelta(days=365 * 20)
# Issued anew by any start of the api after two thirds of it.
SERVICE_CERTIFICATE_LIFETIME = timedelta(days=365)

Usage = Literal["client", "server"]
_USAGE = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}


class AuthorityExpired(Exception):
    """The CA's own certificate ends before anything useful could be issued."""


@dataclass(frozen=True, slots=True)
class Authority:
    """A CA: its key and its self-signed certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def encode(self) -> bytes:
        """Return key and certificate in one PEM text."""
        return encode_private_key(self.key) + encode_chain([self.certificate])


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A node's certificate and what the database keeps of it. `chain_pem` is leaf and CA."""

    chain_pem: str
    serial: str
    fingerprint: str
    key_id: str
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate of one of our own processes, with its key."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    def encode(self) -> bytes:
        """Return key and certificate in one PEM text, as `ssl.SSLContext.load_cert_chain` reads it."""
        return encode_private_key(self.key) + encode_chain([self.certificate])


def make_authority(common_name: str, trust_domain: str, now: datetime) -> Authority:
    """Return a new CA, which may sign end certificates only."""
    key = make_key()
    name = _name(common_name)
    certificate = (
        _builder(name, name, key.public_key(), now, CA_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(sign_certificates=True), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")]), critical=False
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(key, certificate)


def issue_node_certificate(
    authority: Authority, public_key: ec.EllipticCurvePublicKey, name: NodeName, now: datetime
) -> IssuedCertificate:
    """Issue a day's client certificate for a node's key.

    `now` is the database's time, since the row that is written beside it is judged by that clock.
    Raises AuthorityExpired.
    """
    san = [x509.UniformResourceIdentifier(str(name))]
    certificate = _issue(
        authority, public_key, name.node_id, san, usage="client", now=now, lifetime=NODE_CERTIFICATE_LIFETIME
    )
    return IssuedCertificate(
        chain_pem=encode_chain([certificate, authority.certificate]).decode(),
        serial=certificate_serial(certificate),
        fingerprint=certificate_fingerprint(certificate),
        key_id=certificate_key_id(certificate),
        not_before=certificate.not_valid_before_utc,
        not_after=certificate.not_valid_after_utc,
    )


def issue_service_certificate(
    authority: Authority, name: ServiceName, usage: Usage, hosts: Sequence[str], now: datetime
) -> Leaf:
    """Issue a certificate with a new key for one of our processes.

    `hosts` are the DNS names and IP addresses of a server; a client has none.
    Raises AuthorityExpired, ValueError for a host that is neither a DNS name nor an address.
    """
    key = make_key()
    san = [x509.UniformResourceIdentifier(str(name)), *(general_name(host) for host in hosts)]
    certificate = _issue(
        authority, key.public_key(), name.service, san, usage=usage, now=now, lifetime=SERVICE_CERTIFICATE_LIFETIME
    )
    return Leaf(key, certificate)


def general_name(host: str) -> x509.GeneralName:
    """Return the subject alternative name for an IP address or a DNS name. Raises ValueError."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host or not host.isascii() or any(character in host for character in "/:@ "):
            raise ValueError(f"{host!r} is neither a DNS name nor an IP address") from None
        return x509.DNSName(host.lower())


def covers_hosts(certificate: x509.Certificate, hosts: Sequence[str]) -> bool:
    """Whether the certificate names exactly these hosts. Raises ValueError as `general_name` does."""
    san = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    named = {name for name in san if not isinstance(name, x509.UniformResourceIdentifier)}
    return named == {general_name(host) for host in hosts}


def _issue(
    authority: Authority,
    public_key: ec.EllipticCurvePublicKey,
    common_name: str,
    san: Sequence[x509.GeneralName],
    *,
    usage: Usage,
    now: datetime,
    lifetime: timedelta,
) -> x509.Certificate:
    # a certificate must not outlive its issuer: verifiers differ in what they make of one that does
    lifetime = min(lifetime, authority.certificate.not_valid_after_utc - now)
    if lifetime <= timedelta(0):
        raise AuthorityExpired(f"the CA ended at {authority.certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    issuer_key_id = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder(_name(common_name), authority.certificate.subject, public_key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(sign_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USAGE[usage]]), critical=False)
        .add_extension(x509.SubjectAlternativeName(san), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key_id), critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    now: datetime,
    lifetime: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATE)
        .not_valid_after(now + lifetime)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Better Compute"),
            x509.NameAttribute(NameOID.COMMON_NAME, common_name),
        ]
    )


def _key_usage(*, sign_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not sign_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=sign_certificates,
        crl_sign=sign_certificates,
        encipher_only=False,
        decipher_only=False,
    )
