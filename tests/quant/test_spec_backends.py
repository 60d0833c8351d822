"""Every spec on the compiled backends: the bits of `reference`, along every axis, with every dtype or rounding."""

from __future__ import annotations

import math
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from binade.quant import backends, memory
from binade.quant.backends import cpu, native, triton_kernels
from binade.quant.elements import RoundingMode
from binade.quant.measurements import Errors
from binade.quant.metrics import errors_later, score
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.reference import quantize_dequantize
from binade.quant.scaling import SCALINGS, has_kernel
from binade.quant.scheme import Scaling
from binade.quant.specs import Spec, SpecError
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

SPECS = [
    *("bf16", "fp16(overflow=saturate)", "fp8_e4m3", "fp8_e5m2(overflow=inf)", "fp8_e4m3(scale=pow2)"),
    *("fp8_e4m3(history=4)", "fp8_e4m3(block=1x128)", "fp8_e4m3(block=1x128, scale=pow2)", "fp8_e4m3(block=16x48)"),
    *("fp8_e4m3(block=row)", "fp8_e5m2(block=row, scale=pow2)", "hifp8", "hifp8(scale=amax8)", "hifp8(scale=pow2)"),
    *("mxfp8", "mxfp8(scale=rceil, block=32x32)", "mxfp8(block=5000)", "mxfp4(block=16x64)", "mxint8(scale=float32)"),
    *("mxfp4(scale=4over3)", "mxfp4(scale=quest)", "mxfp4(scale=quest, block=4x16)", "mxfp4(block=16, scale=e4m3)"),
    *("mxfp4(block=16, scale=ue5m3)", "mxint4", "mxint4(scale=ue5m3)", "nvint4", "nvint4(scale=nvfp4_row)"),
    *("nvfp4", "nvfp4(block=16x16)", "nvfp4(block=8x20)", "nvfp4(scale=nvfp4_row)", "nvfp4(scale=nvfp4_1x128)"),
    *("nvfp4(scale=headroom)", "nvfp4(scale=16over17)", "nvfp4(scale=16over17, block=4x8)"),
    *("nvfp4(scale=4over6)", "nvfp4(scale=4over6, error=mae, bound=448)", "nvfp4(scale=4over6, block=16x16)"),
    *("nvfp4(scale=4over6, block=5x7, error=mae)", "hif4"),
]


def roundings(text: str) -> list[Spec]:
    """All that a format has; HiF4 has two, and no kernel for one of them."""
    found = []
    for rounding in RoundingMode:
        try:
            found.append(Spec.of(text, rounding=rounding))
        except SpecError:
            assert text == "hif4"
    return [spec for spec in found if has_kernel(spec)]


ROUNDED = [spec for text in SPECS for spec in roundings(text)]
USUAL = [Spec.of(text) for text in SPECS]
SHORT = [spec for spec in USUAL if spec.block != Spec.of("mxfp8(block=5000)").block]  # whose padding takes no seconds
OTHER_SHAPES = [(3, 40, 50), (200,), (64, 128)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """NaN, Inf, subnormals and ties; the same but finite; ordinary values with blocks of zeros."""
    x, y = awkward(shape, dtype, seed=5), awkward(shape, dtype, seed=6, specials=False)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
    z[..., :40] = 0
    return [x, torch.where(y.isfinite(), y, torch.ones_like(y)), z]


needs_compiler = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def by_cpp(x: Tensor, spec: Spec, dim: int, seed: int = 9) -> tuple[Tensor, Tensor | None]:
    run = cpu.kernel(cpu.unit_of(spec, x.dtype))
    assert run is not None
    return cpu.compiled(x, spec, dim, None, True, run, seed)


@pytest.mark.sampled(5)
@needs_compiler
@pytest.mark.parametrize(
    ("spec", "shape"),
    [(spec, (67, 141)) for spec in ROUNDED] + [(spec, shape) for spec in SHORT for shape in OTHER_SHAPES],
    ids=str,
)
def test_cpp(spec, shape):
    """Of every dtype with the usual rounding, of one with another. float16 goes through float32's kernel, whichever way
    that rounds."""
    if shape != (67, 141):
        cases = inputs(shape, torch.float32)[:2]
    elif spec in USUAL:
        cases = [*inputs(shape, torch.float32), *inputs(shape, torch.bfloat16)[:2], inputs(shape, torch.float16)[1]]
    else:
        cases = inputs(shape, (torch.float32, torch.bfloat16)[ROUNDED.index(spec) % 2])[:2]
    for x in cases:
        for dim in range(len(shape)):
            assert_same_bits(by_cpp(x, spec, dim)[0], by_reference(x, spec, dim, seed=9), x)


@pytest.mark.thorough
@needs_compiler
def test_cpp_in_threads_and_views(monkeypatch):
    """Parts of a tensor find their own factors and their own noise."""
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu.CpuRuns, "PART", 1 << 10)
    monkeypatch.setattr(native, "PER_THREAD", 1 << 10)
    x = awkward((515, 700), seed=3, specials=False)
    assert x.numel() > 2 * native.PER_THREAD
    texts = "nvfp4(block=16x16)", "nvfp4(scale=4over6)", "hif4", "fp8_e4m3(block=row, rounding=stochastic)"
    for text in (*texts, "nvfp4(scale=nvfp4_row)", "nvfp4(scale=16over17)", "mxfp4(scale=quest, block=4x16)"):
        for view in (x, x.t(), x[::2, 1::3]):
            for dim in (0, 1):
                got = by_cpp(view, Spec.of(text), dim)[0]
                assert_same_bits(got, by_reference(view, Spec.of(text), dim, seed=9), view)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("spec", ROUNDED, ids=str)
def test_triton(spec, device, monkeypatch):
    monkeypatch.setattr(triton_kernels.TritonRuns, "SPLIT", 64)  # long runs are cut
    with_specials, finite, _ = inputs((35, 150), torch.float32)
    if spec in USUAL:
        more = [inputs((2, 20, 24), torch.float32)[1], inputs((64, 128), torch.bfloat16)[1]]
        cases = [with_specials, finite, *more]
    else:
        cases = [(with_specials, finite)[ROUNDED.index(spec) % 2]]
    for x in cases:
        for dim in range(x.dim()):
            want = by_reference(x, spec, dim, seed=9)
            got = triton_kernels.quantize_dequantize(x.to(device), spec, dim, None, True, 9)[0]
            assert_same_bits(got, want, x)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("spec", SHORT, ids=str)
def test_scales(spec):
    """[outer, blocks, inner] of every backend, and of the reference's own first numbers."""
    x = awkward((3, 70, 40), seed=6, specials=False)
    for dim in range(3):
        want = quantize_dequantize(x, spec, dim, outer_absmax(x, spec, dim))[1]
        found = [apply(x, spec, dim, backend, want_scales=True)[1] for backend in ("torch", "triton")]
        if spec.run(x.shape[dim]) is None:
            assert found == [None, None]
            continue
        if native.compiler():
            found.append(by_cpp(x, spec, dim)[1].reshape(want.shape))
        for scales in found:
            assert_same_bits(scales.contiguous(), want.contiguous())


@pytest.mark.sampled
@needs_compiler
@pytest.mark.parametrize("text", [*SPECS, "nvfp4(rounding=stochastic)", "nvfp4(scale=16over17, rounding=stochastic)"])
def test_errors_in_one_pass(text, monkeypatch):
    spec = Spec.of(text)
    assert cpu.kernel(cpu.unit_of(spec, torch.float32)) is not None
    for x in inputs((67, 141), torch.float32):
        for dim in (0, 1):
            q, scales = apply(x, spec, dim, want_scales=True, seed=3)
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "measure", lambda *_, **__: None)
                want = vars(errors_later(x, q, spec, scales, dim)())
            for found in (score(x, spec, dim, seed=3), errors_later(x, q, spec, scales, dim)()):
                for name in vars(Errors(*[math.nan] * 11)):
                    assert getattr(found, name) == pytest.approx(want[name], rel=1e-12, nan_ok=True), name


def test_only_what_overrides_quantize_has_no_kernel():
    assert [rule for rule, scaling in SCALINGS.items() if type(scaling).quantize is not Scaling.quantize] == ["eden"]
    assert not has_kernel(Spec.of("nvfp4(scale=eden)"))
    assert not has_kernel(Spec.of("hif4(rounding=stochastic)"))


class Cost(TorchDispatchMode):
    """Counts operations, and the bytes of tensors that are alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.bytes = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x._base is None:
                self.bytes += x.nbytes
                weakref.finalize(x, self.freed, x.nbytes)
        self.peak = max(self.peak, self.bytes)
        return result

    def freed(self, nbytes: int) -> None:
        self.bytes -= nbytes


def test_a_spec_without_a_kernel_is_named_once_with_its_cost(monkeypatch):
    monkeypatch.setattr(memory, "_disable_current_modes", nullcontext)  # so that Cost sees the operations
    x = torch.empty(256, 256, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "meta")
    spec = Spec.of("nvfp4(scale=eden)")
    backends._warn_without_kernel.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply(x, spec, backend="torch")  # which was asked for
    with pytest.warns(UserWarning, match=r"^nvfp4\(scale=eden\) has no Triton kernel"):
        apply(x, spec, backend="triton")
    with warnings.catch_warnings(), Cost() as cost:
        warnings.simplefilter("error")
        apply(x, spec, backend="triton")
    assert cost.operations > 200 and 20 < cost.peak / x.numel() < 100
