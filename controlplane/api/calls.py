"""What a group of API methods is written with.

A group is a module of `controlplane.api.groups` that exports ``METHODS``, a tuple of the three
kinds below, and is named in `controlplane.api.methods`. Handlers are plain synchronous functions
that run inside a transaction (in a worker thread, so they may take a few milliseconds); the envelope
does everything around them: parsing, authentication, the decision, idempotency, audit, wake-ups.

`Read`: ``read(tx, call, input) -> output`` writes nothing and locks nothing, and so has no transaction
around it. `call.scope` says whose records the caller may see for the method's action; filter by
`call.scope.filter` in SQL, and answer NotFound for what is outside.

`Mutation`: ``load(tx, call, input) -> Target`` finds what it is about, and like a read writes nothing;
the IAM decides once on `Target.resource`; ``perform(tx, call, input, target) -> Outcome`` then makes
the change, guarded by the version that `load` read. Here `call.scope` is all that the caller may
know of: `load` answers NotFound for anything else.

`Drafted`: for what the IAM must decide on as stored. ``draft(tx, call, input, id) -> Target`` writes a
row of that public id, which holds nothing; after the decision ``perform`` admits it, or ``reject(tx, call, target,
error)`` closes it. ``resume(tx, call, resource_id) -> Target`` loads the draft again when a request
with the same idempotency key takes over one that was cut off. `perform` must be guarded by the
draft's public id and state; there is no draft if the database has crashed meanwhile, because its commit
does not wait for the disk. An ApiError from `perform` undoes its transaction, and `reject` follows.

Handlers raise `controlplane.errors` and may run more than once (a retried transaction): they have no
effect but their statements. Who waits for what they write is woken after the commit (`Tx.wake`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controlplane.capacity.place import LedgerTools
    from controlplane.config import PlacerKind
    from controlplane.db.pool import Database
    from controlplane.db.tx import Tx
    from controlplane.errors import ApiError
    from controlplane.iam.gate import Gate
    from controlplane.iam.port import Principal, Resource, Scope
    from shared.clocks import Clock
    from shared.ids import IdSource, Prefix
    from shared.metrics import Metrics

LIMIT_DEFAULT = 100
LIMIT_MAX = 500

T = TypeVar("T")


class Input(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all inputs: an unknown field is an error, because a typo must not be ignored."""


class Idempotent(Input, frozen=True, kw_only=True):
    """Input of a method that may be repeated safely."""

    idempotency_key: (
        Annotated[
            str,
            msgspec.Meta(
                min_length=1,
                max_length=200,
                description="Repeat a request with the same key and input, and the first outcome is returned.",
            ),
        ]
        | None
    ) = None


class ListInput(Input, frozen=True, kw_only=True):
    """Input of every list."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=LIMIT_MAX, description="How many to return at most.")] = LIMIT_DEFAULT
    cursor: Annotated[str, msgspec.Meta(max_length=500, description="`next_cursor` of the page before.")] | None = None


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """Output of every list; `next_cursor` is null on the last page."""

    items: list[T]
    next_cursor: str | None = None


@dataclass(frozen=True, slots=True)
class JoinAdvice:
    """What a server needs to join beside a token: where, and the pin of the trust bundle."""

    url: str
    pin: str


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What handlers may use; made once by the composition root."""

    db: Database
    iam: Gate
    clock: Clock
    ids: IdSource
    metrics: Metrics
    tools: LedgerTools
    placer: PlacerKind
    join: JoinAdvice


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as handlers see it."""

    context: ApiContext
    principal: Principal
    scope: Scope
    request_id: str


R = TypeVar("R")
I = TypeVar("I", bound=Input)  # noqa: E741 - the input, as O is the output
O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741


@dataclass(frozen=True, slots=True)
class Target(Generic[R]):
    """What a mutation is about: for the IAM, and as the row that was read."""

    resource: Resource
    row: R


@dataclass(frozen=True, slots=True)
class Outcome(Generic[O]):
    """What a mutation did.

    Attributes:
        data: the answer.
        resource_id: for the audit row, when it was not known before the mutation (a new thing).
        secrets: fields of the answer that are shown once: they are merged into `data` for the first
            answer, and never stored.
        detail: added to the audit row beside the input.
        forget_credential: public id of a credential that ended: cached authentications of it go.
        forget_scopes: the tree of tenants changed: cached answers on who sees what go.
    """

    data: O
    resource_id: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    detail: Mapping[str, object] = field(default_factory=dict[str, object])
    forget_credential: str = ""
    forget_scopes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[I, O]):
    """A row of the method table.

    Attributes:
        group: first part of the path, as in ``joinTokens``.
        name: second part.
        action: a name of `controlplane.iam.catalog.ACTIONS`.
        input: what is accepted.
        output: what `data` holds (`Page[Thing]` for a list).
        summary: one sentence, for OpenAPI and the reference.
    """

    group: str
    name: str
    action: str
    input: type[I]
    output: type[O]
    summary: str

    @property
    def path(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Method[I, O]):
    """Changes nothing."""

    read: Callable[[Tx, Call, I], O]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation(Method[I, O], Generic[I, O, R]):
    """Load, decide, perform."""

    load: Callable[[Tx, Call, I], Target[R]]
    perform: Callable[[Tx, Call, I, Target[R]], Outcome[O]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted(Method[I, O], Generic[I, O, R]):
    """Draft, decide, perform or reject. `prefix` is that of the drafts' public ids."""

    prefix: Prefix
    draft: Callable[[Tx, Call, I, str], Target[R]]
    resume: Callable[[Tx, Call, str], Target[R]]
    perform: Callable[[Tx, Call, I, Target[R]], Outcome[O]]
    reject: Callable[[Tx, Call, Target[R], ApiError], None]
