"""The sequences that a run of `binade run` does not train on: those of the documents that --evaluate-every holds out,
and those that follow the ones it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from binade.collector.datasets.loading import Dataset, Remaining
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

    def rest(self, dataset: Dataset) -> Dataset:
        """What the run trains on."""
        return replace(dataset, documents=Remaining(dataset.documents, self.documents)) if self.documents else dataset

    def batches(self, config: RunConfig, sequences: int, device: torch.device) -> list[Batch]:
        """Its first sequences, in the lengths and batches of this configuration. Raises ConfigError if it has fewer."""
        length, size = config.sequence_length, config.micro_batch_size
        if len(self.row) <= (needed := sequences * length):
            raise ConfigError(
                f"a run holds out {len(self.row) - 1:,} tokens, but {sequences} sequences of {length} have {needed:,}: "
                f"evaluate at most {(len(self.row) - 1) // length}, or choose others with --skip"
            )
        row = torch.from_numpy(self.row[: needed + 1].astype(np.int64)).to(device)
        tokens, labels = row[:-1].view(-1, length), row[1:].view(-1, length)
        return [(tokens[start : start + size], labels[start : start + size]) for start in range(0, sequences, size)]


def hold_out(plan: Plan, dataset: Dataset) -> HeldOutData:
    """The documents that a run holds out: the same ones for every seed, none without --evaluate-every. Raises
    ConfigError if more than half of them would be needed."""
    config, documents = plan.config, dataset.documents
    if not config.evaluate_every:
        return HeldOutData(frozenset(), np.empty(0, dtype=np.int64))
    needed, held_tokens, count = config.evaluate_sequences * config.sequence_length + 1, 0, int(documents.bounds[-1])
    pieces: dict[int, np.ndarray] = {}
    try:
        for index in shuffled(documents.bounds, 0, ORDER):
            if held_tokens >= needed or len(pieces) > count // 2:
                break
            pieces[index] = documents.tokens(index)
            held_tokens += len(pieces[index])
    except DataError as error:
        raise ConfigError(str(error)) from error
    if len(pieces) > count // 2:
        raise ConfigError(
            f"dataset {documents.name} has {count:,} documents, and more than half of them would be held out for "
            f"--evaluate-sequences {config.evaluate_sequences} of {config.sequence_length} tokens: evaluate fewer or "
            "shorter sequences, or train on more documents"
        )
    row = np.concatenate(list(pieces.values()))[:needed]
    check_ids(documents, int(row.min()), int(row.max()), plan.shape.vocab)
    return HeldOutData(frozenset(pieces), row)


def sequences_read(config: RunConfig) -> int:
    """How many sequences of its data a run reads, on all replicas."""
    return config.dp * config.micro_batch_size * config.micro_batches * (config.warmup_iterations + config.iterations)


def open_batches(plan: Plan, dataset: Dataset, skip: int, sequences: int, device: torch.device) -> list[Batch]:
    """So many sequences of the data after the first `skip`, in the order in which a run reads them. Raises ConfigError
    as `open_samples`, and if the data end before: no sequence is read twice."""
    config, length = plan.config, plan.config.sequence_length
    read = (skip + sequences) * length + 1
    stream = open_samples(dataset.documents, length, config.seed, read, plan.shape.vocab)
    for start in range(0, skip, CHUNK):
        if not stream.epoch:
            stream.skip(min(CHUNK, skip - start))
    batches = []
    for start in range(0, sequences, config.micro_batch_size):
        tokens, labels = stream.batch(min(config.micro_batch_size, sequences - start))
        batches.append((tokens.to(device), labels.to(device)))
    if stream.epoch:
        after = f" after the first {skip:,}, such as those that a run trains on," if skip else ""
        instead = (
            ", leave out fewer (--skip), or train with --evaluate-every, which holds documents out" if skip else ""
        )
        raise ConfigError(
            f"dataset {dataset.documents.name} has fewer than {sequences:,} sequences of {length} tokens{after} before "
            f"it repeats: evaluate fewer or shorter sequences (--sequences, --sequence-length){instead}"
        )
    return batches


def logits_of(model: Any, batch: Batch) -> Batch:
    """The logits and labels of a batch: how it is evaluated."""
    tokens, labels = batch
    return model(tokens), labels
