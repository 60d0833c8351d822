"""Gaps to bf16 that others published, from published_gaps.toml: context for gaps of one's own."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Collection
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from binade.data.evidence import GAP
from binade.data.json_files import STRICT

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class FigureOrigin(Enum):
    """How a figure was obtained: computed from published logs, read in the source, or seen in an excerpt of it."""

    COMPUTED = "computed"
    READ = "read"
    EXCERPT = "excerpt"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PublishedGap:
    """An entry, as the file describes its fields. Without gap and percent it is a spread of bf16 runs. Raises
    ValueError for one that states nothing, or a deviation of nothing."""

    model: Text
    format: Text
    recipe: Text
    training: Text
    read: Annotated[FigureOrigin, Field(strict=False)]
    how: Text
    source: Text
    date: datetime.date
    gap: Number | None = None
    percent: Number | None = None
    sd: Number | None = None
    n: int | None = None
    of: Text | None = None

    def __post_init__(self) -> None:
        if (self.gap, self.percent, self.sd) == (None, None, None):
            raise ValueError("gap, percent or sd is missing")
        if len({self.sd is None, self.n is None, self.of is None}) > 1:
            raise ValueError("sd, n and of go together")

    @property
    def is_spread(self) -> bool:
        return self.gap is None and self.percent is None

    @property
    def title(self) -> str:
        return f"Published for {self.recipe} on {self.model}"

    @property
    def value(self) -> str:
        """ "+0.0040 nats, +0.10%, sd 0.0033 over 77 logged steps"."""
        nats = "" if self.gap is None else GAP.quantity(self.gap)
        percent = "" if self.percent is None else f"{self.percent:+.2f}%"
        spread = "" if self.sd is None else f"sd {self.sd:.4f} over {self.n} {self.of}"
        return ", ".join(filter(None, (nats, percent, spread)))

    def __str__(self) -> str:
        return f"{self.title}: {self.value} ({self.format}; {self.read.value}; {self.source})."


def parsed(text: str) -> list[PublishedGap]:
    """The entries of a file. Raises ValueError, which names the wrong field."""
    if not (entries := tomllib.loads(text).get("gap")):
        raise ValueError("[[gap]] is missing")
    return [PublishedGap(**entry) for entry in entries]


@cache
def published_gaps() -> list[PublishedGap]:
    """All entries of published_gaps.toml."""
    return parsed(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def published_for(recipes: Collection[Collection[str]]) -> list[PublishedGap]:
    """What concerns these recipes: gaps whose format operands of their linear layers have, and spreads of bf16 runs;
    nothing if there are none. recipes: the formats of each, as `Recipe.linear_formats`."""
    return [
        entry for entry in published_gaps() if any(entry.is_spread or entry.format in formats for formats in recipes)
    ]
