"""TLS files of the public API: what cannot be used is named with its key and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from controlplane.config import ApiSection, Config, ConfigError, DatabaseSection
from controlplane.server import check_tls
from tests.support.certificates import issue_server_certificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def config(certificate: Path, key: Path) -> Config:
    api = ApiSection(tls_certificate=str(certificate), tls_key=str(key))
    return Config(database=DatabaseSection(dsn="dbname=x"), keys_dir="/k", api=api)


def write_key(path: Path, encryption: serialization.KeySerializationEncryption) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))


def encrypt(path: Path) -> None:
    write_key(path, serialization.BestAvailableEncryption(b"secret"))


def replace(path: Path) -> None:
    write_key(path, serialization.NoEncryption())


def remove(path: Path) -> None:
    path.unlink()


def block(path: Path) -> None:
    path.unlink()
    path.mkdir()


def garble(path: Path) -> None:
    path.write_bytes(b"-----BEGIN noise\x00")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    issued = trustme.CA().issue_cert("localhost")
    certificate, key = tmp_path / "api.crt", tmp_path / "api.key"
    issued.cert_chain_pems[0].write_to_path(str(certificate))
    issued.private_key_pem.write_to_path(str(key))
    return certificate, key


def test_files_that_fit_are_taken(files: tuple[Path, Path], tmp_path: Path) -> None:
    tls = check_tls(config(*files))
    assert tls is not None
    assert (tls.certificate, tls.key) == files
    both = issue_server_certificate(tmp_path, "localhost").path
    assert check_tls(config(both, both)) is not None


@pytest.mark.parametrize(
    ("which", "spoil", "says"),
    [
        ("certificate", remove, "No such file or directory; correct the path"),
        ("certificate", block, "Is a directory; correct the path"),
        ("certificate", garble, "holds no certificate; give the chain in PEM"),
        ("key", remove, "No such file or directory; correct the path"),
        ("key", block, "Is a directory; correct the path"),
        ("key", garble, "holds no private key; give it in PEM"),
        ("key", encrypt, "is encrypted; give the key without a passphrase"),
        ("key", replace, "give the key that the certificate was made for"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    files: tuple[Path, Path], which: str, spoil: Callable[[Path], None], says: str
) -> None:
    path = files[which == "key"]
    spoil(path)
    with pytest.raises(ConfigError) as refused:
        check_tls(config(*files))
    assert str(refused.value).startswith(f"api.tls_{which}: {path}")
    assert says in str(refused.value)
