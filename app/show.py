"""How a chart stands on a page: the chart, what it says in words, and its exports as PNG, SVG and CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import streamlit as st

from app.address import plain
from app.style import CHOSEN
from data.filter import Filter

# Runs in the page beside the chart: the picture is the very SVG that is shown, the caption added beneath it.
EXPORT = """
export default function ({ data, parentElement }) {
    const root = parentElement.querySelector('.exports');
    const save = (url, ending) => {
        const link = document.createElement('a');
        link.href = url;
        link.download = data.name + ending;
        link.click();
    };
    const picture = () => {
        const shown = document.querySelector('.st-key-' + CSS.escape(data.chart) + ' svg.marks');
        if (!shown) return null;
        const box = shown.viewBox.baseVal;
        const size = box && box.width ? [box.width, box.height] : [shown.clientWidth, shown.clientHeight];
        const app = getComputedStyle(document.querySelector('[data-testid=stApp]'));
        const letters = Math.max(40, Math.floor(size[0] / 6));
        const lines = [];
        for (const part of data.caption.split('\\n')) {
            let line = '';
            for (const word of part.split(' ')) {
                if (line && (line + ' ' + word).length > letters) { lines.push(line); line = word; }
                else line = line ? line + ' ' + word : word;
            }
            if (line) lines.push(line);
        }
        const height = size[1] + 16 * lines.length + 12;
        const space = 'http://www.w3.org/2000/svg';
        const svg = document.createElementNS(space, 'svg');
        const set = (node, values) => Object.entries(values).forEach(([k, v]) => node.setAttribute(k, v));
        set(svg, { xmlns: space, width: size[0], height, viewBox: `0 0 ${size[0]} ${height}` });
        const back = document.createElementNS(space, 'rect');
        set(back, { width: size[0], height, fill: app.backgroundColor });
        svg.append(back);
        const copy = shown.cloneNode(true);
        set(copy, { width: size[0], height: size[1] });
        svg.append(copy);
        lines.forEach((line, index) => {
            const text = document.createElementNS(space, 'text');
            set(text, { x: 8, y: size[1] + 16 * (index + 1), fill: app.color, 'font-size': 11,
                        'font-family': app.fontFamily });
            text.textContent = line;
            svg.append(text);
        });
        return { text: new XMLSerializer().serializeToString(svg), width: size[0], height };
    };
    const url = made => 'data:image/svg+xml;charset=utf-8,' + encodeURIComponent(made.text);
    root.querySelector('.svg').onclick = () => { const made = picture(); if (made) save(url(made), '.svg'); };
    root.querySelector('.png').onclick = () => {
        const made = picture();
        if (!made) return;
        const image = new Image();
        image.onload = () => {
            const canvas = document.createElement('canvas');
            canvas.width = 2 * made.width;
            canvas.height = 2 * made.height;
            canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
            save(canvas.toDataURL('image/png'), '.png');
        };
        image.src = url(made);
    };
    root.querySelector('.csv').onclick = () => {
        save('data:text/csv;charset=utf-8,' + encodeURIComponent(data.csv), '.csv');
    };
}
"""
EXPORT_HTML = (
    '<div class="exports" role="group" aria-label="Save as">'
    '<button class="png" type="button" title="Save as a picture">PNG</button> '
    '<button class="svg" type="button" title="Save as a drawing">SVG</button> '
    '<button class="csv" type="button" title="Save the numbers">CSV</button></div>'
)
EXPORT_CSS = (
    ".exports{font-size:.78rem;color:var(--st-text-color);opacity:.72;text-align:right;white-space:nowrap;font-family:var(--st-font)}"
    ".exports button{all:unset;cursor:pointer;color:var(--st-primary-color);padding:0 .15rem}"
    ".exports button:hover,.exports button:focus-visible{text-decoration:underline}"
    ".exports button:focus-visible{outline:2px solid var(--st-primary-color)}"
)
MAX_CSV_ROWS = 5000


@st.cache_resource
def _exporter() -> Callable:
    return st.components.v2.component("binade_export", html=EXPORT_HTML, css=EXPORT_CSS, js=EXPORT)


def source(where: Filter, what: str) -> str:
    """The first line of a caption: what the data are, and the filter they were chosen with."""
    return f"Data: {what}. Filter: {where.sentence()}."


def figure(
    chart: alt.TopLevelMixin,
    name: str,
    table: pd.DataFrame,
    caption: str,
    *,
    note: str = "",
    height: int | None = None,
    choose: str | None = None,
    on_choose: Callable[[Any], None] | None = None,
) -> Any:
    """Draw a chart with its note beneath and its exports.

    name       of the chart on this page, and of the files
    table      what it was drawn from, for the CSV
    caption    goes into every export: the data, the filter, the metric's definition
    note       what a reader of the page needs beside the title
    choose     marks can be clicked: the field of the one that was is returned, None while none is
    on_choose  called with it before the page is drawn anew
    """
    options: dict[str, Any] = {}
    if choose:
        options = {"on_select": "rerun", "selection_mode": [CHOSEN]}
    if choose and on_choose:
        options["on_select"] = lambda: _tell(on_choose, name, choose)
    if height:
        options["height"] = height
    with st.container(key=f"chart_{name}"):
        event = st.altair_chart(chart, key=f"figure_{name}", alt=_alt(chart, caption), **options)
    place = st.container()
    if note:
        left, place = st.columns([4, 1.3], vertical_alignment="top")
        left.caption(note)
    comments = "".join(f"# {line}\n" for line in caption.splitlines())
    data = {
        "chart": f"chart_{name}",
        "name": f"binade-{name.replace('_', '-')}",
        "caption": caption,
        "csv": comments + table.head(MAX_CSV_ROWS).to_csv(index=False),
    }
    with place:
        _exporter()(key=f"export_{name}", data=data)
    if not choose:
        return None
    return _picked(event, choose)


def _picked(event: Any, field: str) -> Any:
    picked = event["selection"].get(CHOSEN) or []
    return picked[0].get(field) if picked else None


def _tell(on_choose: Callable[[Any], None], name: str, field: str) -> None:
    value = _picked(st.session_state[f"figure_{name}"], field)
    if value is not None:
        on_choose(value)


def _alt(chart: alt.TopLevelMixin, caption: str) -> str:
    """What a screen reader says of a chart."""
    text = chart.title.text if isinstance(chart.title, alt.TitleParams) else ""
    return f"{text}. {caption}".strip(". ")


def panels(panels: list[alt.LayerChart], name: str, table: pd.DataFrame, caption: str, height: int) -> None:
    """Small charts beside each other, each with its exports."""
    for index, (cell, panel) in enumerate(zip(st.columns(len(panels)), panels, strict=True)):
        with cell:
            figure(panel, f"{name}_{index}", table, caption, height=height)


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar for what may take over a second; gone when it is through. Any click in the page ends what runs."""
    if total <= 1:
        with st.spinner(f"{what} …"):
            yield lambda count: None
        return
    bar = st.progress(0.0, text=f"{what} …")
    try:
        yield lambda count: bar.progress(min(count / total, 1.0), text=f"{what}: {count:,} of {total:,}")
    finally:
        bar.empty()


def grid(values: np.ndarray) -> pd.DataFrame:
    """A heatmap's cells as a table for its CSV: rows as drawn, a column each."""
    return pd.DataFrame(values, columns=[f"column {index}" for index in range(values.shape[1])])


def verdict(text: str) -> None:
    """The answer in words, above the charts that show it."""
    st.markdown(f"**{plain(text)}**")
