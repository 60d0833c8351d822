"""What a question is: the facts that the navigation, the palette, sessions, reports and the docs read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from binade.app.draw.control import Control
from binade.app.draw.figure import Drawn
from binade.app.questions.shared.operands import GEMMS
from binade.app.questions.shared.selection import Of
from binade.app.view.params import Known, Param, known_tensor
from binade.data.index.catalog import Catalog
from binade.data.words.filter import FIELDS, Filter

Beyond = Callable[[Catalog, Filter, Collection[str]], Iterable[str]]


AS_OPERAND: dict[str, Callable[[Catalog], Param]] = {"gemm": lambda opened: Known(lambda name: name in GEMMS)}
"""The parameter of a question on what rounding does to a tensor: the GEMM that takes it, by default its own."""
SCOPE_OF: dict[Of, tuple[str, ...]] = {Of.SELECTION: (), Of.BOARD: ("format",), Of.TENSOR: ("format",)}


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that the app answers.

    text         the question, as the palette and the docs show it
    title        a short name for it, among the parts of its page
    icon, help   shown with it
    page, view   where it is answered, as in the address: the page and the part of it
    room         the view of the question below whose answer this one is shown, as a section; by default a room of its
                 own
    choice       of the first question of a room: the title of the room and of the control that chooses one of its
                 questions, which are shown in place of each other and not below each other
    applies      whether the room offers the section: a function of what is selected
    of           what it is asked of
    draw         the function that answers it, without Streamlit: (what it is asked of, the parameters' values) -> Drawn
    controls     the parameters of its own, and the widgets that set them
    narrow       the controls above the answer where they depend on what is selected and on the values; by default all
                 that are not inline
    scoped       the parameters of the scope that the answer depends on, if not those that `of` implies
    takes        further parameters without a control: by name, a function of the catalog that returns the parameter
    defaults     of parameters that depend on the others: by name, a function of the catalog and the values
    selects      the same for what is selected in the answer, on which it does not depend
    at_once      parameters that the browser draws before Python hears of them: they change no run, iteration or format
    slow         a title for the slow part of draw, shown with its progress; "" if there is none. draw then also takes
                 `done`, which it calls with (steps done, steps in all)
    rounds       whether draw rounds many tensors: a function of the catalog, the filter and the values
    of_runs      whether the answer also depends on how far runs are: on their losses and states
    of_fields    the fields of the filter that the answer depends on; () for all
    beyond       the runs that the answer reads besides those that its filter selects or its parameters name: (the root,
                 the filter, these) -> run ids. Sessions and bundles keep them too. None if there are no others
    empty        whether there is an answer for a root without tensors, too
    of_values    whether the answer depends on a tensor's row and values alone, so that it stays when the root changes
    as_used      whether, with these parameters, it can show each operand in the format that its own GEMM used: USED in
                 place of a format
    note         shown above the answer
    says_scope   whether its layout says what the answer used, and not the frame
    layout       the module whose `show(catalog, view, reading)` shows it, if it is not laid out like the others
    within       the filter that the answer is computed from, with the runs and iterations that are chosen for it: a
                 function of the catalog, the user's filter and the values, see `scope.scoped`. None for a question
                 about one tensor or about whole runs: `Drawn.scope` says what the answer used
    """

    text: str
    title: str
    icon: str
    help: str
    page: str
    view: str
    draw: Callable[..., Drawn]
    room: str = ""
    choice: str = ""
    applies: Callable[[Any], bool] | None = None
    of: Of = Of.SELECTION
    controls: tuple[Control, ...] = ()
    narrow: Callable[[Any, dict[str, Any]], Iterable[Control]] | None = None
    scoped: tuple[str, ...] = ()
    takes: dict[str, Callable[[Catalog], Param]] = field(default_factory=dict)
    defaults: dict[str, Callable[[Catalog, Mapping[str, Any]], Any]] = field(default_factory=dict)
    selects: dict[str, Callable[[Catalog], Param]] = field(default_factory=dict)
    at_once: tuple[str, ...] = ()
    slow: str = ""
    rounds: Callable[[Catalog, Filter, Mapping[str, Any]], bool] | None = None
    of_runs: bool = False
    of_fields: tuple[str, ...] = ()
    beyond: Beyond | None = None
    empty: bool = False
    of_values: bool = False
    as_used: Callable[[Mapping[str, Any]], bool] = lambda values: False
    note: str = ""
    says_scope: bool = False
    layout: str = ""
    within: Callable[[Catalog, Filter, Mapping[str, Any]], Filter] | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.draw.__module__.split(".")[-2]

    @property
    def place(self) -> str:
        """Where it is answered, as shown in the navigation."""
        return f"{self.page.capitalize()} › {self.title}"

    @property
    def address(self) -> dict[str, str]:
        """The parameters of a link to it."""
        return {"view": self.view}

    @property
    def scope(self) -> tuple[str, ...]:
        """The parameters of the scope that its answer depends on."""
        return self.scoped or SCOPE_OF[self.of]

    @property
    def uses(self) -> tuple[str, ...]:
        """All parameters that its answer depends on, besides the filter."""
        names = [
            *(["tensor"] if self.of is Of.TENSOR else []),
            *self.takes,
            *(control.name for control in self.controls),
        ]
        return (*self.scope, *names)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        return tuple(name for name in FIELDS if self.of_fields and name not in self.of_fields)

    def params(self, opened: Catalog) -> dict[str, Param]:
        """The parameters of its own, besides the scope."""
        chosen: dict[str, Param] = {"tensor": known_tensor(opened)} if self.of is Of.TENSOR else {}
        taken = {name: make(opened) for name, make in (self.takes | self.selects).items()}
        return chosen | taken | {control.name: control.param_in(opened) for control in self.controls}

    def controls_of(self, selected: Any, values: dict[str, Any]) -> list[Control]:
        """The controls above the answer."""
        if self.narrow:
            return list(self.narrow(selected, values))
        return [control for control in self.controls if not control.inline]
