"""A view drawn again from its page and parameters, as it was pinned or saved. No Streamlit here.

The parameters are those of the page's address, each a list of texts: the filter's fields and the page's own. They are
read as the page reads them, so that a pin, a link and a report show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType, ModuleType

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
