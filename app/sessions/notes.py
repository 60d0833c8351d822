"""Notes as they may be shown: Markdown in which pictures stay text, so that opening someone's session loads nothing,
and links show their addresses, so that nobody clicks on a link other than the one they read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token

DEEPEST = 30  # quotes, lists, emphasis or brackets within each other; a browser fails at thousands
TOO_DEEP = "These notes are nested too deeply to be formatted. Their source:"


LINK = re.compile(r"(?<![\\!])\[([^][\\]*)\]\(<?(https?://[^\s<>()]+)>?\)")
STAYS_TEXT = (
    (re.compile(r"!\["), r"\\!\\["),  # pictures
    (re.compile(r"\]\("), r"]\\("),  # links with a text
    (re.compile(r"(?<![^\r\n])([ \t>*+\d.)-]*\[(?:[^][\\]|\\.)*\]):", re.DOTALL), r"\1\\:"),  # [name]: address
    (re.compile(r"<(?=[a-z][a-z0-9+.-]*:)(?!https?:|mailto:)", re.IGNORECASE), "&lt;"),
)


@lru_cache(maxsize=16)
def safe(notes: str) -> str:
    """The notes without pictures, and without links whose text is not their address: [text](https://...) becomes text
    <https://...>, any other form stays text. The caller must escape raw HTML, as st.markdown does by default. Notes
    nested beyond DEEPEST become a block of plain text."""
    if _brackets(notes) >= DEEPEST or _depth(notes) >= DEEPEST:
        lines = re.split(r"\r\n|\r|\n", notes)
        return "\n".join([TOO_DEEP, "", *(f"    {line}" for line in lines)])
    shown = LINK.sub(r"\1 <\2>", notes)
    for pattern, text in STAYS_TEXT:
        shown = pattern.sub(text, shown)
    return shown


def to_html(notes: str) -> str:
    """The notes as HTML for a page without Streamlit: `safe`, and with raw tags escaped."""
    reader = MarkdownIt("js-default", {"html": False})
    reader.normalizeLinkText = str  # type: ignore[assignment, method-assign]  # otherwise xn--... would be shown decoded
    reader.add_render_rule("link_open", _link_open)
    return str(reader.render(safe(notes)))


def _link_open(self: RendererHTML, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    tokens[index].attrSet("rel", "noopener noreferrer")
    return self.renderToken(tokens, index, options, env)


def _depth(notes: str) -> int:
    """The nesting depth of blocks and emphasis; blocks are counted up to DEEPEST."""
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
    """The nesting depth of brackets, as in colored text and formulas."""
    depth = deepest = 0
    for match in re.finditer(r"[\[{(]|[\]})]", notes):
        depth = depth + 1 if match[0] in "[{(" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest
