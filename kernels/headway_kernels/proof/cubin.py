"""What a compiled kernel uses: registers, stack, shared memory, threads, and the instructions that matter.

In: a cubin, of Triton or nvcc. Out: a Usage for each kernel in it. cuobjdump and the nvdisasm that it calls come with
triton's wheel; where that is not installed, those on the PATH serve. No GPU, no driver.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

_USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_SECTION = re.compile(r"^\s*Function : (\S+)$", re.MULTILINE)
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(\.[A-Z]+)?", re.MULTILINE)
_INFO = re.compile(r"^\.nv\.info\.(\S+)$", re.MULTILINE)
_THREADS = re.compile(
    r"EIATTR_(?:MAX_THREADS|REQNTID)\s+Format:\s+\S+\s+Value:\s+(0x[0-9a-f]+) (0x[0-9a-f]+) (0x[0-9a-f]+)"
)
# Of a mangled C++ name: an identifier's length, or a reference to an earlier part.
_NAME_PART = re.compile(r"(\d+)|S[0-9A-Z]*_")
_LITERAL = re.compile(r"L[a-z](\d+)E")
_BUILTIN = {"t": "uint16", "j": "uint32", "i": "int32", "f": "float", "h": "uint8", "l": "int64"}

SPILLS = ("STL", "LDL")
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")
# Bits set and cleared in shared memory, the same in any order: how tensor memory is allotted on sm_100.
BITWISE = ("ATOMS.OR", "ATOMS.AND")


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """One kernel of a cubin.

    Attributes:
        name: as the cubin has it. registers: per thread. threads: per block, at most; 0: not stated.
        stack_bytes: per thread. shared_bytes: per block, static and, where it is known, dynamic.
        spills: instructions that load or store local memory.
        atomics: instructions that read and write memory in one, but for BITWISE.
        matrix: tensor-core instructions. instructions: all of them.
    """

    name: str
    registers: int
    threads: int
    stack_bytes: int
    shared_bytes: int
    spills: int
    atomics: int
    matrix: int
    instructions: int


class UnreadableCubin(RuntimeError):
    """The tools did not understand a cubin: nothing about it may be called proved."""


class NoDisassembler(RuntimeError):
    """Neither triton's wheel nor the PATH has cuobjdump."""


def cuobjdump() -> Path:
    """The tool that reads cubins.

    Raises:
        NoDisassembler: there is none.
    """
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        bundled = Path(folder) / "backends/nvidia/bin/cuobjdump"
        if bundled.exists():
            return bundled
    found = shutil.which("cuobjdump")
    if found is None:
        raise NoDisassembler(
            "no cuobjdump: install the extra triton-proof, whose wheel has one, or the CUDA toolkit's"
        )
    return Path(found)


def read_cubin(path: Path) -> list[Usage]:
    """Every kernel of a cubin, in its order.

    Raises:
        UnreadableCubin: no kernel, or one whose instructions the disassembler did not show.
        NoDisassembler: no cuobjdump.
    """
    sass, threads = _by_function(_run("-sass", path), _SECTION), _threads(_run("-elf", path))
    found: list[Usage] = []
    for match in _USAGE.finditer(_run("-res-usage", path)):
        name = match[1]
        opcodes = _OPCODE.findall(sass.get(name, ""))
        counts = collections.Counter(opcode for opcode, _ in opcodes)
        bitwise = sum(opcode + first in BITWISE for opcode, first in opcodes)
        if not counts["EXIT"]:
            raise UnreadableCubin(f"{path}: no instructions of {name}: a newer cuobjdump is needed")
        found.append(
            Usage(
                name=name,
                registers=int(match[2]),
                threads=threads.get(name, 0),
                stack_bytes=int(match[3]) + int(match[5]),
                shared_bytes=int(match[4]),
                spills=sum(counts[opcode] for opcode in SPILLS),
                atomics=sum(counts[opcode] for opcode in ATOMICS) - bitwise,
                matrix=sum(count for opcode, count in counts.items() if "MMA" in opcode),
                instructions=counts.total(),
            )
        )
    if not found:
        raise UnreadableCubin(f"{path}: no kernel in it")
    return found


def read_bytes(cubin: bytes) -> list[Usage]:
    """The same of a cubin in memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return read_cubin(Path(file.name))


def short_name(symbol: str) -> str:
    """The kernel's own name out of a C++ symbol, with its template arguments: `scan<2>`, `encode<uint16>`."""
    if not symbol.startswith("_Z"):
        return symbol
    name, position = _last_name(symbol, 3 if symbol.startswith("_ZN") else 2)
    if not symbol.startswith("I", position):
        return name
    arguments: list[str] = []
    position += 1
    while not symbol.startswith("E", position):
        literal = _LITERAL.match(symbol, position)
        if literal is not None:
            argument, position = literal[1], literal.end()
        elif symbol[position] == "N":
            argument, position = _last_name(symbol, position + 1)
            position += 1
        else:
            argument, position = _BUILTIN.get(symbol[position], symbol[position]), position + 1
        arguments.append(argument)
    return f"{name}<{','.join(arguments)}>"


def _last_name(symbol: str, position: int) -> tuple[str, int]:
    """The last identifier of a mangled qualified name that begins there, and where it ends."""
    name = ""
    while (part := _NAME_PART.match(symbol, position)) is not None:
        position = part.end()
        if part[1]:
            name = symbol[position : position + int(part[1])]
            position += int(part[1])
    return name, position


def _run(option: str, path: Path) -> str:
    done = subprocess.run([cuobjdump(), option, path], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnreadableCubin(f"cuobjdump {option} {path}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _by_function(text: str, heading: re.Pattern[str]) -> Mapping[str, str]:
    return dict(_sections(text, heading))


def _sections(text: str, heading: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Each heading's name and the text up to the next heading."""
    headings = list(heading.finditer(text))
    ends = [match.start() for match in headings[1:]] + [len(text)]
    for match, end in zip(headings, ends, strict=True):
        yield match[1], text[match.end() : end]


def _threads(elf: str) -> Mapping[str, int]:
    """By function, the threads of a block that its launch bounds state."""
    counts: dict[str, int] = {}
    for name, body in _sections(elf, _INFO):
        match = _THREADS.search(body)
        if match is not None:
            counts[name] = int(match[1], 16) * int(match[2], 16) * int(match[3], 16)
    return counts
