"""The FP8 schemes amax, pow2 and torchao against NumPy and ml_dtypes: tiny tensors, NaN and Inf, and what saturates."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.quant import quantize
from binade.quant.backends import cpu, native
from binade.quant.blocks import look
from binade.quant.metrics import score, scores_later
from binade.quant.quantizer import apply, outer_absmax
from binade.quant.specs import Spec
from tests.quant.helpers import assert_same_bits, by_reference, devices
from tests.quant.oracles import by_tiles, power_of_two_at_most, te_scale

GRIDS = {"fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "fp8_e5m2": (ml_dtypes.float8_e5m2, 57344.0)}
BLOCKS = {"tensor": None, "row": (1, 0), "1x128": (1, 128), "128x128": (128, 128), "3x5": (3, 5)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [
    f"{name}(block={block}, scale={scale})"
    for name, block, scale in itertools.product(GRIDS, BLOCKS, ("amax", "pow2", "torchao", "torchao_pow2"))
    if not scale.startswith("torchao") or block in ("tensor", "row")
]


def scales_of(largest: np.ndarray, most: float, scheme: str) -> np.ndarray:
    """Transformer Engine d0067d0, recipe_common.cuh; torchao 36027d8, float8_utils.py. float32."""
    if not scheme.startswith("torchao"):
        return te_scale(largest, np.array([most]), "pow2" in scheme)
    scale = (most / np.maximum(largest.astype(np.float64), 1e-12)).astype(np.float32)
    cleared = power_of_two_at_most(scale) if "pow2" in scheme else scale
    return np.where(np.isnan(largest), largest, cleared)


def wanted(x: torch.Tensor, spec: Spec, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """(the values, which saturate): these are finite, and share a scale with an Inf."""
    grid, most = GRIDS[spec.format.name]
    values = x.float().numpy()

    def rule(tiles: np.ndarray) -> np.ndarray:
        scale = scales_of(np.abs(tiles).max((1, 2), keepdims=True), most, spec.scale)
        codes = np.clip(tiles * scale, -most, most).astype(grid).astype(np.float32)
        return codes * (np.float32(1) / scale) if tile else codes / scale

    def over(tiles: np.ndarray) -> np.ndarray:
        alone = np.isinf(np.abs(tiles).max((1, 2), keepdims=True)) & (not spec.scale.startswith("torchao"))
        return (alone & np.isfinite(tiles) & (np.abs(tiles) > most)).astype(np.float32)

    block = BLOCKS[str(spec.block)]
    tile = block is not None and block[1] > 0
    lines, axis, size = (values, dim, block) if block else (values.reshape(1, -1), -1, (1, 0))
    with np.errstate(all="ignore"):
        results = tuple(by_tiles(lines, axis, *size, of, spread=False).reshape(values.shape) for of in (rule, over))
    return torch.from_numpy(results[0].astype(np.float32)).to(x.dtype), results[1] != 0


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """Of all magnitudes that the dtype has; with Inf, -Inf, NaN, zeros; with values beyond the largest code."""
    powers = (-14, -3, 3) if dtype == torch.float16 else (-140, -126, -115, -80, -43, -38, -20, 0, 30, 110)
    tensors = [(normal(9, 33) * 2.0**power).to(dtype) for power in powers]
    for bad in (torch.inf, -torch.inf, torch.nan):
        x = normal(7, 130) * 300
        x[:, ::3] *= 100
        x[1, 5], x[3, :] = bad, 0
        tensors.append(x.to(dtype))
    return [*tensors, torch.zeros(3, 5, dtype=dtype), torch.full((2, 3), torch.inf, dtype=dtype)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", CASES)
def test_values_and_saturated_are_those_of_the_source(text, dtype):
    spec = Spec.of(text)
    for x, dim in itertools.product(inputs(DTYPES[dtype]), (-1, 0)):
        want, over = wanted(x, spec, dim)
        assert_same_bits(by_reference(x, spec, dim), want, x)
        assert_same_bits(quantize(x, spec, dim).dequantize(), want, x)
        assert score(x, spec, dim).saturated == over.mean()
        assert look(x, spec, dim).sums.saturated == over.sum()


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("text", CASES)
def test_compiled_for_the_cpu(text, dtype):
    spec = Spec.of(text)
    run = cpu.kernel(cpu.unit_of(spec, DTYPES[dtype]))
    for x, dim in itertools.product(inputs(DTYPES[dtype]), (-1, 0)):
        want, over = wanted(x, spec, dim)
        y, scales = cpu.compiled(x, spec, dim, None, True, run)
        assert_same_bits(y, want, x)
        for numbers in (cpu.score(x, spec, dim), cpu.measure(x, y, spec, dim, scales)):
            assert numbers is not None and numbers[8] == over.sum()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("text", CASES)
def test_triton(text, dtype, device):
    from binade.quant.backends import triton_kernels

    spec = Spec.of(text)
    for x in inputs(DTYPES[dtype])[3:]:
        want, over = wanted(x, spec, -1)
        y, scales = apply(x.to(device), spec, backend="triton", want_scales=True)
        assert_same_bits(y, want, x)
        for rounded in (None, y):
            numbers, _ = triton_kernels.score(x.to(device), rounded, spec, -1, None if rounded is None else scales)
            assert numbers[8] == over.sum()


@pytest.mark.thorough
def test_nothing_saturates_by_the_rounding_of_a_quotient():
    """x · S is above the largest code for some absmax: never counted. S is 1 or just below it near 448."""
    absmaxes = [np.float32(448)]
    for _ in range(4):
        absmaxes = [np.nextafter(absmaxes[0], np.float32(0)), *absmaxes, np.nextafter(absmaxes[-1], np.float32(1e9))]
    absmaxes += list(np.abs(normal(300).numpy()))
    for absmax, block in itertools.product(absmaxes, ("tensor", "row", "1x128", "2x2")):
        x = torch.tensor([[float(absmax), 1.0], [-float(absmax), 0.5]])
        spec = Spec.of("fp8_e4m3", block=block)
        assert score(x, spec).saturated == 0 and look(x, spec).sums.saturated == 0


def test_overflow_to_inf_beside_an_inf():
    """E5M2 has an Inf: what exceeds the largest code becomes it, if asked."""
    x = torch.tensor([1.0, 60000.0, 70000.0, -torch.inf])
    for backend in ("torch", "triton"):
        y = apply(x, Spec.of("fp8_e5m2", overflow="inf"), backend=backend)[0]
        assert y.tolist() == [1.0, 57344.0, torch.inf, -torch.inf]


def test_an_absmax_that_is_known_decides():
    """A part of a tensor whose other part holds an Inf has the scale 1."""
    part = torch.tensor([1e-3, 500.0, 3.0])
    assert look(part, "fp8_e4m3", absmax=torch.tensor(torch.inf)).clipped.sum() == 1
    (later, _), *_ = scores_later(torch.cat([part, torch.tensor([torch.inf])]), [Spec.of("fp8_e4m3")])
    assert later().saturated == 1 / 4
    assert outer_absmax(part, Spec.of("fp8_e4m3"), -1) == 500


@pytest.mark.parametrize("block", ["1x128", "128x128"])
def test_deepgemm(block):
    """DeepGEMM 54e2261, utils/math.py: per_token_cast_to_fp8 and per_block_cast_to_fp8, by torch's own cast."""
    x = (
        torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
        * torch.exp2(-torch.arange(256.0) / 8)[:, None]
    )
    x[200, 130], x[3, 400], x[130, :] = torch.inf, torch.nan, 0
    rows = int(block.split("x")[0])
    tiles = x.reshape(256 // rows, rows, 4, 128)
    sf = tiles.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448.0
    want = ((tiles * (1.0 / sf)).to(torch.float8_e4m3fn).float() * sf).reshape(x.shape)
    spec = Spec.of(f"fp8_e4m3(scale=deepgemm, block={block})")
    got = apply(x, spec)[0]
    assert_same_bits(got, want, x)
    lost = got.isnan().reshape(tiles.shape).all(3).all(1)
    assert lost.sum() == 2 and got.isnan().sum() == 2 * rows * 128
    assert score(x, spec).saturated == 0
