"""The control plane: who has what, and why nobody else can.

    model        pure: units, requests, planner, state tables. No await, no SQL, no clock
    db           PostgreSQL: pool, transactions, migrations, the embedded server; one module of SQL a table family
    queue        the work queue's runner, shards, leases
    capacity     the ledger: place, bind, end, evidence, windows
    fleet        nodes: join, keys, inventory, lifecycle, commands
    iam          who may: the port, the gate, the embedded IAM
    events       the outbox, posted to sinks
    gateway      agents' sessions
    reconcilers  what workers run
    api          the HTTP application: envelope, method table, groups, event streams
    serving      hypercorn's protocols, contained; server: one process, started and stopped
    app          the composition root, the only module that knows all parts
    cli          `bcctl`

`config` is the configuration file, `errors` what a caller of the API can meet.
"""
