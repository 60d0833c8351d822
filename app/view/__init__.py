"""What a page, a link and a pin share: the view and its parameters. No Streamlit."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """What was in the module `binade.app.view`, such as View, and is in `binade.app.view.view`."""
    if name == "view" or name.startswith("__"):  # not imported yet, or of the package itself
        raise AttributeError(name)
    return getattr(import_module("binade.app.view.view"), name)
