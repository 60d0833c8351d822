"""What every view of a tensor starts from."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from torch import Tensor

from binade.app.figure import source
from binade.app.questions.shared.rounded import Subject, subject
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.formats import FORMATS, Format


@dataclass(frozen=True)
class Look:
    """A tensor on the page: its row in the index, its values, and the format that it is held against."""

    opened: Catalog
    where: Filter
    row: pd.Series
    x: Tensor
    format: Format
    label: str

    @property
    def dim(self) -> int:
        """The axis its GEMM contracts; the last for a result, which none does."""
        axis = self.row["contracted_axis"]
        return -1 if pd.isna(axis) else int(axis)

    @property
    def shape(self) -> str:
        return " × ".join(f"{n:,}" for n in self.x.shape) or "scalar"

    def source(self, note: str = "exact") -> str:
        """The first line of a caption."""
        return source(Filter(), f"{self.label}, {self.shape}, {self.row['dtype']}, {self.row['tensor_id']} ({note})")

    def subject(self, **options: object) -> Subject:
        return subject(self.x, self.format.name, self.dim, **options)


def formats_first(first: str) -> tuple[str, ...]:
    """All formats, this one first."""
    return (first, *(name for name in FORMATS if name != first))
