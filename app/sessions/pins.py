"""A view drawn again from its page and parameters, as it was pinned or saved. No Streamlit here.

The parameters are those of the page's address, each a list of texts: the filter's fields and the page's own. They are
read as the page reads them, so that a pin, a link and a report show the same. Two things differ, because a caption
stands beside a pin: a pin of a session is drawn from the session's runs alone, whatever else came to the root since,
and where what it asks for is gone, nothing is drawn in its stead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from torch import Tensor

from binade.app.figure import Drawn
from binade.app.pages.registry import PAGES
from binade.app.params import TITLES, Param, read, read_filter
from binade.app.questions.recipes import question as recipes
from binade.app.questions.shared.runs import runs_with_reference as overview_of_runs
from binade.app.questions.shared.selection import Selection
from binade.app.sessions.session import Pin
from binade.data.catalog import Catalog
from binade.data.filter import FIELDS, Filter


def runs_of(catalog: Catalog, pins: Sequence[Pin], among: Sequence[str] = ()) -> list[str]:
    """The runs that pins speak of: those their filters select and their tensors belong to; where runs are held against
    bf16 runs, these too. among: no others but these and those that a pin names itself; empty for any."""
    if among:
        wanted = set(among).union(*(_named(catalog, pin) for pin in pins))
        catalog = _Narrowed(catalog, sorted(wanted))  # type: ignore[assignment]
    runs, facets = catalog.runs(), catalog.facets()
    table = overview_of_runs(runs, catalog.parts())
    references = dict(zip(table["run_id"], table["reference"], strict=True))
    found: set[str] = set()
    for pin in pins:
        if pin.page in ("runs", "sql"):
            found |= set(runs["run_id"])
            continue
        where, _ = read_filter(facets, pin.params)
        selected = set(catalog.facets(where).get("run_id", []))
        selected &= set(where.run_id) if where.run_id else selected
        if pin.page == "recipes":
            selected |= set(recipes.runs_of(catalog, where)["run_id"])
        selected |= _named(catalog, pin)
        if pin.page in ("recipes", "tensor"):
            selected |= {references[run] for run in selected if references.get(run)}
        found |= selected
    return [run for run in runs["run_id"] if run in found]


def _named(catalog: Catalog, pin: Pin) -> set[str]:
    """The runs that a pin names itself, by their id or by a tensor of theirs."""
    named = {*pin.params.get("run_id", []), *pin.params.get("against", [])}
    return named | set(catalog.rows_of(_tensors(pin))["run_id"])


def tensors_of(catalog: Catalog, pins: Iterable[Pin], runs: Sequence[str] | None = None) -> list[str]:
    """The tensors whose values it takes to draw pins, of these runs (as `draw`): found by drawing them."""
    witness = _Witness(catalog)
    for pin in pins:
        draw(witness, pin, runs)  # type: ignore[arg-type]
        witness.asked |= dict.fromkeys(_tensors(pin))
    return list(witness.asked)


def _tensors(pin: Pin) -> list[str]:
    return [*pin.params.get("tensor", []), *pin.params.get("other", [])]


class _Witness:
    """A catalog that remembers whose values it was asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.asked: dict[str, None] = {}

    def load(self, tensor_id: str) -> Tensor:
        self.asked[tensor_id] = None
        return self.catalog.load(tensor_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.catalog, name)


class _Narrowed:
    """A catalog of some of its runs: whatever takes a filter is asked for these alone."""

    def __init__(self, catalog: Catalog, runs: Sequence[str]) -> None:
        self.catalog = catalog
        self.run_ids = tuple(runs)

    def runs(self) -> pd.DataFrame:
        found = self.catalog.runs()
        return found[found["run_id"].isin(self.run_ids)].reset_index(drop=True)

    def facets(self, where: Filter | None = None) -> dict[str, list[Any]]:
        found = self.catalog.facets(self.narrow(where))
        own = [run for run in found.get("run_id", []) if run in self.run_ids]
        return found | {"run_id": own}

    def narrow(self, where: Filter | None) -> Filter:
        where = where or Filter()
        kept = [run for run in self.run_ids if not where.run_id or run in where.run_id]
        return replace(where, run_id=tuple(kept) or ("",))  # no run has no name: nothing is selected

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self.catalog, name)
        if not callable(asked) or "where" not in (signature := inspect.signature(asked)).parameters:
            return asked

        def narrowed(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.arguments["where"] = self.narrow(bound.arguments.get("where"))
            return asked(*bound.args, **bound.kwargs)

        return narrowed


def draw(catalog: Catalog, pin: Pin, runs: Sequence[str] | None = None) -> Drawn:
    """The figures of a pin (charts, their tables and captions), the view's verdict, and what is missing, in words.

    runs: those of the session that it is kept in: it is drawn from these and from the runs that it names itself. With
    None, as before a session is saved, from what is here.

    A page without charts (sql) has none, and neither has a pin of a run, a tensor or a setting that is not here. Never
    raises for what a pin asks: it is a problem then.
    """
    page = PAGES.get(pin.page)
    if page is None or page.draw is None or page.params is None:
        return Drawn(problems=(f"The page {pin.page[:40]!r} has no charts.",))
    if not catalog.totals().tensors:
        return Drawn(problems=(f"There are no runs in {catalog.root}.",))
    said: tuple[str, ...] = ()
    if runs is not None:
        catalog, said = _of_session(catalog, pin, runs)
        if not catalog.totals().tensors:
            return Drawn(problems=said)
    where, absent = read_filter(catalog.facets(), pin.params)
    params = page.params(catalog)
    values, unknown = read(params, pin.params)
    tensors: Sequence[str] = [] if "tensor" in params else pin.params.get("tensor", [])
    problems = (*said, *absent, *unknown)
    if gone := _gone(catalog, pin, where, params, tensors):
        return Drawn(problems=(*problems, f"Nothing is drawn in the stead of what is not here: {gone}."))
    if isinstance(catalog, _Narrowed) and not where.run_id:
        where = catalog.narrow(where)  # for the captions, which tell the filter
    drawn = page.draw(Selection(catalog, where, tuple(tensors)), values)
    problems = (*problems, *drawn.problems)
    if not pin.chart:
        return replace(drawn, problems=problems)
    figure = drawn.get(pin.chart)
    if figure is None:
        return replace(drawn, figures=(), problems=(*problems, f"The view has no chart {pin.chart[:40]!r} now."))
    return replace(drawn, figures=(figure,), problems=problems)


def _of_session(catalog: Catalog, pin: Pin, runs: Sequence[str]) -> tuple[Catalog, tuple[str, ...]]:
    """(the catalog of a session's runs and of those that the pin names; what is to be said of the others)."""
    here = catalog.runs()["run_id"].tolist()
    if not runs:
        return catalog, ("Its session lists no run: this is drawn from all that are here.",)
    wanted = {*runs, *_named(catalog, pin)}
    absent = [run for run in runs if run not in here]
    lost = f"{len(absent)} of its session's {len(runs)} runs {'is' if len(absent) == 1 else 'are'} not here."
    said = (lost,) * bool(absent and not pin.params.get("run_id"))
    if wanted.issuperset(here):
        return catalog, said
    return _Narrowed(catalog, [run for run in here if run in wanted]), said  # type: ignore[return-value]


def _gone(catalog: Catalog, pin: Pin, where: Filter, params: Mapping[str, Param], tensors: Sequence[str]) -> str:
    """What a pin asks for and has lost altogether, in words: fields of the filter, settings, tensors."""
    lost = [name for name in FIELDS if pin.params.get(name) and not getattr(where, name)]
    for name, param in params.items():
        asked = pin.params.get(name, [])
        if asked and len(param.read(asked)[1]) == len(asked):
            lost.append(name)
    if tensors and catalog.rows_of(list(tensors)).empty:
        lost.append("tensor")
    return ", ".join(TITLES.get(name, name).lower() for name in lost)
