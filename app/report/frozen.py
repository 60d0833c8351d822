"""A report as one HTML file that needs nothing else: charts that answer, numbers as tables, what it was made from.

The libraries that draw are inlined. The page's own policy forbids every request and every script but the two that it
was written with, whose hashes it names; expressions are interpreted, never compiled. Whatever comes from metadata is
escaped; where it stands in JSON, so that no tag can end there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from binade.app.report.plates import Part, Plate, Report, Table, axis_of, shown
from binade.app.theme import DARK, FONT, LIGHT, MONO, Theme

HERE = Path(__file__).parent
LONG = 12  # lines of a text that is folded away
SHOWN_ROWS = 100  # of a chart's numbers; of a table all
CSV_CELLS = 60_000  # a table with more is in the ZIP alone, if there is one


def page(report: Report, bundle: str) -> str:
    """The HTML. bundle: vega, vega-lite and vega-embed as one script (`Painters.bundle`)."""
    own = (HERE / "page.js").read_text()
    style = _colors() + (HERE / "page.css").read_text()
    policy = (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; style-src 'unsafe-inline'; "
        f"script-src '{_hash(bundle)}' '{_hash(own)}'"
    )
    themes = {"font": FONT} | {theme.name: asdict(theme) | {"config": theme.config()} for theme in (LIGHT, DARK)}
    plates = [plate for part in report.parts for plate in part.plates]
    return "".join(
        [
            "<!DOCTYPE html>\n",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="referrer" content="no-referrer">',
            f"<title>{escape(report.title)} · Binade</title><style>{style}</style></head><body>",
            _top(report),
            '<div class="body">',
            _navigation(report),
            "<main>",
            *(_part(part, report.archived) for part in report.parts),
            "</main></div>",
            _data("themes", themes),
            *(_data(_id(plate), _embedded(plate)) for plate in plates),
            f"<script>{bundle}</script><script>{own}</script></body></html>\n",
        ]
    )


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _colors() -> str:
    def variables(theme: Theme) -> str:
        pairs = ((name, value) for name, value in asdict(theme).items() if name != "name")
        return f"color-scheme:{theme.name};" + ";".join(f"--{name}:{value}" for name, value in pairs)

    return (
        f":root{{--font:{FONT};--mono:{MONO};{variables(LIGHT)}}}"
        f"@media (prefers-color-scheme: dark){{:root{{{variables(DARK)}}}}}"
        f":root[data-scheme=light]{{{variables(LIGHT)}}}:root[data-scheme=dark]{{{variables(DARK)}}}\n"
    )


def _data(name: str, content: Any) -> str:
    """JSON in the page: a block that is no script, in which no tag can end or begin."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{escape(name)}">{text}</script>\n'


def _id(plate: Plate) -> str:
    return "plate-" + plate.path.replace("/", "-")


def _embedded(plate: Plate) -> dict[str, Any]:
    spec = plate.spec | {
        "width": "container",
        "height": plate.height,
        "autosize": {"type": "fit", "contains": "padding"},
    }
    csv = plate.csv if plate.figure.table.size <= CSV_CELLS else None
    return {"spec": spec, "caption": plate.figure.caption, "csv": csv}


def _top(report: Report) -> str:
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in report.facts)
    notes = f'<div class="notes">{report.notes}</div>' if report.notes else ""
    return (
        f'<header class="top"><div class="mark">Binade report</div><h1>{escape(report.title)}</h1>'
        f'<p class="quiet">{escape(report.subtitle)}</p>{notes}<dl class="facts">{facts}</dl></header>'
    )


def _navigation(report: Report) -> str:
    links = "".join(f'<a href="#{escape(part.name)}">{escape(part.title)}</a>' for part in report.parts)
    return f'<nav aria-label="Sections">{links}<button type="button" id="scheme">Light or dark</button></nav>'


def _part(part: Part, archived: bool) -> str:
    texts = [f"<p>{escape(part.text)}</p>"] if part.text else []
    texts += [f'<p class="verdict">{escape(part.verdict)}</p>'] if part.verdict else []
    texts += [f'<p class="problem">{escape(problem)}</p>' for problem in part.problems]
    figures = "".join(_figure(plate, archived) for plate in part.plates)
    return (
        f'<section id="{escape(part.name)}"><h2>{escape(part.title)}</h2>{"".join(texts)}'
        + (f'<div class="figures">{figures}</div>' if figures else "")
        + "".join(_table(table) for table in part.tables)
        + "".join(_text(title, text) for title, text in part.texts)
        + "</section>\n"
    )


def _text(title: str, text: str) -> str:
    if text.count("\n") < LONG:
        return f"<h3>{escape(title)}</h3><pre>{escape(text)}</pre>"
    return f'<details class="long-text"><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>'


def _figure(plate: Plate, archived: bool) -> str:
    figure = plate.figure
    label = escape(f"{figure.title}. {figure.caption}", quote=True)
    caption = "".join(f"<div>{escape(line)}</div>" for line in (*figure.caption.splitlines(), plate.note) if line)
    rows = len(figure.table)
    whole = figure.table.size <= CSV_CELLS
    saves = ["PNG", "SVG", *(["CSV"] if whole else [])]
    buttons = "".join(
        f'<button type="button" data-save="{kind.lower()}" title="Save as {kind}">{kind}</button>' for kind in saves
    )
    numbers = ""
    if rows and whole:
        first = f"The first {SHOWN_ROWS} of {rows:,} rows; all are in the CSV" if rows > SHOWN_ROWS else ""
        table = _rows(figure.table.head(SHOWN_ROWS), first, axis_of(plate.spec))
        numbers = f"<details><summary>Numbers</summary>{table}</details>"
    elif rows:
        where = "see the ZIP" if archived else "too many to be shown here; a report made with --zip has them"
        numbers = f'<div class="note">{rows:,} × {figure.table.shape[1]:,} numbers: {where}</div>'
    return (
        f'<figure><div class="chart" role="img" aria-label="{label}" data-plate="{escape(_id(plate))}"'
        f' data-name="{escape(plate.file)}" style="min-height:{plate.height}px"></div>'
        f"<figcaption>{caption}</figcaption>{numbers}"
        f'<div class="saves" role="group" aria-label="Save as">{buttons}</div></figure>'
    )


def _table(table: Table) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<h3 id="table-{escape(table.name)}">{escape(table.title)}</h3>{note}{_rows(table.frame)}'


def _rows(frame: pd.DataFrame, caption: str = "", axis: str = "") -> str:
    frame = shown(frame, axis)
    numeric = [pd.api.types.is_numeric_dtype(kind) and kind is not bool for kind in frame.dtypes]
    classes = [' class="n"' if n else "" for n in numeric]
    head = "".join(f"<th{c}>{escape(str(name))}</th>" for name, c in zip(frame.columns, classes, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(value, c) for value, c in zip(row, classes, strict=True)) + "</tr>"
        for row in frame.itertuples(index=False, name=None)
    )
    named = f"<caption>{escape(caption)}</caption>" if caption else ""
    table = f"<table>{named}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(value: object, kind: str) -> str:
    text = number_text(value)
    return f"<td{kind or (' class=long' if len(text) > 70 else '')}>{escape(text)}</td>"


def number_text(value: object) -> str:
    """A table's cell: numbers in at most six digits, "–" for none."""
    if value is None or value is pd.NaT or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return "∞" if value == math.inf else "−∞" if value == -math.inf else f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value)
