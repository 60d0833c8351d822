"""Training samples: the documents as one endless row of tokens, in an order that the seed fixes, cut into samples.

Documents are shuffled and joined. Sample k is tokens k·L to k·L + L of that row (L is the sequence length; the last
token is only a label). After the last document, a new epoch continues the row in another order, so that each epoch
shows every token once. Blocks of documents (row groups of Parquet) are shuffled, and the documents within each.

Only the current document is in memory. Megatron also shuffles the samples, but that needs the lengths of all documents
in advance, and so tokenizes everything first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch
from torch import Tensor

from binade.collector.datasets.loading import Documents
from binade.collector.errors import ConfigError, DataError

CHUNK = 1 << 20  # tokens checked at once


def open_samples(
    documents: Documents, length: int, seed: int, read: int, vocab: int, rank: int = 0, ranks: int = 1
) -> SampleStream:
    """The samples of a run that reads so many tokens. Raises ConfigError if one of them is not in the vocabulary."""
    try:
        stream = SampleStream(documents, length, seed, rank, ranks)
        if documents.total is not None:
            _check_read(documents, seed, min(read, documents.total), vocab)
    except DataError as error:
        raise ConfigError(str(error)) from error
    return stream


def _check_read(documents: Documents, seed: int, read: int, vocab: int) -> None:
    """Raise ConfigError if an id among the first `read` tokens is not in 0 to vocab - 1."""
    row, least, most = TokenRow(documents, seed), 0, 0
    while read:
        ids = row.take(min(read, CHUNK))
        read -= len(ids)
        least, most = min(least, int(ids.min())), max(most, int(ids.max()))
    check_ids(documents, least, most, vocab)


def check_ids(documents: Documents, least: int, most: int, vocab: int) -> None:
    """Raise ConfigError if ids from `least` to `most` are not all in 0 to vocab - 1."""
    if least < 0:
        raise ConfigError(f"dataset {documents.name} contains the token id {least}: expected non-negative ids")
    if most >= vocab:
        raise ConfigError(
            f"dataset {documents.name} contains the token id {most}, but the model's vocabulary has only {vocab} "
            f"tokens: use --vocab-size {most + 1} or more"
        )


def shuffled(bounds: np.ndarray, seed: int, epoch: int) -> Iterator[int]:
    """Every document once: blocks in random order, and those of a block in random order."""
    # RandomState: NumPy guarantees that its numbers never change (NEP 19).
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    for block in random.permutation(len(bounds) - 1):
        first, end = bounds[block : block + 2].tolist()
        for index in random.permutation(end - first):
            yield first + int(index)


class TokenRow:
    """The endless row of tokens. epoch: that of the last one, counted from 0."""

    def __init__(self, documents: Documents, seed: int) -> None:
        self._documents = self._endless(documents, seed)
        self._left = np.empty(0, dtype=np.int64)  # of the current document
        self.epoch = 0

    def take(self, length: int) -> np.ndarray:
        """The next tokens, int64 [length]. Raises DataError if the documents have none."""
        return np.concatenate([np.empty(0, dtype=np.int64), *self._pieces(length)])

    def skip(self, length: int) -> None:
        for _ in self._pieces(length):
            pass

    def _pieces(self, length: int) -> Iterator[np.ndarray]:
        while length:
            if not len(self._left):
                self._left = next(self._documents)
            piece, self._left = self._left[:length], self._left[length:]
            length -= len(piece)
            yield piece

    def _endless(self, documents: Documents, seed: int) -> Iterator[np.ndarray]:
        for epoch in count():
            empty = True
            for index in shuffled(documents.bounds, seed, epoch):
                tokens = documents.tokens(index)
                if len(tokens):
                    empty, self.epoch = False, epoch
                    yield tokens
            if empty:
                raise DataError(f"dataset {documents.name} contains no tokens: all its documents are empty")


class SampleStream:
    """Endless batches in a fixed order: the same seed gives the same batches to every recipe.

    With several ranks, rank r gets batches r, r + ranks, r + 2·ranks, ... of a single reader. All ranks must use the
    same batch size.
    """

    def __init__(self, documents: Documents, sequence_length: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._row = TokenRow(documents, seed)
        self._next = self._row.take(1)  # the last label is the first token of the next sample
        self._length = sequence_length
        self._ranks = ranks
        self._skipped = rank  # batches of other ranks before our next one
        self._sha = hashlib.sha256()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), each int64 [size, sequence_length]; labels are the tokens shifted by one. Raises DataError
        or OSError if the data can no longer be read."""
        self.skip(self._skipped * size)
        self._skipped = self._ranks - 1
        row = np.concatenate([self._next, self._row.take(size * self._length)])
        self._next = row[-1:]
        tokens, labels = row[:-1].reshape(size, -1), row[1:].reshape(size, -1)
        for ids in (tokens, labels):
            self._sha.update(ids.astype("<i8").tobytes())
        return torch.from_numpy(tokens), torch.from_numpy(labels)

    def skip(self, sequences: int) -> None:
        """Leave out so many sequences, of all ranks. Raises as `batch`."""
        if sequences:
            self._row.skip(sequences * self._length - 1)
            self._next = self._row.take(1)

    @property
    def epoch(self) -> int:
        """That of the last token that was read, counted from 0."""
        return self._row.epoch

    def digest(self) -> str:
        """SHA-256 of all ids returned so far: the tokens, then the labels of each batch, as little-endian int64."""
        return self._sha.hexdigest()
