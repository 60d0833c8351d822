"""What the rows and columns of a tensor are, once all its axes but the last are one: tokens and channels, or rows and
columns of a weight. A token is named by its index within its sequence, and by its head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import PRODUCT_KINDS, TENSOR_KINDS, Other, TensorKind

TOKEN, ROW, CHANNEL, KEY, COLUMN = "token", "row", "channel", "key", "column"
HEADS = ("sequence", "head", TOKEN)  # the axes of a tensor of attention before the last
OF_TOKENS = ("input", "output")  # sizes of kinds whose rows are tokens


@dataclass(frozen=True)
class Axes:
    """
    row     what a row is: TOKEN or ROW
    column  what a column is: CHANNEL, KEY (of an attention map) or COLUMN
    shape   of all axes but the last
    layout  what these axes are; () where the index of a token within its sequence is not known
    """

    row: str
    column: str
    shape: tuple[int, ...]
    layout: tuple[str, ...] = ()

    @property
    def rows(self) -> str:
        return f"{self.row}s"

    @property
    def columns(self) -> str:
        return f"{self.column}s"

    @property
    def by(self) -> str:
        """ "token and channel": the axes of a grid, as a title has them."""
        return f"{self._axis} and {self.column}"

    @property
    def titles(self) -> tuple[str, str]:
        """The titles of the axes of a grid: of its columns and of its rows."""
        several = [name for name, size in zip(self.layout, self.shape, strict=False) if size > 1 and name != TOKEN]
        rows = (
            self._axis if self._axis == TOKEN else f"row ({' × '.join(self.layout) if several else 'the other axes'})"
        )
        return f"{self.column} (last axis)", rows

    @property
    def _axis(self) -> str:
        """What an index along the rows is: a token only if all rows are those of one sequence."""
        others = (size for name, size in zip(self.layout, self.shape, strict=False) if name != TOKEN)
        return TOKEN if self.layout and all(size == 1 for size in others) else ROW

    def name_of(self, row: int) -> str:
        """ "token 3", "token 3 of head 2, sequence 1": tokens from 0 within their sequence, heads and sequences from 1.
        "row 99" where these are not known."""
        if not self.layout:
            return f"{ROW} {row:,}"
        at = dict(zip(self.layout, map(int, np.unravel_index(row, self.shape)), strict=True))
        sizes = dict(zip(self.layout, self.shape, strict=True))
        others = [f"{name} {at[name] + 1:,}" for name in ("head", "sequence") if sizes.get(name, 1) > 1]
        return f"{TOKEN} {at[TOKEN]:,}" + (f" of {', '.join(others)}" if others else "")


def axes_of(opened: Catalog, tensor: pd.Series) -> Axes:
    """The rows and columns of a tensor, by its row in the index."""
    lead = tuple(int(size) for size in tensor["shape"])[:-1]
    kind = _kind_of(tensor)
    if kind is None:
        return Axes(ROW, COLUMN, lead)
    if kind.place == "attention":
        column = KEY if kind.size == "scores" else CHANNEL
        return Axes(ROW, column, lead, HEADS) if len(lead) == len(HEADS) else Axes(ROW, column, lead)
    if kind.size not in OF_TOKENS:
        return Axes(ROW, COLUMN, lead)
    column = COLUMN if kind.place == Other.HEAD else CHANNEL
    return Axes(TOKEN, column, lead, _layout(opened, tensor, lead))


def _kind_of(tensor: pd.Series) -> TensorKind | None:
    if not pd.isna(tensor["layer_type"]):
        return PRODUCT_KINDS.get((tensor["layer_type"], tensor["tensor_name"]))
    others = (kind for kind in TENSOR_KINDS if kind.layer_type is None and kind.name == tensor["tensor_name"])
    return next(others, None)


def _layout(opened: Catalog, tensor: pd.Series, lead: tuple[int, ...]) -> tuple[str, ...]:
    """The axes of tokens, of shape `lead`: by the tensors of attention of the same run, which are [sequences, heads,
    tokens, …]. Tokens of an expert, or of several sequences in unknown order, have no index."""
    if not lead or not pd.isna(tensor["expert"]):
        return ()
    sequences = _sequences(opened, str(tensor["run_id"]))
    if len(lead) == 1:
        return (TOKEN,) if sequences is None or sequences[0] == 1 else ()
    if math.prod(lead) == max(lead):  # one sequence
        at = lead.index(max(lead))
        return tuple(TOKEN if axis == at else f"axis {axis}" for axis in range(len(lead)))
    if len(lead) != 2 or sequences is None or sequences[0] == sequences[1]:
        return ()
    return {sequences: ("sequence", TOKEN), sequences[::-1]: (TOKEN, "sequence")}.get((lead[0], lead[1]), ())


def _sequences(opened: Catalog, run_id: str) -> tuple[int, int] | None:
    """(the sequences of a micro-batch, the tokens of each) of a run; None if they are not known or differ."""

    def shapes() -> Any:
        names = [kind.name for kind in TENSOR_KINDS if kind.place == "attention" and kind.size in ("query", "scores")]
        return opened.ask(
            "SELECT DISTINCT shape[1] AS sequences, shape[3] AS tokens FROM tensor WHERE run_id = ? AND len(shape) = 4"
            " AND layer_type = 'attention' AND list_contains(?, tensor_name)",
            [run_id, names],
        )

    found = opened.kept(("sequences of", run_id, opened.versions((run_id,))), shapes)
    return (int(found["sequences"][0]), int(found["tokens"][0])) if len(found) == 1 else None
