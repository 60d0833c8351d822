"""What an agent can call: a function for each tool, whose arguments are the fields of a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from binade.app.agents.answers import Reply, address, table, text_of
from binade.app.draw.exports import picture
from binade.app.draw.theme import LIGHT
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.shared.runs import matching, occurring
from binade.app.report.rendering import Renderers
from binade.app.report.runs import COLUMNS
from binade.app.view.params import texts_of
from binade.app.view.request import parameters, view_of
from binade.data.exchange.tensor_files import load
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from binade.data.index.sandbox import ROWS, Sandbox
from binade.data.run.json_files import STRICT
from binade.data.words.filter import Filter
from binade.data.words.text import counted

BY_NAME = {question.name: question for question in QUESTIONS}
REMEMBERED = 96 << 20  # bytes of answers, which a second call asks for a figure of
LISTED = 20  # values of a field of the filter
A = TypeVar("A")
Values = list[str | int] | str | int
Where = Annotated[
    dict[str, list[str | int]],
    Field(description='Select tensors by fields: {"recipe": ["mxfp4"], "layer_index": [1, 2]}. See list_questions.'),
]


class Workspace:
    """A root of runs as the tools see it, and the process that draws."""

    def __init__(self, catalog: Catalog, renderers: Renderers) -> None:
        self.catalog, self.renderers = catalog, renderers
        catalog.cache = ResultCache(REMEMBERED, outside=(Catalog,))
        self._sandbox: tuple[object, Sandbox] | None = None

    def sandbox(self) -> Sandbox:
        """A sandbox over the index as it is now. Raises QueryError."""
        state = self.catalog.state()
        if self._sandbox is None or self._sandbox[0] != state:
            if self._sandbox:
                self._sandbox[1].close()
            self._sandbox = state, Sandbox(self.catalog)
        return self._sandbox[1]


@dataclass(frozen=True)
class AgentTool(Generic[A]):
    """A function with its name and docstring, and a class whose fields are the arguments. It raises ValueError,
    RuntimeError or OSError with a message in one line."""

    answer: Callable[[Workspace, A], Reply]
    arguments: type[A]


@checked_dataclass(frozen=True, config=STRICT)
class ListRunsArguments:
    filter: Where = field(default_factory=dict)


def list_runs(workspace: Workspace, given: ListRunsArguments) -> Reply:
    """List the recorded runs: recipe, model, state, losses."""
    catalog = workspace.catalog
    where = _filter(catalog, given.filter)
    runs = matching(catalog, where, catalog.runs())
    lines = [f"{counted(len(runs), 'run')} in {catalog.root}: {where.sentence()}.", table(runs[[*COLUMNS]])]
    return Reply("\n\n".join([*lines, *(f"Skipped: {reason}" for reason in catalog.refused)]))


@checked_dataclass(frozen=True, config=STRICT)
class ListQuestionsArguments:
    pass


def list_questions(workspace: Workspace, given: ListQuestionsArguments) -> Reply:
    """List the questions that can be asked with their parameters, and the fields of the filter with their values."""
    lines = []
    for question in QUESTIONS:
        lines += [f"## {question.name}: {question.text}", f"{question.help}. {question.note}".rstrip()]
        lines += [f"- {name}: {text}" for name, text in parameters(question).items()]
    lines.append("## Fields of the filter, and their values in this root")
    for name, values in occurring(workspace.catalog).items():
        more = f" and {len(values) - LISTED} more" if len(values) > LISTED else ""
        lines.append(f"- {name}: {', '.join(map(str, values[:LISTED]))}{more}")
    return Reply("\n".join(lines))


@checked_dataclass(frozen=True, config=STRICT)
class AskArguments:
    question: Annotated[str, Field(description=f"One of {', '.join(BY_NAME)}")]
    filter: Where = field(default_factory=dict)
    parameters: Annotated[
        dict[str, Values], Field(description='Parameters of the question: {"format": "mxfp4"}. See list_questions.')
    ] = field(default_factory=dict)
    figures: Annotated[list[str], Field(description="Names of figures to return, with their numbers, as SVG")] = field(
        default_factory=list
    )


def ask(workspace: Workspace, given: AskArguments) -> Reply:
    """Ask a question about the runs. The answer is that of the app: sentences, tables, and the names of figures. Begin
    with map, which ranks the operands of all GEMMs in a format; why says what makes one of them lose."""
    catalog, question = workspace.catalog, BY_NAME.get(given.question)
    if question is None:
        raise ValueError(f"question is {given.question!r}, expected one of {', '.join(BY_NAME)}")
    texts = {name: texts_of(values) for name, values in given.parameters.items()}
    view = view_of(question, catalog, _filter(catalog, given.filter), texts)
    drawn = view.draw(catalog)
    by_name = {figure.name: figure for figure in drawn.figures}
    if absent := [name for name in given.figures if name not in by_name]:
        raise ValueError(f"figures: there is no {absent[0]!r}, expected one of {', '.join(by_name) or 'none'}")
    figures = [by_name[name] for name in given.figures]
    at = address(view, catalog)
    drawings = {f"{at}#{one.name}": picture(workspace.renderers, one, LIGHT) for one in figures}
    text = "\n\n".join([question.text, *text_of(drawn, figures), f"In the app: {at}"])
    return Reply(text, {name: drawing.result().svg.decode() for name, drawing in drawings.items()})


@checked_dataclass(frozen=True, config=STRICT)
class SqlArguments:
    statement: Annotated[str, Field(description="A SELECT in DuckDB's dialect; empty to list the columns")] = ""
    rows: Annotated[int, Field(description="The most rows to return", ge=1, le=ROWS)] = 100


def sql(workspace: Workspace, given: SqlArguments) -> Reply:
    """Run one read-only SELECT on a copy of the index, with limited memory and time, and return CSV. Without a
    statement: list the tables and their columns."""
    if not given.statement.strip():
        return Reply(workspace.sandbox().columns().to_csv(index=False))
    answer = workspace.sandbox().select(given.statement, given.rows)
    more = f"There are more than {given.rows:,} rows." if answer.more else ""
    return Reply(f"{answer.rows.to_csv(index=False)}{more}".rstrip())


@checked_dataclass(frozen=True, config=STRICT)
class IdentifyArguments:
    x: Annotated[str, Field(description="The values before rounding: a file, or the tensor_id of a recorded tensor")]
    q: Annotated[str, Field(description="What a kernel made of them: .pt, .npy, or .safetensors as FILE:NAME")]
    scales: Annotated[str, Field(description="The file of block scales, if q has codes")] = ""
    tensor_scale: Annotated[float | None, Field(description="A further factor of codes and scales")] = None
    block: Annotated[str, Field(description="A further block to try, such as 1x48")] = ""


def identify(workspace: Workspace, given: IdentifyArguments) -> Reply:
    """Say which number format and scaling rule gives q from x, bit for bit, or what is wrong with q."""
    from binade.quant.identification.search import identify as identify_tensor  # imports torch

    recorded = not workspace.catalog.rows_of([given.x]).empty
    x = workspace.catalog.load(given.x) if recorded else load(given.x)
    scales = load(given.scales) if given.scales else None
    try:
        found = identify_tensor(x, load(given.q), scales, tensor_scale=given.tensor_scale, block=given.block or None)
    except TypeError as error:  # a dtype that no kernel has
        raise ValueError(str(error)) from error
    return Reply(str(found))


TOOLS: dict[str, AgentTool[Any]] = {
    "list_runs": AgentTool(list_runs, ListRunsArguments),
    "list_questions": AgentTool(list_questions, ListQuestionsArguments),
    "ask": AgentTool(ask, AskArguments),
    "sql": AgentTool(sql, SqlArguments),
    "identify": AgentTool(identify, IdentifyArguments),
}


def _filter(catalog: Catalog, given: Mapping[str, list[str | int]]) -> Filter:
    """Raises ValueError for a field or a value that does not occur."""
    where, known = Filter.from_dict(given), occurring(catalog)
    for name, values in where.items():
        if absent := [value for value in values if value not in known.get(name, [])]:
            listed = ", ".join(map(str, known.get(name, [])[:LISTED])) or "nothing"
            raise ValueError(f"filter: {name} is {absent[0]!r}, expected one of {listed}")
    return where
