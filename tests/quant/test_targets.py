"""Each kernel, for specs of every kind, compiles for Blackwell (sm_100) and, by Triton's HIP back end, for AMD's MI300
(gfx942). test_compile covers Hopper with all formats. Nothing runs."""

from __future__ import annotations

import pytest

from tests.conftest import run_python

pytestmark = pytest.mark.slow

SPECS = ("nvfp4(rounding=stochastic)", "hif4", "nvfp4(scale=4over6)", "mxfp4(scale=quest)")
KERNELS = {"quantize_dequantize_kernel", "run_errors_kernel", "run_moments_kernel", "summarize_kernel"}

PROGRAM = """
import sys
import torch
import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget

from binade.quant.backends import triton_kernels as kernels
from binade.quant.backends.triton_summary import BINS, TILE, WARPS, summarize_kernel
from binade.quant.specs import Spec

TARGETS = [GPUTarget("cuda", 100, 32)] + [GPUTarget("hip", "gfx942", 64)] * ("amd" in backends)
compiled = set()

class Driver:
    "What compiling asks of a device that is not there."
    def __init__(self, number):
        self.number = number
    def get_current_device(self):
        return self.number
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return TARGETS[self.number]

class Compiling:
    "Stands for a kernel: compiles what would be launched, once for each kind of constants."
    def __init__(self, kernel):
        self.kernel = kernel
    def __getitem__(self, grid):
        return self.launch
    def launch(self, *args, **constants):
        kind = self.kernel.__name__, *(constants.get(name) for name in ("RULE", "ROUNDING", "FACTORS", "TAPER"))
        if kind in compiled:
            return
        compiled.add(kind)
        types = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args]
        for number, target in enumerate(TARGETS):
            triton.runtime.driver.set_active(Driver(number))
            found = self.kernel.warmup(*types, grid=(1,), **constants)
            print(self.kernel.__name__, target.arch, list(found.asm)[-1], flush=True)

kernels.check_device = lambda x: None
for name in [name for name in vars(kernels) if name.endswith("_kernel")]:
    setattr(kernels, name, Compiling(getattr(kernels, name)))
for number, text in enumerate(sys.argv[1:]):
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    kernels.quantize_dequantize(x, Spec.of(text), -(number % 2) - 1, None, False, 0)
types = torch.bfloat16, torch.int32, torch.float64, torch.float32, torch.int64, torch.float64
tensors = [torch.empty(1, dtype=dtype, device="meta") for dtype in types]
Compiling(summarize_kernel).launch(*tensors, 1 << 24, ROWS=TILE // 8, WIDTH=8, BINS=BINS, num_warps=WARPS)
"""


@pytest.mark.thorough
def test_kernels_compile_for_blackwell_and_by_the_hip_back_end(tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run_python("-c", PROGRAM, *SPECS, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    has_hip = any(arch == "gfx942" for _, arch, _ in rows)
    assert {(name, arch, kind) for name, arch, kind in rows} == {
        (name, *made) for name in KERNELS for made in [("100", "cubin"), ("gfx942", "hsaco")][: 1 + has_hip]
    }
    assert len(rows) // (1 + has_hip) > len(SPECS)
