"""What a quantized weight is stored as, and the values that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from binade.quant.codes import decode_table, unpack
from binade.quant.elements import E2M1, E4M3, E5M2, E8M0, Element
from binade.quant.identification.readings import spread
from binade.quant.options import ROW, TENSOR, Block

FLOAT8 = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}
NVFP4_BLOCK, MX_BLOCK = Block(1, 16), Block(1, 32)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the codes of a word are, as autoawq's packing_utils says


class LayoutError(ValueError):
    """The tensors of a weight do not fit together. The message says which."""


@dataclass(frozen=True)
class StoredWeight:
    """The tensors that one weight is stored as.

    names     of its tensors, by what they are: codes, scale, zero …
    sizes     their shapes
    tensor    reads one of them
    settings  of the weight: see `rules.settings_of`
    facts     what the header of the file says of this weight (torchao)
    """

    names: Mapping[str, str]
    sizes: Mapping[str, tuple[int, ...]]
    tensor: Callable[[str], Tensor]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]

    def setting(self, name: str) -> Any:
        return self.settings.get(name)

    def whole(self, name: str) -> int:
        """A setting that must be a positive integer."""
        value = self.setting(name)
        if type(value) is not int or value < 1:
            raise LayoutError(f"{self.names['codes']} needs {name} in quantization_config, which is {value!r}")
        return value


@dataclass(frozen=True)
class Decoded:
    """The values of a weight.

    values   float32 [..., out, in]
    scales   of its blocks, without the factor of the whole tensor, float32; scale times code is the value
    element  of the codes, block: the values that share a scale; None if no format here has such codes or blocks
    """

    values: Tensor
    scales: Tensor
    element: Element | None = None
    block: Block | None = None


def by(size: Sequence[int]) -> str:
    return " x ".join(map(str, size)) or "a scalar"


def floats(stored: StoredWeight, block: Block | None = None) -> Decoded:
    """FP8, one code for each value."""
    codes = stored.tensor("codes")
    return scaled(stored, codes.float(), FLOAT8.get(codes.dtype), block)


def integers(stored: StoredWeight) -> Decoded:
    """Integers of 8 bits, one code for each value."""
    return scaled(stored, stored.tensor("codes").float())


def fp4(stored: StoredWeight, block: Block) -> Decoded:
    """E2M1, two codes to a byte, the lower half first; [..., groups, bytes] as in gpt-oss is one axis."""
    codes = stored.tensor("codes").view(torch.uint8)
    codes = codes.flatten(-2) if codes.dim() == 4 else codes
    values = decode_table(E2M1)[unpack(codes.reshape(-1), 4)].reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    return scaled(stored, values, E2M1, block)


def nvfp4(stored: StoredWeight) -> Decoded:
    return fp4(stored, NVFP4_BLOCK)


def mxfp4(stored: StoredWeight) -> Decoded:
    return fp4(stored, MX_BLOCK)


def mxfp8(stored: StoredWeight) -> Decoded:
    return floats(stored, MX_BLOCK)


def packed(stored: StoredWeight) -> Decoded:
    """Integers of compressed-tensors, packed without gaps into 32-bit words along the last axis."""
    columns, bits = packed_shape(stored)[-1], packed_bits(stored)
    offset = 1 << (bits - 1)
    codes = (dense(stored.tensor("codes"), bits, columns) - offset).float()
    zero = None
    if "zero" in stored.sizes:
        words = stored.tensor("zero").transpose(-2, -1).contiguous()
        zero = (dense(words, bits, codes.shape[-2]) - offset).float().mT
    return scaled(stored, codes, zero=zero)


def packed_shape(stored: StoredWeight) -> tuple[int, ...]:
    shape = stored.tensor("shape")
    if shape.dtype != torch.int64 or not 2 <= shape.numel() <= 3:
        raise LayoutError(f"{stored.names['shape']} is not the shape of a weight")
    size = tuple(shape.tolist())
    rows, words = size[:-1], stored.sizes["codes"][-1]
    if rows != stored.sizes["codes"][:-1] or not 0 < size[-1] <= 32 * words:
        raise LayoutError(f"{stored.names['shape']} says {by(size)}, which {stored.names['codes']} does not hold")
    return size


def packed_bits(stored: StoredWeight) -> int:
    """Of a code. Raises LayoutError if the words of a line hold more or fewer codes than it has values."""
    words, columns = stored.sizes["codes"][-1], packed_shape(stored)[-1]
    bits = stored.setting("num_bits") or words * 32 // columns
    if type(bits) is not int or not 1 <= bits <= 8:
        raise LayoutError(f"{stored.names['codes']} has codes of {bits!r} bits: expected 1 to 8")
    if words != -(-columns * bits // 32):
        raise LayoutError(
            f"{stored.names['codes']} has {words} words in a line of {columns} codes, but {bits} bits need "
            f"{-(-columns * bits // 32)}"
        )
    return bits


def awq(stored: StoredWeight) -> Decoded:
    """AutoAWQ's layout for GEMMs: [in, out], eight codes of 4 bits to a word in AWQ_ORDER."""
    version = stored.setting("version") or stored.setting("format") or "gemm"  # as transformers' AwqConfig reads it
    if stored.setting("bits") != 4 or str(version).lower() != "gemm":
        raise LayoutError(f"{stored.names['codes']} is not in the layout gemm with 4 bits, the only one that is read")
    codes, zeros = (_awq_order(stored.tensor(name)) for name in ("codes", "zero"))
    return _grouped(stored, codes, zeros)


def _awq_order(words: Tensor) -> Tensor:
    codes = dense(words, 4, 8 * words.shape[-1])
    return codes.reshape(len(codes), -1, 8)[..., list(AWQ_ORDER)].reshape(codes.shape)


def gptq(stored: StoredWeight) -> Decoded:
    """[in, out], codes packed without gaps along the inputs, zeros along the outputs. In the format `gptq`, one less
    than the zero is stored. Each input may belong to any group."""
    bits = stored.whole("bits")
    if bits not in (2, 3, 4, 8):
        raise LayoutError(f"{stored.names['codes']} has {bits} bits: expected 2, 3, 4 or 8")
    rows, inputs = stored.tensor("codes").mT.contiguous(), gptq_shape(stored)[1]
    codes = dense(rows, bits, inputs).mT
    zeros = dense(stored.tensor("zero"), bits, codes.shape[1])
    if (stored.setting("checkpoint_format") or stored.setting("format")) != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return _grouped(stored, codes, zeros)


def gptq_shape(stored: StoredWeight) -> tuple[int, ...]:
    words, outputs = stored.sizes["codes"]
    return outputs, words * 32 // stored.whole("bits")


def _grouped(stored: StoredWeight, codes: Tensor, zeros: Tensor) -> Decoded:
    """codes [in, out], zeros and scales [groups, out]."""
    scales, size = stored.tensor("scale").float(), stored.setting("group_size")
    if "group" in stored.sizes:
        group = stored.tensor("group").long()
    else:
        group = torch.arange(len(codes)) // (min(size, len(codes)) if type(size) is int and size > 0 else len(codes))
    if zeros.shape != scales.shape or scales.shape[1] != codes.shape[1] or group.shape != codes.shape[:1]:
        raise LayoutError(
            f"{stored.names['scale']} is {by(scales.shape)} and the zeros are {by(zeros.shape)}, which does not fit "
            f"{by(codes.shape)} codes"
        )
    groups = int(group.max()) + 1
    if int(group.min()) < 0 or groups > len(scales) or ("group" not in stored.sizes and groups < len(scales)):
        raise LayoutError(f"{stored.names['scale']} has {len(scales)} groups, but the inputs belong to {groups}")
    length = size if type(size) is int and size > 0 else len(codes)
    in_order = torch.equal(group, torch.arange(len(codes)) // length)
    block = (ROW if length != size else Block(1, length)) if in_order else None
    return Decoded(((codes - zeros[group]) * scales[group]).mT.contiguous(), scales, block=block)


def dense(words: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes in the last axis of int32 words that codes fill without gaps, lowest bits first: int64.
    Raises LayoutError."""
    if words.dtype != torch.int32 or words.shape[-1] * 32 < count * bits:
        raise LayoutError(f"{words.shape[-1]} words of {words.dtype} cannot hold {count} codes of {bits} bits")
    if 32 % bits == 0:
        codes = words[..., None] >> torch.arange(0, 32, bits, dtype=torch.int32) & (1 << bits) - 1
        return codes.reshape(*words.shape[:-1], -1)[..., :count].long()
    stream = (words[..., None] >> torch.arange(32, dtype=torch.int32) & 1).reshape(*words.shape[:-1], -1)
    parts = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return (parts << torch.arange(bits, dtype=torch.int32)).sum(-1)


def scaled(
    stored: StoredWeight,
    codes: Tensor,
    element: Element | None = None,
    block: Block | None = None,
    zero: Tensor | None = None,
) -> Decoded:
    """(codes - zero) times scale, codes float32 [..., out, in], which are overwritten. The scale is multiplied by a
    factor of the tensor, or divided by it, first. block: what shares a scale; None: as the settings or the shapes
    say."""
    scale = _factors(stored.tensor("scale"))
    declared = lengths = _lengths(stored, codes, block)
    if stored.facts.get("is_swizzled_scales") and block:
        scale = unswizzled(stored, scale, (codes.shape[-2], -(-codes.shape[-1] // lengths[1])) if lengths else ())
    if scale.numel() == 1:
        scale, lengths = scale.reshape([1] * codes.dim()), (codes.shape[-2], codes.shape[-1])
    elif scale.dim() == 1 and codes.dim() == 2:
        scale = scale[:, None]
    whole = spread(scale, tuple(codes.shape), lengths)
    if whole is None:
        expected = [-(-n // length) for n, length in zip(codes.shape[-2:], lengths, strict=True)] if lengths else []
        raise LayoutError(unfit(stored, scale.shape, (*codes.shape[:-2], *expected)))
    if "zero" in stored.sizes and zero is None:
        zero = stored.tensor("zero").float()
    if zero is not None:
        zeros = spread(
            zero.reshape(scale.shape) if zero.numel() == scale.numel() else zero, tuple(codes.shape), lengths
        )
        if zeros is None:
            raise LayoutError(unfit(stored, zero.shape, scale.shape, "zero"))
        codes = codes - zeros
    for name in ("outer", "divisor"):
        if name in stored.sizes:
            outer = stored.tensor(name).float()
            outer = outer.reshape(-1, *[1] * (codes.dim() - 1)) if outer.numel() > 1 else outer.reshape(())
            whole = whole * outer if name == "outer" else whole / outer
    values = codes.mul_(whole)
    if "inputs" in stored.sizes:  # what multiplies the input multiplies the weight: its values are on no grid
        inputs = stored.tensor("inputs").float().reshape(-1)
        if inputs.shape != codes.shape[-1:]:
            raise LayoutError(unfit(stored, inputs.shape, codes.shape[-1:], "inputs"))
        return Decoded(values.mul_(inputs), scale)
    return Decoded(values, scale, element, block or _block(scale, codes, declared))


def _factors(scale: Tensor) -> Tensor:
    """Stored scales as float32: bytes are E8M0."""
    return decode_table(E8M0)[scale.long()] if scale.dtype == torch.uint8 else scale.float()


def _lengths(stored: StoredWeight, codes: Tensor, block: Block | None) -> tuple[int, int] | None:
    """How many rows and columns share a scale; None if only the shapes say it."""
    tile = stored.setting("weight_block_size") or stored.setting("block_structure")
    if block and block.rows and block.columns:
        return block.rows, block.columns
    if isinstance(tile, list) and [type(size) for size in tile] == [int, int] and min(tile) > 0:
        return tile[0], tile[1]
    group = stored.setting("group_size")
    return (1, group) if type(group) is int and group > 0 else None


def _block(scale: Tensor, codes: Tensor, declared: tuple[int, int] | None) -> Block:
    """What shares a scale: by the settings, where a weight may be smaller than a block, else by the shapes."""
    rows, columns = (-(-n // count) for n, count in zip(codes.shape[-2:], scale.shape[-2:], strict=True))
    if declared and rows <= declared[0] and columns <= declared[1]:
        return Block(*declared)
    if columns == codes.shape[-1]:
        return TENSOR if scale.numel() == 1 else ROW if rows == 1 else Block(rows, columns)
    return Block(rows, columns)


def unswizzled(stored: StoredWeight, scale: Tensor, size: tuple[int, ...]) -> Tensor:
    """Scales in the order of cuBLAS's blocked layout as [rows, columns]: tiles of 128 x 4, each as 32 x 4 x 4."""
    if scale.dim() != 2 or len(size) != 2:
        raise LayoutError(f"{stored.names['scale']} is swizzled and has {scale.dim()} axes: expected 2")
    rows, columns = -(-size[0] // 128), -(-size[1] // 4)
    if scale.numel() != rows * columns * 512:
        raise LayoutError(unfit(stored, scale.shape, (128 * rows, 4 * columns)))
    tiles = scale.reshape(rows, columns, 32, 4, 4).transpose(2, 3).reshape(rows, columns, 128, 4)
    return tiles.transpose(1, 2).reshape(128 * rows, 4 * columns)[: size[0], : size[1]]


def unfit(stored: StoredWeight, size: Sequence[int], expected: Sequence[int], part: str = "scale") -> str:
    return f"{stored.names[part]} is {by(size)}: expected {by(expected)}"
