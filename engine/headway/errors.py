"""The errors of headway: one tree, re-exporting its lower half from headway_kernels.errors.

    HeadwayError
    ├── (headway_kernels.errors: UnsupportedOption, ShapeError, NumericsError, MalformedDelta, BackendUnavailable)
    ├── ConfigError        (ValueError)       a recipe or an override is wrong; lists every fault with its path
    ├── WireError          (ValueError)       bytes from a peer that are not a valid message; carries a reason
    ├── StreamError        (ConnectionError)  a peer refused, vanished, or speaks another protocol or run
    ├── DeadlineExceeded   (TimeoutError)     a wait ended at its deadline; says what it waited for
    ├── JournalError       (RuntimeError)     a journal that is damaged, incomplete, or cannot be written
    │   └── JournalFull                       no space for it now; nothing is lost, and writing can be tried again
    ├── CheckpointError    (RuntimeError)     a checkpoint that is incomplete, damaged, or lacks what is asked for
    ├── ReplayRefused      (RuntimeError)     a replay that could not give the run's bits; says what is not the same
    ├── RunLocked          (RuntimeError)     another process works on the run; names it
    ├── ModelError         (ValueError)       a model folder that cannot be loaded, or lacks what is needed
    ├── WeightError        (RuntimeError)     a push that is torn, of another manifest, or did not arrive
    ├── EnvironmentFailure (RuntimeError)     an environment or reward that cannot be used
    ├── TrainingStopped    (RuntimeError)     training must not go on; names the cause
    ├── OwnershipError     (RuntimeError)     a socket or object used by a thread that does not own it
    └── RunFailed          (RuntimeError)     a run ended without reaching its last update; names the process

Every class is also a standard-library type and pickles.
"""

from __future__ import annotations

from headway_kernels.errors import (
    BackendUnavailable,
    HeadwayError,
    MalformedDelta,
    NumericsError,
    ShapeError,
    UnsupportedOption,
)

__all__ = [
    "EXIT_USER_ERROR",
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineEnded",
    "EnvironmentFailure",
    "HeadwayError",
    "MalformedDelta",
    "ModelError",
    "NumericsError",
    "OwnershipError",
    "ReplayRefused",
    "RunFailed",
    "RunLocked",
    "ShapeError",
    "StreamError",
    "TrainingStopped",
    "UnsupportedOption",
    "WeightError",
    "WireError",
]

EXIT_USER_ERROR = 2
"""Exit status of a process whose error a restart does not mend: the supervisor does not try again."""


class ConfigError(HeadwayError, ValueError):
    """A recipe or an override is wrong.

    Attributes:
        faults: every fault found, each as (dotted path, message), in the order of the recipe.
    """

    def __init__(self, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"{path}: {message}" if path else message for path, message in faults))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[tuple[str, str]]]]:
        return (ConfigError, (self.faults,))


class WireError(HeadwayError, ValueError):
    """Bytes from a peer that are not a valid message.

    Attributes:
        reason: a short word for the counter, such as "schema", "frames", "limit", "lengths".
    """

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        self.message = message
        super().__init__(f"{reason}: {message}")

    def __reduce__(self) -> tuple[type[WireError], tuple[str, str]]:
        return (WireError, (self.reason, self.message))


class StreamError(HeadwayError, ConnectionError):
    """A peer refused, vanished, or speaks another protocol or run."""


class DeadlineExceeded(HeadwayError, TimeoutError):
    """A wait ended at its deadline; the message says what it waited for."""


class JournalError(HeadwayError, RuntimeError):
    """A journal that is damaged or incomplete, or a disk that cannot be written; names the file."""


class JournalFull(JournalError):
    """There is no space for the journal now; nothing is lost, and writing can be tried again."""


class CheckpointError(HeadwayError, RuntimeError):
    """A checkpoint is incomplete or damaged, or lacks what is asked for."""


class ReplayRefused(HeadwayError, RuntimeError):
    """A replay could not give the bits of the run, because something is not the same; the message says what."""


class RunLocked(HeadwayError, RuntimeError):
    """Another process works on the run; the message names it."""


class ModelError(HeadwayError, ValueError):
    """A model folder that cannot be loaded, or that lacks what is needed."""


class WeightError(HeadwayError, RuntimeError):
    """A push that is torn, belongs to another manifest, or did not arrive."""


class EngineEnded(HeadwayError, RuntimeError):
    """An inference engine has lost one of its processes; the message names it."""


class EnvironmentFailure(HeadwayError, RuntimeError):
    """An environment or a reward that cannot be used."""


class TrainingStopped(HeadwayError, RuntimeError):
    """Training must not go on; the message names the cause."""


class OwnershipError(HeadwayError, RuntimeError):
    """A socket or object was used by a thread that does not own it."""


class RunFailed(HeadwayError, RuntimeError):
    """A run ended without reaching its last update; the message names the process and the cause."""
