"""One side of a run at a time, with all that carries its work; the other side is a peer that takes no time.

recorded   groups of the recipe, generated once, that a peer answers with
child      headway's own processes, one side of which does nothing
play       a run for some seconds, and its rates
bench      `headway bench generate` and `headway bench learn`
"""
