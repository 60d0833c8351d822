"""Training loops set torch's default dtype (Lightning's bf16-true): formats compute the same bits under any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from binade import quant
from binade.quant.blocks import look
from binade.quant.error_causes import error_causes
from binade.quant.formats import FORMATS
from binade.quant.metrics import score
from binade.quant.specs import Spec
from binade.quant.summary import summarize

SPECS = (
    *FORMATS,
    *(f"{name}(scale={rule})" for name, fmt in FORMATS.items() for rule in fmt.scale_rules),
    *("nvfp4(block=16x16)", "mxfp4(rounding=stochastic)", "nvfp4(hadamard=16)", "mxfp8(center=tokens)"),
)


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


def results(x: Tensor, spec: str) -> tuple[list[bytes], list[float]]:
    """What is computed of a tensor in a format: the bits rounded along both axes, and the numbers that are sums."""
    rounded = [quant.fake_quantize(x, spec, dim=dim, backend="torch") for dim in (-1, 0)]
    usage, blocks, causes = quant.usage(x, spec), look(x, Spec.of(spec)), error_causes(x, Spec.of(spec), -1)
    summary = summarize(x)
    exact = [*(q.contiguous().view(torch.uint8).numpy() for q in rounded), usage.code_counts, summary.counts]
    compared = quant.compare(x, rounded[0]).values()
    return [values.tobytes() for values in exact], [
        *vars(score(x, spec)).values(), *vars(blocks.sums).values(), *causes.shares, *compared, summary.rms,
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_default_dtype(default: torch.dtype, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator) * torch.exp2(3 * torch.randn(64, 1, generator=generator))
    x = x.to(dtype)
    expected = {spec: results(x, spec) for spec in SPECS}
    torch.set_default_dtype(default)
    for spec in SPECS:
        exact, sums = results(x, spec)
        assert exact == expected[spec][0], spec
        # The order of sums depends on where torch allocates, which shows in the last bits of float64.
        assert sums == pytest.approx(expected[spec][1], rel=1e-9, abs=1e-12, nan_ok=True), spec
