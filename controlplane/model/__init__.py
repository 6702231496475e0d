"""What can be decided without looking: pure functions and tables, no await, no SQL, no clock.

states                 state machines as data
units, requests        the line of units; what a user's totals become
nodeview, nvlink, fit  a node as the planner sees it, and what of it fits
planner, index         plans; the same from an index of a pool
refusals, earliest     why not, and when
devices                slots, health and links from an inventory
quotas                 what a reservation takes of every limit that it counts against
preemption, periods    who has to go for an owner; days, weeks and months
evidence               what became of a signed statement
queues, shards         the work queues by name, and how keys are divided
"""
