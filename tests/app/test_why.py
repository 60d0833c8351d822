"""Why a tensor loses precision: the figures of one tensor against one format."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import torch

from binade.app.figure import Drawn
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question as why
from binade.data.filter import Filter
from binade.quant import summarize
from binade.quant.specs import Spec


def drawn_why(x: torch.Tensor, spec: str) -> Drawn:
    summary = vars(summarize(x)) | {"numel": x.numel()}
    row = pd.Series({"contracted_axis": -1, "dtype": "float32", "tensor_id": "t", **summary})
    labels = {"t": "L1 fc1 input"}
    return why.draw(SelectedTensor(None, Filter(), row=row, x=x, spec=Spec.of(spec), labels=labels), {})


def test_hifp8_without_a_scale_says_what_it_would_do_with_one():
    """The figures of FORMATS2.md for N(0, 1) · 1e-4: 19.7 dB without a scale, 31.6 dB with one."""
    x = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * 1e-4
    verdict = drawn_why(x, "hifp8").verdict
    found = re.search(
        r"In hifp8: SQNR 19\.7 dB.* With a tensor scale, hifp8\(scale=amax8\): (.*) dB and 0\.00%", verdict
    )
    assert found and float(found[1]) == pytest.approx(31.6, abs=0.11)  # the largest value differs by sample
    assert "With a tensor scale" not in drawn_why(x, "hifp8(scale=amax8)").verdict
    assert "With a tensor scale" not in drawn_why(x * 1e4, "hifp8").verdict


def test_values_that_overflow_fp16():
    """A value that becomes infinite makes the SQNR -inf dB, shown as "overflows"; it raises no math domain error."""
    drawn = drawn_why(torch.tensor([[1e6, 1.0, -3.0, 0.5]]), "fp16")
    assert "SQNR overflows" in drawn.verdict and "lost to NaN or Inf 25.00%" in drawn.verdict
