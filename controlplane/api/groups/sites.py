"""Sites: places where pools are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Name, Ref, Slug, Version
from controlplane.db import outbox, places
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.tx import Tx


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """A place where pools are."""

    id: str
    slug: str
    name: str
    pools: Annotated[int, msgspec.Meta(description="How many pools it has.")]
    version: int
    created_at: Instant


class CreateSite(Idempotent, frozen=True, kw_only=True):
    slug: Slug
    name: Name = ""


class SiteRef(Input, frozen=True, kw_only=True):
    site: Ref


class UpdateSite(Idempotent, frozen=True, kw_only=True):
    site: Ref
    name: Name
    version: Version | None = None


class DeleteSite(Idempotent, frozen=True, kw_only=True):
    site: Ref
    version: Version | None = None


def _shown(row: places.Site) -> Site:
    return Site(
        id=row.public_id, slug=row.slug, name=row.name, pools=row.pools, version=row.version, created_at=row.created_at
    )


def _get(tx: Tx, call: Call, typed: SiteRef) -> Site:
    return _shown(resolve.find_site(tx, typed.site))


def _list(tx: Tx, call: Call, typed: ListInput) -> Page[Site]:
    rows = places.list_sites(tx, after=after("sites", typed.cursor), limit=typed.limit + 1)
    return make_page("sites", rows, typed.limit, item=_shown, keys=lambda row: (row.site_id,))


def _load_new(tx: Tx, call: Call, typed: CreateSite) -> Target[None]:
    resolve.check_slug(typed.slug)
    return Target(Resource(id="", tenant_id=None, attributes={"slug": typed.slug}), None)


def _create(tx: Tx, call: Call, typed: CreateSite, target: Target[None]) -> Outcome[Site]:
    site_id = call.context.ids.new("site")
    with guards.taken(f"slug: there is a site {typed.slug} already", field="slug"):
        places.insert_site(tx, public_id=site_id, slug=typed.slug, name=typed.name or typed.slug)
    outbox.publish(tx, "site.created", site_id, {"slug": typed.slug}, tenant_id=None)
    return Outcome(_shown(resolve.find_site(tx, site_id)), resource_id=site_id)


def _load(tx: Tx, call: Call, typed: UpdateSite | DeleteSite) -> Target[places.Site]:
    row = resolve.find_site(tx, typed.site)
    guards.check_version(typed.version, row.version, what=f"site {row.slug}")
    return Target(Resource(id=row.public_id, tenant_id=None, attributes={"slug": row.slug}), row)


def _update(tx: Tx, call: Call, typed: UpdateSite, target: Target[places.Site]) -> Outcome[Site]:
    row = target.row
    changed = places.update_site(tx, row.site_id, version=row.version, name=typed.name or row.slug)
    guards.check_changed(changed, what=f"site {row.slug}")
    outbox.publish(tx, "site.updated", row.public_id, {"slug": row.slug}, tenant_id=None)
    return Outcome(_shown(resolve.find_site(tx, row.public_id)))


def _delete(tx: Tx, call: Call, typed: DeleteSite, target: Target[places.Site]) -> Outcome[Site]:
    row = target.row
    guards.check_free(places.site_dependents(tx, row.site_id), what=f"site {row.slug}")
    guards.check_changed(places.delete_site(tx, row.site_id, version=row.version), what=f"site {row.slug}")
    outbox.publish(tx, "site.deleted", row.public_id, {"slug": row.slug}, tenant_id=None)
    return Outcome(_shown(row))


METHODS = (
    Mutation(
        group="sites",
        name="create",
        action="site.create",
        input=CreateSite,
        output=Site,
        summary="Make a site.",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="sites",
        name="get",
        action="site.read",
        input=SiteRef,
        output=Site,
        summary="Look at one site.",
        read=_get,
    ),
    Read(
        group="sites",
        name="list",
        action="site.read",
        input=ListInput,
        output=Page[Site],
        summary="List sites, oldest first.",
        read=_list,
    ),
    Mutation(
        group="sites",
        name="update",
        action="site.update",
        input=UpdateSite,
        output=Site,
        summary="Rename a site.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="sites",
        name="delete",
        action="site.delete",
        input=DeleteSite,
        output=Site,
        summary="Remove a site that has no pools.",
        load=_load,
        perform=_delete,
    ),
)
