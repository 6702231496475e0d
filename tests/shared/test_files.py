"""A secret's file is whole and private, or it is refused."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from shared.files import (
    PRIVATE_FILE_BYTES_MAX,
    UnsafeFile,
    make_private_directory,
    read_private,
    write_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    write_atomic(tmp_path / "secret", b"s")
    write_atomic(tmp_path / "public", b"p", mode=0o644)
    make_private_directory(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "public").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_atomic(path, b"one")
    write_atomic(path, b"two")
    assert read_private(path) == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


def test_a_failed_write_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    write_atomic(path, b"one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"two")
    assert path.read_bytes() == b"one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    write_atomic(path, b"s")
    path.chmod(mode)
    with pytest.raises(UnsafeFile) as caught:
        read_private(path)
    assert f"chmod 600 {path}" in str(caught.value)
    assert f"{mode:04o}" in str(caught.value)


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o755])
def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    make_private_directory(path)
    path.chmod(mode)
    with pytest.raises(UnsafeFile) as caught:
        make_private_directory(path)
    assert f"chmod 700 {path}" in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    make_private_directory(tmp_path / "directory")
    for name in ("pipe", "directory"):
        with pytest.raises((UnsafeFile, IsADirectoryError)):
            read_private(tmp_path / name)
    write_atomic(tmp_path / "file", b"")
    with pytest.raises(UnsafeFile, match="not a directory"):
        make_private_directory(tmp_path / "file")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    write_atomic(tmp_path / "secret", bytes(PRIVATE_FILE_BYTES_MAX + 1))
    with pytest.raises(UnsafeFile, match="larger"):
        read_private(tmp_path / "secret")
