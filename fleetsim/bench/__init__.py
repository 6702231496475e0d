"""Benchmarks: figures of the whole system on the wall clock, never tests.

spine       `fleetsim bench spine`: its worlds, one after the other, and its report
install     the world of a new user: pip, `bcctl dev`, `bcctl reserve`
joins       makes a fleet join, and counts what that costs
holding     takes GPUs and lets them go, in turn or at a rate
cost        what a join or a reservation takes: statements, transactions, CPU
server      starts what is measured, as a user would
fleet       the simulated agents, in a process of their own
children    child processes
processes   their memory and CPU, from /proc
samples     percentiles and medians
figures     every figure's name, unit, goal and reference
machine     where and with what it was measured
report      JSON and the table
"""
