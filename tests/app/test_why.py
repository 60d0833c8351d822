"""Why a tensor suffers: the figures of one tensor against one format."""

from __future__ import annotations

import pandas as pd
import torch

from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question as why
from binade.data.filter import Filter
from binade.quant import summarize
from binade.quant.formats import FORMATS


def test_values_that_overflow_fp16():
    """A value that becomes infinite makes the SQNR -inf dB, shown as "overflows"; it raises no math domain error."""
    x = torch.tensor([[1e6, 1.0, -3.0, 0.5]])
    row = pd.Series({"contracted_axis": -1, "dtype": "float32", "tensor_id": "t", **vars(summarize(x)), "numel": 4})
    drawn = why.draw(
        SelectedTensor(None, Filter(), row=row, x=x, format=FORMATS["fp16"], labels={"t": "L1 fc1 input"}), {}
    )
    assert "SQNR overflows" in drawn.verdict and "lost to NaN or Inf 25.00%" in drawn.verdict
