"""From what a person typed to a row: ids and slugs, and suggestions when there is none.

What the caller may not know of is answered like what does not exist, suggestions included.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from controlplane.db import asked, node_views, places, tenancy
from controlplane.db import iam as db_iam
from controlplane.errors import Invalid, NotFound
from controlplane.model.event_kinds import ASKABLE, NOUNS
from shared.ids import SLUG_RULE, is_slug

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controlplane.api.calls import Call
    from controlplane.db.asked import Asked
    from controlplane.db.iam import Tenant
    from controlplane.db.node_views import NodeRow
    from controlplane.db.places import Pool, Site
    from controlplane.db.tenancy import Offering, Project
    from controlplane.db.tx import Tx

# More names than a person would look through, few enough to compare in a millisecond.
_CANDIDATES_MAX = 1000


def did_you_mean(given: str, candidates: Sequence[str]) -> str:
    """Return a sentence that ends a message: the nearest name, or the names if they are few, or nothing."""
    near = difflib.get_close_matches(given, candidates, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {near[0]}?"
    if 0 < len(candidates) <= 5:
        return f"; there are: {', '.join(candidates)}"
    return ""


def not_found(kind: str, ref: str, *, field: str, candidates: Sequence[str] = ()) -> NotFound:
    """Make the error for a thing that is not there, or not for this caller."""
    return NotFound(f"{field}: no {kind} {ref}{did_you_mean(ref, candidates)}", field=field)


def no_such_id(kind: str, ref: str, *, form: str, field: str = "id") -> NotFound:
    """Make the error for what goes by its id alone: `form` is the first part of such an id."""
    fix = "" if ref.startswith(f"{form}_") else f"; it goes by its id, {form}_…"
    return NotFound(f"{field}: no {kind} {ref}{fix}", field=field)


def check_event_kind(kind: str) -> None:
    """Raise Invalid for a kind of which there will never be an event; empty is every kind."""
    if kind and kind not in ASKABLE:
        fix = did_you_mean(kind, sorted(ASKABLE)) or f"; one begins with {', '.join(NOUNS)}"
        raise Invalid(f"kind: no event is of kind {kind}{fix}", field="kind")


def check_slug(slug: str, *, field: str = "slug") -> None:
    """Raises Invalid."""
    if not is_slug(slug):
        raise Invalid(f"{field}: {slug!r} cannot be used; use {SLUG_RULE}", field=field)


def find_site(tx: Tx, ref: str, *, field: str = "site") -> Site:
    """Find by id or slug. Raises NotFound."""
    site = places.find_site(tx, ref)
    if site is None:
        raise not_found("site", ref, field=field, candidates=places.site_slugs(tx, limit=_CANDIDATES_MAX))
    return site


def find_pool(tx: Tx, ref: str, *, field: str = "pool") -> Pool:
    """Find by id or slug. Raises NotFound."""
    pool = places.find_pool(tx, ref)
    if pool is None:
        raise not_found("pool", ref, field=field, candidates=places.pool_slugs(tx, limit=_CANDIDATES_MAX))
    return pool


def find_asked(tx: Tx, call: Call, pool: str, *, gpus: int | None) -> Asked:
    """Find a pool by id or slug, for a request of so many GPUs of each node. Raises NotFound."""
    found = asked.load_asked(tx, pool, gpus=gpus, tenant_id=call.principal.tenant_id)
    if found is None:
        raise not_found("pool", pool, field="pool", candidates=places.pool_slugs(tx, limit=_CANDIDATES_MAX))
    return found


def find_node(tx: Tx, call: Call, ref: str, *, field: str = "node") -> NodeRow:
    """Find by id, or a live node by name. Nodes belong to no tenant: only who sees everything knows of them.

    Raises NotFound, and Invalid for a name that nodes of several sites have.
    """
    if not call.scope.everything:
        raise not_found("node", ref, field=field)
    found = node_views.find_nodes(tx, ref)
    if not found:
        raise not_found("node", ref, field=field, candidates=node_views.node_names(tx, limit=_CANDIDATES_MAX))
    if len(found) > 1:
        sites = ", ".join(node.site_slug for node in found)
        raise Invalid(f"{field}: there is a node {ref} in each of {sites}; give the id", field=field)
    return found[0]


def find_tenant(tx: Tx, call: Call, ref: str | None, *, field: str = "tenant") -> Tenant:
    """Find by id or slug among those the caller may know of; None is the caller's own. Raises NotFound."""
    if ref is None:
        own = db_iam.load_tenant(tx, call.principal.tenant_id)
        if own is None:
            raise NotFound(f"{field}: your own tenant is gone", field=field)
        return own
    tenant = db_iam.find_tenant(tx, ref, within=call.scope.filter)
    if tenant is None:
        slugs = db_iam.tenant_slugs(tx, within=call.scope.filter, limit=_CANDIDATES_MAX)
        raise not_found("tenant", ref, field=field, candidates=slugs)
    return tenant


def find_project(tx: Tx, call: Call, ref: str, *, tenant_id: int | None, field: str = "project") -> Project:
    """Find by id or slug, in one tenant or in all that the caller may know of.

    Raises NotFound, and Invalid for a slug that several tenants use.
    """
    within = call.scope.filter
    found = tenancy.find_projects(tx, ref, tenant_id=tenant_id, within=within)
    if not found:
        slugs = tenancy.project_slugs(tx, tenant_id=tenant_id, within=within, limit=_CANDIDATES_MAX)
        raise not_found("project", ref, field=field, candidates=slugs)
    if len(found) > 1:
        raise _ambiguous("project", ref, [project.tenant_slug for project in found], field)
    return found[0]


def find_offering(tx: Tx, call: Call, ref: str, *, tenant_id: int | None, field: str = "offering") -> Offering:
    """Find by id or slug, in one tenant or in all that the caller may know of.

    Raises NotFound, and Invalid for a slug that several tenants use.
    """
    within = call.scope.filter
    found = tenancy.find_offerings(tx, ref, tenant_id=tenant_id, within=within)
    if not found:
        slugs = tenancy.offering_slugs(tx, tenant_id=tenant_id, within=within, limit=_CANDIDATES_MAX)
        raise not_found("offering", ref, field=field, candidates=slugs)
    if len(found) > 1:
        raise _ambiguous("offering", ref, [offering.tenant_slug for offering in found], field)
    return found[0]


def _ambiguous(kind: str, ref: str, tenants: Sequence[str], field: str) -> Invalid:
    return Invalid(
        f"{field}: {', '.join(tenants)} and perhaps others have {kind} {ref}; name the tenant, or give the id",
        field=field,
    )
