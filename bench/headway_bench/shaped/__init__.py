"""Real runs whose device time is modelled by sleeps: on two cores, generation and training then overlap as they do
on accelerators, and every rate is known.

    shape   how long decode steps, updates, pushes and completions take
    child   headway's own processes, which take that long
    play    one run of a recipe in a shape
"""
