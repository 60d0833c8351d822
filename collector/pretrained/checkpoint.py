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
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from binade.collector.errors import ConfigError, raising
from binade.collector.models.model import GPTModel
from binade.collector.models.shape import Shape
from binade.collector.models.specs import WeightSpec
from binade.collector.pretrained.causal_lm import CausalLM
from binade.collector.pretrained.directory import CONFIG, FP8, block_of, gguf_of, read_json, read_shape
from binade.collector.pretrained.gguf_file import open_gguf
from binade.collector.pretrained.transformers_model import TransformersShape, load
from binade.collector.ranks import SINGLE, RankGroup

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Values of other dtypes are quantized, and meaningless without their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
SCALE = "_scale_inv"  # ends the names of the scales of weights in FP8, one for each block
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
        files, loaded = SafetensorsFiles(path), load(path)
        files.dequantize(loaded.model)
        return Checkpoint(path, shape, files, loaded)
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
                f"checkpoint {path}: {name} is {_by(sizes[name])}: expected {_by(size)} from its dimensions"
            )


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size)) or "a scalar"


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


class SafetensorsFiles(Tensors):
    """The tensors of the safetensors files in a directory, dequantized when they are read. base: what the names begin
    with; a file of a model without LM head, such as the published GPT-2's, leaves it out."""

    def __init__(self, directory: Path, base: str = "") -> None:
        self._block = block_of(directory, read_json(directory / CONFIG))
        self.quantized = FP8 if self._block else ()
        headers = {path: _header(path, (*DTYPES, *self.quantized)) for path in _files(directory)}
        names = [name for header in headers.values() for name in header]
        self._base = "" if any(name.startswith(base) for name in names) else base
        self.files = (directory / CONFIG, *headers)
        self.sizes = {self._base + name: size for header in headers.values() for name, size in header.items()}
        if self._block:
            self.sizes = {name: size for name, size in self.sizes.items() if not name.endswith(SCALE)}
        self._places: dict[str, Path] = {}
        for path, header in headers.items():
            for name in header:
                if (other := self._places.setdefault(name, path)) != path:
                    raise ConfigError(
                        f"checkpoint {directory} contains the tensor {name} in {other.name} and {path.name}: remove one"
                    )

    def read(self, name: str) -> Tensor:
        weight = self._read(name.removeprefix(self._base))
        if weight.dtype != torch.float8_e4m3fn:
            return weight
        scales = name.removeprefix(self._base) + SCALE
        if not self._block or scales not in self._places:
            raise ConfigError(
                f"checkpoint {self.files[0].parent}: {name} is in FP8, and its scales {scales} are missing"
            )
        scale = self._read(scales).float()
        blocks = tuple(-(-size // block) for size, block in zip(weight.shape, self._block, strict=True))
        if scale.shape != blocks:
            raise ConfigError(
                f"checkpoint {self.files[0].parent}: {scales} is {_by(tuple(scale.shape))}: expected {_by(blocks)}"
            )
        for axis, block in enumerate(self._block):
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, weight.shape[axis])
        return weight.float() * scale

    def dequantize(self, model: nn.Module) -> None:
        """Overwrite the weights of a model of transformers that are in FP8: transformers takes the last blocks of a
        weight to be as large as the others. Raises ConfigError where that matters and it gave a weight another name."""
        if not self._block:
            return
        parameters = dict(model.named_parameters())
        for name in (name.removesuffix(SCALE) for name in self._places if name.endswith(SCALE)):
            if name in parameters:
                parameters[name].data.copy_(self.read(name))
            elif any(size % block for size, block in zip(self.sizes[name], self._block, strict=True)):
                raise ConfigError(
                    f"checkpoint {self.files[0].parent}: {name} is {_by(self.sizes[name])}, not whole blocks of "
                    f"{_by(self._block)}, and cannot be dequantized: give a checkpoint that is"
                )

    def _read(self, name: str) -> Tensor:
        path = self._places[name]
        unreadable = raising(ConfigError, f"checkpoint {path} cannot be read", OSError, SafetensorError)
        with unreadable, safe_open(path, framework="pt") as file:
            weight: Tensor = file.get_tensor(name)
            return weight


def _files(directory: Path) -> list[Path]:
    """The safetensors files, by the index if there is one."""
    if (directory / INDEX).is_file():
        index = read_json(directory / INDEX)
        named = index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ConfigError(f"checkpoint index {directory / INDEX} has no weight_map of file names")
        names = sorted(set(named.values()))
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"checkpoint index {directory / INDEX} refers to a file outside its directory")
    elif (directory / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        raise ConfigError(
            f"checkpoint {directory} contains no weights: expected {WEIGHTS} or {INDEX} (other formats are not read)"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {directory} lacks {missing[0]}, which its index names")
    return [directory / name for name in names]


def _header(path: Path, known: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    what = f"checkpoint {path} is not a readable safetensors file"
    with raising(ConfigError, what, OSError, SafetensorError), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is not a mapping)
        sizes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
        dtypes = {name: tensor.get_dtype() for name, tensor in slices.items()}
    for name, dtype in dtypes.items():
        if name.endswith(".weight") and dtype not in known:  # buffers may be of integers
            raise ConfigError(
                f"checkpoint {path}: {name} is {dtype}, but only {', '.join(known)} can be loaded: dequantize it"
            )
    return sizes
