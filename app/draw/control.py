"""A control: a widget that sets a parameter of a view, as data. No Streamlit here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from binade.app.view.params import Many, One, Param, Whole
from binade.data.index.catalog import Catalog


@dataclass(frozen=True, kw_only=True)
class Control:
    """
    name         of the parameter, in the address and in the session state
    label, help  of the widget
    param        the values that the parameter may have, or a function of a catalog that returns them
    options      the values that can be chosen here; by default all that param allows
    titles       the widget's labels for them, if they differ from the values
    widget       the kind of widget for choosing one of several values
    row          controls of one row are shown side by side; width: its share of the row
    inline       whether it is placed among the figures of the answer; else it is placed above the answer
    folded       whether it is behind “More options” at the end of its row
    """

    name: str
    label: str
    param: Param | Callable[[Catalog], Param]
    options: Sequence[Any] = ()
    titles: Mapping[Any, str] = field(default_factory=dict)
    widget: Literal["segments", "list", "slider"] = "segments"
    help: str | None = None
    placeholder: str = ""
    row: str = ""
    width: float = 1
    inline: bool = False
    folded: bool = False
    disabled: bool = False

    def param_in(self, opened: Catalog) -> Param:
        return self.param(opened) if callable(self.param) else self.param

    @property
    def choices(self) -> Sequence[Any]:
        return self.options or (self.param.allowed if isinstance(self.param, One | Many) else ())

    def possible(self, value: Any) -> Any:
        """The value if it can be chosen here, else the first one that can be chosen, or the parameter's default."""
        if self.choices:
            return value if isinstance(value, list) or value in self.choices else self.choices[0]
        assert isinstance(self.param, Whole)
        return value if value is not None and self.param.low <= value <= self.param.high else self.param.default
