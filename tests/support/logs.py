"""Keeps what a test logged, from structlog and from the standard library alike."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping
    from typing import Any

_ERRORS = ("error", "critical")


class LogRecorder(logging.Handler):
    """A structlog processor and a `logging` handler that write to one list.

    It sits before the renderer and passes every event on, so that pytest still shows the lines of a
    test that failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        self.events.append(dict(event))
        return event

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append({"event": record.getMessage(), "level": record.levelname.lower(), "logger": record.name})

    def errors(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["level"] in _ERRORS]

    def named(self, name: str) -> list[dict[str, Any]]:
        """Return the events of that name, in the order in which they were logged."""
        return [event for event in self.events if event["event"] == name]

    def attached(self) -> Iterator[LogRecorder]:
        """Record until the iterator is resumed (the shape of a pytest fixture)."""
        structlog.reset_defaults()
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                self,
                structlog.processors.KeyValueRenderer(key_order=["level", "event"]),
            ],
            cache_logger_on_first_use=False,
        )
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield self
        finally:
            root.removeHandler(self)
            structlog.reset_defaults()
            structlog.contextvars.clear_contextvars()
