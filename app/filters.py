"""The filter in the sidebar, the same on every page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import streamlit as st

from binade.app import saved_filters
from binade.app.address import chosen_filter, clear_filter, key, plain
from binade.app.glossary import TERMS
from binade.app.params import TITLES
from binade.app.questions.shared.labels import group_name
from binade.app.questions.shared.runs import every_run, given_names, run_titles
from binade.app.saved_filters import LONGEST_NAME, SavedFiltersError
from binade.data.access import ReadOnlyError, read_only
from binade.data.catalog import Catalog
from binade.data.filter import INTEGER_FIELDS, Filter

GROUPS = {
    "": ("quant_type", "layer_index", "module", "operation", "tensor_name"),
    "Run and model": ("run_id", "recipe", "model", "size", "dataset", "layer_type", "component", "phase", "stage"),
    "Iteration and rank": ("iteration", "micro_batch", "rank", "expert"),
}

MOST_CHIPS = 20
MOST_LISTED = 12  # up to this many numbers are chosen from a list, more with a range slider
Counts = Mapping[str, Mapping[Any, int]]


def sidebar(catalog: Catalog) -> Filter:
    """Draw the filter and return it. Values in the address that do not occur are named."""
    chosen = chosen_filter()
    everything = catalog.counts()
    possible = catalog.counts(chosen) if chosen.items() else everything
    shown = partial(group_name, names=given_names(catalog))
    runs = catalog.kept(("run titles", catalog.state()), lambda: run_titles(every_run(catalog)))
    with st.sidebar:
        with st.container(key="filter_title", horizontal=True, vertical_alignment="center"):
            st.subheader("Filter", anchor=False)
            st.button("Clear", on_click=clear_filter, disabled=not chosen.items())
        if problems := st.session_state.get("filter_problems"):
            st.warning("\n\n".join(map(plain, problems)), icon=":material/link_off:")
        for title, fields in GROUPS.items():
            with st.expander(title, expanded=any(getattr(chosen, name) for name in fields)) if title else nullcontext():
                for name in [name for name in fields if name in everything]:
                    if name in INTEGER_FIELDS and len(everything[name]) > MOST_LISTED:
                        _range(name, sorted({*everything[name], *getattr(chosen, name)}), getattr(chosen, name))
                    else:
                        _list(name, possible.get(name, {}), getattr(chosen, name), partial(group_name, names=runs))
        _saved(catalog.root, chosen)
    chosen = chosen_filter()
    _chips(chosen, everything, shown)
    _explain_hidden(chosen, everything, possible)
    return chosen


def _list(name: str, counts: Mapping[Any, int], chosen: Sequence[Any], shown: Callable[[object], str]) -> None:
    st.multiselect(
        TITLES[name],
        list(dict.fromkeys([*counts, *chosen])),
        key=key(name),
        help=TERMS.get(TITLES[name].lower()),
        placeholder="all",
        filter_mode="contains",  # else "mxfp4" finds mxfp8 as well, and Enter chooses both
        format_func=lambda value: f"{shown(value)} ({counts.get(value, 0):,})",
    )


def _range(name: str, values: Sequence[int], chosen: Sequence[Any]) -> None:
    """A slider from the first of the chosen values to the last; all of them if none is chosen."""
    ends = min(chosen, default=values[0]), max(chosen, default=values[-1])
    slider = f"range_{name}_{ends}"  # to Streamlit, a slider with another default is another slider
    help = TERMS.get(TITLES[name].lower())
    st.select_slider(TITLES[name], values, ends, key=slider, help=help, on_change=_within, args=(name, values, slider))


def _within(name: str, values: Sequence[int], slider: str) -> None:
    low, high = st.session_state[slider]
    every = (low, high) == (values[0], values[-1])
    st.session_state[key(name)] = [] if every else [value for value in values if low <= value <= high]


def _chips(chosen: Filter, everything: Counts, shown: Callable[[object], str]) -> None:
    """Show the filter's values above the page, a range of numbers as one; a click removes one."""
    chips: dict[str, tuple[str, tuple[Any, ...]]] = {}
    for name, values in chosen.items():
        if name in INTEGER_FIELDS and len(values) > 2 and _successive(values, list(everything.get(name, ()))):
            chips[f"{TITLES[name]}: {min(values)} to {max(values)} ✕"] = name, values
        else:
            chips |= {f"{TITLES[name]}: {shown(value)} ✕": (name, (value,)) for value in values}
    if chips:
        st.pills(
            "Filter: click a value to remove it",
            list(chips)[:MOST_CHIPS],
            key="chips",
            format_func=plain,
            on_change=_remove,
            args=(chips,),
            label_visibility="collapsed",
        )
    if len(chips) > MOST_CHIPS:
        st.caption(f"and {len(chips) - MOST_CHIPS} more")


def _successive(values: Sequence[Any], possible: list[int]) -> bool:
    return sorted(values) == [each for each in possible if min(values) <= each <= max(values)]


def _remove(chips: Mapping[str, tuple[str, tuple[Any, ...]]]) -> None:
    name, values = chips[st.session_state["chips"]]
    st.session_state[key(name)] = [other for other in st.session_state[key(name)] if other not in values]
    st.session_state["chips"] = None


def _explain_hidden(chosen: Filter, everything: Counts, possible: Counts) -> None:
    """Say how many tensors the filter hides, so that users do not mistake "filtered out" for "not recorded"."""
    total = sum(everything.get("run_id", {}).values())
    runs = possible.get("run_id", {})
    kept = sum(count for run, count in runs.items() if not chosen.run_id or run in chosen.run_id)
    st.session_state["hidden"] = (total - kept, total)
    if kept < total:
        st.caption(f"The filter hides {total - kept:,} of {total:,} tensors.")


def hides_everything() -> bool:
    """Whether the filter hides all tensors."""
    hidden, total = st.session_state["hidden"]
    return bool(hidden == total)


def explain_nothing(where: Filter) -> None:
    """Say that the filter selects no tensor, and offer to clear it."""
    st.info(f"No tensor matches: {plain(where.sentence())}.", icon=":material/filter_alt_off:")
    offer_to_clear()


def offer_to_clear() -> None:
    """A button that clears the filter, shown if it hides something."""
    hidden, _ = st.session_state.get("hidden", (0, 0))
    if hidden:
        st.button(
            f"Clear the filter: {hidden:,} tensors are hidden", icon=":material/filter_alt_off:", on_click=clear_filter
        )


def only(catalog: Catalog, values: Mapping[str, Any]) -> None:
    """Restrict the filter to a mark's values, by field. A value may be the label that charts show for it."""
    shown = partial(group_name, names=given_names(catalog))
    for name, wanted in values.items():
        found = [value for value in catalog.facets().get(name, []) if wanted in (value, shown(value))]
        if found:
            st.session_state[key(name)] = found


def _saved(root: Path, chosen: Filter) -> None:
    """A menu of the filters that users have named."""
    with st.popover("Saved filters", icon=":material/bookmark:", width="stretch"):
        try:
            found = saved_filters.load(root)
        except SavedFiltersError as error:
            st.error(plain(str(error)), icon=":material/error:")
            return
        if not found and read_only():
            st.caption("No saved filters.")
        for index, (name, where) in enumerate(found.items()):
            left, right = st.columns([5, 1], vertical_alignment="center")
            help = plain(where.sentence())
            left.button(
                plain(name), key=f"load_filter_{index}", on_click=_load, args=(where,), help=help, type="tertiary"
            )
            if not read_only():
                icon = ":material/delete:"
                right.button(
                    "", key=f"delete_filter_{index}", icon=icon, on_click=_write, args=(root, name), help="Delete"
                )
        if read_only():
            return
        name = st.text_input("Name", max_chars=LONGEST_NAME, key="filter_name", placeholder="gradients of fc1")
        unfit = not name.strip() or not chosen.items()
        st.button("Save this filter", disabled=unfit, on_click=_write, args=(root, name.strip(), chosen))
        if not chosen.items():
            st.caption("Set a filter first.")


def _load(where: Filter) -> None:
    clear_filter()
    for name, values in where.items():
        st.session_state[key(name)] = list(values)


def _write(root: Path, name: str, where: Filter | None = None) -> None:
    try:
        saved_filters.save(root, name, where)
    except (SavedFiltersError, ReadOnlyError) as error:
        st.error(plain(str(error)), icon=":material/error:")
