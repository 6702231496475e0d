"""Certificates say what they should, and OpenSSL agrees about who may talk to whom."""

from __future__ import annotations

import ssl
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from controlplane.fleet.pki import (
    Authority,
    AuthorityExpired,
    IssuedCertificate,
    Leaf,
    covers_hosts,
    issue_node_certificate,
    issue_service_certificate,
    make_authority,
)
from shared.clocks import SystemClock
from shared.files import write_atomic
from shared.identity import (
    NodeName,
    ServiceName,
    certificate_key_id,
    certificate_name,
    certificate_serial,
    encode_chain,
    encode_private_key,
    load_chain,
    make_key,
    renewal_due_at,
)

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec

NOW = SystemClock().now()  # OpenSSL judges dates by the machine's clock
NODE = NodeName("td.test", "fra1", "node_01jd000000000000000000000a")
GATEWAY = ServiceName("td.test", "gateway")
NODE_CA = make_authority("node CA", "td.test", NOW)
SERVING_CA = make_authority("serving CA", "td.test", NOW)
SERVICE_CA = make_authority("service CA", "td.test", NOW)


def issue_node() -> tuple[ec.EllipticCurvePrivateKey, IssuedCertificate]:
    key = make_key()
    return key, issue_node_certificate(NODE_CA, key.public_key(), NODE, NOW)


# --- what certificates say


def test_a_node_certificate_lives_a_day() -> None:
    key, issued = issue_node()
    leaf, ca = load_chain(issued.chain_pem.encode())
    whole = NOW.replace(microsecond=0)
    assert leaf.not_valid_after_utc == whole + timedelta(hours=24)
    assert leaf.not_valid_before_utc == whole - timedelta(minutes=5)
    assert timedelta(hours=7) < leaf.not_valid_after_utc - renewal_due_at(leaf) < timedelta(hours=9)
    assert ca == NODE_CA.certificate
    assert leaf.public_key() == key.public_key()


def test_what_the_database_keeps_is_the_certificates() -> None:
    _, issued = issue_node()
    leaf = load_chain(issued.chain_pem.encode())[0]
    assert issued.serial == certificate_serial(leaf)
    assert issued.key_id == certificate_key_id(leaf)
    assert (issued.not_before, issued.not_after) == (leaf.not_valid_before_utc, leaf.not_valid_after_utc)
    assert len(issued.fingerprint) == 64
    assert issue_node()[1].serial != issued.serial


def test_a_node_certificate_is_for_clients_and_nothing_else() -> None:
    leaf = load_chain(issue_node()[1].chain_pem.encode())[0]
    assert certificate_name(leaf) == NODE
    extensions = leaf.extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    key_usage = extensions.get_extension_for_class(x509.KeyUsage)
    assert key_usage.critical
    assert key_usage.value.digital_signature
    assert not key_usage.value.key_cert_sign


def test_a_ca_signs_no_further_ca() -> None:
    constraints = NODE_CA.certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    assert constraints.critical
    assert (constraints.value.ca, constraints.value.path_length) == (True, 0)


def test_a_certificate_does_not_outlive_its_ca() -> None:
    end = NODE_CA.certificate.not_valid_after_utc
    key = make_key().public_key()
    issued = issue_node_certificate(NODE_CA, key, NODE, end - timedelta(hours=1))
    assert issued.not_after == end
    with pytest.raises(AuthorityExpired):
        issue_node_certificate(NODE_CA, key, NODE, end)


def test_hosts_are_names_or_addresses() -> None:
    leaf = issue_service_certificate(SERVING_CA, GATEWAY, "server", ("GW.test", "10.0.0.1", "::1"), NOW)
    san = leaf.certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert san.get_values_for_type(x509.DNSName) == ["gw.test"]
    assert [str(address) for address in san.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "::1"]
    assert certificate_name(leaf.certificate) == GATEWAY
    assert covers_hosts(leaf.certificate, ("::1", "gw.test", "10.0.0.1"))
    assert not covers_hosts(leaf.certificate, ("gw.test", "10.0.0.1"))


@pytest.mark.parametrize("host", ["", "https://gw.test", "gw.test:8443", "gw test", "gw.tést"])
def test_other_hosts_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="neither"):
        issue_service_certificate(SERVING_CA, GATEWAY, "server", (host,), NOW)


# --- who may talk to whom


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> dict[str, object]:
    """Shake hands in memory, pass one byte each way, and return the client certificate that the server saw."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server_end = server.wrap_bio(to_server, to_client, server_side=True)
    client_end = client.wrap_bio(to_client, to_server, server_hostname=host)
    waiting = [client_end.do_handshake, server_end.do_handshake]
    for _ in range(10):
        for step in list(waiting):
            try:
                step()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(step)
    assert not waiting
    # in TLS 1.3 a client learns that its certificate was refused only when it reads
    server_end.write(b"s")
    assert client_end.read(1) == b"s"
    return dict(server_end.getpeercert() or {})


def server_context(directory: Path, leaf: Leaf, client_ca: Authority) -> ssl.SSLContext:
    write_atomic(directory / "server.pem", leaf.encode())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(directory / "server.pem")
    context.load_verify_locations(cadata=encode_chain([client_ca.certificate]).decode())
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(directory: Path, pem: bytes, server_ca: Authority) -> ssl.SSLContext:
    write_atomic(directory / "client.pem", pem)
    context = ssl.create_default_context(cadata=encode_chain([server_ca.certificate]).decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(directory / "client.pem")
    return context


@pytest.fixture
def gateway(tmp_path: Path) -> ssl.SSLContext:
    leaf = issue_service_certificate(SERVING_CA, GATEWAY, "server", ("gw.test", "127.0.0.1"), NOW)
    return server_context(tmp_path, leaf, NODE_CA)


@pytest.fixture
def node_pem() -> bytes:
    key, issued = issue_node()
    return encode_private_key(key) + issued.chain_pem.encode()


@pytest.mark.parametrize("host", ["gw.test", "127.0.0.1"])
def test_a_node_and_a_gateway_know_each_other(
    tmp_path: Path, gateway: ssl.SSLContext, node_pem: bytes, host: str
) -> None:
    seen = handshake(gateway, client_context(tmp_path, node_pem, SERVING_CA), host)
    assert seen["subjectAltName"] == (("URI", str(NODE)),)


def test_a_gateway_of_another_ca_is_refused(tmp_path: Path, gateway: ssl.SSLContext, node_pem: bytes) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(gateway, client_context(tmp_path, node_pem, SERVICE_CA), "gw.test")


def test_a_gateway_of_another_name_is_refused(tmp_path: Path, gateway: ssl.SSLContext, node_pem: bytes) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        handshake(gateway, client_context(tmp_path, node_pem, SERVING_CA), "other.test")


def test_a_service_certificate_is_no_nodes(tmp_path: Path, gateway: ssl.SSLContext) -> None:
    service = issue_service_certificate(SERVICE_CA, GATEWAY, "client", (), NOW)
    with pytest.raises(ssl.SSLError):
        handshake(gateway, client_context(tmp_path, service.encode(), SERVING_CA), "gw.test")


def test_a_node_does_not_pass_for_a_gateway_at_the_join_url(tmp_path: Path, node_pem: bytes) -> None:
    leaf = issue_service_certificate(SERVICE_CA, ServiceName("td.test", "api"), "server", ("api.test",), NOW)
    join_url = server_context(tmp_path, leaf, SERVICE_CA)
    service = issue_service_certificate(SERVICE_CA, GATEWAY, "client", (), NOW)
    seen = handshake(join_url, client_context(tmp_path, service.encode(), SERVICE_CA), "api.test")
    assert seen["subjectAltName"] == (("URI", str(GATEWAY)),)
    with pytest.raises(ssl.SSLError):
        handshake(join_url, client_context(tmp_path, node_pem, SERVICE_CA), "api.test")


def test_a_node_cannot_serve(tmp_path: Path, node_pem: bytes) -> None:
    key, issued = issue_node()
    leaf = Leaf(key, load_chain(issued.chain_pem.encode())[0])
    server = server_context(tmp_path, leaf, NODE_CA)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        handshake(server, client_context(tmp_path, node_pem, NODE_CA), "gw.test")


def test_an_expired_node_is_refused(tmp_path: Path, gateway: ssl.SSLContext) -> None:
    key = make_key()
    issued = issue_node_certificate(NODE_CA, key.public_key(), NODE, NOW - timedelta(hours=25))
    pem = encode_private_key(key) + issued.chain_pem.encode()
    with pytest.raises(ssl.SSLError, match="expired"):
        handshake(gateway, client_context(tmp_path, pem, SERVING_CA), "gw.test")
