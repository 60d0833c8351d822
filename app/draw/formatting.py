"""What pages and reports need from a root besides the index. No Streamlit here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from binade.quant.specs import Spec

T = TypeVar("T")


def first_formats(opened: Catalog, where: Filter | None = None) -> tuple[str, ...]:
    """The formats and specs that tensors were scored with. The coarsest come first, since they show the largest
    errors."""
    return tuple(sorted(opened.scored_formats(where), key=lambda name: (Spec.of(name).bits_per_value, name)))


def evenly(values: Sequence[T], most: int) -> Sequence[T]:
    """At most this many (two or more) of some values in order, spread evenly from the first to the last."""
    if len(values) <= most:
        return values
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]


def big(number: float, unit: str = "") -> str:
    """1234567 as "1.2 M", or with a unit as "1.2 MB"."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.1f} {prefix}{unit}"
    return f"{number:,.0f} {unit}".rstrip()


def bytes_text(number: float) -> str:
    """Bytes in decimal units: "76.3 MB"."""
    return big(number, "B")


def duration_text(seconds: float) -> str:
    """42 s, 3 min 20 s, 2 h 5 min."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def plain(text: str) -> str:
    """Escape a text for Markdown, so that it is shown literally."""
    return re.sub(r"([\\`*_{}\[\]()<>#+!|~$:-])", r"\\\1", text)
