"""How a batch is evaluated, and the loss of each of its sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector.errors import ConfigError

IGNORED = -100  # a label that does not count, as in torch

Answer = Tensor | tuple[Tensor, Tensor]
Evaluate = Callable[[Any, Any], Answer]  # of a model and a batch


def has_logits(answer: Any) -> bool:
    """Whether this is logits [sequences, tokens, vocabulary] and labels [sequences, tokens], not the losses of
    sequences. Raises ConfigError for neither."""
    if isinstance(answer, tuple) and len(answer) == 2:
        logits, labels = answer
        if logits.dim() == 3 and labels.shape == logits.shape[:2]:
            return True
        shapes = f"logits {list(logits.shape)} and labels {list(labels.shape)}"
        raise ConfigError(f"loss returned {shapes}: expected [sequences, tokens, vocabulary] and [sequences, tokens]")
    if not isinstance(answer, Tensor) or answer.dim() > 2 or not answer.numel():
        raise ConfigError(
            f"loss returned {_described(answer)}: expected a tensor [sequences] or [sequences, tokens], or logits and "
            "labels"
        )
    return False


def sequence_losses(answer: Any) -> tuple[float, ...]:
    """The loss of each sequence in nats per token, of what `measure` takes as the loss of a batch. Raises ConfigError
    for something else."""
    if has_logits(answer):
        return tuple(loss for loss, *_ in of_logits(*answer))
    x = answer.detach().double()
    return tuple((x.mean(-1) if x.dim() == 2 else x.reshape(-1)).tolist())


def of_logits(logits: Tensor, labels: Tensor) -> Iterator[tuple[float, Tensor, Tensor]]:
    """(loss, log-probabilities, labels) of each sequence."""
    for x, label in zip(logits, labels, strict=True):
        after = x.float().log_softmax(-1)
        yield float(F.nll_loss(after, label, ignore_index=IGNORED)), after, label


def _described(answer: Any) -> str:
    return f"a tensor {list(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context in which the model is in eval mode, without dropout."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
