"""Durations, sizes and times: what is taken, and what the refusal says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from controlplane.cli.amounts import (
    BadAmount,
    parse_duration,
    parse_memory,
    parse_time,
    show_duration,
    show_memory,
    show_time,
)

NOW = datetime(2030, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("30m", 1800),
        ("8h", 28_800),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1w", 604_800),
        ("1d2h3m4s", 93_784),
        ("0h90m", 5400),
        (" 8h ", 28_800),
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "8", "1.5h", "h", "30m1h", "-1h", "8 h", "8h!", "1h1h", "9" * 50 + "s", "8H", "\u0661h"]
)
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(BadAmount, match=r"is not a duration; write for example 45s, 30m, 8h, 1h30m or 2d"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "0h0m"])
def test_no_time_at_all(text: str) -> None:
    with pytest.raises(BadAmount, match="is no time at all"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "mib"), [("512MiB", 512), ("64GiB", 65_536), ("1.5TiB", 1_572_864), ("1 gib", 1024), ("0.5GiB", 512)]
)
def test_sizes(text: str, mib: int) -> None:
    assert parse_memory(text) == mib


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("64", "is not a size; write for example 512MiB"),
        ("64GB", "GB is not a unit of memory here; write MiB, GiB or TiB, as in 64GiB"),
        ("64g", "as in 64GiB"),
        ("3 parsecs", "as in 3GiB"),
        ("0.3MiB", "is not a whole number of MiB"),
        ("0GiB", "is not a whole number of MiB"),
        ("", "is not a size"),
        ("9" * 50 + "GiB", "is not a size"),
    ],
)
def test_what_is_not_a_size(text: str, says: str) -> None:
    with pytest.raises(BadAmount) as refused:
        parse_memory(text)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("now", NOW),
        ("+2h", NOW + timedelta(hours=2)),
        ("2030-02-01T10:00Z", datetime(2030, 2, 1, 10, tzinfo=UTC)),
        ("2030-02-01T10:00:30+01:00", datetime(2030, 2, 1, 9, 0, 30, tzinfo=UTC)),
        ("2030-02-01 10:00Z", datetime(2030, 2, 1, 10, tzinfo=UTC)),
    ],
)
def test_times(text: str, at: datetime) -> None:
    found = parse_time(text, now=NOW)
    assert found == at
    assert found.utcoffset() == timedelta(0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tomorrow", "is not a time; write for example 2030-01-31T10:00Z or +2h"),
        ("2030-02-01T10:00", "has no time zone; write 2030-02-01T10:00Z for UTC"),
        ("2030-02-01", "has no time zone; write 2030-02-01T00:00Z"),
        ("2030-02-31T10:00Z", "is not a time"),
        ("+soon", "is not a duration"),
        ("", "is not a time"),
        ("9999-12-31T23:59:59-23:59", "is too far away; write for example"),
        ("+99999999w", "is too far away"),
        ("+99999999999999999999w", "is too far away"),
    ],
)
def test_what_is_not_a_time(text: str, says: str) -> None:
    with pytest.raises(BadAmount) as refused:
        parse_time(text, now=NOW)
    assert says in str(refused.value)


def test_shown() -> None:
    assert [show_duration(s) for s in (0, 59, 60, 5400, 93_784, 604_800)] == ["0s", "59s", "1m", "1h30m", "1d2h", "7d"]
    assert [show_memory(mib) for mib in (0, 1, 512, 1024, 1536, 65_536, 2**21)] == [
        "0",
        "1MiB",
        "512MiB",
        "1GiB",
        "1.5GiB",
        "64GiB",
        "2TiB",
    ]
    assert show_time(datetime.fromisoformat("2030-01-31T13:00:00.9+01:00")) == "2030-01-31 12:00:00Z"
