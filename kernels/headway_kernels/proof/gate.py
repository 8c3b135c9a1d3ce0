"""The resource gate: compiles every kernel as production launches it, and fails where one breaks its bound.

    python -m headway_kernels.proof.gate --check docs/kernels.md [build/cuda/*.cubin]
    python -m headway_kernels.proof.gate --write docs/kernels.md [build/cuda/*.cubin]

Triton's kernels are compiled here for sm_80, sm_90 and sm_100 by the calls of headway_kernels.triton.catalog; CUDA's
come as cubins named OP.sm_NN.cubin, as `make fatbin` leaves them. Checked: no spills, registers and shared memory
within the kernel's bound, no atomics, tensor cores where a product is. --write puts the table of what was found into
the page, --check fails where the page is not up to date.

Exit code 0: all within bounds. What is missing here, triton or the cubins, is SKIPPED and said so with how much that
leaves out; --write refuses to leave anything out. No GPU and no driver.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import importlib.util
import multiprocessing
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from headway_kernels.proof.bounds import ARCHITECTURES, Bound
from headway_kernels.proof.cubin import NoDisassembler, read_cubin, short_name
from headway_kernels.proof.page import Row, differences, listed, replaced, table

# By kernel of kernels/csrc/cuda. Their launch bounds state how many blocks must fit a multiprocessor; these hold them
# to it.
CUDA_BOUNDS: dict[str, Bound] = {
    "pack_cast": Bound(registers=80, shared_kib=4),
    "policy_tokens": Bound(registers=128, shared_kib=8),
    "policy_finish": Bound(registers=64, shared_kib=4),
    "segment_scan": Bound(registers=80, shared_kib=4),
    "delta_compare": Bound(registers=64, shared_kib=4),
    "delta_layout": Bound(registers=64, shared_kib=4),
    "delta_encode": Bound(registers=64, shared_kib=4),
    "delta_apply": Bound(registers=64, shared_kib=4),
    "delta_apply_slices": Bound(registers=64, shared_kib=4),
}


class UnknownCubin(ValueError):
    """A cubin of another name than OP.sm_NN.cubin, or with a kernel that has no bound."""


def triton_rows(architecture: int) -> list[Row]:
    """Compiles the catalog's calls for an architecture."""
    from headway_kernels.proof.capture import capture
    from headway_kernels.triton.catalog import MODEL, calls

    rows: list[Row] = []
    with capture(architecture) as found:
        for call in calls():
            first = len(found)
            call.make(call.sizes)
            rows += [
                Row(
                    call.op, "triton", call.name, item.name, architecture, item.usage, call.bound(item.name),
                    shown=call.sizes is MODEL,
                )
                for item in found[first:]
            ]  # fmt: skip
    return rows


def cuda_rows(cubins: Iterable[Path]) -> list[Row]:
    """Reads cubins named OP.sm_NN.cubin.

    Raises:
        UnknownCubin: as it says. NoDisassembler: nothing reads cubins here.
    """
    rows: list[Row] = []
    for path in cubins:
        match = re.fullmatch(r"(\w+)\.sm_(\d+)\.cubin", path.name)
        if match is None or int(match[2]) not in ARCHITECTURES:
            known = ", ".join(map(str, ARCHITECTURES))
            raise UnknownCubin(f"{path} is not named OP.sm_NN.cubin with NN in {known}")
        for usage in read_cubin(path):
            name = short_name(usage.name)
            bound = CUDA_BOUNDS.get(name.split("<")[0])
            if bound is None:
                raise UnknownCubin(f"{path}: kernel {name} has no bound; state one in CUDA_BOUNDS")
            rows.append(Row(match[1], "cuda", "", name, int(match[2]), usage, bound))
    return rows


def compile_all() -> list[Row]:
    """Triton's kernels for every architecture, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(ARCHITECTURES), context) as pool:
        return [row for rows in pool.map(triton_rows, ARCHITECTURES) for row in rows]


def nvcc_version() -> str:
    """What compiled the cubins, as far as the PATH tells."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "an unknown nvcc"
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return f"nvcc {match[1]}" if match else "an unknown nvcc"


def collect(cubins: Sequence[Path]) -> tuple[list[Row], dict[str, str], dict[str, str]]:
    """Every row that can be had, ops together; by back-end its compiler, or why it is left out."""
    rows: list[Row] = []
    compilers: dict[str, str] = {}
    skipped: dict[str, str] = {}
    if importlib.util.find_spec("triton") is None:
        skipped["triton"] = "triton is not installed; pip install 'headway[triton-proof]'"
    else:
        rows += compile_all()
        compilers["triton"] = f"triton {importlib.metadata.version('triton')}"
    if not cubins:
        skipped["cuda"] = "no cubins were given; `make fatbin` compiles them with nvcc"
    else:
        try:
            rows += cuda_rows(cubins)
            compilers["cuda"] = nvcc_version()
        except NoDisassembler as error:
            skipped["cuda"] = str(error)
    order = {op: index for index, op in enumerate(dict.fromkeys(row.op for row in rows))}
    return sorted(rows, key=lambda row: order[row.op]), compilers, skipped


def report(rows: Sequence[Row], skipped: dict[str, str], page: str | None, num_problems: int) -> None:
    """Says what was checked and what was not."""
    for backend in ("triton", "cuda"):
        own = [row for row in rows if row.backend == backend]
        if own:
            kernels = sorted({row.kernel.split("<")[0] for row in own})
            print(f"gate: {backend}: {len(own)} compilations of {len(kernels)} kernels: {', '.join(kernels)}")
    for backend, reason in skipped.items():
        lines = listed(page) if page is not None else {}
        count = sum(key[1].partition(":")[0] == backend for key in lines) * len(ARCHITECTURES)
        print(f"gate: SKIPPED {backend}: {reason}; 0 of {count or 'its'} listed compilations checked")
    names = ", ".join(f"sm_{value}" for value in ARCHITECTURES)
    print(f"gate: {names}: spills, registers, shared memory, atomics: {num_problems or 'no'} problem(s)")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="gate", description=(__doc__ or "").partition("\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", type=Path, metavar="PAGE", help="fail where the page is not up to date")
    choice.add_argument("--write", type=Path, metavar="PAGE", help="write the table into the page")
    parser.add_argument("cubins", type=Path, nargs="*", help="OP.sm_NN.cubin of the CUDA kernels")
    options = parser.parse_args(argv)
    rows, compilers, skipped = collect(options.cubins)
    problems = [problem for row in rows for problem in row.problems()]
    path: Path | None = options.check or options.write
    page = path.read_text(encoding="utf-8") if path else None
    if options.check and page is not None:
        problems += differences(page, rows, compilers)
    if options.write and page is not None:
        problems += [f"{name} is missing ({why}): the page stays" for name, why in skipped.items()]
        if not problems:
            options.write.write_text(replaced(page, table(rows, compilers)), encoding="utf-8")
    for problem in problems:
        print(f"gate: {problem}", file=sys.stderr)
    report(rows, skipped, page, len(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
