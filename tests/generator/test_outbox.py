"""A message carries no more kept ids than a frame has room for, and at least one trajectory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.generator import outbox


def kept(num_ids: int) -> Any:
    return SimpleNamespace(kept=SimpleNamespace(ids=range(num_ids)) if num_ids else None)


@pytest.mark.parametrize(
    ("sizes", "fit"),
    [([], 0), ([0, 0], 2), ([4, 6], 2), ([4, 6, 1], 2), ([4, 7], 1), ([11, 1], 1), ([0, 11], 1)],
)
def test_so_many_fit(sizes: list[int], fit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_KEPT_IDS", 10)
    assert outbox.how_many_fit([kept(size) for size in sizes]) == fit
