"""Text to tokens: the built-in corpora and JSONL files, through a byte tokenizer, as a stream of training samples.

A token is a UTF-8 byte; END_OF_DOCUMENT (256) follows each document. Documents are shuffled by the seed, joined, and
cut into samples of sequence_length + 1 tokens, as Megatron's GPTDataset does.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import zlib
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from collector.config import DATASETS, ConfigError

BUILT_IN = Path(__file__).parents[1] / "data" / "corpus"
END_OF_DOCUMENT = 256


@dataclass(frozen=True)
class Corpus:
    """Documents and where they came from. digest is the SHA-256 of their texts in order."""

    name: str
    documents: tuple[str, ...]
    digest: str


def load_corpus(dataset: str) -> Corpus:
    """A built-in corpus by name, or a .jsonl(.gz) file with a "text" key. Raises ConfigError."""
    if dataset == "python-docs":
        documents = [text for _, text in sorted(import_module("pydoc_data.topics").topics.items())]
    else:
        path = BUILT_IN / f"{dataset}.jsonl" if dataset in DATASETS else Path(dataset)
        documents = _read_jsonl(path)
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    return Corpus(dataset, tuple(documents), digest)


def _read_jsonl(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    documents = []
    try:
        with opened(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    documents.append(_text(line, f"dataset {path}, line {number}"))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"dataset {path} cannot be read: {error}") from error
    if not documents:
        raise ConfigError(f"dataset {path} holds no document")
    return documents


def _text(line: bytes, where: str) -> str:
    """The document on a line of JSON. Raises ConfigError, beginning with `where`."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ConfigError(f'{where}: an object with the key "text" was expected')
    try:
        record["text"].encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: its text holds half a surrogate pair, which is no character") from error
    return record["text"]


class SampleStream:
    """Endless samples in a fixed order: the same seed gives the same batches to every recipe."""

    def __init__(self, corpus: Corpus, sequence_length: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        self._rank, self._ranks = rank, ranks
        order = list(corpus.documents)
        random.Random(seed).shuffle(order)
        stream = [token for text in order for token in (*text.encode(), END_OF_DOCUMENT)]
        while len(stream) < sequence_length + 1:
            stream += stream
        self._tokens = torch.tensor(stream, dtype=torch.int64)
        self._length = sequence_length
        self._starts: list[int] = []
        self._random = random.Random(seed + 1)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), each int64 [size, sequence_length]; labels are the tokens one further on."""
        batches = [self._next(size) for _ in range(self._ranks)]
        return batches[self._rank]

    def _next(self, size: int) -> tuple[Tensor, Tensor]:
        rows = []
        for _ in range(size):
            if not self._starts:  # a new epoch
                self._starts = list(range(0, len(self._tokens) - self._length, self._length))
                self._random.shuffle(self._starts)
            start = self._starts.pop()
            rows.append(self._tokens[start : start + self._length + 1])
        samples = torch.stack(rows)
        return samples[:, :-1], samples[:, 1:]
