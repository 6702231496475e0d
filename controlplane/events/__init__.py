"""Events leave the outbox here.

    sinks   posts them in order to each sink's URL, one worker a sink at a time

Event streams to clients are `controlplane.api.sse`; the outbox itself is `controlplane.db.outbox`.
"""
