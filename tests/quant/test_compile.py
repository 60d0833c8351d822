"""The kernels compile for an NVIDIA GPU (sm_90), which needs Triton's own compiler and no GPU.

Triton decides once a process whether kernels are compiled or interpreted, so this runs in one of its own.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest

from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

PROGRAM = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from binade.quant import FORMATS
from binade.quant.backends import triton_kernels as kernels
from binade.quant.backends.triton_summary import TILE, WARPS, summarize_kernel
from binade.quant.elements import E4M3, E6M2
from binade.quant.scaling import kernel_of
from binade.quant.sketch import BINS
from binade.quant.specs import Spec

def compile_kernel(kernel, types, constants, warps=4):
    names = kernel.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in types and n != "seed"}
    source = ASTSource(
        fn=kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=aligned,
    )
    options = {"enable_fp_fusion": False, "num_warps": warps}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def quantizer(name, adjacent, rounding):
    decided = Spec.of(name, rounding=rounding)
    element, block = decided.format.element, decided.format.block_size or 1024
    rule = kernel_of(decided) or 0
    pointers = ("scale_ptr", "absmax_ptr", "encode_ptr", "given_ptr", "outer_ptr", "divisor_ptr")
    types = dict(x_ptr="*bf16", y_ptr="*bf16", blocks="i32", axis="i32", inner="i32", blocks_per_row="i32", seed="i32")
    types |= dict.fromkeys(pointers, "*fp32")
    types |= dict.fromkeys(("left_ptr", "right_ptr", "partial_ptr", "out_ptr", "runs_ptr"), "*fp64")
    types["work_ptr"] = "*i64"
    how = kernels.How(
        block=block, block_pow2=block, groups=4096 // block, adjacent=adjacent, whole=True,
        tiers=element.tiers, taper=kernels._taper(element.tiers), emax=element.emax, mantissa=element.mantissa_bits,
        scale_tiers=(E6M2 if name == "hif4" else E4M3).tiers,
        max=element.max, limit=element.max if decided.overflow == "saturate" else float("inf"), inverse=1 / element.max,
        factors=(1, 0, 0, 1) if name.startswith("fp8") else (0, 0, 0, 0), rule=int(rule),
        rounding=kernels.ROUNDINGS[decided.rounding], signed_zero=element.signed_zero, scales=True,
    )
    constants = dict(HOW=how)
    if adjacent:
        constants["inner"] = types.pop("inner") and 1
    return compile_kernel(kernels.quantize_dequantize_kernel, types, constants)

# One of those that differ in numbers alone.
chosen = {}
for name in FORMATS:
    element, rule = FORMATS[name].element, kernel_of(Spec.of(name))
    kind = len(element.tiers), element.signed_zero, element.emax > 64, FORMATS[name].block_size, rule
    chosen.setdefault((*kind, name.startswith("fp8")), name)
# Every two of format, axis and rounding occur together.
for place, name in enumerate(chosen.values()):
    for adjacent in (True, False):
        rounding = None if name == "hif4" or (place + adjacent) % 2 else "stochastic"
        ptx = quantizer(name, adjacent, rounding).asm["ptx"]
        loads = re.findall(r"ld\\.global[.a-z0-9]*\\.b16", ptx)
        print(name, "last" if adjacent else "first", rounding or "nearest", len(loads))
types = dict(x_ptr="*bf16", counts_ptr="*i64", numbers_ptr="*fp64", partial_ptr="*fp64", work_ptr="*i64", numel="i32")
compile_kernel(summarize_kernel, types, dict(ROWS=TILE // 8, WIDTH=8, BINS=BINS), WARPS)
print("summarize")
"""


@pytest.mark.thorough
def test_kernels_compile_for_hopper(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(PROJECT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    *rows, last = done.stdout.splitlines()
    assert last == "summarize"
    names = {"bf16", "fp16", "fp8_e4m3", "hifp8", "mxfp8", "mxint8", "nvfp4", "hif4", "nvint4", "mxint4"}
    assert {row.split()[0] for row in rows} == names
    ways = itertools.product(names, ("last", "first"), ("nearest", "stochastic"))
    wanted = {pair for way in ways for pair in itertools.combinations(way, 2)} - {("hif4", "stochastic")}
    assert {pair for row in rows for pair in itertools.combinations(row.split()[:3], 2)} == wanted
    # No value is loaded on its own: 16-bit loads would halve the speed and more.
    assert [row for row in rows if not row.endswith(" 0")] == []
