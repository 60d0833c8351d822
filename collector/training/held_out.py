"""The sequences that a run of `binade run` does not train on: those of the documents that --evaluate-every holds out,
and those that follow the ones it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.collector.datasets.loading import Dataset
from binade.collector.datasets.samples import check_ids, open_samples, shuffled
from binade.collector.errors import ConfigError, DataError
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import Plan

Batch = tuple[Tensor, Tensor]  # tokens and labels
ORDER = 1 << 32  # of documents that are held out, where the number of an epoch stands in that of training
CHUNK = 1000  # sequences that are left out at once


@dataclass(frozen=True)
class HeldOutData:
    """What a run is evaluated on.

    documents  which it does not train on, by number
    row        [sequences · length + 1], the first of their tokens
    """

    documents: frozenset[int]
    row: np.ndarray

    def batches(self, config: RunConfig, device: torch.device) -> list[Batch]:
        """Its sequences, in batches as large as those of the training."""
        row = torch.from_numpy(self.row.astype(np.int64)).to(device)
        tokens, labels = (each.view(-1, config.sequence_length) for each in (row[:-1], row[1:]))
        starts = range(0, len(tokens), size := config.micro_batch_size)
        return [(tokens[start : start + size], labels[start : start + size]) for start in starts]


def hold_out(plan: Plan, dataset: Dataset) -> HeldOutData:
    """The documents that a run holds out: the same ones for every seed, none without --evaluate-every. Raises
    ConfigError if more than half of them would be needed."""
    config, documents = plan.config, dataset.documents
    if not config.evaluate_every:
        return HeldOutData(frozenset(), np.empty(0, dtype=np.int64))
    needed, found, count = config.evaluate_sequences * config.sequence_length + 1, 0, int(documents.bounds[-1])
    pieces: dict[int, np.ndarray] = {}
    try:
        for index in shuffled(documents.bounds, 0, ORDER):
            if found >= needed or len(pieces) > count // 2:
                break
            pieces[index] = documents.tokens(index)
            found += len(pieces[index])
    except DataError as error:
        raise ConfigError(str(error)) from error
    if len(pieces) > count // 2:
        raise ConfigError(
            f"dataset {documents.name} has {count:,} documents, and more than half of them would be held out for "
            f"--evaluate-sequences {config.evaluate_sequences} of {config.sequence_length} tokens: evaluate fewer or "
            "shorter sequences, or train on more documents"
        )
    row = np.concatenate(list(pieces.values()))[:needed]
    check_ids(documents, row, plan.shape.vocab)
    return HeldOutData(frozenset(pieces), row)


def sequences_read(config: RunConfig) -> int:
    """How many sequences of its data a run reads, on all replicas."""
    return config.dp * config.micro_batch_size * config.micro_batches * (config.warmup_iterations + config.iterations)


def open_batches(plan: Plan, dataset: Dataset, skip: int, sequences: int, device: torch.device) -> list[Batch]:
    """So many sequences of the data that a run trains on, after the first `skip`. Raises ConfigError as `open_samples`,
    and if the data end before: no sequence is read twice."""
    config, length = plan.config, plan.config.sequence_length
    read, without = (skip + sequences) * length + 1, hold_out(plan, dataset).documents
    stream = open_samples(dataset.documents, length, config.seed, read, plan.shape.vocab, without=without)
    for start in range(0, skip, CHUNK):
        if not stream.epoch:
            stream.skip(min(CHUNK, skip - start))
    batches = []
    for start in range(0, sequences, config.micro_batch_size):
        tokens, labels = stream.batch(min(config.micro_batch_size, sequences - start))
        batches.append((tokens.to(device), labels.to(device)))
    if stream.epoch:
        after = f" after the first {skip:,}, such as those that a run trains on," if skip else ""
        raise ConfigError(
            f"dataset {dataset.documents.name} has fewer than {sequences:,} sequences of {length} tokens{after} before "
            "it repeats: evaluate fewer or shorter sequences (--sequences, --sequence-length)"
            + ", or leave out fewer (--skip)"
            * bool(skip)
        )
    return batches


def logits_of(model: Any, batch: Batch) -> Batch:
    """The logits and labels of a batch: how it is evaluated."""
    tokens, labels = batch
    return model(tokens), labels
