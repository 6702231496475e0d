"""A container engine to try CDI files with: Debian's podman and runc, and busybox for something to run."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import trio

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

NEEDED = ("podman", "runc", "busybox", "unshare")
MISSING = [name for name in NEEDED if shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") is None]
needs_podman = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a container without user namespaces"),
]

UNRESOLVABLE = 126  # podman's exit code for a device that no CDI file names
ENGINE_S = 60  # it takes about half a second; a machine that also runs other tests takes longer


@dataclass(frozen=True)
class Podman:
    """Runs one command in a container, with the engine's state under `base`.

    `prepare` is shell for the engine's mount namespace, where /dev may be made to look like a GPU server's.
    """

    base: Path
    spec_directory: Path
    prepare: str = ":"

    async def run(self, cdi_name: str, command: str) -> subprocess.CompletedProcess[bytes]:
        podman = [
            *("podman", "--root", str(self.base / "storage"), "--runroot", str(self.base / "run")),
            *("--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--runtime", "runc"),
            *("run", "--rm", "--rootfs", "--network", "none"),
            # Podman's default is above the hard limit of a process without CAP_SYS_RESOURCE.
            *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"),
            *("--device", cdi_name, str(self.base / "rootfs"), "/bin/sh", "-c", command),
        ]
        script = f'mkdir -p /run/cdi && mount --bind "$0" /run/cdi && {self.prepare} && exec "$@"'
        with trio.fail_after(ENGINE_S):
            return await trio.run_process(
                ["unshare", "--mount", "sh", "-c", script, str(self.spec_directory), *podman],
                capture_stdout=True,
                capture_stderr=True,
                check=False,
            )


@pytest.fixture
def podman() -> Iterator[Podman]:
    # Not tmp_path: podman refuses a run directory whose path has more than 50 characters.
    with TemporaryDirectory(prefix="bcd-") as name:
        base = Path(name)
        rootfs = base / "rootfs"
        for directory in ("bin", "dev", "proc", "sys", "etc", "tmp", "usr/lib"):
            (rootfs / directory).mkdir(parents=True)
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, rootfs / "bin/busybox")
        for applet in ("sh", "cat", "env", "stat"):
            (rootfs / "bin" / applet).symlink_to("busybox")
        (base / "cdi").mkdir()
        yield Podman(base, base / "cdi")
