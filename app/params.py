"""What a view's parameters may be: the texts of an address or a session, read against what there is. No Streamlit.

A page says which parameters it has (`One`, `Many`, `Whole`, `Known`). Reading never fails: what makes no sense is left
at its default, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from binade.data.filter import FIELDS, Filter

TITLES = {
    "run_id": "Run",
    "model": "Model",
    "size": "Size",
    "dataset": "Dataset",
    "recipe": "Recipe",
    "quant_type": "Quant type",
    "layer_type": "Layer type",
    "layer_index": "Layer",
    "module": "Module",
    "component": "Component",
    "operation": "Operation",
    "phase": "Phase",
    "tensor_name": "Tensor",
    "iteration": "Iteration",
    "micro_batch": "Micro-batch",
    "rank": "Rank",
    "expert": "Expert",
    "stage": "Stage",
}


@dataclass(frozen=True)
class One:
    """One of these; the first is the default."""

    allowed: tuple[str, ...]

    @property
    def default(self) -> str | None:
        return self.allowed[0] if self.allowed else None

    def read(self, texts: list[str]) -> tuple[str | None, list[str]]:
        """(the value, texts that make no sense)."""
        bad = [text for text in texts if text not in self.allowed]
        good = [text for text in texts if text in self.allowed]
        return (good[0] if good else self.default), bad

    def texts(self, value: str | None) -> list[str]:
        return [] if value is None or value == self.default else [value]


@dataclass(frozen=True)
class Many:
    """Any of these."""

    allowed: tuple[str, ...]
    default: tuple[str, ...] = ()

    def read(self, texts: list[str]) -> tuple[list[str], list[str]]:
        bad = [text for text in texts if text not in self.allowed]
        good = [text for text in dict.fromkeys(texts) if text in self.allowed]
        return (good or list(self.default)), bad

    def texts(self, value: list[str]) -> list[str]:
        return [] if tuple(value) == self.default else list(value)


@dataclass(frozen=True)
class Whole:
    """A whole number from low to high; without a default it may be None."""

    low: int
    high: int
    default: int | None = None

    def read(self, texts: list[str]) -> tuple[int | None, list[str]]:
        for text in texts:
            if text.isdecimal() and len(text) < 12 and self.low <= int(text) <= self.high:
                return int(text), []
        return self.default, texts

    def texts(self, value: int) -> list[str]:
        return [] if value == self.default else [str(value)]


@dataclass(frozen=True)
class Known:
    """A name that `known` knows; None by default."""

    known: Callable[[str], bool]

    def read(self, texts: list[str]) -> tuple[str | None, list[str]]:
        bad = [text for text in texts if not self.known(text)]
        good = [text for text in texts if text not in bad]
        return (good[0] if good else None), bad

    def texts(self, value: str | None) -> list[str]:
        return [] if value is None else [value]


Param = One | Many | Whole | Known


def read(params: Mapping[str, Param], query: Mapping[str, list[str]]) -> tuple[dict[str, Any], list[str]]:
    """(every parameter's value, a sentence for each text that makes no sense)."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, param in params.items():
        values[name], bad = param.read(query.get(name, []))
        problems += [f"The address asks for {name} {text[:40]!r}, which is not known." for text in bad]
    return values, problems


def texts(params: Mapping[str, Param], values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Every parameter that has a value, defaults too: what a view needs to be the same elsewhere."""
    found = {}
    for name in params:
        value = values.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if listed:
            found[name] = [str(each) for each in listed]
    return found


def read_filter(facets: Mapping[str, list[Any]], query: Mapping[str, list[str]]) -> tuple[Filter, list[str]]:
    """(the filter of those values that occur, a sentence for each that does not or makes no sense)."""
    wanted, problems = Filter.from_query({name: query.get(name, []) for name in FIELDS})
    kept: dict[str, list[str | int]] = {}
    for name, values in wanted.items():
        known = [value for value in values if value in facets.get(name, [])]
        problems += [
            f"The address asks for {TITLES[name].lower()} {str(value)[:40]!r}, which is not here."
            for value in values
            if value not in known
        ]
        kept[name] = known
    return Filter.from_dict(kept), problems
