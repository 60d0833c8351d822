"""Which sites of a model are meant: by layer, by name and by module. No torch.

A list of layers holds, separated by commas,

    first, last        the first or the last layer
    3, 2-4             a layer by its number, from 1, or several
    anything else      a regular expression, searched in the names of the sites: layer1.qkv, layer1.core, layer2.router,
                       layer2.expert3.fc1. It is Python's, found anywhere in the name: layer1 is in layer12 too,
                       `layer1\\.` and `^layer1[.]core$` are not.

A comma separates unless it stands in braces, as in `expert[0-9]{1,2}`; no name holds one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from binade.collector.models.site import Site

LAST = -1
SEPARATOR = re.compile(r",(?![^{}]*\})")
NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


class SelectionError(ValueError):
    """The selection cannot be understood, or the model has nothing of it. The message says what it has."""


@dataclass(frozen=True)
class Term:
    """One item of a list of layers: the layers from the first to the second number, or a pattern for names."""

    text: str
    layers: tuple[int, int] | None = None
    pattern: re.Pattern[str] | None = None

    @classmethod
    def parse(cls, text: str) -> Term:
        if text in ("first", "last"):
            number = 1 if text == "first" else LAST
            return cls(text, (number, number))
        if found := NUMBERS.fullmatch(text):
            low, high = int(found[1]), int(found[2] or found[1])
            if low > high:
                raise SelectionError(f"{text} runs backwards: write {high}-{low}")
            return cls(text, (low, high))
        try:
            with warnings.catch_warnings(action="ignore"):  # of what Python may read otherwise one day
                return cls(text, pattern=re.compile(text))
        except (re.error, OverflowError, RecursionError) as error:
            raise SelectionError(f"{text!r} is neither a layer nor a regular expression: {error}") from None

    def of(self, sites: Sequence[Site]) -> set[Site]:
        if self.pattern:
            found = {site for site in sites if self.pattern.search(site.name)}
        else:
            last = max(site.layer_index for site in sites)
            low, high = (last if number == LAST else number for number in self.layers)
            inside = 1 <= low <= high <= last
            found = {site for site in sites if inside and low <= site.layer_index <= high}
        if not found:
            raise SelectionError(f"{self.text!r} is no layer of the model, which has {_existing(sites)}")
        return found


@dataclass(frozen=True)
class Selection:
    """Sites that one of the terms means (any, if there are none) and whose module is listed (any, if none is)."""

    terms: tuple[Term, ...] = ()
    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, layers: str = "", modules: Iterable[str] = ()) -> Selection:
        """layers as this module's text says, "" for all. Raises SelectionError for a bad regular expression, and for a
        list of nothing."""
        items = [item for item in map(str.strip, SEPARATOR.split(layers)) if item]
        if layers and not items:
            raise SelectionError(f"{layers!r} names no layer")
        return cls(tuple(map(Term.parse, items)), tuple(modules))

    def of(self, sites: Sequence[Site]) -> frozenset[Site]:
        """The chosen ones of a model's sites. Raises SelectionError for a term or module that none of them has, and if
        none is left."""
        known = dict.fromkeys(site.module for site in sites)
        for module in self.modules:
            if module not in known:
                raise SelectionError(f"module {module!r} is unknown: the model has {', '.join(known)}")
        meant = set().union(*(term.of(sites) for term in self.terms)) if self.terms else set(sites)
        chosen = frozenset(site for site in meant if not self.modules or site.module in self.modules)
        if not chosen:
            raise SelectionError(
                f"{', '.join(term.text for term in self.terms)} has no {', '.join(self.modules)}: "
                f"the model has {_existing(sites)}"
            )
        return chosen


def by_layer(sites: Sequence[Site], chosen: Collection[Site], word: str, others: str) -> list[str]:
    """What holds for which layers, in a few lines: "layers 1, 16: bf16", "layers 2-15: as below"."""
    layers: dict[str, list[int]] = {}
    for index in dict.fromkeys(site.layer_index for site in sites):
        here = [site for site in sites if site.layer_index == index]
        inside = [site for site in here if site in chosen]
        if not inside:
            said = others
        elif len(inside) == len(here):
            said = word
        else:
            said = f"{_modules(inside)} {word}, the rest {others}"
        layers.setdefault(said, []).append(index)
    return [f"layer{'s' if len(found) > 1 else ''} {_spans(found)}: {said}" for said, found in layers.items()]


def _modules(sites: Iterable[Site]) -> str:
    """The modules of one layer's sites: "core, fc1 of experts 0-3"."""
    experts: dict[str, list[int]] = {}
    for site in sites:
        experts.setdefault(site.module, []).extend([] if site.expert is None else [site.expert])
    return ", ".join(f"{name} of experts {_spans(found)}" if found else name for name, found in experts.items())


def _spans(numbers: Iterable[int]) -> str:
    """1, 3-5 of 1, 3, 4, 5"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return ", ".join("-".join(map(str, span)) for span in spans)


def _existing(sites: Sequence[Site]) -> str:
    """What there is to choose from, on one line."""
    named = {site.module: site.name for site in sites}
    last = max(site.layer_index for site in sites)
    return f"layers 1 to {last} and sites such as {', '.join(named.values())}"
