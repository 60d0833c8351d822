"""Hugging Face checkpoints: config.json and safetensors files, read into a GPTModel.

The whole checkpoint is checked before a weight is read: its dimensions, and the names and shapes of its tensors,
against the model's. Nothing is ever unpickled. A shortened model takes the first layers of a longer checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.models.shape import Shape
from binade.data.text import describe

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Values of other dtypes are quantized: they mean something only with their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
# Bounds the names that are made before any is looked up. No published model has nearly as many.
MOST_LAYERS = 1000


@dataclass(frozen=True)
class Source:
    """The tensors of a checkpoint that one weight of the model is joined from, as names and shapes.

    Rows are taken in turns, `groups` times the next of each, as Megatron lays a group's queries, key and value out.
    With one group that is one tensor after the other.
    """

    tensors: Mapping[str, tuple[int, ...]]
    groups: int = 1

    def join(self, read: Mapping[str, Tensor]) -> Tensor:
        parts = [read[name] for name in self.tensors]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.view(self.groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)


def sources(shape: Shape) -> dict[str, Source]:
    """Where each parameter of GPTModel(shape) comes from in a Hugging Face checkpoint, by the parameter's name."""
    table = (shape.vocab, shape.hidden)
    found = {"embedding.weight": Source({"model.embed_tokens.weight": table})}
    for layer in range(shape.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for norm in shape.norms(layer + 1):
            found[f"{ours}.{norm.path}.weight"] = Source({f"{theirs}.{norm.tensor}.weight": (norm.width,)})
        for spec in shape.linears(layer + 1):
            parts = {f"{theirs}.{name}.weight": (rows, spec.inputs) for name, rows in spec.tensors.items()}
            found[f"{ours}.{spec.path}.weight"] = Source(parts, spec.groups)
    found["final_layernorm.weight"] = Source({"model.norm.weight": (shape.hidden,)})
    if not shape.tied_embedding:
        found["output_layer.weight"] = Source({"lm_head.weight": table})
    return found


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose names and shapes are known to fit `shape`. files is the file of each tensor that is used."""

    directory: Path
    shape: Shape
    files: dict[str, Path]

    def load_into(self, model: GPTModel) -> None:
        """Overwrite every weight, cast to the parameter's dtype. Raises ConfigError if a file cannot be read now."""
        known = sources(self.shape)

        def whole(name: str, _: torch.Size) -> Tensor:
            source = known[name]
            return source.join({theirs: self._read(theirs) for theirs in source.tensors})

        model.set_weights(whole)

    def _read(self, name: str) -> Tensor:
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                weight: Tensor = file.get_tensor(name)
                return weight
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"checkpoint {path} cannot be read: {error}") from error


def open_checkpoint(directory: str | Path, shape: Shape, layers: int | None = None) -> Checkpoint:
    """Check a checkpoint against a model, reading no weights. layers is --layers: where it is given, the checkpoint may
    have more, and those are left out. Raises ConfigError."""
    directory = Path(directory)
    theirs = read_shape(directory)
    if type(theirs) is not type(shape):
        raise ConfigError(f"checkpoint {directory} is a {theirs.family}, the model is a {shape.family}")
    if theirs.layers < shape.layers or (theirs.layers > shape.layers and layers is None):
        fitting = f"use --layers {theirs.layers}" if theirs.layers < shape.layers else "use the model of that size"
        raise ConfigError(f"checkpoint {directory} has {theirs.layers} layers, the model {shape.layers}: {fitting}")
    ours, found = asdict(shape), asdict(theirs)
    differing = [name for name in ours if name not in shape.not_compared and ours[name] != found[name]]
    if differing:
        said = "; ".join(f"{name} is {found[name]}, the model's is {ours[name]}" for name in differing)
        raise ConfigError(f"checkpoint {directory} is of another shape: {said}")
    headers = {path: _header(path) for path in _files(directory)}
    files = {name: path for path, header in headers.items() for name in header}
    if len(files) < sum(len(header) for header in headers.values()):
        raise ConfigError(f"checkpoint {directory} holds a tensor in two of its files: keep one copy")
    sizes = {name: size for header in headers.values() for name, size in header.items()}
    _compare(directory, sizes, shape, theirs.layers)
    return Checkpoint(directory, shape, files)


def _compare(directory: Path, sizes: dict[str, tuple[int, ...]], shape: Shape, layers: int) -> None:
    expected = {
        name: size
        for source in sources(replace(shape, layers=layers)).values()
        for name, size in source.tensors.items()
    }
    for problem, names in (
        ("lacks", sorted(expected.keys() - sizes.keys())),
        ("has, beyond those of the model,", sorted(sizes.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(f"checkpoint {directory} {problem} the tensor {names[0]}{more}")
    for name, size in expected.items():
        if sizes[name] != size:
            raise ConfigError(
                f"checkpoint {directory}: {name} is {_by(sizes[name])}, {_by(size)} was expected from its config.json"
            )


def _by(size: tuple[int, ...]) -> str:
    return " x ".join(map(str, size)) or "a scalar"


def _files(directory: Path) -> list[Path]:
    """The safetensors files, by the index if there is one."""
    if (directory / INDEX).is_file():
        index = _read_json(directory / INDEX)
        named = index.get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise ConfigError(f"checkpoint index {directory / INDEX} has no weight_map of file names")
        names = sorted(set(named.values()))
        if any(Path(name).name != name for name in names):
            raise ConfigError(f"checkpoint index {directory / INDEX} names a file outside its directory")
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        raise ConfigError(
            f"checkpoint {directory} holds no weights: {SINGLE} or {INDEX} was expected (other formats are not read)"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise ConfigError(f"checkpoint {directory} lacks {missing[0]}, which its index names")
    return [directory / name for name in names]


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is no mapping)
            sizes = {name: tuple(found.get_shape()) for name, found in slices.items()}
            dtypes = {name: found.get_dtype() for name, found in slices.items()}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"checkpoint {path} is no readable safetensors file: {describe(error)}") from error
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(f"checkpoint {path}: {name} is {dtype}, {', '.join(DTYPES)} can be loaded: unquantize it")
    return sizes


def _read_json(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"checkpoint file {path} is not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"checkpoint file {path} is not a JSON object")
    return settings


def read_shape(directory: Path) -> Shape:
    """The dimensions in a checkpoint's config.json. Raises ConfigError."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"checkpoint {directory} has no config.json: give the directory of a Hugging Face model")
    settings = _read_json(path)
    kind = settings.get("model_type")
    families = {type(shape).model_type: type(shape) for sizes in MODELS.values() for shape in sizes.values()}
    if kind not in families:
        raise ConfigError(f"checkpoint {directory} is a {kind!r} model: {' and '.join(families)} can be loaded")
    if settings.get("quantization_config"):
        raise ConfigError(f"checkpoint {directory} is quantized (quantization_config): give one that is not")
    for name, value in families[kind].fixed.items():
        if settings.get(name, value) not in (value, None):
            raise ConfigError(f"checkpoint {directory} has {name} {settings[name]!r}, the models here {value!r}")
    try:
        shape = families[kind].from_settings(settings)
        if not isinstance(shape.layers, int):
            raise TypeError(f"num_hidden_layers is {shape.layers!r}")
        if not 1 <= shape.layers <= MOST_LAYERS:
            raise ValueError(f"num_hidden_layers is {shape.layers}, 1 to {MOST_LAYERS} were expected")
        return shape
    except KeyError as error:
        raise ConfigError(f"checkpoint {directory}: config.json lacks {error}") from error
    except (AttributeError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"checkpoint {directory}: config.json cannot be understood: {error}") from error
