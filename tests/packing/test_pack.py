"""Packing against a naive oracle: every trajectory's path through the row is the trajectory itself."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.errors import ShapeError
from headway.packing import PackGroup, Packing, Row, num_forwarded, pack, too_long

SHARES = ["auto", "tree", "prompt", "none"]


@dataclass
class Sample:
    """A trajectory as packing sees it."""

    token_ids: NDArray[np.int32]
    prompt_length: int
    loss_mask: NDArray[np.bool_]


def sample(prompt: list[int], completion: list[int], unmasked: tuple[int, ...] = ()) -> Sample:
    """A trajectory whose completion carries loss except at the given places."""
    mask = np.array(
        [False] * len(prompt) + [place not in unmasked for place in range(len(completion))], np.bool_
    )
    return Sample(np.array(prompt + completion, np.int32), len(prompt), mask)


@st.composite
def batches(draw: st.DrawFn) -> list[PackGroup]:
    """Small alphabets, so that prefixes collide; prompts repeat across groups and extend each other."""
    token = st.integers(0, 2)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=5))
    groups: list[PackGroup] = []
    for group_id, prompt in enumerate(prompts):
        members: list[Sample] = []
        for _ in range(draw(st.integers(1, 5))):
            completion = draw(st.lists(token, max_size=6))
            masked = tuple(draw(st.lists(st.integers(0, 5), max_size=2)))
            members.append(sample(prompt, completion, masked))
        groups.append(PackGroup(3 * group_id, members))
    return groups


def visible(row: Row) -> list[list[int]]:
    """Per token of the row: the row positions that it sees, in the order of their positions."""
    seen: list[list[int]] = []
    for run in range(len(row.query_start)):
        shared: list[int] = []
        for k in range(row.range_offsets[run], row.range_offsets[run + 1]):
            shared += range(row.range_start[k], row.range_start[k] + row.range_len[k])
        for place in range(row.query_len[run]):
            last = row.causal_start[run] + row.causal_base[run] + place
            assert len(seen) == row.query_start[run] + place
            seen.append(shared + list(range(row.causal_start[run], last + 1)))
    return seen


def check(groups: list[PackGroup], packing: Packing, tokens_per_row: int) -> None:
    """Compare a packing with the trajectories it came from."""
    by_id = {group.group_id: group for group in groups}
    members = [by_id[group_id].members[place] for group_id, place in packing.sequences]
    assert packing.sequences == [
        (group.group_id, place)
        for group in sorted(groups, key=lambda group: group.group_id)
        for place in range(len(group.members))
    ]
    head_rows: list[tuple[int, int]] = []
    for row in packing.rows:
        assert 0 < row.num_tokens <= tokens_per_row
        seen = visible(row)
        assert len(seen) == row.num_tokens
        used: set[int] = set()
        for at, target, sequence, token in zip(
            row.hidden_index, row.target, row.sequence, row.token, strict=True
        ):
            head_rows.append((int(sequence), int(token)))
            tokens = members[sequence].token_ids
            path = seen[at]
            assert path == sorted(path)
            assert row.token_ids[path].tolist() == tokens[:token].tolist()
            assert row.position_ids[path].tolist() == list(range(token))
            assert target == tokens[token]
            used |= set(path)
        assert used == set(range(row.num_tokens))  # nothing is forwarded that no loss token needs
        assert row.segment_offsets[0] == 0
        assert row.segment_offsets[-1] == row.num_loss_tokens
        for k, sequence in enumerate(row.segment_sequence):
            part = slice(row.segment_offsets[k], row.segment_offsets[k + 1])
            assert set(row.sequence[part].tolist()) == {sequence}
            assert (np.diff(row.token[part]) > 0).all()
        assert (np.diff(row.segment_sequence) > 0).all()
    expected = [
        (number, int(token))
        for number, member in enumerate(members)
        for token in np.flatnonzero(member.loss_mask)
        if token > 0
    ]
    assert sorted(head_rows) == expected
    assert packing.num_forwarded == sum(row.num_tokens for row in packing.rows)
    assert packing.num_unshared == sum(num_forwarded(member) for member in members)
    assert packing.num_forwarded <= packing.num_unshared


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from(SHARES), st.integers(12, 60))
def test_every_loss_token_has_one_head_row_and_sees_its_own_trajectory(
    groups: list[PackGroup], share: str, tokens_per_row: int
) -> None:
    check(groups, pack(groups, tokens_per_row, share), tokens_per_row)


@settings(max_examples=50, deadline=None)
@given(batches(), st.sampled_from(SHARES), st.randoms(use_true_random=False))
def test_rows_do_not_depend_on_the_order_of_arrival(
    groups: list[PackGroup], share: str, random: object
) -> None:
    shuffled = list(groups)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    before, after = pack(groups, 16, share), pack(shuffled, 16, share)
    assert len(before.rows) == len(after.rows)
    for one, other in zip(before.rows, after.rows, strict=True):
        for field in fields(Row):
            assert np.array_equal(getattr(one, field.name), getattr(other, field.name)), field.name


@settings(max_examples=60, deadline=None)
@given(batches())
def test_the_tree_forwards_each_distinct_prefix_once(groups: list[PackGroup]) -> None:
    prefixes = {
        tuple(member.token_ids[: end + 1].tolist())
        for group in groups
        for member in group.members
        for end in range(num_forwarded(member))
    }
    assert pack(groups, 1000, "tree").num_forwarded == len(prefixes)


def test_a_shared_prompt_is_forwarded_once_and_feeds_every_member() -> None:
    group = PackGroup(7, [sample([5, 6, 7], [1, 9]), sample([5, 6, 7], [2, 9]), sample([5, 6, 7], [3, 9])])
    packing = pack([group], 100, "prompt")
    (row,) = packing.rows
    assert row.token_ids.tolist() == [5, 6, 7, 1, 2, 3]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 3, 3]
    assert row.query_start.tolist() == [0, 4, 5]  # the first member's run continues the prompt
    assert row.query_len.tolist() == [4, 1, 1]
    assert row.range_offsets.tolist() == [0, 0, 1, 2]
    assert (row.range_start.tolist(), row.range_len.tolist()) == ([0, 0], [3, 3])
    assert row.hidden_index.tolist() == [2, 3, 2, 4, 2, 5]
    assert row.target.tolist() == [1, 9, 2, 9, 3, 9]
    assert row.sequence.tolist() == [0, 0, 1, 1, 2, 2]
    assert row.token.tolist() == [3, 4, 3, 4, 3, 4]
    assert row.segment_offsets.tolist() == [0, 2, 4, 6]
    assert (packing.num_forwarded, packing.num_unshared) == (6, 12)


def test_equal_completions_merge_and_keep_their_own_head_rows() -> None:
    group = PackGroup(0, [sample([1], [2, 3]), sample([1], [2, 3]), sample([1], [2, 3, 4])])
    (row,) = pack([group], 100, "tree").rows
    assert row.token_ids.tolist() == [1, 2, 3]
    assert row.hidden_index.tolist() == [0, 1, 0, 1, 0, 1, 2]


def test_prompts_are_shared_across_groups() -> None:
    groups = [PackGroup(k, [sample([1, 2, 3, 4], [5, k])]) for k in range(4)]
    assert pack(groups, 100, "prompt").num_forwarded == 4 + 4
    assert pack(groups, 100, "tree").num_forwarded == 5
    assert pack(groups, 100, "none").num_forwarded == 20


def test_auto_takes_the_tree_where_it_saves_a_tenth() -> None:
    similar = [PackGroup(0, [sample([1] * 4, [2, 3, 4, 5, k]) for k in range(8)])]
    different = [PackGroup(0, [sample([1] * 4, [k, 3, 4, 5, k]) for k in range(8)])]
    assert pack(similar, 100).share == "tree"
    assert pack(different, 100).share == "prompt"


def test_documents_of_a_row_never_see_each_other() -> None:
    """Three documents in one row; a changed first leaves the others as they were."""
    documents = [([1, 2], [3, 4, 5]), ([6], [7, 8]), ([9, 9, 9], [1, 1])]
    changed = [([4, 4], [4, 4, 4]), *documents[1:]]
    rows = [
        pack([PackGroup(k, [sample(*document)]) for k, document in enumerate(batch)], 100).rows[0]
        for batch in (documents, changed)
    ]
    for number in (1, 2):
        views: list[list[list[int]]] = []
        for row in rows:
            seen = visible(row)
            at = row.hidden_index[row.sequence == number]
            views.append([row.token_ids[seen[place]].tolist() for place in at])
        assert views[0] == views[1]
        prompt, completion = documents[number]
        assert views[0] == [prompt + completion[:k] for k in range(len(completion))]
    for row in rows:
        assert (row.token > 0).all()  # the first token of a document carries no loss


def test_a_group_that_exceeds_a_row_repeats_its_prefix_in_each() -> None:
    group = PackGroup(0, [sample([1, 2, 3, 4], [10 + k, 20 + k, 30 + k]) for k in range(6)])
    packing = pack([group], 10, "prompt")
    check([group], packing, 10)
    assert [row.num_tokens for row in packing.rows] == [4 + 3 * 2, 4 + 3 * 2]
    for row in packing.rows:
        assert row.token_ids[:4].tolist() == [1, 2, 3, 4]


def test_rows_are_filled_first_fit_decreasing() -> None:
    sizes = [3, 7, 5, 5, 2]
    groups = [PackGroup(k, [sample([100 + k] * size, [1])]) for k, size in enumerate(sizes)]
    rows = pack(groups, 10, "none").rows
    assert [sorted(row.segment_sequence.tolist()) for row in rows] == [[0, 1], [2, 3], [4]]


def test_a_trajectory_longer_than_a_row_is_named() -> None:
    short = sample([1], [2])
    groups = [PackGroup(4, [short, sample([1] * 8, [2, 3, 4])]), PackGroup(9, [short])]
    assert too_long(groups, 10) == []
    assert too_long(groups, 9) == [(4, 1)]
    with pytest.raises(ShapeError, match=r"\(4, 1\).*tokens_per_row = 9"):
        pack(groups, 9)


def test_a_trajectory_without_loss_tokens_is_not_forwarded() -> None:
    groups = [PackGroup(0, [sample([1, 2], []), sample([1, 2], [3], (0,))])]
    packing = pack(groups, 10)
    assert packing.rows == []
    assert (packing.num_forwarded, packing.sequences) == (0, [(0, 0), (0, 1)])
    assert pack([], 10).rows == []


def test_the_empty_row_has_no_tokens_and_valid_offsets() -> None:
    row = Row.empty()
    assert (row.num_tokens, row.num_loss_tokens) == (0, 0)
    assert row.range_offsets.tolist() == [0]
    assert row.segment_offsets.tolist() == [0]
