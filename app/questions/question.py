"""What a question is: the facts that the navigation, the overview, sessions, reports and the docs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from binade.app.figure import Drawn
from binade.app.params import Param
from binade.app.report.section import ReportSelection, Section
from binade.data.catalog import Catalog


def no_params(opened: Catalog) -> dict[str, Param]:
    return {}


def not_in_report(selection: ReportSelection) -> Iterable[Section]:
    return ()


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the app answers.

    text         the question, as the overview shows it
    title        a short name for it, in the navigation or among the views of its page
    icon, help   shown with it
    page, view   where it is answered, as in the address: the view of "worst" or "tensor", else the name of its own page
    draw         what the answer is, without Streamlit: (what is selected, the parameters' values) -> Drawn. What is
                 selected is a Board on the page worst, a SelectedTensor on the page tensor, else a Selection
    params       the parameters of its own, besides those of the page
    link         parameters that the overview's link sets
    layout       the module that lays the answer out: `show_view(selected, values)`, or `page()` for a page of its own.
                 Without one, the verdict, the problems, the figures and the tables are shown in this order
    on_overview  whether the overview asks it
    report       what it adds to a report's sections; None: a section of its own, drawn with the default parameters
    """

    text: str
    title: str
    icon: str
    help: str
    page: str
    draw: Callable[..., Drawn]
    view: str = ""
    params: Callable[[Catalog], dict[str, Param]] = no_params
    link: dict[str, str] = field(default_factory=dict)
    layout: str = ""
    on_overview: bool = True
    report: Callable[[ReportSelection], Iterable[Section]] | None = None

    @property
    def address(self) -> dict[str, str]:
        """The parameters of the link to it."""
        return ({"view": self.view} if self.view else {}) | self.link
