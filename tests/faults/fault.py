"""Finds the faults that can be planted in a Python file: one small change of one expression or statement.

No fault changes docstrings, annotations, what only a type checker reads, messages, logging or the options of a kernel's
launch. All are in functions: the other lines of a module run when it is imported, and no test executes them alone.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

Function = ast.FunctionDef | ast.AsyncFunctionDef
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
UNCHANGED = re.compile(r"if TYPE_CHECKING:|(log|logger|logging|warnings)\.|print\(", re.IGNORECASE)
LAUNCH_OPTIONS = ("num_warps", "num_stages")


class Kind(StrEnum):
    """How a fault changes the code."""

    COMPARISON = "comparison"  # another comparison operator
    ARITHMETIC = "arithmetic"  # another arithmetic operator
    CONSTANT = "constant"  # a number plus one, or the other truth value
    CONDITION = "condition"  # negated, or `or` for `and`
    REMOVAL = "removal"  # of a statement
    ARGUMENTS = "arguments"  # the first two swapped


@dataclass(frozen=True)
class Fault:
    """A change of a file's bytes [start:end] from `before` to `after`.

    `statement` is the first line of the statement, as ast.unparse writes it; `number` counts equal changes of it. Lines
    and offsets do not matter for equality, so that a fault is found again after lines have moved.
    """

    file: str
    function: str
    statement: str
    kind: Kind
    before: str
    after: str
    number: int = 0
    line: int = field(default=0, compare=False)
    start: int = field(default=0, compare=False)
    end: int = field(default=0, compare=False)

    @property
    def part(self) -> str:
        return self.file.partition("/")[0]

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.after.encode() + source[self.end :]


def faults_of(file: str, source: bytes) -> list[Fault]:
    """All faults of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: Counter[Fault] = Counter()
    faults = []
    for function, statement, kind, node, after in _changes(ast.parse(source), "", ""):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        fault = Fault(file, function, statement, kind, ast.unparse(node), after, 0, node.lineno, start, end)
        faults.append(replace(fault, number=counts[fault]))
        counts[fault] += 1
    return faults


def _changes(node: ast.AST, function: str, statement: str) -> Iterator[tuple[str, str, Kind, ast.AST, str]]:
    """Function, statement, kind, changed node and its replacement, of all changes in a node."""
    if isinstance(node, ast.Module | ast.ClassDef | Function):
        name = f"{function}.{getattr(node, 'name', '')}".strip(".")
        for child in node.body:
            if isinstance(node, Function) or isinstance(child, ast.ClassDef | Function):
                yield from _changes(child, name, "")
        return
    if isinstance(node, ast.stmt):
        statement = ast.unparse(node).splitlines()[0]
    launch_option = isinstance(node, ast.keyword) and node.arg in LAUNCH_OPTIONS
    # Python 3.11 does not know the positions of expressions in f-strings.
    if launch_option or UNCHANGED.match(statement) or isinstance(node, ast.JoinedStr | ast.pattern | ast.arguments):
        return
    yield from ((function, statement, *change) for change in _changes_of(node))
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name != "annotation" and not isinstance(node, ast.Raise):
                yield from _changes(child, function, statement)


def _changes_of(node: ast.AST) -> Iterator[tuple[Kind, ast.AST, str]]:
    match node:
        case ast.Compare(ops=[operator, *others]):
            yield Kind.COMPARISON, node, _unparse(node, ops=[OTHER[type(operator)](), *others])
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OTHER:
            if not any(isinstance(getattr(operand, "value", None), str) for operand in (left, right)):
                yield Kind.ARITHMETIC, node, _unparse(node, op=OTHER[type(operator)]())
        case ast.BoolOp(op=operator):
            yield Kind.CONDITION, node, _unparse(node, op=OTHER[type(operator)]())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield Kind.CONDITION, test, f"(not {_unparse(test)})"
        case ast.Constant(value=bool(value)):
            yield Kind.CONSTANT, node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield Kind.CONSTANT, node, str(value + 1)
        case ast.Call(args=[first, second, *others]) if ast.dump(first) != ast.dump(second):
            yield Kind.ARGUMENTS, node, _unparse(node, args=[second, first, *others])
        case ast.Raise() | ast.Continue() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield Kind.REMOVAL, node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield Kind.REMOVAL, node, "pass"


def _unparse(node: ast.AST, **changes: object) -> str:
    """The code of an expression with some other fields, in parentheses."""
    changed = copy.copy(node)
    vars(changed).update(changes)
    return f"({ast.unparse(changed)})"
