"""The five pages of the app and their parts. No Streamlit here: what shows a part is imported by name.

A part answers a question, or is a tool, such as the queue of jobs. Its address is that of its page with `view=NAME`;
the first part of a page needs none. Questions that belong together share a room: the page offers their room, and shows
one of them first and the others as sections.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from binade.app.questions.question import Beyond, Question
from binade.app.questions.registry import QUESTIONS
from binade.app.view.params import AnyText, One, Param
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

PART = "view"  # the parameter that names a part of a page
DEFAULT_LAYOUT = "binade.app.questions.layout"
LAYOUTS = {"tensor": "binade.app.pages.tensor_page"}  # of pages whose parts share one


@dataclass(frozen=True)
class PagePart:
    """A part of a page.

    layout    the module whose `show` shows it
    question  that it answers, if any
    room      the questions that are shown together, the first of which names the room; () of a tool
    takes     parameters of a tool, as `Question.takes`
    kept      whether a session can keep it
    writes    whether it is left out of a read-only app
    empty     whether it is shown for a root without tensors, too
    beyond    the runs that a tool may read besides those shown, as `Question.beyond`
    """

    name: str
    title: str
    icon: str
    layout: str = DEFAULT_LAYOUT
    question: Question | None = None
    room: tuple[Question, ...] = ()
    takes: Mapping[str, Callable[[Catalog], Param]] = field(default_factory=dict)
    kept: bool = False
    writes: bool = False
    empty: bool = False
    beyond: Beyond | None = None

    @property
    def room_name(self) -> str:
        return self.room[0].view if self.room else self.name

    @property
    def room_title(self) -> str:
        return (self.room[0].choice or self.room[0].title) if self.room else self.title

    def params(self, opened: Catalog) -> dict[str, Param]:
        """The parameters of its room, besides filter and scope."""
        if self.room:
            return {name: param for question in self.room for name, param in question.params(opened).items()}
        return {name: make(opened) for name, make in self.takes.items()}


@dataclass(frozen=True)
class Page:
    """A page of the app: its address, its title, and its parts by name."""

    name: str
    title: str
    icon: str
    parts: Mapping[str, PagePart]

    @property
    def first(self) -> str:
        return next(iter(self.parts))


def every_run(opened: Catalog, where: Filter, run_ids: Collection[str]) -> Iterable[str]:
    return opened.runs()["run_id"]


SESSION_PARTS = ("saved", "read", "open", "import")
TOOLS = {
    "runs": (
        PagePart("jobs", "Jobs", ":material/list_alt:", "binade.app.jobs.page", takes={"job": lambda opened: AnyText()},
             empty=True),
        PagePart("collect", "New collection", ":material/play_circle:", "binade.app.jobs.collect_page", writes=True,
             takes={"form": lambda opened: AnyText()}, empty=True),
        PagePart("import", "Import", ":material/upload_file:", "binade.app.jobs.import_view", writes=True, empty=True),
    ),
    "notebook": (
        PagePart("sessions", "Sessions", ":material/bookmarks:", "binade.app.sessions.page",
             takes={"part": lambda opened: One(SESSION_PARTS)}, empty=True),
        PagePart("sql", "SQL", ":material/database:", "binade.app.pages.sql_page", kept=True, writes=True,
             takes={name: lambda opened: AnyText() for name in ("q", "x", "y", "color")}, beyond=every_run),
    ),
}  # fmt: skip


def _page(name: str, title: str, icon: str) -> Page:
    page_questions = [question for question in QUESTIONS if question.page == name]
    questions = []
    for q in page_questions:
        first = next(question for question in page_questions if question.view == (q.room or q.view))
        room = (first, *(question for question in page_questions if question.room == first.view))
        layout = first.layout or LAYOUTS.get(name, DEFAULT_LAYOUT)
        questions.append(PagePart(q.view, q.title, q.icon, layout, q, room, kept=True, empty=q.empty))
    return Page(name, title, icon, {part.name: part for part in (*questions, *TOOLS.get(name, ()))})


PAGES = {
    page.name: page
    for page in (
        _page("map", "Map", ":material/grid_on:"),
        _page("explore", "Explore", ":material/query_stats:"),
        _page("tensor", "Tensor", ":material/search_insights:"),
        _page("runs", "Runs", ":material/science:"),
        _page("notebook", "Notebook", ":material/bookmarks:"),
    )
}
