"""A member in a process of its own that stops at a stage of its first push: `partner.py ADDRESS STAGE`."""

from __future__ import annotations

import sys
import time

from headway.weights import collective_group
from headway.weights.collective_group import BroadcastGroup, CollectiveTiming
from headway.weights.collective_receiver import CollectiveReceiver


def main(address: str, stage: str) -> None:
    timing = CollectiveTiming(stall_s=2.0, gone_s=2.0, done_s=5.0)
    collective_group.CHUNK_BYTES = 64 << 10
    receiver = CollectiveReceiver(address, "run", "manifest", name="partner", timing=timing)
    print("joined", flush=True)
    broadcast = BroadcastGroup.broadcast

    def stop_in_the_middle(group: BroadcastGroup, *arguments: object) -> None:
        broadcast(group, *arguments)
        if stage == "half":
            print("half", flush=True)
            time.sleep(60)

    BroadcastGroup.broadcast = stop_in_the_middle
    while (header := receiver.newest(None, "")) is None:
        receiver.wait(0.2)
    if stage == "offered":
        print("offered", flush=True)
        time.sleep(60)
    receiver.fetch(header, memoryview(bytearray(header.num_bytes)), 60)


if __name__ == "__main__":
    main(*sys.argv[1:])
