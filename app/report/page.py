"""A report as one HTML file that needs nothing else: interactive charts, numbers as tables, and the runs it was made
from.

The libraries that draw are inlined. The page's own policy forbids every request and all scripts except the two that it
contains, which it identifies by their hashes; expressions are interpreted, never compiled. Everything that comes from
metadata is escaped, in JSON too, so that no tag can end there.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader

from binade.app.draw.figure import HEIGHT, Figure
from binade.app.draw.theme import DARK, FONT, LIGHT, MONO, THEMES, Theme
from binade.app.report.section import Section
from binade.app.report.tables import axis_of, cells, shown, with_intervals

HERE = Path(__file__).parent
LONG = 12  # a text with at least this many line breaks is folded
SHOWN_ROWS, SHOWN_COLUMNS = 100, 24  # of a chart's numbers; tables are shown in full
CSV_CELLS = 60_000  # a table with more is in the report's folder alone


def page(sections: tuple[Section, ...], embedded: Mapping[str, str], bundle: str, **top: Any) -> str:
    """The HTML. embedded: what it holds of each figure (`Picture.embedded`), by section and name; bundle: vega,
    vega-lite and vega-embed as one script (`Renderers.bundle`); top: title, subtitle, facts as (name, value), notes as
    HTML that was made safe, "" for none."""
    script = (HERE.parent / "draw" / "picture.js").read_text(encoding="utf-8") + (HERE / "page.js").read_text(
        encoding="utf-8"
    )
    themes = {"font": FONT} | {theme.name: asdict(theme) | {"config": theme.config()} for theme in THEMES.values()}
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {
        "allow_nan": False, "ensure_ascii": False, "separators": (",", ":"),
    }  # fmt: skip
    return environment.get_template("page.html").render(
        top, sections=sections, themes=themes, scripts=(bundle, script), style=_style(),
        hashes=[_hash(bundle), _hash(script)], long=LONG,
        embedded=embedded, height=HEIGHT, fits=fits, note=note, rows=_rows, first_numbers=_first_numbers,
    )  # fmt: skip


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _style() -> str:
    def variables(theme: Theme) -> str:
        pairs = ((name, value) for name, value in asdict(theme).items() if name != "name")
        return f"color-scheme:{theme.name};" + ";".join(f"--{name}:{value}" for name, value in pairs)

    return (
        f":root{{--font:{FONT};--mono:{MONO};{variables(LIGHT)}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{variables(DARK)}}}}}"
        f":root[data-scheme=light]{{{variables(LIGHT)}}}:root[data-scheme=dark]{{{variables(DARK)}}}\n"
        f":root[data-print]{{{variables(LIGHT)}}}\n"
    ) + (HERE / "page.css").read_text(encoding="utf-8")


def fits(figure: Figure) -> bool:
    """Whether the figure's numbers are part of the page."""
    return figure.table.size <= CSV_CELLS


def of_page(figure: Figure) -> dict[str, Any]:
    """The figure's CSV and what its specification differs in on the page, for `Renderers.render`."""
    fit = {"type": "fit", "contains": "padding"}
    sized = {"width": "container", "height": figure.height or HEIGHT, "autosize": fit}
    return {"spec": {} if figure.is_several else sized, "csv": figure.csv() if fits(figure) else None}


def note(figure: Figure) -> str:
    """The figure's note without what its caption repeats."""
    text = figure.note
    for line in figure.caption.splitlines():
        text = text.replace(line, "")
    return "" if text.strip() in figure.caption else text.strip()


def _first_numbers(figure: Figure) -> tuple[dict[str, Any], str]:
    """The first rows and columns of a figure's numbers, and how many there are if these are not all."""
    table = figure.table
    sides = zip((SHOWN_ROWS, SHOWN_COLUMNS), table.shape, ("rows", "columns"), strict=True)
    less = " and ".join(f"the first {most} of {count:,} {what}" for most, count, what in sides if count > most)
    listed = _rows(table.iloc[:SHOWN_ROWS, :SHOWN_COLUMNS], axis_of(figure.spec))
    return listed, f"{less[0].upper()}{less[1:]}; all are in the CSV" if less else ""


def _rows(frame: pd.DataFrame, axis: str = "") -> dict[str, Any]:
    frame = with_intervals(shown(frame, axis))
    numeric = [pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]
    return {"names": list(frame.columns), "numeric": numeric, "cells": cells(frame)}
