"""PostgreSQL: the only package that speaks SQL, and the only one that imports psycopg.

The machinery: `pool` (`open_database`, `run_tx` on trio), `tx` (one transaction and its outcomes),
`notify` (wake-ups), `migrate` (the schema's versions), `embedded` (a server of one's own, with
`binaries`, `embedded_state`, `embedded_settings` and `embedded_launch` behind it).

Every other module holds the SQL of one family of tables, as functions that take a `Tx`.
"""
