"""Inside attention: probabilities and scores [sequences, heads, queries, keys], head by head.

For a large tensor, only every n-th query is read; each table comes with n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade import quant
from binade.app.questions.shared.rounded import MAX_SIDE
from binade.quant.specs import Spec

LIMIT = 1 << 23  # values that are read
NAMES = ("attention_probs", "attention_scores")


@dataclass(frozen=True)
class Heads:
    """A tensor [sequences, heads, queries, keys], thinned to every `every`-th query."""

    x: Tensor
    every: int

    @property
    def note(self) -> str:
        return "" if self.every == 1 else f"one query in {self.every}"


def heads(x: Tensor) -> Heads | None:
    """The heads of a tensor; None if it does not have these four axes."""
    if x.dim() != 4 or not x.numel():
        return None
    every = max(1, -(-x.numel() // LIMIT))
    return Heads(x[:, :, ::every], min(every, x.shape[2]))


def entropy(p: Heads) -> pd.DataFrame:
    """Return a table by head: columns head (from 1), entropy (bits, −Σp·log2 p over the keys, mean over queries),
    lowest and highest (of a query), uniform (bits, if every key that a query may see had the same share: causal)."""
    queries = torch.arange(p.x.shape[2]) * p.every
    uniform = float(torch.log2(queries + 1.0).mean())
    rows = []
    for number, x in enumerate(p.x.unbind(1), 1):
        own = x.double()
        bits = pd.Series((-torch.xlogy(own, own).sum(-1) / math.log(2)).flatten())
        bits = bits[np.isfinite(bits)]
        rows.append((number, bits.mean(), bits.min(), bits.max(), uniform))
    return pd.DataFrame(rows, columns=["head", "entropy", "lowest", "highest", "uniform"])


def flushed(p: Heads, fmt: str | Spec, dim: int = -1) -> pd.DataFrame:
    """Return a table by head: columns head, flush_to_zero (of the nonzero values, in this format along dim), mass (the
    share of all probability that the flushed values held)."""
    q = quant.fake_quantize(p.x.contiguous(), fmt, dim)
    rows = []
    for number, (x, y) in enumerate(zip(p.x.unbind(1), q.unbind(1), strict=True), 1):
        gone = (x != 0) & (y == 0)
        nonzero, total = int(x.count_nonzero()), float(x.double().nansum())
        share = int(gone.sum()) / nonzero if nonzero else math.nan
        rows.append((number, share, float(x[gone].double().sum()) / total if total else math.nan))
    return pd.DataFrame(rows, columns=["head", "flush_to_zero", "mass"])


def ranges(scores: Heads) -> pd.DataFrame:
    """Return a table by head, of the finite scores (a mask's infinities are left out): columns head, low, q1, median,
    q3, high."""
    rows = []
    for number, values in enumerate(scores.x.unbind(1), 1):
        own = values.float()
        x = own[own.isfinite() & (own > torch.finfo(scores.x.dtype).min / 2)].numpy()
        marks = np.quantile(x, [0, 0.25, 0.5, 0.75, 1]) if len(x) else [math.nan] * 5
        rows.append([number, *map(float, marks)])
    return pd.DataFrame(rows, columns=["head", "low", "q1", "median", "q3", "high"])


def head_map(x: Heads, sequence: int, head: int) -> np.ndarray:
    """One head's [queries, keys], thinned to MAX_SIDE each way by the largest of each cell; float32, NaN where only
    infinities lie."""
    own = x.x[sequence, head].float()
    matrix: np.ndarray = torch.where(own.isfinite(), own, math.nan).numpy()
    for axis in (0, 1):
        step = -(-matrix.shape[axis] // MAX_SIDE)
        if step > 1:
            matrix = np.fmax.reduceat(matrix, np.arange(0, matrix.shape[axis], step), axis=axis)
    return matrix
