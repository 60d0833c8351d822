"""Tensors of subclasses in other people's training: states in 8 bits, nested sequences, expanded weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from binade import Catalog, Filter, Recorder, fake_quantize, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.errors import ConfigError
from tests.collector.instrumented import BOTH_WAYS
from tests.quant.test_memory import Wrapper


class Int8(Wrapper):
    """A state in INT8 with one scale, which implements what its optimizer uses."""

    def __init__(self, x: Tensor) -> None:
        self.put(x)

    def put(self, x: Tensor) -> None:
        self.scale = x.abs().max().clamp(min=1e-30) / 127
        self.held = (x / self.scale).round().to(torch.int8)

    def values(self) -> Tensor:
        return self.held.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not torch.ops.aten.copy_.default:
            return super().__torch_dispatch__(op, types, args, kwargs)
        args[0].put(args[1])
        return args[0]


class Readable(Int8):
    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.values()


class Adam8(torch.optim.Optimizer):
    def __init__(self, model: nn.Module, kind: type[Int8]) -> None:
        super().__init__(model.parameters(), {})
        self.kind = kind

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            moment = self.state[p].setdefault("exp_avg", self.kind(torch.zeros(p.shape)))
            moment.copy_(moment.values().lerp(p.grad, 0.1))
            p.sub_(1e-3 * moment.values().sign())


def train(root: Path, kind: type[Int8], recipe: str = "bf16") -> tuple[Catalog, Tensor]:
    """The index of a run, and the moment after the only recorded step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = Adam8(model, kind)
    recorder = Recorder(root, label="x", iterations=1, scores=(), measures=(), tensors=("exp_avg",))
    with recorder, instrument(model, recipe, recorder):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        return Catalog.open(root), optimizer.state[model[0].weight]["exp_avg"].values()


def test_a_state_of_eight_bits_is_recorded_as_what_it_stands_for(tmp_path: Path) -> None:
    _, moment = train(tmp_path, Readable)
    (row,) = Catalog.open(tmp_path).tensors(Filter(tensor_name=["exp_avg"])).itertuples()
    assert torch.equal(Catalog.open(tmp_path).load(row.tensor_id), moment)


def test_a_state_that_cannot_be_read_is_left_out_by_name(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"exp_avg of 0\.weight is not recorded: Int8 keeps"):
        train(tmp_path, Int8)


def test_a_state_of_eight_bits_is_rounded_or_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "state.toml"
    path.write_text('title = "s"\n[state]\nexp_avg = "fp8_e4m3(block=1x32)"\n')
    _, moment = train(tmp_path / "run", Readable, str(path))
    assert torch.equal(
        moment, Int8(fake_quantize(train(tmp_path / "other", Readable)[1], "fp8_e4m3(block=1x32)")).values()
    )
    with pytest.raises(InstrumentError, match=r"exp_avg of 0\.weight cannot be rounded"):
        train(tmp_path / "third", Int8, str(path))


def test_record_refuses_what_it_cannot_read(tmp_path: Path) -> None:
    with (
        Recorder(tmp_path, label="x", iterations=1) as recorder,
        pytest.raises(ConfigError, match="state cannot be recorded: Int8 keeps"),
    ):
        recorder.record("state", Int8(torch.ones(4, 4)), layer=1, module="up", operation="optimizer", phase="post")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.gelu(x))
        return x


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "te_delayed"])
@BOTH_WAYS
def test_nested_sequences_are_the_tokens_of_one_dense_sequence(tmp_path: Path, recipe: str, products: Any) -> None:
    parts = [torch.randn(5, 32), torch.randn(11, 32)]
    model = Layers()
    results = []
    for name, x in (("dense", torch.cat(parts)), ("nested", torch.nested.nested_tensor(parts, layout=torch.jagged))):
        model.zero_grad()
        recorder = Recorder(tmp_path / name, label="x", iterations=1, measures=())
        with recorder, instrument(model, recipe, recorder, products=products if x.is_nested else {}):
            y = model(x)
            y = y.values() if y.is_nested else y
            y.square().mean().backward()
        rows = Catalog.open(tmp_path / name).tensors(Filter()).sort_values(["layer_index", "tensor_name"])
        results.append((y, *(p.grad for p in model.parameters()), *rows[["absmax", "rms", "sqnr_db"]].to_numpy().T))
    for dense, nested in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(nested), torch.as_tensor(dense), equal_nan=True)


def test_nested_sequences_that_do_not_lie_one_after_the_other_are_refused(tmp_path: Path) -> None:
    model = Layers()
    x = torch.nested.nested_tensor([torch.randn(5, 32), torch.randn(11, 32)])
    with pytest.raises(InstrumentError, match=r"layers\.0 is called with a nested tensor"), instrument(model, "mxfp8"):
        model.layers[0](x)


def test_kernels_see_nested_sequences_that_do_not_lie_one_after_the_other(tmp_path: Path) -> None:
    parts = [torch.randn(5, 32), torch.randn(11, 32)]
    results = []
    for x in (torch.cat(parts), torch.nested.nested_tensor(parts)):
        layer = Layers().layers[0]
        layer.load_state_dict({"weight": torch.eye(32).roll(3, 0) * 1.7, "bias": torch.ones(32)})
        with instrument(layer, "mxfp8", products="kernel"):
            y = layer(x)
        (torch.cat(y.unbind()) if y.is_nested else y).square().sum().backward()
        results.append((torch.cat(y.unbind()) if y.is_nested else y, layer.weight.grad, layer.bias.grad))
    for dense, nested in zip(*results, strict=True):
        torch.testing.assert_close(nested, dense)


EXPANDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bmm": lambda x, w: torch.bmm(x, w.t().expand(len(x), -1, -1)),
    "transposed after": lambda x, w: x @ w.unsqueeze(0).expand(len(x), -1, -1).transpose(1, 2),
    "left": lambda x, w: torch.bmm(w.expand(len(x), -1, -1), x.mT).mT,
    "broadcast": lambda x, w: x @ w.t().unsqueeze(0),
}


class Expanding(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
        self.how, self.in_features, self.out_features = how, 32, 16

    def forward(self, x: Tensor) -> Tensor:
        return EXPANDED[self.how](x, self.weight) if self.how else F.linear(x, self.weight)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("how", EXPANDED)
def test_a_weight_that_is_expanded_over_a_batch_is_that_of_a_linear_layer(
    tmp_path: Path, how: str, recipe: str
) -> None:
    x, results = torch.randn(4, 32, 32), []
    for name in ("", how):
        model = nn.ModuleDict({"layer": Expanding(name)})
        model.forward = model["layer"].forward  # type: ignore[method-assign]
        root = tmp_path / (name or "linear")
        with Recorder(root, label="x", iterations=1, measures=()) as recorder, instrument(model, recipe, recorder):
            y = model["layer"](x)
            y.square().mean().backward()
        rows = Catalog.open(root).tensors(Filter()).sort_values("tensor_name")
        results.append((y, model["layer"].weight.grad, *rows[["absmax", "rms", "numel"]].to_numpy(float).T))
    for expected, given in zip(*results, strict=True):
        torch.testing.assert_close(torch.as_tensor(given), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_parametrization_that_multiplies_by_its_weight_is_no_product_of_the_model(tmp_path: Path) -> None:
    def gradients(root: Path | None, recipe: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = Layers()
        spectral_norm(model.layers[0])
        with Recorder(root or tmp_path, label="x", iterations=1, enabled=root is not None) as recorder:
            with instrument(model, recipe, recorder):
                model(torch.ones(4, 32)).square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers())

    assert all(map(torch.equal, gradients(tmp_path / "run", "bf16"), gradients(None, "bf16")))
    gradients(tmp_path / "rounded", "mxfp8")
    assert set(Catalog.open(tmp_path / "rounded").tensors(Filter()).layer_index) == {1, 2}


def test_a_model_may_get_its_values_after_it_was_instrumented(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Layers()
    with Recorder(tmp_path, label="x", iterations=1) as recorder, instrument(model, "mxfp8", recorder):
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(torch.ones(4, 32)).square().mean().backward()
    assert set(Catalog.open(tmp_path).tensors(Filter(tensor_name=["weight"])).absmax) == {1.0}


def test_complex_weights_are_refused_by_name(tmp_path: Path) -> None:
    model = nn.ModuleDict({"up": nn.Linear(8, 8), "filter": nn.Linear(8, 8, dtype=torch.complex64)})
    with (
        Recorder(tmp_path, label="x", iterations=1) as recorder,
        pytest.raises(InstrumentError, match=r"filter.* computes in complex64"),
        instrument(model, "bf16", recorder),
    ):
        pass
