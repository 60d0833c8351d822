"""Changes to Streamlit's sessions: they leave out values that a page's widgets cannot have sent, keep what a page's run
has drawn when another rerun overtakes its end, say whose session a thread draws for, ignore the reruns of a page
that was left, forget the widgets of earlier pages, and are removed when nobody can return to them.

Streamlit's `AppSession` answers a rerun of a fragment with a new ScriptRunner if the last one has ended, and ignores
what the last one has sent but the event loop has not yet handled. On a busy server, the page's last elements and the
message that it is complete are lost: the page then stays half drawn until something else draws it.

When a fragment begins, Streamlit marks the end of the one before it as early if the browser has not been sent it yet.
The browser then keeps what that fragment no longer draws: a list that was closed by a click stayed open when the charts
asked for their curves at that moment. The mark is taken back where all that the fragment has drawn is still sent.

A rerun of a fragment can arrive while the page that follows is drawn. Streamlit runs it afterwards, does not find the
fragment, but tells the browser that the page which was left is shown again: the browser empties the page, and the next
automatic rerun fails there with "Bad delta path index". Such a rerun does not begin.

The session of a closed tab is stored for two minutes, in case its connection was lost. Streamlit removes it only when
the next one is stored: the sessions of the last users, with everything that their pages have drawn, would stay in
memory until somebody else opens the app. Its loop still refers to the last session that it served, so that session is
emptied.

Streamlit never forgets the callbacks of a widget, and these refer to the tables and charts of the page. Many widgets
get a new identity whenever the root has changed, because their options have changed, so a page that stays open would
keep what it showed at every version. The callbacks of the last two runs are kept: those of the current page, and those
of the page that a user may just have clicked on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from streamlit.components.v2.bidi_component.constants import EVENT_DELIM
from streamlit.errors import StreamlitAPIException
from streamlit.proto.WidgetStates_pb2 import WidgetState, WidgetStates
from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.forward_msg_queue import ForwardMsgQueue
from streamlit.runtime.memory_session_storage import MemorySessionStorage
from streamlit.runtime.scriptrunner.script_runner import ScriptRunner
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData
from streamlit.runtime.scriptrunner_utils.script_run_context import get_script_run_ctx
from streamlit.runtime.session_manager import SessionInfo
from streamlit.runtime.state.common import WidgetMetadata, unpack_widget_state_value
from streamlit.runtime.state.session_state import STREAMLIT_INTERNAL_KEY_PREFIX, SessionState

from binade.app.frame.fair_queue import SESSION

LOG = logging.getLogger(__name__)
AGAIN = 0.01  # seconds
SHOWN = "widgets_shown"  # the key in a session's state
# Of a field of numbers: Streamlit registers every one as of floats, but the browser sends whole numbers as integers.
NUMBERS = {"int_value", "double_value"}


def install(gone: Callable[[], object]) -> None:
    """Let sessions wait until the last run's messages are handled before they run a fragment, keep its end where the
    next one only follows it, begin no rerun of fragments that are gone, forget the widgets that they no longer show,
    and remove stored ones in time. gone: called when one was removed, on the event loop."""
    create = AppSession._create_scriptrunner

    def create_after_the_last(self: AppSession, initial_rerun_data: RerunData) -> None:
        if self._state == AppSessionState.SHUTDOWN_REQUESTED:  # the tab was closed in the meantime
            return
        last = self._scriptrunner  # none if it has ended and all is handled, or if a full rerun took its place
        if last is None:
            create(self, initial_rerun_data)
        elif not last.request_rerun(initial_rerun_data):
            self._event_loop.call_later(AGAIN, create_after_the_last, self, initial_rerun_data)

    AppSession._create_scriptrunner = create_after_the_last  # type: ignore[method-assign]

    run_script = ScriptRunner._run_script

    def run_what_is_shown(self: ScriptRunner, rerun_data: RerunData) -> None:
        SESSION.set(self._session_id)  # also of a fragment, which has a thread of its own
        asked = rerun_data.fragment_id_queue
        if not asked or any(self._fragment_storage.contains(fragment) for fragment in asked):
            run_script(self, rerun_data)

    ScriptRunner._run_script = run_what_is_shown  # type: ignore[method-assign]

    _keep_ends()

    _end_expired(gone)
    _leave_out_unreadable()

    remove = SessionState._remove_stale_widgets

    def remove_with_callbacks(self: SessionState, active_widget_ids: frozenset[str]) -> None:
        remove(self, active_widget_ids)
        run = get_script_run_ctx()
        if not run or run.fragment_ids_this_run or not active_widget_ids:
            return
        # Streamlit also calls it before a run, with the widgets that the browser knows.
        if active_widget_ids == run.shared.widget_ids_this_run.snapshot():
            shown, self._old_state[SHOWN] = self._old_state.get(SHOWN, frozenset()), active_widget_ids
            known = self._new_widget_state.widget_metadata
            for widget in [key for key in known if _widget(key) not in active_widget_ids | shown]:
                del known[widget]

    SessionState._remove_stale_widgets = remove_with_callbacks  # type: ignore[method-assign]


def _keep_ends() -> None:
    """Let a fragment that follows another leave its end as it is, if all that it has drawn is sent."""
    clear = ForwardMsgQueue.clear

    def clear_and_keep_ends(
        self: ForwardMsgQueue, retain_lifecycle_msgs: bool = False, fragment_ids_this_run: list[str] | None = None
    ) -> None:
        unsent = len(self._queue)
        ends = [(each, each.script_finished) for each in self._queue if each.HasField("script_finished")]
        clear(self, retain_lifecycle_msgs, fragment_ids_this_run)
        if fragment_ids_this_run and len(self._queue) == unsent:
            for message, status in ends:
                message.script_finished = status

    ForwardMsgQueue.clear = clear_and_keep_ends  # type: ignore[method-assign]


def _end_expired(gone: Callable[[], object]) -> None:
    """Let a session whose browser does not come back end when its time is over. gone: called after it."""
    store = MemorySessionStorage.save

    def store_for_a_time(self: MemorySessionStorage, session_info: SessionInfo) -> None:
        def expire() -> None:
            removed = self._cache.expire()  # type: ignore[attr-defined]
            for _, info in removed:
                info.session.shutdown()
                info.session.session_state.clear()
                info.session.session_state._new_widget_state.widget_metadata.clear()
                info.session._fragment_storage.clear()
            if removed:
                gone()

        store(self, session_info)
        session_info.session._event_loop.call_later(self._cache.ttl + 1, expire)  # type: ignore[attr-defined]

    MemorySessionStorage.save = store_for_a_time  # type: ignore[method-assign]


def _leave_out_unreadable() -> None:
    """Let sessions take only what a page's widgets can have sent."""
    will_rerun = SessionState.on_script_will_rerun

    def rerun_with_readable(self: SessionState, fresh_widget_states: WidgetStates | None, **replayed: Any) -> None:
        known = self._new_widget_state.widget_metadata
        will_rerun(self, fresh_widget_states and _readable(fresh_widget_states, known), **replayed)

    SessionState.on_script_will_rerun = rerun_with_readable  # type: ignore[method-assign]


def _readable(sent: WidgetStates, known: Mapping[str, WidgetMetadata[Any]]) -> WidgetStates:
    """The values of widgets without those that a page's own widgets cannot have sent: of another kind, or that the
    widget cannot read. One line of the log says how many were left out."""
    readable = [state for state in sent.widgets if state.id not in known or _is_readable(state, known[state.id])]
    if len(readable) == len(sent.widgets):
        return sent
    LOG.warning("The browser sent %d values that their widgets cannot have", len(sent.widgets) - len(readable))
    return WidgetStates(widgets=readable)


def _is_readable(state: WidgetState, known: WidgetMetadata[Any]) -> bool:
    kind = state.WhichOneof("value")
    if kind not in (None, known.value_type) and not {kind, known.value_type} <= NUMBERS:
        return False
    try:
        known.deserializer(unpack_widget_state_value(state))
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError, StreamlitAPIException):
        return False
    return True


def _widget(id: str) -> str:
    """The id of the component that a widget collects the events of, or else the widget's own."""
    component = id.removeprefix(f"{STREAMLIT_INTERNAL_KEY_PREFIX}_")
    return component.rpartition(EVENT_DELIM)[0] if component != id else id
