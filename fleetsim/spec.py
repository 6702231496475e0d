"""Which simulated machines to run, as one line of JSON.

One line, because the stream it comes on stays open: its end is how the agents learn that whoever
started them has gone. The line holds join tokens, so it is given on stdin or in a private file, never
in arguments, and no message repeats any part of it that could be one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from agent.drivers.fake import Variant
from agent.endpoints import BadEndpoint, parse_endpoint
from shared.files import UnsafeFile, read_private
from shared.joining import BadToken, parse_token

if TYPE_CHECKING:
    from collections.abc import Iterator

NODES_MAX = 10_000
# A node takes about 150 bytes.
SPEC_BYTES_MAX = 4 * 1024 * 1024
# A join is mostly waiting for the server, which serves few at once; more of them only wait longer.
JOINS_AT_ONCE = 32

STDIN = "-"

# A host name, and the name of a directory.
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


class SpecError(Exception):
    """The specification cannot be used; the message names the field and the fix."""


class SimNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulated machine.

    `token` may be left out for a machine that has joined before. `state_dir` is a directory of its own;
    left out, it is named as the machine below the fleet's.
    """

    name: str
    variant: Variant = "h100"
    token: str = ""
    state_dir: str = ""


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of them. `seed` keeps the devices of two fleets with the same names apart."""

    gateway: str
    pin: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    state_dir: str
    nodes: Annotated[list[SimNode], msgspec.Meta(min_length=1, max_length=NODES_MAX)]
    seed: Annotated[str, msgspec.Meta(max_length=64)] = ""
    joins_at_once: Annotated[int, msgspec.Meta(ge=1, le=1000)] = JOINS_AT_ONCE

    def directory_of(self, node: SimNode) -> Path:
        """Where a machine keeps its state."""
        return Path(node.state_dir) if node.state_dir else Path(self.state_dir) / node.name


def parse_spec(line: bytes) -> FleetSpec:
    """Read and check a specification. Raises SpecError."""
    try:
        spec = msgspec.json.decode(line, type=FleetSpec)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SpecError(f"the specification is not one line of JSON as documented: {exc}") from exc
    for problem in _problems(spec):
        raise SpecError(problem)
    return spec


def _problems(spec: FleetSpec) -> Iterator[str]:
    try:
        parse_endpoint(spec.gateway)
    except BadEndpoint as exc:
        yield f"gateway: {exc}"
    if not Path(spec.state_dir).is_absolute():
        yield f"state_dir: {spec.state_dir!r} is not an absolute path"
    names: set[str] = set()
    directories: set[Path] = set()
    for index, node in enumerate(spec.nodes):
        if not _NAME.match(node.name):
            yield f"nodes[{index}].name: {node.name!r} is no host name: lower-case letters, digits and hyphens"
        if node.name in names:
            yield f"nodes[{index}].name: {node.name!r} is there twice"
        directory = spec.directory_of(node)
        if not directory.is_absolute():
            yield f"nodes[{index}].state_dir: {node.state_dir!r} is not an absolute path"
        if directory in directories:
            yield f"nodes[{index}].state_dir: {directory} is another node's already"
        names.add(node.name)
        directories.add(directory)
        if node.token:
            try:
                parse_token(node.token)
            except BadToken as exc:
                yield f"nodes[{index}].token: {exc}"


def read_spec_line(descriptor: int) -> bytes:
    """Read up to the first end of a line, or the end of the stream. Raises SpecError."""
    parts: list[bytes] = []
    size = 0
    while True:
        part = os.read(descriptor, 64 * 1024)
        head, newline, _ = part.partition(b"\n")
        parts.append(head)
        size += len(head)
        if size > SPEC_BYTES_MAX:
            raise SpecError(f"the specification is longer than {SPEC_BYTES_MAX} bytes")
        if newline or not part:
            return b"".join(parts)


def load_spec(source: str, *, stdin: int) -> FleetSpec:
    """Read the specification from a private file, or from `stdin` if `source` is ``-``. Raises SpecError."""
    if source == STDIN:
        return parse_spec(read_spec_line(stdin))
    try:
        return parse_spec(read_private(Path(source)))
    except UnsafeFile as exc:
        raise SpecError(str(exc)) from exc
    except OSError as exc:
        raise SpecError(f"{source}: {exc.strerror}") from exc
