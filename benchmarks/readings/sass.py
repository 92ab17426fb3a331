"""Clocks of a compiled GPU kernel's inner loops, counted from its machine code.

Mosaic dumps the PTX of each kernel; `ptxas` assembles it and `nvdisasm` lists it. An
inner loop is a backward branch around tensor-core instructions that has no other such
loop inside; in a kernel without tensor cores, the innermost loops, or the whole kernel.

A clock is one of a multiprocessor (SM), for one warpgroup: each of its four warps has a
scheduler. Rates are those of compute capability 9.0 in the CUDA C++ Programming Guide,
"Arithmetic Instructions". A loop's tile takes at least the clocks of its busiest pipe,
and that many only where everything overlaps. Both sides of a branch inside a loop
count, and loops that wait for a barrier count once.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

import jaxmem
from benchmarks.steps.kernels import Case
from jaxmem.chips import compiler_folders

TOOLS = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}
DUMP = "MOSAIC_GPU_DUMP_TO"
COLUMNS = (
    *("loop", "registers", "programs/SM", "tensor", "issue", "ALU", "FMA", "MUFU"),
    *("shared", "busiest/tensor"),
)

# Clocks that an instruction of a warp keeps a pipe of its scheduler busy.
ALU = 2  # 64 results a clock and SM
FMA = 1  # 128, on two pipes: the heavy one of them multiplies integers too
HEAVY = 2
MUFU = 8  # 16
WORD = 4  # shared memory moves 128 bytes a clock and SM
_ALU = frozenset(
    "BMSK F2FP FMNMX FSEL FSETP HMNMX2 HSET2 HSETP2 IADD3 IABS IMNMX ISETP LEA LOP3 "
    "PLOP3 PRMT SEL SGXT SHF VABSDIFF VIADD VIMNMX".split()
)
_FMA = frozenset("FADD FFMA FMUL HADD2 HFMA2 HMUL2".split())
_CONVERSIONS = frozenset("F2F F2I FRND I2F I2FP".split())  # 64
_SPINS = 16  # instructions; a shorter loop waits for a barrier
_REGISTERS, _SHARED, _THREADS, _PROGRAMS = 64 * 1024, 227 * 1024, 2048, 32  # of an SM


class Instruction(NamedTuple):
    name: str  # with its suffixes
    operands: str

    @property
    def stem(self) -> str:
        return self.name.partition(".")[0]


class Clocks(NamedTuple):
    """Clocks that a loop's body keeps each pipe busy, at the least."""

    tensor: int
    issue: int
    alu: int
    fma: int
    mufu: int
    shared: int

    @property
    def busiest(self) -> int:
        return max(self)


class CompiledKernel(NamedTuple):
    """A kernel as it was compiled."""

    name: str
    loops: list[Clocks]
    registers: int  # of a thread
    programs: int  # that fit an SM


def tool(name: str) -> str:
    """The path of one of CUDA's programs; SystemExit says what to install."""
    folders = [*sys.path, *compiler_folders()]
    found = (
        path
        for folder in folders
        for path in pathlib.Path(folder, "nvidia").glob(f"c*/bin/{name}")
    )
    path = next((str(path) for path in found), None) or shutil.which(name)
    if path is None:
        raise SystemExit(f"--sass needs {name}: pip install {TOOLS[name]}")
    return path


def dump_here() -> pathlib.Path:
    """A new folder where the kernels of all later compiles of this process go."""
    folder = tempfile.mkdtemp(prefix="sass-")
    os.environ[DUMP] = folder  # before the first compile: its worker inherits it
    return pathlib.Path(folder)


def compiled_kernels(
    case: Case, target: str, folder: pathlib.Path
) -> list[CompiledKernel]:
    """The kernels of a case's forward and backward pass; `folder` is `dump_here()`."""
    for path in folder.iterdir():
        path.unlink()
    step = jax.jit(case.run(case.fn("pallas")))
    jaxmem.estimate(step, *case.arguments(), target=target, cache=False, full=True)
    return [_read(path) for path in sorted(folder.glob("*.ptx"))]


def _read(ptx: pathlib.Path) -> CompiledKernel:
    cubin, text = ptx.with_suffix(".cubin"), ptx.read_text()
    chip = _found(r"\.target (\w+)", text)
    run: Callable = lambda *words: subprocess.run(
        words, check=True, capture_output=True, text=True
    )
    said = run(tool("ptxas"), "-v", f"-arch={chip}", "-o", str(cubin), str(ptx)).stderr
    listing = run(tool("nvdisasm"), "-c", str(cubin)).stdout
    registers = int(_found(r"Used (\d+) registers", said))
    threads = int(_found(r"\.(?:max|req)ntid (\d+)", text))
    passes = ptx.with_suffix(".mlir-passes.log")
    sizes = re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", passes.read_text())
    shared = int(sizes[0]) if sizes else 0
    name = re.sub(r"_\d+$", "", ptx.stem).removeprefix("jaxmem_")
    programs = programs_per_sm(registers, threads, shared)
    return CompiledKernel(name, list(inner_loops(listing)), registers, programs)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, pattern
    return match[1]


def programs_per_sm(registers: int, threads: int, shared: int) -> int:
    """How many programs of so many bytes of shared memory an SM of cc 9.0 holds."""
    of_registers = _REGISTERS // (-(-registers // 8) * 8 * threads)
    of_shared = _SHARED // (shared + 1024)  # of which the system takes 1 KiB
    return min(of_registers, of_shared, _THREADS // threads, _PROGRAMS)


def inner_loops(listing: str) -> Iterator[Clocks]:
    """The clocks of each inner loop of `nvdisasm -c`, in their order."""
    code, labels = _parsed(listing)
    loops = [
        (labels[target], i + 1)
        for i, instruction in enumerate(code)
        if instruction.stem == "BRA"
        and (target := _target(instruction)) in labels
        and labels[target] <= i
    ]
    tensor = [
        loop for loop in loops if any(x.stem == "HGMMA" for x in code[slice(*loop)])
    ]
    chosen = tensor or [(a, b) for a, b in loops if b - a > _SPINS] or [(0, len(code))]
    for start, stop in sorted(chosen):
        inside = [x for x in chosen if x != (start, stop) and start <= x[0] < stop]
        if not any(stop_inside <= stop for _, stop_inside in inside):
            yield clocks(code[start:stop])


def _target(instruction: Instruction) -> str:
    return instruction.operands.rpartition("`(")[2].partition(")")[0]


def _parsed(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions up to the last exit, and the place of each label."""
    # Behind the last exit are the loops that wait for barriers at length.
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(
            r"\s+/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)(.*);", line
        ):
            code.append(Instruction(found[1], found[2]))
    exits = [i for i, x in enumerate(code) if x.stem == "EXIT"]
    return code[: exits[-1] + 1], labels


def clocks(code: list[Instruction]) -> Clocks:
    """What the instructions of one warpgroup take of each pipe."""
    count = lambda names: sum(x.stem in names for x in code)
    multiplies = count({"IMAD"}) * HEAVY
    conversions = count(_CONVERSIONS) * ALU
    products = [x for x in code if x.stem == "HGMMA"]
    columns = [int(_found(r"\.64x(\d+)x", x.name)) for x in products]
    return Clocks(
        tensor=sum(n // 2 for n in columns),
        issue=len(code),
        alu=count(_ALU) * ALU,
        fma=max(multiplies, multiplies // 2 + count(_FMA) * FMA),
        mufu=count({"MUFU"}) * MUFU + conversions,
        shared=sum(map(_operand_clocks, products, columns)) + sum(map(_moved, code)),
    )


def _operand_clocks(product: Instruction, columns: int) -> int:
    """Of reading a product's operands, 32 bytes a row, from shared memory."""
    first = product.operands.split(",")[1].strip()
    rows = columns + (64 if first.startswith("gdesc") else 0)
    return rows * 32 // 128


def _moved(instruction: Instruction) -> int:
    """Of words that threads load, store or exchange."""
    if instruction.stem not in ("LDS", "STS", "SHFL", "LDSM", "STSM"):
        return 0
    wide = re.search(r"\.(64|128|[24]$)", instruction.name.removesuffix(".T"))
    words = {"64": 2, "128": 4, "2": 2, "4": 4}[wide[1]] if wide else 1
    return WORD * words


def rows_of(kernels: list[CompiledKernel]) -> Iterator[list]:
    """The cells of each loop, as `COLUMNS` names them."""
    for kernel in kernels:
        for number, loop in enumerate(kernel.loops, 1):
            name = f"{kernel.name} {number}" if len(kernel.loops) > 1 else kernel.name
            share = f"{loop.busiest / loop.tensor:.2f}" if loop.tensor else ""
            yield [name, kernel.registers, kernel.programs, *loop, share]
