"""Each back-end sees of a packed row what each of its tokens may see, forwards and backwards.

What needs a GPU is run where there is one and skipped by name elsewhere; its gathering of keys is run here too,
over a plain loop that does what the kernels document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from headway.errors import UnsupportedOption
from headway.model.attention_choice import ORDER, Place, choose_attention, lacks
from headway.model.row_attention import FlexAttention, RowAttention, VarlenAttention, last_reader, varlen_runs
from headway.packing import PackGroup, Row, pack

CPU = Place(torch.device("cpu"), torch.float32, 16)
SHARES = ("none", "prompt", "tree")


@dataclass(frozen=True)
class Sequence:
    token_ids: NDArray[np.int32]
    prompt_length: int

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        return np.arange(len(self.token_ids)) >= self.prompt_length


def row_of(groups: list[list[list[int]]], share: str, prompt: int = 2) -> tuple[Row, list[Sequence]]:
    """One row of all groups, and its sequences by number."""
    made = [[Sequence(np.array(ids, np.int32), prompt) for ids in group] for group in groups]
    packing = pack([PackGroup(n, members) for n, members in enumerate(made)], 10_000, share)  # type: ignore[arg-type]
    (row,) = packing.rows
    return row, [sequence for members in made for sequence in members]


GROUPS = [
    [
        [5, 6, 7, 8, 9],
        [5, 6, 7, 8, 4, 4],
        [5, 6, 1],
    ],  # completions that start alike, and one of a single token
    [[5, 6, 7, 9], [5, 6, 7, 9]],  # equal ones, with the first group's prompt
    [[2, 3, 5, 5, 5, 5, 5]],
]


def dense(row: Row, sequences: list[Sequence]) -> NDArray[np.bool_]:
    """What the queries that are scored may see, by walking each trajectory: [N, N]."""
    sees = np.zeros((row.num_tokens, row.num_tokens), bool)
    places: dict[int, list[int]] = {}
    for place, number in zip(row.hidden_index, row.sequence, strict=True):
        places.setdefault(number, []).append(place)
    for number, scored in places.items():
        ids = sequences[number].token_ids
        last = scored[-1]
        # The path: the positions 0 .. that lead to the last scored token, each the nearest before it that fits.
        path = [last]
        while row.position_ids[path[0]] > 0:
            want = row.position_ids[path[0]] - 1
            path.insert(0, max(p for p in range(path[0]) if row.position_ids[p] == want))
        assert row.token_ids[path].tolist() == ids[: len(path)].tolist()
        for index, place in enumerate(path):
            sees[place, path[: index + 1]] = True
    return sees


@pytest.mark.parametrize("share", SHARES)
def test_one_number_a_token_says_who_sees_it(share: str) -> None:
    row, sequences = row_of(GROUPS, share)
    last, n = last_reader(row), row.num_tokens
    key, query = np.arange(n)[None], np.arange(n)[:, None]
    found, expected = (key <= query) & (query < last[None]), dense(row, sequences)
    used = expected.any(1)  # the last token of a trajectory predicts nothing
    assert used.sum() > n / 2
    assert np.array_equal(found[used], expected[used])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=9), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(SHARES),
)
def test_a_varlen_run_reads_its_ancestors_and_itself(groups: list[list[list[int]]], share: str) -> None:
    row, _ = row_of([[[9, 9, *ids] for ids in group] for group in groups], share)
    runs, last = varlen_runs(row), last_reader(row)
    keys = np.arange(row.num_tokens) if runs.keys is None else runs.keys
    bounds = zip(
        runs.query_offsets, runs.query_offsets[1:], runs.key_offsets, runs.key_offsets[1:], strict=False
    )
    for q0, q1, k0, k1 in bounds:
        for back, query in enumerate(reversed(range(q0, q1))):
            seen = keys[k0 : k1 - back]  # the last query sees all keys of its sequence
            expected = [k for k in range(query + 1) if query < last[k]]
            assert sorted(seen.tolist()) == expected
    assert runs.longest_key >= runs.longest_query > 0


def looped_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    ends: Tensor,
    most: int,
    keys: int,
    scale: float,
) -> Tensor:
    """Sequence by sequence, aligned at the last query and the last key."""
    group, out = query.shape[1] // key.shape[1], []
    for (q0, q1), (k0, k1) in zip(
        starts.unfold(0, 2, 1).tolist(), ends.unfold(0, 2, 1).tolist(), strict=True
    ):
        assert q1 - q0 <= most
        assert k1 - k0 <= keys
        k, v = (t[k0:k1].repeat_interleave(group, 1) for t in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], k) * scale
        hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).triu(
            k1 - k0 - (q1 - q0) + 1
        )
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v))
    return torch.cat(out)


def inputs(row: Row, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(row.num_tokens, heads, 16).to(device, dtype).requires_grad_() for heads in (4, 2, 2)]


def packed_and_alone(attention: RowAttention, share: str, device: torch.device, dtype: torch.dtype) -> float:
    """Largest distance of outputs and gradients from those of a float64 softmax over what may be seen."""
    row, sequences = row_of(GROUPS, share)
    sees = torch.from_numpy(dense(row, sequences)).to(device)
    used = sees.any(1)
    query, key, value = inputs(row, device, dtype)
    weights = torch.randn(query.shape, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    weights = weights * used[:, None, None]
    out = attention.bind(row, device)(query, key, value, 0.25)
    found = torch.autograd.grad((out * weights).sum(), (query, key, value))
    q, k, v = (t.detach().double().requires_grad_() for t in (query, key, value))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) * 0.25
    probs = scores.masked_fill(~(sees | ~used[:, None]), -math.inf).softmax(-1)
    oracle = torch.einsum("hqk,khd->qhd", probs, v.repeat_interleave(2, 1))
    expected = torch.autograd.grad((oracle * weights.double()).sum(), (q, k, v))
    pairs = [(out[used], oracle[used]), *zip(found, expected, strict=True)]
    return max(float((a.detach().double() - b.detach()).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["native", "sdpa"])
def test_packed_equals_one_by_one_with_gradients(name: str, share: str) -> None:
    if reason := lacks(name, CPU):
        pytest.skip(f"{name}: {reason}")
    assert packed_and_alone(choose_attention(name, CPU), share, CPU.device, torch.float32) < 1e-5


@pytest.mark.parametrize("share", SHARES)
def test_the_gathered_keys_of_a_varlen_kernel_give_the_same(share: str) -> None:
    attention = VarlenAttention("looped", looped_varlen)
    assert packed_and_alone(attention, share, CPU.device, torch.float32) < 1e-5


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile"
)  # compiling takes half a minute
@pytest.mark.parametrize("share", SHARES)
def test_flex_sees_the_same_forwards_on_a_cpu(share: str) -> None:
    """Its backward pass is for GPUs only, which is why a learner on a CPU is refused it."""
    from torch.nn.attention.flex_attention import flex_attention

    row, sequences = row_of(GROUPS, share)
    values = [tensor.detach() for tensor in inputs(row, CPU.device, torch.float32)]
    found = FlexAttention(flex_attention).bind(row, CPU.device)(*values, 0.25)
    expected = choose_attention("sdpa", CPU).bind(row, CPU.device)(*values, 0.25)
    used = torch.from_numpy(dense(row, sequences).any(1))
    assert float((found - expected)[used].abs().max()) < 1e-5


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ["flash", "varlen", "flex", "sdpa"])
def test_packed_equals_one_by_one_on_a_gpu(name: str, share: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip(f"{name} on a GPU: torch finds no CUDA device")
    place = Place(torch.device("cuda"), torch.bfloat16, 16)
    if reason := lacks(name, place):
        pytest.skip(f"{name} on a GPU: {reason}")
    assert packed_and_alone(choose_attention(name, place), share, place.device, place.dtype) < 0.1


def test_other_documents_do_not_move_a_bit() -> None:
    row, sequences = row_of(GROUPS, "none")
    mine = np.flatnonzero(dense(row, sequences)[row.hidden_index[-1]])  # the last document
    for name in ("native", "sdpa"):
        if lacks(name, CPU):
            continue
        query, key, value = (tensor.detach() for tensor in inputs(row, CPU.device, torch.float32))
        attend = choose_attention(name, CPU).bind(row, CPU.device)
        before = attend(query, key, value, 0.25)[mine]
        others = np.setdiff1d(np.arange(row.num_tokens), mine)
        for tensor in (query, key, value):
            tensor[others] += 7.0
        assert torch.equal(attend(query, key, value, 0.25)[mine], before), name


@pytest.mark.parametrize(
    ("name", "reason"),
    [("flash", "CUDA devices only"), ("varlen", "CUDA devices only"), ("flex", "no backward pass")],
)
def test_what_cannot_run_is_refused_by_name_with_what_can(name: str, reason: str) -> None:
    with pytest.raises(
        UnsupportedOption, match=rf"learner.attention = '{name}'.*{reason}.*allowed here: 'auto'.*'sdpa'"
    ):
        choose_attention(name, CPU)
    with pytest.raises(UnsupportedOption, match="no such back-end; there are 'auto', 'flash'"):
        choose_attention("flash3", CPU)


def test_auto_takes_the_first_that_runs() -> None:
    first = next(name for name in ORDER if not lacks(name, CPU))
    assert choose_attention("auto", CPU).name == first
    half = Place(CPU.device, torch.bfloat16, 16)
    assert choose_attention("auto", half).name == "sdpa"
    with pytest.raises(UnsupportedOption, match=r"'native'.*float32 on the CPU only.*bfloat16 on cpu"):
        choose_attention("native", half)
