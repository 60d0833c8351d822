"""A view drawn again from its page and parameters, as it was pinned or saved. No Streamlit here.

The parameters are those of the page's address, each a list of texts: the filter's fields and the page's own. They are
read as the page reads them, so that a pin, a link and a report show the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from app.analysis.recipes import overview as overview_of_runs
from app.figure import Drawn
from app.figures import explore, overview, recipes, runs, tensor, worst
from app.params import read, read_filter
from data.catalog import Catalog

PAGES: Mapping[str, ModuleType] = MappingProxyType(
    {"overview": overview, "explore": explore, "worst": worst, "tensor": tensor, "recipes": recipes, "runs": runs}
)


@dataclass(frozen=True)
class Pin:
    """A chart that is kept: the page and the parameters of its view, the chart's name there ("" for all of the view),
    and what its keeper says of it."""

    page: str
    params: dict[str, list[str]] = field(default_factory=dict)
    chart: str = ""
    caption: str = ""


def runs_of(catalog: Catalog, pins: Iterable[Pin]) -> list[str]:
    """The runs that pins speak of: those their filters select and their tensors belong to; where runs are held against
    bf16 runs, these too."""
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
        selected |= set(catalog.rows_of(_tensors(pin))["run_id"])
        if pin.page in ("recipes", "tensor"):
            selected |= {references[run] for run in selected if references.get(run)}
        found |= selected
    return [run for run in runs["run_id"] if run in found]


def tensors_of(catalog: Catalog, pins: Iterable[Pin]) -> list[str]:
    """The tensors whose values it takes to draw pins: found by drawing them."""
    witness = _Witness(catalog)
    for pin in pins:
        draw(witness, pin)  # type: ignore[arg-type]
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


def draw(catalog: Catalog, pin: Pin) -> Drawn:
    """The figures of a pin (charts, their tables and captions), the view's verdict, and what is missing, in words.

    A page without charts (sql) has none. Never raises for what a pin asks and is not there: it is a problem then.
    """
    page = PAGES.get(pin.page)
    if page is None:
        return Drawn(problems=(f"The page {pin.page[:40]!r} has no charts.",))
    if not catalog.totals().tensors:
        return Drawn(problems=(f"There are no runs in {catalog.root}.",))
    where, absent = read_filter(catalog.facets(), pin.params)
    params = page.params(catalog)
    values, unknown = read(params, pin.params)
    tensors: Sequence[str] = [] if "tensor" in params else pin.params.get("tensor", [])
    drawn = page.drawn(catalog, where, values, list(tensors))
    problems = (*absent, *unknown, *drawn.problems)
    if not pin.chart:
        return replace(drawn, problems=problems)
    figure = drawn.get(pin.chart)
    if figure is None:
        return replace(drawn, figures=(), problems=(*problems, f"The view has no chart {pin.chart[:40]!r} now."))
    return replace(drawn, figures=(figure,), problems=problems)
