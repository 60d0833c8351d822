"""Specs against `oracles`, which derives their rules a second time, and against published figures.

A spec is a format with options: "nvfp4(block=16x16)". What is rounded along an axis is compared to the bit; where the
published order of the last products is open, within 4e-7, which neither another element nor another scale would meet.
The tests named test_oracle_… need no binade.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from binade.quant import fake_quantize, quantize
from binade.quant.delayed import ScaleHistory
from binade.quant.specs import Spec, SpecError
from tests.quant import oracles
from tests.quant.helpers import by_reference
from tests.quant.oracles import E2M1, E4M3, E5M2, HIF8, INT4, NVIDIA_SIGNS

UNBIASED = "nvfp4(scale=16over17, rounding=stochastic)"
MS_EDEN = "nvfp4(scale=eden, hadamard=128, signs={seed})"


@dataclass(frozen=True)
class Golden:
    """What a spec gives for float32 x along dim, and how far the order of products may take a result from it."""

    oracle: Callable[[np.ndarray, int], np.ndarray]
    rtol: float = 0.0
    tile: tuple[int, int] | None = None
    """Set for square tiles: the tensor and its transpose are rounded to the same values."""


def tiles(rows: int, columns: int | None = None) -> tuple[int, int]:
    return rows, columns or rows


SPECS = {
    "nvfp4": Golden(oracles.nvfp4),
    "mxfp4": Golden(lambda x, dim: oracles.mx(x, dim, E2M1)),
    "mxfp8(scale=rceil)": Golden(lambda x, dim: oracles.mx(x, dim, E4M3, (1, 32), "rceil")),
    "nvfp4(block=16x16)": Golden(lambda x, dim: oracles.nvfp4(x, dim, tiles(16)), tile=tiles(16)),
    "nvfp4(block=8x32)": Golden(lambda x, dim: oracles.nvfp4(x, dim, tiles(8, 32))),
    "nvfp4(scale=nvfp4_row)": Golden(lambda x, dim: oracles.nvfp4(x, dim, row_scaled=True)),
    "nvfp4(scale=headroom)": Golden(lambda x, dim: oracles.nvfp4(x, dim, absmax=oracles.headroom_absmax(x, dim))),
    "nvfp4(scale=4over6, error=mse, bound=256)": Golden(oracles.four_over_six, 4e-7),
    "nvfp4(scale=4over6, error=mae, bound=256)": Golden(lambda x, dim: oracles.four_over_six(x, dim, "mae"), 4e-7),
    "nvfp4(scale=4over6, error=mse, bound=448)": Golden(lambda x, dim: oracles.four_over_six(x, dim, "mse", 448), 4e-7),
    "nvfp4(scale=4over6, error=mae, bound=448)": Golden(lambda x, dim: oracles.four_over_six(x, dim, "mae", 448), 4e-7),
    "nvfp4(block=16x16, scale=4over6, error=mse, bound=256)": Golden(
        lambda x, dim: oracles.four_over_six(x, dim, "mse", 256, tiles(16)), 4e-7
    ),
    "nvfp4(block=16x16, scale=4over6, error=mae, bound=448)": Golden(
        lambda x, dim: oracles.four_over_six(x, dim, "mae", 448, tiles(16)), 4e-7
    ),
    "nvint4": Golden(oracles.nvint4),
    "mxint4(scale=rceil)": Golden(oracles.mxint4),
    "mxint4": Golden(lambda x, dim: oracles.mx(x, dim, INT4)),
    "mxfp8(block=32x32, scale=rceil)": Golden(
        lambda x, dim: oracles.mx(x, dim, E4M3, tiles(32), "rceil"), tile=tiles(32)
    ),
    "mxfp4(block=32x32)": Golden(lambda x, dim: oracles.mx(x, dim, E2M1, tiles(32)), tile=tiles(32)),
    "mxfp4(block=16x64, scale=rceil)": Golden(lambda x, dim: oracles.mx(x, dim, E2M1, tiles(16, 64), "rceil")),
    "mxfp4(scale=quest)": Golden(oracles.mxfp4_quest),
    "mxfp4(scale=quest, block=4x16)": Golden(lambda x, dim: oracles.mxfp4_quest(x, dim, (4, 16))),
    "fp8_e4m3(block=1x128)": Golden(oracles.fp8_blocks),
    "fp8_e4m3(block=1x128, scale=pow2)": Golden(lambda x, dim: oracles.fp8_blocks(x, dim, pow2=True)),
    "fp8_e4m3(block=128x128)": Golden(lambda x, dim: oracles.fp8_blocks(x, dim, tiles(128)), tile=tiles(128)),
    "fp8_e4m3(block=128x128, scale=pow2)": Golden(
        lambda x, dim: oracles.fp8_blocks(x, dim, tiles(128), True), tile=tiles(128)
    ),
    "fp8_e5m2(block=1x128)": Golden(lambda x, dim: oracles.fp8_blocks(x, dim, grid=E5M2)),
    "fp8_e4m3(block=row, scale=torchao)": Golden(oracles.fp8_rows),
    "fp8_e4m3(block=row, scale=torchao_pow2)": Golden(lambda x, dim: oracles.fp8_rows(x, dim, True)),
    "fp8_e4m3(scale=pow2)": Golden(lambda x, dim: oracles.fp8_tensor_pow2(x)),
    "fp8_e5m2(scale=pow2)": Golden(lambda x, dim: oracles.fp8_tensor_pow2(x, E5M2)),
    "hif4": Golden(oracles.hif4),
    "hifp8(scale=amax8)": Golden(lambda x, dim: oracles.hifp8_amax8(x)),
    "mxfp4(block=16, scale=e4m3)": Golden(lambda x, dim: oracles.with_scale_type(x, "e4m3", dim)),
    "mxfp4(block=16, scale=ue5m3)": Golden(lambda x, dim: oracles.with_scale_type(x, "ue5m3", dim)),
    "mxfp4(block=16, scale=float32)": Golden(lambda x, dim: oracles.with_scale_type(x, "float32", dim)),
    "mxfp4(scale=e4m3)": Golden(lambda x, dim: oracles.with_scale_type(x, "e4m3", dim, block=32)),
    "mxfp8(scale=float32)": Golden(lambda x, dim: oracles.with_scale_type(x, "float32", dim, E4M3, 32)),
    "mxint4(scale=ue5m3)": Golden(lambda x, dim: oracles.with_scale_type(x, "ue5m3", dim, INT4, 32)),
}

WHOLE_TENSOR = ("nvfp4", "nvint4", "hifp8", "fp8_e4m3(scale=pow2)", "fp8_e5m2(scale=pow2)")
"""Specs with a tensor scale begin so: one NaN makes the whole tensor NaN."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def one_outlier() -> Tensor:
    x = normal(48, 160)
    x[3, 5] = 1e4
    return x


def zero_blocks() -> Tensor:
    x = normal(160, 160)
    x[:128, :128] = 0
    x[150] = 0
    return x


def ties() -> Tensor:
    x = torch.randint(-64, 65, (48, 160), generator=torch.Generator().manual_seed(1)) / 16
    x[::16, ::16] = 6
    return x


def tied_errors() -> Tensor:
    """Three multiples of 1/16 in each run of 16: 4/6 often has the same error on 4 and on 6, with different results."""
    x = torch.zeros(64, 4, 16)
    x[:, :, :3] = torch.randint(1, 97, (64, 4, 3), generator=torch.Generator().manual_seed(2)) / 16
    x[0, 0, 0] = 6
    return x.reshape(64, 64)


def nearly_tied_errors() -> Tensor:
    """Errors of 4/6 that are equal but for the rounding of their float32 sums: the order of summation decides."""
    x = torch.randint(-64, 65, (128, 256), generator=torch.Generator().manual_seed(3)) / 16
    x[0, 0] = 6
    return x * 0.9


def scales_on_ties() -> Tensor:
    """The largest value of each 16 × 16 tile puts its scale midway between two of E4M3, as far as float32 can.

    Under a tensor scale for 448 or 256, for the block's largest value on 6 or on 4.
    """
    middles = torch.from_numpy((E4M3[90:122] + E4M3[91:123]) / 2)  # 32 of them, below 448
    ratios = torch.cat([middles / top for top in (448, 256, 448 * 1.5, 256 * 1.5)]).reshape(8, 16)
    ratios = torch.where(ratios > 1, ratios / 4, ratios)
    x = torch.rand(8, 16, 16, 16, generator=torch.Generator().manual_seed(3)) * 1.8 - 0.9
    x[:, 0, :, 0] = 1
    x = x * (5.3 * ratios)[:, None, :, None]
    x[0, 0, 0, 0] = 5.3
    return x.reshape(128, 256).float()


def just_below_halves() -> Tensor:
    """Blocks of 64 that start with 7, for which HiF4's scale is 1, and values a float32 step below ties of its grid."""
    middles = torch.arange(0.125, 7, 0.125).repeat_interleave(4)
    below = torch.nextafter(middles, torch.tensor(0.0)).reshape(-1, 4)[:, None].repeat(1, 16, 1)
    below[:, 0, 0] = 7
    return below.reshape(-1, 64)


def steps_between_rows() -> Tensor:
    return normal(48, 160) * torch.exp2(torch.arange(48.0) - 24)[:, None]


INPUTS = {
    "normal": lambda: normal(160, 192),
    "bfloat16": lambda: normal(48, 256).bfloat16(),
    "heavy tails": lambda: normal(48, 160) / normal(48, 160, seed=1),
    "gradients": lambda: normal(48, 160) * 1e-6,
    "zeros": lambda: torch.zeros(20, 40),
    "zero blocks": zero_blocks,
    "one outlier": one_outlier,
    "ties": ties,
    "tied errors": tied_errors,
    "errors that nearly tie": nearly_tied_errors,
    "scales on ties": scales_on_ties,
    "just below halves": just_below_halves,
    "rows of many sizes": steps_between_rows,
    "short tiles": lambda: normal(37, 75),
    "one value": lambda: normal(1, 1),
    "one axis": lambda: normal(200),
}


def wanted(golden: Golden, x: Tensor, dim: int = -1) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(golden.oracle(x.float().numpy(), dim))).to(x.dtype)


def assert_agrees(got: Tensor, want: Tensor, rtol: float = 0.0) -> None:
    """NaN where NaN stands, 0 equal to -0, the rest within rtol, and one step of a narrower dtype if rtol is not 0."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype] if rtol else 0.0
    a, b = got.double(), want.double()
    same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= (rtol + step) * b.abs())
    if not bool(same.all()):
        bad = (~same).nonzero()[:4]
        pairs = [(tuple(i.tolist()), float(a[tuple(i)]), float(b[tuple(i)])) for i in bad]
        raise AssertionError(f"{int((~same).sum())} of {same.numel()} differ; (place, got, wanted): {pairs}")


def error_ratio(x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> float:
    """‖y - x‖² / ‖x‖² in thousandths."""
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    return float(1e3 * ((y - x) ** 2).sum() / (x**2).sum())


def sqnr_db(x: np.ndarray | Tensor, y: np.ndarray | Tensor) -> float:
    return float(-10 * np.log10(error_ratio(x, y) / 1e3))


# --- Every spec against its oracle -----------------------------------------------------------------------------------


@pytest.mark.sampled(143)
@pytest.mark.parametrize("data", INPUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_agrees(spec: str, data: str) -> None:
    x = INPUTS[data]()
    assert_agrees(fake_quantize(x, spec), wanted(SPECS[spec], x), SPECS[spec].rtol)


TINY = {
    "mxfp8_e5m2(block=32x32, scale=rceil)": lambda x: oracles.mx(x, -1, E5M2, tiles(32), "rceil"),
    "fp8_e4m3(block=row, scale=torchao_pow2)": lambda x: oracles.fp8_rows(x, -1, True),
    "fp8_e5m2(block=row, scale=torchao_pow2)": lambda x: oracles.fp8_rows(x, -1, True, E5M2),
}


@pytest.mark.parametrize("backend", ["reference", "torch", "triton"])
@pytest.mark.parametrize("exponent", [-140, -127, -126, -60, -39])
@pytest.mark.parametrize("spec", TINY)
def test_tiny_and_subnormal_blocks(spec: str, exponent: int, backend: str) -> None:
    """A tile's scale ends at 2^-127, where values stay on E5M2's grid; torchao's absmax counts as at least 1e-12."""
    x = normal(64, 96)
    x = (x / x.abs().max()).double().mul(2.0**exponent).float()
    got = by_reference(x, spec) if backend == "reference" else fake_quantize(x, spec, backend=backend)
    assert_agrees(got, torch.from_numpy(TINY[spec](x.numpy()).astype(np.float32)))


@pytest.mark.parametrize("spec", [name for name in SPECS if "pow2" in name])
def test_a_power_of_two_is_read_from_the_bits(spec: str) -> None:
    """floor(log2(S)) in float32 is one too high for S just below a power of two: subnormal elements show it."""
    grid = E5M2 if "e5m2" in spec else E4M3
    for exponent in range(-30, 30, 7):
        power = np.float32(grid[-1] * 2.0**exponent)
        for absmax in (power, np.nextafter(power, np.float32(np.inf)), np.nextafter(power, np.float32(0))):
            x = torch.cat([torch.linspace(-1, 1, 20), torch.arange(20) * (grid[1] / grid[-1] / 3)]).float()
            x = x.reshape(2, 20).T.reshape(2, 20) * float(absmax)
            x[:, 0] = float(absmax)
            assert_agrees(fake_quantize(x, spec), wanted(SPECS[spec], x))


@pytest.mark.sampled(29)
@pytest.mark.parametrize(("shape", "dim"), [((160, 40), 0), ((2, 128, 64), 0), ((2, 128, 64), 1), ((2, 128, 64), -1)])
@pytest.mark.parametrize("spec", SPECS)
def test_agrees_along_every_axis(spec: str, shape: tuple[int, ...], dim: int) -> None:
    x = normal(*shape)
    assert_agrees(fake_quantize(x, spec, dim), wanted(SPECS[spec], x, dim), SPECS[spec].rtol)


@pytest.mark.parametrize("spec", ["nvfp4(block=16x16)", "mxfp8(block=32x32, scale=rceil)", "fp8_e4m3(block=128x128)"])
@pytest.mark.parametrize("dim", [-1, -2])
def test_tiles_take_all_other_axes_as_one(spec: str, dim: int) -> None:
    """Tokens are [sequence, batch], and a GEMM takes them as one axis."""
    x = normal(5, 40, 24)
    got = fake_quantize(x, spec, dim)
    assert_agrees(got, wanted(SPECS[spec], x, dim))
    lines = x.movedim(dim, -1)
    of_matrix = fake_quantize(lines.flatten(0, 1), spec).reshape(lines.shape)
    assert torch.equal(got, of_matrix.movedim(-1, dim))


@pytest.mark.parametrize("spec", [name for name, golden in SPECS.items() if golden.tile])
def test_square_tiles_round_the_transpose_alike(spec: str) -> None:
    x = normal(100, 75)
    y = fake_quantize(x, spec)
    assert torch.equal(fake_quantize(x, spec, 0), y)
    assert torch.equal(fake_quantize(x.T, spec).T, y)
    assert torch.equal(fake_quantize(x.T.contiguous(), spec, 0).T, y)


@pytest.mark.sampled(107)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("spec", SPECS)
def test_what_is_not_finite_takes_all_that_shares_its_scale(spec: str, value: float) -> None:
    x = normal(160, 160)
    x[17, 40] = value
    got = fake_quantize(x, spec)
    assert_agrees(got, wanted(SPECS[spec], x), SPECS[spec].rtol)
    saturates = "scale=pow2" in spec and np.isinf(value)  # as in Transformer Engine
    assert bool(got.isnan().all()) == (spec.startswith(WHOLE_TENSOR) and "nvfp4_row" not in spec and not saturates)


@pytest.mark.parametrize("spec", SPECS)
def test_quantize_stores_what_fake_quantize_gives(spec: str) -> None:
    for x in (normal(37, 75), zero_blocks()):
        assert torch.equal(quantize(x, spec).dequantize(), fake_quantize(x, spec))


# --- Figures ---------------------------------------------------------------------------------------------------------

FIGURES = {
    "nvfp4": (oracles.nvfp4, 20.44),
    "nvfp4(block=16x16)": (SPECS["nvfp4(block=16x16)"].oracle, 19.06),
    "nvfp4(scale=4over6, error=mse, bound=256)": (oracles.four_over_six, 21.21),
    "nvfp4(scale=4over6, error=mae, bound=256)": (lambda x, dim: oracles.four_over_six(x, dim, "mae"), 21.08),
    "nvfp4(block=16x16, scale=4over6, error=mse, bound=256)": (
        lambda x, dim: oracles.four_over_six(x, dim, "mse", 256, tiles(16)),
        19.07,
    ),
    "nvfp4(block=16x16, scale=4over6, error=mae, bound=256)": (
        lambda x, dim: oracles.four_over_six(x, dim, "mae", 256, tiles(16)),
        19.07,
    ),
    "mxfp8(scale=rceil)": (lambda x, dim: oracles.mx(x, dim, E4M3, (1, 32), "rceil"), 31.52),
    "mxfp8(block=32x32, scale=rceil)": (SPECS["mxfp8(block=32x32, scale=rceil)"].oracle, 31.52),
    "mxfp4": (lambda x, dim: oracles.mx(x, dim, E2M1), 18.79),
    "mxfp4(block=32x32)": (SPECS["mxfp4(block=32x32)"].oracle, 18.76),
    "mxfp4(block=32x32, scale=rceil)": (lambda x, dim: oracles.mx(x, dim, E2M1, tiles(32), "rceil"), 16.48),
    "fp8_e4m3(block=1x128)": (oracles.fp8_blocks, 31.80),
    "fp8_e4m3(block=1x128, scale=pow2)": (SPECS["fp8_e4m3(block=1x128, scale=pow2)"].oracle, 31.52),
    "fp8_e4m3(block=128x128)": (SPECS["fp8_e4m3(block=128x128)"].oracle, 31.55),
    "fp8_e4m3(block=128x128, scale=pow2)": (SPECS["fp8_e4m3(block=128x128, scale=pow2)"].oracle, 31.52),
    "hif4": (oracles.hif4, 21.62),
    "hifp8(scale=amax8)": (SPECS["hifp8(scale=amax8)"].oracle, 31.55),
    "nvint4": (oracles.nvint4, 21.29),
    "mxint4(scale=rceil)": (oracles.mxint4, 16.84),
    "if4": (oracles.if4, 22.11),
    "mxfp4(block=16, scale=float32)": (SPECS["mxfp4(block=16, scale=float32)"].oracle, 20.52),
    "mxfp4(block=16, scale=e4m3)": (SPECS["mxfp4(block=16, scale=e4m3)"].oracle, 20.44),
    "mxfp4(block=16, scale=ue5m3)": (SPECS["mxfp4(block=16, scale=ue5m3)"].oracle, 20.44),
    "mxfp4(block=16, scale=rceil)": (lambda x, dim: oracles.mx(x, dim, E2M1, (1, 16), "rceil"), 18.95),
}
"""SQNR of N(0, 1) in dB."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spec", FIGURES)
def test_oracle_gives_the_figure(spec: str) -> None:
    oracle, db = FIGURES[spec]
    x = normal(256, 1024).numpy()
    assert sqnr_db(x, oracle(x, -1)) == pytest.approx(db, abs=0.05)


@pytest.mark.parametrize("spec", [name for name in FIGURES if name != "if4"])
def test_gives_the_figure(spec: str) -> None:
    x = normal(256, 1024)
    assert sqnr_db(x, fake_quantize(x, spec)) == pytest.approx(FIGURES[spec][1], abs=0.05)


@pytest.mark.parametrize(
    ("spec", "published"),
    [
        ("nvfp4", 9.0),
        ("nvfp4(block=16x16)", 12.4),
        ("nvfp4(scale=4over6, error=mse, bound=256)", 7.6),
        ("nvfp4(block=16x16, scale=4over6, error=mse, bound=256)", 12.4),
        (UNBIASED, 23.5),
    ],
)
def test_quartet_2s_errors(spec: str, published: float) -> None:
    """‖e‖² / ‖x‖² · 10³ on N(0, 1): Quartet II 8776a90, notebooks/unbiasedness.ipynb."""
    x = normal(512, 1024)
    assert error_ratio(x, fake_quantize(x, spec)) == pytest.approx(published, abs=0.12)


def test_quartets_constant_loses_least_without_its_floor() -> None:
    """0.01268 on N(0, 1) with the scale 0.487 in E2M1: Quartet, notebooks/mse_fitting.ipynb.

    The floor to a power of two, as in mxfp4.py, costs a factor of 2.0, or 1.7 on average over an octave of σ, compared
    with plain MXFP4. Exponents rounded to nearest would not.
    """
    x = normal(512, 1024)
    values = x.numpy().astype(np.float64)
    element = ml_dtypes.float4_e2m1fn

    def lost(scale: np.ndarray | float) -> float:
        q = np.clip(values / scale, -6, 6).astype(np.float32).astype(element).astype(np.float64) * scale
        return float(((q - values) ** 2).mean())

    scales = np.linspace(0.4, 0.6, 41)
    best = min(scales, key=lost)
    assert lost(0.487) == pytest.approx(0.01268, abs=5e-5) and best == pytest.approx(0.487, abs=0.015)
    blocks = values.reshape(-1, 32)
    wanted = np.log2(0.48708 * blocks.std(1, keepdims=True)).repeat(32, 1).reshape(values.shape)
    ratio = {spec: error_ratio(x, fake_quantize(x, spec)) / 1e3 for spec in ("mxfp4", "mxfp4(scale=quest)")}
    assert ratio["mxfp4(scale=quest)"] == pytest.approx(lost(2 ** np.floor(wanted)), rel=2e-3)
    assert ratio["mxfp4(scale=quest)"] / ratio["mxfp4"] == pytest.approx(2.04, abs=0.03)
    assert lost(2 ** np.round(wanted)) < ratio["mxfp4"]
    octave = [x * 2 ** (step / 16) for step in range(16)]
    floor, plain = (
        np.mean([error_ratio(y, fake_quantize(y, spec)) for y in octave]) for spec in ("mxfp4(scale=quest)", "mxfp4")
    )
    assert floor / plain == pytest.approx(1.68, abs=0.03)


@pytest.mark.thorough
def test_ms_eden_is_biased_for_vectors_that_rotations_do_not_make_gaussian() -> None:
    """The mean over rotations of e₀ + 0.1 e₁ has 100/101 of its first component, and twice its second."""
    x = torch.zeros(1, 128)
    x[0, :2] = torch.tensor([1.0, 0.1])
    found = [fake_quantize(x, MS_EDEN.format(seed=seed), seed=seed)[0] for seed in range(1500)]
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 1500**0.5
    assert mean[:2].tolist() == pytest.approx([100 / 101, 0.198], abs=0.004) and error.max() < 0.002


def test_hif4_has_24_percent_less_error_than_nvfp4() -> None:
    """arXiv 2602.11287."""
    x = normal(512, 1024)
    ratio = error_ratio(x, fake_quantize(x, "hif4")) / error_ratio(x, fake_quantize(x, "nvfp4"))
    assert ratio == pytest.approx(0.76, abs=0.01)


def test_hifloat8_needs_its_scale_for_gradients() -> None:
    x = normal(256, 512) * 1e-4
    assert sqnr_db(x, fake_quantize(x, "hifp8")) == pytest.approx(19.7, abs=0.1)
    assert sqnr_db(x, fake_quantize(x, "hifp8(scale=amax8)")) == pytest.approx(31.6, abs=0.1)


def test_oracle_errors_are_quartet_2s() -> None:
    x = normal(512, 1024).numpy()
    u = np.random.default_rng(0).random(x.shape)
    for y, published in [
        (oracles.nvfp4(x), 9.0),
        (oracles.nvfp4(x, block=(16, 16)), 12.4),
        (oracles.four_over_six(x), 7.6),
        (oracles.four_over_six(x, block=(16, 16)), 12.4),
        (oracles.nvfp4_unbiased(x, u), 23.5),
        (oracles.nvfp4_stochastic(x, u), 18.9),  # clips: not Quartet II's
    ]:
        assert error_ratio(x, y) == pytest.approx(published, abs=0.12)
    assert error_ratio(x, oracles.hif4(x)) / error_ratio(x, oracles.nvfp4(x)) == pytest.approx(0.76, abs=0.01)


# --- The oracles' own foundations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "grid", "rule"),
    [
        (ml_dtypes.float4_e2m1fn, E2M1, "even"),
        (ml_dtypes.float8_e4m3fn, E4M3, "even"),
        (ml_dtypes.float8_e5m2, E5M2, "even"),
        (en_dtypes.float4_e1m2, INT4 / 4, "even"),
        (en_dtypes.hifloat8, HIF8, "away"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_oracle_rounds_as_libraries_do(dtype: type, grid: np.ndarray, rule: str) -> None:
    x = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    x = np.clip(x[np.isfinite(x)], -grid[-1], grid[-1])
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([x, middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    np.testing.assert_array_equal(oracles.nearest(x, grid, rule), x.astype(dtype).astype(np.float64))


def test_oracle_scales_have_the_published_ranges() -> None:
    """UE5M3 has its largest value at 2^17 · 0.875, the all-ones code being NaN. E6M2: arXiv 2602.11287."""
    assert oracles.UE5M3[[1, -1]].tolist() == [2.0**-17, 114688.0] and len(oracles.UE5M3) == 255
    assert oracles.E6M2[[0, -1]].tolist() == [2.0**-48, 49152.0] and len(oracles.E6M2) == 255
    assert float(oracles.hif4(np.full(64, 3e38, np.float32))[0]) == 344064.0
    assert np.unique(np.concatenate([-HIF8, HIF8])).size == 253


@pytest.mark.parametrize(
    ("amax", "floor", "rceil"), [(448.0, 0, 0), (449.0, 0, 1), (1.0, -8, -8), (2.0**-140, -127, -127)]
)
def test_oracle_mx_exponents(amax: float, floor: int, rceil: int) -> None:
    assert oracles.mx_exponent(amax, E4M3, "floor") == floor
    assert oracles.mx_exponent(amax, E4M3, "rceil") == rceil


def test_oracle_nvfp4_is_ml_dtypes_with_the_published_formula() -> None:
    from tests.quant.libraries import nvfp4_numpy

    x = normal(40, 64).numpy() * 1e-3
    np.testing.assert_array_equal(oracles.nvfp4(x), nvfp4_numpy(x))


def test_oracle_four_over_six_by_hand() -> None:
    """With 40 on 6 no element is near 30; with 40 on 4 all four values are exact."""
    x = np.array([10, 20, 30, 40] + [0] * 12, np.float32)
    np.testing.assert_allclose(oracles.four_over_six(x)[:4], [10, 20, 30, 40], rtol=4e-7)
    assert np.abs(oracles.nvfp4(x) - x).max() > 2


def test_oracle_hif4_by_hand() -> None:
    """Blocks whose largest value is 7 have a scale of 1: 7 · bf16(1/7) is 0.998, which E6M2 rounds to 1."""
    x = np.zeros(64, np.float32)
    x[:4] = [7, 5, 3, 1.125]  # 4 or more in the 8, still 2 or more in the 4: a step of 1
    x[4:8] = [0.5, 0.375, 0.25, 0.124]  # the exponent of the 8 alone: a step of 1/2, ties away
    x[8:12] = [0.875, 0.375, 0.125, 0.12499999]  # neither: a step of 1/4; ½ is added exactly
    y = oracles.hif4(x)
    assert y[:12].tolist() == [7, 5, 3, 1, 0.5, 0.5, 0.5, 0, 1, 0.5, 0.25, 0]
    assert not y[12:].any()


# --- Delayed scaling --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("history", "margin"), [(1, 0), (2, 3), (5, 0), (1, -12), (2, 127)])
def test_delayed_scales(history: int, margin: int, algorithm: str) -> None:
    options = {"history": history, "algorithm": algorithm, "margin": margin}
    kept = ScaleHistory(Spec.of("fp8_e4m3", **options))
    random = np.random.default_rng(history)
    amaxes = [1, 4, 2, 2, 0, np.nan, 1e-3, 7, np.inf, 5, 0, 3, 1e-41, 2, np.nan, 0, *2.0 ** random.normal(0, 9, 40)]
    used = [kept.use(torch.tensor([[0.0, -amax], [amax / 2, 0.0]])).item() for amax in amaxes]
    assert used == oracles.delayed_scales(amaxes, **options)[:-1]


@pytest.mark.parametrize("margin", [-12, -1, 0, 5])
def test_the_margin_of_a_power_of_two(margin: int) -> None:
    """HiFloat8 maps absmax to [8, 16), where its values still have three mantissa bits; a margin moves that by 2^-M."""
    history = ScaleHistory(Spec.of("hifp8", scale="pow2", history=1, margin=margin))
    for amax in 2.0 ** np.random.default_rng(0).normal(0, 20, 40):
        history.use(torch.tensor([amax], dtype=torch.float32))
        scale = history.scale.item()
        assert np.frexp(scale)[0] == 0.5 and 8 * 2.0**-margin <= scale * np.float32(amax) < 16 * 2.0**-margin


@pytest.mark.parametrize("margin", ["-33", "128", "1.5", "--1"])
def test_wrong_margins(margin: str) -> None:
    with pytest.raises(SpecError, match=f"margin={margin} is not"):
        Spec.of("fp8_e4m3", history=1, margin=margin)
    with pytest.raises(SpecError, match="margin=-1 does not apply to hifp8"):
        Spec.of("hifp8(scale=pow2)", margin=-1)


def test_oracle_delayed_scales() -> None:
    scales = oracles.delayed_scales
    assert scales([1, 4, 2, 2], history=2) == [1, 448, 112, 112, 224]
    assert scales([1, 4, 2, 2], history=1024) == [1, 448, 112, 112, 112]
    assert scales([1, 4, 2, 2], algorithm="most_recent") == [1, 448, 112, 224, 224]
    assert scales([1, 4], margin=1) == [1, 224, 56]
    assert scales([1, 0, 0, 0, 4], history=2) == [1, 448, 448, 448, 448, 112]  # zeros are not remembered
    assert scales([1, np.inf, 2, 2], history=2) == [1, 448, 448, 448, 224]  # Inf freezes it until it has left
    assert scales([1, np.nan, 2], history=3) == [1, 448, 448, 224]
    assert scales([1e-38]) == [1, np.finfo(np.float32).max]
    assert oracles.fp8_with_scale(np.array([1.0, 8.0], np.float32), 112).tolist() == [1.0, 4.0]  # saturates


# --- Stochastic rounding ----------------------------------------------------------------------------------------------


def bias_at_the_largest(x: np.ndarray, draws: list[np.ndarray]) -> float:
    """Mean of y/x - 1 over the largest value of each block of 16, which is the one that clipping would make smaller."""
    top = np.abs(x.reshape(-1, 16)).argmax(1)[:, None]
    values = np.take_along_axis(x.reshape(-1, 16).astype(np.float64), top, 1)
    return float(np.mean([np.take_along_axis(y.reshape(-1, 16), top, 1) / values - 1 for y in draws]))


def test_oracle_plain_stochastic_rounding_is_biased_and_the_other_is_not() -> None:
    x, rng = normal(128, 512).numpy(), np.random.default_rng(0)
    noise = [rng.random(x.shape) for _ in range(12)]
    assert bias_at_the_largest(x, [oracles.nvfp4_stochastic(x, u) for u in noise]) < -0.008
    assert abs(bias_at_the_largest(x, [oracles.nvfp4_unbiased(x, u) for u in noise])) < 0.003


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_oracle_unbiased_rounding_never_clips(scale: float) -> None:
    x = normal(256, 1024).numpy() * np.float32(scale)
    scaled, _, _ = oracles.nvfp4_unbiased_parts(x)
    assert 5.9 < np.abs(scaled).max() <= 6


def draws(x: Tensor, spec: str, count: int = 12) -> list[np.ndarray]:
    return [fake_quantize(x, spec, seed=seed).numpy() for seed in range(count)]


def test_plain_stochastic_rounding_is_biased() -> None:
    x = normal(128, 512)
    assert bias_at_the_largest(x.numpy(), draws(x, "nvfp4(rounding=stochastic)")) < -0.008


def test_plain_stochastic_rounding_takes_a_neighbour_under_the_scales_of_nvfp4() -> None:
    x = normal(64, 256)
    low, high = (oracles.nvfp4_stochastic(x.numpy(), np.full(x.shape, u)) for u in (1.0, -1.0))
    for y in draws(x, "nvfp4(rounding=stochastic)", 3):
        assert ((y == low) | (y == high)).all()


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_unbiased_rounding_is_unbiased(scale: float) -> None:
    x = normal(128, 512) * scale
    found = draws(x, UNBIASED)
    assert abs(bias_at_the_largest(x.numpy(), found)) < 0.003
    values = x.double().numpy()
    assert np.mean([(y * values).sum() / (values**2).sum() for y in found]) == pytest.approx(1, abs=1e-3)
    # n independent unbiased roundings average their error away: 1/n of it is left.
    assert error_ratio(values, np.mean(found, axis=0, dtype=np.float64)) == pytest.approx(23.5 / len(found), rel=0.05)


def test_unbiased_rounding_takes_a_neighbour() -> None:
    """Sources differ in the order of two float32 products, which can move one E4M3 scale in thousands by a step."""
    x = normal(64, 256)
    low, high = (oracles.nvfp4_unbiased(x.numpy(), np.full(x.shape, u)) for u in (1.0, -1.0))
    y = fake_quantize(x, UNBIASED, seed=1).numpy()
    near = [np.abs(y - bound) <= 4e-7 * np.abs(bound) for bound in (low, high)]
    assert (near[0] | near[1]).reshape(-1, 16).all(1).mean() > 0.995


@pytest.mark.parametrize("spec", ["nvfp4(rounding=stochastic)", UNBIASED])
def test_a_seed_decides(spec: str) -> None:
    x = normal(32, 64)
    once, again, other = (fake_quantize(x, spec, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)


# --- Rotations and MS-EDEN --------------------------------------------------------------------------------------------


def test_oracle_rotation_is_orthonormal_and_cancels_in_a_product() -> None:
    a, b = normal(8, 64).double().numpy(), normal(64, 8).double().numpy()
    turned = [oracles.rotate(v, NVIDIA_SIGNS, dim) for v, dim in ((a, 1), (b, 0))]
    np.testing.assert_allclose(turned[0] @ turned[1], a @ b, atol=1e-12)
    np.testing.assert_allclose(oracles.rotate_back(turned[0], NVIDIA_SIGNS), a, atol=1e-12)
    np.testing.assert_allclose(oracles.rotate(np.eye(16)[:1], np.ones(16)), np.full((1, 16), 0.25))
    assert oracles.rotate(np.eye(16)[3:4], NVIDIA_SIGNS)[0, 0] == -0.25


@pytest.mark.parametrize(
    ("spec", "signs"), [("nvfp4(hadamard=16)", np.ones(16)), ("nvfp4(hadamard=16, signs=fixed)", NVIDIA_SIGNS)]
)
@pytest.mark.parametrize("dim", [-1, 0])
def test_rotated_and_turned_back(spec: str, signs: np.ndarray, dim: int) -> None:
    """Rotations in float32 differ in their last bits, so that 1 block in 100 may round one of its values otherwise."""
    x = normal(64, 128)
    x[:, 3] *= 30
    turned = oracles.rotate(x.numpy(), signs, dim).astype(np.float32)
    want = oracles.rotate_back(oracles.nvfp4(turned, dim), signs, dim)
    got = fake_quantize(x, spec, dim).double().numpy()
    runs = [np.moveaxis(v, dim, -1).reshape(-1, 16) for v in (got, want)]
    near = np.abs(runs[0] - runs[1]).max(1) <= 1e-5 * np.abs(runs[1]).max(1)
    assert near.mean() > 0.99
    assert sqnr_db(x, got) == pytest.approx(sqnr_db(x, want), abs=0.05)


def ms_eden_by_oracle(x: np.ndarray, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [oracles.ms_eden(x, rng.choice([-1.0, 1.0], 128), rng.random(x.size // 16)) for _ in range(count)]


def test_oracle_ms_eden_corrects_the_length_of_each_run() -> None:
    """Where all blocks of a run have one scale, what is read back has a projection of 1 on what was rounded.

    The correction is computed from values that are divided by their block's scale: elsewhere it is 1 on average only.
    """
    rotated = normal(16, 512).clamp(-3, 3).numpy()
    rotated[:, ::16] = 3
    element, corrected, tensor = oracles.ms_eden_parts(rotated)
    runs, read_back = (v.reshape(-1, 128) for v in (rotated.astype(np.float64), element * corrected * tensor))
    np.testing.assert_allclose((read_back * runs).sum(1) / (runs**2).sum(1), 1, atol=1e-6)
    assert np.ptp(corrected.reshape(-1, 8), axis=1).max() == 0 and np.ptp(corrected) > 1
    assert np.abs(element).max() == 6


@pytest.mark.parametrize("source", ["oracle", "binade"])
def test_ms_eden_is_unbiased_over_rotations_with_half_the_error_of_stochastic_rounding(source: str) -> None:
    x = normal(64, 512)
    if source == "oracle":
        found = ms_eden_by_oracle(x.numpy(), 24)
    else:
        found = [fake_quantize(x, MS_EDEN.format(seed=seed), seed=seed).double().numpy() for seed in range(24)]
    values = x.double().numpy()
    assert np.mean([error_ratio(values, y) for y in found]) == pytest.approx(9.7, abs=0.3)
    assert np.mean([(y * values).sum() / (values**2).sum() for y in found]) == pytest.approx(1, abs=1e-3)
    assert error_ratio(values, np.mean(found, axis=0)) == pytest.approx(9.7 / 24, rel=0.15)
