"""`python -m headway_bench.gpu`; see run.py."""

from __future__ import annotations

import importlib
import importlib.util
import sys

if "--rehearse" in sys.argv and importlib.util.find_spec("triton") is not None:
    # Before anything imports triton, which decides then whether kernels are interpreted.
    importlib.import_module("headway_kernels.proof.interpreter")

from headway_bench.gpu.run import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
