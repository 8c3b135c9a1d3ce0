"""What `--dry-run` tries besides the recipe's own rules: the model's folder, the environment, the first prompt."""

from __future__ import annotations

from headway.config import RunConfig
from headway.errors import EnvironmentFailure, ModelError


def try_parts(config: RunConfig) -> list[str]:
    """Find the model, build the environment and encode its first prompt; nothing is trained or downloaded.

    Returns:
        Lines for people.

    Raises:
        ModelError: the model or its tokenizer cannot be used.
        EnvironmentFailure: the environment, its arguments or its first prompt cannot be used.
    """
    from headway.envs import EnvSpec, load_environment
    from headway.model import builtin_tokenizer, load_tokenizer, resolve_model

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
    return lines
