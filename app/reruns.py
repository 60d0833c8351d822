"""Keeps what a page's run has drawn when an automatic rerun overtakes its end.

Streamlit's `AppSession` answers a rerun of a fragment with a new ScriptRunner if the last one has ended, and ignores
what the last one has sent and the event loop not yet handled. On a busy server these are the page's last elements and
the message that it is complete: the page then stays half drawn until something else draws it.
"""

from __future__ import annotations

from streamlit.runtime.app_session import AppSession, AppSessionState
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData

AGAIN = 0.01  # seconds


def install() -> None:
    """Let sessions wait until the last run's messages are handled before they run a fragment."""
    create = AppSession._create_scriptrunner

    def create_after_the_last(self: AppSession, initial_rerun_data: RerunData) -> None:
        if self._state == AppSessionState.SHUTDOWN_REQUESTED:  # the tab was closed meanwhile
            return
        last = self._scriptrunner  # none if it has ended and all is handled, or if a full rerun took its place
        if last is None:
            create(self, initial_rerun_data)
        elif not last.request_rerun(initial_rerun_data):
            self._event_loop.call_later(AGAIN, create_after_the_last, self, initial_rerun_data)

    AppSession._create_scriptrunner = create_after_the_last  # type: ignore[method-assign]
