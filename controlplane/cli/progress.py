"""What a person sees while something is awaited: one moving line on a terminal, plain lines in a pipe.

All of it goes to stderr, so that stdout holds the result alone. `show` is called as often as one likes;
a pipe gets a line only when the text changes.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from controlplane.cli.render import clean, cut

if TYPE_CHECKING:
    from collections.abc import Generator

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Shows the newest state of what is awaited. Made by `open_progress`."""

    def __init__(self, stream: TextIO, *, live: bool) -> None:
        self._stream = stream
        self._live = live
        self._text = ""
        self._frame = 0

    def show(self, text: str) -> None:
        """Say how it stands."""
        text = clean(text)
        if self._live:
            frame = _FRAMES[self._frame % len(_FRAMES)]
            self._frame += 1
            line = cut(f"{frame} {text}", shutil.get_terminal_size().columns - 1)
            self._write(_ERASE_LINE + line)
        elif text != self._text:
            self._write(f"{text}\n")
        self._text = text

    def erase(self) -> None:
        """Leave nothing behind on a terminal."""
        if self._live and self._text:
            self._write(_ERASE_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


@contextmanager
def open_progress(stream: TextIO | None = None) -> Generator[Progress]:
    """Show progress during the body."""
    to = sys.stderr if stream is None else stream
    progress = Progress(to, live=to.isatty())
    try:
        yield progress
    finally:
        progress.erase()
