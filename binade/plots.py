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

from binade.app.draw.control import Control
from binade.app.draw.figure import Drawn
from binade.app.measures.registry import MAP_MEASURES
from binade.app.pages.registry import PART
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.selection import Of
from binade.app.view.params import AnySpec, Many, One, Range, Whole, texts_of
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

# What a question is asked of has parameters, too; its own are its controls.
_OF: dict[Of, dict[str, str]] = {
    Of.SELECTION: {
        "format": "A format that tensors were scored in. By default the run’s own, or the one with the "
        "fewest bits per value."
    },
    Of.BOARD: {
        "format": "A format that tensors were scored in. By default the run’s own, or the one with the fewest bits per "
        "value.",
    },
    Of.TENSOR: {
        "tensor": "The tensor_id of a tensor of the filter. By default the one with the lowest SQNR.",
        "format": "The format it is rounded to, with or without options. By default the run’s own, or of those that "
        "tensors were scored in, the one with the fewest bits per value.",
    },
}


_SCOPE = {
    "metric": f"One of {', '.join(MAP_MEASURES)}. By default {next(iter(MAP_MEASURES))}.",
    "versus": "A format or the id of a run: the difference to it. By default nothing.",
}


def _expected(param: object) -> str:
    match param:
        case One(allowed):
            return f"one of {', '.join(allowed)}" if allowed else "no value, because none was recorded"
        case Many(allowed):
            return f"any of {', '.join(allowed)}"
        case AnySpec():
            return "a format, with or without options"
        case Whole(low, high):
            return f"a whole number from {low} to {high:,}"
        case Range():
            return "a range such as -24.5..-22"
    return "a name that the catalog has"


def _about(control: Control) -> str:
    default = "" if callable(control.param) else ", ".join(texts_of(control.param.default))
    texts = (control.label, _expected(control.param), f"By default {default}" if default else "", control.help)
    return " ".join(f"{text[:1].upper()}{text[1:].rstrip('.')}." for text in texts if text)


def _indented(text: str) -> str:
    return fill(text, 100, initial_indent="    ", subsequent_indent=" " * 8)


def _parameters(question: Question) -> dict[str, str]:
    """A description of each parameter of a question."""
    of = {name: text for name, text in (_OF[question.of] | _SCOPE).items() if name in question.uses}
    taken = dict.fromkeys(question.takes, "The tensor_ids of tensors to compare. By default the whole filter.")
    return of | taken | {control.name: _about(control) for control in question.controls}


def _answer(question: Question, catalog: Catalog, where: Filter, given: dict[str, list[str]]) -> Drawn:
    names = _parameters(question)
    view = View(question.page, {PART: [question.view]} | given).filtered(where)
    params = view.params_in(catalog)
    for name, texts in given.items():
        if name not in names:
            takes = ", ".join(names) or "none"
            raise ValueError(f"plots.{question.name} has no parameter {name!r}. Its parameters: {takes}")
        if bad := params[name].read(texts)[1]:
            raise ValueError(f"plots.{question.name}: {name} is {bad[0]!r}, expected {_expected(params[name])}")
    if not catalog.totals(where).tensors:
        return Drawn(problems=(f"No tensor in {catalog.root} matches: {where.sentence()}.",))
    return view.draw(catalog)


def _function(question: Question) -> Callable[..., Drawn]:
    def answer(catalog: Catalog, where: Filter | None = None, **parameters: Any) -> Drawn:
        given = {name: texts_of(value) for name, value in parameters.items() if value is not None}
        return _answer(question, catalog, where or Filter(), given)

    names = _parameters(question)
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
