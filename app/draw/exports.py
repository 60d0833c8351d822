"""Files of a chart or a table that the browser cannot create: tables as text, and figures in a style for papers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pandas as pd

from binade.app.draw.figure import WIDTH, Figure
from binade.app.draw.theme import FONT, PAPER, Theme
from binade.app.report.rendering import Picture, Renderers
from binade.app.report.tables import axis_of, cells, shown
from binade.data.words.text import csv_table, markdown_table, markdown_text

TYPES = {
    "csv": "text/csv",
    "md": "text/markdown",
    "svg": "image/svg+xml",
    "pdf": "application/pdf",
}
TABLES = (".csv", ".md")  # suffixes of their files
COLUMNS = {"84mm": 84, "174mm": 174}  # millimeters: one and two columns in Springer's instructions
PAPERS = tuple(f"-{width}.{kind}" for width in COLUMNS for kind in ("svg", "pdf"))
LETTERS = 12  # font size of our charts, in pixels
POINTS = 8  # font size of the same text on paper
TITLE = 50  # pixels that a title takes, which a paper's caption replaces

MOST_ROWS = 1000  # rows of a table in Markdown, which people read


def of_figure(figure: Figure, end: str) -> bytes:
    """The content of a figure's file with this suffix. Raises RenderError."""
    if end in TABLES:
        frame = figure.table if end == ".csv" else shown(figure.table, axis_of(figure.spec))
        return of_table(frame, end, figure.caption)
    width, _, kind = end.removeprefix("-").partition(".")
    with Renderers(1) as renderers:
        drawn = renderers.paper(paper_spec(figure, width), COLUMNS[width]).result()
    return drawn.svg if kind == "svg" else drawn.pdf


def picture(
    renderers: Renderers, figure: Figure, theme: Theme, embedded: dict[str, Any] | None = None
) -> Future[Picture]:
    """A figure drawn with its caption in a theme. embedded: as in `Renderers.render`."""
    colors = {"card": theme.card, "quiet": theme.quiet, "font": FONT}
    return renderers.render(figure.sized_spec(WIDTH) | {"config": theme.config()}, figure.caption_svg, colors, embedded)


def of_table(frame: pd.DataFrame, end: str, caption: str = "") -> bytes:
    """A table as CSV or Markdown."""
    if end != ".csv" and len(frame) > MOST_ROWS:
        caption = f"{caption}\nThe first {MOST_ROWS:,} of {len(frame):,} rows. The CSV file has all of them.".lstrip()
        frame = frame.head(MOST_ROWS)
    texts: dict[str, Callable[[pd.DataFrame, str], str]] = {".csv": csv_table, ".md": _markdown}
    return texts[end](frame, caption).encode()


def media_type(end: str) -> str:
    return TYPES[end.rpartition(".")[2]]


def paper_spec(figure: Figure, width: str) -> dict[str, Any]:
    """The specification of a figure for a column of a paper: without its title, which belongs in the caption."""
    pixels = COLUMNS[width] / 25.4 * 72 * LETTERS / POINTS
    spec = _plain(figure.sized_spec(pixels))
    if "height" in spec and figure.title:
        spec["height"] -= TITLE
    return spec | {"config": PAPER.config() | {"background": None, "padding": 1}}


def _plain(spec: dict[str, Any]) -> dict[str, Any]:
    """A chart's specification, or a layer's, without its title and with a single font size."""
    changed: dict[str, Any] = {"layer": list(map(_plain, spec["layer"]))} if "layer" in spec else {}
    if isinstance(spec.get("mark"), dict) and spec["mark"]["type"] == "text":
        changed["mark"] = spec["mark"] | {"fontSize": LETTERS}
    return {name: value for name, value in (spec | changed).items() if name != "title"}


def _markdown(frame: pd.DataFrame, caption: str) -> str:
    header, *rows = [list(map(markdown_text, row)) for row in _texts(frame)]
    lines = [f"\n{markdown_text(line)}" for line in caption.splitlines()]
    return "\n".join([markdown_table(header, rows, _align(frame)), *lines]) + "\n"


def _texts(frame: pd.DataFrame) -> list[list[str]]:
    """The names of the columns, then the cells of each row."""
    return [list(map(str, frame.columns)), *cells(frame)]


def _align(frame: pd.DataFrame) -> str:
    return "".join("r" if pd.api.types.is_numeric_dtype(kind) else "l" for kind in frame.dtypes)
