"""Where each published tensor lands in an engine of another layout: a rule set, made into a SliceTable once at start.

A rule says where tensors whose names match go, and how:

    Rule(r"(.*)\\.q_proj\\.weight", r"\\1.qkv.weight", stack=("q", ("q", "k", "v")))   a part of a fused tensor
    Rule(r"(.*)\\.experts\\.(\\d+)\\.up", r"\\1.experts.up", expert=2)               one slab of an expert stack
    Rule(r"(.*)\\.dense\\.weight", r"\\1.dense.kernel", transposed=True)             stored the other way round
    Rule(r"(.*)\\.o_proj\\.weight", r"\\1.o_proj.weight", shard=1)                   split over ranks by columns

Everything is checked: a tensor that no rule covers, a target that does not exist or has another size, and target
elements that nothing writes, or two tensors, are refused by name. Tied tensors have one entry in the
manifest; each of its names goes where its rule says. headway.weights.markers derives the same table from an
engine's own loader, and compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headway.errors import WeightError
from headway.types import Manifest, TensorSpec
from headway_kernels.weight_delta import Run, SliceTable


@dataclass(frozen=True)
class Rule:
    """Where tensors whose whole name matches `source` go.

    Attributes:
        source: regular expression; target: its replacement, the target's name; "" drops the tensor (a tied name
            that the engine does not have).
        stack: this part's name and the names of all parts, which follow each other along the target's first
            dimension, in order. Parts may differ in size; all of them must be published.
        expert: number of the group of `source` that holds the index along the target's first dimension.
        transposed: a matrix [r, c] is stored as [c, r].
        shard: dimension of the published tensor that tensor-parallel ranks split, None: every rank has all of it.
        shards: at most so many parts; more ranks share them (key-value heads fewer than ranks). 0: one a rank.
        padded: elements along `shard` that the ranks split evenly, of which the last ones only pad (a vocabulary);
            what falls to a rank is cut where the published tensor ends. 0: nothing pads.
    """

    source: str
    target: str
    stack: tuple[str, tuple[str, ...]] | None = None
    expert: int = 0
    transposed: bool = False
    shard: int | None = None
    shards: int = 0
    padded: int = 0


PLAIN = Rule(r".*", r"\g<0>")


@dataclass(frozen=True)
class Target:
    """One tensor of the engine.

    Attributes:
        name, shape: as the engine knows it; rank: that holds it, of `ranks`.
    """

    name: str
    shape: tuple[int, ...]
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class _Piece:
    """A published tensor's share in a target: rows and columns of it as a matrix, and where its rows begin."""

    name: str
    spec: TensorSpec
    rule: Rule
    match: re.Match[str]
    rank: int
    ranks: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the share."""
        shape = list(self.spec.shape)
        if self.rule.shard is not None:
            first, end = self.stretch
            shape[self.rule.shard] = end - first
        return tuple(shape)

    @property
    def num_shards(self) -> int:
        return min(self.ranks, self.rule.shards or self.ranks)

    @property
    def stretch(self) -> tuple[int, int]:
        """First and last + 1 index of the share along the dimension that ranks split."""
        assert self.rule.shard is not None
        size = self.spec.shape[self.rule.shard]
        index = self.rank * self.num_shards // self.ranks
        share = (self.rule.padded or size) // self.num_shards
        return min(size, index * share), min(size, (index + 1) * share)


def build_table(manifest: Manifest, targets: Sequence[Target], rules: Sequence[Rule]) -> SliceTable:
    """The table that leads from the manifest's flat buffer to `targets`, in their order.

    Args:
        rules: tried in order; the first that matches a name counts.

    Raises:
        WeightError: names what is not covered, missing, unexpected, or of another size.
    """
    by_name = {(target.name, target.rank): index for index, target in enumerate(targets)}
    if len(by_name) != len(targets):
        raise WeightError("slice table: two targets of one rank have the same name")
    pieces: dict[int, list[_Piece]] = {}
    for rank, ranks in sorted({(target.rank, target.ranks) for target in targets}):
        for spec in manifest.tensors:
            for name in (spec.name, *spec.aliases):
                piece = _match(name, spec, rules, rank, ranks)
                if piece is not None and 0 not in piece.shape:
                    target = piece.match.expand(piece.rule.target)
                    if (target, rank) not in by_name:
                        raise WeightError(
                            f"slice table: {name} goes to {target}, which the engine (rank {rank}) does not have"
                        )
                    pieces.setdefault(by_name[target, rank], []).append(piece)
    runs: list[Run] = []
    for index, target in enumerate(targets):
        runs += _fill(index, target, pieces.get(index, []))
    return SliceTable.build(
        manifest.num_elements, [int(np.prod(target.shape, dtype=np.int64)) for target in targets], runs
    )


def _match(name: str, spec: TensorSpec, rules: Sequence[Rule], rank: int, ranks: int) -> _Piece | None:
    for rule in rules:
        match = re.fullmatch(rule.source, name)
        if match is None:
            continue
        if not rule.target:
            if len(spec.aliases) == 0:
                raise WeightError(
                    f"slice table: the rule {rule.source!r} would leave {name} out of the engine"
                )
            return None
        piece = _Piece(name, spec, rule, match, rank, ranks)
        _check_piece(piece)
        return piece
    raise WeightError(
        f"slice table: no rule covers {name}; add one, or the engine would keep its old weights"
    )


def _check_piece(piece: _Piece) -> None:
    rule, shape = piece.rule, piece.spec.shape
    if rule.shard is not None and not 0 <= rule.shard < len(shape):
        raise WeightError(
            f"slice table: {piece.name} of shape {shape} has no dimension {rule.shard} to shard"
        )
    if rule.shard is not None and (rule.padded or shape[rule.shard]) % piece.num_shards:
        raise WeightError(
            f"slice table: {piece.name} of shape {shape} cannot be split {piece.num_shards} ways along {rule.shard}"
        )
    if rule.shard is not None and 0 < rule.padded < shape[rule.shard]:
        raise WeightError(
            f"slice table: {piece.name} of shape {shape} is larger than its padded {rule.padded}"
        )
    if rule.transposed and len(shape) != 2:
        raise WeightError(f"slice table: {piece.name} of shape {shape} is no matrix that could be transposed")


def _fill(index: int, target: Target, pieces: list[_Piece]) -> list[Run]:
    """Runs that write the whole of one target."""
    size = int(np.prod(target.shape, dtype=np.int64))
    if not pieces:
        raise WeightError(f"slice table: nothing published goes to {target.name}, rank {target.rank}")
    runs: list[Run] = []
    written = 0
    for piece, offset in _placed(target, pieces):
        count = int(np.prod(piece.shape, dtype=np.int64))
        if offset + count > size:
            raise WeightError(
                f"slice table: {piece.name} {list(piece.shape)} at element {offset} does not fit {target.name} "
                f"{list(target.shape)}, rank {target.rank}"
            )
        written += count
        runs += _runs(piece, index, offset)
    if written != size:
        names = ", ".join(piece.name for piece in pieces)
        raise WeightError(
            f"slice table: {names} write {written} of the {size} elements of {target.name} {list(target.shape)}, "
            f"rank {target.rank}"
        )
    return runs


def _placed(target: Target, pieces: list[_Piece]) -> list[tuple[_Piece, int]]:
    """Each piece with the element of the target where it begins."""
    rule = pieces[0].rule
    if rule.stack is not None:
        return _stacked(target, pieces, rule.stack[1])
    if rule.expert:
        slab = int(np.prod(target.shape[1:], dtype=np.int64))
        return [(piece, int(piece.match.group(piece.rule.expert)) * slab) for piece in pieces]
    if len(pieces) > 1:
        names = " and ".join(piece.name for piece in pieces)
        raise WeightError(f"slice table: {names} both go to {target.name}")
    piece = pieces[0]
    stored = piece.shape[::-1] if rule.transposed else piece.shape
    if stored != target.shape:
        raise WeightError(
            f"slice table: {piece.name} arrives as {list(stored)}, {target.name} (rank {target.rank}) is "
            f"{list(target.shape)}"
        )
    return [(piece, 0)]


def _stacked(target: Target, pieces: list[_Piece], order: tuple[str, ...]) -> list[tuple[_Piece, int]]:
    parts: Mapping[str, _Piece] = {piece.rule.stack[0]: piece for piece in pieces if piece.rule.stack}
    if set(parts) != set(order) or len(pieces) != len(order):
        missing = sorted(set(order) - set(parts))
        raise WeightError(
            f"slice table: {target.name} is stacked from {', '.join(order)}; missing: {', '.join(missing) or 'none'}"
        )
    placed: list[tuple[_Piece, int]] = []
    offset = 0
    for part in order:
        placed.append((parts[part], offset))
        offset += int(np.prod(parts[part].shape, dtype=np.int64))
    return placed


def _runs(piece: _Piece, destination: int, offset: int) -> list[Run]:
    """One run for a contiguous or a column share; one a leading index where a middle dimension is split."""
    shape, full = piece.shape, piece.spec.shape
    count = int(np.prod(shape, dtype=np.int64))
    start = piece.spec.offset
    axis = piece.rule.shard
    if axis is None:
        rows, length, stride = 1, count, count
    else:
        inner = int(np.prod(full[axis + 1 :], dtype=np.int64))
        rows = int(np.prod(full[:axis], dtype=np.int64))
        length, stride = shape[axis] * inner, full[axis] * inner
        start += piece.stretch[0] * inner
    if not piece.rule.transposed:
        return [Run(start, length, destination, offset, rows=rows, source_stride=stride)]
    height, width = shape
    return [
        Run(
            start, width, destination, offset, rows=height,
            source_stride=full[1], row_stride=1, column_stride=height,
        )
    ]  # fmt: skip
