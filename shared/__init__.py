"""What the control plane and the agent both speak, and the idioms both are built with.

The language between them: `wire` (messages and the history of the protocol number), `http2` (the
session's core without I/O), `transport` and `tls` (how bytes and certificates get there), `joining`
(a machine's first words), `signing` and `identity` (whose word counts), `ids`, `inventory`.

The idioms: `services` (nurseries whose tasks outlive their users, supervision), `leases`, `backoff`,
`clocks`, `files` (private and atomic), `logs`, `metrics`, `instruments`.
"""
