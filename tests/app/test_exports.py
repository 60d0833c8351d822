"""What charts and tables are saved as, read again by other programs: PDFium, a Markdown parser."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import altair as alt
import pandas as pd
import pypdfium2
import pytest
from markdown_it import MarkdownIt
from pypdfium2.raw import FPDF_PAGEOBJ_IMAGE, FS_MATRIX, FPDFText_GetFontSize, FPDFText_GetMatrix

from binade.app.draw import exports, style
from binade.app.draw.figure import Figure

pytestmark = pytest.mark.slow

HOSTILE = ["a|b_c *d* <e> `f`", "50 % & $x$ #1 ~ ^ {} \\ 10·log₁₀ σ", "@SUM(1)"]
TABLE = pd.DataFrame({"group": HOSTILE, "sqnr_db": [1.5, float("inf"), float("nan")], "flush_to_zero": [0.25, 0, 1]})
LINES = (
    alt.Chart(pd.DataFrame({"x": [0, 1, 2, 3], "y": [1.0, 3.0, 2.0, 5.0], "group": [*"aabb"]}))
    .mark_line()
    .encode(x="x:Q", y="y:Q", color=style.color(["a", "b"], "run", line=True))
)
HEADER = ["Group", "SQNR (dB)", "Flushed to zero (%)"]
ROWS = [[HOSTILE[0], "1.5", "25"], [HOSTILE[1], "∞", "0"], [HOSTILE[2], "–", "100"]]


def letter_size(text: pypdfium2.PdfTextPage, at: int) -> float:
    """Points, upright or turned."""
    matrix = FS_MATRIX()
    FPDFText_GetMatrix(text.raw, at, matrix)
    return FPDFText_GetFontSize(text.raw, at) * math.hypot(matrix.a, matrix.b)


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "points"), [("84mm", 238.11), ("174mm", 493.23)])
def test_a_figure_for_a_paper_is_as_wide_as_its_column_in_letters_of_8_points(width: str, points: float):
    chart = (LINES + LINES.mark_text(fontSize=11).encode(text="group")).properties(
        title=style.title("A title", "of something")
    )
    figure = Figure("x", chart, TABLE, "Data: x.", height=360)
    page = pypdfium2.PdfDocument(exports.of_figure(figure, f"-{width}.pdf"))[0]
    assert page.get_width() == pytest.approx(points, abs=0.01) and not list(page.get_objects([FPDF_PAGEOBJ_IMAGE]))
    text = page.get_textpage()
    assert "A title" not in text.get_text_range() and "run" in text.get_text_range()
    assert {round(letter_size(text, at), 2) for at in range(text.count_chars())} - {0, 1} == {8.0}  # 0, 1: of no glyph
    svg = ElementTree.fromstring(exports.of_figure(figure, f"-{width}.svg"))
    assert svg.get("width") == width and float(svg.get("height", "")[:-2]) < float(width[:-2])


def test_markdown_says_what_the_table_does():
    figure = Figure("x", LINES, TABLE, "Data: a*b.")
    tokens = MarkdownIt().enable("table").parse(exports.of_figure(figure, ".md").decode())
    texts = [token.children for token in tokens if token.type == "inline"]
    plain = ["".join(child.content for child in children if child.type == "text") for children in texts if children]
    assert plain == [*HEADER, *(cell for row in ROWS for cell in row), "Data: a*b."]
    assert {child.type for children in texts if children for child in children} == {"text"}
    assert [token.attrs.get("style") for token in tokens if token.type == "th_open"][1:] == ["text-align:right"] * 2


def test_csv_is_the_table_as_it_is():
    lines = exports.of_table(TABLE, ".csv").decode().splitlines()
    assert lines[0] == "group,sqnr_db,flush_to_zero" and lines[3].startswith("'@SUM(1),")
