"""docs/configuration.md is what the schema says."""

from pathlib import Path

from headway.config import paths
from headway.config.reference import markdown


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text() == markdown(), f"run: python -m headway.config.reference {page}"


def test_every_key_is_on_the_page_and_described() -> None:
    text = markdown()
    for path, info in paths.fields().items():
        assert f"| `{path}` |" in text
        assert info.description
