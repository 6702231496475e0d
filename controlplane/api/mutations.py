"""One mutation from the validated input to the answer: prepare, decide once, perform.

*Prepare* loads what it is about, or is a transaction that writes the draft. The decision is made on
that, outside any transaction. *Perform* confirms the credential, makes the change, and writes the
audit row and the first outcome with it. What is refused is closed: the draft is rejected, the
denial or refusal audited.

With an idempotency key a request that has an outcome ends before the decision, with that outcome. A
refusal that a repeat cannot change is an outcome too when there is a draft. "Ask again" never is,
and neither is the silence of the IAM: the draft then waits for the repeat.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from controlplane import errors
from controlplane.api.answers import RETRY_AFTER_MS, Answer, as_api_error, data_answer, describe, repeated_answer
from controlplane.api.calls import Drafted, Mutation, Outcome
from controlplane.db import audit, idempotency
from controlplane.db.tx import LockTimeout
from controlplane.iam.catalog import ACTIONS
from controlplane.iam.port import BadCredential

if TYPE_CHECKING:
    from controlplane.api.calls import Call, Target
    from controlplane.db.audit import Decision as AuditDecision
    from controlplane.db.tx import Tx
    from controlplane.iam.port import Decision

AnyMutation = Mutation[Any, Any, Any] | Drafted[Any, Any, Any]

# Refusals that a repeat of the same request cannot change.
_FINAL = (
    errors.Invalid,
    errors.Unauthenticated,
    errors.Denied,
    errors.NotFound,
    errors.Conflict,
    errors.SoldOut,
    errors.QuotaExceeded,
    errors.Impossible,
)


async def run_mutation(call: Call, method: AnyMutation, typed: Any) -> Answer:  # noqa: ANN401 - the table knows
    """Run one mutation. Raises ApiError, BadCredential, IamUnavailable and DatabaseError."""
    iam, db = call.context.iam, call.context.db
    run = _Run(call, method, typed, _key_of(call, method, typed))
    target = await (db.run_read(run.prepare) if isinstance(method, Mutation) else db.run_tx(run.prepare))
    if isinstance(target, Answer):
        return target
    decision = await iam.decide(call.principal, ACTIONS[method.action], target.resource)
    if not decision.allowed:
        error = _denial(call, method, decision)
        await db.run_tx(run.close_denied, target, decision, error)
        raise error
    refused: Exception | None = None
    done: Any = None
    try:
        done = await db.run_tx(run.perform, target)
    except (errors.ApiError, BadCredential) as exc:
        refused = exc
    if refused is not None:
        if isinstance(method, Drafted):
            await db.run_tx(run.close_refused, method, target, as_api_error(refused))
        raise refused
    if isinstance(done, Answer):
        return done
    if done.forget_credential:
        iam.forget_credential(done.forget_credential)
    if done.forget_scopes:
        iam.forget_scopes()
    return data_answer({**msgspec.to_builtins(done.data), **done.secrets})


def input_detail(typed: Any) -> dict[str, Any]:  # noqa: ANN401 - the table knows
    """Return an input as it is audited and compared: without the key it came under."""
    detail = msgspec.to_builtins(typed)
    detail.pop("idempotency_key", None)
    return detail


def _denial(call: Call, method: AnyMutation, decision: Decision) -> errors.Denied:
    if decision.answered:
        return errors.Denied(f"{call.principal.name} may not {method.action} here: {decision.reason}")
    return errors.Denied(f"{decision.reason}; nothing was done, ask again", retry_after_ms=RETRY_AFTER_MS)


@dataclass(frozen=True, slots=True)
class _Run:
    """The transactions of one mutation."""

    call: Call
    method: AnyMutation
    typed: Any
    key: idempotency.Key | None

    def prepare(self, tx: Tx) -> Target[Any] | Answer:
        method, key = self.method, self.key
        if isinstance(method, Mutation):
            if key is not None and (first := _first_outcome(idempotency.look_up(tx, key))) is not None:
                return first
            return method.load(tx, self.call, self.typed)
        # It holds nothing. Whoever is answered, with a yes or a no, has waited for the disk with what came after it.
        tx.allow_loss()
        draft_id = self.call.context.ids.new(method.prefix)
        if key is None:
            return method.draft(tx, self.call, self.typed, draft_id)
        found = _claim(tx, key, draft_id)
        if (first := _first_outcome(found)) is not None:
            return first
        if found.state == "resumed":
            return method.resume(tx, self.call, found.resource_id)
        return method.draft(tx, self.call, self.typed, draft_id)

    def perform(self, tx: Tx, target: Target[Any]) -> Outcome[Any] | Answer:
        key = self.key
        self.call.context.iam.confirm(tx, self.call.principal)
        if key is not None and isinstance(self.method, Mutation):
            first = _first_outcome(_claim(tx, key))
            if first is not None:
                return first
        outcome = self.method.perform(tx, self.call, self.typed, target)
        resource, tenant_id = outcome.resource_id or target.resource.id, target.resource.tenant_id
        detail = {"input": input_detail(self.typed), **outcome.detail}
        # why, in the words of who asked, where a method takes that
        reason = getattr(self.typed, "reason", "")
        if key is None:
            self.audit(tx, "allow", resource=resource, tenant_id=tenant_id, reason=reason, detail=detail)
        elif not audit.record_outcome(
            tx,
            key,
            outcome=outcome.data,
            action=self.method.action,
            resource=resource,
            tenant_id=tenant_id,
            reason=reason,
            request_id=self.call.request_id,
            detail={"method": self.method.path, **detail},
        ):
            raise errors.Conflict(
                "idempotency_key: the request was given up meanwhile; use a new key", field="idempotency_key"
            )
        return outcome

    def close_denied(self, tx: Tx, target: Target[Any], decision: Decision, error: errors.Denied) -> None:
        self.audit(tx, "deny", resource=target.resource.id, tenant_id=target.resource.tenant_id, reason=decision.reason)
        if not isinstance(self.method, Drafted):
            return
        if self.key is not None and not decision.answered:
            idempotency.release(tx, self.key)
            return
        self.method.reject(tx, self.call, target, error)
        self._finish_with(tx, error)

    def close_refused(
        self, tx: Tx, method: Drafted[Any, Any, Any], target: Target[Any], error: errors.ApiError
    ) -> None:
        """Close a draft that was allowed and could not be admitted."""
        if self.key is not None and not isinstance(error, _FINAL):
            idempotency.release(tx, self.key)
            return
        method.reject(tx, self.call, target, error)
        self.audit(
            tx,
            "refuse",
            resource=target.resource.id,
            tenant_id=target.resource.tenant_id,
            reason=f"{error.code}: {error.message}",
        )
        self._finish_with(tx, error)

    def audit(
        self,
        tx: Tx,
        decision: AuditDecision,
        *,
        resource: str,
        tenant_id: int | None,
        reason: str = "",
        detail: dict[str, object] | None = None,
    ) -> None:
        audit.record(
            tx,
            principal=self.call.principal.id,
            action=self.method.action,
            decision=decision,
            resource=resource,
            tenant_id=tenant_id,
            reason=reason,
            request_id=self.call.request_id,
            detail={"method": self.method.path, **(detail or {})},
        )

    def _finish_with(self, tx: Tx, error: errors.ApiError) -> None:
        if self.key is not None:
            idempotency.finish(tx, self.key, status=error.status, outcome=describe(error))


# --- idempotency keys ------------------------------------------------------------------------------


def _key_of(call: Call, method: AnyMutation, typed: Any) -> idempotency.Key | None:  # noqa: ANN401 - the table knows
    key = getattr(typed, "idempotency_key", None)
    if key is None:
        return None
    digest = hashlib.sha256(msgspec.json.encode(input_detail(typed), order="deterministic")).digest()
    return idempotency.Key(call.principal.id, method.path, key, digest)


def _claim(tx: Tx, key: idempotency.Key, draft_id: str = "") -> idempotency.Found:
    try:
        return idempotency.claim(tx, key, draft_id)
    except LockTimeout:
        raise _in_progress(idempotency.RETRY_AFTER_S) from None


def _first_outcome(found: idempotency.Found) -> Answer | None:
    """Return the stored answer if there is one. Raises InProgress and Conflict."""
    if found.state == "mismatch":
        raise errors.Conflict(
            "idempotency_key: was used with another input; use a new key for a new request", field="idempotency_key"
        )
    if found.state == "running":
        raise _in_progress(found.retry_after_s)
    return repeated_answer(found.status, found.outcome) if found.state == "done" else None


def _in_progress(retry_after_s: float) -> errors.InProgress:
    return errors.InProgress(
        "idempotency_key: the same request is being worked on; ask again",
        field="idempotency_key",
        retry_after_ms=round(retry_after_s * 1000),
    )
