"""The ledger's moves, each a synchronous function inside one transaction.

    place      quota, plan under the nodes' locks, bookings; bind: holds, specs
    batch      the same for many that wait, in one transaction
    indexes    what a process knows of its pools: plans are made from it, and it guards nothing
    outlook    what would become of a request that is not made
    series     windows that come back, all or none
    quota      what tenants may hold, decided for many reservations at once
    preempt    makes borrowers go when an owner asks for what it is guaranteed
    specs      a node's desired state, written whole and signed
    evidence   what nodes signed: the only way to `active` and to `released`
    end        causes and releases
    lifecycle  what the clock makes due
    repair     what is broken is told, what has not begun is moved
    replace    what is broken of one that runs is replaced, at its holder's word
    windows    another end for a window, with the same devices or not at all

Lock order everywhere: reservation, quotas, nodes in the order of their ids.
"""
