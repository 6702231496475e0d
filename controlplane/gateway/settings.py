"""Every interval and bound of a gateway, each with its reason.

The numbers that an operator or a test may want to change are fields of `GatewaySettings`; those that
follow from the protocol are constants of the modules that use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.leases import LeaseTiming
from shared.wire import HEARTBEAT_S, SESSION_LEASE_S

# Others may take the lease after 20 s; the holder stops trusting it 5 s earlier, which covers two
# clocks that differ and the time to let go of every session.
LEASE = LeaseTiming(ttl_s=20.0, renew_every_s=5.0, margin_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How one gateway behaves. All times are in seconds."""

    # Names the lease `gateway:<id>` and the sessions' rows. With an id of its own a process never
    # waits for the lease of the one before it.
    gateway_id: str
    trust_domain: str

    lease: LeaseTiming = LEASE

    # --- the door ---
    # Connections whose peer is not known yet: about 30 KiB each, so 30 MiB.
    pending_max: int = 1024
    # Of which from one address. Behind a balancer all agents have one address, so what is over waits
    # its turn instead of being turned away; a flood from one address delays only that address.
    pending_per_address_max: int = 768
    # Accepted sockets that wait for such a turn: a file descriptor each, as many as the kernel's own queue.
    parked_max: int = 4096

    # --- Hellos ---
    # Twice what one core does in handshakes, so that the bucket bites only when Hellos come without them.
    hellos_per_s: float = 500.0
    # As many as wait together, so a burst that fits the waiting room is not thinned out first.
    hellos_burst: int = 64
    pending_hellos_max: int = 64

    # --- sessions ---
    heartbeat_s: float = HEARTBEAT_S
    session_lease_s: float = SESSION_LEASE_S
    # After the handshake: the control lane and its Hello, or a plain request.
    hello_s: float = 5.0
    # After Welcome: the other two lanes.
    lanes_s: float = 5.0
    # Three heartbeats missed; below the lease, so the node can be back before it counts as gone.
    silence_s: float = 3 * HEARTBEAT_S

    # --- delivery ---
    dispatch_every_s: float = 1.0
    poke_window_s: float = 0.010
    # Sessions whose node has a newer one elsewhere, or may no longer speak, end within this.
    sweep_s: float = 10.0
    dispatch_batch: int = 1000

    liveness_every_s: float = 15.0

    # --- stopping ---
    # Half of what one core takes back in full sessions a second: the gateways that take them over have other work.
    drain_per_s: float = 125.0
