"""A CUDA graph that captures an instrumented model: refused where its replays would record nothing or repeat random
numbers. On a CPU, torch is made to say that a graph captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from tests.quant.helpers import devices

pytestmark = pytest.mark.parametrize("device", devices())


@contextmanager
def capturing(device: str) -> Iterator[torch.cuda.CUDAGraph | None]:
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        yield None


def model_and_input(device: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(device)
    return model, torch.randn(16, 64, device=device)


def warm(model: nn.Module, x: Tensor) -> Tensor:
    """Compiles the kernels, on a stream of its own."""
    if not x.is_cuda:
        return model(x)
    others = torch.cuda.Stream()
    others.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(others):
        y: Tensor = model(x)
    torch.cuda.current_stream().wait_stream(others)
    return y


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8(rounding=stochastic)", "te_delayed"])
@pytest.mark.parametrize("records", [True, False], ids=["recorded", "not recorded"])
def test_only_what_is_the_same_in_each_pass_is_captured(tmp_path: Path, device: str, recipe: str, records: bool):
    model, x = model_and_input(device)
    with ExitStack() as contexts:
        recorder = contexts.enter_context(Recorder(tmp_path)) if records else None
        contexts.enter_context(instrument(model, recipe, recorder))
        expected = warm(model, x)
        if not records and recipe in ("bf16", "mxfp8"):
            with capturing(device) as graph:
                y = model(x)
            if graph:
                graph.replay()
            assert torch.equal(y, expected)
        else:
            with pytest.raises(InstrumentError, match="a CUDA graph captures"), capturing(device):
                model(x)


def test_a_graph_is_captured_when_recording_is_over(tmp_path: Path, device: str):
    model, x = model_and_input(device)
    with Recorder(tmp_path, iterations=1) as recorder, instrument(model, "mxfp8", recorder):
        warm(model, x)
        recorder.step()
        expected = warm(model, x)
        with capturing(device) as graph:
            y = model(x)
        if graph:
            graph.replay()
        assert torch.equal(y, expected)


def test_a_pass_between_recorded_iterations_is_not_captured(tmp_path: Path, device: str):
    model, x = model_and_input(device)
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder):
        with recorder.at(0, 0, record=False):
            warm(model, x)
            with pytest.raises(InstrumentError, match="CUDA graph"), capturing(device):
                model(x)
