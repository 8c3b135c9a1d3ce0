"""The learner's end of the collective channel: one broadcast per payload to all that want it.

    learner    offer ->                 -> go (group, rank) -> broadcast -> digest
    member              ready (payload) ->                  <- broadcast    done (its own words if not)

`publish` waits for its members, within the deadline: unlike the other channels, a collective needs them at the same
time. Whoever refuses, dies or stalls is named in the error, with its own words; those who are well get the version
all the same. A member that was lost must join again, which a live receiver does by itself. Joiners are served
between publishes, with what is newest then.

One thread does all of it, so that the group and the rendezvous have one user.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from headway.errors import DeadlineExceeded, StreamError, WeightError
from headway.stream.endpoint import is_local
from headway.weights.channel import Payload, Publication
from headway.weights.collective_group import (
    DEFAULT_TIMING,
    BroadcastGroup,
    CollectiveTiming,
    Go,
    Hello,
    Offer,
    Ready,
    Rendezvous,
    check_backend,
)
from headway.weights.tcp_wire import payload_key

_log = logging.getLogger(__name__)
POLL_S = 0.01
IDLE_POLL_S = 0.1


@dataclass
class _Member:
    name: str
    beat: str
    beat_at: float
    answered: int = 0


@dataclass
class _Push:
    """A publication on its way; `errors`, `silent` and `ended` are guarded by the sender's condition."""

    number: int
    publication: Publication
    deadline: float
    errors: dict[str, str] = field(default_factory=dict[str, str])
    silent: list[str] = field(default_factory=list[str])
    ended: bool = False


class CollectiveSender:
    """A ChannelSender over torch.distributed.

    Args:
        run_id, manifest_digest: what members must name; host: to listen on; backend: "gloo" or "nccl".
        insecure: allow a host that other machines can reach: torch.distributed authenticates nobody.

    Raises:
        StreamError: the host may not or cannot be listened on.
        UnsupportedOption, BackendUnavailable: no such backend, here.
    """

    def __init__(
        self,
        run_id: str,
        manifest_digest: str,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        insecure: bool = False,
        timing: CollectiveTiming = DEFAULT_TIMING,
    ) -> None:
        check_backend(backend)
        if not (insecure or is_local(f"tcp://{host}:1")):
            raise StreamError(
                f"refused to listen on {host}: torch.distributed authenticates nobody. Use the tcp channel with "
                "keys, or set stream.insecure on a network that you trust"
            )
        self._backend, self._timing = backend, timing
        self._rendezvous = Rendezvous(host, 0, timeout_s=timing.stall_s)
        self._rendezvous.put("hello", Hello(run_id, manifest_digest, backend))
        self._members: dict[int, _Member] = {}
        self._num_joined = 0
        self._num_groups = 0
        self._group: tuple[tuple[int, ...], int, BroadcastGroup] | None = None
        self._newest: _Push | None = None
        self._payloads: dict[str, Payload] = {}
        self._offered: frozenset[str] = frozenset()
        self._changed = threading.Condition()
        self._posted: _Push | None = None
        self._num_pushes = 0
        self._patience_s = 60.0  # for one broadcast; as publish was last given
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="headway-weights-collective", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """What receivers are opened with."""
        return f"collective://{self._rendezvous.host}:{self._rendezvous.port}"

    @property
    def num_receivers(self) -> int:
        """Members that are alive."""
        return len(self._members)

    def publish(self, publication: Publication, deadline_s: float) -> None:
        """Offer it, and wait until every member has it (ChannelSender.publish).

        Raises:
            WeightError: members refused, failed or were lost; in their own words. The others have it.
            DeadlineExceeded: members did not take part within `deadline_s`; names them.
        """
        with self._changed:
            self._check()
            self._num_pushes += 1
            push = _Push(self._num_pushes, publication, time.monotonic() + deadline_s)
            self._posted, self._patience_s = push, deadline_s
            self._changed.notify_all()
            patience_s = 2 * (deadline_s + self._timing.stall_s) + self._timing.done_s
            self._changed.wait_for(lambda: push.ended or self._failure is not None, patience_s)
            self._check()
            if push.errors:
                words = "; ".join(f"{name}: {text}" for name, text in sorted(push.errors.items()))
                raise WeightError(
                    f"weights {publication.version} did not arrive at {len(push.errors)} receivers: {words}"
                )
            if push.silent or not push.ended:
                raise DeadlineExceeded(
                    f"waited {deadline_s:.1f} s for {', '.join(sorted(push.silent)) or 'a broadcast'} to take "
                    f"part in the push of weights {publication.version}"
                )

    def _check(self) -> None:
        if self._failure is not None:
            raise WeightError(f"the collective channel has failed: {self._failure}") from self._failure
        if self._closing:
            raise WeightError("the collective channel is closed")

    def close(self) -> None:
        """End the thread, within a stall, and the rendezvous with it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(2 * self._timing.stall_s)
        self._drop_group()

    # ---- the thread from here on

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._posted is not None or self._closing, IDLE_POLL_S)
                    push, self._posted = self._posted, None
                    if self._closing:
                        return
                if push is not None:
                    self._offer(push)
                    self._conduct(push)
                else:
                    self._follow_members()
                    self._serve(self._ready())
        except BaseException as error:
            _log.exception("the collective channel has failed")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _offer(self, push: _Push) -> None:
        publication = push.publication
        self._newest = push
        self._payloads = {payload_key(delta.header): delta for delta in publication.deltas}
        headers = [*(delta.header for delta in publication.deltas), publication.whole_header]
        self._offered = frozenset(map(payload_key, headers))
        self._rendezvous.put("offer", Offer(push.number, headers))

    def _conduct(self, push: _Push) -> None:
        """Wait until every member is ready, has refused or is gone; broadcast; say how it went."""
        self._follow_members()
        waiting = set(self._members)
        ready: dict[int, Ready] = {}
        while waiting - ready.keys() and time.monotonic() < push.deadline:
            time.sleep(POLL_S)
            self._follow_members()
            waiting &= self._members.keys()
            ready = {number: record for number, record in self._ready().items() if number in waiting}
        silent = {number: self._members[number].name for number in waiting - ready.keys()}
        for number in silent:
            self._forget(number, "it did not take part in a push")
        self._serve(ready)
        with self._changed:
            push.silent += silent.values()
            push.ended = True
            self._changed.notify_all()

    def _follow_members(self) -> None:
        """Take joiners in; forget those that leave or fall silent."""
        now = time.monotonic()
        total = self._rendezvous.count("joined")
        for number in range(self._num_joined + 1, total + 1):
            name = self._rendezvous.text(f"name/{number}")
            if name is None:
                total = number - 1  # it is still writing its records
                break
            self._members[number] = _Member(name, "", now)
        self._num_joined = total
        for number, member in list(self._members.items()):
            beat = self._rendezvous.text(f"beat/{number}")
            if beat == "left":
                self._forget(number, "")
            elif beat is not None and beat != member.beat:
                member.beat, member.beat_at = beat, now
            elif now - member.beat_at > self._timing.gone_s:
                self._fail(member.name, f"silent for {self._timing.gone_s:.1f} s")
                self._forget(number, "it was silent")

    def _forget(self, number: int, reason: str) -> None:
        """Remove a member; a live one reads why, and joins again."""
        self._members.pop(number, None)
        if reason:
            self._rendezvous.put(f"expelled/{number}", reason)
        self._rendezvous.remove(f"name/{number}", f"beat/{number}", f"ready/{number}")

    def _ready(self) -> dict[int, Ready]:
        """What members wait for; a payload that is offered no more is answered at once."""
        found: dict[int, Ready] = {}
        for number, member in self._members.items():
            record = self._rendezvous.get(f"ready/{number}", Ready)
            if record is None or record.attempt <= member.answered:
                continue
            if record.error or record.payload in self._offered:
                found[number] = record
                continue
            member.answered = record.attempt
            if record.payload:  # else it has given up waiting
                self._refuse(number, record)
        return found

    def _serve(self, ready: dict[int, Ready]) -> None:
        """One broadcast for each payload that is wanted."""
        wanted: dict[str, list[int]] = {}
        for number, record in sorted(ready.items()):
            if number not in self._members:
                continue
            self._members[number].answered = record.attempt
            if record.error:
                self._fail(self._members[number].name, record.error)
            else:
                wanted.setdefault(record.payload, []).append(number)
        for key, numbers in wanted.items():
            payload = self._payload(key)
            if payload is None:  # the next version is about to be offered
                for number in numbers:
                    self._refuse(number, ready[number])
            else:
                self._broadcast(payload, numbers, ready)

    def _refuse(self, number: int, record: Ready) -> None:
        go = Go(0, 0, 0, "", "these weights have been replaced by newer ones")
        self._rendezvous.put(f"go/{number}/{record.attempt}", go)

    def _payload(self, key: str) -> Payload | None:
        if key not in self._payloads and self._newest is not None:
            publication = self._newest.publication
            whole = publication.whole() if key == payload_key(publication.whole_header) else None
            if whole is not None:
                self._payloads[key] = whole
        return self._payloads.get(key)

    def _broadcast(self, payload: Payload, numbers: list[int], ready: dict[int, Ready]) -> None:
        members = tuple(numbers)
        if self._group is None or self._group[0] != members:
            self._drop_group()
            self._num_groups += 1
        number = self._num_groups
        digest_key = f"digest/{number}/{ready[numbers[0]].attempt}"
        gos = [f"go/{each}/{ready[each].attempt}" for each in numbers]
        for rank, go in enumerate(gos, 1):
            self._rendezvous.put(go, Go(number, rank, len(numbers) + 1, digest_key, ""))
        error = ""
        try:
            if self._group is None:
                made = BroadcastGroup(
                    self._rendezvous,
                    str(number),
                    0,
                    len(numbers) + 1,
                    backend=self._backend,
                    stall_s=self._timing.stall_s,
                )
                self._group = (members, number, made)
            deadline = time.monotonic() + self._patience_s
            digest = self._group[2].send(payload.parts, payload.header.num_bytes, deadline)
            self._rendezvous.put(digest_key, digest)
        except (WeightError, DeadlineExceeded) as failure:
            error = str(failure)
            self._drop_group()
            self._rendezvous.put(digest_key, f"error: {error}")
        self._gather(numbers, ready, error)
        self._rendezvous.remove(digest_key, *gos)

    def _gather(self, numbers: list[int], ready: dict[int, Ready], error: str) -> None:
        """Each member's own words; one that has none is lost, and the group with it."""
        deadline = time.monotonic() + self._timing.done_s
        for number in numbers:
            key = f"done/{number}/{ready[number].attempt}"
            member = self._members[number]
            if not self._rendezvous.wait(
                key, deadline - time.monotonic() if not error else self._timing.stall_s
            ):
                self._fail(member.name, error or "it did not say that the weights arrived")
                self._forget(number, "it was lost in a broadcast")
                self._drop_group()
                continue
            words = self._rendezvous.text(key) or ""
            if words:
                self._fail(member.name, words)
                self._drop_group()
            self._rendezvous.remove(key)

    def _fail(self, name: str, words: str) -> None:
        _log.warning("weights did not arrive at %s: %s", name, words)
        if self._newest is not None:
            with self._changed:
                self._newest.errors.setdefault(name, words)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group[2].close()
            self._group = None
