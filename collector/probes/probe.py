"""What all probes have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from binade.data.segment import TensorRow
from binade.quant.summary import Summary


@dataclass(frozen=True)
class Repeat:
    """An input of a product whose forward pass was recomputed: its site's name, and the statistics of both passes."""

    site: str
    iteration: int
    first: Summary
    second: Summary


@dataclass(frozen=True)
class Hidden:
    """The site's name of a layer whose weight had a gradient although no backward product of the layer was seen."""

    site: str
    iteration: int


@dataclass(frozen=True)
class Finding:
    """A sentence for a warning, and the tensor that it is about: "layer2.up weight"."""

    iteration: int
    text: str
    place: str


class Probe(Protocol):
    """Sees what was recorded, on the writer's thread, and says what is wrong. One object for each run and rank."""

    def see(self, rows: Sequence[TensorRow], repeats: Sequence[Repeat], hidden: Sequence[Hidden]) -> Iterator[Finding]:
        """rows: those of a step, or of a part of one. repeats: its recomputed inputs. hidden: its layers
        whose backward products were not seen."""
        ...
