"""Callbacks of widgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st


def while_shown(key: str, do: Callable[..., object]) -> Callable[..., None]:
    """What to do when the widget of this key is used, as a callback that reads its state.

    Streamlit calls a callback also for what the browser sent before it knew that the page has been left. Streamlit has
    no state of the widget then, and nothing is done.
    """

    def call(*args: Any, **kwargs: Any) -> None:
        if key in st.session_state:
            do(*args, **kwargs)

    return call
