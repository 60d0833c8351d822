"""A process that draws: a line of JSON in, a line of JSON and the bytes it announces out. Started by painting.py.

Runs as a file of its own and imports nothing of the project, so that a painter takes a fifth of the memory that the
index and the analysis need. It ends when its input does, however its parent has ended.

request  {"spec": a Vega-Lite specification, "caption": [texts], "colors": {...}, "scale": pixels a point}, or
         {"bundle": true} for the JavaScript libraries that draw in a page
answer   {"sizes": [bytes of the PNG, bytes of the SVG]}, or [bytes of the bundle]; {"error": reason}
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import vl_convert

LETTER, LINE, MARGIN = 5.7, 16, 12  # pixels of a caption's letter on average, of its line, around it
FONT_SIZE = 11.5

# The font that is always there, Liberation Sans, lacks these (but ¹²³). A text with one of them would be drawn in
# another font altogether, whichever the machine has.
LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ᵀ", "0123456789−T", strict=True))
ALIKE = str.maketrans({"⟨": "‹", "⟩": "›", "‖": "||"})
_TEXT = re.compile(r"(<(?:text|tspan)\b[^>]*>)([^<]*)")
_SHIFTED = re.compile(f"[{''.join(LOWERED)}]+|[{''.join(RAISED)}]+")
SMALL, DOWN, UP = 0.72, 0.2, -0.36  # a small digit's size, and its way down or up, in ems of the text


def wrapped(caption: list[str], width: float) -> list[str]:
    """The caption's texts as lines that fit."""
    letters = max(40, int((width - 2 * MARGIN) / LETTER))
    return [line for text in caption for line in textwrap.wrap(text, letters, break_on_hyphens=False)]


def drawable(svg: str) -> str:
    """The drawing in letters that Liberation Sans has: small digits become digits set small."""
    return _TEXT.sub(lambda found: found[1] + _shifted(found[2].translate(ALIKE)), svg)


def _shifted(text: str) -> str:
    parts, at, back = [], 0, 0.0

    def plain(part: str) -> str:
        return f'<tspan dy="{-back:.3g}em">{part}</tspan>' if part and back else part

    for found in _SHIFTED.finditer(text):
        if before := text[at : found.start()]:
            parts.append(plain(before))
            back = 0.0
        table, way = (LOWERED, DOWN) if found[0][0] in LOWERED else (RAISED, UP)
        letters = "".join(table[letter] for letter in found[0])
        parts.append(f'<tspan dy="{(way - back) / SMALL:.3g}em" font-size="{SMALL:.0%}">{letters}</tspan>')
        back, at = way, found.end()
    parts.append(plain(text[at:]))
    return "".join(parts)


def captioned(svg: str, caption: list[str], colors: dict[str, str], font: str) -> str:
    """The drawing with its caption beneath, on the card's ground."""
    sizes = dict(re.findall(r' (width|height)="([0-9.]+)"', svg[: svg.index(">") + 1]))
    width, height = float(sizes["width"]), float(sizes["height"])
    lines = wrapped(caption, width)
    full = height + (LINE * len(lines) + MARGIN if lines else 0)
    texts = "".join(
        f'<text x="{MARGIN}" y="{height + LINE * (index + 0.5):g}" font-size="{FONT_SIZE}" '
        f"font-family={quoteattr(font)} fill={quoteattr(colors['quiet'])}>{escape(line)}</text>"
        for index, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{full:g}" viewBox="0 0 {width:g} {full:g}">'
        f'<rect width="{width:g}" height="{full:g}" fill={quoteattr(colors["card"])}/>{svg}{texts}</svg>'
    )


def paint(request: dict[str, Any]) -> list[bytes]:
    if request.get("bundle"):
        return [vl_convert.javascript_bundle().encode()]  # type: ignore[call-arg]  # the stub lacks the default
    svg = vl_convert.vegalite_to_svg(request["spec"])
    whole = drawable(captioned(svg, request["caption"], request["colors"], request["font"]))
    return [vl_convert.svg_to_png(whole, scale=request["scale"]), whole.encode()]


def main() -> None:
    answers = sys.stdout.buffer
    for line in sys.stdin.buffer:
        try:
            parts = paint(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            answers.write(json.dumps({"error": reason}).encode() + b"\n")
        else:
            answers.write(json.dumps({"sizes": [len(part) for part in parts]}).encode() + b"\n")
            answers.write(b"".join(parts))
        answers.flush()


if __name__ == "__main__":
    main()
