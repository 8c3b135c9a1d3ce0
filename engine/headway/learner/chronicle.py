"""The run's record: what the desk tells the journal, in the order in which it happened.

The desk's caller commits before anything that the records stand for is told to a generator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from headway.buffer import Group
from headway.journal import (
    BatchSelected,
    Entry,
    Journal,
    LiveChange,
    MessageReceived,
    Opened,
    Position,
    Published,
    StepTrained,
    TicketEnded,
    TicketIssued,
)
from headway.types import DropReason, PolicyVersion, Ticket

_log = logging.getLogger(__name__)


class Chronicle:
    """Writes entries; without a journal (serial mode, `journal.enabled = false`) it does nothing.

    Any thread may call it; the order is that of the calls, so calls about the desk are made under its lock.

    Attributes:
        journal: where they go.
        needed: position from which the newest checkpoint needs the journal; None: there is no checkpoint.
    """

    def __init__(self, journal: Journal | None = None, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            clock: Unix time.
        """
        self.journal = journal
        self.needed: Position | None = None
        self._clock = clock
        self._segment = 0

    def opened(self, run_id: str, version: PolicyVersion) -> None:
        """A learner begins, with weights of this version."""
        if self.journal is not None:
            self._log(Opened(run_id, version.epoch, version.step, self._clock()))

    def issued(self, ticket: Ticket, incarnation: str) -> None:
        """A ticket goes out, for the first time or again."""
        if self.journal is not None:
            self._log(TicketIssued(ticket, incarnation, self._clock()))

    def received(self, incarnation: str, step: int, frames: Sequence[bytes | memoryview]) -> None:
        """A Trajectories message that was not received before; `step` of the weights in force."""
        if self.journal is not None:
            self._log(MessageReceived(incarnation, self._clock(), step, [*frames]))

    def ended(self, ticket_id: int, reason: DropReason) -> None:
        """A ticket was dropped."""
        if self.journal is not None:
            self._log(TicketEnded(ticket_id, reason, self._clock()))

    def selected(self, step: int, groups: Sequence[Group], oldest_step: int) -> None:
        """These are trained next, in the step that makes `step`; where tokens are masked, those below `oldest_step`."""
        if self.journal is not None:
            entry = BatchSelected(
                step=step,
                ticket_ids=[group.ticket_id for group in groups],
                time_s=self._clock(),
                trajectory_ids=[[t.trajectory_id for t in group.trajectories] for group in groups],
                masked_below=[oldest_step if group.num_masked else 0 for group in groups],
            )
            self._log(entry)

    def published(self, version: PolicyVersion, digest: str) -> None:
        """A version's weights were pushed."""
        if self.journal is not None:
            self._log(Published(version, digest))

    def trained(self, version: PolicyVersion, ticket_ids: list[int], skipped: bool) -> None:
        """They were trained."""
        if self.journal is not None:
            self._log(StepTrained(version, ticket_ids, skipped))

    def changed(self, step: int, key: str, value: str) -> None:
        """A setting was changed while the weights were of `step`."""
        if self.journal is not None:
            self._log(LiveChange(step, key, value))

    def commit(self) -> None:
        """Put everything so far on the disk, and let go of what neither a checkpoint nor max_bytes keeps.

        Raises:
            JournalFull: no space now; nothing is lost. JournalError: the disk failed.
        """
        journal = self.journal
        if journal is None:
            return
        segment = journal.commit().segment
        if segment != self._segment:
            self._segment = segment
            try:
                journal.retain(journal.committed if self.needed is None else self.needed)
            except OSError as error:
                _log.warning("old segments of the journal could not be deleted: %s", error)

    def _log(self, entry: Entry) -> None:
        assert self.journal is not None
        self.journal.log(entry)
