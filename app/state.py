"""What pages share: the catalog of the root, the top of a page, and the page of an empty root."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import wraps
from typing import TypeVar

import streamlit as st

from binade.app.address import follow, plain, write
from binade.app.filters import explain_nothing, hides_everything, sidebar
from binade.app.params import Params
from binade.data.access import check_writable, read_only
from binade.data.cache import Cache, Done, release_memory
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.runs import RunError, resolve_root, unusable_root
from binade.data.sandbox import Sandbox

SYNC_SECONDS = 2.0
IDLE = 5  # times SYNC_SECONDS: a catalog that nobody has used for longer is synchronized before it is shown
REST = 50.0  # seconds after the last use: what was computed is dropped and its memory returned to the system
PATIENCE = 20  # the minimum time between two redraws of a page, as a multiple of the time that drawing took
SHARED = 96 << 20  # bytes of results, tables and values that all sessions share
# Where answers are computed: two at once, and one at a time of those that take long or a large tensor. The threads that
# serve sessions wait, and a reader can stop waiting.
QUICK, SLOW = ThreadPoolExecutor(2, "quick"), ThreadPoolExecutor(1, "slow")

LARGE = 1 << 24  # values of a tensor that take more than a moment to read

T = TypeVar("T")


class Watched:
    """A catalog that all sessions share. It is synchronized in its own thread when a page needs it."""

    def __init__(self, opened: Catalog) -> None:
        self.opened = opened
        opened.cache = Cache(SHARED, outside=(Catalog, threading.Thread))
        self._pool = ThreadPoolExecutor(1, "sync")
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._sync: Future[None] | None = None
        self._rest = threading.Timer(REST, self._give_all_back)

    def look(self) -> None:
        """Start to synchronize it if the last time was SYNC_SECONDS ago, and wait for it after a pause or a failure.
        Raises RunError and OSError."""
        with self._lock:
            sync, age = self._sync, time.monotonic() - self._started
            if sync and not sync.done():
                return
            failed = sync is not None and sync.exception() is not None
            if age > SYNC_SECONDS:
                self._started = time.monotonic()
                sync = self._sync = self._pool.submit(self._catch_up)
                self._rest.cancel()
                self._rest = threading.Timer(REST, self._give_all_back)
                self._rest.daemon = True
                self._rest.start()
        if sync and (failed or age > IDLE * SYNC_SECONDS):
            sync.result()

    def _catch_up(self) -> None:
        self.opened.sync()
        self._give_back()

    def _give_back(self) -> None:
        assert self.opened.cache
        if self.opened.cache.expire(self.opened.version):
            self.opened.trim_memory()
            release_memory()

    def _give_all_back(self) -> None:
        assert self.opened.cache
        self.opened.cache.expire(self.opened.version)
        self.opened.release_memory()
        release_memory()


@st.cache_resource(show_spinner="Reading the runs …")
def _open(root: str) -> Watched:
    opened = Catalog.open(root)
    atexit.register(opened.close)
    gc.collect()
    gc.freeze()  # modules are never freed, so the garbage collector can skip them
    atexit.register(gc.unfreeze)
    return Watched(opened)


def catalog() -> Catalog:
    """The catalog, up to date within two seconds. A root that cannot be read ends the page with the reason."""
    try:
        watched = _open(str(resolve_root()))
        watched.look()
        if problem := unusable_root(watched.opened.root):  # a file has replaced the directory since
            raise RunError(problem)
        return watched.opened
    except (RunError, OSError) as error:
        st.error(f"The runs cannot be read: {error}.", icon=":material/folder_off:")
        st.markdown("Start the app with another directory: `binade serve DIRECTORY`")
        st.stop()


def shared(
    opened: Catalog,
    request: Hashable,
    compute: Callable[[Done], T],
    pool: Executor = QUICK,
    step: Done = lambda count, of: None,
    stays: bool = False,
) -> T:
    """The result of compute for a request at the catalog's version (or at any, with stays), computed once for all
    sessions; see `Cache.get`."""
    assert opened.cache
    return opened.cache.get(None if stays else opened.version, request, compute, pool, step)


@st.cache_resource(max_entries=1, show_spinner="Copying the index …")
def _sandbox(_opened: Catalog, state: Hashable) -> Sandbox:
    return Sandbox(_opened)


def sandbox(opened: Catalog) -> Sandbox:
    """A sandbox over the index as it is now. Raises ReadOnlyError."""
    check_writable("SQL")
    return _sandbox(opened, opened.state())


def catalog_page(
    title: str, *, needs_tensors: bool = True, shows: str | None = None
) -> Callable[[Callable[[Catalog], None]], Callable[[], None]]:
    """Turn a function of the catalog into a page: its title, the runs that cannot be read, then whatever the function
    draws. On a root without tensors, the page explains instead how to record some, unless needs_tensors is False.

    shows: the attribute of the catalog whose change draws the page again."""

    def decorate(draw: Callable[[Catalog], None]) -> Callable[[], None]:
        @wraps(draw)
        def page() -> None:
            opened = catalog()
            start, before = time.monotonic(), getattr(opened, shows or "version")
            st.title(title, anchor=False)
            _explain_refused(opened)
            if needs_tensors and not opened.totals().tensors:
                explain_empty(opened)
            else:
                draw(opened)
            _tell(opened)
            if shows:
                _redraw_on_change(opened, shows, before, PATIENCE * (time.monotonic() - start))

        return page

    return decorate


def view_page(
    name: str, title: str, params: Callable[[Catalog], Params], of_fields: tuple[str, ...] = ()
) -> Callable[[Callable[[Catalog, Filter, Params], None]], Callable[[], None]]:
    """Turn a function of the catalog, the filter and the page's parameters into a page with the filter in its sidebar.
    The function is called only if the filter selects a tensor; otherwise the page says that none matches.

    name: of the page in PAGES; params: the parameters that `address.follow` reads and the function passes to
    `address.write`; of_fields: as in `Question`; a filter that selects no tensor may select runs."""

    def decorate(draw: Callable[[Catalog, Filter, Params], None]) -> Callable[[], None]:
        @catalog_page(title, shows="version")
        @wraps(draw)
        def page(opened: Catalog) -> None:
            declared = params(opened)
            follow(opened, name, declared)
            where = sidebar(opened)
            if hides_everything() and not of_fields:
                write(where, declared)
                explain_nothing(where)
            else:
                draw(opened, where, declared)

        return page

    return decorate


def _redraw_on_change(opened: Catalog, shows: str, before: int, pause: float) -> None:
    """Draw the page again when an attribute of the catalog has changed, after a pause."""
    at = time.monotonic()
    redraw_when(lambda: has_changed(opened, shows, before) and time.monotonic() - at > pause, SYNC_SECONDS)


def has_changed(opened: Catalog, shows: str, before: int) -> bool:
    """Whether an attribute of the catalog has changed, or the runs can no longer be read, which the page reports when
    it is drawn again."""
    try:
        _open(str(resolve_root())).look()
    except (RunError, OSError):
        return True
    return bool(getattr(opened, shows) != before)


def redraw_when(changed: Callable[[], bool], every: float) -> None:
    """Draw the page again when it has changed, which is checked at this interval in seconds (never for 0).

    The fragment itself draws nothing: a fragment that draws can send elements for a part of the page that no longer
    exists, which breaks the page in the browser.
    """
    state = st.session_state
    state["just_drawn"] = True

    @st.fragment(run_every=every or None)
    def look_again() -> None:
        if not state.pop("just_drawn", False) and changed():  # the fragment also runs as a part of the page
            st.rerun()

    look_again()


def _explain_refused(opened: Catalog) -> None:
    """List the runs that could not be read, if there are any."""
    if opened.refused:
        count = len(opened.refused)
        title = f"{count} runs are damaged or cannot be read: the numbers on this page do not include them"
        if count == 1:
            title = "A run is damaged or cannot be read: the numbers on this page do not include it"
        with st.expander(title, icon=":material/warning:"):
            for line in opened.refused:
                st.text(line)


def _tell(opened: Catalog) -> None:
    """Show the problems with the index since this session last checked."""
    seen = st.session_state.setdefault("index_notices", 0)
    for notice in opened.notices[seen:]:
        st.toast(plain(notice), icon=":material/build:")
    st.session_state["index_notices"] = len(opened.notices)


def explain_empty(opened: Catalog) -> None:
    """The page of a root without runs."""
    st.info(f"No runs yet in `{opened.root}`.", icon=":material/inbox:")
    pages = st.session_state.get("pages", {})
    collect, bring, demo = (cell.container(border=True, height="stretch") for cell in st.columns(3))
    with collect:
        st.markdown("**Collect**")
        st.markdown("Train a small model in several formats. It takes about a minute.")
        if not read_only() and "collect" in pages:
            st.page_link(pages["collect"], label="Open Collect", icon=":material/play_circle:")
        st.code("binade batch --quantization bf16,hifp8,mxfp8,mxfp4", language="shell", wrap_lines=True)
    with bring:
        st.markdown("**Import**")
        st.markdown("Index tensors that another tool has logged, or add a colleague’s bundle.")
        if not read_only() and "sessions" in pages:
            st.page_link(pages["sessions"], label="Upload a bundle", icon=":material/upload:")
        st.code("binade import LOGS", language="shell", wrap_lines=True)
    with demo:
        st.markdown("**Demo**")
        st.markdown("Fine-tune SmolLM2-135M, a trained model, in five formats. This downloads 93 MB.")
        st.code("make demo", language="shell", wrap_lines=True)
