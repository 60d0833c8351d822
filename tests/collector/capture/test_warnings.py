"""The conditions that warn by default: against torch's gradients, and the codes that ml_dtypes rounds gains to."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from binade.collector import Recorder, Watch, instrument
from binade.collector.models.model import GPTModel
from binade.data.run.events import Event, EventKind, read_events
from binade.quant.blocks import look
from tests.collector.capture.test_step import SHAPE
from tests.collector.instrumented import rows
from tests.collector.small_model import build, loss


class Net(nn.Sequential):
    """Two linear layers, and what torch's own hooks see of them."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False))
        self.seen: dict[tuple[int, str], bool] = {}  # whether a tensor has a value that is not zero
        for number in (0, 2):
            self[number].register_forward_hook(self._watch(number))

    def _watch(self, number: int):
        def see(_: nn.Module, args: tuple, y: torch.Tensor) -> None:
            self.seen[number, "input"] = bool(args[0].any())
            y.register_hook(lambda gradient: self.seen.update({(number, "grad_output"): bool(gradient.any())}))

        return see

    def lost(self) -> list[int]:
        """The layers whose weight has an all-zero gradient for which their input and its gradient are no reason."""
        return [
            number
            for number in (0, 2)
            if (g := self[number].weight.grad) is not None and not g.any()
            if self.seen[number, "input"] and self.seen[number, "grad_output"]
        ]


def zero_out(net: Net, x: torch.Tensor) -> None:
    nn.init.zeros_(net[2].weight)


def zero_in(net: Net, x: torch.Tensor) -> None:
    x.zero_()


def freeze(net: Net, x: torch.Tensor) -> None:
    net[0].weight.requires_grad_(False)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("watch", [{}, {"watch": "every step"}], ids=["recorded", "watched"])
@pytest.mark.parametrize(
    ("scale", "change", "warned"),
    [(1, bool, False), (1e-12, bool, True), (1, zero_out, False), (1, zero_in, False), (1, freeze, False)],
    ids=["sound", "all flushed", "output projection is zero", "input is zero", "frozen"],
)
def test_a_gradient_that_only_rounding_explains(tmp_path, watch, scale, change, warned):
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 32)
    change(net, *() if change is bool else (x,))
    with Recorder(tmp_path, scores=(), watch=Watch(**watch)) as recorder, instrument(net, "hifp8", recorder):
        for _ in range(2):
            (net(x).sum() * scale).backward()
            recorder.step()
    assert bool(net.lost()) == warned
    events = [event for event in read_events(recorder.writer.directory) if event.trigger == "zero_result > 0"]
    assert len(events) == warned  # once, in two steps
    for event in events:
        assert (event.kind, event.iteration) == (EventKind.WARNING, 0)
        assert (
            net.lost() == [2] and event.text.endswith("and 1 more") and "layer3" in event.place
        )  # the other layer's gradient of its output is zero


def test_an_expert_without_tokens_is_no_failure(tmp_path):
    model = GPTModel(SHAPE)
    model.initialize(0)
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        model(torch.tensor([[5, 7]])).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".experts." in name}
    assert any(g is None or not g.any() for g in gradients.values())
    assert not read_events(recorder.writer.directory)


CODES = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp8_e5m2": ml_dtypes.float8_e5m2, "mxfp4": ml_dtypes.float4_e2m1fn}


@pytest.mark.parametrize("fmt", CODES)
@pytest.mark.parametrize(("low", "high"), [(0.01, 3), (0.9, 1), (1, 1)])
def test_the_share_of_the_last_bin(fmt: str, low: float, high: float):
    code = CODES[fmt]
    gain = np.random.default_rng(0).uniform(low, high, (4, 32)).astype(np.float32)
    most = float(ml_dtypes.finfo(code).max)
    scale = 2.0 ** (np.floor(np.log2(gain.max(1, keepdims=True))) - np.floor(np.log2(most)))
    expected = ((gain / scale).clip(-most, most).astype(code).astype(float) == most).mean()
    assert look(torch.from_numpy(gain.reshape(-1)), fmt).last_bin == expected
    assert expected == 1 or (low, fmt) != (0.9, "mxfp8")


def events_of_gains(root, gain: float, **options) -> list[Event]:
    model = build(layers=1)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.constant_(parameter, gain)
    with (
        Recorder(root, tensors=("norm_gain",), scores=("mxfp8", "nvfp4"), **options) as recorder,
        instrument(model, "bf16", recorder),
    ):
        for _ in range(2):
            loss(model).backward()
            recorder.step()
    return read_events(recorder.writer.directory)


def test_gains_in_the_last_bin_warn_once_and_change_no_row(tmp_path):
    (event,) = events_of_gains(tmp_path / "on", 0.95)
    assert (event.place, event.trigger) == ("layer1.input_layernorm norm_gain in mxfp8", "last_bin > 50%")
    assert "last_bin is 1, above 0.5" in event.text and event.text.endswith("and 2 more")
    assert not events_of_gains(tmp_path / "one", 1.0)
    assert not events_of_gains(tmp_path / "off", 0.95, watch=Watch(warn=()))
    on, off = (
        rows(tmp_path / name, values=False).drop(columns=["captured", "run_id", "tensor_id"]) for name in ("on", "off")
    )
    assert len(on) == 6 and on.drop(columns=["path", "sha256"]).equals(off.drop(columns=["path", "sha256"]))
