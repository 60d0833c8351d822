"""The settings that several parts of the collector share, and how an option is declared: once, as metadata of a
dataclass field, with its help, limits, choices and label.

The command line, the Collect form, `check` and the documentation read the same declaration. No torch, no Click.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, field, fields, replace
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from binade.collector.errors import ConfigError

T = TypeVar("T")
METADATA = "option"
MOST = 10**9  # the default upper limit: a larger count is a typing error
DEFAULT_SCORES = ("hifp8", "hifp8(scale=amax8)", "mxfp8", "mxfp4", "nvfp4")
FEW_RANKS = 8
KINDS: dict[type, str] = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}


QUEUEABLE = ("import", "measure", "parity")  # commands that make a run without training it, and can be queued


class Size(StrEnum):
    """The dimensions of a model."""

    TINY = "tiny"  # the same architecture, narrow enough for a CPU
    FULL = "full"  # the published dimensions


class DeviceName(StrEnum):
    """Where a run trains."""

    CPU = "cpu"
    CUDA = "cuda"  # one GPU for each rank


class BackendName(StrEnum):
    """What quantizes operands. All give the same bits."""

    AUTO = "auto"  # the fastest: Triton on a GPU, torch on a CPU
    TRITON = "triton"  # kernels, which are interpreted on a CPU
    TORCH = "torch"  # compiled C++ on a CPU if a build is worthwhile, else plain torch


class Stats(StrEnum):
    """What is recorded of a watched step."""

    BASIC = "basic"  # moments, counts and the error of the active format
    FULL = "full"  # as in a recorded step


class MergeRanks(StrEnum):
    """Whether the rows of a tensor on several ranks become one."""

    AUTO = "auto"  # for more ranks than FEW_RANKS
    ON = "on"
    OFF = "off"

    def applies(self, ranks: int) -> bool:
        return ranks > (FEW_RANKS if self is MergeRanks.AUTO else 1) and self is not MergeRanks.OFF


@dataclass(frozen=True)
class OptionGroup:
    """Options that --help lists under one title; `about` is printed above them."""

    title: str
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Option:
    """The declaration of an option.

    choices        the allowed values, for a list those of each item: a collection, or a function that returns one
    or_path        the path of something that exists is allowed as well
    minimum, maximum, pattern
                   what a number or a text must satisfy. `expected` says in words what the pattern accepts
    unit           "bytes" for a size such as 500M
    default_help   describes the default where the value itself does not
    label          the name in the Collect form; "" for an option that the form does not have. placeholder is what an
                   empty field shows; form_help replaces help, "" for none
    flag           the spelling on the command line where it is not made from the field's name
    """

    help: str
    group: OptionGroup
    metavar: str | None = None
    choices: Collection[str] | Callable[[], Collection[str]] | None = None
    or_path: bool = False
    minimum: float | None = None
    maximum: float = MOST
    pattern: re.Pattern[str] | None = None
    expected: str = ""
    unit: str = ""
    default_help: str = ""
    label: str = ""
    form_help: str | None = None
    placeholder: str = ""
    flag: str = ""

    @property
    def allowed(self) -> Collection[str] | None:
        return self.choices() if callable(self.choices) else self.choices


@dataclass(frozen=True)
class Declared:
    """An option together with its field: `kind` is the type of a value, or of an item of a list; str for a StrEnum,
    whose members equal their text."""

    name: str
    default: Any
    kind: type
    is_list: bool
    option: Option

    @property
    def flag(self) -> str:
        """`--seed`; `--no-raw` for a flag that is on by default."""
        dashed = self.name.replace("_", "-")
        return self.option.flag or (f"--no-{dashed}" if self.default is True else f"--{dashed}")

    def text(self, value: Any) -> str:
        """A value in the notation of a command line."""
        return ",".join(map(str, value)) if self.is_list else str(value)


def option(default: T, **declaration: Any) -> T:
    """A dataclass field with its declaration: the keywords of Option."""
    return field(default=default, metadata={METADATA: Option(**declaration)})


def declared(owner: type) -> dict[str, Declared]:
    """The options of a dataclass, by the names of its fields, in their order."""
    hints = get_type_hints(owner)
    return {field.name: _declared(field, hints[field.name]) for field in fields(owner) if METADATA in field.metadata}


def _declared(field: Field[Any], hint: Any) -> Declared:
    """From `int`, `int | None` or `tuple[int, ...]`: the kind is int. The choices of a StrEnum are its members."""
    kind, option = next(iter(get_args(hint)), hint), field.metadata[METADATA]
    if issubclass(kind, StrEnum):
        option = replace(option, choices=tuple(kind))
        kind = str
    return Declared(field.name, field.default, kind, get_origin(hint) is tuple, option)


def check_options(config: object) -> None:
    """Raise ConfigError for the first value outside the choices or limits that its option declares."""
    for setting in declared(type(config)).values():
        value = getattr(config, setting.name)
        for item in value if setting.is_list else () if value is None else (value,):
            if problem := _problem(setting, item):
                raise ConfigError(problem)


def _problem(setting: Declared, value: Any) -> str:
    option = setting.option
    kind: Any = {int: Integral, float: Real}.get(setting.kind, setting.kind)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return f"{setting.flag} is {value!r}: expected {KINDS[setting.kind]}"
    if option.allowed is not None and value not in option.allowed and not (option.or_path and os.path.exists(value)):
        return f"{setting.flag} {value!r}: expected one of {', '.join(option.allowed)}{', or a path' * option.or_path}"
    if option.pattern is not None and not option.pattern.fullmatch(value):
        return f"{setting.flag} {value!r} is not valid: {option.expected}"
    if option.minimum is None or option.minimum <= value <= option.maximum:
        return ""
    bound = f"at most {option.maximum}" if value > option.maximum else f"{option.minimum} or more"
    return f"{setting.flag} is {value}: it must be {bound}"
