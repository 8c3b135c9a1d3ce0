"""Every message between processes, as typed heads. Arrays travel beside the head (headway.wire.codec).

generator -> learner   Hello, Trajectories, WeightAck, Bye          on the data socket
                       Heartbeat                                    on the heartbeat socket
learner -> generator   Welcome, Refused, Grant, Received, VersionNotice, Cancel, Stop   on the data socket
                       HeartbeatAck                                 on the heartbeat socket
learner -> supervisor  Event                                        on the control socket
supervisor -> learner  Command                                      on the control socket
"""

from __future__ import annotations

import msgspec

from headway.types import MemberFailure, PolicyVersion, StepRecord, Ticket, TimeSplit, Trajectory

SCHEMA = 1


class Message(msgspec.Struct, frozen=True, tag_field="kind", kw_only=True):
    """Base of all messages; `kind` names the class on the wire."""


class Hello(Message, frozen=True):
    """First message of a generator on every (re)connect.

    Attributes:
        run_id, schema: must equal the learner's, else Refused.
        generator: index of the generator; incarnation: new for every process start, unique in the run.
        max_running: sequences it decodes at once; serving: the version now in force, None before the first.
        tickets: those it holds, and those of which it has members that no Received has named. An outstanding
            ticket that is not among them was lost on its way, and is granted again.
    """

    run_id: str
    schema: int
    generator: int
    incarnation: str
    pid: int
    host: str
    max_running: int
    serving: PolicyVersion | None
    tickets: list[int] = []


class Welcome(Message, frozen=True):
    """The learner's answer to Hello: how to get weights, and what is newest."""

    manifest_digest: str
    weight_channel: str
    version: PolicyVersion
    heartbeat_s: float


class Refused(Message, frozen=True):
    """The learner will not talk to this peer; reason for people and for the peer's exit."""

    reason: str


class Grant(Message, frozen=True):
    """Tickets, admitted together; the generator must serve a version >= each ticket's `admitted` first."""

    seq: int
    tickets: list[Ticket]


class Trajectories(Message, frozen=True):
    """Finished members, of any tickets, and failed ones.

    Attributes:
        seq: per incarnation, from 1; sent again unchanged until Received names it.
        generated: sampled tokens since the incarnation's start (for the token ledger).
    """

    incarnation: str
    seq: int
    trajectories: list[Trajectory]
    failures: list[MemberFailure]
    generated: int


class Received(Message, frozen=True):
    """Ack of one Trajectories message: everything in it is on the learner's disk and will not be asked for again."""

    seq: int


class WeightAck(Message, frozen=True):
    """A version is in force: every later token is sampled by it.

    Attributes:
        digest: xxh3-64 hex of the published bytes as now held by the engine.
        pause_s: seconds that decoding stood still for the apply.
    """

    incarnation: str
    version: PolicyVersion
    digest: str
    pause_s: float


class VersionNotice(Message, frozen=True):
    """A version is published and can be fetched; `seq` lets a receiver notice a gap."""

    seq: int
    version: PolicyVersion
    digest: str


class Cancel(Message, frozen=True):
    """Give these tickets up; what they still produce is dropped as ticket_closed."""

    ticket_ids: list[int]


class Stop(Message, frozen=True):
    """The run is over: finish nothing, send nothing more, exit 0."""

    reason: str


class Bye(Message, frozen=True):
    """A generator leaves on purpose; its unfinished tickets are generator_lost."""

    incarnation: str
    unsent: int


class Heartbeat(Message, frozen=True):
    """Alive, and what it is doing. Sent every heartbeat_s from its own thread and socket.

    Attributes:
        stalled_s: seconds since the generator's main loop last turned (a hung loop still beats).
        serving: version in force; running, waiting: sequences; tickets: held.
        generated: sampled tokens since the start of this incarnation; unsent: of those, not yet sent.
        split: where its time went since its start.
    """

    incarnation: str
    seq: int
    stalled_s: float
    serving: PolicyVersion | None
    running: int
    waiting: int
    tickets: int
    generated: int
    unsent: int
    split: TimeSplit


class HeartbeatAck(Message, frozen=True):
    """The learner's answer to the Heartbeat of this `seq`: its intake turns, and the way there and back is open."""

    seq: int


class Event(Message, frozen=True):
    """From the learner to the supervisor: exactly one kind of news.

    Attributes:
        ready: the data endpoint that generators connect to, once it is bound.
        record: one optimizer step; note: a line for people.
        lost: index of a generator that was given up, lost_pid: its process, note: why.
        status: JSON of the LearnerStatus, last.
        answered: id of a Command, with `error` "" when it took effect.
    """

    ready: str = ""
    record: StepRecord | None = None
    note: str = ""
    lost: int = -1
    lost_pid: int = 0
    status: bytes = b""
    answered: int = -1
    error: str = ""


class Command(Message, frozen=True):
    """From the supervisor to the learner: `set` one dotted key, or `stop` after the current step."""

    command_id: int
    action: str
    key: str = ""
    value: str = ""


DataMessage = (
    Hello
    | Welcome
    | Refused
    | Grant
    | Trajectories
    | Received
    | WeightAck
    | VersionNotice
    | Cancel
    | Stop
    | Bye
    | Heartbeat
    | HeartbeatAck
    | Event
    | Command
)
