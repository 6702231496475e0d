"""`bcd`, the agent on each server: it joins a fleet, keeps one session up, and makes the machine what its NodeSpec says.

Joining: `joiner` (with `pending`, `unary`), `leave`, and what is left afterwards (`membership`).
Running: `app` composes it. `dialing` and `session` talk to a gateway, `uplink` holds what waits to be
told, `statements` signs it. `reconcile` decides (pure) and `binder` does; `commands` runs one-shot actions,
each at most once (`diagnostics` are the kinds there are); `watch` looks at the machine; `renewal` renews the
certificate; `health` names what is wrong; `snapshot` is what ``bcd status`` reads; `doctor` checks.
Below: `journal` (what must be remembered), `drivers` (what touches hardware), `machine` (which of them),
`config`, `connect`, `endpoints`, `blocking`, `systemd`. `main` is the command line.
"""
