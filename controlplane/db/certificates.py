"""Who a node is: its row at a join, its certificates, and whether its key may still speak.

Admission writes everything a node begins with in one statement, so that a join costs a handful of
them. Certificates of earlier keys stay valid as evidence until they are revoked; what decides
whether a node may open a session at all is its one row of `node_authorization`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from controlplane.db.tx import Tx


@dataclass(frozen=True, slots=True)
class NewCertificate:
    """A certificate as its row says it; `public_key` is SubjectPublicKeyInfo in DER."""

    serial: str
    key_id: str
    public_key: bytes
    spiffe_id: str
    not_before: datetime
    not_after: datetime


@dataclass(frozen=True, slots=True)
class Admission:
    """What one join writes. `replay_s` is how long a lost answer can be asked for again."""

    token_id: int
    node_public_id: str
    site_id: int
    pool_id: int
    name: str
    machine_id: str
    agent_version: str
    certificate: NewCertificate
    answer: bytes
    replay_s: float


# Shared by a first join and a re-join; `joined` names the node.
_SPEND_AND_CERTIFY = """spent as (
    update join_token set uses_left = uses_left - 1 where token_id = %(token)s and uses_left > 0 returning token_id
  ), certified as (
    insert into certificate (node_id, serial, key_id, public_key, spiffe_id, issued_by, not_before, not_after,
                             created_at)
    select node_id, %(serial)s, %(key_id)s, %(public_key)s, %(spiffe_id)s, 'join', %(not_before)s, %(not_after)s,
           compute_now()
    from joined
  ), authorized as (
    insert into node_authorization as a (node_id, key_id, public_key)
    select node_id, %(key_id)s, %(public_key)s from joined
    on conflict (node_id) do update
      set key_id = excluded.key_id, public_key = excluded.public_key, granted_at = compute_now(),
          refreshed_at = compute_now(), revoked_at = null, revoke_reason = ''
  ), kept as (
    insert into join_replay as r (token_id, key_id, node_id, answer, expires_at)
    select %(token)s, %(key_id)s, node_id, %(answer)s, compute_now() + make_interval(secs => %(replay_s)s) from joined
    on conflict (token_id, key_id) do update
      set node_id = excluded.node_id, answer = excluded.answer, expires_at = excluded.expires_at
  )
  select joined.node_id from joined, spent"""


def admit_node(tx: Tx, admission: Admission) -> int | None:
    """Write a new node in `adopting` with all its rows and spend one use; None if none was left.

    Raises UniqueConflict (node_name) for a name that another join took meanwhile.
    """
    return tx.value(
        f"""
        with joined as (
          insert into node (public_id, site_id, pool_id, name, provision_state, machine_id, agent_version)
          values (%(public_id)s, %(site)s, %(pool)s, %(name)s, 'adopting', %(machine_id)s, %(agent_version)s)
          returning node_id
        ), counted as (
          insert into node_capacity (node_id) select node_id from joined
        ), sessions as (
          insert into node_session (node_id) select node_id from joined
        ), {_SPEND_AND_CERTIFY}
        """,
        _parameters(admission),
    )


def readmit_node(tx: Tx, node_id: int, admission: Admission) -> int | None:
    """Let a known node begin again in its row, locked by the caller: what it holds stays.

    Its earlier certificates are revoked, its session is over: the epoch moves, so that nothing that
    the earlier agent's gateway still has in hand is written.
    """
    tx.wake("bc_gateway", str(node_id))
    return tx.value(
        f"""
        with revoked as (
          update certificate set revoked_at = compute_now() where node_id = %(node)s and revoked_at is null
        ), closed as (
          update node_session set open = false, epoch = epoch + 1, closed_at = compute_now() where node_id = %(node)s
        ), joined as (
          update node
          set provision_state = 'adopting', adopting_at = compute_now(), quarantine_reason = '',
              machine_id = %(machine_id)s, agent_version = %(agent_version)s, version = version + 1
          where node_id = %(node)s and provision_state <> 'decommissioned'
          returning node_id
        ), {_SPEND_AND_CERTIFY}
        """,
        {**_parameters(admission), "node": node_id},
    )


def _parameters(admission: Admission) -> dict[str, object]:
    certificate = admission.certificate
    return {
        "token": admission.token_id,
        "public_id": admission.node_public_id,
        "site": admission.site_id,
        "pool": admission.pool_id,
        "name": admission.name,
        "machine_id": admission.machine_id,
        "agent_version": admission.agent_version,
        "answer": admission.answer,
        "replay_s": admission.replay_s,
        **{field: getattr(certificate, field) for field in NewCertificate.__slots__},
    }


@dataclass(frozen=True, slots=True)
class ExpectedNode:
    """The node that a token was made for, locked."""

    node_id: int
    public_id: str
    site_id: int
    site_slug: str
    pool_id: int
    name: str
    provision_state: str
    machine_id: str
    gpu_uuids: list[str]


def lock_expected(tx: Tx, node_id: int) -> ExpectedNode:
    expected = tx.row(
        ExpectedNode,
        """
        select n.node_id, n.public_id, n.site_id, s.slug as site_slug, n.pool_id, n.name, n.provision_state,
               n.machine_id,
               array(select d.uuid from device d where d.node_id = n.node_id and d.retired_at is null
                     order by d.slot) as gpu_uuids
        from node n join site s using (site_id)
        where n.node_id = %(node)s
        for no key update of n
        """,
        {"node": node_id},
    )
    assert expected is not None, "a token's expected node is never deleted"
    return expected


# --- renewal ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Renewable:
    """A node that asks for its next certificate, locked, and the certificate that it shows."""

    now: datetime
    node_id: int
    public_id: str
    site_slug: str
    provision_state: str
    authorized: bool
    public_key: bytes | None
    not_after: datetime | None
    certificate_revoked: bool
    issued_recently: int


def lock_renewable(tx: Tx, node_public_id: str, serial: str, *, recent_s: float) -> Renewable | None:
    """`public_key` and `not_after` are None for a serial that is not the node's."""
    node_id = tx.value(
        """
        select a.node_id from node n join node_authorization a using (node_id)
        where n.public_id = %(id)s for no key update of a
        """,
        {"id": node_public_id},
    )
    if node_id is None:
        return None
    return tx.row(
        Renewable,
        """
        select compute_now() as now, n.node_id, n.public_id, s.slug as site_slug, n.provision_state,
               a.revoked_at is null as authorized, c.public_key, c.not_after,
               c.revoked_at is not null as certificate_revoked,
               (select count(*) from certificate r
                where r.node_id = n.node_id and r.issued_by = 'renewal'
                  and r.created_at > compute_now() - make_interval(secs => %(recent)s))::int4 as issued_recently
        from node n join site s using (site_id) join node_authorization a using (node_id)
        left join certificate c on c.node_id = n.node_id and c.serial = %(serial)s
        where n.node_id = %(node)s
        """,
        {"node": node_id, "serial": serial, "recent": recent_s},
    )


def add_renewal(tx: Tx, node_id: int, certificate: NewCertificate) -> None:
    """Store the next certificate; the ones before stay valid, for evidence that they signed."""
    tx.execute(
        """
        with certified as (
          insert into certificate (node_id, serial, key_id, public_key, spiffe_id, issued_by, not_before, not_after,
                                   created_at)
          values (%(node)s, %(serial)s, %(key_id)s, %(public_key)s, %(spiffe_id)s, 'renewal', %(not_before)s,
                  %(not_after)s, compute_now())
        )
        update node_authorization
        set key_id = %(key_id)s, public_key = %(public_key)s, refreshed_at = compute_now()
        where node_id = %(node)s
        """,
        {"node": node_id, **{field: getattr(certificate, field) for field in NewCertificate.__slots__}},
    )


# --- revocation ------------------------------------------------------------------------------


def revoke_authorization(tx: Tx, node_id: int, *, reason: str) -> bool:
    """Silence a node: no session, no renewal, no evidence. Says whether it could speak before.

    The session's epoch moves, so a gateway that still has the stream can write nothing for it.
    """
    # its gateway looks, and finds that the session is over
    tx.wake("bc_gateway", str(node_id))
    revoked = tx.value(
        """
        with silenced as (
          update node_authorization set revoked_at = compute_now(), revoke_reason = %(reason)s
          where node_id = %(node)s and revoked_at is null returning node_id
        ), certificates as (
          update certificate set revoked_at = compute_now() where node_id = %(node)s and revoked_at is null
        ), closed as (
          update node_session set open = false, epoch = epoch + 1, closed_at = compute_now() where node_id = %(node)s
        ), cut_off as (
          -- we have just hung up on it: nothing new may be placed there while its lease runs out
          update node set connectivity = 'unreachable', connectivity_at = compute_now()
          where node_id = %(node)s and connectivity = 'connected'
        )
        select count(*) from silenced
        """,
        {"node": node_id, "reason": reason},
    )
    return revoked == 1
