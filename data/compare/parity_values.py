"""Published values of the parity of rollout and training, from parity_values.toml: limits that tools act on, and values
that others measured. Context for values of one's own."""

from __future__ import annotations

import tomllib
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.data.compare.parity import MEASURES
from binade.data.run.json_files import STRICT
from binade.data.words.text import markdown_table

Text = Annotated[str, Field(min_length=1)]


class FigureOrigin(Enum):
    """How a figure was obtained: read in the source, or seen in an excerpt of it."""

    READ = "read"
    EXCERPT = "excerpt"


class ValueKind(Enum):
    """A limit that a tool acts on, or a value that somebody measured."""

    LIMIT = "limit"
    MEASURED = "measured"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PublishedValue:
    """An entry, as the file describes its fields. Raises ValueError for a quantity that data.parity lacks."""

    quantity: Text
    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    kind: Annotated[ValueKind, Field(strict=False)]
    case: Text
    source: Text
    below: bool = False
    read: Annotated[FigureOrigin, Field(strict=False)] = FigureOrigin.READ

    def __post_init__(self) -> None:
        if self.quantity not in MEASURES:
            raise ValueError(f"quantity is {self.quantity!r}: expected one of {', '.join(MEASURES)}")

    @property
    def text(self) -> str:
        """The value with its unit: "0.003 nats"."""
        return MEASURES[self.quantity].quantity(self.value)


def parsed(text: str) -> list[PublishedValue]:
    """The entries of a file. Raises ValueError, which names the wrong field."""
    if not (entries := tomllib.loads(text).get("value")):
        raise ValueError("[[value]] is missing")
    return [PublishedValue(**entry) for entry in entries]


@cache
def published_values() -> list[PublishedValue]:
    """All entries of parity_values.toml."""
    return parsed(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def describe() -> str:
    """The entries as a Markdown table, for the docs."""
    rows = [
        (
            f"`{entry.quantity}`",
            entry.text,
            entry.kind.value,
            entry.case,
            entry.source + " (excerpt)" * _is_excerpt(entry),
        )
        for entry in published_values()
    ]
    return markdown_table(("quantity", "value", "kind", "case", "source"), rows)


def _is_excerpt(entry: PublishedValue) -> bool:
    return entry.read is FigureOrigin.EXCERPT
