"""A format of a known family is one entry in FORMATS, a scale scheme one class: nothing else needs a change."""

from __future__ import annotations

import runpy

import ml_dtypes
import numpy as np
import pytest
import torch

from binade.collector.cli.listing import KINDS
from binade.quant import FORMATS, Format, compare, fake_quantize, look, quantize, score, usage
from binade.quant.elements import E2M1, E5M2, FixedPoint, Minifloat, RoundingMode
from binade.quant.formats import MX_RULES
from binade.quant.options import Block, Options
from binade.quant.scaling import SCALINGS
from binade.quant.scheme import TILE, VECTOR, Follows, Scaling, nearest
from binade.quant.specs import Spec, SpecError, known_specs
from tests.conftest import PROJECT
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices

E3M4 = Format("fp8_e3m4", "FP8 E3M4", Minifloat("e3m4", 3, 4, "ieee"))
MXE3M4 = Format("mx_e3m4", "E3M4 in blocks of 8", Minifloat("e3m4", 3, 4, "ieee"), MX_RULES, 8)
MXINT4 = Format("mxint4_coarse", "INT4 in blocks of 32", FixedPoint("int4", 4, 2), MX_RULES, 32)
NEW = [E3M4, MXE3M4, MXINT4]


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("fmt", NEW, ids=lambda f: f.name)
def test_runs_on_every_backend(fmt, device):
    x = awkward((50, 70), seed=1)
    for dim in (0, 1):
        want = by_reference(x, fmt, dim)
        assert_same_bits(fake_quantize(x, fmt, dim, backend="torch"), want)
        assert_same_bits(fake_quantize(x.to(device), fmt, dim, backend="triton"), want)
        assert_same_bits(quantize(x, fmt, dim).dequantize(), want)
    assert usage(x, fmt).codes_used <= 1 << fmt.element.bits


def test_rounds_as_ml_dtypes():
    x = awkward((4000,), seed=2, specials=False)
    want = x.numpy().astype(ml_dtypes.float8_e3m4).astype(np.float32)
    want = np.where(np.isinf(want), np.copysign(15.5, want), want).astype(np.float32)
    assert E3M4.max == 15.5
    assert_same_bits(fake_quantize(x, E3M4), want)


def test_int4_by_hand():
    x = torch.zeros(32)
    x[:4] = torch.tensor([1.0, 1.9, -1.9, 0.375])  # steps of 1/4, ±7/4; 0.375 is a tie, to even
    assert fake_quantize(x, MXINT4)[:4].tolist() == [1.0, 1.75, -1.75, 0.5]
    assert quantize(x, MXINT4).unpacked_codes()[0, :4].tolist() == [4, 7, 9, 2]


class BlockE5M2(Scaling):
    """Block scale absmax / max rounded to E5M2.

    What follows the first paragraph is not in the reference."""

    name = "e5m2"
    shares = "an E5M2 scale for {block}"
    blocks = (VECTOR, TILE)
    stored = E5M2
    clips = True
    follows = Follows.LARGEST
    per_element = False

    def of_largest(self, largest: torch.Tensor, spec: Options, absmax: torch.Tensor) -> torch.Tensor:
        return nearest((largest / spec.format.max).clamp(min=E5M2.smallest), E5M2)


class MedianScale(BlockE5M2):
    """Float32 scale that maps the median magnitude of a vector of 8 to 1: no kernel knows it."""

    name = "median"
    shares = "a scale for {block}"
    blocks = (Block(1, 8),)
    stored = None
    follows = Follows.VALUES
    roundings = (RoundingMode.HALF_AWAY,)

    def block_scale(self, x: torch.Tensor, spec: Options, absmax: torch.Tensor) -> torch.Tensor:
        return x.abs().median(-1, keepdim=True).values


def block_e5m2_numpy(x: np.ndarray, block: int) -> np.ndarray:
    """The same by ml_dtypes: float32 [n], n a multiple of block."""
    blocks = x.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(6)
    scale = np.clip(scale, np.float32(2.0**-16), np.float32(57344)).astype(ml_dtypes.float8_e5m2).astype(np.float32)
    scaled = np.clip(blocks * (np.float32(1) / scale), -6, 6)
    return (scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale).reshape(-1)


def found_by_every_function(x: torch.Tensor, fmt: str, want: torch.Tensor) -> None:
    """x [n] rounded to fmt is `want` in fake_quantize, quantize, compare, score, look and usage."""
    assert_same_bits(fake_quantize(x, fmt), want)
    stored = quantize(x, fmt)
    assert_same_bits(stored.dequantize(), want)
    blocks = len(x) // FORMATS[fmt].block_size
    assert stored.nbytes == stored.codes.numel() + blocks == len(x) * Spec.of(fmt).bits_per_value / 8
    seen = look(x, fmt)
    assert_same_bits(seen.y.reshape(-1), want)
    errors, metrics, used = score(x, fmt), compare(x, want, fmt), usage(x, fmt)
    assert errors.sqnr_db == pytest.approx(metrics["sqnr_db"]) and metrics["sqnr_db"] > 10
    assert errors.saturated == metrics["saturated"] == float(seen.saturated.mean())
    assert used.codes_used == metrics["codes_used"] and used.scale_counts.sum() == blocks
    assert used.scale_exponent_max == seen.scale_exponents.max()


def test_a_block_format_is_one_entry(monkeypatch):
    monkeypatch.setitem(FORMATS._formats, "mxint4_coarse", MXINT4)
    assert "mxint4_coarse" in list(FORMATS)
    x = torch.randn(320, generator=torch.Generator().manual_seed(3))
    steps = 4 / 2.0 ** np.floor(np.log2(x.reshape(-1, 32).abs().amax(1, keepdim=True).numpy()))
    want = np.clip(np.rint(x.numpy().reshape(-1, 32) * steps), -7, 7) / steps + 0.0
    found_by_every_function(x, "mxint4_coarse", torch.tensor(want.reshape(-1), dtype=torch.float32))


@pytest.fixture
def schemes(monkeypatch):
    """Two new schemes, each registered by one line, and formats that use them."""
    monkeypatch.setitem(SCALINGS, "e5m2", BlockE5M2())
    monkeypatch.setitem(SCALINGS, "median", MedianScale())
    for fmt in (
        Format("fp4_e5m2", "FP4, E5M2 scales", E2M1, ("e5m2", "floor"), 16),
        Format("fp8_median", "FP8, median scales", E5M2, ("median",), 8),
    ):
        monkeypatch.setitem(FORMATS._formats, fmt.name, fmt)


def test_a_scale_scheme_is_one_class(schemes):
    x = torch.randn(320, generator=torch.Generator().manual_seed(4)) * 10
    want = torch.tensor(block_e5m2_numpy(x.numpy(), 16))
    found_by_every_function(x, "fp4_e5m2", want)
    for dim in (0, 1):  # from the kernels' largest magnitudes, for tiles too
        y = awkward((48, 80), seed=6)
        for fmt in ("fp4_e5m2", "fp4_e5m2(block=4x8)", "fp4_e5m2(rounding=stochastic)"):
            for backend in ("torch", "triton"):
                assert_same_bits(fake_quantize(y, fmt, dim, backend=backend), by_reference(y, fmt, dim))


def test_a_scheme_that_follows_from_all_values_is_computed_by_the_reference(schemes):
    x = torch.randn(320, generator=torch.Generator().manual_seed(5))
    median = np.sort(np.abs(x.numpy().reshape(-1, 8)), 1)[:, 3:4]
    exact = (x.numpy().reshape(-1, 8) * (np.float32(1) / median)).astype(ml_dtypes.float8_e5m2).astype(np.float32)
    want = torch.tensor((exact * median).reshape(-1))
    for backend in ("torch", "triton"):
        assert_same_bits(fake_quantize(x, "fp8_median", backend=backend), want)
    assert Spec.of("fp8_median").bits_per_value == 8 + 32 / 8 == quantize(x, "fp8_median").nbytes * 8 / 320
    assert Spec.of("fp8_median").rounding == RoundingMode.HALF_AWAY


def test_specs_of_a_new_scheme(schemes):
    """Options, texts and descriptions follow from the class."""
    assert known_specs(["fp4_e5m2(scale=floor)", "fp4_e5m2(scale=even)"]) == ["fp4_e5m2(scale=floor)"]
    assert str(Spec.of("fp4_e5m2(scale=e5m2, block=4x8)")) == "fp4_e5m2(block=4x8)"
    assert str(Spec.of("fp4_e5m2(scale=floor)")) == "fp4_e5m2(scale=floor)"
    assert Spec.of("fp4_e5m2").bits_per_value == 4.5 and Spec.of("fp4_e5m2(block=4x8)").bits_per_value == 4.25
    assert Spec.of("fp4_e5m2(rounding=stochastic)").biased and not Spec.of("fp4_e5m2").random
    for text, message in {
        "fp4_e5m2(scale=ceil)": "fp4_e5m2: expected e5m2, floor",
        "fp4_e5m2(block=row)": "expected a vector such as 32, a tile such as 16x16",
        "fp4_e5m2(error=mae)": "error=mae does not apply",
        "fp8_median(block=16)": "expected 1x8",
        "fp8_median(rounding=nearest)": "expected half_away",
    }.items():
        with pytest.raises(SpecError, match=message):
            Spec.of(text)
    listed = KINDS["formats"]()
    assert "e5m2, floor" in listed and "fp8_median" in listed
    generate = runpy.run_path(str(PROJECT / "docs" / "generate.py"))
    assert "| `e5m2` | `fp4_e5m2` | Block scale absmax / max rounded to E5M2. |" in generate["page"]()


def test_the_app_describes_a_new_scheme(schemes):
    shown = pytest.importorskip("binade.app.questions.shared.rounded", reason="the app is not installed")
    assert "an E5M2 scale for every 16 values" in shown.about_format(Spec.of("fp4_e5m2"))


def test_a_scheme_without_a_fact_cannot_be_defined():
    facts = {name: value for name, value in vars(BlockE5M2).items() if not name.startswith("__")}
    for missing in ("shares", "blocks", "stored", "clips", "follows", "per_element", "__doc__"):
        rest = {name: value for name, value in (facts | {"__doc__": "Words."}).items() if name != missing}
        with pytest.raises(TypeError, match="a docstring" if missing == "__doc__" else missing):
            type("Incomplete", (Scaling,), rest)
