"""What pages share: the catalog of the root, the top of a page, and the page of an empty root."""

from __future__ import annotations

import atexit
import gc
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.frame.address import link, redraw
from binade.app.pages.registry import PART
from binade.app.view.view import View
from binade.data.index.cache import ResultCache, release_memory
from binade.data.index.catalog import Catalog
from binade.data.index.sandbox import Sandbox
from binade.data.run.access import check_writable, read_only
from binade.data.run.directory import RunError, resolve_root, unusable_root

SYNC_SECONDS = 2.0
IDLE = 5  # times SYNC_SECONDS: a catalog that nobody has used for longer is synchronized before it is shown
REST = 50.0  # seconds after the last use: what was computed is dropped and its memory returned to the system
PATIENCE = 20  # the minimum time between two redraws of a page, as a multiple of the time that drawing took
SHARED = 96 << 20  # bytes of results, tables and values that all sessions share
T = TypeVar("T")


class Watched:
    """A catalog that all sessions share. It is synchronized in its own thread when a page needs it."""

    def __init__(self, opened: Catalog) -> None:
        self.opened = opened
        opened.cache = ResultCache(SHARED, outside=(Catalog, threading.Thread))
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


@st.cache_resource(max_entries=1, show_spinner="Copying the index …")
def _sandbox(_opened: Catalog, state: Hashable) -> Sandbox:
    return Sandbox(_opened)


def sandbox(opened: Catalog) -> Sandbox:
    """A sandbox over the index as it is now. Raises ReadOnlyError."""
    check_writable("SQL")
    return _sandbox(opened, opened.state())


def redraw_on_change(opened: Catalog, shows: str, before: int, start: float) -> None:
    """Draw the page again when an attribute of the catalog has changed, after a pause. before: the attribute's value;
    start: when drawing began."""
    at = time.monotonic()
    pause = PATIENCE * (at - start)
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
            redraw()

    look_again()


def explain_refused(opened: Catalog) -> None:
    """List the runs that could not be read, if there are any."""
    if opened.refused:
        count = len(opened.refused)
        title = f"{count} runs are damaged or cannot be read: the numbers on this page do not include them"
        if count == 1:
            title = "A run is damaged or cannot be read: the numbers on this page do not include it"
        with st.expander(title, icon=":material/warning:"):
            for line in opened.refused:
                st.text(line)


def tell(opened: Catalog) -> None:
    """Show the problems with the index since this session last checked."""
    seen = st.session_state.setdefault("index_notices", 0)
    for notice in opened.notices[seen:]:
        st.toast(plain(notice), icon=":material/build:")
    st.session_state["index_notices"] = len(opened.notices)


def explain_empty(opened: Catalog) -> None:
    """The page of a root without tensors."""
    runs = opened.runs()
    problem = "No runs yet" if runs.empty else "No tensors yet"
    if len(opened.runs(damaged=True)) > len(runs):
        problem = "No run can be read"
    st.info(f"{problem} in `{opened.root}`.", icon=":material/inbox:")
    collect, bring, demo = (cell.container(border=True, height="stretch") for cell in st.columns(3))
    with collect:
        st.markdown("**Collect**")
        st.markdown("Train a small model in several formats. It takes about a minute.")
        if not read_only():
            link(View("runs", {PART: ["collect"]}), "New collection", ":material/play_circle:")
        st.code("binade batch --quantization bf16,hifp8,mxfp8,mxfp4", language="shell", wrap_lines=True)
    with bring:
        st.markdown("**Import**")
        st.markdown("Index tensors that another tool has logged, or add a colleague’s bundle.")
        st.code("binade import LOGS\nbinade bundle import FILE.zip", language="shell", wrap_lines=True)
    with demo:
        st.markdown("**Demo**")
        st.markdown("Fine-tune SmolLM2-135M, a trained model, in five formats. This downloads 93 MB.")
        st.code("make demo", language="shell", wrap_lines=True)
