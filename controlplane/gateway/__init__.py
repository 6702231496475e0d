"""The gateway: holds the sessions that agents dial, and passes on what others have signed.

gateway     `open_gateway`, the whole; stopping in order
settings    `GatewaySettings`: intervals and bounds
state       what all connections share
listener    accept, handshake, one task per connection
door        who may come in before being known, by address
session     one connection and the session it may become: events in, messages out
checks      what a message must be before it is taken
sections    inventory chunks put together, within a pool of memory
desk        the trust bundle, joins and renewals; `relay` carries them to the api
tenure      what exists under one lease epoch, and the lease
admission   Hellos: token bucket, waiting room, one transaction for all who wait
registry    the newest session of each node
ingest      group commit of what agents send
dispatch    specs and commands to the sessions that can take them
liveness    ages of sessions, and their ends
sweeper     deadlines of all connections
drain       asking sessions to leave

The database role `bc_gateway` and the SQL are in `controlplane.db.sessions`, `.delivery` and `.inbox`.
"""
