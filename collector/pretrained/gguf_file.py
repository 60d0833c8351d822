"""GGUF files: llama.cpp's container of metadata, tokenizer and, mostly quantized, weights. No torch.

The package gguf reads and dequantizes them. Here they get the names and the layout of a Hugging Face model, so that
everything else is done as for a directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from binade.collector.errors import ConfigError, raising

GGUF = ".gguf"  # ends the names of such files
ARCHITECTURE = "llama"  # Mistral's too
# The settings of a config.json, by their names in the metadata.
SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "vocab_size": "vocab_size",
}
# Those of rope_scaling, below rope.scaling.
SCALING = {"rope_type": "type", "factor": "factor", "original_max_position_embeddings": "original_context_length"}
# What llama.cpp takes where the metadata have none.
DEFAULTS: dict[str, Any] = {"rope_theta": 10000.0, "num_key_value_heads": None, "head_dim": None}
MAGIC = b"GGUF"
DAMAGE = OSError, ValueError, IndexError, KeyError, OverflowError
UNQUANTIZED = ("F32", "F16", "BF16", "F64")


class GgufFile:
    """An open GGUF file. Raises ConfigError, here and in its methods."""

    def __init__(self, path: Path) -> None:
        unreadable = f"checkpoint {path} cannot be read as GGUF"
        with raising(ConfigError, unreadable, *DAMAGE), path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError(f"it does not begin with {MAGIC.decode()}")
        if not find_spec("gguf"):
            raise ConfigError(f"checkpoint {path} needs the package gguf: pip install 'binade[hf]'")
        self.path, self._gguf = path, import_module("gguf")
        with raising(ConfigError, unreadable, *DAMAGE):
            self._reader = self._gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def settings(self) -> dict[str, Any]:
        """The metadata as a config.json has it."""
        kind = self.get("general.architecture")
        if kind != ARCHITECTURE:
            raise ConfigError(
                f"checkpoint {self.path} is a GGUF file of a {kind!r} model, but only {ARCHITECTURE} is supported: "
                "give the directory of its safetensors"
            )
        settings = {ours: self.get(f"{ARCHITECTURE}.{theirs}") for ours, theirs in SETTINGS.items()}
        known = DEFAULTS | {name: value for name, value in settings.items() if value is not None}
        scaling = {ours: self.get(f"{ARCHITECTURE}.rope.scaling.{theirs}") for ours, theirs in SCALING.items()}
        scaling = {name: value for name, value in scaling.items() if value is not None}
        rotary = self.get(f"{ARCHITECTURE}.rope.dimension_count")
        head = known["head_dim"] or known.get("hidden_size", 0) // max(1, known.get("num_attention_heads", 1))
        return known | {
            "model_type": ARCHITECTURE,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_scaling": None if scaling.get("rope_type", "none") == "none" else scaling,
            "partial_rotary_factor": rotary / head if rotary and head else 1.0,
        }

    def quantized(self) -> tuple[str, ...]:
        """The types of its quantized tensors, such as Q4_1, on whose grids the weights lie."""
        return tuple(sorted({kind for name in self._tensors if (kind := self.stored_as(name))}))

    def stored_as(self, name: str) -> str:
        """The type of a quantized tensor; "" if it is not quantized."""
        kind = str(self._tensors[name].tensor_type.name)
        return "" if kind in UNQUANTIZED else kind

    def names(self, expected: Iterable[str], layers: int) -> dict[str, str]:
        """The names of its tensors by their Hugging Face names, or by their own if unexpected."""
        table = self._gguf.get_tensor_name_map(self._gguf.MODEL_ARCH.LLAMA, layers)
        theirs = {table.get_name(name, try_suffixes=(".weight",)): name for name in expected}
        return {theirs.get(name, name): name for name in self._tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> np.ndarray:
        """A tensor, float32, dequantized."""
        tensor = self._tensors[name]
        with raising(ConfigError, f"checkpoint {self.path}: {name} cannot be read", ValueError, NotImplementedError):
            values = self._gguf.dequantize(tensor.data, tensor.tensor_type)
        weight = np.asarray(values, dtype=np.float32).reshape(self.shape(name))
        heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}.get(name.split(".")[-2])
        if heads is None:
            return weight
        # llama.cpp rotates neighboring rows of a head, Hugging Face rows that are half a head apart.
        count = self.get(f"{ARCHITECTURE}.attention.{heads}", self.get(f"{ARCHITECTURE}.attention.head_count"))
        return weight.reshape(count, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def open_gguf(path: Path) -> GgufFile:
    """The file at a path. Reading metadata takes seconds: an unchanged file is read once. Raises ConfigError."""
    try:
        state = path.stat()
    except OSError as error:
        raise ConfigError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    return _open(path, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=4)
def _open(path: Path, state: tuple[int, ...]) -> GgufFile:
    """state identifies the version of the file in the cache."""
    return GgufFile(path)
