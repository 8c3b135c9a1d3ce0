"""A generator in a process of its own: `reader.py SEGMENT`. Serves the newest version from shared memory, pins it,
says which, and waits to be killed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from headway.weights.shm import ShmReceiver


def main(name: str) -> None:
    spec = importlib.util.spec_from_file_location("weights_writer", Path(__file__).with_name("writer.py"))
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    receiver = ShmReceiver(name, writer.manifest(), whole_only=True)
    header = receiver.newest(None, "")
    assert header is not None
    assert receiver.pin(header) is not None
    print(header.version, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
