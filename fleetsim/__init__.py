"""Fleets of simulated machines on the wall clock, and benchmarks with them.

main        the program `fleetsim`
agents      `fleetsim agents`: real agents of simulated machines, many in one process
spec        which machines those are
progress    what they tell whoever started them
process     the end of the parent, and the limit of open files
groups      exception groups as lists
bench       the benchmarks; see there
"""
