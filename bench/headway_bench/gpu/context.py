"""What every section of the GPU script sees: the device, its sizes, a timer, the limits measured so far.

Blocks where it times: waits for the device's events, unblocked by the kernels ahead of them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway_bench.gpu.report import Report
from headway_kernels import registry

Work = Callable[[], object]


class OutOfTime(Exception):
    """The budget ended inside a section; it keeps what it has."""


@dataclass
class Context:
    """One run.

    Attributes:
        device: the GPU, or the CPU in a rehearsal. is_small: tiny sizes, as in a rehearsal.
        deadline: time.monotonic() at which the section that runs may start no new work.
        copy_rate: bytes/s read plus written; matrix_rate: bf16 FLOP/s; 0 until section `limits` has run.
        wrong: (op, back-end) whose check failed; their times are not taken. title: of the table.
    """

    device: torch.device
    is_small: bool
    deadline: float
    report: Report
    copy_rate: float = 0.0
    matrix_rate: float = 0.0
    wrong: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    title: str = ""

    @property
    def is_cuda(self) -> bool:
        """On a GPU."""
        return self.device.type == "cuda"

    def remaining_s(self) -> float:
        """Seconds of the section left."""
        return self.deadline - time.monotonic()

    def check_time(self, what: str) -> None:
        """Stops a section between two of its cases.

        Raises:
            OutOfTime: its time is used up; names what is left out from here on.
        """
        if self.remaining_s() <= 0:
            raise OutOfTime(what)

    def random(
        self, *shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Normal random numbers, never zeros: a GPU multiplies zeros faster than anything real."""
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        return torch.randn(*shape, generator=generator, device=self.device).mul_(scale).to(dtype)

    def backends(self, op: str) -> list[str]:
        """Back-ends of an op that run on this device, the reference last; notes why others do not."""
        found: list[str] = []
        for name, reason in registry.available(op).items():
            if name == "cpu" and self.is_cuda:
                continue
            if not reason:
                found.append(name)
            elif not reason.startswith("it has no"):
                self.report.note(f"{op} on {name}: not run: {reason}")
        return found

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Work, repeats: int = 1) -> float:
        """Seconds of one call; `repeats` calls are timed together where one is as short as a launch."""
        if not self.is_cuda:
            began = time.perf_counter()
            for _ in range(repeats):
                work()
            return (time.perf_counter() - began) / repeats
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    def interleaved(
        self, contestants: Mapping[str, Work], rounds: int, repeats: int = 1, label: str = ""
    ) -> dict[str, list[float]]:
        """Seconds of each contestant, once a round, the order rotated; each is warmed up first.

        One that raises is noted and left out; so is what the section's time does not allow, a started round apart.

        Args:
            label: of the case, for the notes.
        """
        times: dict[str, list[float]] = {}
        for name, work in contestants.items():
            if self.remaining_s() <= 0:
                self.report.note(f"{label}{name}: left out: the section's time was used up")
                continue
            with self.noting(label + name):
                work()
                self.seconds(work)
                times[name] = []
        names = list(times)
        for turn in range(rounds):
            if turn and self.remaining_s() <= 0:
                self.report.note(f"{label}{turn} of {rounds} rounds: the section's time was used up")
                break
            for place in range(len(names)):
                name = names[(turn + place) % len(names)]
                if name in times and not self._time_into(
                    times[name], label + name, contestants[name], repeats
                ):
                    del times[name]
        return times

    def _time_into(self, values: list[float], what: str, work: Work, repeats: int) -> bool:
        """Whether it ran."""
        count = len(values)
        with self.noting(what):
            values.append(self.seconds(work, repeats))
        return len(values) > count

    @contextlib.contextmanager
    def noting(self, what: str) -> Generator[None]:
        """Turns what a contestant raises into a note."""
        try:
            yield
        except (OutOfTime, KeyboardInterrupt):
            raise
        except Exception as error:  # whatever somebody else's package raises
            first = str(error).strip().splitlines()[:1]
            self.report.note(f"{what}: left out: {type(error).__name__}: {' '.join(first)[:200]}")
            if self.is_cuda:
                torch.cuda.empty_cache()

    def peak_bytes(self, work: Work) -> int:
        """Most bytes that one call allocates beyond what was there; 0 on the CPU, where torch does not count them."""
        if not self.is_cuda:
            return 0
        self.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.device) - before

    def fits(self, num_bytes: int) -> bool:
        """Whether that much memory is free, with a tenth to spare."""
        if not self.is_cuda:
            return True
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        return num_bytes < 0.9 * free
