"""The HTTP API: `POST /api/compute/{group}/{method}`.

front      the way in: methods to the envelope, everything else to the application
app        paths of the Quart application
envelope   what happens around every method, and the order of it
mutations  prepare, decide once, perform; idempotency and audit
calls      what a group of methods is written with: read `Read`, `Mutation` and `Drafted` first
methods    the method table
groups     the methods themselves
inputs     bytes to typed requests
answers    outcomes to bytes
resolve, guards, cursors, fields   what groups share
sse        event streams
health, metrics, openapi, doctor   for balancers, Prometheus, generators and operators
"""
