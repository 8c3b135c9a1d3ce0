"""Tickets: the learner's permission to generate one group."""

from __future__ import annotations

import msgspec

from headway.types.version import PolicyVersion


class Sampling(msgspec.Struct, frozen=True):
    """How the members of one group are sampled.

    Attributes:
        temperature: > 0 for training; 0 is greedy and allowed for evaluation only.
        max_new_tokens: budget per member.
        stop_ids: token ids that end a member, EOS ids included; the stop token is kept and trained.
        stop_strings: texts that end a member when its decoded completion contains one.
        ignore_eos: stop ids and strings do not end a member; it runs to its budget.
        top_k, top_p, min_p: what is sampled from is less than the vocabulary (None: off).
        keep_sets: the ids that each token was sampled from come back with it, to be trained over.
    """

    temperature: float
    max_new_tokens: int
    stop_ids: list[int]
    stop_strings: list[str] = []
    ignore_eos: bool = False
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    keep_sets: bool = False


class Ticket(msgspec.Struct, frozen=True):
    """Permission to generate the members of one group.

    Attributes:
        ticket_id: unique in a run, strictly increasing; also the group's id and its admission index.
        prompt_index: the environment's index of the prompt.
        prompt_ids: the prompt's token ids.
        num_members: group size G.
        sampling: shared by the members.
        seed: 63-bit; member m samples with a stream derived from (seed, m).
        admitted: the version that the generator had acked when the ticket was granted.
        deadline_s: seconds from receipt after which the generator must give the group up.
        held: members that the learner has already; they are not sampled again (the ticket outlived a generator).
        vocab_size: V; every id of a trajectory is below it. 0: nobody looks.
    """

    ticket_id: int
    prompt_index: int
    prompt_ids: list[int]
    num_members: int
    sampling: Sampling
    seed: int
    admitted: PolicyVersion
    deadline_s: float
    held: list[int] = []
    vocab_size: int = 0
