"""Explore: the tensors at the left, worst first; at the right their distribution, a Q–Q plot, and the same operands in
each format, as one component.

The browser has the rows, the numbers of the first tensors' curves and the dots of the formats: ticks are drawn there at
once, and the address changes. Python hears of them a moment later, computes what it draws from the values themselves,
and sends only that. What the browser lacks it asks for, in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import pandas as pd
import streamlit as st

from binade.app.draw import exports, plot, style
from binade.app.draw import show as show_items
from binade.app.draw.components import component
from binade.app.draw.figure import Figure
from binade.app.frame import address
from binade.app.frame.bar import only
from binade.app.frame.callbacks import while_shown
from binade.app.questions import layout
from binade.app.questions.explore import charts, question
from binade.app.questions.explore.compute import RAW, SIGMA, over
from binade.app.questions.explore.curves import Curve
from binade.app.questions.explore.question import (
    AS_RECORDED,
    AXIS_OF,
    DRAWN,
    EXPLORE,
    MAX_SELECTED,
    NONE,
    VALUES_OF,
    Drawing,
)
from binade.app.questions.map.standing_out import FAR
from binade.app.questions.shared.distribution_charts import LAW_NAMES, histogram, qq
from binade.app.questions.shared.distributions import STEPS, distributions
from binade.app.questions.shared.laws import LAWS
from binade.app.questions.shared.operands import MOST_LISTED, operand
from binade.app.questions.shared.quantile_plots import against_law
from binade.app.questions.shared.runs import FIELDS_OF_RUNS
from binade.app.questions.shared.scope import Scope
from binade.app.questions.shared.selection import Board
from binade.app.sessions import open_session
from binade.app.view.params import Interval, format_title, in_format, known_tensor, read
from binade.app.view.view import Reading, View
from binade.data.index.catalog import Catalog
from binade.data.run.access import read_only
from binade.data.words.filter import Filter
from binade.data.words.text import number_text

KEY = "explore"  # of the component
PIECE = 24  # tensors whose curves are sent together
CHARTS = ("histogram", "qq", "formats")
TITLE = 38  # pixels of a title within a picture, which the page writes itself
HEIGHT = 255  # pixels of the two upper charts
PLACE = ("layer_index", "module", "operation", "phase", "tensor_name")  # what a tensor shares with that of another run


@st.cache_resource
def _explore() -> Callable[..., Any]:
    return component("explore", ".explore[data-state=drawing] {\n  min-height: 660px\n}")


def show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    st.session_state["explore_has"] = None  # what the browser has: nothing, when the whole page is drawn
    return _show(opened, view, reading)


@st.fragment
def _show(opened: Catalog, view: View, reading: Reading) -> Scope | None:
    """Any change but a tick, the values or the axis draws the whole page again."""
    if st.session_state.pop("explore_pinned", False):
        address.redraw()
    now = address.followed(view)
    params = {"tensor": known_tensor(opened, several=True), "values": VALUES_OF, "axis": AXIS_OF}
    chosen, _ = read(params, {name: now.params.get(name, []) for name in params})
    values = reading.values | chosen
    board = Board(opened, reading.within, format=values["format"] or "")
    return _Page(opened, now, reading, values, board).show()


@dataclass(frozen=True)
class _Page:
    opened: Catalog
    view: View
    reading: Reading
    values: Mapping[str, Any]
    board: Board

    def show(self) -> Scope:
        ranked = self.opened.kept((*self._key, "ranked"), lambda: question.ranked_in(self.board, self.values))
        if ranked.empty:
            layout.show_answer(self.opened, question.draw(self.board, dict(self.values)), self.view, self.reading)
            if self.values["delta"]:
                st.button("Clear the range", key="clear_delta", on_click=address.change, kwargs={"delta": None})
            return Scope(self.board.where).totalled(self.opened, self.reading.where)
        scope = question.used(self.board, ranked).totalled(self.opened, self.reading.where)
        data = self._to_send(ranked)
        if any(self.values[name] != NONE for name in ("rows", "columns")):
            answer = self.view.draw(self.opened)
            panels = [{"name": figure.name, "title": figure.title, **_plot(figure)} for figure in answer.figures]
            self._component(data | {"panels": panels}, ranked)
            layout.show_answer(self.opened, replace(answer, items=()), self.view, self.reading)
            return scope
        drawing = question.drawing(self.board, self.values, ranked)
        self._component(data | {"drawn": self._drawn(drawing)}, ranked)
        for problem in drawing.problems:
            st.caption(problem)
        for text in question.texts(self.board, drawing):
            layout.show_text(text)
        statistics = st.expander("Statistics over the finite values", key="explore_statistics", on_change=lambda: None)
        if st.session_state.get("explore_statistics"):
            with statistics:
                show_items.table(replace(question.statistics(self.board, drawing), title="", foldable=False))
        return scope

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        """What the list depends on."""
        versions = self.opened.versions(self.board.where.run_id)
        return "explore", self.board.where, self.board.format, repr(self._listed_by), versions

    def _to_send(self, ranked: pd.DataFrame) -> dict[str, Any]:
        """What the browser lacks of the list, and the curves that it asked for."""
        state, named, law = st.session_state, str(hash(repr(self._key))), self.values["law"] or LAWS[0]
        needs: list[str] = state.pop("explore_needs", None) or []
        data: dict[str, Any] = {"key": named, "shown": self._shown, "ticked": list(self.values["tensor"]), "law": law}
        if state.get("explore_has") != named or "board" in needs:
            data |= self.opened.kept((*self._key, "board"), lambda: self._data(ranked))
            data["controls"] = self._controls()
            needs = ranked["tensor_id"].head(PIECE).tolist()
            state["explore_has"], state["explore_curves"] = named, set()
        if law in LAWS and needs:
            at = (*self._key, "curves", law, tuple(needs[:PIECE]))
            data["curves"] = self.opened.kept(at, lambda: self._curves(needs[:PIECE], law))
        data["pin"] = open_session.can_keep() and not read_only()
        data["saved"] = state.pop("explore_saved", None)
        return data

    def _component(self, data: dict[str, Any], ranked: pd.DataFrame) -> None:
        heard = {
            "chosen": self._choose, "needs": self._need, "set": self._set, "saved": self._save,
            "runs": self._in_all_runs, "pinned": lambda: self._pin(st.session_state[KEY].pinned),
        }  # fmt: skip
        result = _explore()(
            key=KEY, data=data, height="content", on_open_change=lambda: None,
            **{f"on_{name}_change": while_shown(KEY, do) for name, do in heard.items()},
        )  # fmt: skip
        if result.open:
            gemms = ranked.loc[ranked["tensor_id"] == result.open, "gemm"].tolist()
            address.go(self.view.at("tensor", "", **operand(str(result.open), next(iter(gemms), None))))
        if st.session_state.pop("pin_first", False):  # the key p
            self._pin(CHARTS[0])
            address.redraw()

    @property
    def _listed_by(self) -> tuple[Any, ...]:
        return self.values["delta"], self.values["after"]

    @property
    def _shown(self) -> dict[str, Any]:
        return {name: self.values[name] for name in ("values", "axis", "by", "rounded")}

    def _data(self, ranked: pd.DataFrame) -> dict[str, Any]:
        """The rows of the table, the charts' specifications, and the dots of the formats."""
        fmt, within = self.values["format"], self.values["delta"]
        tensors = question.table(self.board, ranked, self.values)
        frame = tensors.frame
        parts = frame["name"].str.split(" · ", n=1)
        finite = frame["delta"].where(frame["delta"].abs() != math.inf)
        by_format = question.errors(self.board, ranked["tensor_id"].tolist() if within else None)
        after = int(ranked["rank_of"].iloc[0]) - 1
        data: dict[str, Any] = {
            "rows": {
                "id": frame["tensor_id"].tolist(),
                "name": parts.str[0].tolist(),
                "of": parts.str[1].astype(object).fillna("").tolist(),
                "gemm": frame["gemm"].fillna("").tolist(),
                "sqnr": [_decibels(value) for value in frame["sqnr_db"].where(finite.notna())],
                "delta": [_decibels(value, signed=True) for value in finite],
                "bad": (finite <= -FAR).tolist(),
            },
            "title": f"Worst first, {in_format(fmt)}" if fmt else "By name",
            "unit": f"dB, {format_title(fmt)}" if fmt else "",
            "within": _interval(within) if within else "",
            "note": tensors.note,
            "pages": [
                max(after - MOST_LISTED, 0) if after else None,
                after + MOST_LISTED if len(frame) == MOST_LISTED else None,
            ],
            "most": MAX_SELECTED,
            "piece": PIECE,
            "first": DRAWN,
            "palette": style.PALETTE,
            "steps": STEPS,
            "laws": LAW_NAMES,
            "plots": _plots(),
        }
        if by_format.medians.empty:
            return data | {"formats": None, "without": question.NOT_SCORED}
        dots, none, medians = charts.dots_of(by_format, question.names_of(self.opened, by_format))
        tables = Figure("formats", charts.formats(dots, none, medians, ""), dots, "").on_page.tables
        return data | {
            "formats": {
                "title": question.formats_title(by_format), "notes": " ".join(question.formats_notes(by_format)),
                "height": charts.formats_height(by_format) - TITLE, "tables": tables,
                "caption": _caption(question.formats_caption(self.board, by_format)),
            },
        }  # fmt: skip

    def _drawn(self, drawing: Drawing) -> dict[str, Any]:
        """What is drawn, computed from the values themselves: the browser draws it in place of what it made itself."""
        names = drawing.names
        colors, dashes = style.styles(names, drawing.by_name, drawing.looks)
        bins = question.value_bins(drawing) if self.values["axis"] == "linear" else None
        ids = list(self.values["tensor"])[:MAX_SELECTED]
        law = self.values["law"] or LAWS[0]
        # The curve of a tensor, unless its bins depend on what else is drawn, is sent once.
        alone = bins is None and len(drawing.chosen) == len(names) and self.values["rounded"] == AS_RECORDED
        tensors = drawing.chosen["tensor_id"].tolist() if alone else [""] * len(names)
        sent: set[str] = st.session_state["explore_curves"]
        groups = []
        for curve, color, dash, tensor in zip(drawing.curves, colors, dashes, tensors, strict=True):
            kind = f"{tensor} {self.values['values']} {law}" if alone else ""
            group: dict[str, Any] = {"name": curve.group, "color": color, "dash": style.DASHES[dash], "kind": kind}
            if kind not in sent:
                group |= curve.bins_as_json | curve.quantiles_as_json
            if bins is not None:
                own = bins[bins["group"] == curve.group]
                group |= {"low": float(own["low"].iloc[0]), "step": float(own["high"].iloc[0] - own["low"].iloc[0])}
                group["shares"] = own["share"].iloc[:-1].round(6).tolist()
            groups.append(group)
        sent |= {group["kind"] for group in groups if group["kind"]}
        return {
            "ids": ids, "shown": self._shown, "law": law, "groups": groups, "below": drawing.below,
            "caption": _caption(question.caption(self.board, self.values, drawing)),
            "axis": charts.OF[self.values["values"]] if bins is not None else charts.magnitude(self.values["values"]),
            "against": drawing.law,
        }  # fmt: skip

    def _curves(self, ids: list[str], law: str) -> dict[str, Any]:
        """The curves of tensors from their sketches, by id."""
        curves = {}
        for d in distributions(self.opened, Filter(), "tensor_id", ids):
            raw = Curve(d, against_law(d, law))
            divided = Curve(over(d, d.std), raw.quantiles) if d.std > 0 else raw
            bins = {RAW: raw.bins_as_json, SIGMA: divided.bins_as_json}
            curves[d.group] = raw.quantiles_as_json | {"bins": bins}
        return curves

    def _controls(self) -> list[dict[str, Any]]:
        controls = []
        for control in EXPLORE.controls_of(self.board, {**self.values, "tensor": []}):
            value, choices = control.possible(self.values[control.name]), list(control.choices)
            options = [[name, str(control.titles.get(name, name))] for name in choices]
            controls.append({
                "name": control.name, "label": control.label, "options": options, "value": value,
                "help": control.help or "", "list": control.widget == "list",
            })  # fmt: skip
        return controls

    def _figure(self, name: str) -> Figure | None:
        return self.view.draw(self.opened).get(name)

    # What the browser says

    def _choose(self) -> None:
        """Ticks, values or axis."""
        said = st.session_state[KEY].chosen
        usual = {"values": VALUES_OF.default, "axis": AXIS_OF.default}
        changes = {name: None if said[name] == usual[name] else str(said[name]) for name in usual}
        address.change(tensor=[str(name) for name in said["tensor"]][:MAX_SELECTED] or None, **changes)

    def _need(self) -> None:
        st.session_state["explore_needs"] = [str(name) for name in st.session_state[KEY].needs]

    def _set(self) -> None:
        """Another parameter, a range of errors that was dragged over, or a group of the legend that is kept alone."""
        name, value = st.session_state[KEY].set
        if name == "only":
            only(self.opened, {str(self.values["by"]): value})
        elif name == "delta":
            low, high = sorted(round(float(end), 2) for end in value) if value else (0.0, 0.0)
            if low < high or not value:
                address.change(delta=Interval(low, high) if value else None)
        elif name in (*EXPLORE.uses, "after"):
            address.change(**{name: value})

    def _pin(self, chart: str) -> None:
        if figure := self._figure(str(chart)):
            open_session.pin(figure, self.view)
            st.session_state["explore_pinned"] = True  # the header says so

    def _save(self) -> None:
        asked = st.session_state[KEY].saved
        figure = self._figure(str(asked["chart"]))
        if figure:
            st.session_state["explore_saved"] = show_items.file_of(asked, lambda end: exports.of_figure(figure, end))

    def _in_all_runs(self) -> None:
        rows = self.opened.rows_of(list(self.values["tensor"]))
        kept = {name: [*dict.fromkeys(rows[name].dropna().tolist())] or None for name in PLACE}
        address.change(**kept, **dict.fromkeys(FIELDS_OF_RUNS), tensor=None, delta=None, after=None, by="run_id")


@cache
def _plots() -> dict[str, Any]:
    """The specifications, which hold nothing of what is drawn, with tables of one row."""
    look = plot.in_table()
    line = pd.DataFrame({"group": ["a"], "low": [0.0], "share": [0.0], "color": [""], "dash": [[1, 0]]})
    point = pd.DataFrame({
        "group": ["a"], "theoretical": [0.0], "sample": [0.0], "share": [0.5], "color": [""], "dash": [[1, 0]],
    })  # fmt: skip
    dots = pd.DataFrame({
        "format": ["a"], "tensor": ["a"], "gemm": ["a"], "name": ["a"], "operation": ["a"], "sqnr_db": [0.0],
        "delta": [0.0], "at": [0.0], "shift": [0.0],
    })  # fmt: skip
    medians = pd.DataFrame({"format": ["a"], "at": [0.0], "text": ["a"]})
    made = {
        "log2": histogram(line, "", "", True, **look),
        "linear": histogram(line, "", "", False, **look),
        "qq": qq(point, "", "", **look),
        "formats": charts.formats(dots, dots.copy(), medians, ""),
    }
    pages = {name: Figure(name, chart, line, "").on_page for name, chart in made.items()}
    return {
        name: {"spec": page.spec, "tables": page.tables, "selections": page.selections} for name, page in pages.items()
    }  # fmt: skip


def _plot(figure: Figure) -> dict[str, Any]:
    drawn = figure.on_page
    return {
        "spec": drawn.spec, "tables": drawn.tables, "height": figure.height or HEIGHT, "caption": figure.caption_svg,
    }  # fmt: skip


def _caption(text: str) -> dict[str, Any]:
    return Figure("caption", plot.layers("", ""), pd.DataFrame(), text).caption_svg


def _decibels(value: float, signed: bool = False) -> str:
    """16.2, −3.3; with a sign for a difference. "–" if there is none."""
    if math.isnan(value):
        return "–"
    return f"{value:{'+' if signed else ''}.1f}".replace("-", "−")


def _interval(within: Any) -> str:
    """ "−2 dB or less", "−15.2 to −3.3 dB"."""
    low, high = (number_text(end, ".3g") for end in (within.low, within.high))
    if within.low <= -1000:
        return f"{high} dB or less"
    return f"{low} dB or more" if within.high >= 1000 else f"{low} to {high} dB"
