"""All pages of the app, in the order of the navigation. No Streamlit here: what a page shows is imported by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from binade.app.figure import Drawn
from binade.app.pages import overview, runs, tensor, worst
from binade.app.params import Param
from binade.app.questions.question import Beyond, Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import references_of
from binade.app.questions.shared.selection import Selection
from binade.data.catalog import Catalog
from binade.data.filter import Filter


@dataclass(frozen=True)
class Page:
    """A page of the app.

    name, title, icon   in the address and in the navigation
    layout              the module whose `page()` shows it; "" if `question` is shown in the default way
    params, draw        its parameters and its figures, if the page can be drawn again elsewhere
    kept                whether a session can keep it
    writes              whether it is left out of a read-only app
    question            the question that it answers, if the page has a single one
    beyond              the runs that its views may read besides those shown, as `Question.beyond`
    """

    name: str
    title: str
    icon: str
    layout: str
    params: Callable[[Catalog], dict[str, Param]] | None = None
    draw: Callable[[Selection, dict[str, Any]], Drawn] | None = None
    kept: bool = False
    writes: bool = False
    question: Question | None = None
    beyond: Beyond | None = None


def _of(question: Question) -> Page:
    """The page that answers a question: the page that it is a view of, or its own page."""
    if question.page in SHARED:
        return SHARED[question.page]
    return Page(
        question.page, question.title, question.icon, question.layout, question.params, question.draw, True,
        question=question,
    )  # fmt: skip


SHARED = {
    "worst": Page(
        "worst", "Worst", ":material/trending_down:", "binade.app.pages.worst_page", worst.params, worst.draw, True
    ),
    "tensor": Page(
        "tensor", "Tensor", ":material/grid_on:", "binade.app.pages.tensor_page", tensor.params, tensor.draw, True,
        beyond=references_of,
    ),
}  # fmt: skip


def _every_run(opened: Catalog, where: Filter, run_ids: Collection[str]) -> Iterable[str]:
    return opened.runs()["run_id"]


_HOME = Page(
    "overview", "Overview", ":material/home:", "binade.app.pages.overview_page", overview.params, overview.draw, True
)
_OTHERS = (
    Page(
        "runs", "Runs", ":material/science:", "binade.app.pages.runs_page", runs.params, runs.draw, True,
        beyond=_every_run,
    ),
    Page("sessions", "Sessions", ":material/bookmarks:", "binade.app.sessions.page"),
    Page("sql", "SQL", ":material/database:", "binade.app.pages.sql_page", kept=True, writes=True, beyond=_every_run),
    Page("collect", "Collect", ":material/play_circle:", "binade.app.jobs.collect_page", writes=True),
    Page("jobs", "Jobs", ":material/list_alt:", "binade.app.jobs.page"),
)  # fmt: skip
MORE = ("surfaces", "provenance", "difference")  # under "More" in the navigation: a narrow window has no room for them
PAGES = {page.name: page for page in (_HOME, *map(_of, QUESTIONS), *_OTHERS)}
