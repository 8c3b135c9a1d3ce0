"""The generator's core of a push: stage beside generation, verify, apply between two decode steps, prove.

    stager's thread      wait -> newest -> fetch -> digest, decode, validate -> staged
    engine's thread      commit: O(changed) writes, or a swap of views            (the pause)
    stager's thread      read back what is in force, block by block -> Proof      (the ack)

Whatever goes wrong before the commit leaves the old version serving and asks the channel for a whole state. The
commit writes absolute values, so it is simply made again when it fails; when it fails twice, or when what is in
force does not have the digest that was published, the process must end: WeightError, and its supervisor starts
another. Until the proof, nothing sampled under the new version leaves the process (headway.generator.rollout).

A newer push that arrives before a staged one is applied joins it (a delta), or replaces it (a whole state): no
version is ever applied late. Delivered twice, out of order, or for another base, a payload is refused by its header.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headway.errors import DeadlineExceeded, MalformedDelta, ShapeError, WeightError
from headway.types import Manifest, PolicyVersion
from headway.weights.channel import ChannelReceiver, PayloadHeader, PayloadKind
from headway.weights.digest import StateDigest
from headway.weights.served import Served, published_dtype
from headway.weights.staged import PayloadCheck, Proof, Staged

_log = logging.getLogger(__name__)
LOOK_S = 0.005
BACKOFF_S = (0.01, 0.05, 0.2, 1.0)
RECOVERABLE = (WeightError, DeadlineExceeded, MalformedDelta, ShapeError)
MAX_FAILURES = 60  # in a row, about a minute: the process ends with the last one's words


class Stager:
    """Brings versions from a channel into an engine.

    Args:
        receiver: the channel's end, opened; used only by whoever calls `turn` (and close).
        served: the engine's weights; manifest: of them.
        swap: serve whole states from the channel's own memory where it and the engine allow it.
        deadline_s: for one fetch; past it the payload is given up and a whole one asked for.
        wake: called when something is staged or proved.
    """

    def __init__(
        self,
        receiver: ChannelReceiver,
        served: Served,
        manifest: Manifest,
        *,
        swap: bool = False,
        deadline_s: float = 60.0,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._receiver = receiver
        self._mapped: Any = receiver if hasattr(receiver, "pin") else None
        self._served, self._manifest = served, manifest
        self._check = PayloadCheck(manifest)
        self._swap = swap and served.swaps and self._mapped is not None
        self._deadline_s, self.wake = deadline_s, wake
        self._lock = threading.Lock()
        self._staged: Staged | None = None
        self._proofs: list[Proof] = []
        self._unproved: Staged | None = None
        self._held: PolicyVersion | None = None  # committed; the base of what is staged next
        self._held_digest = ""
        self._serving: PayloadHeader | None = None  # whose memory the engine serves from: _served_state
        self._served_state: Tensor | None = None
        self._retired: PayloadHeader | None = None  # served no more, still pinned
        self._force = StateDigest(manifest.num_elements, published_dtype(manifest).itemsize)
        self._spare: Tensor | None = None
        self._distrusted = False
        self._committing = False  # a commit has taken what was staged, and is not through
        self._committed = threading.Event()
        self.num_failures = 0  # payloads given up since the last that was staged
        self.last_failure = ""

    # The engine's thread --------------------------------------------------------------------------------------

    def staged(self) -> PolicyVersion | None:
        """The version that a commit would put in force now; None if there is none, or the last is unproved."""
        with self._lock:
            staged = self._ready()
            return None if staged is None else staged.version

    def _ready(self) -> Staged | None:
        """What a commit would take; under the lock."""
        staged = self._staged
        if staged is None or self._unproved is not None:
            return None
        return None if self._served.prepares and staged.num_unprepared else staged

    @property
    def unproved(self) -> bool:
        """Whether a version is in force whose digest is not known yet."""
        return self._unproved is not None

    def proofs(self) -> list[Proof]:
        """Versions put in force and proved since the last call."""
        with self._lock:
            proofs, self._proofs = self._proofs, []
        return proofs

    def commit(self, only: PolicyVersion | None = None) -> PolicyVersion | None:
        """Put the staged version (`only` if it is this one) in force, between two decode steps; None: it was let go.

        Raises:
            WeightError: it failed twice: the weights may be of no version, and must not be served.
        """
        with self._lock:
            staged = self._ready()
            if staged is None or only not in (None, staged.version):
                return None
            self._staged, self._committing = None, True
            self._held, self._held_digest = staged.version, staged.state_digest
        try:
            self._put(staged)
        except Exception as error:
            _log.warning("applying version %s failed (%s); applying it again", staged.version, error)
            self._put_again(staged)
        with self._lock:
            # Only now: from here on the stager's thread reads the weights.
            self._unproved, self._committing = staged, False
        self._committed.set()
        return staged.version

    def _put_again(self, staged: Staged) -> None:
        try:
            self._put(staged)
        except Exception as again:
            raise WeightError(
                f"version {staged.version} could not be applied, twice: {again}; the weights may be of no version"
            ) from again

    def relieve(self) -> bool:
        """Copy what is served out of memory that the learner wants back; between two decode steps, too.

        Returns:
            whether it was needed (the copy is a pause).
        """
        with self._lock:
            serving = self._serving if self._unproved is None else None
            if serving is None or self._retired is not None or not self._mapped.wanted(serving):
                return False
            self._serving = None
        assert self._held is not None
        assert self._served_state is not None
        self._served.swap(self._held, self._served_state.clone())
        with self._lock:
            self._retired, self._served_state = serving, None
        return True

    def _put(self, staged: Staged) -> None:
        if self._swap and staged.state is not None and not staged.deltas:
            self._served.swap(staged.version, staged.state)
            return
        self._served.write(staged.version, staged.changes())

    # The stager's thread --------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Prove what was committed, give back what the channel wants back, stage what is newer. Never waits.

        Returns:
            whether anything was done.

        Raises:
            WeightError: what is in force is not what was published.
        """
        if self._unproved is not None:
            return self._prove(self._unproved)
        if self._wanted_back() or self._prepare():
            return True
        held, digest = self._tip()
        try:
            header = self._receiver.newest(held, "" if self._distrusted else digest)
            if header is None:
                return False
            if self._distrusted and held is not None and header.version <= held:
                self._distrusted = (
                    False  # what is held was proved: only a newer whole state is worth the copy
                )
                return False
            self._check.check_header(header, held, digest, deltas=not (self._swap or self._distrusted))
            self._stage(header)
        except RECOVERABLE as error:
            self._give_up(str(error))
        return True

    def wait(self, timeout_s: float) -> None:
        """Wait for the channel, at most `timeout_s`; after a failure, for as long as a retry should be put off.

        While a push is staged it waits for the commit instead, whose proof is urgent, and looks at the channel often.
        """
        if self._staged is not None or self._committing or self._unproved is not None:
            self._committed.wait(min(timeout_s, LOOK_S))
            self._committed.clear()
        elif self.num_failures:
            time.sleep(min(timeout_s, BACKOFF_S[min(self.num_failures, len(BACKOFF_S)) - 1]))
        else:
            self._receiver.wait(timeout_s)

    def _prepare(self) -> bool:
        """Write what is staged beside what is served, where the engine has room for that."""
        with self._lock:
            staged = self._staged
            if staged is None or not self._served.prepares or self._committing or self._unproved is not None:
                return False
            left = staged.num_unprepared
        if not left:
            return False
        self._served.prepare(staged.changes()[staged.num_prepared :], more=staged.num_prepared > 0)
        with self._lock:
            staged.num_prepared += left
        self.wake()
        return True

    def _tip(self) -> tuple[PolicyVersion | None, str]:
        with self._lock:
            if self._staged is not None:
                return self._staged.version, self._staged.state_digest
            return self._held, self._held_digest

    def _stage(self, header: PayloadHeader) -> None:
        data, pinned = self._bring(header)
        if data is None:
            return
        try:
            if header.kind is PayloadKind.WHOLE:
                piece = self._check.whole(header, data)
            else:
                piece = self._check.delta(header, data)
        except BaseException:
            if pinned:
                self._mapped.unpin(header)
            raise
        if pinned:
            piece.pins.append(header)
        self._join(piece, header)

    def _bring(self, header: PayloadHeader) -> tuple[memoryview | None, bool]:
        """The payload's bytes, None if a newer one has overtaken it; and whether they lie in the channel's memory."""
        if self._mapped is not None:
            found: memoryview | None = self._mapped.pin(header)
            return found, True
        if header.kind is PayloadKind.WHOLE:
            into = (
                self._spare if self._spare is not None else torch.zeros(header.num_bytes, dtype=torch.uint8)
            )
            self._spare = None
        else:
            into = torch.empty(header.num_bytes, dtype=torch.uint8)
        data = into.numpy().data
        try:
            self._receiver.fetch(header, data, self._deadline_s)
        except BaseException:
            if header.kind is PayloadKind.WHOLE:
                self._spare = into
            raise
        return data, False

    def _join(self, piece: Staged, header: PayloadHeader) -> None:
        """Add it to what is staged, or replace that; a commit may have taken it meanwhile."""
        with self._lock:
            staged = self._staged
            dropped: Staged | None = None
            if piece.state is not None or staged is None:
                self._staged, dropped = piece, staged
            else:
                staged.deltas += piece.deltas
                staged.pins += piece.pins
                staged.version, staged.state_digest = piece.version, piece.state_digest
            self._distrusted = False
        if dropped is not None:
            self._let_go(dropped)
        self.num_failures = 0
        self.wake()

    def _give_up(self, why: str) -> None:
        """A payload is of no use: the old version goes on serving, and only a whole state will do."""
        self.num_failures += 1
        self.last_failure = why
        self._distrusted = True
        level = logging.WARNING if self.num_failures in (3, 30, 300) else logging.INFO
        _log.log(level, "%s (failure %d in a row); asking for a whole state", why, self.num_failures)
        if self.num_failures >= MAX_FAILURES:
            raise WeightError(f"{self.num_failures} pushes in a row could not be staged; the last: {why}")
        self._receiver.ask_whole(why)

    def _wanted_back(self) -> bool:
        """Drop what is staged in memory that the learner wants to write; what is served is copied by `commit`."""
        if self._mapped is None:
            return False
        with self._lock:
            retired, self._retired = self._retired, None
        if retired is not None:
            self._mapped.unpin(retired)
        with self._lock:
            staged = self._staged
            if staged is None or not any(self._mapped.wanted(header) for header in staged.pins):
                return False
            self._staged = None
        self._let_go(staged)
        return True

    def _let_go(self, staged: Staged) -> None:
        for header in staged.pins:
            self._mapped.unpin(header)
        if self._mapped is None and staged.state is not None:
            self._spare = staged.state.view(torch.uint8)

    def _prove(self, staged: Staged) -> bool:
        """Read back what was written, and compare; what was swapped in was read where it lies."""
        swapped = self._swap and staged.state is not None and not staged.deltas
        touched = [] if swapped else staged.stretches(self._manifest.num_elements)
        if swapped:
            assert staged.digests is not None
            self._force = staged.digests
        else:
            for first, start, end in touched:
                self._force.read(first, self._served.read(start, end))
        digest = self._force.hex
        if digest != staged.state_digest:
            raise WeightError(
                f"version {staged.version} is in force with digest {digest}, published was {staged.state_digest}: "
                "what is served is no version"
            )
        if swapped:
            with self._lock:
                kept, self._serving, self._served_state = self._serving, staged.pins[0], staged.state
            if kept is not None:
                self._mapped.unpin(kept)
        else:
            self._let_go(staged)
        with self._lock:
            self._proofs.append(Proof(staged.version, digest))
            self._unproved = None
        self.wake()
        self._served.settle([(start, end) for _, start, end in touched])  # before anything else is prepared
        return True

    def close(self) -> None:
        """Close the channel."""
        self._receiver.close()
