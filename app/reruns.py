"""Changes to Streamlit's sessions: they keep what a page's run has drawn when an automatic rerun overtakes its end, and
sessions are removed when nobody can return to them.

Streamlit's `AppSession` answers a rerun of a fragment with a new ScriptRunner if the last one has ended, and ignores
what the last one has sent and the event loop not yet handled. On a busy server, the page's last elements and the
message that it is complete are lost: the page then stays half drawn until something else draws it.

The session of a closed tab is stored for two minutes, in case its connection was lost. Streamlit removes it only when
the next one is stored: the sessions of the last users, with everything that their pages have drawn, would stay in
memory until somebody else opens the app. Its loop still refers to the last session that it served, so that session is
emptied.
"""

from __future__ import annotations

from collections.abc import Callable

from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.memory_session_storage import MemorySessionStorage
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData
from streamlit.runtime.session_manager import SessionInfo

AGAIN = 0.01  # seconds


def install(gone: Callable[[], object]) -> None:
    """Let sessions wait until the last run's messages are handled before they run a fragment, and remove stored ones
    in time. gone: called when one was removed, on the event loop."""
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

    store = MemorySessionStorage.save

    def store_for_a_time(self: MemorySessionStorage, session_info: SessionInfo) -> None:
        def expire() -> None:
            removed = self._cache.expire()  # type: ignore[attr-defined]
            for _, info in removed:
                info.session.shutdown()
                info.session.session_state.clear()
                info.session._fragment_storage.clear()
            if removed:
                gone()

        store(self, session_info)
        session_info.session._event_loop.call_later(self._cache.ttl + 1, expire)  # type: ignore[attr-defined]

    MemorySessionStorage.save = store_for_a_time  # type: ignore[method-assign]
