"""The rules of the CDI format, against NVIDIA's own file, broken copies of it, and the published schema."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing.jsonschema import DRAFT7

from agent.drivers.cdi_spec import CdiError, ContainerEdits, Mount, encode, merge, min_version, parse

DATA = Path(__file__).parent / "data" / "cdi"
NVIDIA: dict[str, Any] = yaml.safe_load((DATA / "nvidia-ctk-1.20-fake-8xH100.yaml").read_text())

SCHEMA = json.loads((DATA / "schema.json").read_text())
REGISTRY: referencing.Registry[Any] = referencing.Registry().with_resource(
    "defs.json",
    referencing.Resource.from_contents(json.loads((DATA / "defs.json").read_text()), default_specification=DRAFT7),
)
published_schema = jsonschema.Draft7Validator(SCHEMA, registry=REGISTRY)


def minimal(**changes: object) -> dict[str, Any]:
    spec = {
        "cdiVersion": "0.3.0",
        "kind": "bettercompute.dev/reservation",
        "devices": [{"name": "rsv_x", "containerEdits": {"env": ["A=1"]}}],
    }
    return {**spec, **changes}


def with_edits(**edits: object) -> dict[str, Any]:
    return minimal(cdiVersion="1.1.0", devices=[{"name": "rsv_x", "containerEdits": edits}])


def test_nvidias_own_file_is_valid_and_needs_what_it_says() -> None:
    spec = parse(NVIDIA)
    assert min_version(spec) == NVIDIA["cdiVersion"] == "0.7.0"
    assert len(spec.devices or ()) == 19


def test_null_is_absent_and_a_v_before_the_version_is_read() -> None:
    spec = parse(minimal(cdiVersion="v0.3.0", annotations=None, containerEdits=None))
    assert min_version(spec) == "0.3.0"


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "text",
        {},
        minimal(cdiVersion="0.9.0"),
        minimal(cdiVersion="0.5"),
        minimal(cdiVersion=0.5),
        minimal(kind="no-slash"),
        minimal(kind="a/b"),
        minimal(kind="bettercompute.dev/x/y"),
        minimal(kind="1bettercompute.dev/reservation"),
        minimal(devices=[]),
        minimal(devices=None),
        minimal(unknown="field"),
        minimal(annotations={"a": 1}, cdiVersion="0.6.0"),
        minimal(devices=[{"name": "rsv_", "containerEdits": {"env": ["A=1"]}}]),
        minimal(devices=[{"name": "", "containerEdits": {"env": ["A=1"]}}]),
        minimal(devices=[{"name": "rsv_x", "containerEdits": {}}]),
        minimal(devices=[{"name": "rsv_x"}]),
        minimal(devices=[{"name": "x1", "containerEdits": {"env": ["A=1"]}}] * 2),
        with_edits(env=["=1"]),
        with_edits(env=["A"]),
        with_edits(env=[1]),
        with_edits(env="A=1"),
        with_edits(deviceNodes=[{"path": ""}]),
        with_edits(deviceNodes=[{"hostPath": "/dev/null"}]),
        with_edits(deviceNodes=[None]),
        with_edits(deviceNodes=[{"path": "/dev/x", "type": "C"}]),
        with_edits(deviceNodes=[{"path": "/dev/x", "permissions": "none"}]),
        with_edits(deviceNodes=[{"path": "/dev/x", "fileMode": -1}]),
        with_edits(deviceNodes=[{"path": "/dev/x", "major": True}]),
        with_edits(deviceNodes=[{"path": "/dev/x", "minor": 2**63}]),
        with_edits(mounts=[{"hostPath": "/x"}]),
        with_edits(mounts=[{"hostPath": "", "containerPath": "/x"}]),
        with_edits(hooks=[{"hookName": "CreateContainer", "path": "/x"}]),
        with_edits(hooks=[{"hookName": "createContainer"}]),
        with_edits(hooks=[{"hookName": "createContainer", "path": "/x", "env": ["A"]}]),
        with_edits(intelRdt={"closID": ".."}),
        with_edits(intelRdt={"closID": "a/b"}),
        with_edits(netDevices=[{"hostInterfaceName": "eth0"}]),
        with_edits(netDevices=[{"hostInterfaceName": "eth0", "name": "a"}, {"hostInterfaceName": "eth0", "name": "b"}]),
        with_edits(netDevices=[{"hostInterfaceName": "eth0", "name": "a"}, {"hostInterfaceName": "eth1", "name": "a"}]),
        with_edits(additionalGids=[-1]),
        with_edits(additionalGids=[True]),
    ],
    ids=repr,
)
def test_what_the_engines_refuse_is_refused(document: object) -> None:
    with pytest.raises(CdiError):
        parse(document)


@pytest.mark.parametrize(
    ("document", "version"),
    [
        (minimal(), "0.3.0"),
        (with_edits(deviceNodes=[{"path": "/dev/x", "permissions": "rw", "gid": 44}]), "0.3.0"),
        (with_edits(mounts=[{"hostPath": "/x", "containerPath": "/x", "type": "bind"}]), "0.4.0"),
        (with_edits(deviceNodes=[{"path": "/dev/x", "hostPath": "/dev/null"}]), "0.5.0"),
        (minimal(cdiVersion="0.5.0", devices=[{"name": "0", "containerEdits": {"env": ["A=1"]}}]), "0.5.0"),
        (minimal(cdiVersion="0.6.0", annotations={"a": "b"}), "0.6.0"),
        (minimal(cdiVersion="0.6.0", kind="bettercompute.dev/a.b"), "0.6.0"),
        (with_edits(additionalGids=[44]), "0.7.0"),
        (with_edits(intelRdt={"closID": "x"}), "0.7.0"),
        (with_edits(intelRdt={"schemata": []}), "1.1.0"),
        (with_edits(netDevices=[{"hostInterfaceName": "eth0", "name": "a"}]), "1.1.0"),
    ],
)
def test_the_lowest_version_that_the_content_needs(document: dict[str, Any], version: str) -> None:
    assert min_version(parse(document)) == version
    assert parse({**document, "cdiVersion": version})
    lower = {"0.3.0": "0.2.0", "0.4.0": "0.3.0", "0.5.0": "0.4.0", "0.6.0": "0.5.0", "0.7.0": "0.6.0", "1.1.0": "1.0.0"}
    with pytest.raises(CdiError, match="too low"):
        parse({**document, "cdiVersion": lower[version]})


def test_merge_keeps_the_order_and_drops_repeats() -> None:
    first = ContainerEdits(env=["A=1", "B=2"], mounts=[Mount(host_path="/x", container_path="/x")])
    second = ContainerEdits(env=["B=2", "C=3"], mounts=[Mount(host_path="/x", container_path="/x")])
    merged = merge(first, second, ContainerEdits())
    assert merged.env == ["A=1", "B=2", "C=3"]
    assert merged.mounts == first.mounts
    assert merge(ContainerEdits()) == ContainerEdits()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=5,
)


@st.composite
def broken_specs(draw: st.DrawFn) -> object:
    """NVIDIA's file, cut to three devices, with a few values replaced, removed or doubled."""
    document: Any = copy.deepcopy({**NVIDIA, "devices": NVIDIA["devices"][:3]})
    for _ in range(draw(st.integers(1, 3))):
        parent, key = document, draw(st.sampled_from(sorted(document)))
        while isinstance(parent[key], dict | list) and parent[key] and draw(st.integers(0, 5)):
            parent = parent[key]
            key = draw(st.sampled_from(sorted(parent) if isinstance(parent, dict) else range(len(parent))))
        match draw(st.sampled_from(["replace", "remove", "double", "rename"])):
            case "replace":
                parent[key] = draw(json_values)
            case "remove" if len(parent) > 1:
                del parent[key]
            case "double" if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[key]))
            case _ if isinstance(parent, dict):
                parent[draw(st.text(max_size=8))] = draw(json_values)
            case _:
                pass
        if not isinstance(document, dict) or not document:
            break
    return document


@settings(max_examples=300, deadline=None)
@given(broken_specs())
def test_a_broken_file_is_refused_or_valid_but_never_a_crash(document: object) -> None:
    try:
        spec = parse(document)
    except CdiError:
        return
    written = json.loads(encode(spec))
    assert parse(written) == spec
    published_schema.validate(written)


@settings(max_examples=200, deadline=None)
@given(json_values)
def test_anything_at_all_is_refused_and_never_a_crash(document: object) -> None:
    with pytest.raises(CdiError):
        parse(document)


def test_the_published_schema_is_no_substitute() -> None:
    # The reason for rules of our own: this passes the schema, and no engine loads it.
    nonsense = {"cdiVersion": "banana", "kind": "no slash", "devices": [], "unknown": 1}
    published_schema.validate(nonsense)
    with pytest.raises(CdiError):
        parse(nonsense)
