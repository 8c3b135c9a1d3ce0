"""One process, one thread: serial runs and the self-check."""

from headway.serial.run import DirectSource, DirectWeights, SerialRun, run_serial

__all__ = ["DirectSource", "DirectWeights", "SerialRun", "run_serial"]
