"""What users expect of places, tenants, limits and keys: names, references, refusals, pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from tests.support.api import open_api
from tests.support.world import make_world

if TYPE_CHECKING:
    from tests.support.api import Api
    from tests.support.postgres import Dsn


async def _places(api: Api) -> None:
    await api.ok("sites/create", slug="berlin")
    await api.ok("pools/create", site="berlin", slug="h100", gpu_model="H100")


# --- finding things ----------------------------------------------------------------------------------------


async def test_ids_and_slugs_are_the_same_to_every_method(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        named: list[tuple[str, str, Any]] = [
            ("sites/get", "site", "berlin"),
            ("pools/get", "pool", "h100"),
            ("tenants/get", "tenant", "acme"),
            ("projects/get", "project", "vision"),
            ("offerings/get", "offering", "half"),
        ]
        for path, field, slug in named:
            by_slug = await api.ok(path, **{field: slug})
            assert await api.ok(path, **{field: by_slug["id"]}) == by_slug
        assert (await api.ok("tenants/get", key=world.acme))["slug"] == "acme", "one's own, if none is named"


async def test_unknown_names_come_with_suggestions(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await make_world(api, dsn)
        unknown: list[tuple[str, dict[str, Any], str, str]] = [
            ("pools/get", {"pool": "h10"}, "pool", "did you mean h100?"),
            ("pools/get", {"pool": "gpu"}, "pool", "there are: empty, h100"),
            ("sites/get", {"site": "berlim"}, "site", "did you mean berlin?"),
            ("tenants/get", {"tenant": "acmee"}, "tenant", "did you mean acme?"),
            ("projects/get", {"project": "visions"}, "project", "did you mean vision?"),
            ("pools/create", {"site": "bern", "slug": "x", "gpu_model": "y"}, "site", "did you mean berlin?"),
            ("offerings/create", {"pool": "h200", "slug": "x", "gpus": 1}, "pool", "did you mean h100?"),
        ]
        for path, typed, field, hint in unknown:
            reply = await api.call(path, **typed)
            assert (reply.code, reply.field) == ("NOT_FOUND", field)
            assert reply.message.endswith(hint)


async def test_suggestions_do_not_tell_of_other_tenants(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        reply = await api.call("tenants/get", key=world.rival, tenant="acmee")
        assert reply.message == "tenant: no tenant acmee; there are: rival"
        reply = await api.call("projects/get", key=world.rival, project="vision")
        assert reply.message == "project: no project vision"


async def test_a_slug_that_two_tenants_use_needs_the_tenant(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await make_world(api, dsn)
        await api.ok("projects/create", tenant="rival", slug="vision")
        ambiguous = await api.call("projects/get", project="vision")
        assert (ambiguous.code, ambiguous.field) == ("INVALID", "project")
        assert "name the tenant" in ambiguous.message
        assert (await api.ok("projects/get", project="vision", tenant="rival"))["tenant"] == "rival"


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "typed", "field"),
    [
        ("pools/create", {"site": "berlin", "slug": "a100"}, "gpu_model"),
        ("pools/create", {"site": "berlin", "slug": "cpus", "kind": "cpu", "gpu_model": "H100"}, "gpu_model"),
        ("pools/create", {"site": "berlin", "slug": "-x", "gpu_model": "H100"}, "slug"),
        ("pools/create", {"site": "berlin", "slug": "a", "gpu_model": "H", "acceptance": [""]}, "acceptance[0]"),
        ("tenants/create", {"slug": "Acme"}, "slug"),
        ("projects/create", {"slug": "x" * 64}, "slug"),
        ("quotas/create", {}, "gpus_max"),
        ("quotas/create", {"gpus_max": -1}, "gpus_max"),
        ("quotas/create", {"vcpus_max": 8, "gpus_borrow_max": 4}, "gpus_borrow_max"),
        ("quotas/create", {"gpus_max": 8, "gpu_model": "B200"}, "gpu_model"),
        ("quotas/create", {"gpus_max": 8, "gpu_model": "H100", "pool": "h100"}, "gpu_model"),
        ("quotas/create", {"gpu_hours_max": 8, "hours_period": "year"}, "hours_period"),
        ("quotas/create", {"gpus_max": 2**31}, "gpus_max"),
        ("quotas/create", {"memory_mib_max": 2**60}, "memory_mib_max"),
        ("offerings/create", {"pool": "h100", "slug": "none"}, "gpus"),
        ("offerings/create", {"pool": "empty", "slug": "x", "gpus": 1}, "gpus"),
        ("offerings/create", {"pool": "h100", "slug": "x", "gpus": 1_000_001}, "gpus"),
        ("apiKeys/create", {"name": ""}, "name"),
        ("apiKeys/create", {"name": "x", "role": "root"}, "role"),
        ("apiKeys/create", {"name": "x", "role": "operator", "tenant": "acme"}, "role"),
        ("apiKeys/create", {"name": "x", "principal": "admin", "role": "member"}, "role"),
        ("apiKeys/create", {"name": "x", "expires_in_s": 0}, "expires_in_s"),
        ("sites/list", {"limit": 0}, "limit"),
        ("sites/list", {"limit": 501}, "limit"),
        ("sites/list", {"limit": "5"}, "limit"),
        ("sites/list", {"cursor": "nonsense"}, "cursor"),
        ("sites/list", {"cursor": "é"}, "cursor"),
    ],
)
async def test_what_can_never_be_accepted_names_its_field(
    dsn: Dsn, path: str, typed: dict[str, Any], field: str
) -> None:
    async with open_api(dsn) as api:
        await _places(api)
        await api.ok("pools/create", site="berlin", slug="empty", kind="cpu")
        await api.ok("tenants/create", slug="acme")
        reply = await api.call(path, **typed)
        assert (reply.code, reply.field) == ("INVALID", field)
        assert reply.message.startswith(f"{field}: ")


async def test_names_are_taken_once(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await make_world(api, dsn)
        twice: list[tuple[str, dict[str, Any], str]] = [
            ("sites/create", {"slug": "berlin"}, "slug"),
            ("pools/create", {"site": "bonn", "slug": "h100", "gpu_model": "H100"}, "slug"),
            ("tenants/create", {"slug": "acme"}, "slug"),
            ("projects/create", {"tenant": "acme", "slug": "vision"}, "slug"),
            ("offerings/create", {"tenant": "acme", "pool": "h100", "slug": "half", "gpus": 1}, "slug"),
            ("quotas/create", {"tenant": "acme", "gpus_max": 1}, "tenant"),
            ("apiKeys/create", {"tenant": "acme", "name": "ci"}, "name"),
        ]
        for path, typed, field in twice:
            reply = await api.call(path, **typed)
            assert (reply.code, reply.field) == ("CONFLICT", field), reply.body


async def test_nothing_is_deleted_under_what_hangs_on_it(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await make_world(api, dsn)
        held: list[tuple[str, dict[str, Any], str]] = [
            ("sites/delete", {"site": "berlin"}, "site berlin still has 2 pools, 2 nodes; remove these first"),
            (
                "pools/delete",
                {"pool": "h100"},
                "pool h100 still has 2 nodes, 4 reservations, 1 offerings, 1 join tokens in force; remove these first",
            ),
            (
                "tenants/delete",
                {"tenant": "acme"},
                "tenant acme still has 1 tenants below it, 1 projects, 1 quotas, 1 offerings,"
                " 4 reservations, ended ones included, 3 API keys in force; remove these first",
            ),
            ("tenants/delete", {"tenant": "root"}, "tenant: the root tenant cannot be removed"),
        ]
        for path, typed, reason in held:
            reply = await api.call(path, **typed)
            assert (reply.code, reply.message) == ("CONFLICT", reason)
        await api.ok("projects/create", tenant="acme", slug="busy")
        await api.ok("reservations/create", tenant="acme", project="busy", pool="h100", gpus=1, duration_s=60)
        busy = await api.call("projects/delete", project="busy")
        assert busy.message == "project busy still has 1 reservations; remove these first"


async def test_a_deleted_name_is_free_again(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await _places(api)
        await api.ok("tenants/create", slug="acme")
        made: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("sites", {"slug": "bonn"}, {"site": "bonn"}),
            ("pools", {"site": "berlin", "slug": "cpus", "kind": "cpu"}, {"pool": "cpus"}),
            ("tenants", {"slug": "beta"}, {"tenant": "beta"}),
            ("projects", {"slug": "vision"}, {"project": "vision"}),
            ("offerings", {"slug": "one", "pool": "h100", "gpus": 1}, {"offering": "one"}),
        ]
        for group, typed, ref in made:
            first = await api.ok(f"{group}/create", **typed)
            gone = await api.ok(f"{group}/delete", **ref)
            assert gone["id"] == first["id"]
            assert (await api.call(f"{group}/get", **ref)).code == "NOT_FOUND"
            assert first["id"] not in str(await api.ok(f"{group}/list"))
            again = await api.ok(f"{group}/create", **typed)
            assert again["id"] != first["id"]


async def test_a_change_from_an_old_version_is_refused(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        refs: dict[str, dict[str, Any]] = {
            "sites": {"site": "berlin"},
            "pools": {"pool": "h100"},
            "tenants": {"tenant": "acme"},
            "projects": {"project": "vision"},
            "quotas": {"quota": world.quota},
            "offerings": {"offering": "half"},
        }
        for group, ref in refs.items():
            change: dict[str, Any] = ref | ({"gpus_max": 9} if group == "quotas" else {"name": "x"})
            assert (await api.ok(f"{group}/update", version=1, **change))["version"] == 2
            stale = await api.call(f"{group}/update", version=1, **change)
            assert (stale.code, stale.field) == ("CONFLICT", "version")
            stale = await api.call(f"{group}/delete", version=1, **ref)
            assert (stale.code, stale.field) == ("CONFLICT", "version")


# --- updates --------------------------------------------------------------------------------------------------


async def test_updates_leave_alone_what_they_do_not_name(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await _places(api)
        pool = await api.ok("pools/update", pool="h100", acceptance=["diag.nvml", "diag.nccl"])
        assert (pool["name"], pool["acceptance"]) == ("h100", ["diag.nvml", "diag.nccl"])
        pool = await api.ok("pools/update", pool="h100", name="The fast ones")
        assert (pool["name"], pool["acceptance"]) == ("The fast ones", ["diag.nvml", "diag.nccl"])
        assert not pool["preemption"]
        assert (await api.ok("pools/update", pool="h100", preemption=True))["preemption"]
        pool = await api.ok("pools/update", pool="h100", name="Fast")
        assert (pool["name"], pool["preemption"]) == ("Fast", True)
        quota = await api.ok("quotas/create", gpus_max=4, vcpus_max=8)
        quota = await api.ok("quotas/update", quota=quota["id"], gpus_max=6)
        assert (quota["gpus_max"], quota["vcpus_max"], quota["memory_mib_max"]) == (6, 8, None)
        quota = await api.ok("quotas/update", quota=quota["id"], vcpus_max=None)
        assert (quota["gpus_max"], quota["vcpus_max"]) == (6, None)


async def test_a_quota_may_be_for_a_model_lend_and_count_hours(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await _places(api)
        quota = await api.ok("quotas/create", gpu_model="h100", gpus_max=4, gpus_borrow_max=None, gpu_hours_max=100)
        assert (quota["pool"], quota["gpu_model"], quota["gpus_borrow_max"]) == (None, "H100", None)
        assert (quota["gpu_hours_max"], quota["gpu_hours_used"], quota["hours_period"]) == (100, 0.0, "month")
        again = await api.call("quotas/create", gpu_model="H100", gpus_max=1)
        assert again.code == "CONFLICT"
        quota = await api.ok("quotas/update", quota=quota["id"], gpus_borrow_max=2, hours_period="week")
        assert (quota["gpus_max"], quota["gpus_borrow_max"], quota["hours_period"]) == (4, 2, "week")
        assert quota["period_start"] < quota["period_end"]
        refused = await api.call("quotas/update", quota=quota["id"], gpus_max=None)
        assert refused.code == "INVALID"


async def test_a_quota_goes_by_what_it_is_for_too(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        places: list[dict[str, str]] = [
            {"tenant": "acme"},
            {"tenant": "acme", "gpu_model": "H1"},
            {"tenant": "acme", "project": "vision"},
            {"tenant": "acme", "project": "vision", "pool": "empty"},
        ]
        made = [world.quota, *[(await api.ok("quotas/create", gpus_max=8, **place))["id"] for place in places[1:]]]
        for place, quota in zip(places, made, strict=True):
            assert (await api.ok("quotas/get", quota=place))["id"] == quota
        changed = await api.ok("quotas/update", quota=places[2], gpus_max=5)
        assert (changed["id"], changed["gpus_max"]) == (made[2], 5)
        assert (await api.ok("quotas/delete", quota=places[3]))["id"] == made[3]
        missing = await api.call("quotas/get", quota=places[3])
        assert (missing.code, missing.field) == ("NOT_FOUND", "quota")
        assert missing.message.startswith("quota: there is none for project vision of acme in empty; ")
        both = await api.call("quotas/get", quota={"tenant": "acme", "pool": "h100", "gpu_model": "H100"})
        assert (both.code, both.field) == ("INVALID", "gpu_model")
        assert (await api.call("quotas/get", quota={"tenants": "acme"})).code == "INVALID"
        # whose it is decides as it does by id
        own = await api.call("quotas/update", key=world.acme, quota={"tenant": "acme"}, gpus_max=99)
        assert own.code == "DENIED"
        other = await api.call("quotas/get", key=world.acme, quota={"tenant": "root"})
        assert other.code == "NOT_FOUND"


async def test_a_new_quota_counts_what_is_held(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        for field, ref, used in (("pool", "h100", 3), ("pool", "empty", 0), ("project", "vision", 0)):
            quota = await api.call("quotas/create", **{"tenant": "acme", "gpus_max": 8, field: ref})
            assert quota.data["gpus_used"] == used
        await api.ok("reservations/release", id=world.reservation)


async def test_a_tenants_own_quota_is_set_from_above(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        assert (await api.call("quotas/update", key=world.acme, quota=world.quota, gpus_max=99)).code == "DENIED"
        assert (await api.call("quotas/create", key=world.acme, pool="h100", gpus_max=99)).code == "DENIED"
        project = await api.ok("quotas/create", key=world.acme, project="vision", gpus_max=2)
        assert (project["tenant"], project["project"]) == ("acme", "vision")
        below = await api.ok("quotas/create", key=world.acme, tenant="nobody", gpus_max=1)
        assert below["tenant"] == "nobody"


async def test_a_raised_quota_wakes_what_waits_for_it(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await api.ok("quotas/update", quota=world.quota, gpus_max=1)
        waiting = await api.ok("reservations/create", tenant="acme", pool="h100", gpus=1, duration_s=60)
        assert waiting["state"] == "queued"
        with psycopg.connect(dsn.owner, autocommit=True) as conn:
            conn.execute("delete from work_queue")
            await api.ok("quotas/update", quota=world.quota, gpus_max=2)
            assert conn.execute("select queue from work_queue").fetchall() == [("pool",)]


async def test_pools_show_what_they_have(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await make_world(api, dsn)
        pool = await api.ok("pools/get", pool="h100")
        assert {name: pool[name] for name in ("site", "nodes", "nodes_placeable", "gpus", "gpus_held", "vcpus")} == {
            "site": "berlin",
            "nodes": 2,
            "nodes_placeable": 2,
            "gpus": 16,
            "gpus_held": 1,
            "vcpus": 128,
        }
        assert (await api.ok("pools/get", pool="empty"))["gpus"] == 0
        assert pool in (await api.ok("pools/list", site="berlin"))["items"]
        assert (await api.ok("pools/list", site="bonn"))["items"] == []
        assert (await api.ok("sites/get", site="berlin"))["pools"] == 2


# --- keys -----------------------------------------------------------------------------------------------------


async def test_keys_for_new_and_existing_principals(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        first = await api.ok("apiKeys/create", name="alice", role="operator", expires_in_s=3600)
        assert (first["roles"], first["kind"], first["tenant"]) == (["operator"], "user", "root")
        assert first["expires_at"] > first["created_at"]
        second = await api.ok("apiKeys/create", name="laptop", principal="alice")
        third = await api.ok("apiKeys/create", name="phone", principal=first["principal"])
        assert {second["principal"], third["principal"]} == {first["principal"]}
        assert (await api.ok("pools/list", key=second["key"]))["items"] == []
        shown = await api.ok("apiKeys/get", id=second["id"])
        assert shown == second | {"key": None}
        assert (await api.call("apiKeys/create", name="x", principal="nobody")).field == "principal"
        listed = (await api.ok("apiKeys/list"))["items"]
        assert [key["name"] for key in listed] == ["first key", "alice", "laptop", "phone"]
        assert all(key["key"] is None for key in listed)


async def test_an_admin_of_a_tenant_makes_keys_in_it_alone(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        bob = await api.ok("apiKeys/create", key=world.acme, name="bob")
        # a holder of another tenant is named to whom sees that tenant
        elsewhere = await api.call("apiKeys/create", name="b", principal="bob")
        assert elsewhere.message == (
            "principal: no user or service bob in tenant root; there is one in acme: name that tenant"
        )
        await api.ok("apiKeys/create", name="b", principal="bob", tenant="acme")
        await api.ok("apiKeys/create", name="mallory", tenant="rival")
        hidden = await api.call("apiKeys/create", key=world.acme, name="m", principal="mallory")
        assert hidden.message == "principal: no user or service mallory in tenant acme"
        assert (bob["tenant"], bob["roles"]) == ("acme", ["member"])
        assert (await api.call("apiKeys/create", key=world.acme, name="eve", tenant="rival")).code == "NOT_FOUND"
        assert (await api.call("apiKeys/create", key=world.acme, name="eve", tenant="root")).code == "NOT_FOUND"
        denied = await api.call("apiKeys/create", key=bob["key"], name="eve")
        assert (denied.code, denied.message) == (
            "DENIED",
            "bob may not api_key.create here: no role allows it, only member held",
        )


async def test_a_mistyped_offering_is_answered_with_the_one_meant(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        await api.ok("offerings/create", tenant="rival", pool="h100", slug="halve", gpus=4)
        asked = {"offering": "hlf", "duration_s": 60}
        meant = "offering: no offering hlf; did you mean half?"
        assert (await api.call("reservations/create", key=world.acme, **asked)).message == meant
        assert (await api.call("offerings/get", key=world.acme, offering="hlf")).message == meant
        other = await api.call("offerings/get", key=world.acme, offering="halv")
        assert other.message == "offering: no offering halv; did you mean half?", "another tenant's is not named"


# --- lists ------------------------------------------------------------------------------------------------------


async def test_pages_visit_everything_once(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        for n in range(7):
            await api.ok("sites/create", slug=f"site-{n}")
        for path, count in (("sites/list", 7), ("events/list", 7), ("audit/list", 8)):
            seen: list[str] = []
            cursor: str | None = None
            pages = 0
            while True:
                page = await api.ok(path, limit=3, cursor=cursor)
                seen += [str(item) for item in page["items"]]
                pages += 1
                cursor = page["next_cursor"]
                if cursor is None:
                    break
            assert (len(seen), len(set(seen)), pages) == (count, count, 3)
            whole = await api.ok(path, limit=count)
            assert ([str(item) for item in whole["items"]], whole["next_cursor"]) == (seen, None)


async def test_a_cursor_of_another_list_is_refused(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        for slug in ("berlin", "bonn"):
            await api.ok("sites/create", slug=slug)
        cursor = (await api.ok("sites/list", limit=1))["next_cursor"]
        for path in ("pools/list", "events/list"):
            reply = await api.call(path, cursor=cursor)
            assert (reply.code, reply.field) == ("INVALID", "cursor")


async def test_events_and_audit_can_be_narrowed(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        await _places(api)
        pool = await api.ok("pools/get", pool="h100")
        await api.call("pools/create", site="berlin", slug="h100", gpu_model="H100")
        events = (await api.ok("events/list", kind="pool"))["items"]
        assert [(event["kind"], event["subject"]) for event in events] == [("pool.created", pool["id"])]
        assert len((await api.ok("events/list"))["items"]) == 2
        assert len((await api.ok("events/list", subject=pool["id"]))["items"]) == 1
        wrong = await api.call("events/list", kind="pool.create")
        assert (wrong.field, wrong.message) == (
            "kind",
            "kind: no event is of kind pool.create; did you mean pool.created?",
        )
        wrong = await api.call("events/list", kind="%")
        assert wrong.message.startswith("kind: no event is of kind %; one begins with apiKey, command, joinToken, ")
        rows = (await api.ok("audit/list", action="pool.create"))["items"]
        assert [(row["decision"], row["resource"]) for row in rows] == [("allow", pool["id"])]
        assert rows[0]["detail"]["input"]["slug"] == "h100"
        assert (await api.ok("audit/list", decision="deny"))["items"] == []


async def test_members_and_admins_see_their_own_audit(dsn: Dsn) -> None:
    async with open_api(dsn) as api:
        world = await make_world(api, dsn)
        assert (await api.call("audit/list", key=world.member)).code == "DENIED"
        actions = [row["action"] for row in (await api.ok("audit/list", key=world.acme))["items"]]
        assert "reservation.create" in actions
        assert "site.create" not in actions
        assert "audit.read" in actions, "the member's refused request"
        assert (await api.call("audit/list", key=world.acme, tenant="rival")).code == "NOT_FOUND"
