"""What a recipe will do, in lines for people: the processes, the size of an update, the lag (`--dry-run`)."""

from __future__ import annotations

from headway.config import derived
from headway.config.schema import RunConfig


def describe(config: RunConfig, cores: int | None = None, *, serial: bool = False) -> list[str]:
    """The process plan, the size of an update, and what cannot be reached.

    Args:
        cores: of the machine; None asks the operating system. serial: everything runs in one process.
    """
    cores = cores or derived.available_cores()
    return [
        f"run {config.name!r}: {config.steps} updates of {config.model.path} on {config.env.name}, seed "
        f"{config.seed}{_adapters(config)}",
        *(_one_process(config) if serial else _processes(config, cores)),
        update_line(config),
        f"staleness: policy {config.staleness.policy}{_window(config)}, {derived.slots(config)} slots, too old "
        f"by {config.staleness.unit}{_target(config)}; "
        f"a push every {_count(config.push.interval, 'step')} ({config.push.dtype}, "
        f"{'handed over directly' if serial else f'over {config.push.channel}'})",
        *warnings(config),
    ]


def update_line(config: RunConfig) -> str:
    """The one line that says what the batch words mean."""
    batch = config.batch
    return (
        f"per update: {batch.prompts} prompts x {batch.samples} samples = "
        f"{derived.sequences_per_update(config)} "
        f"sequences, about {_count(derived.rows_per_update(config), 'row')} of {batch.tokens_per_row} tokens "
        f"(prompts not counted), max lag {config.staleness.max_lag} => at most "
        f"{derived.sequences_in_flight(config)} sequences in flight"
    )


def warnings(config: RunConfig) -> list[str]:
    """What is allowed but will not do what its key suggests."""
    found: list[str] = []
    limit, reachable = config.staleness.max_lag, derived.reachable_lag(config)
    if reachable < limit:
        cause = (
            f"{config.steps} updates" if reachable == config.steps - 1 else f"slots = {derived.slots(config)}"
        )
        found.append(
            f"the bound max_lag = {limit} cannot be reached: with {cause} no lag exceeds {reachable}"
        )
    decoding = config.generator.replicas * config.generator.max_running
    in_flight = derived.sequences_in_flight(config)
    near = decoding // derived.sequences_per_update(config)
    if decoding < in_flight and near < limit:
        found.append(
            f"while generation is the slower side, lags stay near {near}, below max_lag = {limit}: {decoding} "
            f"sequences are decoded at once (generator.replicas x max_running) of {in_flight} in flight"
        )
    if config.learner.lr == 0.0:
        found.append("learner.lr = 0 freezes the policy: nothing will be learned")
    return found


def _one_process(config: RunConfig) -> list[str]:
    replicas, workers = config.generator.replicas, config.reward.workers
    return [
        f"processes: this one, with 1 learner and {_count(replicas, 'generator')} in turn, + "
        f"{_count(replicas * workers, 'reward worker')}"
    ]


def _processes(config: RunConfig, cores: int) -> list[str]:
    learner, generator = (derived.threads(config, role, cores) for role in ("learner", "generator"))
    replicas, workers = config.generator.replicas, config.reward.workers
    lines = [
        f"processes: 1 learner ({_count(learner, 'thread')}) + {_count(replicas, 'generator')} "
        f"({config.generator.engine}, {_count(generator, 'thread')} each) + "
        f"{_count(replicas * workers, 'reward worker')}, on {_count(cores, 'core')}, over "
        f"{config.stream.transport}"
    ]
    if learner + replicas * generator > cores:
        lines.append(f"  {learner + replicas * generator} torch threads share {_count(cores, 'core')}")
    return lines


def _window(config: RunConfig) -> str:
    if not derived.has_window(config):
        return ""
    return f", window W = {derived.window(config)}"


def _adapters(config: RunConfig) -> str:
    lora = config.model.lora
    if not lora.rank:
        return ""
    targets = ", ".join(lora.targets) or "every linear layer but the head"
    return f", adapters of rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"


def _target(config: RunConfig) -> str:
    target = config.staleness.target_ess
    return f", ess kept at {target:g}" if target else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
