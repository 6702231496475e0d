"""`bcd`, the agent on each server: joins a fleet, keeps a session up, makes the machine what its NodeSpec says.

Joining and leaving: `joiner` (with `tokens`, `pending`, `unary`), and what is left afterwards: `membership`.
Running: `app` composes it. `dialing` and `session` talk to a gateway, `uplink` holds what waits to be
told, `statements` signs it. `reconcile` decides (pure) and `binder` does; `commands` runs one-shot actions,
each at most once (`diagnostics` are the kinds there are); `watch` looks at the machine; `renewal` renews the
certificate; `health` names what is wrong; `snapshot` and `status` are ``bcd status``; `doctor` checks;
`running` is the process of ``bcd run``.
Below: `journal` (what must be remembered), `drivers` (what touches hardware), `machine` (which of them),
`config`, `connect`, `endpoints`, `blocking`, `exits`, `systemd`. `main` is the command line.
"""
