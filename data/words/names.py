"""Names of tensors: "L1 fc2 input", "L1 QKᵀ query", "L1 fc2 grad output"; UNNAMED where a log does not say what one is.

Charts, tables, verdicts, the palette, reports and advice name tensors here. This file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from binade.data.run.tensor_kinds import TENSOR_KINDS, Product
from binade.data.words.fields import IDENTITIES

UNNAMED = "unnamed"
PRODUCTS = {"QK": "QKᵀ", "PV": "PV"}  # the products of attention, by their part of a recipe
CORE = "core"  # the module of both products of attention
# Fields in which tensors of the same short name differ, in the order in which a name mentions them.
DISTINCTIONS = ("iteration", "micro_batch", "rank", "expert", "phase", "stage", "recipe", "run_id", "tensor_id")
_ATTENTION = {
    kind.name: PRODUCTS[kind.product.name]
    for kind in TENSOR_KINDS
    if isinstance(kind.product, Product) and kind.place == "attention"
}


def layer_name(layer: object) -> str:
    """ "L1"; "" for a tensor that belongs to no layer."""
    return "" if _missing(layer) else f"L{int(str(layer).removesuffix('.0'))}"


def product_name(module: object, tensor: object = None) -> str:
    """ "fc1", "QKᵀ", "PV": of a module or a part of attention; "" for no module. tensor: the tensor_name, which says
    which product of the attention core is meant; "attention" if it says neither."""
    if _missing(module):
        return ""
    if str(module) == CORE:
        return _ATTENTION.get(str(tensor), "attention")
    return PRODUCTS.get(str(module), str(module))


def operand_name(tensor: object) -> str:
    """ "grad output", "probs", of a tensor_name."""
    return UNNAMED if _missing(tensor) else str(tensor).removeprefix("attention_").replace("_", " ")


def name_of(layer: object, module: object, tensor: object = "", expert: object = None) -> str:
    """The short name: "L1 fc2 input", "L1 fc2 expert 3 input". A tensor of "" names the place only: "L1 fc2"."""
    of_expert = "" if _missing(expert) or expert == "" else f"expert {expert}"
    operand = "" if isinstance(tensor, str) and not tensor else operand_name(tensor)
    return " ".join(filter(None, (layer_name(layer), product_name(module, tensor), of_expert, operand)))


def short_names(rows: pd.DataFrame) -> pd.Series:
    """The short name of each row, from layer_index, module and tensor_name. Tensors may have the same one. Rows without
    layer_index get names without a layer."""
    identity = rows.reindex(columns=["layer_index", "module", "tensor_name"]).astype(object)
    identity = identity.where(identity.notna(), None)
    names: dict[tuple[object, ...], str] = {}
    keys = zip(*(identity[column] for column in identity), strict=True)
    texts = [names[key] if key in names else names.setdefault(key, name_of(*key)) for key in keys]
    return pd.Series(texts, rows.index, object)


def distinct_names(rows: pd.DataFrame, runs: Mapping[str, str], *, long: bool = False) -> dict[str, str]:
    """A name of its own for each of these tensors, by tensor_id: the short one, and where several have it, the fields
    in which they differ: "L1 fc2 input · iteration 3". Fast for thousands of rows.

    rows  of the table `tensor`
    runs  names of runs by run_id; others are named by their id
    long  with the operation in each name: "L1 fc2 input · forward"
    """
    text = short_names(rows)
    if long:
        text = text + rows["operation"].map(" · {}".format, na_action="ignore").fillna("").astype(object)
    for column in (*(() if long else ("operation",)), *DISTINCTIONS):
        again = text.duplicated(keep=False)
        if not again.any():
            break
        words = rows.loc[again, column].map(lambda value, c=column: _words(c, value, runs)).astype(object)
        differ = words.groupby(text[again]).transform("nunique") > 1
        text.loc[differ.index[differ]] += " · " + words[differ]
    return dict(zip(rows["tensor_id"], text, strict=True))


def _words(column: str, value: object, runs: Mapping[str, str]) -> str:
    """The value of a field as a name mentions it: "iteration 3"."""
    if column == "tensor_id":
        return str(value).rpartition("/")[2]
    field = IDENTITIES[column]
    if _missing(value):
        return f"no {field.inline}"
    if column == "operation":
        return str(value)
    if column == "run_id":
        return f"{field.inline} {runs.get(str(value), value)}"
    return f"{field.inline} {int(float(str(value))) if field.is_integer else value}"


def _missing(value: object) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)
