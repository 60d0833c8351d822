"""The backward pass from which the second-order term of a predicted loss change comes.

Its loss is the cross entropy of labels drawn from the model's own softmax. In expectation over the labels, the products
of gradients of two different tokens' losses vanish, so that squared gradients of the whole loss are the sum of each
token's squared gradients: the diagonal of the Fisher information. With the true labels they do not vanish.

The pass runs through the graph of the training's own forward pass, with torch.autograd.grad: it accumulates nothing in
parameters, draws nothing from torch's generators, and rounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from binade.collector.capture.clock import Moment
from binade.quant.gemm import sampled_backward, sampling

ELEMENTS = 1 << 24  # of the logits that are worked on at a time


@dataclass(frozen=True)
class Sequences:
    """The shape of a micro-batch: this many sequences of this many tokens."""

    count: int
    length: int

    @classmethod
    def of(cls, logits: Tensor, batch_axis: int) -> Sequences:
        """Those of logits [b, s, v], or [s, b, v] for batch_axis 1; of another shape, one sequence."""
        if logits.dim() != 3:
            return cls(1, math.prod(logits.shape[:-1]))
        return cls(logits.shape[batch_axis], logits.shape[1 - batch_axis])

    def split(self, x: Tensor) -> list[Tensor] | None:
        """x [b, ...], [s, b, ...] or [b·h, s, ...] by sequence; None if it is not known which axis they are along."""
        if self.count == 1:
            return [x]
        shape = x.shape
        if self.count == self.length or len(shape) < 3:
            return None
        if shape[0] == self.count:
            return list(x.unbind(0))
        if shape[1] == self.count:
            return list(x.unbind(1))
        if len(shape) == 3 and shape[1] == self.length and not shape[0] % self.count:
            return list(x.chunk(self.count))
        return None


ONE = Sequences(1, 0)


@dataclass(eq=False)
class Predictions:
    """What the predictions of a step's loss changes need besides gradients, for the micro-batches that
    `Recorder.sensitivity` was called for.

    loss_scale   that of the Recorder
    measured     the factors of the losses, where they are measured
    """

    loss_scale: float | Callable[[], float] | None
    sequences: dict[Moment, Sequences] = field(default_factory=dict)
    measured: dict[Moment, Callable[[], float]] = field(default_factory=dict)
    given: tuple[int, float] | None = None  # the iteration that loss_scale was called in, its result

    def begin(self, moment: Moment, logits: Tensor, seed: int, valid: Tensor | None, batch_axis: int) -> bool:
        """Run the pass for a micro-batch, whose labels are drawn with the seed; see `Recorder.sensitivity`. Returns
        False if a checkpoint prevents it: then there is no second-order term."""
        gradient = sampled_gradient(logits, seed, valid)
        self.sequences[moment] = Sequences.of(logits, batch_axis)
        if self.loss_scale is None:
            measured = measure_scale(logits, valid)
            self.measured[moment] = lambda: measured() or 1.0
        try:
            backward(logits, gradient)
        except RuntimeError as error:
            if "heckpoint" not in str(error):
                raise
            return False
        return True

    def scale_of(self, moment: Moment) -> Callable[[], float]:
        """The factor of that micro-batch's loss, as a function that is called after its backward pass."""
        scale = self.loss_scale
        if scale is None:
            return self.measured.get(moment, lambda: 1.0)
        if callable(scale):
            if self.given is None or self.given[0] != moment.iteration:
                self.given = moment.iteration, float(scale())
            scale = self.given[1]
        factor = scale
        return lambda: factor

    def forget(self) -> None:
        """The steps of these micro-batches have ended."""
        self.sequences.clear()
        self.measured.clear()


def sampled_gradient(logits: Tensor, seed: int, valid: Tensor | None = None) -> Tensor:
    """The gradient of n^½ · the mean cross entropy over n tokens at logits [..., v], for labels drawn from
    their softmax. valid: bool [...], which tokens are in the loss; the others get 0. Half the expectation of the square
    of a gradient that follows from it is the second-order coefficient of the mean loss.

    The labels depend on the seed alone, and on no device: one uniform number for each token."""
    rows = logits.detach().flatten(0, -2)
    chosen = None if valid is None else valid.reshape(-1).to(rows.device)
    number = float(len(rows)) if chosen is None else chosen.sum().clamp(min=1)
    gradient = torch.empty_like(rows)
    uniform = torch.rand(len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    uniform = uniform.to(rows.device)
    step = max(ELEMENTS // rows.shape[-1], 1)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        p = rows[part].float().softmax(-1)
        total = p.double().cumsum(-1)
        label = torch.searchsorted(total, uniform[part, None] * total[:, -1:], right=True)
        p.scatter_add_(-1, label.clamp(max=p.shape[-1] - 1), p.new_full((), -1.0).expand(label.shape))
        p /= number**0.5
        gradient[part] = p if chosen is None else torch.where(chosen[part, None], p, 0.0)
    return gradient.view(logits.shape)


def backward(logits: Tensor, gradient: Tensor) -> None:
    """Run a backward pass from the logits with this gradient, in `sampled_backward`, and keep the graph. Raises
    RuntimeError within a checkpoint that torch.autograd.grad does not support (use_reentrant=True)."""
    if leaves := _leaves(logits):
        with sampled_backward():
            torch.autograd.grad(logits, leaves, gradient, retain_graph=True, allow_unused=True)


def _leaves(x: Tensor) -> list[Tensor]:
    """The leaves of a graph that gradients would be accumulated in."""
    leaves: dict[int, Tensor] = {}
    seen, waiting = set(), [x.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        waiting += [following for following, _ in node.next_functions]
    return list(leaves.values())


def measure_scale(logits: Tensor, valid: Tensor | None = None) -> Callable[[], float | None]:
    """The factor by which the training's loss multiplies the mean cross entropy of these logits, once its backward
    pass has come; None before that.

    A token's gradient at its logits is w·(softmax - label), so that w follows from the most probable entry, whichever
    the label is. The factor is the sum of w over the tokens in the loss: the valid ones, else those with w > 0."""
    rows = logits.detach().flatten(0, -2)
    top, most = rows.max(-1)
    p = (top.float() - rows.float().logsumexp(-1)).exp()
    sums: list[Tensor] = []
    node, number = logits.grad_fn, logits.output_nr
    while node is not None and node.name().startswith("ToCopyBackward"):  # autocast's loss has the tensor before it
        node, number = node.next_functions[0]
    if node is None:
        return lambda: None

    def arrived(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[number]
        if sampling() or gradient is None:
            return
        handle.remove()
        g = gradient.detach().reshape(-1, gradient.shape[-1]).gather(-1, most[:, None])[:, 0].double()
        weight = torch.where(g > 0, p.double(), 1 - p.double()) * (g != 0)
        tokens = (g != 0).sum() if valid is None else valid.sum()
        sums.append(g.abs().sum() / weight.sum() * tokens)

    handle = node.register_prehook(arrived)
    return lambda: float(sums[0]) if sums else None
