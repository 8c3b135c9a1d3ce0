"""Runners of other engines on headway's workloads. They import only the standard library, torch, transformers and
the engine they run, because they run in that engine's own environment."""
