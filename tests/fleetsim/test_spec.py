"""A specification that cannot be used is refused by field, and never repeats a secret."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from fleetsim.spec import SPEC_BYTES_MAX, SpecError, load_spec, parse_spec
from shared.joining import make_token

if TYPE_CHECKING:
    from pathlib import Path

PIN = "sha256:" + "0f" * 32


def make(**changes: Any) -> dict[str, Any]:
    return {
        "gateway": "https://127.0.0.1:7443",
        "pin": PIN,
        "state_dir": "/var/tmp/fleet",
        "nodes": [{"name": "sim-01", "token": make_token().text}, {"name": "sim-02", "variant": "cpu"}],
        **changes,
    }


def parse(**changes: Any):
    return parse_spec(json.dumps(make(**changes)).encode())


def test_each_machine_has_a_directory_named_as_it_unless_it_says_otherwise() -> None:
    spec = parse(nodes=[{"name": "a"}, {"name": "b", "state_dir": "/elsewhere/b"}])
    assert [str(spec.directory_of(node)) for node in spec.nodes] == ["/var/tmp/fleet/a", "/elsewhere/b"]


def test_what_is_left_out_is_an_h100_without_a_token() -> None:
    (node,) = parse(nodes=[{"name": "a"}]).nodes
    assert (node.variant, node.token) == ("h100", "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nodes": []}, "$.nodes"),
        ({"gateway": "http://127.0.0.1:7443"}, "gateway"),
        ({"pin": "sha256:abc"}, "$.pin"),
        ({"state_dir": "fleet"}, "state_dir"),
        ({"joins_at_once": 0}, "$.joins_at_once"),
        ({"nodes": [{"name": "Sim 1"}]}, "nodes[0].name"),
        ({"nodes": [{"name": "../a"}]}, "nodes[0].name"),
        ({"nodes": [{"name": "a"}, {"name": "a"}]}, "nodes[1].name"),
        ({"nodes": [{"name": "a"}, {"name": "b", "state_dir": "/var/tmp/fleet/a"}]}, "nodes[1].state_dir"),
        ({"nodes": [{"name": "a", "state_dir": "a"}]}, "nodes[0].state_dir"),
        ({"nodes": [{"name": "a", "variant": "b200"}]}, "variant"),
        ({"nodes": [{"name": "a", "tokn": ""}]}, "tokn"),
        ({"nodes": [{"name": "a", "token": "bcjt_short.secret"}]}, "nodes[0].token"),
    ],
)
def test_the_error_names_the_field(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(**changes)
    assert named in str(caught.value)


def test_no_message_repeats_a_token() -> None:
    secret = make_token().text.partition(".")[2]
    for nodes in ([{"name": "a", "token": f"bcjt_x.{secret}"}], [{"name": "a", "token": [secret]}]):
        with pytest.raises(SpecError) as caught:
            parse(nodes=nodes)
        assert secret not in str(caught.value)


def test_a_line_is_enough_and_the_stream_may_stay_open() -> None:
    reader, writer = os.pipe()
    os.write(writer, json.dumps(make()).encode() + b"\n")
    assert len(load_spec("-", stdin=reader).nodes) == 2
    os.close(writer)
    os.close(reader)


def test_a_stream_without_an_end_of_line_is_not_read_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "endless"
    path.write_bytes(b" " * (SPEC_BYTES_MAX + 1))
    with path.open("rb") as file, pytest.raises(SpecError, match="longer than"):
        load_spec("-", stdin=file.fileno())


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(make()))
    path.chmod(0o644)
    with pytest.raises(SpecError, match="chmod 600"):
        load_spec(str(path), stdin=0)
    path.chmod(0o600)
    assert load_spec(str(path), stdin=0).pin == PIN


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gone\.json"):
        load_spec(str(tmp_path / "gone.json"), stdin=0)
