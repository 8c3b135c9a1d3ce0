"""Prompts from the fields of a problem: `{name}` is replaced, everything else stays as written."""

from __future__ import annotations

import re
from collections.abc import Mapping

from headway.envs.protocol import Message, Prompt
from headway.errors import EnvironmentFailure

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


class PromptTemplate:
    """Renders the fields of one problem as a prompt.

    Args:
        template: text with `{field}` places. `{{` and `}}` are literal braces.
        system: a system message; makes the prompt a chat.
        chat: the prompt is a chat of one user message (after `system`, if given), not plain text.
    """

    def __init__(self, template: str, *, system: str | None = None, chat: bool = False) -> None:
        self._template = template
        self._system = system
        self._chat = chat or system is not None

    def render(self, fields: Mapping[str, object]) -> Prompt:
        """The prompt of a problem with these fields.

        Raises:
            EnvironmentFailure: the template names a field that the problem lacks.
        """
        text = _FIELD.sub(lambda match: _replacement(match, fields), self._template)
        return as_prompt(text, system=self._system, chat=self._chat)


def as_prompt(text: str, *, system: str | None, chat: bool) -> Prompt:
    """`text` itself, or as a user message behind an optional system message."""
    if not chat:
        return text
    messages = [Message(role="user", content=text)]
    return [Message(role="system", content=system), *messages] if system is not None else messages


def _replacement(match: re.Match[str], fields: Mapping[str, object]) -> str:
    name = match.group(1)
    if name is None:
        return match.group()[0]
    if name not in fields:
        known = ", ".join(sorted(fields))
        raise EnvironmentFailure(
            f"template: no field {name!r}; this problem has: {known} (write {{{{ and }}}} for literal braces)"
        )
    return str(fields[name])
