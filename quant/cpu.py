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
# Strict IEEE arithmetic: contraction off; the two -fno options touch errno and trap flags only, never a value.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
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


_lock = threading.Lock()
_kernels: dict[Kind, Callable | None] = {}
_worked: dict[Kind, int] = {}


def kernel(kind: Kind, values: int | None = None) -> Callable | None:
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


def _load(kind: Kind) -> Callable:
    path = _path(kind)
    if not path.exists():
        _build(kind, path)
    function = ctypes.CDLL(str(path)).quantize
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [pointer, pointer, pointer, pointer, size, size, size, ctypes.c_float, size, size]
    function.restype = None
    return function


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


def compiled(
    x: Tensor, plan: Plan, dim: int, absmax: Tensor, want_scales: bool, run: Callable
) -> tuple[Tensor, Tensor]:
    """As `quantize_dequantize`, by a kernel of `kernel(kind_of(plan, x.dtype))`."""
    dtype = x.dtype
    x = x.contiguous() if dtype in VALUES else x.float().contiguous()
    dim = dim % x.dim() if x.dim() else 0
    axis = x.shape[dim] if x.dim() else 1
    inner = x.shape[dim + 1 :].numel()
    y = torch.empty_like(x)
    scales = torch.empty(0)
    if plan.block_size is None:
        block, items, per_item = 1, x.numel(), 1
    else:
        block = plan.block_size
        rows = x.numel() // (axis * inner) * -(-axis // block)
        items = rows if inner == 1 else rows * -(-inner // STRIP)
        per_item = min(block, axis) * min(inner, STRIP)
        if want_scales:
            scales = torch.empty(rows * inner)
    described = _describe(plan)
    scales_at = scales.data_ptr() if scales.numel() else None
    largest = float(absmax)

    def part(first: int, last: int) -> None:
        run(
            ctypes.addressof(described), x.data_ptr(), y.data_ptr(), scales_at, axis, inner, block, largest, first, last
        )

    threads = max(1, min(torch.get_num_threads(), items * per_item // PER_THREAD))
    if threads == 1:
        part(0, items)
    else:
        cuts = [items * i // threads for i in range(threads + 1)]
        list(_pool(torch.get_num_threads(), os.getpid()).map(part, cuts[:-1], cuts[1:]))
    return y.to(dtype), scales


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
