"""Runners of other engines on headway's workloads.

They import the standard library, torch, transformers and the engine they run; their environment is another.
"""
