"""The view of a question whose parameters come from a program: `binade.plots` and `binade mcp`. No Streamlit."""

from __future__ import annotations

from collections.abc import Mapping

from binade.app.draw.control import Control
from binade.app.measures.registry import MAP_MEASURES
from binade.app.pages.registry import PART
from binade.app.questions.question import Question
from binade.app.questions.shared.operands import GEMMS
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
# What questions take without a control.
_TAKEN = {
    "tensor": "The tensor_ids of tensors to compare. By default the whole filter.",
    "gemm": f"The GEMM that takes the tensor: {', '.join(GEMMS)}. By default its own.",
    "cell": "The cell that a measure draws more of, such as forward/fc1/input/1. By default none.",
    "chosen": "The ids of runs that are drawn over the others. By default none.",
    "hidden": "The ids of runs that are not drawn. By default none.",
    "delta": "A range of SQNR against normal values in dB, such as -24.5..-22: which tensors are listed.",
    "after": "The rank after which the tensors are listed. By default 0.",
}


def parameters(question: Question) -> dict[str, str]:
    """A description of each parameter of a question, by name."""
    of = {name: text for name, text in (_OF[question.of] | _SCOPE).items() if name in question.uses}
    taken = {name: _TAKEN.get(name, "What a click in the app chooses.") for name in question.takes}
    return of | taken | {control.name: _about(control) for control in question.controls}


def view_of(question: Question, catalog: Catalog, where: Filter, given: Mapping[str, list[str]]) -> View:
    """The view of a question. given: the texts of its parameters. Raises ValueError for a parameter or a value that is
    not known: a line that begins with the name of the question and says what was expected."""
    names = parameters(question)
    view = View(question.page, {PART: [question.view], **given}).filtered(where)
    params = view.params_in(catalog)
    for name, texts in given.items():
        if name not in names:
            takes = ", ".join(names) or "none"
            raise ValueError(f"{question.name} has no parameter {name!r}. Its parameters: {takes}")
        if bad := params[name].read(texts)[1]:
            raise ValueError(f"{question.name}: {name} is {bad[0]!r}, expected {_expected(params[name])}")
    return view


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
