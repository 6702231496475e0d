"""`bcctl`: the command tree, and what every command ends in.

Exit status: 0 done; 1 it went wrong, with `CODE: message` and perhaps `hint:` lines on stderr; 2 the
command line is wrong. This is the one place of the command line that catches everything.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

import click
from click.exceptions import NoArgsIsHelpError

from controlplane.cli.options import LazyGroup
from controlplane.cli.profiles import ProfileError
from controlplane.cli.render import BadQuery, clean
from controlplane.cli.session import Failed, Interrupted, Session, use_color

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controlplane.cli.client import ApiFailure, ClientError

EXIT_FAILED = 1
EXIT_USAGE = 2
TRACEBACK_VARIABLE = "BCCTL_TRACEBACK"

_SECTIONS = {
    "Use": ("reserve", "status", "reservations", "series", "allocations", "events", "pools", "offerings"),
    "Run the fleet": ("sites", "nodes", "maintenance", "devices", "join-tokens", "commands"),
    "Tenants and access": ("tenants", "projects", "quotas", "keys", "audit"),
    "Servers and settings": ("dev", "serve", "db", "doctor", "profiles"),
}
# How the API's input fields are called on the command line, where that differs.
_FLAGS = {
    "duration_s": "--for",
    "start": "--at",
    "end": "--by or --until",
    "memory_mib": "--memory",
    "queue_for_s": "--queue-for",
    "whole_node": "--whole-node",
    "gpu_model": "--gpu-model",
    "expires_in_s": "--expires-in",
    "memory_mib_max": "--memory",
    "gpus_max": "--gpus",
    "vcpus_max": "--vcpus",
    "max_duration_s": "--max-duration",
    "max_horizon_s": "--max-horizon",
    "time_zone": "--zone",
    "from_time": "--from",
    "to_time": "--to",
    "to_days": "--to",
    "first_date": "--first",
    "days": "--on",
}
# What to do about an answer that did not come, by `ClientError.fault`.
_FAULTS = {
    "certificate": "SSL_CERT_FILE names the authority of a certificate of your own, and the URL the certificate's host",
    "no_tls": "the server speaks no TLS there; the URL begins with http://, or has another port",
    "hung_up": "does the server speak TLS there? Then the URL begins with https://",
}


@click.command(
    cls=LazyGroup,
    package="controlplane.cli.commands",
    sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog='Completion: eval "$(_BCCTL_COMPLETE=bash_source bcctl)" in ~/.bashrc; zsh_source and fish_source too.',
)
@click.version_option(package_name="bettercompute", prog_name="bcctl", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Say what GPU and CPU servers exist, what is free, and who holds it; and hold some."""
    ctx.ensure_object(Session)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `bcctl` and exit."""
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status."""
    session = Session()
    try:
        status = cli.main(list(argv), prog_name="bcctl", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except click.UsageError as exc:
        return _usage(exc)
    except BrokenPipeError:
        # who read our output has seen enough; the interpreter must not complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return _fail("INTERRUPTED", "stopped before it was done")
    except Exception as exc:  # noqa: BLE001 - the edge: whatever it is becomes a line and a status
        return _report(exc, session)
    # click hands back what `--help` would have exited with, or what the command returned
    return status if isinstance(status, int) else 0


def _usage(exc: click.UsageError) -> int:
    if isinstance(exc, NoArgsIsHelpError):
        exc.show()
    else:
        hint = f"see `{exc.ctx.command_path} --help`" if exc.ctx is not None else "see `bcctl --help`"
        _fail("USAGE", exc.format_message(), [hint])
    return EXIT_USAGE


def _report(exc: Exception, session: Session) -> int:
    from controlplane.cli.client import ClientError

    code, hints = "BUG", [f"a fault of bcctl; {TRACEBACK_VARIABLE}=1 shows where it is"]
    message = f"{type(exc).__name__}: {exc}"
    match exc:
        case ClientError():
            code, message, hints = exc.code, str(exc), _hints(exc, session)
        case Failed():
            code, message, hints = exc.code, str(exc), list(exc.hints)
        case ProfileError():
            code, message, hints = "PROFILE", str(exc), []
        case BadQuery():
            code, message, hints = "QUERY", str(exc), []
        case click.Abort() | Interrupted():
            code, message, hints = "INTERRUPTED", "stopped before it was done", []
        case click.ClickException():
            code, message, hints = "FAILED", exc.format_message(), []
        case _:
            if os.environ.get(TRACEBACK_VARIABLE):
                traceback.print_exception(exc)
    return _fail(code, message, hints)


def _fail(code: str, message: str, hints: Iterable[str] = ()) -> int:
    color = use_color(sys.stderr, no_color=False)
    click.echo(f"{click.style(code, fg='red', bold=True) if color else code}: {clean(message)}", err=True)
    for hint in hints:
        click.echo(f"hint: {clean(hint)}", err=True)
    return EXIT_FAILED


def _hints(exc: ClientError, session: Session) -> list[str]:
    from controlplane.cli.client import ApiFailure

    url = session.connection.url
    from_where = f"The URL comes from {url.source}"
    fault = f"{_FAULTS[exc.fault]}. {from_where}" if exc.fault else ""
    match exc.code:
        case "UNREACHABLE":
            return [fault or f"is `bcctl dev` or `bcctl serve` running? {from_where}"]
        case "UNKNOWN_OUTCOME":
            return ["look whether it was done before you repeat it", *([fault] if fault else [])]
        case "BAD_ANSWER":
            return [f"the URL comes from {url.source}"]
        case _ if isinstance(exc, ApiFailure):
            return _api_hints(exc, session)
        case _:
            return []


def _api_hints(exc: ApiFailure, session: Session) -> list[str]:
    hints: list[str] = []
    flag = _FLAGS.get(exc.field or "")
    if flag is not None:
        hints.append(f"{exc.field} is {flag} here")
    key = session.connection.key
    match exc.code:
        case "UNAUTHENTICATED":
            hints.append(session.connection.key_hint if key is None else f"the key comes from {key.source}")
        case "SOLD_OUT" if exc.method == "reservations/create":
            hints.append("without --no-queue it waits for room")
        case "QUOTA_EXCEEDED":
            hints.append("`bcctl quotas list` shows the limits and what is used")
        case "METHOD_NOT_FOUND":
            hints.append("the server and this bcctl are of different versions")
        case "INTERNAL":
            hints.append(f"the server's log has it under {exc.request_id}")
        case _:
            pass
    if exc.retry_after_ms is not None:
        hints.append(f"try again in {max(1, round(exc.retry_after_ms / 1000))} s")
    return hints


if __name__ == "__main__":
    main()
