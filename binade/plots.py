"""The questions of the app as functions, for notebooks and scripts: a catalog and a filter in, Altair charts out.

    from binade import Catalog, Filter, plots

    catalog = Catalog.open("data/runs")
    plots.map(catalog, Filter(operation=["backward"]), format="mxfp4")
    plots.why(catalog).charts[0].save("why.png")

Each question has a function, named like its folder in `binade.app.questions`; `help(plots)` lists them, and
`help(plots.map)` lists the parameters of one. Every function returns a `Drawn`, which Jupyter displays: `charts`
(Altair charts, in order), `tables` (DataFrames by name), `verdict` (the answer in words) and `problems` (what cannot be
drawn, and why). They are the same as in the app.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from textwrap import fill
from typing import Any

from binade.app.draw.figure import Drawn
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.view.params import texts_of
from binade.app.view.request import parameters, view_of
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter


def _indented(text: str) -> str:
    return fill(text, 100, initial_indent="    ", subsequent_indent=" " * 8)


def _function(question: Question) -> Callable[..., Drawn]:
    def answer(catalog: Catalog, where: Filter | None = None, **values: Any) -> Drawn:
        where = where or Filter()
        given = {name: texts_of(value) for name, value in values.items() if value is not None}
        view = view_of(question, catalog, where, given)
        if not catalog.totals(where).tensors:
            return Drawn(problems=(f"No tensor in {catalog.root} matches: {where.sentence()}.",))
        return view.draw(catalog)

    names = parameters(question)
    texts = [
        fill(f"{question.text} {question.help}. {question.note}", 100),
        "\n".join(("Parameters:", *(_indented(f"{name}: {text}") for name, text in names.items()))) if names else "",
        "Raises ValueError for a parameter or a value that is not known.",
        f"In the app: {question.place}. Source: {question.draw.__module__}.",
    ]
    answer.__doc__ = "\n\n".join(filter(None, texts))
    answer.__name__ = answer.__qualname__ = question.name
    fixed = [
        Parameter("catalog", Parameter.POSITIONAL_OR_KEYWORD, annotation="Catalog"),
        Parameter("where", Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="Filter | None"),
    ]
    keywords = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names]
    vars(answer)["__signature__"] = Signature([*fixed, *keywords], return_annotation="Drawn")
    return answer


_FUNCTIONS = {question.name: _function(question) for question in QUESTIONS}
__all__ = [*_FUNCTIONS]


def __getattr__(name: str) -> Callable[..., Drawn]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    raise AttributeError(f"module 'binade.plots' has no attribute {name!r}: it has {', '.join(_FUNCTIONS)}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
