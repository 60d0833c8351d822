"""The public door to the formats: fake_quantize, quantize, Quantized. Checks every option, then picks a backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

from binade.quant import reference
from binade.quant.backends import cpu
from binade.quant.formats import E4M3, FORMATS, Element, Format, Overflow, Rounding, ScaleRule
from binade.quant.reference import Plan

Backend = Literal["auto", "triton", "torch"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def plan(
    fmt: str | Format,
    *,
    scale_rule: str | None = None,
    rounding: Rounding | None = None,
    overflow: Overflow | None = None,
    block_size: int | None = None,
    seed: int = 0,
) -> Plan:
    """A format with every option decided; None takes the format's own default.

    scale_rule  block formats: floor (default), ceil, even, rceil; tensor-scaled formats: amax (default), none;
                hifp8: none (default), pow2 (a power of two for the tensor, see `reference.tensor_pow2_scale`)
    rounding    nearest (ties to even), half_away, stochastic (by `seed`)
    overflow    saturate, or inf where the element has infinities
    block_size  values that share a scale, for formats that have one

    Raises UnknownFormatError or ValueError naming what was wrong and what is allowed, TypeError for a non-integer
    size or seed.
    """
    if not isinstance(fmt, (str, Format)):
        raise TypeError(f"a format is a name in FORMATS or a Format, not {fmt!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an integer, not {type(seed).__name__}")
    fmt = FORMATS[fmt] if isinstance(fmt, str) else fmt
    scale_rule = scale_rule or fmt.scale_rules[0]
    _check("scale_rule", scale_rule, fmt.scale_rules, fmt)
    rounding = rounding or fmt.rounding
    _check("rounding", rounding, get_args(Rounding), fmt)
    overflow = overflow or fmt.overflow
    _check("overflow", overflow, get_args(Overflow) if fmt.element.has_infinity else ("saturate",), fmt)
    if block_size is not None:
        if not isinstance(block_size, int) or isinstance(block_size, bool):
            raise TypeError(f"block_size must be an integer, not {type(block_size).__name__}")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: it must be at least 1")
        if fmt.block_size is None:
            raise ValueError(f"block_size does not apply to {fmt.name}: it has no block scale")
    return Plan(fmt, block_size or fmt.block_size, scale_rule, rounding, overflow, seed)


def _check(option: str, value: str, allowed: tuple[str, ...], fmt: Format) -> None:
    if value not in allowed:
        raise ValueError(f"{option} {value!r} is not possible for {fmt.name}: {', '.join(allowed)}")


def check_tensor(x: Tensor, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"a torch.Tensor is needed, not {type(x).__name__}")
    if x.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"dtype {str(x.dtype).removeprefix('torch.')} cannot be quantized: {allowed}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"dim must be an integer, not {type(dim).__name__}")
    rank = max(x.dim(), 1)
    if not -rank <= dim < rank:
        raise ValueError(f"dim {dim} is out of range for a tensor of {x.dim()} axes: {-rank} to {rank - 1}")


def resolve_backend(backend: str, x: Tensor) -> str:
    """ "triton" or "torch": auto is Triton for CUDA tensors, torch for others."""
    if backend not in get_args(Backend):
        raise ValueError(f"backend {backend!r} is unknown: {', '.join(get_args(Backend))}")
    return ("triton" if x.is_cuda else "torch") if backend == "auto" else backend


def tensor_absmax(x: Tensor) -> Tensor:
    """The largest magnitude as a float32 scalar tensor; NaN if any element is NaN, 0 for an empty tensor."""
    if not x.numel():
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float().abs()  # never -0, which would pass its sign on


def apply(
    x: Tensor, plan: Plan, dim: int = -1, backend: str = "auto", want_scales: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(y, scales): quantize-dequantize by a plan. scales is None unless wanted and the format has a block scale:
    then float32, shaped [outer, blocks along dim, inner] over x's axes before and after `dim`.
    """
    check_tensor(x, dim)
    chosen = resolve_backend(backend, x)
    x = x.detach()
    has_blocks = plan.block_size is not None
    if not x.numel():
        return torch.empty_like(x), torch.empty(0, device=x.device) if want_scales and has_blocks else None
    if plan.scale_rule == "pow2":
        return _by_tensor_pow2(x, plan, dim, chosen), None
    at = dim % x.dim() if x.dim() else 0
    outer, inner = x.shape[:at].numel(), x.shape[at + 1 :].numel()
    whole = plan.scale_rule in ("amax", "nvfp4")
    absmax = tensor_absmax(x) if whole else torch.zeros((), dtype=torch.float32, device=x.device)
    if chosen == "triton":
        from binade.quant.backends import triton_kernels as kernels  # triton is imported when first asked for

        y, scales = kernels.quantize_dequantize(x.contiguous(), plan, dim, absmax, want_scales)
    elif x.device.type == "cpu":
        y, scales = cpu.quantize_dequantize(x, plan, dim, absmax, want_scales)
    else:
        y, scales = reference.quantize_dequantize(x, plan, dim, absmax)
        if has_blocks:  # groups come with the axis last
            scales = scales.reshape(outer, inner, -1).transpose(1, 2)
    if not (want_scales and has_blocks):
        return y, None
    return y, scales.reshape(outer, -1, inner)


def _by_tensor_pow2(x: Tensor, plan: Plan, dim: int, backend: str) -> Tensor:
    """Scaled exactly, rounded as without a scale by any backend, scaled back."""
    exponent, scale = reference.tensor_pow2_scale(tensor_absmax(x), plan.format.element)
    scaled = reference.times_pow2(x.float(), -exponent)
    return (apply(scaled, replace(plan, scale_rule="none"), dim, backend)[0] * scale).to(x.dtype)


class _StraightThrough(torch.autograd.Function):
    """fake_quantize whose gradient is the identity."""

    @staticmethod
    def forward(ctx, x, plan, dim, backend):
        return apply(x, plan, dim, backend)[0]

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


def fake_quantize(
    x: Tensor,
    fmt: str | Format,
    dim: int = -1,
    *,
    scale_rule: str | None = None,
    rounding: Rounding | None = None,
    overflow: Overflow | None = None,
    block_size: int | None = None,
    seed: int = 0,
    backend: str = "auto",
) -> Tensor:
    """x rounded to a format and back: same shape, dtype and device, the gradient passed straight through.

    x         float32, bfloat16 or float16; any shape and strides, empty and 0-dim included
    fmt       a name in FORMATS, or a Format
    dim       the axis that blocks lie along: the one the tensor is contracted over. Its last block may be short
    options   see `plan`
    backend   auto (Triton for CUDA tensors, torch for CPU), triton, torch: the same bits from each

    NaN stays NaN. In a block format one NaN or Inf makes its whole block NaN, in a tensor-scaled one the whole
    tensor. Elsewhere Inf saturates (or stays, by `overflow`). -0 is kept where the format has it. The result is
    rounded to x's dtype, where a value beyond that dtype becomes Inf (float16 under a large block scale).

    Raises TypeError (not a floating tensor), ValueError (unknown format, impossible option, dim out of range).
    """
    decided = plan(fmt, scale_rule=scale_rule, rounding=rounding, overflow=overflow, block_size=block_size, seed=seed)
    if x.requires_grad if isinstance(x, Tensor) else False:
        return _StraightThrough.apply(x, decided, dim, backend)
    return apply(x, decided, dim, backend)[0]


@dataclass(frozen=True)
class Quantized:
    """A tensor in a format's own bits.

    codes       uint8 (uint16 for 16-bit formats): the values with `dim` moved last, padded to whole blocks, in
                row-major order; two to a byte (low nibble first) for 4-bit formats, four to three bytes (lowest bits
                first) for 6-bit ones
    scales      uint8: E8M0 codes (2^(code - 127), 255 = NaN) for MX; E4M3 codes for NVFP4; None without a block scale
    absmax      float32 scalar: the tensor's largest magnitude, which its tensor scale follows from; None without one
    """

    plan: Plan
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    codes: Tensor
    scales: Tensor | None
    absmax: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes held: packed codes, block scales and the tensor scale (4), padding of short blocks included."""
        scales = 0 if self.scales is None else self.scales.numel()
        return self.codes.numel() * self.codes.element_size() + scales + (0 if self.absmax is None else 4)

    def unpacked_codes(self) -> Tensor:
        """int64 codes, one per value, as [groups, block]."""
        bits = self.plan.format.element.bits
        codes = self.codes.long()
        if bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), -1).reshape(-1)
        elif bits == 6:
            a, b, c = codes.reshape(-1, 3).unbind(-1)
            word = a | b << 8 | c << 16
            codes = torch.stack([word >> (6 * i) & 63 for i in range(4)], -1).reshape(-1)
        block = self.plan.block_size or max(self.shape[self.dim] if self.shape else 1, 1)
        groups = (self.scales.numel() if self.scales is not None else None) or -(-self.shape.numel() // block)
        return codes[: groups * block].reshape(groups, block)

    def dequantize(self) -> Tensor:
        """The values, in the original shape and dtype: bit for bit what fake_quantize returns."""
        if not self.shape.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        values = decode_table(self.plan.format.element).to(self.codes.device)[self.unpacked_codes()]
        if self.plan.scale_rule == "amax":
            values = values / reference.tensor_scale(self.absmax, self.plan.format)
        elif self.plan.scale_rule == "pow2":
            values = values * reference.tensor_pow2_scale(self.absmax, self.plan.format.element)[1]
        elif self.plan.scale_rule == "nvfp4":
            scale = decode_table(E4M3).to(self.codes.device)[self.scales.long()]
            values = values * scale.reshape(-1, 1) * reference.nvfp4_decode_scale(self.absmax)
        elif self.scales is not None:
            exponent = self.scales.to(torch.int32) - reference.E8M0_BIAS
            scale = torch.where(self.scales == 255, torch.nan, reference.pow2(exponent.clamp(max=127)))
            values = values * scale.reshape(-1, 1)
        like = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return reference.from_blocks(values.to(self.dtype), like, self.dim)


def quantize(
    x: Tensor,
    fmt: str | Format,
    dim: int = -1,
    *,
    scale_rule: str | None = None,
    rounding: Rounding | None = None,
    overflow: Overflow | None = None,
    block_size: int | None = None,
    seed: int = 0,
) -> Quantized:
    """x in the format's codes and scales. Arguments and errors as fake_quantize."""
    decided = plan(fmt, scale_rule=scale_rule, rounding=rounding, overflow=overflow, block_size=block_size, seed=seed)
    check_tensor(x, dim)
    x = x.detach()
    dim = dim % x.dim() if x.dim() else 0
    element = decided.format.element
    absmax = tensor_absmax(x)
    blocks = reference.to_blocks(x, dim, decided.block_size).float()
    u = None
    if decided.rounding == "stochastic":
        u = reference.to_blocks(reference.noise(x.numel(), seed, x.device).reshape(x.shape), dim, decided.block_size)
    values, scales, _ = reference.quantize_blocks(blocks, decided, absmax, u)
    if decided.scale_rule in get_args(ScaleRule):
        # A block of scale NaN keeps no codes of its own: zeros.
        values = torch.where(scales.isnan(), 0.0, values)
        exponent = reference.floor_log2(scales) + reference.E8M0_BIAS
        scales = torch.where(scales.isnan(), 255, exponent).to(torch.uint8).reshape(-1)
    elif decided.scale_rule == "nvfp4":
        values = torch.where(values.isnan(), 0.0, values)
        scales = encode(scales.reshape(-1), E4M3).to(torch.uint8)
    else:
        scales = None
    keeps_absmax = decided.scale_rule in ("amax", "nvfp4", "pow2")
    codes = _pack(encode(values.reshape(-1), element), element.bits)
    return Quantized(decided, dim, x.shape, x.dtype, codes, scales, absmax if keeps_absmax else None)


@lru_cache(maxsize=32)
def decode_table(element: Element) -> Tensor:
    """The value of each code, float32 [2^bits]."""
    return torch.tensor([element.values[code] for code in range(1 << element.bits)], dtype=torch.float32)


@lru_cache(maxsize=32)
def _encode_table(element: Element) -> tuple[Tensor, Tensor, int]:
    """Distinct values ascending, infinities included, the code of each, and the code of NaN (-1 if none)."""
    code_of: dict[float, int] = {}
    nan = -1
    for code, value in element.values.items():
        if value != value:
            nan = code if nan < 0 else nan
        else:
            code_of.setdefault(value, code)  # +0 comes before -0
    values = sorted(code_of)
    return torch.tensor(values, dtype=torch.float32), torch.tensor([code_of[v] for v in values]), nan


def encode(values: Tensor, element: Element) -> Tensor:
    """int64 codes of float32 values that lie on the element's grid. -0 gets its own code where there is one."""
    table, codes, nan = _encode_table(element)
    table, codes = table.to(values.device), codes.to(values.device)
    code = codes[torch.searchsorted(table, values.contiguous()).clamp(max=len(table) - 1)]
    if element.signed_zero:
        code = torch.where((values == 0) & values.signbit(), 1 << (element.bits - 1), code)
    return torch.where(values.isnan(), nan, code)


def _pack(codes: Tensor, bits: int) -> Tensor:
    if bits == 16:
        return codes.to(torch.uint16)
    if bits == 8:
        return codes.to(torch.uint8)
    per_word = 2 if bits == 4 else 4
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % per_word)).reshape(-1, per_word)
    word = sum(codes[:, i] << (bits * i) for i in range(per_word))
    return torch.stack([word >> (8 * i) & 255 for i in range(bits * per_word // 8)], -1).reshape(-1).to(torch.uint8)
