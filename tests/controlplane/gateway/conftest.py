"""Tests of the gateway share one fixture: a rig with nodes in a database, on which gateways are opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.gateways import Rig, open_rig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.support.postgres import Dsn


@pytest.fixture
async def rig(dsn: Dsn, tmp_path: Path) -> AsyncGenerator[Rig]:
    async with open_rig(dsn, tmp_path) as rig:
        yield rig
