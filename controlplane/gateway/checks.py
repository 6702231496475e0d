"""What a message must be before it is taken: checks that one bad item cannot fail everybody's transaction.

Messages of all sessions are committed together, so what the database would refuse (text with NUL,
numbers beyond int8, bodies that are too long) is refused here, where it ends one connection.
All functions raise ProtocolViolation("message").
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from shared.http2.events import ProtocolViolation
from shared.wire import CHUNK_BYTES, SECTION_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.wire import Credit, Hello, InventorySection, Lane, Report, SpecApplied, Status

# As `node_report`, `node_status` and `node_inventory` have them.
KEY_LENGTH_MAX: Final = 200
ENVELOPE_BYTES_MAX: Final = 64 * 1024
STATUS_BYTES_MAX: Final = 64 * 1024
SECTION_NAME_LENGTH_MAX: Final = 64
# Versions, boot and journal ids are 40 characters or so.
WORD_LENGTH_MAX: Final = 128
# An inventory has a handful of sections.
SECTIONS_MAX: Final = 64
# A lane has at most 16 from this side; an agent of another release may say a little more.
CREDIT_MAX: Final = 1024
CHUNKS_MAX: Final = -(-SECTION_BYTES_MAX // CHUNK_BYTES)

_INT8_MAX: Final = 2**63 - 1
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_LABEL = re.compile(r"[!-~]+\Z")
_WORDS = re.compile(r"[ -~]*\Z")


def _fail(what: str) -> ProtocolViolation:
    return ProtocolViolation("message", what)


def _check_label(value: str, length_max: int, what: str) -> None:
    if len(value) > length_max or _LABEL.match(value) is None:
        raise _fail(f"{what} is not 1 to {length_max} printable characters")


def _check_words(value: str, what: str) -> None:
    if len(value) > WORD_LENGTH_MAX or _WORDS.match(value) is None:
        raise _fail(f"{what} is not up to {WORD_LENGTH_MAX} printable characters")


def _check_number(value: int, what: str) -> None:
    if not 0 <= value <= _INT8_MAX:
        raise _fail(f"{what} is out of range")


def _check_digest(value: str, what: str) -> None:
    if _SHA256.match(value) is None:
        raise _fail(f"{what} is not a SHA-256 in lower-case hex")


def check_hello(hello: Hello) -> None:
    """Check the words and numbers of a Hello; whether it is who it says is another question."""
    _check_words(hello.boot_id, "boot_id")
    _check_words(hello.agent_version, "agent_version")
    _check_label(hello.journal_id, WORD_LENGTH_MAX, "journal_id")
    _check_number(hello.journal_high, "journal_high")
    _check_number(hello.observed_incarnation, "observed_incarnation")
    _check_number(hello.observed_generation, "observed_generation")
    if len(hello.sections) > SECTIONS_MAX:
        raise _fail(f"more than {SECTIONS_MAX} sections")
    for section, digest in hello.sections.items():
        _check_label(section, SECTION_NAME_LENGTH_MAX, "a section's name")
        _check_digest(digest, "a section's hash")
    _check_grants(hello.credits)


def check_credit(credit: Credit) -> None:
    """Check what a peer grants us."""
    _check_grants(credit.grants)


def _check_grants(grants: Mapping[Lane, int]) -> None:
    if not all(0 <= grant <= CREDIT_MAX for grant in grants.values()):
        raise _fail(f"credit is not 0 to {CREDIT_MAX}")


def check_report(report: Report) -> None:
    """Check a report's frame; its envelope is for the worker to judge."""
    _check_label(report.key, KEY_LENGTH_MAX, "a report's key")
    if not 0 < len(report.envelope) <= ENVELOPE_BYTES_MAX:
        raise _fail(f"an envelope of {len(report.envelope)} bytes")


def check_spec_applied(applied: SpecApplied) -> None:
    """Check a generation that was acted on."""
    _check_number(applied.incarnation, "incarnation")
    _check_number(applied.generation, "generation")


def check_status(status: Status) -> None:
    """Check a status report's frame."""
    _check_label(status.hash, WORD_LENGTH_MAX, "a status's hash")
    if len(status.body) > STATUS_BYTES_MAX:
        raise _fail(f"a status of {len(status.body)} bytes")


def check_chunk(chunk: InventorySection) -> None:
    """Check one chunk for itself."""
    _check_label(chunk.section, SECTION_NAME_LENGTH_MAX, "a section's name")
    _check_digest(chunk.hash, "a section's hash")
    if not 0 <= chunk.index < chunk.count <= CHUNKS_MAX:
        raise _fail(f"chunk {chunk.index} of {chunk.count}")
    if len(chunk.body) > CHUNK_BYTES:
        raise _fail(f"a chunk of {len(chunk.body)} bytes")
