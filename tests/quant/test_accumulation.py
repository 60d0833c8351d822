"""The additions of tensor cores, bit by bit against mmaemu, which was validated against recordings of the GPUs."""

from __future__ import annotations

import itertools

import mmaemu
import pytest
import torch
from mmaemu.model.chain import chain_gemm
from torch import Tensor

from binade.quant import fake_quantize
from binade.quant.accumulation import ACCUMULATORS, coded, matmul
from binade.quant.specs import SpecError
from tests.quant.helpers import assert_same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAMES = {E4M3: "e4m3", E5M2: "e5m2"}
PAIRS = list(itertools.product(NAMES, NAMES))
IDS = [f"{NAMES[a]}-{NAMES[b]}" for a, b in PAIRS]
EMULATED = ["hopper_fp8", "hopper_fp8_128", "ada_fp8", "ada_fp8_128"]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def inputs(rows: int, k: int, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Operands [rows, k] of several kinds. Pairs of one kind with different seeds multiply to terms of that kind."""
    x = random(rows, k, seed=seed)
    codes = torch.randint(0, 256, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    every = codes.view(dtype).float()
    exponents = torch.randint(-16, 16, (rows, k), generator=torch.Generator().manual_seed(seed))
    sign = torch.where(torch.arange(k) % 2 == 0, 1.0, -1.0) if seed % 2 else torch.ones(k)
    special = x.clone()
    special[:4, 3] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])  # E4M3 has no Inf: they become NaN
    pairs = x[:, : (k + 1) // 2].repeat_interleave(2, 1)[:, :k]
    return {
        "normal": fp8(x, dtype),
        "subnormal": fp8(x * torch.finfo(dtype).smallest_normal / 2, dtype),
        "subnormal times wide": fp8(
            x * (torch.finfo(dtype).smallest_normal if seed % 2 else torch.exp2(exponents)), dtype
        ),
        "large": fp8(x * torch.finfo(dtype).max / 2, dtype),
        "wide": fp8(x * torch.exp2(exponents), dtype),
        "every finite code": fp8(torch.where(every.isfinite(), every, 0.0), dtype),
        "cancellation": fp8(pairs * sign, dtype),  # neighboring terms differ in sign alone
        "zeros": fp8(torch.where(x.abs() < 1.5, torch.copysign(torch.zeros(()), x), x), dtype),
        "NaN and Inf": special.to(dtype),
    }


def emulated(a: Tensor, b: Tensor, name: str) -> Tensor:
    """a [m, k] · bᵀ [k, n]."""
    profile, fast = name.split("_")[0], not name.endswith("_128")
    return mmaemu.accumulate(a, b, use_fast_accum=fast, profile=profile, splitk=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("k", [32, 200, 1024, 4096])
@pytest.mark.parametrize(("dtype_a", "dtype_b"), PAIRS, ids=IDS)
@pytest.mark.parametrize("name", EMULATED)
def test_like_the_gpu(name, dtype_a, dtype_b, k):
    for kind, a in inputs(12, k, dtype_a, 1).items():
        b = inputs(10, k, dtype_b, 2)[kind]
        assert_same_bits(matmul(a, b.T, ACCUMULATORS[name]), emulated(a, b, name), kind)


@pytest.mark.filterwarnings("ignore::mmaemu.ExperimentalPresetWarning")
@pytest.mark.parametrize(("dtype_a", "dtype_b"), PAIRS, ids=IDS)
def test_more_bits(dtype_a, dtype_b):
    """With the bits of Blackwell, as MMA-Sim has them: mmaemu's arithmetic with the same numbers."""
    how = ACCUMULATORS["blackwell_fp8"]
    preset = mmaemu.Preset(
        "sm_100", nfma=how.k, frac=how.bits, frac_out=how.result_bits, min_exp=-132, late_c=False, slow_chunk=None
    )
    of = {"fmt_a": NAMES[dtype_a], "fmt_b": NAMES[dtype_b], "preset": preset}
    for kind, a in inputs(12, 1024, dtype_a, 1).items():
        b = inputs(10, 1024, dtype_b, 2)[kind]
        if a.float().isfinite().all():
            want = chain_gemm(a.view(torch.uint8), b.contiguous().view(torch.uint8), **of)
            assert_same_bits(matmul(a, b.T, how), want, kind)


def test_by_hand():
    """2^14 is followed by 255 ones. Next to it, all terms are truncated to multiples of 2^(14 - 13) = 2."""
    a = torch.ones(1, 256)
    a[0, 0] = 256
    b = torch.ones(256, 1)
    b[0, 0] = 64
    a, b = a.to(E4M3), b.to(E4M3)
    want = {
        "fp32": 16384 + 255,
        "hopper_fp8": 16384,
        "hopper_fp8_128": 16384 + 128,  # the second 128 ones are added on their own
        "ada_fp8": 16384,
        "ada_fp8_128": 16384 + 128,
        "blackwell_fp8": 16384 + 255,  # multiples of 2^(14 - 25)
    }
    assert {name: matmul(a, b, how).item() for name, how in ACCUMULATORS.items()} == want


def test_float32():
    """|error| <= k·u / (1 - k·u) · |a|·|b| in any order of additions (Higham 2002, section 3.1)."""
    a, b = (inputs(20, 2048, E4M3, seed)["wide"] for seed in (1, 2))
    y = matmul(a, b.T, ACCUMULATORS["fp32"])
    assert_same_bits(y, a.float() @ b.float().T)
    a, b, ku = a.double(), b.double().T, 2048 * 2.0**-24
    assert ((y.double() - a @ b).abs() <= ku / (1 - ku) * (a.abs() @ b.abs())).all()


class TestScales:
    @pytest.mark.parametrize("name", EMULATED)
    def test_of_tensors(self, name):
        a, b = (inputs(16, 256, E4M3, seed)["normal"] for seed in (1, 2))
        how, scales = ACCUMULATORS[name], [torch.tensor([[scale]]) for scale in (0.37, 1.9)]
        profile = {"profile": name.split("_")[0], "use_fast_accum": not how.promotion, "splitk": 1}
        want = mmaemu.scaled_mm(a, b.T, *scales, out_dtype=torch.float32, **profile)
        assert_same_bits(matmul(a, b.T, how, scales[0].expand(16, 1), scales[1].expand(1, 16)), want)

    @pytest.mark.parametrize("name", EMULATED)
    def test_of_rows(self, name):
        a, b = (inputs(16, 256, E4M3, seed)["normal"] for seed in (1, 2))
        scales = random(16, 1, seed=3).abs(), random(1, 16, seed=4).abs()
        want = emulated(a, b, name) * (scales[0] * scales[1])
        assert_same_bits(matmul(a, b.T, ACCUMULATORS[name], *scales), want)

    @pytest.mark.parametrize("k", [128, 300, 1024])
    def test_of_blocks_where_sums_are_promoted(self, k):
        """DeepGEMM: `final_accum += (scale_a * scale_b) * accum`, one fused multiplication and addition."""
        a, b = (inputs(16, k, E4M3, seed)["normal"] for seed in (1, 2))
        blocks = -(-k // 128)
        scale_a, scale_b = random(16, blocks, seed=3).abs(), random(blocks, 16, seed=4).abs()
        total = torch.zeros(16, 16)
        for i in range(blocks):
            part = slice(128 * i, 128 * (i + 1))
            sums = emulated(a[:, part].contiguous(), b[:, part].contiguous(), "hopper_fp8")
            scale = scale_a[:, i, None] * scale_b[i]
            total = (total.double() + scale.double() * sums.double()).float()
        assert_same_bits(matmul(a, b.T, ACCUMULATORS["hopper_fp8_128"], scale_a, scale_b, 128), total)

    def test_of_blocks_in_the_addition(self):
        """A power of two in the scale is the same as in the value's exponent, where the value stays normal."""
        how, k = ACCUMULATORS["blackwell_fp8"], 512
        x, y = random(16, k, seed=1), random(16, k, seed=2)
        a, b = (fp8(torch.copysign(1 + z.abs().clamp(max=0.9), z), E4M3) for z in (x, y))
        powers = [
            2.0 ** torch.randint(-5, 6, (16, k // 32), generator=torch.Generator().manual_seed(s)) for s in (3, 4)
        ]
        scaled = [
            (x.float() * scale.repeat_interleave(32, 1)).to(E4M3) for x, scale in zip((a, b), powers, strict=True)
        ]
        got = matmul(a, b.T, how, powers[0], powers[1].T, 32)
        assert_same_bits(got, matmul(scaled[0], scaled[1].T, how))

    @pytest.mark.parametrize(
        ("name", "block", "allowed"),
        [("hopper_fp8", 128, "the row"), ("hopper_fp8_128", 32, "128 values"), ("blackwell_fp8", 128, "32 values")],
    )
    def test_that_cannot_be_applied(self, name, block, allowed):
        a, b = (inputs(4, 256, E4M3, seed)["normal"] for seed in (1, 2))
        scales = torch.ones(4, 256 // block)
        with pytest.raises(ValueError, match=f"scales of {block} values.*{allowed}"):
            matmul(a, b.T, ACCUMULATORS[name], scales, scales.T, block)

    def test_float32_scales_the_sum_of_a_block(self):
        """Scales that are no powers of two do not round the operands."""
        a, b = (inputs(16, 2048, E4M3, seed)["normal"] for seed in (1, 2))
        scales, how = torch.full((16, 4), 1.1), ACCUMULATORS["fp32"]
        want = (a.float() @ b.float().T).double() * scales[0, 0].double() ** 2
        assert_same_bits(matmul(a, b.T, how, scales[:, :1], scales[:, :1].T), want.float())
        sums = [x.float() @ y.float().T for x, y in zip(a.split(512, 1), b.split(512, 1), strict=True)]
        total = torch.zeros(16, 16)
        for part in sums:
            total = (total.double() + part.double() * scales[0, 0].double() ** 2).float()
        assert_same_bits(matmul(a, b.T, how, scales, scales.T, 512), total)

    def test_of_additions_may_be_nan(self):
        a, b = (inputs(4, 64, E4M3, seed)["normal"] for seed in (1, 2))
        scales = torch.ones(4, 2)
        want = matmul(a, b.T, ACCUMULATORS["blackwell_fp8"], scales, scales.T, 32)
        scales[1, 0] = want[1] = torch.nan
        assert_same_bits(matmul(a, b.T, ACCUMULATORS["blackwell_fp8"], scales, torch.ones(2, 4), 32), want)

    def test_of_additions_are_powers_of_two(self):
        a, b = (inputs(4, 64, E4M3, seed)["normal"] for seed in (1, 2))
        with pytest.raises(ValueError, match="powers of two"):
            matmul(a, b.T, ACCUMULATORS["blackwell_fp8"], torch.full((4, 2), 1.5), torch.ones(2, 4), 32)


@pytest.mark.parametrize(
    ("spec", "blocks"),
    [
        ("fp8_e4m3", 1),
        ("fp8_e5m2", 1),
        ("fp8_e4m3(scale=none)", 1),
        ("fp8_e4m3(block=row)", 1),
        ("fp8_e4m3(block=1x128)", 3),
        ("fp8_e5m2(block=128x128, scale=pow2)", 3),
        ("mxfp8", 10),
        ("mxfp8_e5m2(block=32x32)", 10),
    ],
)
def test_coded(spec, blocks):
    x = random(200, 300)
    values, scales, run = coded(x, spec)
    assert values.dtype in NAMES and scales.shape == (200, blocks)
    whole = values.float() * scales.repeat_interleave(run, 1)[:, :300]
    torch.testing.assert_close(whole, fake_quantize(x, spec), rtol=2.0**-22, atol=0)


def test_coded_sample_with_the_scale_of_the_tensor():
    x = random(200, 300)
    whole, rows = coded(x, "fp8_e4m3"), torch.arange(0, 200, 7)
    part = coded(x[rows], "fp8_e4m3", absmax=x.abs().max())
    assert torch.equal(part[0].float(), whole[0][rows].float()) and torch.equal(part[1], whole[1][rows])


def test_only_fp8():
    for spec in ("mxfp4", "hifp8", "bf16", "fp8_e4m3(hadamard=16)"):
        with pytest.raises(SpecError, match="E4M3 or E5M2"):
            coded(random(4, 32), spec)
    with pytest.raises(TypeError, match="float32"):
        matmul(random(4, 32), random(32, 4), ACCUMULATORS["hopper_fp8"])
    a = random(4, 32).to(E4M3)
    with pytest.raises(ValueError, match=r"\(4, 32\), \(4, 32\)"):
        matmul(a, a, ACCUMULATORS["hopper_fp8"])


@pytest.mark.parametrize("name", ACCUMULATORS)
@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 3), (3, 0, 4), (3, 4, 0)])
def test_empty(name, m, k, n):
    a, b = torch.zeros(m, k).to(E4M3), torch.zeros(k, n).to(E4M3)
    assert_same_bits(matmul(a, b, ACCUMULATORS[name]), torch.zeros(m, n))


def test_rows_are_summed_in_parts(monkeypatch):
    a, b = (inputs(12, 256, E4M3, seed)["normal"] for seed in (1, 2))
    scales = [x[None].expand(2, 12).T.contiguous() for x in (random(12, seed=3).abs(), random(12, seed=4).abs())]
    arguments = (a, b.T, ACCUMULATORS["hopper_fp8_128"], scales[0], scales[1].T, 128)
    whole = matmul(*arguments)
    monkeypatch.setattr("binade.quant.accumulation.LIMIT", 12 * 32 * 5)
    assert_same_bits(matmul(*arguments), whole)
