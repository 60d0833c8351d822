"""The scope and the filter, in one line above each page: run, iteration, format, metric, and a chip for each value of
the filter. They are part of the view, so they hold on every page and are in the address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from binade.app import address, saved_filters
from binade.app.formatting import plain
from binade.app.glossary import TERMS
from binade.app.params import TITLES, AnyFormat, format_title
from binade.app.questions.map.compute import METRICS
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.runs import every_run, given_names, labels_of, run_titles
from binade.app.questions.shared.scope import scoped
from binade.app.saved_filters import LONGEST_NAME, SavedFiltersError
from binade.app.style import MEASURES
from binade.app.view import Reading, View
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import USED, Catalog
from binade.data.filter import INTEGER_FIELDS, Filter
from binade.quant.formats import FORMATS
from binade.quant.specs import known_specs

SCOPE_FIELDS = ("run_id", "iteration")  # fields of the filter that are chosen in the scope
GROUPS = {
    "": ("layer_index", "module", "operation", "tensor_name", "quant_type"),
    "Run and model": ("run_id", "recipe", "model", "size", "dataset", "layer_type", "component", "phase", "stage"),
    "Iteration and rank": ("iteration", "micro_batch", "rank", "expert"),
}
MOST_CHIPS = 12
MOST_LISTED = 12  # up to this many numbers are chosen from a list, more with a range slider
SEVERAL = "several"
Counts = Mapping[str, Mapping[Any, int]]


def key(field: str) -> str:
    """The key of a field's widget."""
    return f"filter_{field}"


def bar(catalog: Catalog, view: View, reading: Reading) -> bool:
    """Draw the bar. Returns whether the filter selects a tensor."""
    where = reading.where
    everything = catalog.counts()
    possible = catalog.counts(where) if where.items() else everything
    with st.container(key="scope", horizontal=True, vertical_alignment="center", gap="small"):
        resolved = scoped(catalog, where, scored=True) if _is_of_one(reading) else where
        _run(catalog, where, resolved)
        _iteration(where, possible, resolved)
        if "format" in _scope(reading):
            _format(catalog, reading)
        if "metric" in _scope(reading):
            _metric(reading)
        if "versus" in _scope(reading):
            _versus(catalog, reading)
        _chips(catalog, where, everything)
        hidden, total = _hidden(where, everything, possible)
        _filter(catalog, where, everything, possible, hidden, total)
    return hidden < total or not total


def _scope(reading: Reading) -> tuple[str, ...]:
    return reading.question.scope if reading.question else ()


def _is_of_one(reading: Reading) -> bool:
    """Whether the part shows one run and iteration if none is chosen."""
    return bool(reading.question and reading.question.page in ("map", "tensor"))


def _choose(name: str, widget: str = "") -> None:
    value = st.session_state[key(widget or name)]
    if name == "format" and value and AnyFormat().value_of(value) is None:
        st.toast(plain(f"There is no format {value[:40]!r}."), icon=":material/error:")
    elif value != SEVERAL:
        address.change(**{name: value})


def _box(name: str, label: str, options: list[Any], chosen: Any, width: int, field: str = "", **more: Any) -> None:
    """One choice of the scope, with its label before it."""
    st.session_state[key(name)] = chosen
    st.selectbox(
        label, options, key=key(name), width=width, filter_mode="contains", on_change=_choose,
        args=(field or name, name), **more,
    )  # fmt: skip


def _run(catalog: Catalog, where: Filter, resolved: Filter) -> None:
    titles = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    several = f"{len(where.run_id)} runs"
    options = [*([SEVERAL] if len(where.run_id) > 1 else []), *catalog.runs()["run_id"]]
    chosen = where.run_id[0] if len(where.run_id) == 1 else SEVERAL if where.run_id else None
    latest = f"latest: {labels_of(catalog).get(resolved.run_id[0])}" if len(resolved.run_id) == 1 else "all"
    _box(
        "scope_run_id", "Run", options, chosen, 250, "run_id", placeholder=latest,
        format_func=lambda run: several if run == SEVERAL else titles.get(run, str(run)),
    )  # fmt: skip


def _iteration(where: Filter, possible: Counts, resolved: Filter) -> None:
    several = f"{len(where.iteration)} chosen"
    options: list[Any] = [*([SEVERAL] if len(where.iteration) > 1 else []), *possible.get("iteration", {})]
    chosen: Any = where.iteration[0] if len(where.iteration) == 1 else SEVERAL if where.iteration else None
    last = f"last: {resolved.iteration[0]}" if len(resolved.iteration) == 1 else "all"
    _box(
        "scope_iteration", "Iteration", options, chosen, 175, "iteration", placeholder=last,
        format_func=lambda at: several if at == SEVERAL else str(at),
    )  # fmt: skip


def _format(catalog: Catalog, reading: Reading) -> None:
    scored, chosen = catalog.scored_formats(), reading.values["format"]
    formats = known_specs(dict.fromkeys(name for name in (*scored, *FORMATS, chosen) if name and name != USED))
    _box(
        "format", "Format", [USED, *formats], chosen or None, 190, accept_new_options=True, placeholder="none",
        format_func=format_title,
    )  # fmt: skip


def _versus(catalog: Catalog, reading: Reading) -> None:
    titles = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    chosen = reading.values["versus"]
    formats = [spec for spec in catalog.scored_formats() if spec != reading.values["format"]]
    options: list[Any] = list(dict.fromkeys(filter(None, [*formats, *catalog.runs()["run_id"], chosen])))
    shown = partial(_titled, titles)
    _box("versus", "minus", options, chosen, 190, placeholder="nothing", format_func=shown)


def _titled(titles: Mapping[str, str], name: str) -> str:
    return titles.get(name, name)


def _metric(reading: Reading) -> None:
    _box("metric", "Color", list(METRICS), reading.values["metric"], 220, format_func=lambda name: MEASURES[name].label)


def _hidden(where: Filter, everything: Counts, possible: Counts) -> tuple[int, int]:
    """(how many tensors the filter hides, all)."""
    total = sum(everything.get("run_id", {}).values())
    runs = possible.get("run_id", {})
    return total - sum(count for run, count in runs.items() if not where.run_id or run in where.run_id), total


def _filter(catalog: Catalog, where: Filter, everything: Counts, possible: Counts, hidden: int, total: int) -> None:
    """The menu with every field of the filter and the saved filters."""
    runs = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    with st.popover("Filter", icon=":material/filter_alt:", key="filter_menu", width="content"):
        st.button("Clear", on_click=clear, disabled=not where.items(), key="clear_filter")
        if hidden:
            st.caption(f"The filter hides {hidden:,} of {total:,} tensors.")
        for title, fields in GROUPS.items():
            with st.expander(title, expanded=any(getattr(where, name) for name in fields)) if title else nullcontext():
                for name in [name for name in fields if name in everything]:
                    chosen = getattr(where, name)
                    if name in INTEGER_FIELDS and len(everything[name]) > MOST_LISTED:
                        _range(name, sorted({*everything[name], *chosen}), chosen)
                    else:
                        _list(name, possible.get(name, {}), chosen, partial(group_name, names=runs))
        st.divider()
        _saved(catalog.root, where)


def clear() -> None:
    address.narrow(Filter())


def _list(name: str, counts: Mapping[Any, int], chosen: Sequence[Any], shown: Callable[[object], str]) -> None:
    st.session_state[key(name)] = list(chosen)
    options = list(dict.fromkeys([*counts, *chosen]))
    st.multiselect(
        TITLES[name],
        options,
        key=key(name),
        help=TERMS.get(TITLES[name].lower()),
        placeholder="all",
        filter_mode="contains",  # else "mxfp4" finds mxfp8 as well
        select_all=False,  # else Enter chooses everything that contains what was typed
        format_func=lambda value: f"{shown(value)} ({counts.get(value, 0):,})",
        on_change=_choose_listed,
        args=(name, {shown(option): option for option in options}),
    )


def _choose_listed(name: str, titles: Mapping[str, Any]) -> None:
    """A browser sends the labels that it shows. If the app has counted again since, Streamlit does not know them, and
    passes them on as they are, with the number of tensors at the end."""
    chosen = [value if value in titles.values() else value.rpartition(" (")[0] for value in st.session_state[key(name)]]
    address.change(**{name: [titles.get(value, value) for value in chosen]})


def _range(name: str, values: Sequence[int], chosen: Sequence[Any]) -> None:
    """A slider from the first of the chosen values to the last; all of them if none is chosen."""
    ends = min(chosen, default=values[0]), max(chosen, default=values[-1])
    slider = f"range_{name}_{ends}"  # to Streamlit, a slider with another default is another slider
    help = TERMS.get(TITLES[name].lower())
    st.select_slider(TITLES[name], values, ends, key=slider, help=help, on_change=_within, args=(name, values, slider))


def _within(name: str, values: Sequence[int], slider: str) -> None:
    low, high = st.session_state[slider]
    every = (low, high) == (values[0], values[-1])
    address.change(**{name: None if every else [value for value in values if low <= value <= high]})


def _chips(catalog: Catalog, where: Filter, everything: Counts) -> None:
    """The filter's values, a range of numbers as one; a click removes one."""
    shown = partial(group_name, names=given_names(catalog))
    chips: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for name, values in where.items():
        if name in SCOPE_FIELDS and len(values) == 1:
            continue
        if name in INTEGER_FIELDS and len(values) > 2 and _successive(values, list(everything.get(name, ()))):
            chips[f"{TITLES[name]}: {min(values)} to {max(values)} ✕"] = name, values
        else:
            chips |= {f"{TITLES[name]}: {shown(value)} ✕": (name, (value,)) for value in values}
    if chips:
        st.session_state["chips"] = None
        st.pills(
            "Filter: click a value to remove it",
            list(chips)[:MOST_CHIPS],
            key="chips",
            format_func=plain,
            on_change=_remove,
            args=(chips, where),
            label_visibility="collapsed",
            width="content",
        )
    if len(chips) > MOST_CHIPS:
        st.caption(f"and {len(chips) - MOST_CHIPS} more")


def _successive(values: Sequence[Any], possible: list[int]) -> bool:
    return sorted(values) == [each for each in possible if min(values) <= each <= max(values)]


def _remove(chips: Mapping[str, tuple[str, tuple[Any, ...]]], where: Filter) -> None:
    name, values = chips[st.session_state["chips"]]
    address.change(**{name: [other for other in getattr(where, name) if other not in values]})


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
    found = {
        name: [value for value in facets.get(name, []) if wanted in (value, shown(value))]
        for name, wanted in values.items()
    }
    address.change(**{name: chosen for name, chosen in found.items() if chosen})


def _saved(root: Path, where: Filter) -> None:
    """The filters that users have named; a click applies one."""
    st.markdown("**Saved filters**")
    try:
        found = saved_filters.load(root)
    except SavedFiltersError as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    if not found and read_only():
        st.caption("No saved filters.")
    for index, (name, saved) in enumerate(found.items()):
        left, right = st.columns([5, 1], vertical_alignment="center")
        help = plain(saved.sentence())
        left.button(
            plain(name), key=f"load_filter_{index}", on_click=address.narrow, args=(saved,), help=help, type="tertiary"
        )
        if not read_only():
            icon = ":material/delete:"
            right.button("", key=f"delete_filter_{index}", icon=icon, on_click=_write, args=(root, name), help="Delete")
    if read_only():
        return
    st.text_input("Name", max_chars=LONGEST_NAME, key="filter_name", placeholder="gradients of fc1")
    st.button("Save this filter", disabled=not where.items(), on_click=_save, args=(root, where))
    if not where.items():
        st.caption("Set a filter first.")


def _save(root: Path, where: Filter) -> None:
    if name := st.session_state["filter_name"].strip():
        _write(root, name, where)
    else:
        st.toast("Give the filter a name.", icon=":material/error:")


def _write(root: Path, name: str, where: Filter | None = None) -> None:
    try:
        saved_filters.save(root, name, where)
    except (SavedFiltersError, ReadOnlyError) as error:
        st.error(plain(str(error)), icon=":material/error:")
