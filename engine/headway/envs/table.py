"""Prompts and answers from a local JSONL or Parquet file.

The file is read once, whole. Every fault names the file, and the line (JSONL) or row (Parquet) it is in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headway.envs.answer import AnswerReader, Extract, Match, as_number, matches
from headway.envs.protocol import Completion, Message, Prompt
from headway.envs.template import PromptTemplate, as_prompt
from headway.errors import EnvironmentFailure

PARQUET_SUFFIXES = (".parquet", ".pq")


class TableEnvironment:
    """One problem a row; reward 1 if the extracted answer is the row's answer, else 0.

    Args:
        path: a .parquet file, or JSONL: one JSON object a line, blank lines skipped.
        prompt: the column of the prompt: text, or a list of {"role", "content"} messages.
        answer: the column of the expected answer: text or a number.
        template: if given, the prompt is made of all columns (see PromptTemplate) and `prompt` is not used.
        system, chat: make a text prompt a chat.
        extract, marker: where the answer stands in a completion (see AnswerReader).
        match: "exact": the same text; "number": the same number, so that 1,000.0 is 1000.

    Raises:
        EnvironmentFailure: the file is missing, empty, unreadable, lacks a column, or has a bad row.
    """

    num_prompts: int | None

    def __init__(
        self,
        *,
        path: str,
        prompt: str = "prompt",
        answer: str = "answer",
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
        extract: Extract = "all",
        marker: str | None = None,
        match: Match = "exact",
    ) -> None:
        self._reader = AnswerReader(extract, marker)
        self._match: Match = match
        self._prompts: list[Prompt] = []
        self._answers: list[str] = []
        rendered = None if template is None else PromptTemplate(template, system=system, chat=chat)
        for place, row in read_rows(Path(path)):
            try:
                self._prompts.append(
                    rendered.render(row) if rendered else _prompt_cell(row, prompt, system=system, chat=chat)
                )
                self._answers.append(_answer_cell(row, answer, match))
            except EnvironmentFailure as error:
                raise EnvironmentFailure(f"{place}: {error}") from error
        if not self._prompts:
            raise EnvironmentFailure(f"{path}: the file holds no rows; expected at least one")
        self.num_prompts = len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        """The row's prompt."""
        return self._prompts[index]

    def reward(self, index: int, completion: Completion) -> float:
        """1 or 0."""
        answer = self._reader.read(completion.text)
        return float(answer is not None and matches(answer, self._answers[index], self._match))


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row as (its place, for messages; its columns).

    Raises:
        EnvironmentFailure: see TableEnvironment.
    """
    if not path.is_file():
        raise EnvironmentFailure(
            f"{path}: no such file (relative to {Path.cwd()}); expected a .jsonl or .parquet file"
        )
    try:
        yield from _parquet_rows(path) if path.suffix in PARQUET_SUFFIXES else _jsonl_rows(path)
    except OSError as error:
        raise EnvironmentFailure(f"{path}: cannot be read: {error}") from error


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                yield place, decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                start = line[:60].decode("utf-8", "replace").rstrip()
                raise EnvironmentFailure(
                    f"{place}: expected one JSON object, got {start!r}: {error}"
                ) from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise EnvironmentFailure(
            f"{path}: reading Parquet needs pyarrow ({error}); install it: pip install 'headway[envs]'"
        ) from error
    try:
        with ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except ArrowInvalid as error:
        raise EnvironmentFailure(f"{path}: no valid Parquet file: {error}") from error


def _prompt_cell(row: dict[str, Any], column: str, *, system: str | None, chat: bool) -> Prompt:
    cell = _cell(row, column)
    if isinstance(cell, str):
        return as_prompt(cell, system=system, chat=chat)
    try:
        messages = msgspec.convert(cell, list[Message])
    except msgspec.ValidationError as error:
        raise EnvironmentFailure(
            f"column {column!r}: expected text or a list of {{role, content}} messages: {error}"
        ) from error
    return [Message(role="system", content=system), *messages] if system is not None else messages


def _answer_cell(row: dict[str, Any], column: str, match: Match) -> str:
    cell = _cell(row, column)
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        raise EnvironmentFailure(f"column {column!r}: expected text or a number, got {cell!r}")
    answer = str(cell)
    if match == "number" and as_number(answer) is None:
        raise EnvironmentFailure(f"column {column!r}: match = 'number', but the answer is {answer!r}")
    return answer


def _cell(row: dict[str, Any], column: str) -> Any:
    if column not in row:
        raise EnvironmentFailure(f"no column {column!r}; this row has: {', '.join(sorted(row)) or 'none'}")
    return row[column]
