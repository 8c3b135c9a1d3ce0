"""What a checkpoint of a learner contains, piece by piece, and how it becomes files and comes back.

    model.safetensors       fp32 masters, by parameter name
    optimizer.safetensors   AdamW's moments: exp_avg.NAME, exp_avg_sq.NAME
    progress.msgpack        version, trainer, recipe in force, the rows' sums, the newest rows
    rng.msgpack             torch's, numpy's and Python's generators
    cursor.json             which prompts come next
    recipe.toml             the recipe, with what people have changed since the start
    desk.msgpack            ledger, gate, and everything that the buffer holds

Tickets carry the seeds of the samplers, and prompts come by index, so generators and environments have no state.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
import torch

from headway.buffer import Held
from headway.checkpoint import Checkpoint, Pieces, load, pieces
from headway.config import RunConfig, load_recipe
from headway.errors import CheckpointError, WireError
from headway.learner.prompts import PromptState
from headway.learner.receipts import ReceiptState
from headway.staleness import GateState
from headway.staleness.ess import EssState
from headway.trainer import FlatState, TrainerState
from headway.types import Manifest, MemberFailure, PolicyVersion, StepRecord, Ticket, TimeSplit
from headway.wire import Limits, decode, encode
from headway.wire.messages import Trajectories

PieceType = TypeVar("PieceType")
_LIMITS = Limits(max_head_bytes=1 << 31, max_frame_bytes=1 << 40)


class Piece(enum.StrEnum):
    """A piece of a checkpoint; its value is what `--without` calls it."""

    MODEL = "model"
    PROGRESS = "progress"
    OPTIMIZER = "optimizer"
    RNG = "rng"
    CURSOR = "cursor"
    DESK = "desk"
    RECIPE = "recipe"


FILES = {
    Piece.MODEL: "model.safetensors",
    Piece.PROGRESS: "progress.msgpack",
    Piece.OPTIMIZER: "optimizer.safetensors",
    Piece.RNG: "rng.msgpack",
    Piece.CURSOR: "cursor.json",
    Piece.DESK: "desk.msgpack",
    Piece.RECIPE: "recipe.toml",
}
OPTIONAL = (Piece.OPTIMIZER, Piece.RNG, Piece.CURSOR, Piece.DESK)


class RecorderState(msgspec.Struct, frozen=True):
    """The sums over a run's rows.

    Attributes:
        lags: trained tokens by lag; rewards: of the last 10 rows; generator, learner: time so far.
    """

    lags: list[int]
    num_trajectories: int
    num_tokens: int
    rewards: list[float]
    learner: TimeSplit
    generator: TimeSplit


class Progress(msgspec.Struct, frozen=True):
    """How far a run is.

    Attributes:
        version: of the weights; manifest: digest of the parameters' description.
        in_force: the recipe with the moves of target_ess, as TOML.
        rows: since the checkpoint before, for metrics whose writer died.
    """

    version: PolicyVersion
    manifest: str
    trainer: TrainerState
    in_force: str
    ess: EssState | None
    recorder: RecorderState
    rows: list[StepRecord]


class RngState(msgspec.Struct, frozen=True):
    """Generators of random numbers of the learner process."""

    torch: bytes
    numpy_key: bytes
    numpy_rest: tuple[int, int, float]
    python: tuple[int, list[int], float | None]

    @staticmethod
    def seed(seed: int) -> None:
        """How they stand when a run begins."""
        torch.manual_seed(seed)
        np.random.seed(seed % (1 << 32))
        random.seed(seed)

    @staticmethod
    def current() -> RngState:
        """As they stand."""
        _, key, *rest = np.random.get_state(legacy=True)
        version, words, gauss = random.getstate()
        position, has_gauss, cached = rest
        return RngState(
            torch.get_rng_state().numpy().tobytes(),
            np.asarray(key, "<u4").tobytes(),
            (int(position), int(has_gauss), float(cached)),
            (version, list(words), gauss),
        )

    def restore(self) -> None:
        """Make them stand so again."""
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        np.random.set_state(("MT19937", np.frombuffer(self.numpy_key, "<u4"), *self.numpy_rest))
        version, words, gauss = self.python
        random.setstate((version, tuple(words), gauss))


class DeskState(msgspec.Struct, frozen=True):
    """What the desk knows besides gate and buffer.

    Attributes:
        num_received: sampled tokens; flat_rewards: of groups replaced since the last row.
        num_replaced: since the last step; kept: flat groups past the bound.
        round_start: first ticket of the newest grant; elapsed_s: since the first ticket, None before it.
        receipts: messages received.
    """

    num_received: int
    flat_rewards: list[float]
    num_replaced: int
    kept: list[int]
    round_start: int
    elapsed_s: float | None
    receipts: ReceiptState


class HeldState(msgspec.Struct, frozen=True):
    """What the buffer holds for one ticket; `frames` are those of a Trajectories message."""

    ticket: Ticket
    finished: bool
    failures: list[MemberFailure]
    frames: list[bytes]


class DeskPiece(msgspec.Struct, frozen=True):
    """The piece "desk"."""

    gate: GateState
    desk: DeskState
    held: list[HeldState]

    def unpack(self) -> list[Held]:
        """What the buffer held.

        Raises:
            CheckpointError: a trajectory cannot be read.
        """
        return [_unpack(item) for item in self.held]


class CursorPiece(msgspec.Struct, frozen=True):
    """The piece "cursor".

    Attributes:
        frontier: every ticket below it has ended, trained or dropped; ended: those above it that have, too.
    """

    prompts: PromptState
    frontier: int
    ended: list[int]


@dataclass(frozen=True)
class LearnerState:
    """A checkpoint as read; None for a piece that was left out on purpose. `asked` is its recipe."""

    progress: Progress
    asked: RunConfig
    tensors: FlatState
    rng: RngState | None
    cursor: CursorPiece | None
    desk: DeskPiece | None


def tensor_pieces(state: FlatState, manifest: Manifest) -> Pieces:
    """The files of model and optimizer; their bytes are those of `state` when they are asked for."""
    moments = {"exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
    arrays = {
        Piece.MODEL: {"": state.master},
        Piece.OPTIMIZER: {f"{name}.": flat for name, flat in moments.items()},
    }
    named = {
        piece: {
            prefix + spec.name: flat[spec.offset : spec.offset + spec.size].view(spec.shape).numpy()
            for prefix, flat in flats.items()
            for spec in manifest.tensors
        }
        for piece, flats in arrays.items()
    }
    return {
        FILES[piece]: lambda arrays=arrays: pieces(arrays, {"format": "pt"})
        for piece, arrays in named.items()
    }


def pack_held(held: Held) -> HeldState:
    """As it goes into the piece "desk"."""
    message = Trajectories(incarnation="", seq=1, trajectories=held.trajectories, failures=[], generated=0)
    frames = [bytes(frame) for frame in encode(message)]
    return HeldState(held.ticket, held.finished, held.failures, frames)


def _unpack(held: HeldState) -> Held:
    try:
        message = decode(held.frames, limits=_LIMITS)
    except WireError as error:
        raise CheckpointError(
            f"the buffer's ticket {held.ticket.ticket_id} cannot be read: {error}"
        ) from None
    assert isinstance(message, Trajectories)
    return Held(held.ticket, held.finished, message.trajectories, held.failures)


def read_state(checkpoint: Checkpoint, manifest: Manifest, without: Collection[str] = ()) -> LearnerState:
    """Everything that a checkpoint holds.

    Args:
        checkpoint: complete and verified; manifest: of the model that it is for.
        without: pieces to leave out.

    Raises:
        CheckpointError: a piece is missing, cannot be read, or is that of another model.
    """

    def piece(kind: Piece, form: type[PieceType]) -> PieceType | None:
        if kind in without:
            return None
        path = checkpoint.path / FILES[kind]
        try:
            if path.suffix == ".json":
                return msgspec.json.decode(path.read_bytes(), type=form)
            return msgspec.msgpack.decode(path.read_bytes(), type=form)
        except FileNotFoundError:
            raise CheckpointError(
                f"{checkpoint.path} lacks {path.name}; to go on without it: --without {kind}"
            ) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None

    progress = piece(Piece.PROGRESS, Progress)
    assert progress is not None
    if progress.manifest != manifest.digest:
        raise CheckpointError(
            f"{checkpoint.path} is of a model with manifest {progress.manifest}, this one has {manifest.digest}: "
            "resume with the model folder and library versions of the run's start"
        )
    tensors = _read_tensors(checkpoint, manifest, with_moments=Piece.OPTIMIZER not in without)
    if Piece.OPTIMIZER in without:
        trainer = msgspec.structs.replace(progress.trainer, num_updates=0)
        progress = msgspec.structs.replace(progress, trainer=trainer)
    rng, cursor = piece(Piece.RNG, RngState), piece(Piece.CURSOR, CursorPiece)
    asked = load_recipe(checkpoint.path / FILES[Piece.RECIPE])
    return LearnerState(progress, asked, tensors, rng, cursor, piece(Piece.DESK, DeskPiece))


def read_weights(checkpoint: Checkpoint, manifest: Manifest) -> torch.Tensor:
    """The fp32 masters, flat.

    Raises:
        CheckpointError: they are those of another model.
    """
    flat = torch.zeros(manifest.num_elements)
    _read_flat(checkpoint, manifest, Piece.MODEL, "", flat)
    return flat


def _read_tensors(checkpoint: Checkpoint, manifest: Manifest, *, with_moments: bool) -> FlatState:
    state = FlatState.empty(manifest.num_elements)
    _read_flat(checkpoint, manifest, Piece.MODEL, "", state.master)
    if with_moments:
        _read_flat(checkpoint, manifest, Piece.OPTIMIZER, "exp_avg.", state.exp_avg)
        _read_flat(checkpoint, manifest, Piece.OPTIMIZER, "exp_avg_sq.", state.exp_avg_sq)
    return state


def _read_flat(
    checkpoint: Checkpoint, manifest: Manifest, piece: Piece, prefix: str, flat: torch.Tensor
) -> None:
    path = checkpoint.path / FILES[piece]
    arrays = load(path)
    for spec in manifest.tensors:
        array = arrays.get(prefix + spec.name)
        if array is None or list(array.shape) != spec.shape:
            found = "missing" if array is None else f"of shape {list(array.shape)}"
            raise CheckpointError(f"{path}: {prefix}{spec.name} is {found}; expected {spec.shape}")
        flat.numpy()[spec.offset : spec.offset + spec.size] = array.reshape(-1)
