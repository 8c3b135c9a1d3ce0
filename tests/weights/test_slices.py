"""Slice tables: fused, stacked, transposed, tied and sharded targets, by rules and from an engine's own loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from headway.errors import WeightError
from headway.model.flat import build_manifest, flatten
from headway.types import Manifest, PolicyVersion
from headway.weights import SlicedServed, Stager, WeightPublisher
from headway.weights.markers import derive_table, verify_table
from headway.weights.served import covered_stretch, straight_landing
from headway.weights.slices import PLAIN, Rule, Target, build_table
from headway_kernels.slice_table import destination_indices
from headway_kernels.weight_delta import BLOCK_ELEMENTS, SliceTable, apply_slices, diff, whole

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, EXPERTS, VOCAB = 8, 4, 2, 4, 12, 3, 12


class Layer(nn.Module):
    """A block as published: one tensor per projection and expert."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, HIDDEN, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, FFN, bias=False) for _ in range(EXPERTS))
        self.norm = nn.LayerNorm(HIDDEN)


class Model(nn.Module):
    """Two blocks between tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight


QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
RULES = [
    *(
        Rule(rf"(.*)\.{part}_proj\.(weight|bias)", r"\1.qkv.\2", stack=(part, QKV), shard=0, shards=shards)
        for part, shards in (("q", 0), ("k", KV_HEADS), ("v", KV_HEADS))
    ),
    *(
        Rule(rf"(.*)\.{part}_proj\.weight", r"\1.gate_up.weight", stack=(part, GATE_UP), shard=0)
        for part in GATE_UP
    ),
    Rule(r"(.*)\.(o|down)_proj\.weight", r"\1.\2.weight", shard=1),
    Rule(r"(.*)\.experts\.(\d+)\.weight", r"\1.experts", expert=2),
    Rule(r"(.*)\.norm\.(.*)", r"\g<0>"),
    Rule(r"embed\.weight", "embed.kernel", transposed=True),
    Rule(r"head\.weight", "head.weight", shard=0),
]


class FusedEngine:
    """Ranks of an engine that fuses, stacks, transposes and splits, with a loader like such engines have."""

    def __init__(self, ranks: int, dtype: torch.dtype) -> None:
        self.ranks, self.dtype = ranks, dtype
        self.tensors: dict[tuple[str, int], Tensor] = {}
        for rank in range(ranks):
            q, kv = HEADS * HEAD_DIM // ranks, KV_HEADS * HEAD_DIM // min(ranks, KV_HEADS)
            for layer in range(2):
                name = f"layers.{layer}"
                self._add(f"{name}.qkv.weight", rank, q + 2 * kv, HIDDEN)
                self._add(f"{name}.qkv.bias", rank, q + 2 * kv)
                self._add(f"{name}.gate_up.weight", rank, 2 * FFN // ranks, HIDDEN)
                self._add(f"{name}.o.weight", rank, HIDDEN, q)
                self._add(f"{name}.down.weight", rank, HIDDEN, FFN // ranks)
                self._add(f"{name}.experts", rank, EXPERTS, FFN, HIDDEN)
                self._add(f"{name}.norm.weight", rank, HIDDEN)
                self._add(f"{name}.norm.bias", rank, HIDDEN)
            self._add("embed.kernel", rank, HIDDEN, VOCAB)
            self._add("head.weight", rank, VOCAB // ranks, HIDDEN)

    def _add(self, name: str, rank: int, *shape: int) -> None:
        self.tensors[name, rank] = torch.full(shape, float("nan"), dtype=self.dtype)

    @property
    def targets(self) -> list[Target]:
        return [
            Target(name, tuple(tensor.shape), rank, self.ranks)
            for (name, rank), tensor in self.tensors.items()
        ]

    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            for rank in range(self.ranks):
                self._load(name, tensor, rank)

    def _load(self, name: str, tensor: Tensor, rank: int) -> None:
        layer = ".".join(name.split(".")[:2])
        kind = name.split(".")[2] if name.startswith("layers") else name
        if kind in ("q_proj", "k_proj", "v_proj"):
            fused = self.tensors[f"{layer}.qkv.{name.split('.')[-1]}", rank]
            shards = self.ranks if kind == "q_proj" else min(self.ranks, KV_HEADS)
            part = tensor.chunk(shards)[rank * shards // self.ranks]
            sizes = [HEADS * HEAD_DIM // self.ranks, *[KV_HEADS * HEAD_DIM // min(self.ranks, KV_HEADS)] * 2]
            fused.split(sizes)["qkv".index(kind[0])].copy_(part)
        elif kind in ("gate_proj", "up_proj"):
            fused = self.tensors[f"{layer}.gate_up.weight", rank]
            fused.chunk(2)[kind == "up_proj"].copy_(tensor.chunk(self.ranks)[rank])
        elif kind in ("o_proj", "down_proj"):
            self.tensors[f"{layer}.{kind[:-5]}.weight", rank].copy_(tensor.chunk(self.ranks, 1)[rank])
        elif kind == "experts":
            self.tensors[f"{layer}.experts", rank][int(name.split(".")[3])].copy_(tensor)
        elif kind == "norm":
            self.tensors[name, rank].copy_(tensor)
        elif name == "embed.weight":
            self.tensors["embed.kernel", rank].copy_(tensor.T)
        else:
            self.tensors["head.weight", rank].copy_(tensor.chunk(self.ranks)[rank])


def published(dtype: str) -> tuple[Manifest, Tensor]:
    torch.manual_seed(3)
    module = Model()
    manifest = build_manifest(module, dtype)
    flat, _ = flatten(module, manifest, with_grad=False)
    return manifest, flat


def named(manifest: Manifest, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for spec in manifest.tensors:
        for name in (spec.name, *spec.aliases):
            yield name, flat[spec.offset : spec.offset + spec.size].view(spec.shape)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rules_and_the_loader_itself_lead_every_element_to_the_same_place(ranks: int, dtype: str) -> None:
    manifest, flat = published(dtype)
    kind = torch.float32 if dtype == "float32" else torch.bfloat16
    engine, loaded = FusedEngine(ranks, kind), FusedEngine(ranks, kind)
    table = build_table(manifest, engine.targets, RULES)
    derived = derive_table(manifest, engine.load, list(engine.tensors.values()))
    verify_table(table, manifest, engine.load, list(engine.tensors.values()))
    loaded.load(named(manifest, flat.to(kind)))
    for each in (table, derived):
        for tensor in engine.tensors.values():
            tensor.fill_(float("nan"))
        apply_slices(whole(flat.to(kind)), each, list(engine.tensors.values()))
        for key, tensor in loaded.tensors.items():
            assert torch.equal(engine.tensors[key], tensor), key
    # few runs: what a loader does is a handful of rectangles, not a list of elements
    assert len(derived.runs) <= len(table.runs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_deltas_through_a_fused_engine_are_proved_and_equal_a_load(ranks: int, chaos: Any) -> None:
    manifest, flat = published("bfloat16")
    engine, loaded = FusedEngine(ranks, torch.float32), FusedEngine(ranks, torch.float32)
    channel = chaos(random.Random(0))
    publisher = WeightPublisher(channel, manifest)
    inside: list[PolicyVersion] = []
    tensors = list(engine.tensors.values())
    served = SlicedServed(build_table(manifest, engine.targets, RULES), tensors, manifest, inside.append)
    stager = Stager(channel, served, manifest)
    noise = torch.Generator().manual_seed(0)
    for step in range(6):
        digest = publisher.publish(flat, PolicyVersion(0, step)).digest
        while stager.turn():
            pass
        assert stager.commit() == PolicyVersion(0, step) == inside[-1]
        stager.turn()
        assert [proof.digest for proof in stager.proofs()] == [digest]
        loaded.load(named(manifest, flat.bfloat16().float()))
        for key, tensor in loaded.tensors.items():
            assert torch.equal(engine.tensors[key], tensor), key
        for spec in manifest.tensors:
            part = flat[spec.offset : spec.offset + spec.size]
            part[torch.randint(0, spec.size, (3,), generator=noise)] += 1.0
    engine.tensors["head.weight", 0] *= 2.0  # one of the two copies of the tied tensor
    publisher.publish(flat, PolicyVersion(0, 6))
    while stager.turn():
        pass
    stager.commit()
    with pytest.raises(WeightError, match="tied copies"):
        stager.turn()


QKV_WEIGHT = "layers.0.qkv.weight"


def resized(rows: int) -> Any:
    return lambda rules, targets: targets.__setitem__(0, Target(QKV_WEIGHT, (rows, HIDDEN)))


def ruled(source: str, target: str, **options: Any) -> Any:
    return lambda rules, targets: rules.insert(0, Rule(source, target, **options))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rules, targets: rules.pop(), r"no rule covers head\.weight"),
        (lambda rules, targets: targets.pop(), r"head\.weight goes to head\.weight, which the engine"),
        (lambda rules, targets: targets.append(Target("extra", (3,))), "nothing published goes to extra"),
        (lambda rules, targets: targets.append(targets[0]), r"two targets .* same name"),
        (resized(33), r"q_proj\.weight, .* write 256 of the 264 elements of layers\.0\.qkv\.weight"),
        (resized(31), r"v_proj\.weight .* does not fit layers\.0\.qkv\.weight"),
        (ruled(r"layers\.0\.k_proj\.weight", "embed.kernel"), "stacked from q, k, v; missing: k"),
        (ruled(r"head\.weight", "embed.kernel"), r"both go to embed\.kernel"),
        (ruled(r"embed\.weight", "embed.kernel"), r"arrives as \[12, 8\], .* is \[8, 12\]"),
        (ruled(r"(.*)\.norm\.weight", ""), r"would leave layers\.0\.norm\.weight out"),
        (ruled(r"(.*)\.norm\.weight", r"\g<0>", transposed=True), "no matrix"),
        (ruled(r"(.*)\.norm\.weight", r"\g<0>", shard=1), "no dimension 1"),
    ],
)
def test_what_is_not_covered_missing_unexpected_or_misshapen_is_refused_by_name(
    change: Any, message: str
) -> None:
    manifest, _ = published("float32")
    rules, targets = list(RULES), FusedEngine(1, torch.float32).targets
    build_table(manifest, targets, rules)
    change(rules, targets)
    with pytest.raises(WeightError, match=message):
        build_table(manifest, targets, rules)


def test_an_uneven_split_is_refused() -> None:
    manifest, _ = published("float32")
    with pytest.raises(WeightError, match="cannot be split 5 ways"):
        build_table(manifest, [Target("x", (1,), 0, 5)], [Rule(r".*", "x", shard=0)])


def test_a_dropped_tied_name_leaves_the_other() -> None:
    manifest, _ = published("float32")
    targets = [target for target in FusedEngine(1, torch.float32).targets if target.name != "head.weight"]
    build_table(manifest, targets, [Rule(r"head\.weight", ""), *RULES])


def test_a_table_that_disagrees_with_the_loader_names_the_first_element() -> None:
    manifest, _ = published("float32")
    engine = FusedEngine(1, torch.float32)
    swapped = [
        rule
        if rule.stack is None or rule.stack[1] != GATE_UP
        else Rule(rule.source, rule.target, stack=(rule.stack[0], GATE_UP[::-1]))
        for rule in RULES
    ]
    table = build_table(manifest, engine.targets, swapped)
    with pytest.raises(
        WeightError, match=r"sends layers\.0\.up_proj\.weight\[0\] .* loader layers\.0\.gate_proj"
    ):
        verify_table(table, manifest, engine.load, list(engine.tensors.values()))


def test_a_loader_that_skips_or_mixes_is_refused() -> None:
    manifest, _ = published("float32")
    engine = FusedEngine(1, torch.float32)
    tensors = list(engine.tensors.values())

    def skipping(weights: Iterator[tuple[str, Tensor]]) -> None:
        engine.load((name, tensor) for name, tensor in weights if "norm" not in name)

    def mixing(weights: Iterator[tuple[str, Tensor]]) -> None:
        engine.load((name, tensor / 3) for name, tensor in weights)

    for load in (skipping, mixing):
        with pytest.raises(WeightError, match="unwritten, or computes"):
            derive_table(manifest, load, tensors)
    extra = build_manifest(nn.ModuleDict({"m": Model(), "n": nn.Linear(3, 3)}), "float32")

    def renaming(weights: Iterator[tuple[str, Tensor]]) -> None:
        engine.load((name[2:], tensor) for name, tensor in weights if name.startswith("m."))

    with pytest.raises(WeightError, match=r"ignores n\.weight, n\.bias"):
        derive_table(extra, renaming, tensors)


def test_an_incomplete_table_cannot_be_proved_and_is_refused() -> None:
    manifest, _ = published("float32")
    engine = FusedEngine(2, torch.float32)
    mine = [target for target in engine.targets if target.rank == 0]
    table = build_table(manifest, mine, RULES)
    with pytest.raises(WeightError, match=r"q_proj\.weight.* tensors of every rank"):
        SlicedServed(table, [engine.tensors[t.name, 0] for t in mine], manifest, lambda version: None)


def test_the_trivial_table_is_one_run_a_tensor() -> None:
    manifest, flat = published("float32")
    targets = [Target(name, tuple(tensor.shape)) for name, tensor in named(manifest, flat)]
    table = build_table(manifest, targets, [PLAIN])
    assert len(table.runs) == len(targets)
    tensors = [torch.zeros(target.shape) for target in targets]
    apply_slices(whole(flat), table, tensors)
    assert all(torch.equal(a, b) for a, (_, b) in zip(tensors, named(manifest, flat), strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_random_layouts_are_derived_exactly(seed: int) -> None:
    """Permuted, transposed and cut rectangles of one big tensor, across block borders."""
    draw = random.Random(seed)
    rows, columns = draw.randrange(2, 40), draw.randrange(2, 4000)
    module = nn.ParameterDict({"w": nn.Parameter(torch.zeros(rows, columns))})
    manifest = build_manifest(module, "float32")
    cut_row, cut_column = draw.randrange(1, rows), draw.randrange(1, columns)
    flip = draw.random() < 0.5

    def parts(w: Tensor) -> list[Tensor]:
        top, bottom = w[:cut_row], w[cut_row:]
        return [top[:, :cut_column], top[:, cut_column:], bottom.T if flip else bottom]

    tensors = [torch.zeros(part.shape) for part in parts(torch.zeros(rows, columns))]

    def load(weights: Iterator[tuple[str, Tensor]]) -> None:
        for _, w in weights:
            for tensor, part in zip(tensors, parts(w), strict=True):
                tensor.copy_(part)

    table = derive_table(manifest, load, tensors)
    old = torch.randn(manifest.num_elements, generator=torch.Generator().manual_seed(seed))
    new = old.clone()
    new[:: draw.randrange(1, 50)] += 1.0
    assert isinstance(table, SliceTable)
    assert len(table.runs) <= 3 * rows + 3
    assert manifest.num_elements < 3 * BLOCK_ELEMENTS
    for delta in (whole(old), diff(new, old)):
        apply_slices(delta, table, tensors)
    w = new[: rows * columns].view(rows, columns)
    for tensor, part in zip(tensors, parts(w), strict=True):
        assert np.array_equal(tensor.numpy(), part.numpy())


@given(
    start=st.integers(0, 50),
    rows=st.integers(1, 6),
    length=st.integers(1, 9),
    gap=st.integers(0, 4),
    offset=st.integers(0, 30),
    row_gap=st.integers(0, 4),
    column_stride=st.integers(1, 3),
    begin=st.integers(0, 40),
    size=st.integers(1, 60),
)
def test_what_a_run_covers_and_whether_it_lands_straight(
    start: int,
    rows: int,
    length: int,
    gap: int,
    offset: int,
    row_gap: int,
    column_stride: int,
    begin: int,
    size: int,
) -> None:
    row_stride = length * column_stride + row_gap
    run = np.array([start, rows, length, length + gap, 0, offset, row_stride, column_stride], np.int64)
    sources = np.arange(begin, begin + size, dtype=np.int64)
    found, landing = destination_indices(run, sources)
    first, last = covered_stretch(run, begin, begin + size)
    assert not found[(sources < first) | (sources >= last)].any()
    if first < last and (at := straight_landing(run, first)) is not None:
        inside = (sources >= first) & (sources < last)
        assert found[inside].all()
        assert landing.tolist() == list(range(at, at + last - first))


@pytest.mark.parametrize(("vocabulary", "padded"), [(48, 64), (30, 64), (64, 64), (70, 128)])
def test_a_padded_vocabulary_is_cut_where_it_ends(vocabulary: int, padded: int) -> None:
    """Ranks split the padded rows evenly; what falls beyond the published ones is nobody's."""
    model = nn.ModuleDict({"embed": nn.Embedding(vocabulary, 4)})
    manifest = build_manifest(model, "float32")
    flat, _ = flatten(model, manifest, with_grad=False)
    whole_rows, ranks = model["embed"].weight.detach(), 2
    share = padded // ranks
    rows = [min(vocabulary, (rank + 1) * share) - min(vocabulary, rank * share) for rank in range(ranks)]
    targets = [Target("embed.weight", (count, 4), rank, ranks) for rank, count in enumerate(rows) if count]
    table = build_table(manifest, targets, [Rule(r".*", r"\g<0>", shard=0, padded=padded)])
    served = [torch.zeros(target.shape) for target in targets]
    apply_slices(whole(flat), table, served)
    assert torch.equal(torch.cat(served), whole_rows)
