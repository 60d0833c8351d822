"""Selects sites of a model by layer, name and module. No torch.

A list of layers is separated by commas:

    first, last        the first or the last layer; first 2, last 8: as many of them; last 15%: that share of them,
                       rounded up. In a model of several towers, such as one for images and one for text, of each tower
    mtp                the blocks of multi-token prediction, if the model has them
    3, 2-4             a layer by its number, from 1, or several
    anything else      a regular expression, searched anywhere in the names of the sites: layer1.qkv, layer1.core,
                       layer2.router, layer2.expert3.fc1. layer1 also finds layer12, `layer1\\.` does not. Its syntax is
                       RE2's, without lookahead and backreferences: a search takes linear time.
    !                  before any of these: all sites but those

A comma in braces does not separate, as in `expert[0-9]{1,2}`. No name contains one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import re2

from binade.collector.errors import ConfigError
from binade.collector.models.site import MTP, Site
from binade.data.words.text import spans

LAST = -1
QUIET = re2.Options()
QUIET.log_errors = False  # they are raised
SEPARATOR = re.compile(r",(?![^{}]*\})")
NUMBERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
ENDS = re.compile(r"(first|last)(?: +([1-9][0-9]{0,8})(%?))?")


class SelectionError(ConfigError):
    """The selection cannot be parsed, or selects nothing. The message lists what the model has."""


@dataclass(frozen=True)
class Term:
    """One item of a list of layers: a tower that a model may lack, a pattern for names, or the layers from the first
    number to the second. Negative numbers count from the last layer, which is -1. percent: whether the number of layers
    at an end is a share of all."""

    text: str
    layers: tuple[int, int] = (1, LAST)
    percent: bool = False
    pattern: Any = None  # re2 has no types
    tower: str = ""
    negated: bool = False

    @classmethod
    def parse(cls, text: str) -> Term:
        if text.startswith("!"):
            rest = text.lstrip("! ")
            return replace(cls.parse(rest), text=text, negated=text[: len(text) - len(rest)].count("!") % 2 == 1)
        if text == MTP:
            return cls(text, tower=MTP)
        if match := ENDS.fullmatch(text):
            number = int(match[2] or 1)
            return cls(text, (1, number) if match[1] == "first" else (-number, LAST), percent=bool(match[3]))
        if match := NUMBERS.fullmatch(text):
            low, high = int(match[1]), int(match[2] or match[1])
            if low > high:
                raise SelectionError(f"{text} is reversed: write {high}-{low}")
            return cls(text, (low, high))
        try:
            return cls(text, pattern=re2.compile(text, QUIET))
        except re2.error as error:
            raise SelectionError(
                f"{text!r} is neither a layer nor a regular expression: {error.args[0].decode()}"
            ) from None
        except UnicodeEncodeError:
            raise SelectionError(f"{text!r} is not valid Unicode") from None

    def _numbers(self, last: int) -> range:
        """The layers of a tower, of which this is the last one; empty if it lacks one of them."""
        low, high = self.layers
        if self.percent:
            low, high = (low, -(-high * last // 100)) if low == 1 else (low * last // 100, high)
        low, high = (last + 1 + number if number < 0 else number for number in (low, high))
        return range(low, high + 1) if 1 <= low <= high <= last else range(0)

    def of(self, sites: Sequence[Site]) -> set[Site]:
        if self.tower:
            selected = {site for site in sites if site.tower == self.tower}
        elif self.pattern:
            selected = {site for site in sites if self.pattern.search(site.name)}
        else:
            towers = {site.tower: 0 for site in sites}
            for site in sites:
                towers[site.tower] = max(towers[site.tower], site.layer_index)
            inside = {tower: self._numbers(last) for tower, last in towers.items()}
            selected = {site for site in sites if site.layer_index in inside[site.tower]}
        if not selected and not self.tower:
            raise SelectionError(f"{self.text!r} is not a layer of the model, which has {_existing(sites)}")
        if not self.negated:
            return selected
        if selected == set(sites):
            raise SelectionError(f"{self.text!r} leaves no layer of the model, which has {_existing(sites)}")
        return set(sites) - selected


@dataclass(frozen=True)
class SiteSelection:
    """The sites that match one of the terms (all, if there are none) and whose module is listed (all, if none is)."""

    terms: tuple[Term, ...] = ()
    modules: tuple[str, ...] = ()

    @classmethod
    def parse(cls, layers: str = "", modules: Iterable[str] = ()) -> SiteSelection:
        """layers is a list as described at the top of this module, "" for all. Raises SelectionError for a bad regular
        expression or an empty list."""
        items = [item for item in map(str.strip, SEPARATOR.split(layers)) if item]
        if layers and not items:
            raise SelectionError(f"{layers!r} does not name a layer")
        return cls(tuple(map(Term.parse, items)), tuple(modules))

    def of(self, sites: Sequence[Site]) -> frozenset[Site]:
        """The selected ones of a model's sites. Raises SelectionError if a term, a module or the whole selects none."""
        known = dict.fromkeys(site.module for site in sites)
        for module in self.modules:
            if module not in known:
                raise SelectionError(f"unknown module {module!r}: expected one of {', '.join(known)}")
        selected = {site for term in self.terms for site in term.of(sites)} if self.terms else set(sites)
        chosen = frozenset(site for site in selected if not self.modules or site.module in self.modules)
        if not chosen and not all(term.tower for term in self.terms):
            raise SelectionError(
                f"{', '.join(term.text for term in self.terms)} has no {', '.join(self.modules)}: "
                f"the model has {_existing(sites)}"
            )
        return chosen


def by_layer(sites: Sequence[Site], chosen: Collection[Site], word: str, others: str) -> list[str]:
    """A description of the chosen layers in a few lines: "layers 1, 16: bf16", "layers 2-15: as below". word describes
    the chosen sites, others the rest."""
    layers: dict[str, list[int]] = {}
    for index in dict.fromkeys(site.layer_index for site in sites):
        here = [site for site in sites if site.layer_index == index]
        inside = [site for site in here if site in chosen]
        if not inside:
            text = others
        elif len(inside) == len(here):
            text = word
        else:
            text = f"{_modules(inside)} {word}, the rest {others}"
        layers.setdefault(text, []).append(index)
    return [f"layer{'s' if len(indices) > 1 else ''} {spans(indices)}: {text}" for text, indices in layers.items()]


def _modules(sites: Iterable[Site]) -> str:
    """The modules of one layer's sites: "core, fc1 of experts 0-3"."""
    experts: dict[str, list[int]] = {}
    for site in sites:
        experts.setdefault(site.module, []).extend([] if site.expert is None else [site.expert])
    return ", ".join(f"{name} of experts {spans(indices)}" if indices else name for name, indices in experts.items())


def _existing(sites: Sequence[Site]) -> str:
    """The layers and modules of a model, on one line."""
    named = {site.module: site.name for site in sites}
    last = max(site.layer_index for site in sites)
    return f"layers 1 to {last} and sites such as {', '.join(named.values())}"
