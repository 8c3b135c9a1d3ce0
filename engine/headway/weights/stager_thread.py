"""A stager on a thread of its own, beside the engine's: what a generator process runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headway.errors import DeadlineExceeded, HeadwayError, WeightError
from headway.types import PolicyVersion
from headway.weights.staged import Proof
from headway.weights.stager import Stager

WAIT_S = 0.2


class StagerThread:
    """Runs a Stager on a thread of its own.

    Args:
        open_stager: makes it; called on that thread, which owns the channel's sockets from then on.
        deadline_s: for opening.

    Raises:
        HeadwayError: as open_stager does. DeadlineExceeded: the channel did not open in time.
    """

    def __init__(self, open_stager: Callable[[], Stager], deadline_s: float) -> None:
        self._open_stager = open_stager
        self._opened = threading.Event()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._stager: Stager | None = None
        self._thread = threading.Thread(target=self._run, name="headway-stager", daemon=True)
        self._thread.start()
        if not self._opened.wait(deadline_s):
            self._stop.set()
            raise DeadlineExceeded(f"the weight channel did not open in {deadline_s:g} s")
        self.check()

    @property
    def stager(self) -> Stager:
        """What the thread runs; its engine-side methods may be called."""
        assert self._stager is not None
        return self._stager

    def staged(self) -> PolicyVersion | None:
        """See Stager. Raises what ended the thread."""
        self.check()
        return self.stager.staged()

    def commit(self, only: PolicyVersion | None = None) -> PolicyVersion | None:
        """See Stager."""
        return self.stager.commit(only)

    def relieve(self) -> bool:
        """See Stager."""
        return self.stager.relieve()

    def proofs(self) -> list[Proof]:
        """See Stager."""
        return self.stager.proofs()

    @property
    def unproved(self) -> bool:
        """See Stager."""
        return self.stager.unproved

    def check(self) -> None:
        """Raise what ended the thread."""
        if self._error is not None:
            if isinstance(self._error, HeadwayError):
                raise self._error
            raise WeightError(f"the stager failed: {self._error!r}") from self._error

    def _run(self) -> None:
        try:
            self._stager = stager = self._open_stager()
            self._opened.set()
            while not self._stop.is_set():
                if not stager.turn() or stager.num_failures:
                    stager.wait(WAIT_S)
            stager.close()
        except BaseException as error:  # handed to the engine's thread, which raises it
            self._error = error
        finally:
            self._opened.set()
            if self._stager is not None:
                self._stager.wake()

    def close(self) -> None:
        """Stop within about WAIT_S."""
        self._stop.set()
        self._thread.join(10.0)
