"""What a question is: the facts that the navigation, the overview, sessions, reports and the docs read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from binade.app.control import Control
from binade.app.figure import Drawn
from binade.app.params import Param
from binade.app.report.section import ReportSelection, Section
from binade.data.catalog import Catalog
from binade.data.filter import Filter

Beyond = Callable[[Catalog, Filter, Collection[str]], Iterable[str]]


def not_in_report(selection: ReportSelection) -> Iterable[Section]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the app answers.

    text         the question, as the overview shows it
    title        a short name for it, in the navigation or among the views of its page
    icon, help   shown with it
    page, view   where it is answered, as in the address: the view of "worst" or "tensor", else the name of its own page
    draw         the function that answers it, without Streamlit: (the selection, the parameters' values) -> Drawn. The
                 selection is a Board on the page worst, a SelectedTensor on the page tensor, else a Selection
    controls     the parameters of its own, besides those of the page, and the widgets that set them
    narrow       the controls above the answer where they depend on what is selected and on the values; by default all
                 that are not inline
    ignores      parameters of its page that the answer does not depend on: their controls are not shown
    slow         a title for the slow part of draw, "" if there is none. draw then also takes `done`, which it calls
                 with (steps done, steps in all)
    of_runs      whether the answer also depends on how far runs are: on their losses and states
    of_fields    the fields of the filter that the answer depends on; () for all
    beyond       the runs that the answer reads besides those that its filter selects or its parameters name: (the root,
                 the filter, these) -> run ids. Sessions and bundles keep them too. None if there are no others
    of_values    whether the answer depends on a tensor's row and values alone, so that it stays when the root changes
    link         parameters that the overview's link sets
    note         shown under the title if the question has its own page, in place of the filter
    layout       the module whose `page()` shows a page of its own that is not laid out like the others
    on_overview  whether the overview lists it
    report       what it adds to a report's sections; None: a section of its own, drawn with the default parameters
    """

    text: str
    title: str
    icon: str
    help: str
    page: str
    draw: Callable[..., Drawn]
    view: str = ""
    controls: tuple[Control, ...] = ()
    narrow: Callable[[Any, dict[str, Any]], Iterable[Control]] | None = None
    ignores: frozenset[str] = frozenset()
    slow: str = ""
    of_runs: bool = False
    of_fields: tuple[str, ...] = ()
    beyond: Beyond | None = None
    of_values: bool = False
    link: dict[str, str] = field(default_factory=dict)
    note: str = ""
    layout: str = ""
    on_overview: bool = True
    report: Callable[[ReportSelection], Iterable[Section]] | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.draw.__module__.split(".")[-2]

    @property
    def place(self) -> str:
        """Where it is answered, as shown in the navigation."""
        return f"{self.page.capitalize()} › {self.title}" if self.view else self.title

    @property
    def address(self) -> dict[str, str]:
        """The parameters of a link to it."""
        return ({"view": self.view} if self.view else {}) | self.link

    def params(self, opened: Catalog) -> dict[str, Param]:
        return {control.name: control.param_in(opened) for control in self.controls}

    def controls_of(self, selected: Any, values: dict[str, Any]) -> list[Control]:
        """The controls above the answer."""
        if self.narrow:
            return list(self.narrow(selected, values))
        return [control for control in self.controls if not control.inline]
