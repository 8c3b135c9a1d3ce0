"""The rules of [push]'s channels."""

from __future__ import annotations

from headway.config.rule import Rule
from headway.config.schema import RunConfig


def _store_has_a_place(config: RunConfig) -> str:
    push = config.push
    if push.channel == "store" and not push.store:
        return "push.channel = 'store' needs a directory or a URL that every generator reaches"
    if push.store and push.channel != "store":
        return (
            f"{push.store!r} is for push.channel = 'store', this is {push.channel!r}; take one of the two out"
        )
    return ""


def _keys_protect_the_weights(config: RunConfig) -> str:
    if config.push.channel != "collective" or not config.stream.keys:
        return ""
    return (
        "torch.distributed authenticates nobody, so stream.keys would not protect the weights; "
        "nearest: push.channel = 'tcp'"
    )


PUSH_RULES = (
    Rule(("push.store", "push.channel"), _store_has_a_place),
    Rule(("push.channel", "stream.keys"), _keys_protect_the_weights),
)
