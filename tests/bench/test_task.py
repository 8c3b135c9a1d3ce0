"""The rivals' task, and the stand-in for the attention that TRL's asynchronous trainer calls."""

import pytest
import torch

from headway_bench.rivals.task import (
    BOS_ID,
    EOS_ID,
    VOCABULARY,
    build_model,
    decode,
    encode,
    exact_match,
    make_prompts,
    spread_reward,
    warm_up,
)
from headway_bench.rivals.tree_attention import segment_mask, varlen_attention
from headway_bench.rivals.workload import W1, W2, mean_of_last


def test_the_vocabulary_has_32_distinct_characters():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 32
    assert encode("^$") == [BOS_ID, EOS_ID]


def test_prompts_are_reproducible_and_of_the_stated_length():
    prompts = make_prompts(20, W1.digits, seed=3)
    assert prompts == make_prompts(20, W1.digits, seed=3) != make_prompts(20, W1.digits, seed=4)
    assert all(len(encode(prompt)) == W1.prompt_tokens for prompt in prompts)
    assert [decode(encode(prompt)) for prompt in prompts] == prompts


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("01359$", 1.0),
        ("01359", 1.0),
        ("01359$77", 1.0),
        ("10359$", 0.0),
        ("0135$", 0.0),
        ("", 0.0),
        ("013599$", 0.0),
    ],
)
def test_only_the_sorted_digits_are_rewarded(completion: str, reward: float):
    assert exact_match("^s35019=", completion) == reward


def test_the_throughput_reward_is_the_sum_modulo_seven():
    assert [spread_reward(ids) for ids in ([7], [3, 5], [])] == [0.0, 1.0, 0.0]


def test_the_workloads_are_those_published():
    assert (W1.samples_per_step, W1.max_tokens, W1.steps, W1.lr, W1.forced_length) == (
        128,
        8,
        100,
        1e-4,
        False,
    )
    assert (W2.samples_per_step, W2.max_tokens, W2.steps, W2.forced_length) == (32, 128, 6, True)


def test_the_model_has_the_published_size_and_the_warm_up_lowers_its_loss():
    model = build_model(seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 792_704
    losses = warm_up(model, steps=8, digits=5, batch=16)
    assert losses[-1] < losses[0] - 0.3


def test_means_of_the_last_updates():
    assert mean_of_last([0.0, 1.0, 2.0, 3.0], 2) == 2.5
    assert mean_of_last([1.0, 3.0], 10) == 2.0


# One root of 3 tokens; under it a branch of 2 and one of 1, and under the first branch a leaf of 4.
PATHS = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 3, 4, 6, 7, 8, 9]]
OWN = [3, 2, 1, 4]


def test_the_stand_in_equals_plain_attention_along_every_path(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim, tokens = 4, 2, 8, 10
    # Queries are laid out segment after segment; `order` says which token each is.
    order = [token for path, own in zip(PATHS, OWN, strict=True) for token in path[-own:]]
    query = torch.randn(tokens, heads, head_dim, generator=generator)
    key, value = (torch.randn(tokens, kv_heads, head_dim, generator=generator) for _ in range(2))
    gathered = torch.tensor([token for path in PATHS for token in path])
    bounds_q = torch.tensor([0, *torch.tensor(OWN).cumsum(0).tolist()], dtype=torch.int32)
    bounds_k = torch.tensor(
        [0, *torch.tensor([len(path) for path in PATHS]).cumsum(0).tolist()], dtype=torch.int32
    )

    expected = torch.empty_like(query)
    for path, own in zip(PATHS, OWN, strict=True):
        for token in path[-own:]:
            seen = path[: path.index(token) + 1]
            for head in range(heads):
                keys, values = key[seen, head // 2], value[seen, head // 2]
                weights = torch.softmax(keys @ query[token, head] * head_dim**-0.5, 0)
                expected[token, head] = weights @ values

    for dense_pairs in (0, 10**9):
        monkeypatch.setattr("headway_bench.rivals.tree_attention.DENSE_PAIRS", dense_pairs)
        output = varlen_attention(query[order], key[gathered], value[gathered], bounds_q, bounds_k, 4, 9)
        torch.testing.assert_close(output, expected[order], rtol=1e-5, atol=1e-6)


def test_a_segment_sees_its_path_and_no_other():
    mask = segment_mask(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 5]))
    assert mask.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]


def test_windows_are_refused():
    one = torch.zeros(1, 1, 4)
    bounds = torch.tensor([0, 1])
    with pytest.raises(NotImplementedError, match="window_size"):
        varlen_attention(one, one, one, bounds, bounds, 1, 1, window_size=(3, 0))
