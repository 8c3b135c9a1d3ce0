"""Prompts from files, and faults that name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from headway.envs import Completion, EnvSpec, load_environment
from headway.envs.arguments import ArgumentValue
from headway.errors import EnvironmentFailure

ROWS = [
    {"prompt": "2 + 3 =", "answer": 5, "source": "a"},
    {"prompt": "capital of France?", "answer": "Paris", "source": "b"},
    {"prompt": "1e3 =", "answer": "1,000", "source": "c"},
]


def write_rows(folder: Path, suffix: str) -> str:
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        rows = [{**row, "answer": str(row["answer"])} for row in ROWS]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return str(path)


def reward(spec: EnvSpec, index: int, text: str) -> float:
    return load_environment(spec).reward(index, Completion(text, [], "stop"))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_become_prompts_and_answers(tmp_path: Path, suffix: str) -> None:
    spec = EnvSpec("table", {"path": write_rows(tmp_path, suffix)})
    environment = load_environment(spec)
    assert environment.num_prompts == 3
    assert [environment.prompt(i) for i in range(3)] == [row["prompt"] for row in ROWS]
    assert [reward(spec, i, text) for i, text in enumerate([" 5", "Paris\n", "1000"])] == [1.0, 1.0, 0.0]
    assert [reward(spec, i, text) for i, text in enumerate(["6", "paris", ""])] == [0.0, 0.0, 0.0]


def test_numbers_match_by_value(tmp_path: Path) -> None:
    path = tmp_path / "numbers.jsonl"
    path.write_text('{"prompt": "a", "answer": 5}\n{"prompt": "b", "answer": "1,000.0"}\n')
    spec = EnvSpec("table", {"path": str(path), "match": "number", "extract": "last_number"})
    assert reward(spec, 0, "2 + 3 = 5.0") == 1.0
    assert reward(spec, 1, "so 1000") == 1.0
    assert reward(spec, 1, "so 1001") == 0.0
    assert reward(spec, 1, "nothing") == 0.0


def test_columns_templates_and_chats(tmp_path: Path) -> None:
    path = write_rows(tmp_path, ".jsonl")
    args: dict[str, ArgumentValue] = {
        "path": path,
        "answer": "source",
        "template": "[{source}] {prompt} {{x}}",
    }
    assert load_environment(EnvSpec("table", args)).prompt(0) == "[a] 2 + 3 = {x}"
    assert reward(EnvSpec("table", args), 0, "a") == 1.0
    assert load_environment(EnvSpec("table", {**args, "system": "S"})).prompt(0) == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "[a] 2 + 3 = {x}"},
    ]


def test_message_columns(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": "x"}))
    assert load_environment(EnvSpec("table", {"path": str(path)})).prompt(0) == messages
    parquet = tmp_path / "chat.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": messages, "answer": "x"}]), parquet)
    assert load_environment(EnvSpec("table", {"path": str(parquet)})).prompt(0) == messages


@pytest.mark.parametrize(
    ("content", "args", "message"),
    [
        ("", {}, r"rows\.jsonl: the file holds no rows"),
        ("\n\n", {}, r"rows\.jsonl: the file holds no rows"),
        (
            '{"prompt": "a", "answer": 1}\n{"prompt": "b"\n',
            {},
            r"rows\.jsonl, line 2: expected one JSON object",
        ),
        ('{"prompt": "a", "answer": 1}\n\n[1, 2]\n', {}, r"rows\.jsonl, line 3: expected one JSON object"),
        ('{"prompt": "a", "answer": 1}\n{"prompt": "b"}\n', {}, r"line 2: no column 'answer'.*has: prompt"),
        ('{"question": "a", "answer": 1}', {}, r"line 1: no column 'prompt'.*answer, question"),
        (
            '{"prompt": "a", "answer": null}',
            {},
            r"line 1: column 'answer': expected text or a number, got None",
        ),
        ('{"prompt": "a", "answer": "x"}', {"match": "number"}, r"line 1: column 'answer'.*'x'"),
        ('{"prompt": 5, "answer": "x"}', {}, r"line 1: column 'prompt': expected text or a list"),
        (
            '{"prompt": "a", "answer": "x"}',
            {"template": "{question}"},
            r"line 1: template: no field 'question'",
        ),
        ('{"prompt": "a", "answer": "x"}', {"promt": "a"}, r"'promt'; did you mean 'prompt'"),
        (b'{"prompt": "\xff", "answer": "x"}', {}, r"line 1"),
    ],
)
def test_faults_name_file_and_line(
    tmp_path: Path, content: str | bytes, args: dict[str, str], message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EnvironmentFailure, match=message):
        load_environment(EnvSpec("table", {"path": str(path), **args}))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match=r"absent\.jsonl: no such file"):
        load_environment(EnvSpec("table", {"path": str(tmp_path / "absent.jsonl")}))
    with pytest.raises(EnvironmentFailure, match="needs the arguments: path"):
        load_environment(EnvSpec("table"))
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 this is no table")
    with pytest.raises(EnvironmentFailure, match=r"broken\.parquet: no valid Parquet"):
        load_environment(EnvSpec("table", {"path": str(broken)}))
