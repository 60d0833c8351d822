"""Quantizing as part of a CUDA graph and of a compiled model; on a CPU the same assertions without a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from binade.collector.capture.instrument import instrument
from binade.quant import fake_quantize
from tests.quant.helpers import assert_same_bits, awkward, by_reference, devices

pytestmark = pytest.mark.slow

SPECS = (
    *("bf16", "hifp8", "hifp8(scale=amax8)", "fp8_e4m3", "fp8_e4m3(block=1x128)", "mxfp8", "mxfp4(scale=quest)"),
    *("nvfp4", "nvfp4(block=16x16)", "nvfp4(scale=4over6)", "nvfp4(scale=16over17)", "hif4"),
    "mxfp8(rounding=stochastic)",
)


def replayed(call: Callable[[Tensor], Tensor], first: Tensor, second: Tensor, device: str) -> Tensor:
    """call(second), on a GPU from a graph that was captured while call saw `first`."""
    if device == "cpu":
        return call(second)
    x = first.to(device)
    others = torch.cuda.Stream()
    others.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(others):
        call(x)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(others)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(x)
    x.copy_(second)
    graph.replay()
    return y


@pytest.mark.sampled(9)
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("spec", SPECS)
def test_graph(spec, device):
    first, second = (awkward((40, 264), seed=seed, specials=False) for seed in (1, 2))
    for dim in (-1, 0):
        got = replayed(lambda x: fake_quantize(x, spec, dim, backend="triton"), first, second, device)  # noqa: B023
        assert_same_bits(got, by_reference(second, spec, dim), second)


@pytest.mark.parametrize("device", devices())
def test_compiled_model(device):
    """Inductor compiles what is between the GEMMs on a GPU; ReLU is exact whoever computes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.ReLU(), nn.Linear(96, 32, bias=False)).to(device)
    x = torch.randn(16, 64, device=device)
    with instrument(model, "mxfp8", backend="triton"):
        expected = model(x)
    compiled = torch.compile(model, backend="inductor" if device == "cuda" else "eager")
    with instrument(compiled, "mxfp8", backend="triton"):
        assert torch.equal(compiled(x), expected)
    assert not torch.equal(compiled(x), expected)
