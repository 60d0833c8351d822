"""The parameters of views, read from the texts of an address or a session. No Streamlit.

A page declares its parameters (`One`, `Many`, `Whole`, `Range`, `Known`). Reading never fails: a parameter whose text
makes no sense is left at its default, and a sentence says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from binade.data.index.catalog import USED, Catalog
from binade.data.words.fields import IDENTITIES
from binade.data.words.filter import FIELDS, Filter
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import Spec, SpecError

LONGEST, MOST_WORDS = 200, 10  # characters and words of a text that a user or an address gives
MOST_FORMATS = 12
MOST_CHOSEN, LONGEST_FIELD = 1000, 1000  # values of a field of the filter, such as iterations, and characters of each
TITLES = {name: field.title for name, field in IDENTITIES.items()}


@dataclass(frozen=True)
class Interval:
    """From low up to, but not including, high."""

    low: float
    high: float

    def __str__(self) -> str:
        return "..".join(repr(end).removesuffix(".0") for end in (self.low, self.high))


Value = str | int | Interval


class Param:
    """A parameter. It has its default where the address gives no usable value. refers_to: "run" or "tensor" if its
    values are ids of these, so that sessions and bundles keep what it names; "" otherwise. most: how many values it may
    have; longest: the characters of each."""

    refers_to: str = ""
    most: ClassVar[int] = 100
    longest: ClassVar[int] = LONGEST

    @property
    def default(self) -> Any:
        return None

    def value_of(self, text: str) -> Value | None:
        """The value of a text; None if it makes no sense."""
        raise NotImplementedError

    def read(self, texts: list[str]) -> tuple[Any, list[str]]:
        """(the value, texts that make no sense)."""
        values = {text: self.value_of(text) for text in texts}
        good = [value for value in values.values() if value is not None]
        return self._chosen(good), [text for text in texts if values[text] is None]

    def _chosen(self, values: list[Value]) -> Any:
        return values[0] if values else self.default


@dataclass(frozen=True)
class One(Param):
    """One of these; the first is the default. If they are runs, others may be among them."""

    allowed: tuple[str, ...]
    refers_to: str = ""

    @property
    def default(self) -> str | None:
        return self.allowed[0] if self.allowed else None

    def value_of(self, text: str) -> str | None:
        return text if text in self.allowed else None


@dataclass(frozen=True)
class Many(Param):
    """Any of these."""

    allowed: tuple[str, ...]
    default: tuple[str, ...] = ()

    def value_of(self, text: str) -> str | None:
        return text if text in self.allowed else None

    def _chosen(self, values: list[Value]) -> list[Value]:
        return list(dict.fromkeys(values)) or list(self.default)


@dataclass(frozen=True)
class Specs(Many):
    """Any formats, with or without options. allowed: those that are listed."""

    most: ClassVar[int] = MOST_FORMATS

    def value_of(self, text: str) -> str | None:
        return AnySpec().value_of(text)


@dataclass(frozen=True)
class Whole(Param):
    """A whole number from low to high; without a default it may be None."""

    low: int
    high: int
    default: int | None = None

    def value_of(self, text: str) -> int | None:
        number = int(text) if text.isdecimal() and len(text) < 12 else None
        return number if number is not None and self.low <= number <= self.high else None


@dataclass(frozen=True)
class Range(Param):
    """An Interval, written "-24.5..-22"; None by default."""

    def value_of(self, text: str) -> Interval | None:
        low, _, high = text.partition("..")
        try:
            interval = Interval(float(low), float(high))
        except ValueError:
            return None
        return interval if -math.inf < interval.low < interval.high < math.inf else None


@dataclass(frozen=True)
class Known(Param):
    """A name that `known` knows, None by default; with several, any number of them."""

    known: Callable[[str], bool]
    refers_to: str = ""
    several: bool = False
    longest: ClassVar[int] = 1000  # ids of tensors contain the name of the run

    @property
    def default(self) -> list[str] | None:
        return [] if self.several else None

    def value_of(self, text: str) -> str | None:
        return text if self.known(text) else None

    def _chosen(self, values: list[Value]) -> Any:
        return values if self.several else super()._chosen(values)


@dataclass(frozen=True)
class AnySpec(Param):
    """A format, with or without options, under the name that Binade writes it; None by default."""

    def value_of(self, text: str) -> str | None:
        try:
            return str(Spec.of(text))
        except (SpecError, UnknownFormatError):
            return None


@dataclass(frozen=True)
class AnyFormat(AnySpec):
    """A format, or USED: the one that each GEMM used."""

    def value_of(self, text: str) -> str | None:
        return USED if text == USED else super().value_of(text)


def format_title(fmt: str) -> str:
    """A format of the scope, as a title has it after a comma or alone."""
    return "as used" if fmt == USED else fmt


def in_format(fmt: str) -> str:
    """A format of the scope, as a sentence has it: "in mxfp4"."""
    return format_title(fmt) if fmt == USED else f"in {fmt}"


@dataclass(frozen=True)
class AnyText(Param):
    """Any text; None by default."""

    longest: ClassVar[int] = 20_000  # a statement in SQL, which has limits of its own

    def value_of(self, text: str) -> str:
        return text


def known_tensor(opened: Catalog, several: bool = False) -> Known:
    """The id of a tensor of the root, or several ids."""
    return Known(lambda name: not opened.rows_of([name]).empty, "tensor", several)


def known_run(opened: Catalog) -> Known:
    """The id of a run of the root."""
    return Known(lambda name: name in set(opened.runs()["run_id"]), "run")


def run_or_format(opened: Catalog) -> Known:
    """The id of a run of the root, or a format."""
    run = known_run(opened)
    return Known(lambda name: run.known(name) or AnySpec().value_of(name) is not None, "run")


def too_long(text: str, what: str = "The text") -> str:
    """A sentence if a text has more than LONGEST characters or MOST_WORDS words, else ""."""
    words = len(text.split(maxsplit=MOST_WORDS))
    if len(text) <= LONGEST and words <= MOST_WORDS:
        return ""
    return f"{what} is longer than {LONGEST} characters or {MOST_WORDS} words: shorten it."


def bounded(name: str, texts: list[str], most: int, longest: int = LONGEST) -> tuple[list[str], list[str]]:
    """(the texts of a parameter that are read, a sentence if any are left out): the first `most` of them that have at
    most `longest` characters."""
    short = [text for text in texts if len(text) <= longest]
    problems = []
    if len(short) < len(texts):
        problems.append(f"The URL has a text for {name} that is longer than {longest:,} characters: shorten it.")
    if len(short) > most:
        problems.append(f"The URL asks for {len(short):,} values of {name}: the first {most} are read. Choose fewer.")
    return short[:most], problems


Params = Mapping[str, Param]


def read(params: Params, query: Mapping[str, list[str]]) -> tuple[dict[str, Any], list[str]]:
    """(every parameter's value, a sentence for each text that makes no sense)."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, param in params.items():
        texts, left_out = bounded(name, query.get(name, []), param.most, param.longest)
        values[name], bad = param.read(texts)
        problems += [*left_out, *(f"The URL asks for {name} {text[:40]!r}, which does not exist." for text in bad)]
    return values, problems


def texts_of(value: Any) -> list[str]:
    """A parameter's value as texts of an address; none for None."""
    listed = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return [str(entry) for entry in listed]


def read_filter(facets: Mapping[str, list[Any]], query: Mapping[str, list[str]]) -> tuple[Filter, list[str]]:
    """(the filter of those values that occur, a sentence for each that does not or makes no sense)."""
    texts = {name: bounded(name, query.get(name, []), MOST_CHOSEN, LONGEST_FIELD) for name in FIELDS}
    wanted, problems = Filter.from_query({name: read for name, (read, _) in texts.items()})
    problems = [*(problem for _, left_out in texts.values() for problem in left_out), *problems]
    kept: dict[str, Any] = {}
    for name, values in wanted.items():
        known = [value for value in values if value in facets.get(name, [])]
        problems += [
            f"The URL asks for {IDENTITIES[name].inline} {str(value)[:40]!r}, which is not in this root."
            for value in values
            if value not in known
        ]
        kept[name] = known
    return Filter(**kept), problems
