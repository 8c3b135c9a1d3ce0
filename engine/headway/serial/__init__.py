"""One process, one thread: serial runs and the self-check."""

from headway.serial.run import DirectWeights, SerialRun, run_serial

__all__ = ["DirectWeights", "SerialRun", "run_serial"]
