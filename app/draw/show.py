"""How a page shows a chart or a table: with its note and the menu that exports it."""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pandas as pd
import streamlit as st
from pandas.io.formats.style import Styler
from streamlit.delta_generator import DeltaGenerator

from binade.app.draw import exports
from binade.app.draw.components import component
from binade.app.draw.figure import HEIGHT, Column, Facts, Figure, Table
from binade.app.draw.formatting import plain
from binade.app.draw.style import CHOSEN, CLEARED, DRAGGED, MEASURES, ONLY
from binade.app.draw.text_width import text_width
from binade.app.frame.bar import only
from binade.app.frame.callbacks import while_shown
from binade.app.frame.state import catalog
from binade.app.report.rendering import RenderError
from binade.app.sessions import open_session
from binade.app.view.params import Interval
from binade.app.view.view import View
from binade.data.compare.evidence import Sentence
from binade.data.index.cache import Done
from binade.data.run.access import read_only
from binade.data.words.text import number_text, plain_name

GESTURES = {  # by the selections that a chart has
    CHOSEN: "Click: open or choose this",
    DRAGGED: "Drag: select a range",
    CLEARED: "Double-click the range: clear it",
    ONLY: "Shift-click: filter to this",
    "zoom": "Ctrl-scroll: zoom, Alt-drag: move, double-click: reset",
}

CLEAR = ":material/close:"


@st.cache_resource
def _exporter() -> Callable[..., Any]:
    return component("export")


@st.cache_resource
def _charts() -> Callable[..., Any]:
    return component("chart", ".chart[data-state=drawing] {\n  min-height: 300px\n}")


def draw(
    figure: Figure,
    on_choose: Callable[[Any], None] | None = None,
    on_brush: Callable[[Interval | None], None] | None = None,
    *,
    pin: bool = True,
    view: View | None = None,
    left: Figure | None = None,
) -> Any:
    """Draw a figure with its note below and its exports.

    With pin, it can be pinned to the session if the page is a view that can be drawn again, and its marks can narrow
    the filter. view: what is pinned, if not the view that the page shows.

    left: the figure next to it. A title of an axis that it has too is not repeated.

    If marks can be clicked, the field of the clicked one is returned, or None; on_choose is called with it before the
    page is drawn again, as is on_brush with the range that was dragged over. They are called with None for what the
    figure marks.
    """
    name, choose = figure.name, figure.choose
    on_page = figure.on_page
    heard = {CHOSEN: choose, DRAGGED: on_brush, CLEARED: on_brush}
    modes = [mode for mode in on_page.selections if heard.get(mode) or (mode == ONLY and pin)]
    data = {
        "spec": on_page.spec,
        "tables": on_page.tables,
        "height": figure.height or HEIGHT,
        "alt": _alt(figure),
        "selections": modes,
        "marked": figure.marked if figure.marked is None else str(figure.marked),  # may be an interval
        "untitled": left is not None and figure.y_title == left.y_title,
        "caption": figure.caption_svg,
        "pin": pin and open_session.can_keep() and not read_only(),
        "table": False,
        "gestures": [
            text
            for kind, text in GESTURES.items()
            if any(mode.startswith(kind) for mode in (modes if kind in heard else on_page.selections))
        ],
    }
    card = st.container(key=f"card_{name}", gap="xsmall")
    key = f"chart_{name}"

    def hear() -> None:
        _hear(figure, st.session_state[key].selected, on_choose, on_brush)

    with card:
        result = _menu(
            _charts, key, name, data, lambda end: exports.of_figure(figure, end),
            on_selected_change=while_shown(key, hear), on_pinned_change=lambda: open_session.pin(figure, view),
        )  # fmt: skip
    if note := f"{figure.note} {figure.hint if choose or on_brush else ''}".strip():
        card.caption(note)
    if figure.marked is not None and (clear := on_brush or on_choose):
        label = f"Clear the {figure.brush or choose}"
        card.button(label, key=f"clear_{name}", on_click=clear, args=(None,), type="tertiary", icon=CLEAR)
    if pin and st.session_state.pop("pin_first", False):  # the key p
        open_session.pin(figure, view)
        st.rerun()  # the header shows the session
    return _picked(result.selected, choose)


def _menu(
    made: Callable[[], Callable[..., Any]],
    key: str,
    name: str,
    data: dict[str, Any],
    content: Callable[[str], bytes],
    **options: Any,
) -> Any:
    """A component with the menu of a chart or a table. What the browser cannot make is made when it is chosen and sent
    with the next drawing: content of the file with this suffix, one of exports.TABLES and exports.PAPERS."""
    waiting = f"saved_{name}"

    def save() -> None:
        st.session_state[waiting] = file_of(st.session_state[key].saved, content)

    given = {"name": file_name(name), "saved": st.session_state.pop(waiting, None)}
    return made()(key=key, data=data | given, on_saved_change=while_shown(key, save), **options)


def file_name(name: str) -> str:
    """The name of the files that a chart or a table is saved as, without a suffix."""
    return f"binade-{plain_name(name).replace('_', '-')}"


def file_of(asked: Mapping[str, Any], content: Callable[[str], bytes]) -> dict[str, str] | None:
    """The file that a menu asked for, for the browser; None, with a message, if it cannot be made."""
    end = asked["end"]
    if end not in (*exports.TABLES, *exports.PAPERS):
        return None
    try:
        made = base64.b64encode(content(end)).decode()
    except RenderError as error:
        st.toast(f"{error}.", icon=":material/error:")
        return None
    return {"id": asked["id"], "end": end, "type": exports.media_type(end), "content": made}


def _picked(selected: Any, field: str | None) -> Any:
    """The field of the mark that was clicked; None if none was."""
    if field and selected and selected["name"] == CHOSEN and selected["selected"]:
        return selected["selected"][0].get(field)
    return None


def _hear(
    figure: Figure,
    selected: Any,
    on_choose: Callable[[Any], None] | None,
    on_brush: Callable[[Interval | None], None] | None,
) -> None:
    """Narrow the filter to a mark that was Shift-clicked, or report a mark that was clicked without Shift or a range
    that was dragged over."""
    name, values = selected["name"], selected["selected"]
    if name == ONLY:
        only(catalog(), values[0])
    elif on_choose and (value := _picked(selected, figure.choose)) is not None:
        on_choose(None if value == figure.marked else value)
    elif on_brush and name == CLEARED:
        on_brush(None)
    elif on_brush and name == DRAGGED:
        low, high = (round(float(end), 2) for end in next(iter(values.values())))  # finer than a pixel
        if low < high:
            on_brush(Interval(low, high))


def _alt(figure: Figure) -> str:
    """The text that a screen reader reads for a chart."""
    return f"{figure.title}. {figure.caption}".strip(". ")


# How tables show the values of a metric.
COLUMNS = {
    "sqnr_db": Column(bar=True),
    "flush_to_zero": Column("Flushed (%)", bar=True),
    "saturated": Column("Saturated (%)", bar=True),
}
PADDING, BAR = 17, 56  # pixels: beside a text, and of a bar beside its number
NARROWEST, WIDEST = 50, 560  # pixels: of a column
LOOK = 0.5  # seconds between two updates of a progress bar whose percentage has not changed
STYLED = 15_000  # cells
LARGEST_SHOWN = 2.0**53  # the largest number that a table's number column shows


def table(table: Table, on_choose: Callable[[Any], None] | None = None) -> Any:
    """Show a table. If rows can be chosen, as `draw`."""
    columns = table.columns or {str(name): Column(str(name)) for name in table.frame}
    shown, config, formats = displayed(table.frame, columns)
    options: dict[str, Any] = {"height": table.height} if table.height else {}
    if choose := table.choose:
        ids = table.frame[choose].tolist()
        key = f"table_{table.name}_{hash((tuple(ids), *columns))}"  # a new key for other rows, so that none is selected

        def chosen(event: Any) -> Any:
            rows = event["selection"]["rows"]
            return ids[rows[0]] if rows else None

        def choice() -> None:
            if on_choose and (value := chosen(st.session_state[key])) is not None:
                on_choose(value)

        options |= {
            "key": key,
            "on_select": while_shown(key, choice) if on_choose else "rerun",
            "selection_mode": "single-row",
        }
    with st.expander(table.title, expanded=True) if table.foldable else nullcontext():
        if table.title and not table.foldable:
            st.markdown(table.title)
        written, layout = with_texts(shown, config, formats)
        event = st.dataframe(written, hide_index=True, placeholder="–", column_config=layout, **options)
    if table.note:
        st.caption(plain(table.note))
    with st.container(key=f"table_menu_{table.name}"):
        read = shown.rename(columns={name: given["label"] for name, given in config.items()})
        _menu(
            _exporter,
            f"export_table_{table.name}",
            f"table_{table.name}",
            {"gestures": [], "table": True},
            lambda end: exports.of_table(table.frame if end == ".csv" else read, end),
        )
    return chosen(event) if choose else None


def displayed(
    frame: pd.DataFrame, columns: Mapping[str, Column]
) -> tuple[pd.DataFrame, dict[str, Any], dict[str, str]]:
    """(what a page shows of a table, the configuration of its columns, the formats of its numbers). A column takes from
    its field what it does not define itself. Shares are in percent. Numbers too large for a number column are text."""
    shown, config, formats = {}, {}, {}
    for name, column in columns.items():
        measure = column.field or MEASURES.get(name)
        look = COLUMNS.get(measure.name, column) if measure else column
        title = column.title or look.title or (measure.axis if measure else name)
        kind: Any = st.column_config.TextColumn
        options: dict[str, Any] = {"alignment": column.align}
        values = frame[name] if name in frame else pd.Series(dtype=object)
        if column.text:
            values = pd.Series([column.text(row) for _, row in frame.iterrows()], frame.index, dtype=object)
        elif pd.api.types.is_numeric_dtype(values):
            values = values * (measure.factor if measure else 1)
            form = column.format or (measure.format if measure else "") or _usual(values)
            if (values.abs() > LARGEST_SHOWN).any():
                values, options = values.map(lambda v: "" if pd.isna(v) else number_text(v)), {"alignment": "right"}
            else:
                kind, formats[name], options = st.column_config.NumberColumn, form, {}
                if decimals := re.fullmatch(r"\+?\.(\d)f", form):
                    values = values.mask(values.abs() < 0.5 * 10.0 ** -int(decimals[1]), 0.0)  # no "-0.0"
                if (column.bar or look.bar) and (most := values.max()) > 0 and values.min() >= 0 and most < math.inf:
                    kind, options = st.column_config.ProgressColumn, {"min_value": 0.0, "max_value": most}
        help = column.help or (measure.definition or None if measure else None)
        bar = kind is st.column_config.ProgressColumn
        width = fitting_width(title, _texts(values, formats.get(name)), bar)
        shown[name], config[name] = values, kind(title, width=width, help=help, **options)
    return pd.DataFrame(shown, index=frame.index), config, formats


def with_texts(
    shown: pd.DataFrame, config: Mapping[str, Any], formats: Mapping[str, str]
) -> tuple[pd.DataFrame | Styler, dict[str, Any]]:
    """What `displayed` returns, with numbers as `number_text` writes them. A column is still sorted by its numbers.
    Formats of Streamlit's columns know neither powers nor "−". Above STYLED cells, for which pandas takes over 0.1 s,
    the columns write their numbers themselves."""
    layout = dict(config)
    styled = shown.size <= STYLED and shown.columns.is_unique
    texts: dict[Any, Any] = {}
    for name, form in formats.items():
        kind = config[name]["type_config"]
        if styled and kind["type"] == "number":
            texts[name] = partial(number_text, format=form)
        else:  # a bar writes its number itself
            printed = "localized" if form == "d" else f"%{form}"
            layout[name] = config[name] | {"type_config": kind | {"format": printed}}
    return (shown.reset_index(drop=True).style.format(texts, na_rep="–") if styled else shown), layout


def fitting_width(title: str, texts: Iterable[str], bar: bool = False) -> int:
    """The width of a column, in pixels, that cuts neither its title nor its cells, unless these are longer than any
    number. bar: behind each number is a bar."""
    longest = max((text_width(text) + BAR * bar for text in set(texts)), default=0)
    return round(max(NARROWEST, PADDING + min(max(text_width(title), longest), WIDEST)) + 0.5)


def _texts(values: pd.Series, form: str | None) -> Iterable[str]:
    """The texts of a column's cells. form: of its numbers."""
    write = partial(number_text, format=form) if form else str
    texts: Iterable[str] = map(write, values.dropna())
    return texts


def _usual(values: pd.Series) -> str:
    """The format of a column that names none: whole numbers as such, three digits for others."""
    return "d" if (values.dropna() % 1 == 0).all() else ".3g"


def facts(facts: Facts) -> None:
    """Single numbers in one strip."""
    with st.container(key="facts", horizontal=True, gap="medium"):
        for name, value in facts.values.items():
            measure = MEASURES[name]
            text = number_text(value * measure.factor)
            shown = text if text == "–" else measure.with_unit(text)
            st.metric(measure.label, shown, help=measure.definition, width="content")


@contextmanager
def progress(what: str, asked: Hashable = None, after: float = 0.0) -> Iterator[Done]:
    """A progress bar for what may take over a second, updated by calls with (done, in all), with a stop button. asked:
    what is computed, if drawing the page starts the computation; `stopped` remembers it. after: seconds before it is
    shown."""
    start, shown, at = time.monotonic(), 0, 0.0
    kept, place = st.empty(), None  # kept in any case: what comes after it stays the same element of the page

    def done(count: int, of: int) -> None:
        nonlocal place, shown, at
        now = time.monotonic()
        if now - start < after:
            return
        place = place or _Progress(kept, what, asked)
        percent = 100 * min(count, of) // max(of, 1)
        if percent != shown or now - at > LOOK:  # Streamlit handles clicks only while something is drawn
            shown, at = percent, now
            place.bar.progress(percent, text=f"{what} … {f'{percent}%' if percent else ''}")

    if not after:
        done(0, 1)
    try:
        yield done
    finally:
        if place:
            kept.empty()


class _Progress:
    """A progress bar with a stop button, in a place of its own."""

    def __init__(self, place: DeltaGenerator, what: str, asked: Hashable) -> None:
        key = f"computing_{plain_name(what)}"  # over the page, so that nothing moves: app.css
        with place.container(key=key, horizontal=True, vertical_alignment="bottom"):
            self.bar = st.progress(0.0, text=f"{what} …")
            # Any click ends the computation, because the page is drawn again.
            st.button("Stop", icon=":material/stop_circle:", key=f"stop_{what}", on_click=_stop, args=(what, asked))


def stopped(what: str, asked: Hashable) -> bool:
    """Whether the user has stopped this computation; if so, the page says so, with a button to start again."""
    if st.session_state.get(f"stopped_{what}") != asked:
        return False
    with st.container(horizontal=True, vertical_alignment="center"):
        st.info(f"{what}: stopped.", icon=":material/stop_circle:")
        st.button("Start again", icon=":material/replay:", key=f"start_{what}", on_click=_stop, args=(what, None))
    return True


def _stop(what: str, asked: Hashable) -> None:
    st.session_state[f"stopped_{what}"] = asked


def verdict(text: Sentence) -> None:
    """The answer in words, above the charts that show it: its headline in bold."""
    st.markdown(f"**{plain(text.headline)}** {plain(text.rest)}")
