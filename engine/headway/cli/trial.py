"""What `--dry-run` tries besides the recipe's rules: packages, devices, model, environment, and its first prompt."""

from __future__ import annotations

from headway.config import RunConfig
from headway.errors import EnvironmentFailure, ModelError

BUILTIN_HEAD_DIM = 32  # of every builtin model's attention; none is made to look


def try_parts(config: RunConfig) -> list[str]:
    """Look for what the recipe needs, build the environment, encode its first prompt; nothing is trained or downloaded.

    Returns:
        Lines for people.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        EnvironmentFailure: the environment, its arguments or its first prompt cannot be used.
        UnsupportedOption, BackendUnavailable: a device, a package or a back-end that the recipe names is not here.
        ConfigError: it names a GPU that cannot be seen.
    """
    from headway.envs import EnvSpec, load_environment
    from headway.model import builtin_tokenizer, load_tokenizer, resolve_model

    computing = try_compute(config)
    builtin = config.model.path.startswith("builtin:")
    tokenizer = (
        builtin_tokenizer(config.model.path) if builtin else load_tokenizer(resolve_model(config.model.path))
    )
    environment = load_environment(EnvSpec(config.env.name, config.env.args))
    prompt = environment.prompt(0)
    try:
        ids = tokenizer.encode_prompt(prompt)
    except ModelError as error:
        raise EnvironmentFailure(f"environment {config.env.name!r} with this model: {error}") from error
    count = environment.num_prompts
    lines = [
        f"model: {config.model.path}"
        + (" (made on first use)" if builtin else ", folder and tokenizer found"),
        f"environment: {config.env.name}, {'prompts without end' if count is None else f'{count} prompts'}; the first "
        f"has {len(ids)} tokens: {prompt!r:.200}",
    ]
    unknown = tokenizer.unknown_share(ids)
    if unknown:
        lines.append(
            f"  {unknown:.0%} of its tokens are unknown to this tokenizer: the model cannot tell such prompts apart"
        )
    return [*lines, computing]


def try_compute(config: RunConfig) -> str:
    """Look for the devices and packages that the recipe names; returns what both sides compute in.

    Raises:
        UnsupportedOption, ConfigError: see try_parts.
    """
    from headway.config import derived
    from headway.launch.surroundings import check_gpus
    from headway.learner.setup import compute_of
    from headway.model.attention_choice import Place, choose_attention
    from headway.model.compute import DTYPES
    from headway.telemetry import require_sinks

    require_sinks(config.telemetry.sinks)
    check_gpus(config)
    if config.push.channel == "collective":
        from headway.weights.collective_group import check_backend

        check_backend(config.push.backend)
    if config.generator.engine == "vllm":
        from headway.generate.vllm.library import check_arguments, check_known, load_vllm

        check_arguments(config.generator.vllm)
        check_known(load_vllm(), config.generator.vllm)
    compute = compute_of(config)
    place = Place(compute.place, DTYPES[compute.dtype], _head_dim(config.model.path))
    return derived.numerics(config, choose_attention(compute.attention, place).name)


def _head_dim(path: str) -> int:
    if path.startswith("builtin:"):
        return BUILTIN_HEAD_DIM
    from transformers import AutoConfig

    from headway.model import resolve_model
    from headway.model.policy import head_dim_of

    try:
        return head_dim_of(AutoConfig.from_pretrained(str(resolve_model(path))))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: the configuration in {path} cannot be read: {error}") from error
