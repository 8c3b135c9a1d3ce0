"""vLLM's own engine, on its CPU build, against float64 forwards of transformers' modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.generate.vllm_case import HERE, LONG_PROMPT, NEEDS_VLLM, PROMPT
from transformers import AutoModelForCausalLM, LlamaConfig

from headway.errors import UnsupportedOption, WeightError
from headway.generate import FinishedMember, GroupRequest
from headway.generate.filters import filter_logits
from headway.generate.vllm import library, open_vllm
from headway.generate.vllm import weights as vllm_weights
from headway.generate.vllm.start import Sizes
from headway.model import load_policy
from headway.types import FinishReason, PolicyVersion, Sampling

_alive: list[Any] = []  # process groups are shared, and go with the first engine that is collected


def open_engine(
    folder: Path,
    decode: Any,
    *,
    kv: str = "keep",
    published_dtype: str = "float32",
    head_dtype: str = "float32",
    kept_sets: bool = False,
    **options: Any,
) -> Any:
    engine = open_vllm(
        folder,
        published_dtype=published_dtype,
        sizes=Sizes(64, 0, 512),
        kv=kv,
        head_dtype=head_dtype,
        kept_sets=kept_sets,
        options=options,
        decode=decode,
    )
    _alive.append(engine)
    return engine


def push(engine: Any, flat: torch.Tensor, step: int) -> None:
    engine.apply(lambda into: (into.copy_(flat), PolicyVersion(0, step))[1])


def tokens_of(member: FinishedMember) -> list[int]:
    return member.token_ids.tolist()


def versions_of(member: FinishedMember) -> list[int]:
    return [span.version.step for span in member.spans for _ in range(span.start, span.end)]


def steps(engine: Any, count: int) -> None:
    for _ in range(count):
        assert engine.step() == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"max_num_seqs": 4},
            r"generator\.vllm\.max_num_seqs = 4: set by headway \(generator\.max_running\)",
        ),
        ({"logprobs_mode": "raw_logprobs"}, r"logprobs_mode = 'raw_logprobs': set by headway"),
        ({"pipeline_parallel_size": 2}, r"= 2: .* allowed: 1\. More GPUs: generator\.replicas"),
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size = 0: expected a number of GPUs"),
        ({"enable_lora": True}, r"enable_lora = True: set by headway \(model\.lora\)"),
        ({"max_lora_rank": 64}, r"set by headway \(model\.lora\.rank\)"),
    ],
)
def test_arguments_that_are_headways_own_are_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedOption, match=says):
        library.check_arguments(arguments)


@pytest.mark.parametrize("version", ["0.27.9", "0.34.0", "1.0.0", "unknown"])
def test_other_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib, "import_module", lambda _: SimpleNamespace(__version__=version))
    with pytest.raises(UnsupportedOption, match=rf"vllm {version} is installed; supported: 0\.28 <= version"):
        library.load_vllm()


@pytest.mark.skipif(HERE, reason="vllm is installed here")
def test_without_the_package_the_error_says_what_to_do(folder: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"needs the package vllm.*generator\.engine = 'torch'"):
        open_engine(folder, str)


class TestRealEngine:
    pytestmark = NEEDS_VLLM

    def test_arguments_that_it_does_not_take_are_refused(self, folder: Path) -> None:
        with pytest.raises(UnsupportedOption, match=r"max_model_length.*did you mean max_model_len\?"):
            open_engine(folder, str, max_model_length=3)
        with pytest.raises(UnsupportedOption, match="allowed: 'float32'"):
            open_engine(folder, str, dtype="half")
        with pytest.raises(UnsupportedOption, match="enable_chunked_prefill"):
            open_engine(folder, str, enable_chunked_prefill=True)

    @pytest.mark.parametrize(("head_dtype", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
    def test_the_head_is_computed_in_the_dtype_that_both_sides_follow(
        self, folder: Path, request_of: Any, head_dtype: str, other: str
    ) -> None:
        """Its layers compute in bfloat16; its logits are a float64 product's to the head's own rounding."""
        engine = open_engine(folder, str, published_dtype="bfloat16", head_dtype=head_dtype)
        llm, apart = engine._llm, []
        model = library.live_runner(llm).model

        def compare(_module: Any, arguments: Any, logits: torch.Tensor) -> None:
            head, hidden = arguments[:2]
            assert hidden.dtype == torch.bfloat16
            oracle = hidden.double() @ head.weight[: logits.shape[1]].double().T
            apart.append(float((logits.double() - oracle).abs().max() / oracle.abs().max()))

        model.logits_processor.register_forward_hook(compare)
        push(engine, load_policy(folder, published_dtype="bfloat16", with_grad=False).flat, 0)
        engine.add(request_of(1, prompt=PROMPT))
        while not apart:
            engine.step()
        assert (max(apart) < 1e-5) if head_dtype == "float32" else (1e-4 < max(apart) < 1e-2)
        library.check_head(library.load_vllm(), llm, head_dtype)
        with pytest.raises(UnsupportedOption, match=rf"model\.head_dtype = '{other}'.*in {head_dtype} here"):
            library.check_head(library.load_vllm(), llm, other)

    def test_a_head_precision_of_one_side_alone_is_refused(self, folder: Path) -> None:
        with pytest.raises(UnsupportedOption, match=r"head_dtype = 'bfloat16': both sides follow"):
            open_engine(folder, str, hf_overrides={"head_dtype": "bfloat16"})
        with pytest.raises(UnsupportedOption, match=r"hf_overrides = 3: must be a table"):
            open_engine(folder, str, hf_overrides=3)

    def test_each_token_comes_with_its_kept_set_and_its_log_prob_over_it(
        self, versions: Any, request_of: Any, finish: Any
    ) -> None:
        """Requests with and without filters share every batch; a push and its re-admissions come in between."""
        engine = open_engine(versions.folder, versions.decode, kept_sets=True)
        push(engine, versions.flat[0], 0)
        filters: list[dict[str, Any]] = [
            {"top_p": 0.8},
            {"top_k": 3},
            {"min_p": 0.1},
            {"top_p": 0.9, "top_k": 5},
        ]
        for number, chosen in enumerate(filters):
            engine.add(request_of(number, members=3, budget=8, temperature=0.8, keep_sets=True, **chosen))
        engine.add(request_of(9, members=2, budget=5, top_p=0.5))  # nobody asks: nothing is told
        engine._admit()
        push(engine, versions.flat[0], 1)
        done = finish(engine)
        assert len(done) == 3 * len(filters) + 2
        for (number, _), member in done.items():
            if number == 9:
                assert member.kept is None
                continue
            assert member.kept is not None
            sets = np.split(member.kept.ids, np.cumsum(member.kept.counts)[:-1])
            prompt = list(request_of(number).prompt_ids)
            ids = torch.tensor([[*prompt, *tokens_of(member)]])
            with torch.no_grad():
                logits = versions.module(0)(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            filtered = filter_logits(logits, Sampling(0.8, 8, [], **filters[number]))
            for place, (token, kept) in enumerate(zip(tokens_of(member), sets, strict=True)):
                if (
                    len(filters[number]) == 1
                ):  # vLLM takes top-p of what top-k has left, the embedded engine of all
                    assert kept.tolist() == (filtered[place] > float("-inf")).nonzero().flatten().tolist()
                over = torch.log_softmax(logits[place, torch.from_numpy(kept).long()] / 0.8, -1)
                expected = float(over[kept.tolist().index(token)])
                assert float(member.logprobs[place]) == pytest.approx(expected, abs=1e-4)

    @pytest.mark.parametrize("kv", ["keep", "recompute"])
    def test_each_token_is_of_the_version_that_was_in_force(
        self, versions: Any, oracle: Any, request_of: Any, finish: Any, kv: str
    ) -> None:
        engine = open_engine(versions.folder, versions.decode, kv=kv)
        push(engine, versions.flat[0], 0)
        engine.add(request_of(1, prompt=PROMPT, members=4, budget=16))
        steps(engine, 5)
        push(engine, versions.flat[1], 1)
        steps(engine, 4)
        push(engine, versions.flat[2], 2)
        for member in finish(engine).values():
            numbers = versions_of(member)
            assert numbers == [0] * 5 + [1] * 4 + [2] * 7
            if kv == "keep":
                expected = oracle.cached([(PROMPT, 0)], tokens_of(member), 1.0, numbers)
            else:
                expected = oracle.fresh(PROMPT, tokens_of(member), 1.0, numbers)
            assert np.abs(member.logprobs - expected).max() <= 1e-4

    def test_a_prefix_of_older_weights_is_never_read(
        self, versions: Any, oracle: Any, request_of: Any, finish: Any
    ) -> None:
        engine = open_engine(versions.folder, versions.decode)
        for step, number in enumerate((0, 1, 0)):
            push(engine, versions.flat[number], step)
            for again in range(2):  # the second reads the prefix that the first left
                engine.add(request_of(10 * step + again, prompt=LONG_PROMPT, members=2, budget=6))
                for member in finish(engine).values():
                    expected = oracle.fresh(LONG_PROMPT, tokens_of(member), 1.0, number)
                    assert np.abs(member.logprobs - expected).max() <= 1e-4

    def test_a_group_that_waits_while_weights_change_is_forwarded_by_the_new_ones_alone(
        self, versions: Any, oracle: Any, request_of: Any, finish: Any
    ) -> None:
        engine = open_engine(versions.folder, versions.decode)
        push(engine, versions.flat[0], 0)
        engine.add(request_of(0, prompt=LONG_PROMPT, members=1, budget=6))
        engine._admit()  # inside vLLM, and nothing forwarded
        push(engine, versions.flat[1], 1)
        (member,) = finish(engine).values()
        expected = oracle.fresh(LONG_PROMPT, tokens_of(member), 1.0, 1)
        assert np.abs(member.logprobs - expected).max() <= 1e-4

    def test_tied_embeddings_there_and_back_equal_a_fresh_engine(
        self, tmp_path: Path, versions: Any, request_of: Callable[..., GroupRequest], finish: Any
    ) -> None:
        torch.manual_seed(7)
        config = LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=64, initializer_range=0.2,
            tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path))
        first = load_policy(tmp_path, with_grad=False).flat.clone()
        second = first + 0.1 * torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
        travelled, fresh = (open_engine(tmp_path, versions.decode) for _ in range(2))
        results: list[Sequence[FinishedMember]] = []
        for engine, path in ((travelled, (first, second, first)), (fresh, (first,))):
            for step, flat in enumerate(path):
                push(engine, flat, step)
                engine.add(request_of(step, prompt=LONG_PROMPT, members=2, budget=8, temperature=0.0))
                last = [*finish(engine).values()]
            engine.add(request_of(9, prompt=LONG_PROMPT, members=2, budget=8, seed=1))
            results.append([*last, *finish(engine).values()])
        for mine, theirs in zip(*results, strict=True):
            assert tokens_of(mine) == tokens_of(theirs)
            assert np.array_equal(mine.logprobs, theirs.logprobs)

    def test_a_table_that_disagrees_with_the_loader_stops_the_start(
        self, versions: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rules_of = vllm_weights.rules_of

        def swapped(*arguments: Any) -> Any:
            order = ("q_proj", "v_proj", "k_proj")
            return [
                vllm_weights.Rule(rule.source, rule.target, stack=(rule.stack[0], order))
                if rule.stack is not None and "q_proj" in rule.stack[1]
                else rule
                for rule in rules_of(*arguments)
            ]

        monkeypatch.setattr(vllm_weights, "rules_of", swapped)
        with pytest.raises(WeightError, match=r"packed QKVParallelLinear.*computes something else"):
            open_engine(versions.folder, versions.decode)

    def test_a_model_without_a_table_is_reloaded_layer_by_layer_and_says_so(
        self, versions: Any, oracle: Any, request_of: Any, finish: Any, monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        def uncovered(*_: Any) -> None:
            raise WeightError("nothing published goes to model.odd.weight")

        monkeypatch.setattr(vllm_weights, "build_table", uncovered)
        engine = open_engine(versions.folder, versions.decode)
        assert "layerwise reload" in caplog.text
        for number in (0, 3):
            push(engine, versions.flat[number], number)
            engine.add(request_of(number, prompt=PROMPT, members=2, budget=8))
            for member in finish(engine).values():
                expected = oracle.fresh(PROMPT, tokens_of(member), 1.0, number)
                assert np.abs(member.logprobs - expected).max() <= 1e-4

    def test_a_push_that_breaks_off_leaves_an_engine_that_refuses_to_sample(
        self, versions: Any, request_of: Any, finish: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = open_engine(versions.folder, versions.decode)
        push(engine, versions.flat[0], 0)
        engine.add(request_of(0, prompt=PROMPT, members=2, budget=8))
        steps(engine, 2)
        with monkeypatch.context() as broken:
            broken.setattr(engine.served, "_table", None)
            with pytest.raises(AttributeError):
                push(engine, versions.flat[1], 1)
        with pytest.raises(WeightError, match="of no version"):
            engine.step()
        push(engine, versions.flat[1], 1)
        assert [versions_of(member) for member in finish(engine).values()] == [[0] * 2 + [1] * 6] * 2

    def test_weights_that_are_not_finite_end_the_member_with_an_error(
        self, versions: Any, request_of: Any, finish: Any
    ) -> None:
        engine = open_engine(versions.folder, versions.decode)
        push(engine, torch.full_like(versions.flat[0], float("nan")), 0)
        engine.add(request_of(0, prompt=PROMPT, members=2, budget=8))
        assert {member.finish_reason for member in finish(engine).values()} == {FinishReason.ERROR}
