"""Opens a dataset for training: its documents as token ids, and an identity that is recorded with the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from binade.collector.datasets.indexed import IndexedDocuments
from binade.collector.datasets.inputs import BYTE, TOKENIZED, find_dataset
from binade.collector.datasets.texts import Texts, open_texts
from binade.collector.datasets.tokenizer import Tokenizer, open_tokenizer
from binade.collector.errors import ConfigError


class Documents(Protocol):
    """Documents as token ids, by number. bounds, int64 [blocks + 1], holds the first document of each block, and the
    number of documents. Documents of a block are cheapest to read together. total: at most so many tokens, whose ids
    may be any; None for texts, which are tokenized when they are read."""

    name: str
    bounds: np.ndarray

    @property
    def total(self) -> int | None: ...

    def tokens(self, index: int) -> np.ndarray:
        """[tokens of the document], of any integer dtype. Raises DataError."""


class Remaining:
    """Documents without some, which read as empty."""

    def __init__(self, documents: Documents, left_out: frozenset[int]) -> None:
        self.name, self.bounds, self.total = documents.name, documents.bounds, documents.total
        self._documents, self._left_out = documents, left_out

    def tokens(self, index: int) -> np.ndarray:
        return np.empty(0, dtype=np.int64) if index in self._left_out else self._documents.tokens(index)


class TokenizedTexts:
    """Texts, tokenized when they are read, each followed by the tokenizer's end-of-text token if it has one."""

    total: None = None

    def __init__(self, name: str, texts: Texts, tokenizer: Tokenizer) -> None:
        self.name = name
        self.bounds = texts.bounds
        self._texts = texts
        self._tokenizer = tokenizer
        self._end = np.array([] if tokenizer.end is None else [tokenizer.end], dtype=np.int64)

    def tokens(self, index: int) -> np.ndarray:
        return np.concatenate([self._tokenizer.encode(self._texts.text(index)), self._end])


@dataclass(frozen=True)
class Dataset:
    """identity is recorded with a run. The same identity means the same data."""

    documents: Documents
    identity: dict[str, Any]

    def __str__(self) -> str:
        about = self.identity
        digest = about.get("corpus_sha256") or about["idx_sha256"]
        tokens = f"tokenizer {about['tokenizer']}" if about["tokenizer"] else "tokenized already"
        return f"{about['name']} ({about['format']}), {about['documents']} documents, {tokens}, sha256 {digest[:16]}"


def open_dataset(name: str, tokenizer: str | None, vocab: int) -> Dataset:
    """A dataset by name or path, for a model with `vocab` tokens. For text, None means BYTE. Raises ConfigError."""
    source = find_dataset(name)
    if source.format == TOKENIZED:
        indexed = IndexedDocuments(source)
        return Dataset(
            indexed,
            {
                "name": name,
                "format": source.format,
                "documents": int(indexed.bounds[-1]),
                "tokenizer": None,
                "idx_sha256": indexed.index_sha256,
                "idx_bytes": indexed.index_bytes,
                "bin_bytes": indexed.data_bytes,
            },
        )
    encoder = open_tokenizer(tokenizer or BYTE)
    if encoder.size > vocab:
        raise ConfigError(
            f"tokenizer {encoder.name} has {encoder.size} tokens, but the model's vocabulary has only {vocab}: "
            f"use --vocab-size {encoder.size} or more"
        )
    texts = open_texts(source)
    return Dataset(
        TokenizedTexts(name, texts, encoder),
        {
            "name": name,
            "format": source.format,
            "documents": int(texts.bounds[-1]),
            "tokenizer": encoder.name,
            "tokenizer_sha256": encoder.sha256,
            "end_of_document": encoder.end,
            "corpus_sha256": texts.digest,
        },
    )
