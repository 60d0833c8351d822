"""Datasets and tokenizers for the tests, written by the libraries that own the formats."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def megatron() -> ModuleType:
    """megatron-core's own reader and writer of .bin/.idx."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of every optional library that is missing
        return import_module("megatron.core.datasets.indexed_dataset")


def write_pair(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: type = np.int32, *, modes: bool = False
) -> Path:
    """PREFIX.bin and PREFIX.idx of documents, each a list of sequences of token ids; the prefix."""
    builder = megatron().IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=modes)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def read_pair(prefix: Path) -> list[list[int]]:
    """The documents of PREFIX.bin as Megatron reads them."""
    dataset = megatron().IndexedDataset(str(prefix))  # kept while its arrays are: it unmaps the file when it goes
    bounds = dataset.document_indices.tolist()
    return [
        [token for number in range(first, end) for token in dataset[number].tolist()]
        for first, end in itertools.pairwise(bounds)
    ]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def train_tokenizer(texts: Sequence[str], size: int, special: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE of at most `size` tokens, the special ones among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
