"""Quantize-dequantize on a CPU: a compiled kernel where it pays, else `reference` in pieces; the same bits from both.

cpu.cpp is built with the machine's C++ compiler, about a second for each kind of kernel (input dtype, number of tiers,
rounding, float32-wide exponents), and kept in the user's cache directory (BINADE_CACHE_DIR, else XDG_CACHE_HOME or
~/.cache, then /binade), so that a later process loads it at once. A new format of a known family needs no new source.

Nobody waits for a compiler in vain: a kernel is built only for a tensor of BUILD_AT values, or once the pieces have
worked through BUILD_AFTER values and so cost as long as a build. Without a compiler the pieces do all, and a warning
says so once. torch.compile of the reference was the alternative: its first call takes far longer than a build here,
and its loops along the first axis are not ours to shape.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from quant import reference
from quant.reference import RULES, Plan

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
# Strict IEEE arithmetic: contraction off; the two -fno options touch errno and trap flags only, never a value. What may
# be added up in another order says so by a pragma.
STRICT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp-simd", *STRICT)
MAX_TIERS = 8
STRIP = 256  # as in cpu.cpp
ROUNDINGS = {"nearest": 0, "half_away": 1}
VALUES = {torch.float32: "float", torch.bfloat16: "uint16_t"}

BUILD_AT = 1 << 22
BUILD_AFTER = 1 << 25
# Values a thread should have to itself, and the piece that keeps the reference's dozen temporaries in a core's cache.
PER_THREAD = 1 << 16
PIECE = 1 << 16


class _Format(ctypes.Structure):
    _fields_ = [
        ("rule", ctypes.c_int32),
        ("signed_zero", ctypes.c_int32),
        ("emax", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("max", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("lowest", ctypes.c_float * MAX_TIERS),
        ("step", ctypes.c_float * MAX_TIERS),
    ]


@dataclass(frozen=True)
class Kind:
    """What a build is for: the macros of cpu.cpp."""

    value: str
    tiers: int
    rounding: int
    wide: int

    @property
    def macros(self) -> list[str]:
        return [f"-DVALUE={self.value}", f"-DTIERS={self.tiers}", f"-DROUNDING={self.rounding}", f"-DWIDE={self.wide}"]


def kind_of(plan: Plan, dtype: torch.dtype) -> Kind | None:
    """The kernel for a plan, or None where there is none (stochastic rounding). float16 goes through float32."""
    element = plan.format.element
    if plan.rounding not in ROUNDINGS or len(element.tiers) > MAX_TIERS:
        return None
    wide = int(element.emax > 64)
    return Kind(VALUES.get(dtype, "float"), len(element.tiers), ROUNDINGS[plan.rounding], wide)


class CannotBuild(RuntimeError):
    """There is no C++ compiler, or it failed."""


@dataclass(frozen=True)
class Kernel:
    """The functions of a build."""

    quantize: Callable
    measure: Callable


_lock = threading.Lock()
_kernels: dict[Kind, Kernel | None] = {}
_worked: dict[Kind, int] = {}


def kernel(kind: Kind, values: int | None = None) -> Kernel | None:
    """The compiled kernel of a kind, loaded or built if `values` more to quantize are worth it (None: in any case).

    None if it is not, or cannot be.
    """
    if kind in _kernels:
        return _kernels[kind]
    with _lock:
        if kind in _kernels:
            return _kernels[kind]
        if values is not None and not _path(kind).exists():
            _worked[kind] = _worked.get(kind, 0) + values
            if values < BUILD_AT and _worked[kind] < BUILD_AFTER:
                return None
        try:
            _kernels[kind] = _load(kind)
        except (CannotBuild, OSError) as error:
            if None not in _kernels.values():
                log.warning("quantizing on the CPU without a compiled kernel, about ten times slower: %s", error)
            _kernels[kind] = None
        return _kernels[kind]


def _load(kind: Kind) -> Kernel:
    path = _path(kind)
    if not path.exists():
        _build(kind, path)
    library = ctypes.CDLL(str(path))
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.quantize.argtypes = [pointer, pointer, pointer, pointer, size, size, size, ctypes.c_float, size, size]
    library.measure.argtypes = [pointer, pointer, pointer, size, size, size, real, real, size, size, pointer]
    library.quantize.restype = library.measure.restype = None
    return Kernel(library.quantize, library.measure)


def _build(kind: Kind, path: Path) -> None:
    compiler = _compiler()
    if compiler is None:
        raise CannotBuild("no C++ compiler was found (CXX, c++, g++ or clang++)")
    aside = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    for native in (["-march=native"], []):  # not every compiler knows the option
        command = [compiler, *FLAGS, *native, *kind.macros, str(SOURCE), "-o", str(aside)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode == 0:
            aside.replace(path)
            return
    raise CannotBuild(f"{compiler} failed: {result.stderr.strip()[:200]}")


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)


def _path(kind: Kind) -> Path:
    return _directory() / f"{kind.value}-{kind.tiers}-{kind.rounding}-{kind.wide}-{_stamp()}.so"


@cache
def _stamp() -> str:
    """Changes with the source, the options and the processor, which -march=native builds for."""
    processor = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode() + processor.encode()).hexdigest()[:16]


@cache
def _directory() -> Path:
    """Where builds are kept; a directory of this process where that cannot be written."""
    chosen = os.environ.get("BINADE_CACHE_DIR")
    path = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "binade"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="binade-"))
    return path if os.access(path, os.W_OK) else Path(tempfile.mkdtemp(prefix="binade-"))


@lru_cache(maxsize=64)
def _describe(plan: Plan) -> _Format:
    element = plan.format.element
    lowest, step = [0.0] * MAX_TIERS, [0.0] * MAX_TIERS
    for i, (exponent, bits) in enumerate(element.tiers):
        lowest[i], step[i] = 2.0**exponent, 2.0**-bits
    return _Format(
        RULES[plan.scale_rule],
        element.signed_zero,
        element.emax,
        element.mantissa_bits,
        element.max,
        element.max if plan.overflow == "saturate" else float("inf"),
        (ctypes.c_float * MAX_TIERS)(*lowest),
        (ctypes.c_float * MAX_TIERS)(*step),
    )


@lru_cache(maxsize=1)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork inherits none."""
    return ThreadPoolExecutor(threads, thread_name_prefix="quant")


@dataclass(frozen=True)
class Layout:
    """A tensor as the kernels see it, [outer, axis, inner] in blocks along the axis, and the work cut into `items`."""

    axis: int
    inner: int
    block: int
    rows: int  # of blocks, each `inner` wide
    items: int
    per_item: int

    @classmethod
    def of(cls, x: Tensor, plan: Plan, dim: int) -> Layout:
        dim = dim % x.dim() if x.dim() else 0
        axis = x.shape[dim] if x.dim() else 1
        inner = x.shape[dim + 1 :].numel()
        if plan.block_size is None:
            return cls(axis, inner, 1, 0, x.numel(), 1)
        block = plan.block_size
        rows = x.numel() // (axis * inner) * -(-axis // block)
        items = rows if inner == 1 else rows * -(-inner // STRIP)
        return cls(axis, inner, block, rows, items, min(block, axis) * min(inner, STRIP))

    def share_out(self, part: Callable[[int, int], None]) -> None:
        """Call part(first, last) for all items, on as many threads as torch may use and the work is worth."""
        threads = max(1, min(torch.get_num_threads(), self.items * self.per_item // PER_THREAD))
        if threads == 1:
            part(0, self.items)
        else:
            cuts = [self.items * i // threads for i in range(threads + 1)]
            list(_pool(torch.get_num_threads(), os.getpid()).map(part, cuts[:-1], cuts[1:]))


def compiled(x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool, run: Kernel) -> tuple[Tensor, Tensor]:
    """As `quantize_dequantize`, by kernel(kind_of(plan, x.dtype))."""
    dtype = x.dtype
    x = x.contiguous() if dtype in VALUES else x.float().contiguous()
    layout = Layout.of(x, plan, dim)
    y = torch.empty_like(x)
    scales = torch.empty(layout.rows * layout.inner if want_scales else 0)
    described = _describe(plan)
    scales_at = scales.data_ptr() if scales.numel() else None
    shape = layout.axis, layout.inner, layout.block
    largest = float(absmax)

    def part(first: int, last: int) -> None:
        run.quantize(ctypes.addressof(described), x.data_ptr(), y.data_ptr(), scales_at, *shape, largest, first, last)

    layout.share_out(part)
    return y.to(dtype), scales


def measure(
    x: Tensor, y: Tensor, plan: Plan, dim: int, scales: Tensor | None, left: float, right: float
) -> list[float] | None:
    """The error of y against x in one pass: sums of x², y², xy and (y-x)² in float64, the largest |y-x|, and how many
    elements of x are finite, not zero, not zero but zero in y, and saturated, which is where |x| · left exceeds their
    block's scale times right. None where there is no kernel for this plan and dtype, or it is not worth building.

    x and y on the CPU, not empty, of one shape and dtype; scales as `quantize_dequantize` returns them.
    """
    kind = kind_of(plan, x.dtype) if x.dtype == y.dtype and x.dtype in VALUES else None
    run = kernel(kind, x.numel()) if kind else None
    if run is None:
        return None
    x, y = x.contiguous(), y.contiguous()
    layout = Layout.of(x, plan, dim)
    scales = scales.contiguous() if scales is not None and plan.block_size is not None else None
    shape = layout.axis, layout.inner, layout.block
    found: dict[int, ctypes.Array] = {}

    def part(first: int, last: int) -> None:
        sums = (ctypes.c_double * 9)()
        scales_at = None if scales is None else scales.data_ptr()
        run.measure(x.data_ptr(), y.data_ptr(), scales_at, *shape, left, right, first, last, ctypes.addressof(sums))
        found[first] = sums

    layout.share_out(part)
    parts = [list(found[first]) for first in sorted(found)]  # added up in one order, however the threads ran
    total = [sum(column) for column in zip(*parts, strict=True)]
    total[4] = max(part[4] for part in parts)
    return total


def in_pieces(x: Tensor, plan: Plan, dim: int, absmax: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_dequantize` with scales, by `reference` on a piece of the tensor after the other."""
    if plan.rounding == "stochastic" or x.numel() <= PIECE:
        y, scales = reference.quantize_dequantize(x, plan, dim, absmax)
    else:
        if plan.block_size is None:
            blocks = x.reshape(-1, 1024) if x.numel() % 1024 == 0 else x.reshape(-1, 1)
        else:
            blocks = reference.to_blocks(x, dim, plan.block_size)
        y = torch.empty(blocks.shape, dtype=x.dtype)
        scales = torch.empty(blocks.shape[0], 1)
        rows = max(1, PIECE // blocks.shape[1])
        for start in range(0, blocks.shape[0], rows):
            part = slice(start, start + rows)
            _, scales[part], y[part] = reference.quantize_blocks(blocks[part].float(), plan, absmax)
        y = y.reshape(x.shape) if plan.block_size is None else reference.from_blocks(y, x, dim)
    dim = dim % x.dim() if x.dim() else 0
    if plan.block_size is not None:  # groups come with the axis last
        scales = scales.reshape(x.shape[:dim].numel(), x.shape[dim + 1 :].numel(), -1).transpose(1, 2)
    return y, scales


def quantize_dequantize(x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool) -> tuple[Tensor, Tensor]:
    """x (any shape and strides, on the CPU, not empty) -> (y of x's shape and dtype, contiguous; scales).

    Scales are float32, as many as [outer, blocks along dim, inner]; without a meaning unless wanted.
    """
    kind = kind_of(plan, x.dtype)
    run = kernel(kind, x.numel()) if kind else None
    if run is None:
        return in_pieces(x, plan, dim, absmax)
    return compiled(x, plan, dim, absmax, want_scales, run)
