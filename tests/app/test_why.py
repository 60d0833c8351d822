"""Why a tensor loses precision: the figures of one tensor against one format."""

from __future__ import annotations

import math
import re

import pandas as pd
import pytest
import torch

from binade.app.figure import Drawn
from binade.app.questions.shared.rounded import subject
from binade.app.questions.shared.selection import SelectedTensor
from binade.app.questions.why import question as why
from binade.data.filter import Filter
from binade.quant import summarize
from binade.quant.backends import cpu
from binade.quant.blocks import look
from binade.quant.metrics import streamed_score
from binade.quant.specs import Spec


class Alone(SelectedTensor):
    """A tensor that is in no catalog."""

    @property
    def labels(self) -> dict[str, str]:
        return {"t": "L1 fc1 input"}


def drawn_why(x: torch.Tensor, spec: str) -> Drawn:
    summary = vars(summarize(x)) | {"numel": x.numel()}
    row = pd.Series({"contracted_axis": -1, "dtype": "float32", "tensor_id": "t", **summary})
    return why.draw(Alone(None, Filter(), row=row, x=x, spec=Spec.of(spec)), {})


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


MATRIX, LINE = (1100, 1024), (1_300_003,)


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("mxfp4", MATRIX),
        ("nvfp4", MATRIX),
        ("fp8_e4m3(block=row)", MATRIX),
        ("nvfp4", LINE),
        ("hifp8(scale=amax8)", LINE),
    ],
)
def test_a_large_tensor_is_measured_whole_though_a_sample_is_drawn(spec, shape):
    """Against all of its blocks at once, by the definition. The outlier, which sets the scale of the whole tensor, is
    not in the sample."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x.view(-1)[1024 + 5] = 3e4
    unit = cpu.unit_of(Spec.of(spec), x.dtype)
    assert unit and cpu.kernel(unit)  # of a tensor of this size alone it would not be worth a build
    whole = look(x, spec)
    sums = whole.sums
    verdict = drawn_why(x, spec).verdict
    shown = re.search(r"SQNR ([-\d.]+) dB, ([\d.]+)% of .* zero, ([\d.]+)% of all", verdict)
    assert shown, verdict
    expected = 10 * math.log10(sums.signal / sums.noise), sums.flushed / sums.nonzero, sums.saturated / x.numel()
    assert [float(each) for each in shown.groups()] == [
        pytest.approx(each * factor, abs=half)
        for each, factor, half in zip(expected, (1, 100, 100), (0.051, 0.0051, 0.0051), strict=True)
    ]
    found = streamed_score(x, spec)
    assert found.sqnr_db == pytest.approx(expected[0], rel=1e-12)
    assert round(found.flush_to_zero * sums.nonzero) == sums.flushed
    assert round(found.saturated * x.numel()) == sums.saturated
    drawn = subject(x, spec)
    assert 1 << 19 < drawn.blocks.valid.sum() < 1 << 20
    scales = {
        tuple(start): scale for start, scale in zip(whole.x[:, :2].tolist(), whole.scale[:, 0].tolist(), strict=True)
    }
    for start, scale in zip(drawn.blocks.x[:, :2].tolist(), drawn.blocks.scale[:, 0].tolist(), strict=True):
        assert scales[tuple(start)] == scale


def test_totals_of_a_sample_say_so():
    """No kernel measures rotated values without a copy."""
    x = torch.randn(MATRIX, generator=torch.Generator().manual_seed(1))
    assert drawn_why(x, "mxfp4(hadamard=32)").verdict.startswith("In mxfp4(hadamard=32) (a sample): SQNR ")
