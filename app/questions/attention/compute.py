"""Inside attention: probabilities and scores [sequences, heads, queries, keys], head by head.

With softmax=flash, the recorded probabilities are P̃ = exp(S − m), which are relative to the maximum m of a tile's row.

For a large tensor, only every n-th query is read; each table comes with n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from binade.app.questions.shared.rounded import MAX_SIDE

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


def may_be_flash(p: Heads) -> bool:
    """Whether the largest in every row is 1, as of P̃ (or 0, if the row has no keys). It may be 1 in a softmax too."""
    largest = p.x.amax(-1)
    return bool(((largest == 1) | (largest == 0)).all())


def softmax(p: Heads, scores: Heads) -> Heads:
    """The softmax of the scores, in float32, over the keys that p does not mask."""
    masked = scores.x.float().masked_fill(p.x == 0, -math.inf)
    return Heads(masked.softmax(-1).masked_fill((p.x == 0).all(-1, keepdim=True), 0.0), p.every)


def several_ones(x: Tensor) -> np.ndarray:
    """By head, the share of the rows in which several of the values [sequences, heads, queries, keys] are 1."""
    return ((x == 1).sum(-1) > 1).double().mean((0, 2)).numpy()


def output_error(probs: Heads, value: Tensor, output: Tensor) -> Tensor:
    """output − PV in float64, [sequences, heads, queries, v]. value [sequences, heads or groups, keys, v]"""
    by_head = value.repeat_interleave(output.shape[1] // value.shape[1], 1)
    return output[:, :, :: probs.every].double() - probs.x.double() @ by_head.double()


def row_difference(error: Tensor, grad: Tensor, every: int) -> np.ndarray:
    """By head, the mean of rowsum(P∘dP) − rowsum(dO∘O), which is −rowsum(dO∘error) if dP = dO·Vᵀ. error: of the
    output; grad: dO [sequences, heads, queries, v]"""
    return -(grad[:, :, ::every].double() * error).sum(-1).mean((0, 2)).numpy()


def entropy(p: Heads) -> pd.DataFrame:
    """Return a table by head: columns head (from 1), entropy (bits, −Σp·log2 p over the keys, mean over queries),
    lowest and highest (of a query), uniform (bits, if every key that a query may see had the same share: causal)."""
    queries = torch.arange(p.x.shape[2]) * p.every
    uniform = float(torch.log2(queries + 1.0).mean())
    rows = []
    for number, x in enumerate(p.x.unbind(1), 1):
        probs = x.double()
        bits = pd.Series((-torch.xlogy(probs, probs).sum(-1) / math.log(2)).flatten())
        bits = bits[np.isfinite(bits)]
        rows.append((number, bits.mean(), bits.min(), bits.max(), uniform))
    return pd.DataFrame(rows, columns=["head", "entropy", "lowest", "highest", "uniform"])


def flushed(p: Heads, q: Tensor, probs: Heads | None = None) -> pd.DataFrame:
    """Return a table by head: columns head, flush_to_zero (of the nonzero values of p, which are rounded to q), mass
    (the share of all probability that the flushed values held). probs: the probabilities, if p is P̃."""
    rows = []
    for number, (x, y, exact) in enumerate(
        zip(*(tensor.unbind(1) for tensor in (p.x, q, (probs or p).x)), strict=True), 1
    ):
        gone = (x != 0) & (y == 0)
        nonzero, total = int(x.count_nonzero()), float(exact.double().nansum())
        share = int(gone.sum()) / nonzero if nonzero else math.nan
        rows.append((number, share, float(exact[gone].double().sum()) / total if total else math.nan))
    return pd.DataFrame(rows, columns=["head", "flush_to_zero", "mass"])


def ranges(scores: Heads) -> pd.DataFrame:
    """Return a table by head, of the finite scores (a mask's infinities are left out): columns head, low, q1, median,
    q3, high."""
    rows = []
    for number, values in enumerate(scores.x.unbind(1), 1):
        logits = values.float()
        x = logits[logits.isfinite() & (logits > torch.finfo(scores.x.dtype).min / 2)].numpy()
        marks = np.quantile(x, [0, 0.25, 0.5, 0.75, 1]) if len(x) else [math.nan] * 5
        rows.append([number, *map(float, marks)])
    return pd.DataFrame(rows, columns=["head", "low", "q1", "median", "q3", "high"])


def head_map(x: Heads, sequence: int, head: int) -> np.ndarray:
    """One head's [queries, keys], thinned to MAX_SIDE each way by the largest of each cell; float32, NaN where only
    infinities lie."""
    values = x.x[sequence, head].float()
    matrix: np.ndarray = torch.where(values.isfinite(), values, math.nan).numpy()
    for axis in (0, 1):
        step = -(-matrix.shape[axis] // MAX_SIDE)
        if step > 1:
            matrix = np.fmax.reduceat(matrix, np.arange(0, matrix.shape[axis], step), axis=axis)
    return matrix
