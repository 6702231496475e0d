"""Projects: parts of a tenant's work."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from controlplane.api import guards, resolve
from controlplane.api.calls import Idempotent, Input, ListInput, Mutation, Outcome, Page, Read, Target
from controlplane.api.cursors import after, make_page
from controlplane.api.fields import Instant, Name, Ref, Slug, Version
from controlplane.db import outbox, tenancy
from controlplane.iam.port import Resource

if TYPE_CHECKING:
    from controlplane.api.calls import Call
    from controlplane.db.iam import Tenant
    from controlplane.db.tx import Tx


class Project(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tenant's work."""

    id: str
    slug: str
    name: str
    tenant: str
    version: int
    created_at: Instant


class CreateProject(Idempotent, frozen=True, kw_only=True):
    slug: Slug
    name: Name = ""
    tenant: Ref | None = None


class ProjectRef(Input, frozen=True, kw_only=True):
    project: Ref
    tenant: Ref | None = None


class ListProjects(ListInput, frozen=True, kw_only=True):
    tenant: Ref | None = None


class UpdateProject(Idempotent, frozen=True, kw_only=True):
    project: Ref
    tenant: Ref | None = None
    name: Name
    version: Version | None = None


class DeleteProject(Idempotent, frozen=True, kw_only=True):
    project: Ref
    tenant: Ref | None = None
    version: Version | None = None


def _shown(row: tenancy.Project) -> Project:
    return Project(
        id=row.public_id,
        slug=row.slug,
        name=row.name,
        tenant=row.tenant_slug,
        version=row.version,
        created_at=row.created_at,
    )


def _find(tx: Tx, call: Call, typed: ProjectRef | UpdateProject | DeleteProject) -> tenancy.Project:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    return resolve.find_project(tx, call, typed.project, tenant_id=tenant_id)


def _get(tx: Tx, call: Call, typed: ProjectRef) -> Project:
    return _shown(_find(tx, call, typed))


def _list(tx: Tx, call: Call, typed: ListProjects) -> Page[Project]:
    tenant_id = None if typed.tenant is None else resolve.find_tenant(tx, call, typed.tenant).tenant_id
    rows = tenancy.list_projects(
        tx,
        tenant_id=tenant_id,
        within=call.scope.filter,
        after=after("projects", typed.cursor),
        limit=typed.limit + 1,
    )
    return make_page("projects", rows, typed.limit, item=_shown, keys=lambda row: (row.project_id,))


def _load_new(tx: Tx, call: Call, typed: CreateProject) -> Target[Tenant]:
    resolve.check_slug(typed.slug)
    tenant = resolve.find_tenant(tx, call, typed.tenant)
    return Target(Resource(id="", tenant_id=tenant.tenant_id, attributes={"slug": typed.slug}), tenant)


def _create(tx: Tx, call: Call, typed: CreateProject, target: Target[Tenant]) -> Outcome[Project]:
    tenant = target.row
    project_id = call.context.ids.new("prj")
    with guards.taken(f"slug: tenant {tenant.slug} has a project {typed.slug} already", field="slug"):
        tenancy.insert_project(
            tx, public_id=project_id, tenant_id=tenant.tenant_id, slug=typed.slug, name=typed.name or typed.slug
        )
    outbox.publish(tx, "project.created", project_id, {"slug": typed.slug}, tenant_id=tenant.tenant_id)
    row = resolve.find_project(tx, call, project_id, tenant_id=tenant.tenant_id)
    return Outcome(_shown(row), resource_id=project_id)


def _load(tx: Tx, call: Call, typed: UpdateProject | DeleteProject) -> Target[tenancy.Project]:
    row = _find(tx, call, typed)
    guards.check_version(typed.version, row.version, what=f"project {row.slug}")
    return Target(Resource(id=row.public_id, tenant_id=row.tenant_id, attributes={"slug": row.slug}), row)


def _update(tx: Tx, call: Call, typed: UpdateProject, target: Target[tenancy.Project]) -> Outcome[Project]:
    row = target.row
    changed = tenancy.update_project(tx, row.project_id, version=row.version, name=typed.name or row.slug)
    guards.check_changed(changed, what=f"project {row.slug}")
    outbox.publish(tx, "project.updated", row.public_id, {"slug": row.slug}, tenant_id=row.tenant_id)
    return Outcome(_shown(resolve.find_project(tx, call, row.public_id, tenant_id=row.tenant_id)))


def _delete(
    tx: Tx,
    call: Call,
    typed: DeleteProject,
    target: Target[tenancy.Project],
) -> Outcome[Project]:
    row = target.row
    guards.check_free(tenancy.project_dependents(tx, row.project_id), what=f"project {row.slug}")
    changed = tenancy.delete_project(tx, row.project_id, version=row.version)
    guards.check_changed(changed, what=f"project {row.slug}")
    outbox.publish(tx, "project.deleted", row.public_id, {"slug": row.slug}, tenant_id=row.tenant_id)
    return Outcome(_shown(row))


METHODS = (
    Mutation(
        group="projects",
        name="create",
        action="project.create",
        input=CreateProject,
        output=Project,
        summary="Make a project in a tenant (your own if you name none).",
        load=_load_new,
        perform=_create,
    ),
    Read(
        group="projects",
        name="get",
        action="project.read",
        input=ProjectRef,
        output=Project,
        summary="Look at one project.",
        read=_get,
    ),
    Read(
        group="projects",
        name="list",
        action="project.read",
        input=ListProjects,
        output=Page[Project],
        summary="List the projects that you may see, oldest first.",
        read=_list,
    ),
    Mutation(
        group="projects",
        name="update",
        action="project.update",
        input=UpdateProject,
        output=Project,
        summary="Rename a project.",
        load=_load,
        perform=_update,
    ),
    Mutation(
        group="projects",
        name="delete",
        action="project.delete",
        input=DeleteProject,
        output=Project,
        summary="Remove a project that holds nothing.",
        load=_load,
        perform=_delete,
    ),
)
