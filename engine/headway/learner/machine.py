"""What a learner runs on, as far as it decides the bits of its results."""

from __future__ import annotations

import platform

import msgspec
import torch

from headway.model import kernel_facts


class Machine(msgspec.Struct, frozen=True):
    """The same values mean the same bits, for the same inputs in the same order."""

    processor: str
    torch: str
    capability: str
    threads: int
    kernels: str
    python: str

    @staticmethod
    def current() -> Machine:
        """This process."""
        return Machine(
            processor=_processor(),
            torch=str(torch.__version__),
            capability=torch.backends.cpu.get_cpu_capability(),
            threads=torch.get_num_threads(),
            kernels=kernel_facts(),
            python=platform.python_version(),
        )

    def encode(self) -> bytes:
        """As JSON."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def differences(self, other: Machine) -> list[str]:
        """What is not the same, in words; the Python version decides nothing and is left out."""
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return [
            f"{name}: {theirs[name]} then, {mine[name]} now"
            for name in mine
            if name != "python" and mine[name] != theirs[name]
        ]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
