"""A configuration that cannot be used is refused with the key and the fix."""

from __future__ import annotations

import pytest

from controlplane.config import ConfigError, parse_config


def test_behind_pgbouncer_there_must_be_a_way_past_it() -> None:
    text = 'roles = ["api"]\nkeys_dir = "/k"\n[database]\ndsn = "dbname=x"\npgbouncer = true\n'
    with pytest.raises(ConfigError, match=r"database\.direct_dsn: is required with pgbouncer"):
        parse_config(text.encode(), name="server.toml")
    assert parse_config(f'{text}direct_dsn = "dbname=y"\n'.encode(), name="server.toml").database.pgbouncer
