"""`headway bench chaos`: real runs of processes under random faults, and what must hold whatever was done to them.

schedule   a seed -> a small recipe and the faults to come
attempt    one attempt at a run, in a process that may be killed like any other
child      learner and generators behind a disk that fills up, a wall clock that jumps, and a proxy
proxy      TCP connections that are slow, silent, or cut
play       a schedule from its first attempt to its last update
verify     the invariants, read from the run's folder by code that shares nothing with the learner
"""
