"""Only what dead runs of this user left behind is removed."""

import os
from pathlib import Path

from headway.launch.leftovers import remove_run, remove_stale

DEAD = 4194304  # one more than the largest pid of Linux


def test_segments_of_dead_owners_go_and_all_else_stays(tmp_path: Path) -> None:
    dead = [tmp_path / f"headway-0a1b2c3d-{DEAD}", tmp_path / f"headway-x.y-{DEAD}-buffer"]
    kept = [
        tmp_path / f"headway-0a1b2c3d-{os.getpid()}",
        tmp_path / "headway-notes",
        tmp_path / f"other-a-{DEAD}",
    ]
    for path in (*dead, *kept):
        path.touch()
    (tmp_path / f"headway-folder-{DEAD}").mkdir()
    assert sorted(remove_stale(tmp_path)) == sorted(dead)
    assert all(path.exists() for path in kept)
    assert remove_stale(tmp_path) == []


def test_the_segments_of_one_run_go_at_its_end(tmp_path: Path) -> None:
    own, other = tmp_path / f"headway-aaaa-{os.getpid()}", tmp_path / f"headway-bbbb-{os.getpid()}"
    own.touch()
    other.touch()
    assert remove_run("aaaa", tmp_path) == [own]
    assert other.exists()
