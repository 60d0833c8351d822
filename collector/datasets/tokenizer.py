"""Text to token ids: bytes, or a tokenizer.json of Hugging Face.

The token that ends a document is 256 for bytes. A tokenizer.json does not name it. It is the `eos_token` of the
tokenizer_config.json in the same directory, or else the first of END_TOKENS in the vocabulary, or else there is none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from binade.collector.datasets.inputs import BYTE, find_tokenizer
from binade.collector.errors import ConfigError, DataError

END_OF_DOCUMENT = 256
END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "[EOS]")
CONFIG_FILE = "tokenizer_config.json"


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


def _encode_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


BYTES = Tokenizer(BYTE, END_OF_DOCUMENT + 1, END_OF_DOCUMENT, None, _encode_bytes)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer with this name or path. Raises ConfigError."""
    path = find_tokenizer(name)
    return BYTES if path is None else _read_tokenizer(path)


def _read_tokenizer(path: Path) -> Tokenizer:
    import tokenizers  # an extra: bytes need no library

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer {path} cannot be read: {error}") from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"tokenizer {path} is not a tokenizer.json of Hugging Face: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise ConfigError(f"tokenizer {path} has an empty vocabulary: train it first")

    def encode(text: str) -> np.ndarray:
        try:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # tokenizers raises plain Exception
            raise DataError(f"tokenizer {path} cannot encode {text[:40]!r}: {error}") from error
        return np.array(ids, dtype=np.int64)

    end = _end_token(vocabulary, path.parent / CONFIG_FILE)
    return Tokenizer(str(path), max(vocabulary.values()) + 1, end, hashlib.sha256(content).hexdigest(), encode)


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
        settings = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{config} cannot be read: {error}") from error
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
