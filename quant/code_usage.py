"""Which of a format's codes and block scales a tensor uses."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from binade.quant.formats import Format
from binade.quant.quantizer import check_tensor, quantize
from binade.quant.reference import to_blocks
from binade.quant.rounding import floor_log2
from binade.quant.specs import Spec
from binade.quant.transform import transform


@dataclass(frozen=True)
class Usage:
    """Which of a format's codes and block scales a tensor uses.

    codes                   the codes that occur, ascending; code_counts: how often. The padding of short blocks and
                            blocks that contain NaN or Inf are left out. -0 is a code of its own
    codes_used              how many codes occur, of the format's `codes_total`
    code_entropy_bits       -Σp·log2 p over them; at most the element's bits
    scale_exponents         floor(log2 scale) of the block scales that occur; scale_counts: of how many blocks. All-zero
                            blocks and scales of 0 or NaN are left out. For NVFP4 it is the E4M3 scale alone. Empty
                            without a block scale; min and max are then NaN
    """

    codes: np.ndarray
    code_counts: np.ndarray
    codes_total: int
    scale_exponents: np.ndarray
    scale_counts: np.ndarray

    @property
    def codes_used(self) -> int:
        return len(self.codes)

    @property
    def code_entropy_bits(self) -> float:
        if not len(self.codes):
            return math.nan
        p = self.code_counts / self.code_counts.sum()
        return max(0.0, float(-(p * np.log2(p)).sum()))

    @property
    def scale_exponent_min(self) -> float:
        return float(self.scale_exponents.min()) if len(self.scale_exponents) else math.nan

    @property
    def scale_exponent_max(self) -> float:
        return float(self.scale_exponents.max()) if len(self.scale_exponents) else math.nan


def usage(x: Tensor, fmt: str | Format | Spec, dim: int = -1, *, seed: int = 0, **options: object) -> Usage:
    """The codes and scale exponents that x takes in a format. Options as in `fake_quantize`."""
    spec = Spec.of(fmt, **options)
    x = check_tensor(x, dim, seed)
    stored = quantize(x, spec, dim, seed=seed)
    element, codes = spec.format.element, stored.unpacked_codes()
    exponents = torch.zeros(0, dtype=torch.int64, device="cpu")
    if not x.numel():
        codes = codes.reshape(-1)[:0]
    elif stored.scales is not None:
        coded = transform(x, spec, dim, seed)
        valid = to_blocks(torch.ones_like(coded, dtype=torch.bool), dim, spec.block)
        scales = spec.scaling.from_bytes(stored.scales)[:, :1]
        codes = codes[valid & scales.isfinite()]
        nonzero = (to_blocks(coded, dim, spec.block) != 0).any(-1, keepdim=True)
        exponents = floor_log2(scales[nonzero & scales.isfinite() & (scales > 0)])
    used, counts = torch.unique(codes, return_counts=True)
    scale_exponents, blocks = torch.unique(exponents, return_counts=True)
    return Usage(
        used.cpu().numpy(), counts.cpu().numpy(), 1 << element.bits, scale_exponents.cpu().numpy(), blocks.cpu().numpy()
    )
