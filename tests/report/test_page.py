"""The page holds the numbers of metrics.jsonl, all of them, and nothing that a run says can act in it."""

from __future__ import annotations

import importlib.util
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headway.cli.reporting import report
from headway.errors import ConfigError, UnsupportedOption
from headway.report import RunReader, document, page

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Parsed(HTMLParser):
    """Tags, and the texts of the scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._open: dict[str, str | None] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self._open = dict(attrs)

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts.append((self._open, data))
            self._open = None

    def document(self) -> dict[str, Any]:
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "data"))


def rows_of(folder: Any) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [row for row in rows if row["kind"] == "step"]


def test_2000_updates_fit_in_10_mb_and_every_number_is_that_of_the_rows(make_run: Any) -> None:
    folder = make_run(2000)
    text = page(document(RunReader(folder.path).read()))
    assert len(text.encode()) < 10_000_000
    columns = Parsed(text).document()["columns"]
    for index, row in enumerate(rows_of(folder)):
        for name, value in row.items():
            if isinstance(value, dict):
                for inner, number in value.items():
                    assert columns[f"{name}.{inner}"][index] == number
            elif name == "lag_histogram":
                assert [columns.get(f"lag.{lag}", [0] * 2000)[index] for lag in range(3)] == [*value, 0, 0][
                    :3
                ]
            elif name not in ("kind", "changes", "skipped"):
                assert columns[name][index] == value


def test_every_figure_draws_columns_that_are_there(make_run: Any) -> None:
    shown = document(RunReader(make_run(9).path).read())
    drawn = {trace["y"]["column"] for figure in shown["figures"] for trace in figure["traces"]}
    assert drawn <= set(shown["columns"])
    assert {
        "reward",
        "lag.0",
        "lag.2",
        "ess",
        "tokens_per_s",
        "learner.idle",
        "generator.idle",
        "dropped.stale",
    } <= drawn
    assert len({figure["id"] for figure in shown["figures"]}) == len(shown["figures"])


def test_a_run_without_rows_has_a_page(make_run: Any) -> None:
    shown = document(RunReader(make_run(0, ended=False).path).read())
    assert shown["figures"] == []
    assert shown["columns"] == {}
    assert shown["bins"] == []
    assert not shown["ended"]
    assert "data" in page(shown)


def test_a_number_that_was_not_finite_is_a_gap(make_run: Any) -> None:
    folder = make_run(3, kl_behaviour=float("nan"))
    assert (
        Parsed(page(document(RunReader(folder.path).read()))).document()["columns"]["kl_behaviour"]
        == [None] * 3
    )


def test_what_a_run_says_stays_text(make_run: Any) -> None:
    folder = make_run(5, cause=EVIL, dropped={EVIL: 2})
    parsed = Parsed(page(document(RunReader(folder.path).read())))
    assert parsed.tags.count("script") == 3
    assert "img" not in parsed.tags
    told = parsed.document()
    assert any(EVIL in line for line in told["lines"])
    label = next(f for f in told["figures"] if f["id"] == "dropped")["traces"][0]["name"]
    assert "<" not in label
    assert "&lt;img" in label


def test_no_script_but_the_pages_own_may_run(make_run: Any) -> None:
    text = page(document(RunReader(make_run(1).path).read()))
    policy = text.partition('Content-Security-Policy" content="')[2].partition('"')[0]
    assert "default-src 'none'" in policy
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert scripts.count("'sha256-") == 2
    assert "unsafe" not in scripts
    assert "connect-src" not in policy


def test_without_plotly_the_report_is_refused_by_name(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = document(RunReader(make_run(1).path).read())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOption, match=r"plotly.*headway\[report\]"):
        page(shown)


def test_a_page_for_a_folder_that_is_not_there_is_refused(make_run: Any, tmp_path: Path) -> None:
    run = make_run(1).path
    nowhere = tmp_path / "none" / "file"
    for out, trace in ((nowhere, None), (None, nowhere)):
        with pytest.raises(ConfigError, match="none is not a folder"):
            report(run, out, trace)
    for out, trace in ((tmp_path, None), (None, tmp_path)):
        with pytest.raises(ConfigError, match="is a folder; name a file in it"):
            report(run, out, trace)
    assert not (run / "report.html").exists()
