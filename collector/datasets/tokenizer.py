"""Text to token ids: bytes, a tokenizer.json of Hugging Face, or the tokenizer in a GGUF file.

The token that ends a document is 256 for bytes. A tokenizer.json does not name it. It is the `eos_token` of the
tokenizer_config.json in the same directory, or else the first of END_TOKENS in the vocabulary, or else there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from binade.collector.datasets.inputs import BYTE, find_tokenizer
from binade.collector.errors import ConfigError, DataError
from binade.collector.pretrained.gguf_file import GGUF, open_gguf
from binade.data.run.store import read_file

END_OF_DOCUMENT = 256
END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]")
CONFIG_FILE = "tokenizer_config.json"
# What llama.cpp calls the ways in which byte-level BPE splits text first, and whether each digit is a word of its own.
SPLITS = {"gpt-2": False, "smollm": True}
CONTROL = 3  # llama.cpp's type of a special token


@dataclass(frozen=True)
class Tokenizer:
    """size is the largest id + 1, end the id that follows each document, sha256 the digest of the tokenizer's file.

    encode gives the ids of a text, without special tokens, truncation or padding. It raises DataError for a text that
    the vocabulary cannot spell.
    """

    name: str
    size: int
    end: int | None
    sha256: str | None
    encode: Callable[[str], np.ndarray]


BYTES = Tokenizer(
    BYTE, END_OF_DOCUMENT + 1, END_OF_DOCUMENT, None, lambda text: np.frombuffer(text.encode(), dtype=np.uint8)
)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer with this name or path. Raises ConfigError."""
    path = find_tokenizer(name)
    if path is None:
        return BYTES
    return _read_gguf(path) if path.suffix == GGUF else _read_tokenizer(path)


def _read_tokenizer(path: Path) -> Tokenizer:
    import tokenizers  # an extra: bytes need no library

    try:
        content = read_file(path)
    except OSError as error:
        raise ConfigError(f"tokenizer {path} cannot be read: {error}") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"tokenizer {path} is not a Hugging Face tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError(f"tokenizer {path} has an empty vocabulary: train it first")
    end = _end_token(vocabulary, path.parent / CONFIG_FILE)
    return _tokenizer(path, tokenizer, end, hashlib.sha256(content).hexdigest())


def _read_gguf(path: Path) -> Tokenizer:
    """The byte-level BPE of a GGUF file."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    file = open_gguf(path)
    kind, split = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in SPLITS:
        raise ConfigError(
            f"tokenizer {path} has the type {kind} with the pre-tokenizer {split}, but only gpt2 with "
            f"{' or '.join(SPLITS)} is supported: give the model's tokenizer.json to --tokenizer"
        )
    tokens, types, merges = (file.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type", "merges"))
    digits = [pre_tokenizers.Digits(individual_digits=True)] * SPLITS[split]
    try:
        vocabulary = {token: number for number, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tokenizer.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"tokenizer {path} cannot be read: {error}") from error
    sha = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    return _tokenizer(path, tokenizer, file.get("tokenizer.ggml.eos_token_id"), sha)


def _tokenizer(path: Path, tokenizer: Any, end: int | None, sha256: str) -> Tokenizer:
    def encode(text: str) -> np.ndarray:
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"tokenizer {path} cannot encode {text[:40]!r}: {error}") from error
        return np.array(ids, dtype=np.int64)

    size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return Tokenizer(str(path), size, end, sha256, encode)


def _end_token(vocabulary: dict[str, int], config: Path) -> int | None:
    named = _named_end(config)
    if named is not None:
        if named not in vocabulary:
            raise ConfigError(f"{config} names the end-of-text token {named!r}, which the tokenizer does not have")
        return vocabulary[named]
    return next((vocabulary[token] for token in END_TOKENS if token in vocabulary), None)


def _named_end(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json: a string, or an object with a "content"."""
    if not config.is_file():
        return None
    try:
        settings = json.loads(read_file(config))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{config} cannot be read: {error}") from error
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
