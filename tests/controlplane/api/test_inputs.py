"""Every field of every method with what nobody means: a refusal by name or an answer, never a fault of ours.

Generated from the method table, so a new method is tried too.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controlplane.api.methods import load_methods
from tests.support.api import open_api
from tests.support.referee import find_breaches
from tests.support.world import examples, make_world, prepare

if TYPE_CHECKING:
    from tests.support.postgres import Dsn

TABLE = load_methods()
LONG = "x" * 10_000
NUMBERS: list[Any] = [-1, 0, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5, 1e308]
TEXTS: list[Any] = ["", LONG, "\u202e\U0001f4a9" * 10, "a;b", "%s", "{}", "\x1e", "..", "'; drop table node --"]
TIMES: list[Any] = [
    "0001-01-01T00:00:00+23:59",
    "9999-12-31T23:59:59-23:59",
    "2100-01-01T00:00:00",
    "0001-01-01",
    "9999-12-31",
    "23:59",
]
OTHERS: list[Any] = [None, True, [], [LONG], ["a=b"] * 100, {}, {LONG: LONG}, {"": ""}]
DEVICES: list[Any] = [
    [{"class": name, "count": count}]
    for name, count in (
        ("mig.1g.10gb", 1_000_000),
        ("slot.1/48", 1_000_000),
        ("slot.1/" + "9" * 40, 1),
        ("mig." + "9" * 40 + "g.1gb", 1),
    )
]


@pytest.mark.parametrize("group", sorted({path.partition("/")[0] for path in TABLE}))
async def test_no_input_is_a_fault_of_ours(dsn: Dsn, group: str) -> None:
    answers: Counter[str] = Counter()
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for path, request in examples(world).items():
            if not path.startswith(f"{group}/"):
                continue
            await prepare(world, dsn, path)
            for name in sorted(field.encode_name for field in msgspec.structs.fields(TABLE[path].input)):
                for value in (*NUMBERS, *TEXTS, *TIMES, *OTHERS, *(DEVICES if name == "devices" else ())):
                    reply = await api.call(path, **{**request, name: value})
                    assert reply.status < 500, (path, name, str(value)[:80], reply.body)
                    answers[reply.code] += 1
    assert answers["INVALID"] > 0
    # a quota may be set below what is in use
    assert set(find_breaches(dsn.admin)) <= {"I6 quota_exceeded"}
