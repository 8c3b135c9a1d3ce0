"""`headway export`: a run's weights as a transformers folder, from a checkpoint or from where the run ended."""

from __future__ import annotations

from pathlib import Path

from headway.checkpoint import CheckpointStore
from headway.config import open_run
from headway.errors import CheckpointError, ConfigError
from headway.learner.state import read_weights
from headway.model import Lora, load_policy, resolve_model, save_policy


def export(run: Path, target: Path, checkpoint: str = "", masters: bool = False) -> str:
    """Write the weights of a checkpoint, with the tokenizer of the run's model, to a new folder.

    Args:
        run: folder of the run. checkpoint: its name or step; "": the newest complete one.
        masters: the optimizer's fp32 weights; else those that the generators served, rounded to push.dtype.

    Returns:
        What was written, in words.

    Raises:
        ConfigError: not a run's folder, or `target` exists. CheckpointError: no such checkpoint, or it is damaged.
        ModelError: the model that the run started from cannot be loaded.
    """
    folder, config = open_run(run)
    if target.exists():
        raise ConfigError([("", f"{target} exists: give a new folder")])
    store = CheckpointStore(folder.checkpoints(config))
    skipped: list[tuple[str, str]] = []
    if checkpoint:
        chosen = store.open(store.resolve(checkpoint))
    else:
        search = store.search()
        chosen, skipped = search.newest, search.skipped
        if chosen is None:
            raise CheckpointError(
                "\n".join(
                    [f"no checkpoint of {run} is complete", *(f"{name}: {why}" for name, why in skipped)]
                )
            )
    source = resolve_model(config.model.path)
    policy = load_policy(source, published_dtype=config.push.dtype, with_grad=False, lora=Lora.of(config))
    policy.flat.copy_(read_weights(chosen, policy.manifest))
    if not masters:
        policy.round_to_published()
    target.parent.mkdir(parents=True, exist_ok=True)
    save_policy(policy, source, target)
    lines = [f"checkpoint {name} is skipped: {why}" for name, why in skipped]
    kind = "fp32 masters" if masters else f"weights as served ({config.push.dtype})"
    return "\n".join([*lines, f"{target}: the {kind} of checkpoint {chosen.name}"])
