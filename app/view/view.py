"""A view: a page and the parameters of its address, as one frozen value.

The address bar, a link, a pin, a report and `binade.plots` hold views, and all of them draw with `View.draw`, so they
cannot differ. The parameters are the fields of the filter, the scope (format, metric, what it is compared with), the
part of the page, and the parameters of that part. A view is read against a catalog: what it names and the catalog does
not have is said, and nothing else takes its place. No Streamlit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field

from binade.app.draw.figure import Drawn
from binade.app.frame.fair_queue import FairQueue
from binade.app.measures.registry import MAP_MEASURES
from binade.app.pages.registry import PAGES, PART, PagePart
from binade.app.questions.question import Question
from binade.app.questions.shared.runs import occurring
from binade.app.questions.shared.scope import Scope, default_format
from binade.app.questions.shared.selection import Of, format_used, select, worst
from binade.app.view.budget import BudgetError
from binade.app.view.params import (
    TITLES,
    AnyFormat,
    One,
    Param,
    Params,
    bounded,
    read,
    read_filter,
    run_or_format,
    texts_of,
)
from binade.data.exchange.untrusted import LINES, Record, at_most
from binade.data.index.cache import Done
from binade.data.index.catalog import USED, Catalog
from binade.data.index.opened import OutdatedError
from binade.data.words.filter import FIELDS, Filter

# Where answers are computed: two at once, and of those that take long or a large tensor two at once for different
# sessions. The threads that serve sessions wait, and a reader can stop waiting.
QUICK, SLOW = ThreadPoolExecutor(2, "quick"), FairQueue(2, "slow")
OPERAND = ("tensor", "gemm")  # the parameters that name the operand that a page on one tensor shows
LARGE = 1 << 24  # values of a tensor that take more than a moment to read
SCOPE: dict[str, Callable[[Catalog], Param]] = {
    "format": lambda opened: AnyFormat(),
    "metric": lambda opened: One(tuple(MAP_MEASURES)),
    "versus": run_or_format,
}


def _known_page(page: str) -> str:
    if page not in PAGES:
        raise ValueError(f"is not one of {', '.join(PAGES)}")
    return page


Page = Annotated[str, AfterValidator(_known_page)]
Texts = Annotated[list[Annotated[str, Field(max_length=4000), LINES]], at_most(1000)]
TextsByName = Annotated[dict[Annotated[str, Field(max_length=40, pattern=r"^[a-z_]+$")], Texts], at_most(64)]


@dataclass(frozen=True)
class Reading:
    """What a view means in a catalog: resolved once, and the answer is computed from it.

    view      that was read
    part      of the page; None if the view names one that does not exist
    where     the filter; run and iteration of the scope are fields of it
    within    the filter that the answer is computed from, with the run and iteration that are chosen where it has none
    values    of the parameters, by name
    problems  a sentence for each text that does not exist or makes no sense
    gone      what the view names and the catalog does not have at all: such a view is not drawn
    """

    view: View
    part: PagePart | None
    where: Filter
    within: Filter
    values: dict[str, Any]
    problems: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()

    @property
    def question(self) -> Question | None:
        return self.part.question if self.part else None

    @property
    def question_of_tensor(self) -> bool:
        return self.question is not None and self.question.of is Of.TENSOR

    @property
    def refusal(self) -> Drawn | None:
        """The answer if the view cannot be drawn as it is."""
        if self.gone:
            return Drawn(
                problems=(*self.problems, f"Unknown {' and '.join(self.gone)} in the address; nothing was drawn.")
            )
        return None

    def draw(self, catalog: Catalog, step: Done = lambda count, of: None) -> Drawn:
        """The answer, computed once for all identical requests. step: called with (steps done, steps in all). Never
        raises because of the view's content, which is reported as a problem instead."""
        return at_one_state(catalog, lambda: self._draw(catalog, step))

    def _draw(self, catalog: Catalog, step: Done) -> Drawn:
        question = self.question
        if question is None:
            return Drawn(problems=(f"{self.view.page.capitalize()} › {self.view.part[:40]} has no charts.",))
        if not catalog.totals().tensors and not question.empty:
            return Drawn(problems=(f"There are no runs in {catalog.root}.",))
        if self.refusal:
            return self.refusal
        drawn = draw(catalog, question, self.within, self.values, self.problems, step)
        scope = drawn.scope or (Scope(self.within) if question.within else None)
        return replace(drawn, scope=scope and scope.totalled(catalog, self.where))


def at_one_state(catalog: Catalog, compute: Callable[[], Drawn]) -> Drawn:
    """An answer, all of which shows one state of the index: in a `snapshot` that one, else it begins again if files of
    that state are gone."""
    try:
        with catalog.snapshot():
            return compute()
    except OutdatedError:
        if catalog.in_snapshot:
            raise
    try:
        with catalog.snapshot():
            return compute()
    except OutdatedError as error:
        return Drawn(problems=(f"Not drawn: {error}.",))


@dataclass(frozen=True)
class View(Record):
    """A page and the texts of its parameters, as its address has them."""

    page: Page
    params: TextsByName = field(default_factory=dict)

    @property
    def part(self) -> str:
        """The name of its part of the page."""
        return next(iter(self.params.get(PART, ())), PAGES[self.page].first)

    def to_query(self) -> dict[str, list[str]]:
        return {name: list(texts) for name, texts in self.params.items() if texts}

    def changed(self, **values: Any) -> Self:
        """The view with other values of some parameters; None for the default."""
        merged = {**self.params, **{name: texts_of(value) for name, value in values.items()}}
        return replace(self, params={name: list(texts) for name, texts in merged.items() if texts})

    def filtered(self, where: Filter) -> Self:
        """The view with another filter."""
        kept = {name: texts for name, texts in self.params.items() if name not in FIELDS}
        return replace(self, params=where.to_query() | kept)

    def at(self, page: str, part: str = "", **values: Any) -> View:
        """Another page or part with the same filter and scope, and these parameters."""
        kept = {name: list(self.params[name]) for name in (*FIELDS, *SCOPE) if name in self.params}
        if page == self.page:
            kept |= {name: list(self.params[name]) for name in OPERAND if name in self.params}
        named = {PART: part} if part and part != PAGES[page].first else {}
        return View(page, kept).changed(**named, **values)

    def short(self, catalog: Catalog) -> Self:
        """The view without parameters that its part does not have or that are at their default: its address."""
        params = self.params_in(catalog)
        kept = {
            n: t for n, t in self.params.items() if n in FIELDS or (n in params and t != texts_of(params[n].default))
        }
        return replace(self, params=kept)

    def explicit(self, catalog: Catalog) -> Self:
        """The view with every parameter, so that it stays the same when defaults change."""
        reading = self.read(catalog)
        names = [PART, *(reading.question.uses if reading.question else ())]
        return self.changed(**{name: reading.values[name] for name in names if name in reading.values})

    def params_in(self, catalog: Catalog) -> Params:
        """The parameters that this view can have, besides the filter."""
        page = PAGES[self.page]
        part = page.parts.get(self.part)
        params = part.params(catalog) if part else {}
        return {PART: One(tuple(page.parts))} | {name: make(catalog) for name, make in SCOPE.items()} | params

    def read(self, catalog: Catalog) -> Reading:
        """What the view means in a catalog."""
        where, absent = read_filter(occurring(catalog), self.params)
        params = self.params_in(catalog)
        values, unknown = read(params, self.params)
        part = PAGES[self.page].parts.get(self.part)
        question = part.question if part else None
        of_tensor = question is not None and question.of is Of.TENSOR
        as_used = question is not None and question.as_used(values)
        if not values["format"]:
            chosen = of_tensor and values["tensor"]
            values["format"] = USED if chosen else default_format(catalog, where, as_used or of_tensor)
        if of_tensor and not values["tensor"]:
            values["tensor"], gemm = worst(catalog, where, values["format"])
            if "gemm" in params:  # else the answer is of the tensor's own GEMM
                values["gemm"] = values["gemm"] or gemm
        if values["format"] == USED and not as_used:
            used = format_used(catalog, values["tensor"], values.get("gemm") or "") if of_tensor else ""
            values["format"] = used or default_format(catalog, where)
        for name, default in question.defaults.items() if question else ():
            values[name] = values[name] or default(catalog, values)
        gone = [TITLES[name].lower() for name in FIELDS if self.params.get(name) and not getattr(where, name)]
        for name, param in params.items():
            given = self.params.get(name, [])
            texts, _ = bounded(name, given, param.most, param.longest)
            if given and len(param.read(texts)[1]) == len(texts):
                gone.append(name)
        within = question.within(catalog, where, values) if question and question.within and not gone else where
        return Reading(self, part, where, within, values, (*absent, *unknown), tuple(gone))

    def draw(self, catalog: Catalog, step: Done = lambda count, of: None) -> Drawn:
        """The answer to its question; see `Reading.draw`."""
        return at_one_state(catalog, lambda: self.read(catalog).draw(catalog, step))

    def runs(self, catalog: Catalog) -> list[str]:
        """The runs that it shows, newest first: those that its filter selects, that it names or that are shown by
        default, and those that its question reads beyond these."""
        reading = self.read(catalog)
        where = reading.where
        selected = set(catalog.facets(where).get("run_id", []))
        selected &= set(where.run_id) if where.run_id else selected
        selected |= self.named_runs(catalog)
        for name, param in self.params_in(catalog).items():
            if param.refers_to == "run":
                selected.update(texts_of(reading.values[name]))
            if param.refers_to == "tensor":
                selected.update(catalog.rows_of(texts_of(reading.values[name]))["run_id"])
        if reading.part:
            for reader in (reading.part, reading.question):
                if reader and reader.beyond:
                    selected.update(reader.beyond(catalog, where, selected))
        return [run for run in catalog.runs()["run_id"] if run in selected]

    def named_runs(self, catalog: Catalog) -> set[str]:
        """The runs that it names itself, by their id or by a tensor of theirs."""
        named = {*self.params.get("run_id", []), *self._named(catalog, "run")}
        return named | set(catalog.rows_of(self.tensors(catalog))["run_id"])

    def tensors(self, catalog: Catalog) -> list[str]:
        """The tensors that it names."""
        return list(dict.fromkeys(self._named(catalog, "tensor")))

    def _named(self, catalog: Catalog, kind: str) -> list[str]:
        names = [name for name, param in self.params_in(catalog).items() if param.refers_to == kind]
        return [text for name in names for text in self.params.get(name, [])]


def draw(
    catalog: Catalog,
    question: Question,
    where: Filter,
    values: Mapping[str, Any],
    problems: tuple[str, ...] = (),
    step: Done = lambda count, of: None,
) -> Drawn:
    """The answer to a question for these values of its parameters."""
    where = where.without(*question.ignored_fields)
    parameters = tuple((name, values[name]) for name in sorted(question.uses))
    others = question.beyond or ("versus" in question.uses and values["versus"])  # runs that the filter does not name
    versions = catalog.versions(() if others else where.run_id)
    if question.of_values:  # of the tensors that the parameters name
        of = catalog.contents(text for name in question.uses for text in texts_of(values[name]))
    else:
        of = versions, catalog.progress * question.of_runs

    def compute(done: Done) -> Drawn:
        narrowed = where if where.run_id else catalog.narrowed(where)  # captions state the filter
        selected = select(question.of, catalog, narrowed, dict(values))
        if isinstance(selected, Drawn):
            return selected
        chosen = dict(values) | {
            control.name: control.possible(values[control.name])
            for control in question.controls_of(selected, dict(values))
        }
        steps = (done,) if question.slow else ()
        try:
            answer: Drawn = question.draw(selected, chosen, *steps)
        except BudgetError as error:
            return Drawn(problems=(str(error),))
        return answer.prepared()

    request = ("view", question.name, where, repr(parameters), of, catalog.part)
    if catalog.cache:
        pool = pool_of(catalog, question, where, values)
        drawn = catalog.cache.get(None, request, lambda done: _in_snapshot(catalog, compute, done), pool, step)
    else:
        drawn = compute(step)
    return replace(drawn, problems=(*problems, *drawn.problems)) if problems else drawn


def _in_snapshot(catalog: Catalog, compute: Callable[[Done], Drawn], done: Done) -> Drawn:
    """In a thread of a pool, the state is that of the thread that waits, and stays if that one leaves."""
    with catalog.snapshot():
        return compute(done)


def pool_of(catalog: Catalog, question: Question, where: Filter, values: Mapping[str, Any]) -> Executor:
    """Where the answer is computed."""
    rounds = bool(question.rounds and question.rounds(catalog, where, values))
    return SLOW if question.slow or rounds or _values(catalog, values) > LARGE else QUICK


def _values(catalog: Catalog, values: Mapping[str, Any]) -> int:
    """The number of values of the tensor that is shown, if one is named."""
    names = texts_of(values.get("tensor"))
    return int(catalog.rows_of(names)["numel"].sum()) if names else 0
