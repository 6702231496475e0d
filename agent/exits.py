"""How `bcd` ends: its exit codes, and the error that carries one to the command line."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command ends with. The unit restarts at once upon `NEW_PROCESS`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    TOKEN_REFUSED = 3
    PIN_MISMATCH = 4
    UNREACHABLE = 5
    NOT_ACCEPTED = 6
    JOINED_ELSEWHERE = 7
    NEW_PROCESS = 78


class CommandFailed(Exception):
    """What was asked for was not done. `hint` says what a person can do about it."""

    def __init__(self, exit_code: ExitCode, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint
