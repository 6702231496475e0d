"""The Container Device Interface file format: its structs, its rules, its versions.

The rules are those of the Go library that every container engine embeds (pkg/cdi 1.1.0), not of the
published JSON schema, which accepts almost anything. That library decodes strictly: one unknown
field, one broken part or a version that is too new, and the *whole file* is ignored, with no word
outside its debug log; the user sees ``unresolvable CDI devices``. So nothing is written that
`validate` has not passed, and what it refuses includes everything that the library refuses.

A file states the lowest version that its content needs (`min_version`): engines refuse versions
they do not know, and Debian 12's podman knows none above 0.5.0.

Source: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

T = TypeVar("T")

VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
HOOK_NAMES = frozenset({"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"})
NODE_TYPES = frozenset({"", "b", "c", "u", "p"})
CLOS_ID_CHARS_MAX = 4096

# One letter is refused: it makes the library of that version panic.
_VENDOR_OR_CLASS = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]\Z")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?\Z")

UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class CdiError(ValueError):
    """A spec that no container engine would load; the message names the place and the rule."""


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """Base of all parts. Null is the same as absent, as in Go."""


class DeviceNode(_Part, frozen=True):
    """A device node in the container. `host_path` is where it is outside, if elsewhere.

    `major`, `minor` and `type` are for reading other programs' files: an engine that finds them
    believes them, and a driver that was loaded anew may have other numbers.
    """

    path: str | None = None
    host_path: str | None = None
    type: str | None = None
    major: Int64 | None = None
    minor: Int64 | None = None
    file_mode: UInt32 | None = None
    permissions: str | None = None
    uid: UInt32 | None = None
    gid: UInt32 | None = None


class Mount(_Part, frozen=True):
    """A file or directory of the host in the container; a bind needs "bind" or "rbind" among its options."""

    host_path: str | None = None
    container_path: str | None = None
    options: list[str] | None = None
    type: str | None = None


class Hook(_Part, frozen=True):
    """A program that the engine runs while it makes the container; `timeout` is in seconds."""

    hook_name: str | None = None
    path: str | None = None
    args: list[str] | None = None
    env: list[str] | None = None
    timeout: Int64 | None = None


class NetDevice(_Part, frozen=True):
    host_interface_name: str | None = None
    name: str | None = None


class IntelRdt(_Part, frozen=True):
    clos_id: str | None = msgspec.field(default=None, name="closID")
    l3_cache_schema: str | None = None
    mem_bw_schema: str | None = None
    schemata: list[str] | None = None
    enable_monitoring: bool | None = None


class ContainerEdits(_Part, frozen=True):
    """What changes in a container that asks for the device."""

    env: list[str] | None = None
    device_nodes: list[DeviceNode] | None = None
    net_devices: list[NetDevice] | None = None
    hooks: list[Hook] | None = None
    mounts: list[Mount] | None = None
    intel_rdt: IntelRdt | None = None
    additional_gids: list[UInt32] | None = None

    @property
    def empty(self) -> bool:
        lists = (self.env, self.device_nodes, self.net_devices, self.hooks, self.mounts, self.additional_gids)
        return not any(lists) and self.intel_rdt is None


class Device(_Part, frozen=True):
    name: str | None = None
    annotations: dict[str, str] | None = None
    container_edits: ContainerEdits | None = None


class Spec(_Part, frozen=True):
    """One file. `container_edits` apply once if any of its devices is asked for."""

    cdi_version: str | None = None
    kind: str | None = None
    annotations: dict[str, str] | None = None
    devices: list[Device] | None = None
    container_edits: ContainerEdits | None = None


def parse(document: object) -> Spec:
    """Return the spec in a decoded JSON or YAML document.

    Raises:
        CdiError: an engine would not load it.
    """
    try:
        spec = msgspec.convert(document, Spec)
    except msgspec.ValidationError as exc:
        raise CdiError(str(exc)) from exc
    validate(spec)
    return spec


def encode(spec: Spec) -> bytes:
    """Return the file's bytes; equal specs give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(spec), indent=2) + b"\n"


def min_version(spec: Spec) -> str:
    """Return the lowest version whose loaders understand everything in `spec`.

    0.8.0 and 1.0.0 brought nothing to the format, so they are never the answer.
    """
    devices = spec.devices or []
    edits = [device.container_edits or ContainerEdits() for device in devices]
    edits.append(spec.container_edits or ContainerEdits())
    nodes = [node for edit in edits for node in edit.device_nodes or ()]
    mounts = [mount for edit in edits for mount in edit.mounts or ()]
    rdts = [edit.intel_rdt for edit in edits if edit.intel_rdt is not None]
    if any(edit.net_devices for edit in edits) or any(r.schemata is not None or r.enable_monitoring for r in rdts):
        return "1.1.0"
    if rdts or any(edit.additional_gids for edit in edits):
        return "0.7.0"
    class_name = (spec.kind or "").partition("/")[2]
    if spec.annotations or any(device.annotations for device in devices) or "." in class_name:
        return "0.6.0"
    starts_with_digit = any((device.name or "")[:1] in tuple("0123456789") for device in devices)
    if starts_with_digit or any(node.host_path for node in nodes):
        return "0.5.0"
    if any(mount.type for mount in mounts):
        return "0.4.0"
    return "0.3.0"


def validate(spec: Spec) -> None:
    """Check everything that an engine checks when it loads the file.

    Whether paths exist is not checked: engines look only when a container is made.

    Raises:
        CdiError: with the first thing that is wrong.
    """
    version = (spec.cdi_version or "").removeprefix("v")
    if version not in VERSIONS:
        raise CdiError(f"cdiVersion: {spec.cdi_version!r} is no known version")
    needed = min_version(spec)
    if VERSIONS.index(version) < VERSIONS.index(needed):
        raise CdiError(f"cdiVersion: {version} is too low, the content needs {needed}")
    vendor, _, class_name = (spec.kind or "").partition("/")
    for part, what in ((vendor, "vendor"), (class_name, "class")):
        if not _VENDOR_OR_CLASS.match(part):
            raise CdiError(f"kind: {what} {part!r} is not valid")
    _check_edits(spec.container_edits or ContainerEdits(), "containerEdits")
    seen: set[str] = set()
    for index, device in enumerate(spec.devices or ()):
        name = device.name or ""
        if not is_device_name(name):
            raise CdiError(f"devices[{index}]: {name!r} is no device name")
        if name in seen:
            raise CdiError(f"devices[{index}]: {name!r} is there twice")
        seen.add(name)
        edits = device.container_edits or ContainerEdits()
        if edits.empty:
            raise CdiError(f"devices[{index}]: {name!r} changes nothing")
        _check_edits(edits, f"devices[{index}].containerEdits")
    if not seen:
        raise CdiError("devices: there are none")


def is_device_name(name: str) -> bool:
    return _DEVICE.match(name) is not None


def _check_edits(edits: ContainerEdits, where: str) -> None:
    _check_env(edits.env, where)
    for index, node in enumerate(edits.device_nodes or ()):
        place = f"{where}.deviceNodes[{index}]"
        if not node.path:
            raise CdiError(f"{place}: path is empty")
        if (node.type or "") not in NODE_TYPES:
            raise CdiError(f"{place}: type {node.type!r} is none of b, c, u, p")
        if (node.permissions or "").strip("rwm"):
            raise CdiError(f"{place}: permissions {node.permissions!r} are not of r, w, m")
    for index, hook in enumerate(edits.hooks or ()):
        place = f"{where}.hooks[{index}]"
        if hook.hook_name not in HOOK_NAMES:
            raise CdiError(f"{place}: {hook.hook_name!r} is no hook")
        if not hook.path:
            raise CdiError(f"{place}: path is empty")
        _check_env(hook.env, place)
    for index, mount in enumerate(edits.mounts or ()):
        if not mount.host_path or not mount.container_path:
            raise CdiError(f"{where}.mounts[{index}]: hostPath or containerPath is empty")
    if edits.intel_rdt is not None:
        _check_clos_id(edits.intel_rdt.clos_id or "", where)
    _check_net_devices(edits.net_devices or (), where)


def _check_env(env: Iterable[str] | None, where: str) -> None:
    for entry in env or ():
        if entry.find("=") <= 0:
            raise CdiError(f"{where}: environment {entry!r} is not NAME=value")


def _check_clos_id(clos_id: str, where: str) -> None:
    bad = len(clos_id) >= CLOS_ID_CHARS_MAX or clos_id in (".", "..") or "/" in clos_id or "\n" in clos_id
    if bad and clos_id != "/":
        raise CdiError(f"{where}.intelRdt: closID is not valid")


def _check_net_devices(devices: Sequence[NetDevice], where: str) -> None:
    for index, device in enumerate(devices):
        if not device.host_interface_name or not device.name:
            raise CdiError(f"{where}.netDevices[{index}]: a name is empty")
    if len({device.host_interface_name for device in devices}) < len(devices):
        raise CdiError(f"{where}.netDevices: an interface is there twice")
    if len({device.name for device in devices}) < len(devices):
        raise CdiError(f"{where}.netDevices: a name is there twice")


def merge(*parts: ContainerEdits) -> ContainerEdits:
    """Return all edits together, each once, in the order of their first appearance.

    Network devices and Intel RDT are left out: a GPU has neither, and two of the latter contradict
    each other.
    """
    return ContainerEdits(
        env=_unique(part.env for part in parts),
        device_nodes=_unique(part.device_nodes for part in parts),
        hooks=_unique(part.hooks for part in parts),
        mounts=_unique(part.mounts for part in parts),
        additional_gids=_unique(part.additional_gids for part in parts),
    )


def _unique(lists: Iterable[list[T] | None]) -> list[T] | None:
    found: list[T] = []
    for items in lists:
        found += [item for item in items or () if item not in found]
    return found or None
