"""GEMMs of FP8 values with the additions of a tensor core, which keep fewer bits than float32.

One addition takes the accumulator and `k` products:

    1. All terms are aligned to the largest exponent and truncated toward zero to `bits` fraction bits. The exponent of
       a product is the sum of its factors' exponents; a subnormal factor has that of the smallest normal number.
    2. Their sum is exact. It is truncated toward zero to `result_bits` fraction bits. The first accumulator is +0.

Scales of a tensor or a row multiply the result. Scales of blocks multiply the partial sums that are promoted to float32
(DeepSeek-V3), or the products of each addition (MX formats on Blackwell). All of this is exact in float64. cuBLAS may
also split k into several sums, which is not modelled. With torch's matmul, scales multiply the sum of each block.

Sources: mmaemu 0.1.0 and microsoft/MMA-Sim, which implement arXiv 2512.07004 and arXiv 2511.10909;
deepseek-ai/DeepGEMM, sm90_fp8_gemm_1d2d.cuh, for promotion with scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from binade.quant.blocks import GROUP, look
from binade.quant.elements import E4M3, E5M2
from binade.quant.reference import from_blocks
from binade.quant.specs import Spec, SpecError

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
LIMIT = 1 << 20  # products that are in memory at once
TINY = 2.0**-900  # below every term


@dataclass(frozen=True, kw_only=True)
class Accumulator:
    """How a GEMM adds its products.

    bits         fraction bits of the aligned terms; 0: torch's matmul in float32, block by block
    result_bits  fraction bits of their sum
    k            products in one addition
    promotion    products after which the partial sum is added to a float32 sum and starts at 0 again; 0: never
    scaled       whether an addition takes a power-of-two scale for its k values of each operand
    """

    title: str
    source: str
    bits: int = 0
    result_bits: int = 0
    k: int = 1
    promotion: int = 0
    scaled: bool = False


_HOPPER = Accumulator(
    title="Hopper", source="mmaemu, validated on an H100 PCIe; MMA-Sim, wgmma", bits=13, result_bits=13, k=32
)
_ADA = Accumulator(title="Ada", source="mmaemu, validated on an RTX 4060; MMA-Sim", bits=13, result_bits=13, k=16)
ACCUMULATORS = {
    "fp32": Accumulator(title="float32", source="torch.matmul"),
    "hopper_fp8": _HOPPER,
    "hopper_fp8_128": replace(_HOPPER, title="Hopper (promotion every 128)", promotion=128),
    "ada_fp8": _ADA,
    "ada_fp8_128": replace(_ADA, title="Ada (promotion every 128)", promotion=128),
    "blackwell_fp8": Accumulator(
        title="Blackwell (B200)", source="MMA-Sim, tcgen05.mma", bits=25, result_bits=23, k=32, scaled=True
    ),
}
"""The accumulators by name. The first is the one of Binade's own GEMMs."""


def coded(x: Tensor, fmt: str | Spec, absmax: Tensor | None = None) -> tuple[Tensor, Tensor, int]:
    """x [rows, k] rounded to a format, blocks along k: (values [rows, k] in a float8 dtype, scales [rows, blocks]
    float32, the number of values that share a scale).

    absmax: of the tensor from which x is a sample, for a format with one scale per tensor. Raises SpecError unless the
    elements are E4M3 or E5M2, neither rotated nor centered.
    """
    spec = Spec.of(fmt)
    if spec.format.element not in DTYPES or spec.transforms:
        raise SpecError(
            f"accumulation is not modelled for {spec}: expected E4M3 or E5M2 elements, neither rotated nor centered"
        )
    rounded = look(x, spec, absmax=absmax)
    block = GROUP if not spec.has_blocks else spec.block
    values = from_blocks(rounded.values, x, -1, block).to(DTYPES[spec.format.element])
    scales = from_blocks(rounded.scale.expand(rounded.values.shape), x, -1, block).float()
    run = spec.run(x.shape[1]) or x.shape[1]
    return values, scales[:, ::run], run


def matmul(
    a: Tensor,
    b: Tensor,
    accumulator: Accumulator,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    block: int = 0,
) -> Tensor:
    """a [m, k] · b [k, n] -> float32 [m, n], added as the accumulator says.

    a, b: float8_e4m3fn or float8_e5m2. scale_a [m, blocks], scale_b [blocks, n]: float32, what the values are
    multiplied by, one for every `block` values along k; by default one for all of k. NaN and Inf propagate as in
    IEEE 754.

    Raises TypeError for another dtype, and ValueError for shapes that do not fit or scales that the accumulator cannot
    apply.
    """
    for x in (a, b):
        if x.dtype not in DTYPES.values():
            raise TypeError(f"expected values in float8_e4m3fn or float8_e5m2, not {x.dtype}")
    (m, k), n, how = a.shape, b.shape[1], accumulator
    block = min(block, k) or max(k, 1)
    blocks = -(-k // block)
    scale_a = torch.ones(m, blocks, dtype=torch.float32, device=a.device) if scale_a is None else scale_a
    scale_b = torch.ones(blocks, n, dtype=torch.float32, device=a.device) if scale_b is None else scale_b
    if (len(b), scale_a.shape, scale_b.shape) != (k, (m, blocks), (blocks, n)):
        shapes = ", ".join(str(tuple(x.shape)) for x in (a, b, scale_a, scale_b))
        raise ValueError(f"the shapes of a, b and their scales do not fit with a block of {block}: {shapes}")
    result = torch.zeros(m, n, dtype=torch.float32, device=a.device)
    if not k:
        return result
    if not how.bits:
        blocks_a, blocks_b = torch.split(a.float(), block, 1), torch.split(b.float(), block)
        for x, y, scale_x, scale_y in zip(blocks_a, blocks_b, scale_a.double().T, scale_b.double(), strict=True):
            result = (result.double() + (x @ y).double() * (scale_x[:, None] * scale_y)).float()
        return result
    whole_a, whole_b = (scales.repeat_interleave(block, 1)[:, :k] for scales in (scale_a, scale_b.T))
    scales = torch.cat((whole_a, whole_b))
    powers = (scales.frexp().mantissa == 0.5) | ~scales.isfinite()
    of_terms = how.scaled and block == how.k and bool(powers.all())
    of_sums = block == how.promotion
    if block < k and not (of_terms or of_sums):
        raise ValueError(
            f"{how.title} cannot apply scales of {block} values: expected a scale of the tensor or the row"
            + f", or of {how.promotion} values" * bool(how.promotion)
            + f", or powers of two of {how.k} values" * how.scaled
        )
    rows = max(1, LIMIT // max(1, n * how.k))
    if m > rows:
        pairs = zip(torch.split(a, rows), torch.split(scale_a, rows), strict=True)
        return torch.cat([matmul(part, b, how, scales, scale_b, block) for part, scales in pairs])
    left, right = _factors(a), _factors(b.T)
    if of_terms:
        left, right = left * whole_a, right * whole_b
    length = how.promotion or k
    total = torch.zeros(m, n, dtype=torch.float64, device=a.device)
    parts = zip(*(torch.split(factors, length, -1) for factors in (left, right)), strict=True)
    for number, (x, y) in enumerate(parts):
        partial = _sum(x, y, how)
        if of_sums:
            partial = partial * (scale_a[:, number, None] * scale_b[number])
        total = (total + partial).float().double()
    return total.float() if of_terms or of_sums else total.float() * (scale_a * scale_b)


def _power(x: Tensor) -> Tensor:
    """2^floor(log2|x|) of float64; 0 for 0, Inf and NaN."""
    power = (x.view(torch.int64) & (0x7FF << 52)).view(torch.float64)
    return torch.where(power < torch.inf, power, 0.0)


def _factors(x: Tensor) -> Tensor:
    """float8 x [rows, k] -> float64 [2, rows, k]: its values, and the powers of two of their exponents, 0 for 0."""
    values = x.double()
    powers = _power(values).clamp_min(torch.finfo(x.dtype).smallest_normal)
    return torch.stack((values, torch.where(values != 0, powers, 0.0)))


def _sum(a: Tensor, b: Tensor, how: Accumulator) -> Tensor:
    """The sums of products of two operands' `_factors` [2, m, k] and [2, n, k], from +0: float64 [m, n]."""
    total = a.new_zeros(a.shape[1], b.shape[1])
    for x, y in zip(torch.split(a, how.k, -1), torch.split(b, how.k, -1), strict=True):
        terms, powers = x[:, :, None] * y[:, None]  # [m, n, k of one addition]
        unit = torch.maximum(powers.amax(-1), _power(total)).clamp_min(TINY) * 2.0**-how.bits
        total = ((terms / unit[..., None]).trunc().sum(-1) + (total / unit).trunc()) * unit
        total = (total.view(torch.int64) & -(1 << (52 - how.result_bits))).view(torch.float64)
    return total
