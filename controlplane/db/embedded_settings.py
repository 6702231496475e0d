"""The server settings of the embedded PostgreSQL, and why each differs from the default."""

from __future__ import annotations

import os

# At least the default, at most what a guest on a shared machine may take.  A container may see the
# memory of its host here, which is what the upper bound is for.
SHARED_BUFFERS_MIB_MIN = 128
SHARED_BUFFERS_MIB_MAX = 512
# A pool of 8 and three connections of their own (leases, listener, doorbell) for each of the three
# roles, and as much again for tools and tests.
CONNECTIONS_MAX = 60


def server_settings(*, fsync: bool) -> dict[str, str]:
    """Return the settings by name; without `fsync` nothing survives a crash of the machine."""
    settings = {
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "max_connections": str(CONNECTIONS_MAX),
        "shared_buffers": f"{_shared_buffers_mib()}MB",
        "max_wal_size": "4GB",  # the default would checkpoint every 100 s at full load
        "wal_compression": "pglz",  # the wheel has no lz4
        "jit": "off",  # short statements only, and not every build has it
        "deadlock_timeout": "100ms",  # a race of two placements costs this, not a second
        "max_parallel_workers_per_gather": "0",  # needs more of /dev/shm than a container has
        "log_min_messages": "log",  # a refused double booking is an everyday ERROR, not news
        "log_checkpoints": "off",
        "lc_messages": "C",  # start-up failures are recognised by their text
        "timezone": "UTC",
        "log_timezone": "UTC",
    }
    if not fsync:
        # Commits still reach the kernel: a server that is killed keeps what it has answered.
        settings |= {"fsync": "off", "full_page_writes": "off"}
    return settings


def _shared_buffers_mib() -> int:
    memory_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**20
    return max(SHARED_BUFFERS_MIB_MIN, min(SHARED_BUFFERS_MIB_MAX, memory_mib // 4))
