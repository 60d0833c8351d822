"""What `binade compare` finds in a root and prints."""

from __future__ import annotations

from pathlib import Path

from binade.collector.cli.compare import CompareSection, render, sections
from binade.data.index.catalog import Catalog


def compared(root: Path) -> list[CompareSection]:
    with Catalog.open(root) as opened:
        return sections(opened)


def gaps_of(root: Path) -> dict[str, float]:
    """The mean gap of each run, by its label."""
    found = [section.compared.costs for section in compared(root) if section.compared]
    return {label: gap for costs in found for label, gap in zip(costs["label"], costs["gap"], strict=True)}


def printed(root: Path, kind: str = "text") -> str:
    """The output, of text without its line breaks."""
    text = render(compared(root), kind)
    return " ".join(text.split()) if kind == "text" else text
