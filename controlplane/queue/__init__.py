"""Work that is divided among the workers, one key at a time.

* `membership`: a worker's heartbeat, its shards by rendezvous hashing, their leases.
* `worker`: fetches, runs and settles the keys of one queue on the shards that are held.
* `outcome`: what a run says about its key.
* `singleton`: work that one process of all does, under a lease.
* `bells`: wake-ups inside a process.

The rows are in `controlplane.db.queue`, `.leases` and `.workers`; what is run, in
`controlplane.reconcilers`.
"""
