"""Resolves --dataset and --tokenizer to files, without opening any. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from binade.collector.errors import ConfigError

DATASETS = ("wikipedia", "dolma", "python-docs")
TEXT_FORMATS = ("jsonl", "jsonl.gz", "parquet")
TOKENIZED = "bin/idx"
BYTE = "byte"
TOKENIZER_FILE = "tokenizer.json"

_BUILT_IN = Path(__file__).parents[2] / "data" / "corpus"
_EXPECTED = f"{', '.join(DATASETS)}, or a path to .bin/.idx, .jsonl, .jsonl.gz or .parquet"


@dataclass(frozen=True)
class Source:
    """A dataset that exists. format is one of TEXT_FORMATS, TOKENIZED, or "python" for the texts that CPython carries;
    paths are its file, or the .bin and the .idx, or empty."""

    name: str
    format: str
    paths: tuple[Path, ...]


def find_dataset(name: str) -> Source:
    """The dataset with this name or path. Raises ConfigError if there is none, or only one file of a .bin/.idx pair."""
    if name == "python-docs":
        return Source(name, "python", ())
    if name in DATASETS:
        return Source(name, "jsonl", (_BUILT_IN / f"{name}.jsonl",))
    for suffix in TEXT_FORMATS:
        if name.endswith(f".{suffix}"):
            if not os.path.isfile(name):
                raise ConfigError(f"dataset {name} does not exist: give the path to an existing file")
            return Source(name, suffix, (Path(name),))
    prefix = name[:-4] if name.endswith((".bin", ".idx")) else name
    pair = (f"{prefix}.bin", f"{prefix}.idx")
    missing = [path for path in pair if not os.path.isfile(path)]
    if not missing:
        return Source(name, TOKENIZED, (Path(pair[0]), Path(pair[1])))
    if len(missing) == 1:
        raise ConfigError(
            f"dataset {prefix} lacks {missing[0]}: a preprocessed dataset consists of a .bin and an .idx file"
        )
    if prefix != name:
        raise ConfigError(f"dataset {name} does not exist: give the path to an existing file")
    raise ConfigError(f"unknown dataset {name!r}: expected {_EXPECTED}")


def find_tokenizer(name: str) -> Path | None:
    """The file of the tokenizer with this path, None for BYTE. Raises ConfigError."""
    if name == BYTE:
        return None
    path = os.path.join(name, TOKENIZER_FILE) if os.path.isdir(name) else name
    if not os.path.isfile(path):
        raise ConfigError(
            f"tokenizer {path} does not exist: give {BYTE}, a Hugging Face {TOKENIZER_FILE} or its directory, "
            "or a GGUF file"
        )
    return Path(path)


def check_inputs(dataset: str, given: str | None, tokenizer: str) -> None:
    """Raise ConfigError if a file is missing, or if a tokenizer is given for a dataset that is already tokenized."""
    if find_dataset(dataset).format != TOKENIZED:
        find_tokenizer(tokenizer)
    elif given is not None:
        raise ConfigError(f"dataset {dataset} contains tokens, not text: leave out --tokenizer {given}")


def describe_inputs(dataset: str, tokenizer: str) -> str:
    """One line for --dry-run. Raises ConfigError."""
    source = find_dataset(dataset)
    if source.format == TOKENIZED:
        return f"{dataset} (Megatron's .bin/.idx, tokenized already)"
    kind = "built in" if dataset in DATASETS else f".{source.format}"
    tokens = "byte tokens" if tokenizer == BYTE else f"tokens of {find_tokenizer(tokenizer)}"
    return f"{dataset} ({kind}), {tokens}"
