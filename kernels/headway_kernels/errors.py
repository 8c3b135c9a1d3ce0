"""The errors of headway_kernels, the lower half of one tree (headway.errors holds the upper half).

    HeadwayError
    ├── UnsupportedOption    (ValueError)          a backend or a version lacks what was asked for
    ├── ShapeError           (ValueError)          a tensor's shape, dtype, device or stride is not what the op takes
    ├── NumericsError        (FloatingPointError)  a value that must be finite is not
    ├── MalformedDelta       (ValueError)          bytes that are no valid weight delta
    └── BackendUnavailable   (RuntimeError)        the asked backend cannot run on this machine

Every class is also a standard-library type and pickles. A message says what was wrong, what came, what is
expected, and what to do.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """Base of every error that headway raises on purpose."""


class UnsupportedOption(HeadwayError, ValueError):
    """A backend, an objective or an installed version lacks the option that was asked for."""


class ShapeError(HeadwayError, ValueError):
    """A tensor's shape, dtype, device or layout is not what the op takes."""


class NumericsError(HeadwayError, FloatingPointError):
    """A value that must be finite is not."""


class MalformedDelta(HeadwayError, ValueError):
    """Bytes, most likely from the wire, that are no valid weight delta; nothing was applied."""


class BackendUnavailable(HeadwayError, RuntimeError):
    """The asked backend cannot run on this machine."""
