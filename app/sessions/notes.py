"""Notes as they may be shown: Markdown whose pictures stay text, so that opening someone's session loads nothing."""

from __future__ import annotations

import re
from functools import lru_cache

from markdown_it import MarkdownIt

DEEPEST = 30  # quotes, lists, emphasis or brackets within each other; a browser fails at thousands
TOO_DEEP = "These notes are nested too deeply to be formatted. Their source:"


@lru_cache(maxsize=16)
def safe(notes: str) -> str:
    """The notes without pictures. Every picture in Markdown begins with "![", which becomes two plain letters; raw HTML
    is for the one who draws to leave escaped, as st.markdown does by default. Notes nested beyond DEEPEST become a
    block of plain text."""
    if _brackets(notes) >= DEEPEST or _depth(notes) >= DEEPEST:
        lines = re.split(r"\r\n|\r|\n", notes)
        return "\n".join([TOO_DEEP, "", *(f"    {line}" for line in lines)])
    return re.sub(r"!\[", r"\\!\\[", notes)


def _depth(notes: str) -> int:
    """How deeply blocks and emphasis lie within each other: blocks as far as DEEPEST."""
    reader = MarkdownIt("commonmark", {"html": False, "maxNesting": DEEPEST + 1}).enable("strikethrough")
    deepest = 0
    for block in reader.parse(notes):
        depth = block.level
        deepest = max(deepest, depth)
        for inner in block.children or []:
            depth += inner.nesting
            deepest = max(deepest, depth)
    return deepest


def _brackets(notes: str) -> int:
    """How deeply brackets lie within each other, as in coloured text and formulas."""
    depth = deepest = 0
    for found in re.finditer(r"[\[{(]|[\]})]", notes):
        depth = depth + 1 if found[0] in "[{(" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest
