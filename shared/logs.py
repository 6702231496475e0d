"""Logging set-up: structlog to stderr, one JSON object a line, or columns for a person at a terminal.

An event is named `noun.verb` and never built from data; the data are fields.  Context that belongs
to a request or a session is bound with `structlog.contextvars`, which child tasks inherit and which
does not leak back to the parent.  Libraries that use the standard `logging` module go through the
same processors, so that stderr holds one format.

Tracebacks never show local variables: that is where tokens and keys are.  For the same reason the
console form uses the plain traceback even where `rich` is installed.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import msgspec
import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor

# Of a deep stack the ends tell the story; the default of 50 makes lines that journald cuts in two.
_FRAMES_MAX = 20

# Libraries whose INFO is a line per request or per connection; their warnings stay.
_CHATTY = ("hypercorn.access", "httpcore2", "httpx2", "hpack")


def configure_logging(level: str = "INFO", *, json: bool | None = None) -> None:
    """Set up logging for the whole process; call once, before anything logs.

    `level` is a name of the standard library ("DEBUG", "INFO", ...).  `json` of None means JSON
    unless stderr is a terminal.  Raises `ValueError` for an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}: one of DEBUG, INFO, WARNING, ERROR, CRITICAL")
    if json is None:
        json = not sys.stderr.isatty()
    structlog.configure(
        processors=[*_common(json=json), *_last(json=json)],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *_common(json=json)],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_last(json=json)],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)
    logging.captureWarnings(capture=True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def _common(*, json: bool) -> list[Processor]:
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    if json:
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=_FRAMES_MAX)
        processors.append(structlog.processors.ExceptionRenderer(transform))
    return processors


def _last(*, json: bool) -> list[Processor]:
    if json:
        return [structlog.processors.JSONRenderer(_encode)]
    return [
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,
            timestamp_key="time",
        )
    ]


def _encode(event: dict[str, object], default: object = None) -> str:  # noqa: ARG001 - structlog passes its own fallback
    # What a person looks for first comes first; the rest in the order in which it was bound.
    ordered = {key: event[key] for key in ("time", "level", "event") if key in event} | event
    return msgspec.json.encode(ordered, enc_hook=repr).decode()
