"""`headway bench fuzz`: hostile bytes at every socket of a learner's process while it serves honest generators.

bench     the command: sends, compares what was sent with what was counted, watches memory and service
target    the process: intake, desk and journal, control, requests and weights, behind their real sockets
mutate    messages of every kind, broken in every way; deterministic for a seed
"""
