"""Checkpoints: the weights of a Hugging Face directory (safetensors) or a GGUF file, read into a GPTModel.

The names and shapes of all tensors are checked before a weight is read. Nothing is ever unpickled. A shortened model
takes the first layers of a longer checkpoint.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.models.shape import Shape
from binade.collector.models.specs import WeightSpec
from binade.collector.pretrained.causal_lm import CausalLM
from binade.collector.pretrained.directory import gguf_of, read_shape, readable
from binade.collector.pretrained.gguf_file import open_gguf
from binade.collector.pretrained.transformers_model import TransformersShape, load
from binade.collector.ranks import SINGLE, RankGroup
from binade.data.exchange.quantized.files import SafetensorsCheckpoint
from binade.data.exchange.quantized.stored import by

HEAD = "lm_head.weight"  # which a file may hold for a tied embedding too


def join(weight: WeightSpec, read: Mapping[str, Tensor]) -> Tensor:
    """The whole parameter from its tensors.

    Rows are taken in turns, `groups` times the next of each, as Megatron lays a group's queries, key and value out.
    With one group that is one tensor after the other.
    """
    tensors = [read[name].t() if weight.transposed else read[name] for name in weight.tensors]
    parts = [part for tensor in tensors for part in tensor.chunk(weight.fused)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.view(weight.groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


class Tensors(ABC):
    """The tensors of a checkpoint by their names at Hugging Face. files: all that determine the model. quantized: as in
    `GgufFile.quantized`."""

    sizes: Mapping[str, tuple[int, ...]]
    files: tuple[Path, ...]
    quantized: tuple[str, ...] = ()

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Raises ConfigError."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names and shapes are known to fit `shape`. loaded is a model of transformers."""

    path: Path
    shape: Shape
    tensors: Tensors
    loaded: CausalLM | None = None

    def build(self, group: RankGroup = SINGLE) -> GPTModel | CausalLM:
        """The model with these weights, on the default device. Raises ConfigError as `load_into`."""
        if self.loaded:
            return self.loaded.to(torch.get_default_device())
        model = GPTModel(self.shape, group)
        self.load_into(model)
        return model

    def load_into(self, model: GPTModel) -> None:
        """Overwrite every weight, cast to the parameter's dtype. Raises ConfigError if a file can no longer be read."""
        weights = {weight.name: weight for weight in self.shape.weights()}

        def whole(name: str, _: torch.Size) -> Tensor:
            return join(weights[name], {tensor: self.tensors.read(tensor) for tensor in weights[name].tensors})

        model.set_weights(whole)

    def identity(self) -> dict[str, Any]:
        """The identity recorded with a run: the same sha256 means the same model."""
        sha = hashlib.sha256()
        for path in self.tensors.files:
            with open(path, "rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
        return {"path": str(self.path.resolve()), "sha256": sha.hexdigest(), "quantized": list(self.tensors.quantized)}


def open_checkpoint(path: str | Path, shape: Shape) -> Checkpoint:
    """Check the checkpoint of a shape that was read from the same path, reading no weights but those of a model of
    transformers. The shape may have fewer layers: the last ones are then left out. Raises ConfigError."""
    path = Path(path)
    if isinstance(shape, TransformersShape):
        files = SafetensorsFiles(path)
        return Checkpoint(path, shape, files, load(path, files.weights if files.quantized else None))
    whole = replace(shape, layers=read_shape(path).layers)
    expected = {name: size for weight in whole.weights() for name, size in weight.tensors.items()}
    file = gguf_of(path)
    base = shape.modules["layers"].partition(".")[0]
    tensors = GgufTensors(file, expected, whole.layers) if file else SafetensorsFiles(path, f"{base}.")
    _compare(path, tensors.sizes, expected, (*shape.unused, *([HEAD] if shape.tied_embedding else [])))
    return Checkpoint(path, shape, tensors)


def _compare(
    path: Path, sizes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], unused: tuple[str, ...]
) -> None:
    left_out = {name for name in sizes if name.endswith(unused)}
    for problem, names in (
        ("lacks the tensor", sorted(expected.keys() - sizes.keys())),
        ("contains tensors that the model does not have:", sorted(sizes.keys() - expected.keys() - left_out)),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"checkpoint {path} {problem} {names[0]}{more}")
    for name, size in expected.items():
        if sizes[name] != size:
            raise ConfigError(
                f"checkpoint {path}: {name} is {by(sizes[name])}: expected {by(size)} from its dimensions"
            )


class GgufTensors(Tensors):
    """The tensors of a GGUF file, dequantized when they are read."""

    def __init__(self, path: Path, expected: Iterable[str], layers: int) -> None:
        self._file = open_gguf(path)
        self._names = self._file.names(expected, layers)
        self.sizes = {ours: self._file.shape(theirs) for ours, theirs in self._names.items()}
        self.files = (path,)
        self.quantized = self._file.quantized()

    def read(self, name: str) -> Tensor:
        return torch.tensor(self._file.read(self._names[name]))

    def stored_as(self, name: str) -> str:
        """The type of a quantized tensor, such as Q4_1; "" if it is not quantized."""
        return self._file.stored_as(self._names[name])


class SafetensorsFiles(Tensors):
    """The tensors of the safetensors files in a directory, dequantized when they are read. base: what the names begin
    with; a file of a model without LM head, such as the published GPT-2's, leaves it out."""

    def __init__(self, directory: Path, base: str = "") -> None:
        with readable():
            self._checkpoint = checkpoint = SafetensorsCheckpoint(directory)
            checkpoint.check()
            names = [*checkpoint.quantized, *checkpoint.plain]
            self._base = "" if any(name.startswith(base) for name in names) else base
            self.sizes = {self._base + name: checkpoint.size(name) for name in names}
        self.files = checkpoint.files
        self.quantized = tuple(sorted({checkpoint.stored_as(name) for name in checkpoint.quantized}))

    def read(self, name: str) -> Tensor:
        with readable():
            return self._checkpoint.read(name.removeprefix(self._base))

    def weights(self) -> dict[str, Tensor]:
        """All tensors."""
        return {name: self.read(name) for name in self.sizes}
