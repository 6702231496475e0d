"""A server that cannot be talked to because of TLS: what to do is said, not whether it is running."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import trio

from controlplane.serving import Tls, serve_asgi
from tests.support.certificates import issue_server_certificate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    import pytest

    from controlplane.serving import Message, Receive, Scope, Send
    from tests.support.command_line import CommandLine

BODY = b'{"data": {"items": [], "next_cursor": null}}'


async def empty_list(scope: Scope, receive: Receive, send: Send) -> None:
    start: Message = {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json")],
    }
    await send(start)
    await send({"type": "http.response.body", "body": BODY, "more_body": False})


@asynccontextmanager
async def listening(tls: Tls | None) -> AsyncGenerator[str]:
    """Where a server answers every request with an empty list."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(serve_asgi, empty_list, [listener], stop=trio.Event(), grace_s=1, tls=tls))
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel("done")


async def test_each_fault_of_tls_has_its_hint(
    bcctl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = issue_server_certificate(tmp_path, "127.0.0.1")

    async def sites(url: str, *more: str) -> tuple[int, str]:
        ran = await trio.to_thread.run_sync(partial(bcctl, "sites", *more, "--url", url, "--key", "bck_x.y"))
        return ran.status, ran.err

    async with listening(Tls(issued.path)) as secure, listening(None) as plain:
        status, said = await sites(f"https://{secure}", "list")
        assert status == 1
        untrusted = "TLS: certificate verify failed: unable to get local issuer certificate"
        assert said.startswith(f"UNREACHABLE: no answer from https://{secure}: {untrusted}\nhint: SSL_CERT_FILE names ")
        assert said.endswith("and the URL the certificate's host. The URL comes from --url\n")
        _, said = await sites(f"http://{secure}", "list")
        assert said.startswith("UNREACHABLE: ")
        assert said.endswith(
            "hint: does the server speak TLS there? Then the URL begins with https://. The URL comes from --url\n"
        )
        # a change is not known to be undone, whatever the likely cause
        _, said = await sites(f"http://{secure}", "create", "lab")
        assert said.startswith("UNKNOWN_OUTCOME: ")
        assert "hint: look whether it was done before you repeat it\nhint: does the server speak TLS there?" in said
        _, said = await sites(f"https://{plain}", "list")
        assert said.endswith(
            "hint: the server speaks no TLS there; the URL begins with http://, or has another port."
            " The URL comes from --url\n"
        )
        (tmp_path / "ca.pem").write_text(issued.ca_pem)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert await sites(f"https://{secure}", "list") == (0, "no sites\n")
        _, said = await sites(f"https://{secure.replace('127.0.0.1', 'localhost')}", "list")
        assert "TLS: certificate verify failed: Hostname mismatch" in said
