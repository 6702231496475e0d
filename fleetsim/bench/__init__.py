"""Benchmarks: figures of the whole system on the wall clock, never tests.

running     runs any benchmark: its worlds, one after the other, and its report
spine       `fleetsim bench spine`; spine_figures has what it reports
placements  `fleetsim bench placements`; placements_figures has what it reports
placing     watches a placer at work, and does its commits again without it
planning    loads indexes and times plans
inline      `fleetsim bench inline`; inline_figures has what it reports
queue       `fleetsim bench queue`; queue_figures has what it reports
quota       `fleetsim bench quota`; quota_figures has what it reports
booking     clients that book over HTTP, and race for the last unit; callers are their connections
install     the world of a new user: pip, `bcctl dev`, `bcctl reserve`
joins       makes a fleet join, and counts what that costs
holding     takes GPUs and lets them go, in turn or at a rate
cost        what a join or a reservation takes: statements, transactions, CPU
ledger      a PostgreSQL with an empty ledger, embedded or the system's
synthetic   fleets that are written straight into a ledger; holds says who holds what of them
turnover    what waits and what ends in them
server      starts what is measured, as a user would
fleet       the simulated agents, in a process of their own
children    child processes
processes   their memory and CPU, from /proc
samples     percentiles and medians
figures     what a figure and a benchmark are made of
machine     where and with what it was measured
report      JSON and the table
"""
