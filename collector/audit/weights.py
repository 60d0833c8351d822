"""The weights of a checkpoint as an audit reads them, one at a time: safetensors in every layout, or GGUF."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from binade.collector.errors import ConfigError
from binade.collector.pretrained.checkpoint import GgufTensors
from binade.collector.pretrained.directory import gguf_of, read_shape, readable
from binade.data.exchange.quantized.files import DTYPES, SafetensorsCheckpoint
from binade.data.exchange.quantized.rules import Rule, disagreement, rules_of, settings_of
from binade.data.exchange.quantized.settings import CheckpointError
from binade.data.exchange.quantized.stored import Decoded
from binade.data.words.text import natural


@dataclass(frozen=True)
class CheckpointWeight:
    """A weight of a checkpoint.

    stored   what it is stored in: FP8, NVFP4, Q4_K; "" if it is not quantized
    dtype    of its codes, or of its values
    file     that has its codes or values; None if they are read only as a whole file
    decoded  its values [..., out, in]; scales are empty if it is not quantized, or not known
    """

    name: str
    stored: str
    dtype: str
    file: Path | None
    decoded: Decoded

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def bits(self) -> int:
        """Of a code, as the name of what it is stored in has them: FP8, NVFP4, INT3, Q2_K. 16 if that has none."""
        named = re.search(r"\d+", self.stored)
        return int(named[0]) if named else 16


class AuditedCheckpoint:
    """The weights of a checkpoint, and what its configuration says of them. Raises ConfigError.

    method    that quantized it, "" if none did
    rules     of the configuration
    problems  of tensors that cannot be decoded, by name
    files     all that were read
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: dict[str, str] = {}
        self.rules: list[Rule] = []
        self._gguf: GgufTensors | None = None
        if file := gguf_of(path):
            shape = read_shape(path)
            expected = [name for weight in shape.weights() for name in weight.tensors]
            self._gguf = GgufTensors(file, expected, shape.layers)
            self.method, self.files = "GGUF", self._gguf.files
            self.sizes = dict(self._gguf.sizes)
            return
        with readable():
            self._safetensors = checkpoint = SafetensorsCheckpoint(path)
        self.method, self.files = str(checkpoint.settings.get("quant_method") or ""), checkpoint.files
        self.rules = rules_of(checkpoint.settings)
        self.problems = {
            name: f"the index says that {file} has {name}, which it does not have"
            for name, file in checkpoint.absent.items()
        } | checkpoint.broken
        self.sizes = {name: place.size for name, place in checkpoint.plain.items() if place.dtype in DTYPES}
        for name in checkpoint.quantized:
            try:
                self.sizes[name] = checkpoint.size(name)
            except CheckpointError as error:
                self.problems[name] = str(error)

    @property
    def names(self) -> list[str]:
        """The weights: all tensors of two or more axes, in natural order."""
        return sorted((name for name, size in self.sizes.items() if len(size) > 1), key=natural)

    @property
    def all_names(self) -> set[str]:
        """The names of all tensors, those that cannot be decoded included."""
        return {*self.sizes, *self.problems}

    @property
    def modules(self) -> set[str]:
        """The paths of all modules that have a tensor. The head may be tied to the embedding."""
        named = {name.removesuffix(".weight") for name in self.all_names}
        parents = {name.rpartition(".")[0] for name in named if not name.endswith(".weight")}
        return named | parents | {"lm_head"}

    def weights(self) -> Iterator[CheckpointWeight]:
        """Each weight, read when it is reached. One that cannot be decoded is a problem."""
        for name in self.names:
            try:
                yield self.weight(name)
            except (CheckpointError, ConfigError) as error:
                self.problems[name] = str(error)

    def weight(self, name: str) -> CheckpointWeight:
        """Raises CheckpointError or ConfigError."""
        if self._gguf:
            stored = self._gguf.stored_as(name)
            return CheckpointWeight(name, stored, stored or "float", None, _plain(self._gguf.read(name)))
        checkpoint = self._safetensors
        place = checkpoint.place(name)
        if name not in checkpoint.quantized:
            return CheckpointWeight(name, "", place.dtype, place.path, _plain(checkpoint.read(name)))
        decoded = checkpoint.decoded(name)
        return CheckpointWeight(name, checkpoint.stored_as(name), place.dtype, place.path, decoded)

    def original(self, like: CheckpointWeight, transposed: bool) -> Tensor | None:
        """The weight of the same name, as its values are laid out there; None if there is none. Raises ConfigError."""
        if like.name not in self.sizes:
            return None
        with readable():
            values = self.weight(like.name).decoded.values
        return values.mT.contiguous() if transposed else values

    def is_transposed(self, name: str) -> bool:
        """Whether the values of a weight are those of the parameter transposed."""
        weight = None if self._gguf else self._safetensors.quantized.get(name)
        return weight is not None and weight.layout.transposed

    def disagreement(self, weight: CheckpointWeight) -> str:
        """What the configuration says of the format of a quantized weight that is not so, or ""."""
        settings = {} if self._gguf else settings_of(self._safetensors.settings, weight.module)
        return disagreement(settings, weight.stored, weight.decoded.block)

    def excluding(self, module: str) -> Rule | None:
        """The first rule that leaves a module out."""
        return next((rule for rule in self.rules if rule.excludes and rule.matches(module)), None)


def _plain(values: Tensor) -> Decoded:
    return Decoded(values, torch.empty(0))
