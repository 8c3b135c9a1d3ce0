"""The page in a real browser: it draws every row, says nothing on the console, and lets nothing in."""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from headway.report import RunReader, Watch, document, page

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
)  # fmt: skip
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: chromium)"),
]


def opened(url: str, profile: Path, budget_ms: int = 20_000) -> tuple[str, list[str]]:
    """The page's elements after its scripts ran, and what it said on the console."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *QUIET, f"--user-data-dir={profile}", f"--virtual-time-budget={budget_ms}", "--dump-dom", url],
        capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_a_run_of_2000_updates_is_drawn_without_an_error(make_run: Any, tmp_path: Path) -> None:
    folder = make_run(2000)
    shown = document(RunReader(folder.path).read())
    target = tmp_path / "report.html"
    target.write_text(page(shown), encoding="utf-8")
    elements, console = opened(target.as_uri(), tmp_path / "profile")
    assert console == []
    assert 'data-drawn="2000"' in elements
    assert elements.count('class="main-svg"') >= len(shown["figures"])
    for figure in shown["figures"]:
        assert f'id="plot-{figure["id"]}"' in elements
    assert "generation-bound: the learner idled 50%" in elements


def test_markup_of_a_run_is_shown_and_not_obeyed(make_run: Any, tmp_path: Path) -> None:
    folder = make_run(5, cause=EVIL, dropped={EVIL: 2})
    target = tmp_path / "report.html"
    target.write_text(page(document(RunReader(folder.path).read())), encoding="utf-8")
    elements, console = opened(target.as_uri(), tmp_path / "profile")
    assert console == []
    assert "<title>made-up</title>" in elements
    assert "<img src" not in elements
    assert "&lt;img src=x" in elements


def test_the_live_page_asks_for_more(make_run: Any, tmp_path: Path) -> None:
    folder = make_run(5)
    watch = Watch(folder.path)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        elements, console = opened(watch.url, tmp_path / "profile")
    finally:
        watch.stop()
        thread.join(10)
        watch.close()
    assert console == []
    assert "The run has ended." in elements
    assert 'data-drawn="5"' in elements
