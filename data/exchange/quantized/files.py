"""The safetensors files of a checkpoint, quantized or not: names and shapes of its weights, and each weight's values.

Weights are read one at a time. Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from binade.data.exchange.quantized.layouts import LAYOUTS, WeightLayout
from binade.data.exchange.quantized.rules import settings_of
from binade.data.exchange.quantized.settings import (
    CONFIG,
    CheckpointError,
    check_method,
    quantization_of,
    read_settings,
)
from binade.data.exchange.quantized.stored import Decoded, LayoutError, StoredWeight, by
from binade.data.run.store import TensorFileError
from binade.data.words.text import and_more, describe

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Values of other dtypes are quantized, and meaningless without their scales.
DTYPES = ("F64", "F32", "F16", "BF16")
# What a quantized module has besides its weight: scales of activations and caches, and marks of the tool.
BESIDES = re.compile(r"[a-z_0-9]*(?:scale|zero_point|amax|global_scale)[a-z_0-9]*|weight_format|weight_g_idx|g_idx")


# What tensors with the codes of a weight are called.
CODES = re.compile(r"weight|qweight|.+_(?:packed|qdata|blocks)")


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor is: the file, its dtype as safetensors names it, and its shape."""

    path: Path
    dtype: str
    size: tuple[int, ...]


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight that is stored in a layout, as the tensors of these names."""

    layout: WeightLayout
    names: Mapping[str, str]


class SafetensorsCheckpoint:
    """The weights of a directory, by their names in the model. Raises CheckpointError, here and in its methods.

    quantized  those that are stored in a layout
    plain      all other tensors, but those that belong to a quantized module
    broken     tensors that cannot be decoded, with the reason
    absent     tensors that the index names and no file has, with the file that should have them
    files      the configuration and all files with weights
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = quantization_of(directory, read_settings(directory / CONFIG))
        check_method(directory, self.settings)
        headers = {path: _header(path) for path in _files(directory)}
        self.files = (directory / CONFIG, *headers)
        self._facts = {path: facts for path, (_, facts) in headers.items()}
        self._places: dict[str, TensorPlace] = {}
        for places, _ in headers.values():
            for name, place in places.items():
                if (other := self._places.setdefault(name, place)) is not place:
                    raise CheckpointError(
                        f"checkpoint {directory} contains the tensor {name} in {other.path.name} and "
                        f"{place.path.name}: remove one"
                    )
        self.quantized: dict[str, QuantizedWeight] = {}
        self.plain: dict[str, TensorPlace] = {}
        self.broken: dict[str, str] = {}
        self.absent = {name: file for name, file in _index(directory).items() if name not in self._places}
        self._sort()

    def _sort(self) -> None:
        dtypes = {name: place.dtype for name, place in self._places.items()}
        layouts = [layout for layout in LAYOUTS if layout.method == self.settings.get("quant_method")]
        taken: set[str] = set()
        for name in dtypes:
            fitting = (layout for layout in layouts if layout.dimensions in (None, len(self._places[name].size)))
            found = next(((layout, *pair) for layout in fitting if (pair := layout.find(name, dtypes))), None)
            if found and name not in taken:
                layout, weight, names = found
                self.quantized[weight] = QuantizedWeight(layout, names)
                taken.update(names.values())
        coded = [name for name, dtype in dtypes.items() if dtype not in DTYPES and CODES.fullmatch(_last(name))]
        modules = {name.rpartition(".")[0] for name in (*taken, *coded)}
        for name, place in self._places.items():
            module = name.rpartition(".")[0]
            beside = BESIDES.fullmatch(_last(name))
            if name in taken or (beside and {module, module.rpartition(".")[0]} & modules):
                continue
            self.plain[name] = place
            if place.dtype not in DTYPES and not beside:
                codes = [layout for layout in layouts if layout.has_codes(name)]
                if codes or name in coded:
                    self.broken[name] = self._reason(name, codes)

    def _reason(self, name: str, layouts: list[WeightLayout]) -> str:
        """Why a tensor that is not of floating-point numbers cannot be decoded. layouts: that its name fits."""
        said = f"{name} is {self._places[name].dtype}"
        if not self.settings:
            return f"{said}, and {CONFIG} has no quantization_config: expected {', '.join(DTYPES)}"
        if not layouts:
            return f"{said}, but only {', '.join(DTYPES)} can be loaded: dequantize it"
        most = max(len(layout.codes) for layout in layouts)  # {module}.{param} fits any name
        layouts = [layout for layout in layouts if len(layout.codes) == most]
        fitting = [layout for layout in layouts if self._places[name].dtype in layout.dtypes]
        if not fitting:
            codes = ", ".join(dict.fromkeys(dtype for one in layouts for dtype in one.dtypes))
            return f"{said}: expected codes ({codes}) or values ({', '.join(DTYPES)})"
        needed = [part for layout in fitting for part in layout.needed(name)]
        if missing := [part for part in needed if part not in self._places]:
            return f"{said}, and its scales {missing[0]} are missing"
        return f"{said}, and its scales {needed[0]} are {self._places[needed[0]].dtype}, which no layout has"

    def place(self, name: str) -> TensorPlace:
        """Where the codes of a weight are, or the tensor itself."""
        weight = self.quantized.get(name)
        return self._places[weight.names["codes"] if weight else name]

    def size(self, name: str) -> tuple[int, ...]:
        """The shape of a weight in the model."""
        weight = self.quantized.get(name)
        if weight is None:
            return self.plain[name].size
        with self._explained(name):
            stored = self.stored(name)
            if len(stored.sizes["codes"]) < 2 or 0 in stored.sizes["codes"]:
                raise LayoutError(
                    f"{stored.names['codes']} is {by(stored.sizes['codes'])}: expected two axes or more, with values"
                )
            return weight.layout.shape(stored)

    def check(self) -> None:
        """Raise CheckpointError if a weight cannot be read."""
        for reason in self.broken.values():
            raise CheckpointError(f"checkpoint {self.directory}: {reason}")

    def read(self, name: str) -> Tensor:
        """A weight as the model has it: float32 if it is dequantized."""
        if name not in self.quantized:
            return self._tensor(name)
        values = self.decoded(name).values
        return values.mT.contiguous() if self.quantized[name].layout.transposed else values

    def decoded(self, name: str) -> Decoded:
        """The values of a quantized weight, [..., out, in]."""
        self.size(name)
        with self._explained(name):
            return self.quantized[name].layout.decode(self.stored(name))

    def stored_as(self, name: str) -> str:
        """What a quantized weight is stored in, for people: FP8, INT4 …"""
        with self._explained(name):
            return self.quantized[name].layout.words(self.stored(name))

    def stored(self, name: str) -> StoredWeight:
        names = self.quantized[name].names
        sizes = {role: self._places[tensor].size for role, tensor in names.items()}
        facts = self._facts[self._places[names["codes"]].path].get(name, {})
        settings = settings_of(self.settings, name.removesuffix(".weight"))
        return StoredWeight(names, sizes, lambda role: self._tensor(names[role]), settings, facts)

    def _tensor(self, name: str) -> Tensor:
        path = self._places[name].path
        with _readable(path, "cannot be read"), safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Tensors of a weight may have any shape and any values: what torch refuses is said of the weight."""
        try:
            yield
        except LayoutError as error:
            of = "" if name.removesuffix(".weight") in str(error) else f"{name}: "
            raise CheckpointError(f"checkpoint {self.directory}: {of}{error}") from error
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {self.directory}: the tensors of {name} do not fit together: {describe(error)}"
            ) from error


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@contextmanager
def _readable(path: Path, problem: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {path} {problem}: {describe(error)}") from error


def _files(directory: Path) -> list[Path]:
    """The safetensors files, by the index if there is one."""
    if (directory / INDEX).is_file():
        names = sorted({*_index(directory).values()})
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"checkpoint index {directory / INDEX} refers to a file outside its directory")
    elif (directory / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        raise CheckpointError(
            f"checkpoint {directory} contains no weights: expected {WEIGHTS} or {INDEX} (other formats are not read)"
        )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"checkpoint {directory} lacks {missing[0]}{and_more(missing)}, which its index names")
    return [directory / name for name in names]


def _index(directory: Path) -> dict[str, str]:
    """The file of each tensor as the index has it; {} without one."""
    if not (directory / INDEX).is_file():
        return {}
    files = read_settings(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"checkpoint index {directory / INDEX} has no weight_map of file names")
    return files


def _header(path: Path) -> tuple[dict[str, TensorPlace], dict[str, Mapping[str, Any]]]:
    """The tensors of a file, and what torchao says of each weight in the header."""
    with _readable(path, "is not a readable safetensors file"), safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (it is not a mapping)
        places = {
            name: TensorPlace(path, tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()
        }
        metadata = file.metadata() or {}
    return places, {name: facts for name, text in metadata.items() if (facts := _facts(text))}


def _facts(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return {}
    facts = found.get("_data") if isinstance(found, dict) else None
    return facts if isinstance(facts, dict) else {}


def dequantized(path: Path, name: str) -> Tensor | None:
    """The values of a quantized weight whose codes are in a file; None if the file is not of a checkpoint or has no
    such weight. Raises TensorFileError."""
    if not (path.parent / CONFIG).is_file():
        return None
    try:
        checkpoint = SafetensorsCheckpoint(path.parent)
        if name not in checkpoint.quantized or checkpoint.place(name).path.name != path.name:
            return None
        return checkpoint.read(name)
    except CheckpointError as error:
        raise TensorFileError(str(error)) from error
