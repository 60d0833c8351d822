"""The sequences that a run of `binade run` does not train on: those that follow the ones it reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from binade.collector.datasets.loading import Dataset
from binade.collector.datasets.samples import open_samples
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan

Batch = tuple[Tensor, Tensor]  # tokens and labels


def sequences_read(config: RunConfig) -> int:
    """How many sequences of its data a run reads, on all replicas."""
    return config.dp * config.micro_batch_size * config.micro_batches * (config.warmup_iterations + config.iterations)


def open_batches(plan: Plan, dataset: Dataset, skip: int, sequences: int, device: torch.device) -> list[Batch]:
    """So many sequences of the data after the first `skip`. Raises ConfigError as `open_samples`."""
    size, length = plan.config.micro_batch_size, plan.config.sequence_length
    read = (skip + sequences) * length + 1
    stream = open_samples(dataset.documents, length, plan.config.seed, read, plan.shape.vocab)
    stream.skip(skip)
    batches = []
    for start in range(0, sequences, size):
        tokens, labels = stream.batch(min(size, sequences - start))
        batches.append((tokens.to(device), labels.to(device)))
    return batches


def logits_of(model: Any, batch: Batch) -> Batch:
    """The logits and labels of a batch: how it is evaluated."""
    tokens, labels = batch
    return model(tokens), labels
