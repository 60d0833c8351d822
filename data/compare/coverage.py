"""Which operands of which GEMMs are rounded to which format, by a recipe or in a run, and where two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from binade.data.run.tensor_kinds import LATER, PRODUCT_KINDS, TensorKind
from binade.data.words.names import operand_name, product_name
from binade.data.words.text import spans

BF16, ABSENT = "bf16", "not recorded"
PLACE = ("layer_index", "module", "expert", "tensor_name")  # the columns of an Operand


class CoveredOperand(NamedTuple):
    """An operand of a GEMM: a tensor of a module, as the index names them."""

    layer: int | None
    module: str | None
    expert: int | None
    tensor: str
    gemm: str


Formats = Mapping[CoveredOperand, str]  # "" for an operand whose format is unknown


@dataclass(frozen=True)
class FormatDifference:
    """Operands whose formats differ in the same way, such as "layers 1-4 fc2 input (forward, wgrad)", and the formats
    on both sides."""

    place: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.place}: {self.a} | {self.b}"


def gemm_operands(kind: TensorKind) -> dict[str, str]:
    """The GEMMs that take a tensor as an operand, each with the operand's field of GemmFormats; the first is the one
    for which its rows have an error."""
    if kind.contracted_axis is None:
        return {}
    fields = (kind.operand, *(name for name, observed in LATER.items() if observed == kind.observed))
    return {field.partition("_")[0]: field for field in fields}


def recorded_formats(rows: Iterable[Mapping[str, Any]]) -> dict[CoveredOperand, str]:
    """The formats of the operands in rows of the table `tensor`, each with `rounded`: by GEMM the format in the scores
    that was used, None if none was. Watched steps have scores of a tensor's first GEMM alone."""
    operand_formats: dict[CoveredOperand, set[str]] = {}
    for row in rows:
        kind = PRODUCT_KINDS.get((row["layer_type"], row["tensor_name"]))
        for gemm in gemm_operands(kind) if kind else ():
            formats = operand_formats.setdefault(CoveredOperand._make((*(row[name] for name in PLACE), gemm)), set())
            if gemm in row["rounded"] or row["format"] is None:
                formats.add(row["rounded"].get(gemm) or BF16)
    return {operand: ", ".join(sorted(formats)) for operand, formats in operand_formats.items()}


def differing(a: Formats, b: Formats) -> tuple[FormatDifference, ...]:
    """The operands whose formats differ, or that one side lacks; as few groups as their layers, modules, experts,
    tensors and GEMMs allow."""
    groups: list[tuple[tuple[frozenset[Any], ...], tuple[str, str]]] = []
    for operand in {**a, **b}:
        formats = a.get(operand, ABSENT), b.get(operand, ABSENT)
        if formats[0] != formats[1] and all(formats):
            groups.append((tuple(frozenset((value,)) for value in operand), formats))
    for axis in (4, 2, 0, 3, 1):
        merged: dict[Any, frozenset[Any]] = {}
        for values, formats in groups:
            rest = (*values[:axis], *values[axis + 1 :]), formats
            merged[rest] = merged.get(rest, frozenset()) | values[axis]
        groups = [((*rest[:axis], values, *rest[axis:]), formats) for (rest, formats), values in merged.items()]
    return tuple(FormatDifference(_place(values), *formats) for values, formats in groups)


def _place(values: Iterable[frozenset[Any]]) -> str:
    """values: those of each field of CoveredOperand."""
    layers, modules, experts, tensors, gemms = (sorted(members - {None}) for members in values)
    products = dict.fromkeys(product_name(module, tensor) for module in modules for tensor in tensors)
    of_experts = [f"expert{'s' * (len(experts) > 1)} {spans(experts)}"] if experts else []
    words = [
        f"layer{'s' * (len(layers) > 1)} {spans(layers)}",
        *of_experts,
        ", ".join(products),
        ", ".join(map(operand_name, tensors)),
    ]
    return f"{' '.join(words)} ({', '.join(gemms)})"
