"""How wide a text is in a table, before a browser has drawn it.

The page's font is the first of several that the user has. Widths are those of DejaVu Sans, the widest of these, so that
a column that fits it cuts a text in none.
"""

from __future__ import annotations

FONT_SIZE = 14  # pixels, of Streamlit's tables
_EM = {  # widths by character, in hundredths of the font size, rounded up
    32: "'ijlIJ ,.·’",
    36: "/:;\\|f-",
    41: "()[]tr!⁰¹²³⁴⁵⁶⁷⁸⁹₂",
    53: '"*_`–°‖szc?⁻',
    64: "FLPSTYEabdeghknopquvxyση$0123456789{}√µβν",
    78: "ABCDGHKNRUVXZαΔ&",
    86: "MOQw∞#+<=>^~−×±≥≤→÷",
}
_WIDTHS = {character: width for width, characters in _EM.items() for character in characters}
_WIDEST = 100


def text_width(text: str) -> float:
    """The pixels that one line of a text takes, at most."""
    return FONT_SIZE * sum(_WIDTHS.get(character, _WIDEST) for character in text) / 100
