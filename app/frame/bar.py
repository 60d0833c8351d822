"""The scope and the filter, in one line above each page: run, iteration, format, metric, and a chip for each field of
the filter. They are part of the view, so they hold on every page and are in the address. The values of a field are
listed below the line while its chip is open, so that they never cover a chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.draw.glossary import TERMS
from binade.app.frame import address
from binade.app.frame.callbacks import while_shown
from binade.app.measures.registry import MAP_MEASURES, recorded_measures
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.runs import every_run, given_names, labels_of, run_titles
from binade.app.view.params import TITLES, AnyFormat, format_title, texts_of
from binade.app.view.view import Reading, View
from binade.data.index.catalog import USED, Catalog
from binade.data.words.fields import IDENTITIES
from binade.data.words.filter import INTEGER_FIELDS, Filter
from binade.quant.formats import FORMATS
from binade.quant.specs import known_specs

SCOPE_FIELDS = ("run_id", "iteration")  # fields of the filter that are chosen in the scope
CHIPS = ("layer_index", "phase", "operation", "module", "tensor_name", "quant_type")  # that Explore always shows
TOGETHER = {"phase": ("phase", "operation"), "operation": ("phase", "operation")}  # fields with few values
MORE = "more"
BOXES = "scope_boxes"  # the key of the widget that each box has now, in the session's state
OPEN = "open_chip"  # the key of the field whose values are listed, or MORE for the other fields
MOST_LISTED = 40  # values that are listed; more numbers are chosen with a slider, more names from a list
NAMED = 2  # values that a chip names
SEVERAL = "several"
Counts = Mapping[str, Mapping[Any, int]]


def key(field: str) -> str:
    """The key of a field's widget."""
    return f"filter_{field}"


@st.fragment
def bar(catalog: Catalog, view: View, reading: Reading) -> None:
    """Draw the bar. To open a chip draws only the bar again, a choice the whole page."""
    address.followed(view)
    where = reading.where
    everything = catalog.counts()
    possible = catalog.counts(where) if where.items() else everything
    with st.container(key="scope", horizontal=True, vertical_alignment="center", gap="xsmall"):
        resolved = _resolved(catalog, reading)
        of_tensor = reading.question_of_tensor  # its run and iteration need not be the latest
        _run(catalog, where, resolved, view.page != "explore", "" if of_tensor else "latest: ")
        _iteration(where, possible, resolved, "" if of_tensor else " (last)")
        if "format" in _scope(reading):
            _format(catalog, reading)
        if "metric" in _scope(reading):
            _metric(catalog, reading)
        if "versus" in _scope(reading):
            _versus(catalog, reading)
        always = CHIPS if view.page == "explore" else ()
        _chips(catalog, where, everything, always)
    if not (field := st.session_state.get(OPEN)):
        st.empty()  # in place of the list: a browser may miss that a fragment has ended without it
    else:
        with st.container(key="chip_values", horizontal=True, vertical_alignment="center", gap="small"):
            if field == MORE:
                _fields(where, everything, always)
            for name in TOGETHER.get(field, (field,)):
                if name in everything:
                    _values(catalog, name, everything[name], possible.get(name, {}), getattr(where, name))


def selects(catalog: Catalog, where: Filter) -> bool:
    """Whether a filter selects a tensor."""
    runs = catalog.counts(where).get("run_id", {})  # that the other fields select
    return any(count for run, count in runs.items() if not where.run_id or run in where.run_id)


def _resolved(catalog: Catalog, reading: Reading) -> Filter:
    """The filter with the runs and iterations that are shown: of a question about one tensor, those of the tensor."""
    tensor = catalog.rows_of(texts_of(reading.values.get("tensor")) if reading.question_of_tensor else [])
    if tensor.empty:
        return reading.within
    iterations = tuple(int(iteration) for iteration in tensor["iteration"].dropna())
    return replace(reading.where, run_id=tuple(tensor["run_id"]), iteration=iterations)


def _scope(reading: Reading) -> tuple[str, ...]:
    """The parameters of the scope that the room depends on."""
    room = reading.part.room if reading.part else ()
    return tuple(name for question in room for name in question.scope)


def _drawn(name: str, shown: Any) -> str:
    """The key of the widget of a box that shows this.

    With each request, the browser sends the values of the boxes that it shows. If anything else has changed a value
    meanwhile, Streamlit takes the former one for a choice of the user. A box whose value anything else has changed is
    therefore another widget, and what the browser still sends of the former one changes nothing.
    """
    state = st.session_state
    boxes: dict[str, str] = state.setdefault(BOXES, {})
    widget = boxes.setdefault(name, key(name))
    if widget in state and not _same(state[widget], shown):
        widget = boxes[name] = key(name) if widget != key(name) else f"{key(name)}_other"
    state[widget] = shown
    return widget


def _same(one: Any, other: Any) -> bool:
    """Whether two choices are the same; several values may be in any order."""
    return set(one) == set(other) if isinstance(one, list) and isinstance(other, list) else one == other


def _choose(name: str, box: str, widget: str) -> None:
    if st.session_state[BOXES][box] != widget:
        return
    value = st.session_state[widget]
    if name == "format" and value and AnyFormat().value_of(value) is None:
        st.toast(plain(f"There is no format {value[:40]!r}."), icon=":material/error:")
    elif value != SEVERAL:
        address.change(**{name: value})


def _box(name: str, label: str, options: list[Any], chosen: Any, width: int, field: str = "", **more: Any) -> None:
    """One choice of the scope, with its label before it."""
    widget = _drawn(name, chosen)
    st.selectbox(
        label, options, key=widget, width=width, filter_mode="contains",
        on_change=while_shown(widget, _choose), args=(field or name, name, widget), **more,
    )  # fmt: skip


def _run(catalog: Catalog, where: Filter, resolved: Filter, wide: bool, which: str) -> None:
    titles = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    several = f"{len(where.run_id)} runs"
    options = [*([SEVERAL] if len(where.run_id) > 1 else []), *catalog.runs()["run_id"]]
    chosen = where.run_id[0] if len(where.run_id) == 1 else SEVERAL if where.run_id else None
    shown = f"{which}{labels_of(catalog).get(resolved.run_id[0])}" if len(resolved.run_id) == 1 else "all"
    _box(
        "scope_run_id", "Run", options, chosen, 214 if wide else 190, "run_id", placeholder=shown,
        format_func=lambda run: several if run == SEVERAL else titles.get(run, str(run)),
    )  # fmt: skip


def _iteration(where: Filter, possible: Counts, resolved: Filter, which: str) -> None:
    several = f"{len(where.iteration)} chosen"
    options: list[Any] = [*([SEVERAL] if len(where.iteration) > 1 else []), *possible.get("iteration", {})]
    chosen: Any = where.iteration[0] if len(where.iteration) == 1 else SEVERAL if where.iteration else None
    shown = f"{resolved.iteration[0]}{which}" if len(resolved.iteration) == 1 else "all"
    _box(
        "scope_iteration", "Iteration", options, chosen, 172, "iteration", placeholder=shown,
        format_func=lambda at: several if at == SEVERAL else str(at),
    )  # fmt: skip


def _format(catalog: Catalog, reading: Reading) -> None:
    scored, chosen = catalog.scored_formats(), reading.values["format"]
    formats = known_specs(dict.fromkeys(name for name in (*scored, *FORMATS, chosen) if name and name != USED))
    _box(
        "format", "Format", [USED, *formats], chosen or None, 170, accept_new_options=True, placeholder="none",
        format_func=format_title,
    )  # fmt: skip


def _versus(catalog: Catalog, reading: Reading) -> None:
    runs = {run: f"{label} (run)" for run, label in labels_of(catalog).items()}  # a format may have the same name
    chosen = reading.values["versus"]
    formats = [spec for spec in catalog.scored_formats() if spec != reading.values["format"]]
    options: list[Any] = list(dict.fromkeys(filter(None, [*formats, *catalog.runs()["run_id"], chosen])))
    _box(
        "versus", "Compared with", options, chosen, 198, placeholder="none",
        format_func=lambda name: runs.get(name, name),
    )  # fmt: skip


def _metric(catalog: Catalog, reading: Reading) -> None:
    """The measures that the root has data for, and the one that is shown."""
    chosen = reading.values["metric"]
    offered = {*recorded_measures(catalog), chosen}
    _box(
        "metric", "Color", [name for name in MAP_MEASURES if name in offered], chosen, 292,
        format_func=lambda name: MAP_MEASURES[name].measure.label,
    )  # fmt: skip


def _chips(catalog: Catalog, where: Filter, everything: Counts, always: Sequence[str]) -> None:
    """A chip for each field, those of `always` and those that restrict: a click opens its values, the cross clears
    it."""
    restricting = {name: values for name, values in where.items() if name not in SCOPE_FIELDS or len(values) > 1}
    shown = partial(group_name, names=given_names(catalog))
    for name in dict.fromkeys((*always, *restricting)):
        values = restricting.get(name, ())
        if not values and len(everything.get(name, ())) < 2:
            continue  # there is nothing to choose
        label = f"{TITLES[name]}: {_listed(name, values, everything, shown)}" if values else TITLES[name]
        with st.container(key=f"chip_{'on' if values else 'off'}_{name}", horizontal=True, gap=None, width="content"):
            st.button(f"{plain(label)} ▾", key=f"chip_of_{name}", on_click=_open, args=(name,), help=_help(name))
            if values:
                st.button("✕", key=f"clear_{name}", on_click=_clear, args=(name,), help=f"All: {TITLES[name].lower()}")
    with st.container(key="chip_off_more", width="content"):
        st.button("+" if always else "+ Filter", key="filter_more", on_click=_open, args=(MORE,), help="More fields")
    if where.items():
        st.button("Clear", key="clear_filter", on_click=clear, type="tertiary", help="Clear the filter")


def _help(name: str) -> str | None:
    return TERMS.get(TITLES[name].lower())


def _listed(name: str, values: Sequence[Any], everything: Counts, shown: Callable[[object], str]) -> str:
    if name in INTEGER_FIELDS and len(values) > NAMED and _successive(values, list(everything.get(name, ()))):
        return f"{min(values)} to {max(values)}"
    named = ", ".join(shown(value) for value in values[:NAMED])
    return named + (f" +{len(values) - NAMED}" if len(values) > NAMED else "")


def _successive(values: Sequence[Any], possible: list[int]) -> bool:
    return sorted(values) == [value for value in possible if min(values) <= value <= max(values)]


def _open(name: str) -> None:
    """Show the values of a field, or hide them if they are shown."""
    state = st.session_state
    state[OPEN] = None if state.get(OPEN) == name else name


def _clear(name: str) -> None:
    address.change(**{name: None})


def _fields(where: Filter, everything: Counts, always: Sequence[str]) -> None:
    """The fields that have no chip."""
    for name in everything:
        if name not in always and len(everything[name]) > 1:
            st.button(TITLES[name], key=f"field_{name}", on_click=_open, args=(name,), help=_help(name))


def _values(
    catalog: Catalog, name: str, everything: Mapping[Any, int], possible: Mapping[Any, int], chosen: Sequence[Any]
) -> None:
    """The values of a field: those that select something beside the rest of the filter, and the chosen ones."""
    runs = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    shown = partial(group_name, names=runs)
    options = list(dict.fromkeys([*possible, *chosen]))
    options = sorted(options) if name in INTEGER_FIELDS else IDENTITIES[name].ordered(options)
    st.markdown(f"{TITLES[name]}", width="content", help=_help(name))
    if name in INTEGER_FIELDS and len(everything) > MOST_LISTED:
        _range(name, sorted({*everything, *chosen}), chosen)
        return
    widget = _drawn(name, list(chosen))
    if len(options) > MOST_LISTED:
        st.multiselect(
            TITLES[name], options, key=widget, placeholder="all", filter_mode="contains", select_all=False,
            format_func=shown, on_change=while_shown(widget, _choose), args=(name, name, widget),
            label_visibility="collapsed", width=500,
        )  # fmt: skip
        return
    st.pills(
        TITLES[name], options, selection_mode="multi", key=widget, format_func=lambda value: plain(shown(value)),
        on_change=while_shown(widget, _choose), args=(name, name, widget), label_visibility="collapsed",
        width="content",
    )  # fmt: skip


def clear() -> None:
    address.narrow(Filter())


def _range(name: str, values: Sequence[int], chosen: Sequence[Any]) -> None:
    """A slider from the first of the chosen values to the last; all of them if none is chosen."""
    ends = min(chosen, default=values[0]), max(chosen, default=values[-1])
    slider = f"range_{name}_{ends}"  # to Streamlit, a slider with another default is another slider
    st.select_slider(
        TITLES[name], values, ends, key=slider, on_change=while_shown(slider, _within), args=(name, values, slider),
        width=500, label_visibility="collapsed",
    )  # fmt: skip


def _within(name: str, values: Sequence[int], slider: str) -> None:
    low, high = st.session_state[slider]
    every = (low, high) == (values[0], values[-1])
    address.change(**{name: None if every else [value for value in values if low <= value <= high]})


def explain_nothing(where: Filter) -> None:
    """Say that the filter selects no tensor, and offer to clear it."""
    st.info(f"No tensor matches: {plain(where.sentence())}.", icon=":material/filter_alt_off:")
    offer_to_clear()


def offer_to_clear() -> None:
    """A button that clears the filter."""
    st.button("Clear the filter", icon=":material/filter_alt_off:", on_click=clear, key="offer_to_clear")


def only(catalog: Catalog, values: Mapping[str, Any]) -> None:
    """Restrict the filter to a mark's values, by field. A value may be the label that charts show for it."""
    shown = partial(group_name, names=given_names(catalog))
    facets = catalog.facets()
    selection = {
        name: [value for value in facets.get(name, []) if wanted in (value, shown(value))]
        for name, wanted in values.items()
    }
    address.change(**{name: chosen for name, chosen in selection.items() if chosen})
