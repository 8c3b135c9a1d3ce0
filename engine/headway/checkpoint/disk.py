"""The file operations of checkpoints: the journal's, and folders that change their name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from headway.journal import Disk


class CheckpointDisk(Disk):
    """The real one. Every method may raise OSError. Tests put a disk in its place that fills up or loses power."""

    def make_folder(self, path: Path) -> None:
        """A folder that may exist already; its parents are made too."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, source: Path, target: Path) -> None:
        """Durable on return."""
        os.rename(source, target)
        self.sync_folder(target.parent)

    def remove_folder(self, path: Path) -> None:
        """Delete a folder with what it holds."""
        shutil.rmtree(path)
