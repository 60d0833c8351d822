"""Instructions per value of the Triton kernels, compiled for an H200. No GPU is needed.

    python -m tests.bench.bench_sass                        every format and spec
    python -m tests.bench.bench_sass --spec mxfp8 --spec "nvfp4(block=16x16)"

Each launch that a tensor of 16384 × 8192 would cause is compiled for sm_90 by Triton's own ptxas and disassembled by
the nvdisasm that Triton ships. Nothing is timed. The instructions per value are those that one thread issues on the
shortest path from a kernel's entry to its exit, divided by the values of that thread:

    * The shortest path leaves out what rare operands need, such as the subroutine of a division with a subnormal
      result. If it lacks a load or a store of the tensor's values, the benchmark fails.
    * The body of a loop counts as often as it takes to load the thread's values.
    * A predicated instruction counts because it takes an issue slot.

A spec with several kernels (largest magnitudes, errors, rounding) has the sum over them; a kernel that runs on scales
counts in proportion to their number. Torch's own kernels (absmax of a tensor, scales of runs) are not counted.

The roof: an H200 moves 4.8 TB/s, and issues 4 instructions of 32 lanes per clock in each of 132 SMs at 1.75 GHz. "Of
roof" is the time that the memory needs, divided by the time of the slower of the two for each kernel. It is 1.00 where
memory is the limit.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from binade.quant import FORMATS
from binade.quant.scaling import has_kernel
from binade.quant.specs import Spec, SpecError
from tests.bench.bench_quantize import SPECS

BYTES_PER_SECOND = 4.8e12
LANES_PER_SECOND = 132 * 4 * 32 * 1.75e9
SHAPE = (16384, 8192)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")


@dataclass(frozen=True)
class Launch:
    """A compiled kernel with what one launch takes: values of all programs, bytes in and out for each."""

    kernel: Any
    values: int
    per_thread: float
    loaded: int
    stored: int


@dataclass(frozen=True)
class Cost:
    """Of a spec: instructions for each value, and the share of the memory's rate."""

    instructions: float
    share: float


@dataclass(frozen=True)
class Instruction:
    address: int
    conditional: bool
    name: str
    target: int | None  # of a branch

    @property
    def bytes(self) -> int:
        """That a global load or store moves."""
        width = re.search(r"\.(?:U|S)?(8|16|64|128)(?=\.|$)", self.name)
        return int(width[1]) // 8 if width else 4


def parse(sass: str) -> list[Instruction]:
    """The instructions of a disassembled kernel, its subroutines last."""
    found, labels, waiting = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"([.$\w]+):", line):
            waiting.append(label[1])
        elif match := LINE.search(line):
            address = int(match[1], 16)
            labels |= dict.fromkeys(waiting, address)
            waiting = []
            found.append((address, match))
    instructions = []
    for address, match in found:
        name, operands = match[3], match[4]
        label = re.search(r"`\(([^)]+)\)", operands) if name == "BRA" or name.startswith("CALL") else None
        conditional = match[2] is not None or (name == "BRA" and "P" in operands.split("`")[0])
        instructions.append(Instruction(address, conditional, name, labels[label[1]] if label else None))
    return instructions


def _moved(code: Iterable[Instruction], kind: str) -> int:
    return sum(instruction.bytes for instruction in code if instruction.name.startswith(kind))


def shortest(code: list[Instruction], start: int, loop: tuple[int, int] | None) -> tuple[list[int], float]:
    """The shortest path from an instruction to the end of its kernel or subroutine that does not skip the loop: the
    indices on it, last first, and the number of instructions, those of subroutines included."""
    at = {instruction.address: index for index, instruction in enumerate(code)}
    distance, came_from, ends = {start: 1.0}, dict[int, int](), []
    for index in range(start, len(code)):  # without branches back, every path leads forward
        if index not in distance:
            continue
        found, following = code[index], [index + 1]
        target = -1 if found.target is None else at[found.target]
        more = 0.0
        if found.name.startswith("CALL"):
            more = shortest(code, target, None)[1]
        elif found.name.startswith(("RET", "EXIT")) and not found.conditional:
            ends.append(index)
            following = []
        elif found.name == "BRA":
            skips = loop and index < loop[0] and target > loop[1]
            following = [index + 1] * found.conditional + [target] * (target > index and not skips)
        for to in following:
            if to < len(code) and distance[index] + more + 1 < distance.get(to, math.inf):
                distance[to], came_from[to] = distance[index] + more + 1, index
    path = [min(ends, key=distance.__getitem__)]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return path, distance[path[0]]


def per_thread(launch: Launch, sass: str) -> float:
    """Instructions that a thread issues on the shortest path."""
    code = parse(sass)
    at = {instruction.address: index for index, instruction in enumerate(code)}
    jumps = [(at[i.target], index) for index, i in enumerate(code) if i.target is not None and i.name == "BRA"]
    loops = {(first, last): _moved(code[first:last], "LDG") for first, last in jumps if first < last}
    loop = max((found for found in loops if loops[found]), key=loops.__getitem__, default=None)
    path, total = shortest(code, 0, loop)
    times = dict.fromkeys(path, 1.0)
    if loop:
        body = [index for index in path if loop[0] <= index <= loop[1]]
        times |= dict.fromkeys(body, launch.per_thread * launch.loaded / loops[loop])
        total += len(body) * (times[body[0]] - 1)
    for kind, needed in (("LDG", launch.loaded), ("STG", launch.stored)):
        moved = sum(times[index] * code[index].bytes for index in path if code[index].name.startswith(kind))
        if moved < needed * launch.per_thread:
            raise ValueError(f"the shortest path moves {moved} bytes by {kind}, not {needed * launch.per_thread}")
    return total


class Recorder:
    """Stands for a kernel: compiles what would be launched, and notes it."""

    def __init__(self, kernel: Any, into: list[Launch]) -> None:
        self.kernel, self.into = kernel, into

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            x, y = args[:2]
            types = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
            kernel = self.kernel.warmup(*types, grid=grid, **constants)
            each = x.numel() / grid[0] / (32 * kernel.metadata.num_warps)
            writes = y.element_size() if y is not x and y.shape == x.shape else 0
            self.into.append(Launch(kernel, x.numel(), each, x.element_size(), writes))

        return launch


class Hopper:
    """The part of Triton's driver that compiling asks: a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Compiler:
    """Costs of specs. One for each process: it takes Triton's driver and the kernels over."""

    def __init__(self, nvdisasm: Path) -> None:
        import triton

        from binade.quant.backends import triton_kernels as kernels

        triton.runtime.driver.set_active(Hopper())
        self.kernels, self.nvdisasm, self.launches = kernels, nvdisasm, list[Launch]()
        self.counted: dict[str, float] = {}
        for name in ("quantize_dequantize_kernel", "run_errors_kernel", "run_moments_kernel"):
            setattr(kernels, name, Recorder(getattr(kernels, name), self.launches))
        vars(kernels)["check_device"] = lambda x: None

    def cost(self, spec: Spec, dim: int, dtype: torch.dtype) -> Cost:
        self.launches.clear()
        x = torch.empty(SHAPE, dtype=dtype, device="meta")
        self.kernels.quantize_dequantize(x, spec, dim, None, False, 0)
        instructions = memory = slower = 0.0
        for launch in self.launches:
            part = launch.values / x.numel()
            count = self._count(launch) / launch.per_thread
            moved, issued = (launch.loaded + launch.stored) / BYTES_PER_SECOND, count / LANES_PER_SECOND
            instructions += part * count
            memory += part * moved
            slower += part * max(moved, issued)
        return Cost(instructions, memory / slower)

    def _count(self, launch: Launch) -> float:
        if launch.kernel.hash not in self.counted:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
                cubin.write(launch.kernel.asm["cubin"])
                cubin.flush()
                command = [str(self.nvdisasm), "-c", cubin.name]
                sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            self.counted[launch.kernel.hash] = per_thread(launch, sass)
        return self.counted[launch.kernel.hash]


def find_nvdisasm() -> Path | None:
    """The one that Triton ships; None if there is no triton, or none in it."""
    try:
        import triton
    except ImportError:
        return None
    found = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return found if found.exists() else None


def specs(given: list[str] | None) -> list[Spec]:
    if given:
        return [Spec.of(text) for text in given]
    found = [Spec.of(text) for text in (*FORMATS, *SPECS)]
    for name in FORMATS:
        try:
            found.append(Spec.of(name, rounding="stochastic"))
        except SpecError:
            continue
    return [spec for spec in dict.fromkeys(found) if has_kernel(spec)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spec", action="append", help="a format or spec, once each; all by default")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the tensor, once each; all by default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}
        if (nvdisasm := find_nvdisasm()) is None:
            print("bench_sass: triton or its nvdisasm is not installed; pip install triton brings both")
            return
        compiler = Compiler(nvdisasm)
        print(f"Python {sys.version.split()[0]}, triton {compiler.kernels.triton.__version__}, sm_90\n")
        columns = [(axis, dim, kind) for axis, dim in (("last", -1), ("first", 0)) for kind in args.dtype or DTYPES]
        print("| spec | " + " | ".join(f"{axis}, {kind} | of roof" for axis, _, kind in columns) + " |")
        print("|---" * (1 + 2 * len(columns)) + "|")
        for spec in specs(args.spec):
            costs = [compiler.cost(spec, dim, DTYPES[kind]) for _, dim, kind in columns]
            print(
                f"| {spec} | " + " | ".join(f"{c.instructions:.1f} | {c.share:.2f}" for c in costs) + " |", flush=True
            )


if __name__ == "__main__":
    main()
