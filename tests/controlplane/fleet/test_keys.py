"""The keys directory is private, complete, made once, and cut so that a gateway can sign nothing."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509

from controlplane.fleet.keys import (
    PARTS,
    PERMANENT,
    KeysError,
    KeySettings,
    load_gateway_keys,
    load_intent_keys,
    load_or_create_keys,
)
from controlplane.fleet.pki import SERVICE_CERTIFICATE_LIFETIME, covers_hosts
from shared.files import UnsafeFile
from shared.identity import BadSpiffeId, decode_private_key, load_chain, make_csr, make_key
from shared.joining import make_token, open_bundle, open_sealed, seal_token
from shared.signing import Context, KeyClass, Verifier
from tests.support.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DAY_S = 86400
SETTINGS = KeySettings("td.test", "https://gw.test:8443", ("gw.test", "127.0.0.1"), ("api.test",))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture
def keys_dir(tmp_path: Path, clock: ManualClock) -> Path:
    path = tmp_path / "keys"
    load_or_create_keys(path, SETTINGS, clock)
    return path


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# --- creation


def test_everything_is_private(keys_dir: Path) -> None:
    for path in [keys_dir, *keys_dir.rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_second_start_changes_nothing(keys_dir: Path, clock: ManualClock) -> None:
    before = files(keys_dir)
    clock.advance(100 * DAY_S)
    load_or_create_keys(keys_dir, SETTINGS, clock)
    assert files(keys_dir) == before


def test_the_keys_do_what_the_bundle_says(keys_dir: Path, clock: ManualClock) -> None:
    keys = load_or_create_keys(keys_dir, SETTINGS, clock)
    bundle = open_bundle(keys.bundle, keys.pin)
    token, csr = make_token(), make_csr(make_key())
    assert open_sealed(seal_token(token, csr, bundle), csr, keys.sealing_key) == token
    envelope = keys.join_signer.sign(Context.JOIN_ANSWER, b"answer")
    assert bundle.join_verifier.verify(envelope, Context.JOIN_ANSWER) == b"answer"
    serving = load_chain((keys_dir / "gateway/serving.pem").read_bytes())[0]
    serving.verify_directly_issued_by(bundle.serving_ca)
    assert bundle.bundle.url == SETTINGS.url


@pytest.mark.parametrize("name", [".", *PARTS])
def test_a_directory_that_others_may_enter_is_refused(keys_dir: Path, clock: ManualClock, name: str) -> None:
    (keys_dir / name).chmod(0o750)
    with pytest.raises(UnsafeFile, match=f"chmod 700 {(keys_dir / name)}"):
        load_or_create_keys(keys_dir, SETTINGS, clock)


@pytest.mark.parametrize("name", PERMANENT)
def test_a_key_that_others_may_read_is_refused(keys_dir: Path, clock: ManualClock, name: str) -> None:
    (keys_dir / name).chmod(0o640)
    with pytest.raises(UnsafeFile, match=f"chmod 600 {keys_dir / name}"):
        load_or_create_keys(keys_dir, SETTINGS, clock)


@pytest.mark.parametrize("name", PERMANENT)
def test_a_lost_permanent_key_is_not_made_anew(keys_dir: Path, clock: ManualClock, name: str) -> None:
    (keys_dir / name).unlink()
    with pytest.raises(KeysError, match=r"is missing.*restore"):
        load_or_create_keys(keys_dir, SETTINGS, clock)
    assert not (keys_dir / name).exists()


@pytest.mark.parametrize("name", PERMANENT)
def test_a_damaged_key_is_named(keys_dir: Path, clock: ManualClock, name: str) -> None:
    (keys_dir / name).write_bytes(b"noise")
    with pytest.raises(KeysError, match=f"{keys_dir / name} is damaged"):
        load_or_create_keys(keys_dir, SETTINGS, clock)


@pytest.mark.parametrize("name", PERMANENT)
def test_creation_that_was_cut_short_goes_on(tmp_path: Path, clock: ManualClock, name: str) -> None:
    """A crash before this file was written: what exists is kept, the rest is made."""
    path = tmp_path / "keys"
    load_or_create_keys(path, SETTINGS, clock)
    marker = path / "keys.json"
    marker.write_bytes(marker.read_bytes().replace(b'"complete":true', b'"complete":false'))
    (path / name).unlink()
    kept = {other: (path / other).read_bytes() for other in PERMANENT if other != name}
    load_or_create_keys(path, SETTINGS, clock)
    assert {other: (path / other).read_bytes() for other in kept} == kept
    assert b'"complete":true' in marker.read_bytes()


@pytest.mark.parametrize("load", [load_intent_keys, load_gateway_keys])
def test_a_part_that_is_not_there_is_named(tmp_path: Path, load: Callable[[Path], object]) -> None:
    with pytest.raises(KeysError, match="copy this part") as refused:
        load(tmp_path / "nowhere")
    assert refused.value.path == tmp_path / "nowhere"


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KeysError, match="cannot be used: Not a directory") as refused:
        load_or_create_keys(tmp_path / "file" / "keys", SETTINGS, clock)
    assert refused.value.path == tmp_path / "file" / "keys"


def test_keys_without_their_marker_are_half_a_backup(keys_dir: Path, clock: ManualClock) -> None:
    (keys_dir / "keys.json").unlink()
    with pytest.raises(KeysError, match="whole keys directory"):
        load_or_create_keys(keys_dir, SETTINGS, clock)


def test_another_trust_domain_is_refused(keys_dir: Path, clock: ManualClock) -> None:
    with pytest.raises(KeysError, match=r"'td\.test'.*'other\.test'"):
        load_or_create_keys(keys_dir, KeySettings("other.test", SETTINGS.url, ("a",), ("b",)), clock)


@pytest.mark.parametrize(
    ("url", "gateways", "apis"),
    [("http://gw.test", ("a",), ("b",)), ("https://gw.test", (), ("b",)), ("https://gw.test", ("a",), ())],
)
def test_settings_are_checked(url: str, gateways: tuple[str, ...], apis: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"https|host"):
        KeySettings("td.test", url, gateways, apis)
    with pytest.raises(BadSpiffeId):
        KeySettings("TD Test", SETTINGS.url, SETTINGS.gateway_hosts, SETTINGS.api_hosts)


CREATE = """
import sys
from pathlib import Path
from controlplane.fleet.keys import KeySettings, load_or_create_keys
from shared.clocks import SystemClock
settings = KeySettings("td.test", "https://gw.test:8443", ("gw.test",), ("api.test",))
sys.stdin.read(1)
print(load_or_create_keys(Path(sys.argv[1]), settings, SystemClock()).pin)
"""


def test_processes_that_start_at_once_end_with_the_same_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    command = [sys.executable, "-c", CREATE, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(4)
    ]
    for process in processes:  # all have imported everything, or will soon
        assert process.stdin is not None
        process.stdin.write("g")
        process.stdin.flush()
    pins = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0, 0]
    assert len(pins) == 1
    assert pins.pop().startswith("sha256:")
    assert not [name for name in files(path) if name.endswith(".tmp")]


# --- certificates of our own processes


def gateway_certificate(keys_dir: Path) -> bytes:
    return (keys_dir / "gateway/serving.pem").read_bytes()


def test_other_host_names_get_another_certificate(keys_dir: Path, clock: ManualClock) -> None:
    before = files(keys_dir)
    settings = KeySettings("td.test", SETTINGS.url, ("new.test",), ("api.test",))
    load_or_create_keys(keys_dir, settings, clock)
    after = files(keys_dir)
    assert {name for name in after if after[name] != before[name]} == {"gateway/serving.pem"}
    assert covers_hosts(load_chain(gateway_certificate(keys_dir))[0], ("new.test",))


def test_another_url_makes_another_bundle_and_pin(keys_dir: Path, clock: ManualClock) -> None:
    before = load_or_create_keys(keys_dir, SETTINGS, clock)
    settings = KeySettings("td.test", "https://new.test", SETTINGS.gateway_hosts, SETTINGS.api_hosts)
    after = load_or_create_keys(keys_dir, settings, clock)
    assert after.pin != before.pin
    assert load_gateway_keys(keys_dir / "gateway").bundle == after.bundle


def test_certificates_are_issued_anew_in_time(keys_dir: Path, clock: ManualClock) -> None:
    before = gateway_certificate(keys_dir)
    clock.advance((SERVICE_CERTIFICATE_LIFETIME * 0.6).total_seconds())
    load_or_create_keys(keys_dir, SETTINGS, clock)
    assert gateway_certificate(keys_dir) == before
    clock.advance((SERVICE_CERTIFICATE_LIFETIME * 0.1).total_seconds())
    load_or_create_keys(keys_dir, SETTINGS, clock)
    assert gateway_certificate(keys_dir) != before
    renewed = load_chain(gateway_certificate(keys_dir))[0]
    assert renewed.not_valid_after_utc == clock.now() + SERVICE_CERTIFICATE_LIFETIME


# --- what a gateway has


def test_a_gateway_needs_its_own_part_alone(keys_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "gateway"
    shutil.copytree(keys_dir / "gateway", elsewhere)
    shutil.rmtree(keys_dir)
    keys = load_gateway_keys(elsewhere)
    assert keys.serving.parent == elsewhere
    assert b"td.test" in keys.bundle


def test_nothing_in_the_gateways_part_can_sign_or_issue(keys_dir: Path) -> None:
    private = {
        name: data.partition(b"-----END")[0]
        for name, data in files(keys_dir).items()
        if b"-----BEGIN PRIVATE KEY-----" in data
    }
    gateway = {name for name in private if name.startswith("gateway/")}
    assert gateway == {"gateway/serving.pem", "gateway/service-client.pem"}
    assert set(private) - gateway == {*PERMANENT, "api/join-server.pem"}
    assert len(set(private.values())) == len(private), "two files share a key"
    for name in gateway:
        pem = (keys_dir / name).read_bytes()
        key = decode_private_key(pem)
        assert not load_chain(pem)[0].extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        with pytest.raises(ValueError, match="not a key of class"):  # P-256 signs no intent and no answer
            Verifier({KeyClass.INTENT: [key.public_key()]})


def test_a_gateway_refuses_a_part_that_others_may_read(keys_dir: Path) -> None:
    (keys_dir / "gateway/serving.pem").chmod(0o644)
    with pytest.raises(UnsafeFile, match="chmod 600"):
        load_gateway_keys(keys_dir / "gateway")
    (keys_dir / "gateway").chmod(0o755)
    with pytest.raises(UnsafeFile, match="chmod 700"):
        load_gateway_keys(keys_dir / "gateway")


def test_a_gateways_part_that_is_not_complete_is_named(keys_dir: Path) -> None:
    (keys_dir / "gateway/node-ca.crt").unlink()
    with pytest.raises(KeysError, match=r"node-ca\.crt is missing"):
        load_gateway_keys(keys_dir / "gateway")


# --- intent keys


def test_a_worker_reads_the_intent_keys_alone(keys_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "signing"
    shutil.copytree(keys_dir / "signing", elsewhere)
    shutil.rmtree(keys_dir)
    keyring = load_intent_keys(elsewhere)
    envelope = keyring.signer.sign(Context.INTENT_SPEC, b"spec")
    assert keyring.key_set.verifier(NOW).verify(envelope, Context.INTENT_SPEC) == b"spec"
