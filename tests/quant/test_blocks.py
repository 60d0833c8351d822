"""The block view against the public quantizer, the metrics and numpy."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from binade.quant import FORMATS, fake_quantize, look, score, usage
from binade.quant.blocks import DENORMAL, SPECIAL, ZERO, code_tiers, sample
from binade.quant.reference import to_blocks
from binade.quant.specs import Block, Spec, SpecError

OPTIONS = [{}, {"scale": "ceil"}, {"rounding": "stochastic", "seed": 5}, {"block": 16}]


def values(*shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 2.0 ** torch.arange(shape[-1]).fmod(9)
    x[..., ::11] = 0
    x.reshape(-1, shape[-1])[1] = 0
    return x


def allowed(name: str, options: dict) -> bool:
    try:
        Spec.of(name, **{option: value for option, value in options.items() if option != "seed"})
    except SpecError:
        return False
    return True


@pytest.mark.sampled(84)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(
    ("name", "options"), [(name, options) for name in FORMATS for options in OPTIONS if allowed(name, options)], ids=str
)
def test_says_what_the_quantizer_does(name, dim, options):
    x = values(6, 72, 80).bfloat16()
    seen = look(x, name, dim, **options)
    size = Block(1, seen.x.shape[1])
    wanted = to_blocks(fake_quantize(x, name, dim, **options), dim, size).float()
    assert torch.equal(seen.y, wanted)
    assert torch.equal(seen.x, to_blocks(x, dim, size).float())
    total = score(x, name, dim, **options)
    n = seen.valid.sum(-1)
    assert float((seen.saturated * n).sum() / n.sum()) == pytest.approx(total.saturated, abs=1e-12)
    nonzero = (seen.x != 0).sum(-1)
    flushed = torch.where(nonzero > 0, seen.flush_to_zero * nonzero, 0).sum() / nonzero.sum()
    assert float(flushed) == pytest.approx(total.flush_to_zero, rel=1e-5)
    sums = seen.sums
    if sums.noise:
        assert 10 * math.log10(sums.signal / sums.noise) == pytest.approx(total.sqnr_db, rel=1e-9)
    assert (sums.noise == 0) == (total.sqnr_db == math.inf)
    assert sums.noise / sums.finite == pytest.approx(total.mse, rel=1e-9) and sums.finite == x.numel()
    assert sums.flushed / sums.nonzero == total.flush_to_zero and sums.saturated / x.numel() == total.saturated
    a, e = seen.x.double().numpy(), (seen.y.double() - seen.x.double()).numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr = 10 * np.log10((a**2).sum(1) / (e**2).sum(1))
    used = (a != 0).any(1)
    np.testing.assert_allclose(seen.sqnr_db.numpy()[used], sqnr[used], rtol=1e-12)
    assert np.isnan(seen.sqnr_db.numpy()[~used]).all()
    codes, counts = np.unique(seen.codes[seen.valid].numpy(), return_counts=True)
    use = usage(x, name, dim, **options)
    assert np.array_equal(codes, use.codes) and np.array_equal(counts, use.code_counts)
    if FORMATS[name].scale_rules[0] == "floor":
        exponents = seen.scale_exponents[~seen.scale_exponents.isnan()].numpy()
        found, blocks = np.unique(exponents, return_counts=True)
        assert np.array_equal(found, use.scale_exponents) and np.array_equal(blocks, use.scale_counts)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8_e4m3", "hifp8"])
def test_what_lies_below_half_the_smallest_code_is_what_flushes(name):
    x = values(64, 96) * 1e-7
    seen = look(x, name)
    below = (seen.magnitudes < FORMATS[name].element.smallest / 2 * (1 - 1e-6)) & (seen.x != 0)
    above = seen.magnitudes > FORMATS[name].element.smallest / 2 * (1 + 1e-6)
    assert bool((seen.y[below] == 0).all()) and bool((seen.y[above] != 0).all())
    assert bool(below.any()) or name == "fp8_e4m3"


def test_nan_takes_its_block_and_no_other():
    x = values(4, 64)
    x[0, 3] = math.nan
    seen = look(x, "mxfp4")
    assert seen.scale_exponents[0].isnan() and not seen.scale_exponents[1].isnan()
    assert seen.sqnr_db[0].isnan() and seen.magnitudes[0].isnan().all()


def test_a_small_tensor_is_its_own_sample_and_a_large_one_is_thinned_by_whole_lines():
    x = torch.arange(6 * 40 * 10.0).reshape(6, 40, 10)
    assert sample(x, -1, 2400)[0] is x
    for dim, axis in ((-1, 10), (-2, 40), (0, 6)):
        part, every = sample(x, dim, 500)
        lines = x.movedim(dim, -1).reshape(-1, axis)
        assert every == 5 and part.shape[1] == axis and len(part) == len(lines[::5])
        assert {tuple(line) for line in part.tolist()} <= {tuple(line) for line in lines.tolist()}


def test_tiers_of_every_code():
    """HiFloat8: table 1 of arXiv 2409.16626; the others: their bits."""
    counts = {name: Counter(code_tiers(FORMATS[name].element)) for name in ("mxfp4", "mxfp8", "hifp8")}
    assert counts["mxfp4"] == {ZERO: 2, DENORMAL: 2, "1 mantissa bit": 12}
    assert counts["mxfp8"] == {ZERO: 2, DENORMAL: 14, "3 mantissa bits": 238, SPECIAL: 2}
    assert counts["hifp8"] == {
        ZERO: 1, DENORMAL: 14, SPECIAL: 3, "1 mantissa bit": 62, "2 mantissa bits": 64, "3 mantissa bits": 112,
    }  # fmt: skip
