"""A view drawn again from its page and parameters, as it was pinned or saved, and the runs that it shows. No Streamlit.

The parameters are those of the page's address, each a list of texts: the filter's fields and the page's own. They are
read as the page reads them, so that a pin, a link and a report show the same. There are two differences, because the
caption of a pin must stay true: a pin of a session is drawn only from the session's runs, even if the root has new
ones; and if something that it refers to is gone, nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path

from binade.app.figure import Drawn
from binade.app.pages.registry import PAGES
from binade.app.params import TITLES, Params, read, read_filter, texts_of
from binade.app.questions.question import Beyond
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.selection import Selection
from binade.app.sessions.session import Pin, RunReference, Session
from binade.data.catalog import Catalog
from binade.data.filter import FIELDS, Filter
from binade.data.runs import RunError, fingerprint


def runs_of(catalog: Catalog, pins: Sequence[Pin]) -> list[str]:
    """The runs that pins show: those that their filters select, that they name, or that are shown by default, and those
    that their questions read beyond these."""
    runs, facets = catalog.runs(), catalog.facets()
    found: set[str] = set()
    for pin in pins:
        where, _ = read_filter(facets, pin.params)
        selected = set(catalog.facets(where).get("run_id", []))
        selected &= set(where.run_id) if where.run_id else selected
        selected |= _named(catalog, pin)
        params = _params(catalog, pin)
        values, _ = read(params, pin.params)
        selected.update(*(texts_of(values[name]) for name, param in params.items() if param.refers_to == "run"))
        for beyond in _beyond(pin, str(values.get("view", ""))):
            selected.update(beyond(catalog, where, selected))
        found |= selected
    return [run for run in runs["run_id"] if run in found]


def _beyond(pin: Pin, view: str) -> list[Beyond]:
    page = PAGES.get(pin.page)
    shown = [question for question in QUESTIONS if question.page == pin.page and question.view in ("", view)]
    return [each.beyond for each in (page, *shown) if each and each.beyond]


def _named(catalog: Catalog, pin: Pin) -> set[str]:
    """The runs that a pin names itself, by their id or by a tensor of theirs."""
    named = {*pin.params.get("run_id", []), *_references(catalog, pin, "run")}
    return named | set(catalog.rows_of(_tensors(catalog, pin))["run_id"])


def _params(catalog: Catalog, pin: Pin) -> Params:
    page = PAGES.get(pin.page)
    return page.params(catalog) if page and page.params else {}


def _references(catalog: Catalog, pin: Pin, kind: str) -> list[str]:
    """The ids of this kind in a pin's parameters."""
    names = [name for name, param in _params(catalog, pin).items() if param.refers_to == kind]
    return [text for name in names for text in pin.params.get(name, [])]


def tensors_of(catalog: Catalog, pins: Iterable[Pin], runs: Sequence[str] | None = None) -> list[str]:
    """The tensors whose values it takes to draw pins, of these runs (as `draw`): found by drawing them."""
    loaded: dict[str, None] = {}

    watched = copy(catalog)
    watched.reads = lambda tensor_id: loaded.setdefault(tensor_id)
    watched.cache = None  # otherwise cached charts would load nothing
    for pin in pins:
        draw(watched, pin, runs)
        loaded |= dict.fromkeys(_tensors(catalog, pin))
    return list(loaded)


def _tensors(catalog: Catalog, pin: Pin) -> list[str]:
    """The tensors that a pin names: those chosen on its page, and those of its parameters."""
    return list(dict.fromkeys([*pin.params.get("tensor", []), *_references(catalog, pin, "tensor")]))


def draw(catalog: Catalog, pin: Pin, runs: Sequence[str] | None = None) -> Drawn:
    """The figures of a pin (charts, their tables and captions), the view's verdict, and what is missing, in words.

    runs: those of the session that it is kept in: it is drawn from these and from the runs that it names itself. With
    None, as before a session is saved, from what is here.

    Empty for a page without charts (sql), and if the pin refers to a missing run, tensor or setting. Never raises
    because of a pin's content, which is reported as a problem instead.
    """
    key = ("view", pin.page, repr(sorted(pin.params.items())), runs if runs is None else tuple(runs), catalog.state())
    drawn, is_whole = catalog.kept(key, lambda: _view(catalog, pin, runs))
    if not pin.chart or not is_whole:
        return drawn
    figure = drawn.get(pin.chart)
    if figure is None:
        problems = (*drawn.problems, f"The view no longer has the chart {pin.chart[:40]!r}.")
        return replace(drawn, items=(), problems=problems)
    return replace(drawn, items=(figure,))


def _view(catalog: Catalog, pin: Pin, runs: Sequence[str] | None) -> tuple[Drawn, bool]:
    """(all of a pin's view, whether it could be drawn)."""
    page = PAGES.get(pin.page)
    if page is None or page.draw is None or page.params is None:
        return Drawn(problems=(f"The page {pin.page[:40]!r} has no charts.",)), False
    if not catalog.totals().tensors:
        return Drawn(problems=(f"There are no runs in {catalog.root}.",)), False
    problems: tuple[str, ...] = ()
    if runs is not None:
        catalog, problems = _of_session(catalog, pin, runs)
        if not catalog.totals().tensors:
            return Drawn(problems=problems), False
    where, absent = read_filter(catalog.facets(), pin.params)
    params = page.params(catalog)
    values, unknown = read(params, pin.params)
    tensors: Sequence[str] = [] if "tensor" in params else pin.params.get("tensor", [])
    problems = (*problems, *absent, *unknown)
    if gone := _gone(catalog, pin, where, params, tensors):
        return Drawn(problems=(*problems, f"Not drawn: {gone}.")), False
    if not where.run_id:
        where = catalog.narrowed(where)  # captions state the filter
    drawn = page.draw(Selection(catalog, where, tuple(tensors)), values)
    return replace(drawn, problems=(*problems, *drawn.sentences)), True


def _of_session(catalog: Catalog, pin: Pin, runs: Sequence[str]) -> tuple[Catalog, tuple[str, ...]]:
    """(the catalog of a session's runs and of those that the pin names; a sentence about those that are absent)."""
    here = catalog.runs()["run_id"].tolist()
    if not runs:
        return catalog, ("The session lists no runs, so this chart is drawn from all runs in the root.",)
    wanted = {*runs, *_named(catalog, pin)}
    absent = [run for run in runs if run not in here]
    lost = f"{len(absent)} of its session's {len(runs)} runs {'is' if len(absent) == 1 else 'are'} missing."
    problems = (lost,) * bool(absent and not pin.params.get("run_id"))
    if wanted.issuperset(here):
        return catalog, problems
    return catalog.restricted(run for run in here if run in wanted), problems


def _gone(catalog: Catalog, pin: Pin, where: Filter, params: Params, tensors: Sequence[str]) -> str:
    """Descriptions of things that a pin refers to and that no longer exist: fields of the filter, settings, tensors."""
    lost = [name for name in FIELDS if pin.params.get(name) and not getattr(where, name)]
    for name, param in params.items():
        texts = pin.params.get(name, [])
        if texts and len(param.read(texts)[1]) == len(texts):
            lost.append(name)
    if tensors and catalog.rows_of(list(tensors)).empty:
        lost.append("tensor")
    return ", ".join(TITLES.get(name, name).lower() for name in lost)


# The runs that a session shows


def refreshed(catalog: Catalog, session: Session, before: Session | None = None) -> Session:
    """The session with references to the runs that it shows now. References to runs that are absent here stay.

    before: the session as it was saved last. The view and pins that it had then keep showing its runs only; new ones
    show any run that is here.
    """
    new = views_of(session)
    found: set[str] = set()
    if before and before.runs:
        former = [pin.uncaptioned for pin in views_of(before)]
        old = [pin for pin in new if pin.uncaptioned in former]
        new = [pin for pin in new if pin.uncaptioned not in former]
        saved = catalog.restricted({*before.run_ids}.union(*(_named(catalog, pin) for pin in old)))
        found |= {*runs_of(saved, old)}
    found |= {*runs_of(catalog, new)}
    ids = [run_id for run_id in catalog.runs()["run_id"] if run_id in found]
    absent = [run for run in session.runs if not _is_here(catalog.root, run.run_id)]
    marks = [RunReference(run_id, fingerprint(catalog.root / run_id)) for run_id in ids]
    return replace(session, runs=(*marks, *absent))


def views_of(session: Session) -> list[Pin]:
    """What a session shows: its view, as a pin of all of it, and its pins."""
    return [Pin(session.view.page, session.view.params), *session.pins]


def other_runs(catalog: Catalog, session: Session) -> list[str]:
    """The runs that the session's view shows here and that it was not saved with: they are newer, or this is another
    root."""
    shown = runs_of(catalog, views_of(session)[:1]) if session.runs else []
    return [run for run in shown if run not in session.run_ids]


def missing_runs(root: Path, session: Session) -> list[str]:
    """A sentence for each run of the session that is missing here or has changed."""
    problems = []
    for run in session.runs:
        if not _is_here(root, run.run_id):
            problems.append(f"Run {run.run_id[:80]} is missing and is left out of the charts.")
            continue
        try:
            same = fingerprint(root / run.run_id) == run.hash
        except RunError as error:
            problems.append(f"Run {run.run_id[:80]} cannot be read: {error}.")
            continue
        if not same:
            problems.append(
                f"Run {run.run_id[:80]} has changed since the session was saved: more was recorded, or "
                "another run has the same name."
            )
    return problems


def _is_here(root: Path, run_id: str) -> bool:
    """Whether a run's directory exists. The id is untrusted: it must be a plain name."""
    plain = not run_id.startswith(".") and "/" not in run_id and "\0" not in run_id
    try:
        return plain and (root / run_id / "run.json").is_file()
    except OSError:  # a name too long
        return False
