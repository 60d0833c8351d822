"""What pages share: the catalog of the root, the top of a page, and what a page shows when there is nothing to show."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Hashable
from functools import wraps

import streamlit as st

from binade.app.address import follow, plain
from binade.app.filters import sidebar
from binade.app.params import Params
from binade.data.access import check_writable, read_only
from binade.data.catalog import Catalog, DamagedIndexError
from binade.data.filter import Filter
from binade.data.runs import RunError, resolve_root
from binade.data.sandbox import Sandbox

SYNC_SECONDS = 2.0


@st.cache_resource(show_spinner="Reading the runs …")
def _open(root: str) -> tuple[Catalog, dict[str, float]]:
    opened = Catalog.open(root)
    atexit.register(opened.close)
    return opened, {"synced": time.monotonic()}


def catalog() -> Catalog:
    """The catalog, up to date within two seconds. A root that cannot be read ends the page with the reason."""
    try:
        opened, state = _open(str(resolve_root()))
        if time.monotonic() - state["synced"] > SYNC_SECONDS:
            opened.sync()
            state["synced"] = time.monotonic()
        return opened
    except (RunError, OSError) as error:
        st.error(f"The runs cannot be read: {error}.", icon=":material/folder_off:")
        st.markdown("Start the app on another directory: `TENSOR_SAVE_DIR=<directory> make run`")
        st.stop()


@st.cache_resource(max_entries=1, show_spinner="Copying the index …")
def _sandbox(_opened: Catalog, state: Hashable) -> Sandbox:
    return Sandbox(_opened)


def sandbox(opened: Catalog) -> Sandbox:
    """A sandbox over the index as it is now. Raises ReadOnlyError."""
    check_writable("SQL")
    return _sandbox(opened, opened.state())


def catalog_page(
    title: str, *, needs_tensors: bool = True
) -> Callable[[Callable[[Catalog], None]], Callable[[], None]]:
    """Turn a function of the catalog into a page: its title, the runs that cannot be read, then what the function
    draws. On a root without tensors the page explains how to record some instead, unless needs_tensors is False."""

    def decorate(draw: Callable[[Catalog], None]) -> Callable[[], None]:
        @wraps(draw)
        def page() -> None:
            opened = catalog()
            st.title(title, anchor=False)
            _explain_refused(opened)
            try:
                if needs_tensors and not opened.totals().tensors:
                    explain_empty(opened)
                else:
                    draw(opened)
            except DamagedIndexError as error:
                st.error(f"{error}.", icon=":material/error:")
            _tell(opened)

        return page

    return decorate


def view_page(
    name: str, title: str, params: Callable[[Catalog], Params]
) -> Callable[[Callable[[Catalog, Filter, Params], None]], Callable[[], None]]:
    """Turn a function of the catalog, the filter and the page's parameters into a page with the filter in its sidebar.
    name: of the page in PAGES; params: what `address.follow` reads and the function gives to `address.write`."""

    def decorate(draw: Callable[[Catalog, Filter, Params], None]) -> Callable[[], None]:
        @catalog_page(title)
        @wraps(draw)
        def page(opened: Catalog) -> None:
            declared = params(opened)
            follow(opened, name, declared)
            draw(opened, sidebar(opened), declared)

        return page

    return decorate


def _explain_refused(opened: Catalog) -> None:
    """List the runs that could not be read, if there are any."""
    if opened.refused:
        count = len(opened.refused)
        title = f"{count} runs are damaged or cannot be read: no number on this page includes them"
        if count == 1:
            title = "A run is damaged or cannot be read: no number on this page includes it"
        with st.expander(title, icon=":material/warning:"):
            for line in opened.refused:
                st.text(line)


def _tell(opened: Catalog) -> None:
    """Show what was wrong with the index since this session looked last."""
    seen = st.session_state.setdefault("index_notices", 0)
    for notice in opened.notices[seen:]:
        st.toast(plain(notice), icon=":material/build:")
    st.session_state["index_notices"] = len(opened.notices)


def explain_empty(opened: Catalog) -> None:
    """The page of a root without runs."""
    st.info(f"No runs yet in `{opened.root}`.", icon=":material/inbox:")
    if not read_only() and "collect" in st.session_state.get("pages", {}):
        st.page_link(st.session_state["pages"]["collect"], label="Collect some here", icon=":material/play_circle:")
        st.markdown("or in a terminal, the smallest useful run:")
    else:
        st.markdown("Collect the smallest useful run, then reload this page:")
    st.code("binade quick mxfp8", language="shell")
    st.markdown("or one run of each format, to compare them:")
    st.code("binade batch --quantization bf16,hifp8,mxfp8,mxfp4", language="shell")
