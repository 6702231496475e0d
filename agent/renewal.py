"""Renews the certificate when two thirds of its life are over, and after it has ended.

The request is signed by the present key and needs no client certificate, so a machine that was off for
a week comes back by itself. Each renewal brings a new key. The files are replaced in one step, then the
session is; what the old key signed stays good, because the control plane still knows it.

A refusal has no reason for us, by design; whoever runs the control plane finds it in the audit. The
certificate that we have is used as long as it lasts, and the renewal tried again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import structlog
import trio

from agent.connect import ConnectFailed
from agent.endpoints import BadEndpoint
from agent.membership import read_gateways, save_membership
from agent.pending import forget_request, load_or_make_request
from agent.unary import NoAnswer, request
from shared.files import UnsafeFile
from shared.identity import IdentityError, NodeIdentity, renewal_due_at
from shared.joining import RENEW_PATH, BadAnswer, make_renew_request, verify_answer

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path
    from random import Random

    from cryptography.hazmat.primitives.asymmetric import ec

    from agent.blocking import Blocking
    from agent.config import Timing
    from agent.connect import Connect
    from agent.endpoints import Endpoint
    from agent.membership import Membership, Standing
    from shared.clocks import Clock
    from shared.identity import CertificateRequest
    from shared.joining import VerifiedAnswer

_log = structlog.get_logger()

PENDING_FILE = "renewal.pem"
# A fleet that joined in one hour must not renew in one second.
JITTER_LIFE = 0.02
REQUEST_S = 60.0

Problem = Literal["", "refused", "unreachable", "bad_answer", "not_stored"]


class _Refused(Exception):
    """The control plane said no."""


class Renewal:
    """Made once; `run` does everything.

    Attributes:
        problem: what came of the last attempt; empty after a good one.
        detail: more about the problem, for people.
        on_change: called when these have changed.
    """

    def __init__(
        self,
        state_dir: Path,
        *,
        standing: Standing,
        connect: Connect,
        clock: Clock,
        rng: Random,
        blocking: Blocking,
        timing: Timing,
    ) -> None:
        self.problem: Problem = ""
        self.detail = ""
        self.on_change: Callable[[], None] = lambda: None
        self._state_dir = state_dir
        self._standing = standing
        self._connect = connect
        self._clock = clock
        self._rng = rng
        self._blocking = blocking
        self._timing = timing

    async def run(self) -> None:
        """Renew whenever it is time, until cancelled."""
        jitter = self._rng.uniform(0, JITTER_LIFE)
        while True:
            # Not one long sleep: the wall clock is set while we wait, and a laptop's lid is closed.
            if self._clock.now() >= due_at(self._standing.membership, jitter):
                await self.renew()
            await trio.sleep(self._timing.renew_retry_s if self.problem else self._timing.renew_check_s)

    async def renew(self) -> None:
        """Renew now; how that went is in `problem`."""
        before = (self.problem, self.detail)
        try:
            self._standing.replace(await self._ask_and_store())
            self.problem, self.detail = "", ""
            _log.info("certificate.renewed", until=self._standing.membership.identity.certificate.not_valid_after_utc)
        except _Refused:
            self.problem, self.detail = "refused", "the control plane refused the renewal; its audit log says why"
        except (ConnectFailed, NoAnswer, trio.TooSlowError) as exc:
            self.problem, self.detail = "unreachable", str(exc) or f"no answer within {REQUEST_S:g} s"
        except (BadAnswer, BadEndpoint) as exc:
            self.problem, self.detail = "bad_answer", str(exc)
        except (OSError, UnsafeFile, IdentityError) as exc:
            self.problem, self.detail = "not_stored", str(exc)
        if (self.problem, self.detail) != before:
            if self.problem:
                _log.warning("certificate.not_renewed", problem=self.problem, detail=self.detail)
            self.on_change()

    async def _ask_and_store(self) -> Membership:
        membership = self._standing.membership
        path = self._state_dir / PENDING_FILE
        key, csr = await self._blocking.run(lambda: load_or_make_request(path))
        answer = await self._ask_any(membership, csr)
        renewed = _apply(membership, key, answer)

        def store() -> None:
            save_membership(self._state_dir, renewed)
            forget_request(path)

        await self._blocking.run(store)
        return renewed

    async def _ask_any(self, membership: Membership, csr: CertificateRequest) -> VerifiedAnswer:
        """Ask one gateway after the other; what the last one says is what came of it."""
        *others, last = self._rng.sample(membership.gateways, len(membership.gateways))
        for endpoint in others:
            try:
                with trio.fail_after(REQUEST_S):
                    return await self._ask(endpoint, membership, csr)
            except (ConnectFailed, NoAnswer, trio.TooSlowError) as exc:
                _log.info("certificate.gateway_skipped", gateway=str(endpoint), reason=str(exc))
        with trio.fail_after(REQUEST_S):
            return await self._ask(last, membership, csr)

    async def _ask(self, endpoint: Endpoint, membership: Membership, csr: CertificateRequest) -> VerifiedAnswer:
        body = make_renew_request(membership.identity, csr)
        stream = await self._connect(endpoint, membership, as_node=False)
        answer = await request(stream, endpoint, "POST", RENEW_PATH, body)
        if answer.status == 403:
            raise _Refused
        if answer.status != 200:
            raise NoAnswer(endpoint, f"HTTP status {answer.status}")
        return verify_answer(answer.body, membership.bundle, csr)


def due_at(membership: Membership, jitter: float) -> datetime:
    """Return when the certificate should be renewed; `jitter` is a part of its life."""
    certificate = membership.identity.certificate
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return renewal_due_at(certificate) + timedelta(seconds=life.total_seconds() * jitter)


def _apply(membership: Membership, key: ec.EllipticCurvePrivateKey, answer: VerifiedAnswer) -> Membership:
    """Return the membership with what the answer says. Raises BadAnswer, BadEndpoint."""
    if answer.name != membership.identity.name:
        raise BadAnswer("answer_name", f"the answer is for {answer.name}, and this is {membership.identity.name}")
    keys = answer.answer.intent_keys
    if keys.sequence < membership.intent_keys.sequence:
        # a replayed answer is genuine, but might bring back a key that was withdrawn
        raise BadAnswer("answer_keys", f"list {keys.sequence} of intent keys is older than ours")
    identity = NodeIdentity(key, answer.chain)
    return replace(membership, identity=identity, gateways=read_gateways(answer), intent_keys=keys)
