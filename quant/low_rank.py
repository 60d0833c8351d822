"""MuonQ's rounding of a momentum: a low-rank part and what it leaves, each companded by the µ-law and rounded to INT4.

    B / ‖B‖ = P Rᵀ + E        P, R from one power iteration that starts with the R before; rank min(m, n) // 16
    Q(x) = expand(v · s)      v = round(compress(x) / s) from -7 to 7, s = max |compress(x)| / 7, read back as fp16

with compress(x) = sign(x) log(1 + 255 |x|) / log 256. s is one of each column of P and R, and one of E. Read: MuonQ
6ceb4ea, `src/optim/muonq.py` and `src/quantize.py`. It rounds after division by the Frobenius norm, which is multiplied
back here. MuonQ also divides each gradient by its norm: that is no rounding, and not done here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RANK_SHARE = 16
MU = 255.0
LARGEST = 7
SMALLEST_SCALE = 1e-8


def companded_int4(x: Tensor, dims: tuple[int, ...] = ()) -> Tensor:
    """x, float32 from -1 to 1, in companded INT4, with a scale over these axes, or over all."""
    compressed = x.sign() * torch.log1p(MU * x.abs()) / math.log1p(MU)
    scale = (compressed.abs().amax(dims, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    y = (compressed / scale).round() * scale.half().float()
    return y.sign() * torch.expm1(y.abs() * math.log1p(MU)) / MU


def muonq(x: Tensor, start: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    """(x [m, n] as MuonQ stores it, in its dtype; R [n, rank], the `start` of the next step). A random start is drawn
    with the seed."""
    norm = torch.linalg.matrix_norm(x.float()) + 1e-7
    b = x.float() / norm
    rank = min(b.shape) // RANK_SHARE
    if start is None:
        generator = torch.Generator().manual_seed(seed % 2**63)
        start = torch.randn(b.shape[1], rank, generator=generator, dtype=torch.float32).to(b.device)
    start = start.float()  # an optimizer that loads its state casts it to the dtype of the parameter
    p = torch.linalg.qr(b @ (start / (start.norm(dim=0, keepdim=True) + 1e-7))).Q
    r = b.t() @ p
    rest = companded_int4(b - p @ r.t())
    p, r = (companded_int4(factor, (0,)) if rank else factor for factor in (p, r))
    return ((rest + p @ r.t()) * norm).to(x.dtype), r
