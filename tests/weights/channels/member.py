"""A receiver in a process of its own, which stops in the middle of its first transfer: `member.py ADDRESS`."""

from __future__ import annotations

import sys
import time

from headway.weights.chunks import Assembly
from headway.weights.tcp_link import TcpTiming
from headway.weights.tcp_receiver import TcpReceiver


def main(address: str) -> None:
    timing = TcpTiming(alive_s=0.1, stall_s=0.5, gone_s=3.0)
    receiver = TcpReceiver(address, "run", "manifest", name="member", timing=timing)
    print("joined", flush=True)
    matches = Assembly._matches

    def slowly(assembly: Assembly, digest: int, body: memoryview) -> bool:
        if assembly.num_ready == assembly.plan.num_chunks // 2:
            print("half", flush=True)
            time.sleep(60)
        return matches(assembly, digest, body)

    Assembly._matches = slowly
    while (header := receiver.newest(None, "")) is None:
        receiver.wait(1.0)
    receiver.fetch(header, memoryview(bytearray(header.num_bytes)), 60)


if __name__ == "__main__":
    main(sys.argv[1])
