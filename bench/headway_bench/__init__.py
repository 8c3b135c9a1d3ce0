"""Throughput benches of headway: `headway bench NAME` or `python -m headway_bench NAME`.

This module imports nothing: the rivals' runners (headway_bench.rivals) run in an environment that holds
neither headway nor its dependencies.
"""
