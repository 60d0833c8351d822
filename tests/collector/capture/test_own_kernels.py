"""Layers whose products cannot be replaced: they are watched from outside or refused by name, never rounded by half."""

from __future__ import annotations

import warnings
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from binade.collector import coverage, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.data.run.directory import list_runs
from binade.data.run.events import read_events
from binade.quant import fake_quantize
from tests.collector.instrumented import BOTH_WAYS, LINEAR, Recorder, linear_products, names, rows, same, value

FP8 = torch.float8_e4m3fn


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Half(nn.Linear):
    def forward(module, x: Tensor) -> Tensor:  # noqa: N805  # as in code that does not say `self`
        return Multiply.apply(x, module.weight)


class Quantized(nn.Linear):
    """Rounds its operands in a function of its own, as microxcaling's Linear does."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            x, w = x.to(FP8).to(x.dtype), w.to(FP8).to(w.dtype).mul(1.0)
            ctx.save_for_backward(x, w)
            return F.linear(x, w)

        backward = Multiply.backward

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x, self.weight)


class Scaled(nn.Module):
    """Multiplies in a kernel of its own, as nanochat's Float8Linear does, and is no nn.Linear."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            one = torch.ones(())
            return torch._scaled_mm(x.to(FP8), w.to(FP8).t(), scale_a=one, scale_b=one, out_dtype=x.dtype)

        backward = Multiply.backward

    def __init__(self, size: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = size, outputs
        self.weight = nn.Parameter(nn.Linear(size, outputs).weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.Function.apply(x, self.weight)


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), kind(32, 16, bias=False)).bfloat16()


X = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    y = model(X)
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Half, Quantized, Scaled])
@BOTH_WAYS
def test_a_layer_with_kernels_of_its_own_is_recorded_whole_and_not_changed(
    tmp_path: Path, kind: type[nn.Module], products: Any
):
    model = build(kind)
    alone = step(model)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder, products=products):
        assert same(alone, step(model))
        assert same(alone, step(model))
    found = rows(tmp_path)
    assert names(found[found.micro_batch == 1]) == {
        (1, "linear"): dict.fromkeys(LINEAR - {"grad_input"}, 1),
        (2, "linear"): dict.fromkeys(LINEAR, 1),
    }
    found = found[found.micro_batch == 0]
    assert torch.equal(value(found, 2, "linear", "output"), alone[0])
    assert torch.equal(value(found, 2, "linear", "grad_weight"), alone[-1])
    assert torch.equal(value(found, 2, "linear", "weight"), model[1].weight)
    assert torch.equal(value(found, 2, "linear", "input"), model[0](X))
    assert torch.equal(value(found, 2, "linear", "grad_input"), value(found, 1, "linear", "grad_output"))


@pytest.mark.parametrize("kind", [Quantized, Scaled])
@BOTH_WAYS
def test_what_rounds_by_itself_is_not_rounded_and_that_is_said(tmp_path: Path, kind: type[nn.Module], products: Any):
    model, text = build(kind), "where products='kernel' does not see it" if products else "in kernels of its own"
    with pytest.warns(UserWarning, match=rf"1 \({kind.__name__}\) multiplies {text}, so it is recorded"):
        with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch", products=products):
            y = step(model)[0]
    hidden = fake_quantize(X, "mxfp8") @ fake_quantize(model[0].weight, "mxfp8").t()
    assert torch.equal(y, model[1](hidden))
    found = rows(tmp_path)
    assert found.groupby("layer_index")["quant_type"].unique().map(list).to_dict() == {1: ["mxfp8"], 2: ["bf16"]}
    assert found[found.layer_index == 2]["format"].isna().all()
    (run,) = list_runs(tmp_path)[0]
    assert any(text in str(event) for event in read_events(run.directory))
    covered = coverage(model, "mxfp8", batch=X)
    assert {row.kind: row.format for row in covered} == {"Linear": "mxfp8", kind.__name__: "bf16"}


class Held(Tensor):
    """A weight that holds its values in another tensor, and multiplies in a function of its own, as torchao's do."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, requires_grad=held.requires_grad)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> Held:
        return Held(inner["held"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return Quantized.Function.apply(args[0], args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.held if isinstance(x, Held) else x, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return Held(result) if func is torch.ops.aten.detach.default else result


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@BOTH_WAYS
def test_a_weight_that_multiplies_itself_is_watched(tmp_path: Path, recipe: str, products: Any):
    model = build(nn.Linear)
    values = model[1].weight.detach().clone()
    model[1].weight = nn.Parameter(Held(values))
    alone = step(model)
    with warnings.catch_warnings(), Recorder(tmp_path) as recorder:
        warnings.simplefilter("ignore" if recipe == "mxfp8" else "error")
        with instrument(model, recipe, recorder, backend="torch", products=products):
            results = step(model)
    assert same(alone, results) == (recipe == "bf16")
    found = rows(tmp_path)
    assert set(found[found.layer_index == 2].quant_type) == {"bf16"}
    assert set(found[found.layer_index == 2].tensor_name) == LINEAR
    assert torch.equal(value(found, 2, "linear", "weight"), values)
    assert [row.format for row in coverage(model, "mxfp8", batch=X)] == ["mxfp8", "bf16"]


class Fused(nn.Module):
    """Multiplies by the weights of its layers in a function of its own, as Unsloth's feed-forward does."""

    def __init__(self, size: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(size, outputs, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return Multiply.apply(x, self.up.weight)


class Attending(nn.Module):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def __init__(self, *_: int, bias: bool = False) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        assert F.scaled_dot_product_attention  # the name by which the core is found
        return self.Function.apply(x[None])[0][:, :16]


@pytest.mark.parametrize("kind", [Half, Fused, Attending])
def test_half_a_product_is_refused_by_name(kind: type[nn.Module]):
    model = build(kind)
    with pytest.raises(InstrumentError, match=rf"1 \({kind.__name__}\) .*exclude=\['1'\]"):
        with instrument(model, "mxfp8", backend="torch"):
            step(model)
    with instrument(model, "mxfp8", exclude=["1*"], backend="torch"):
        step(model)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        a, b = x @ gate.t(), F.linear(x, up)
        hidden = F.silu(a) * b
        ctx.save_for_backward(x, a, b, hidden, gate, up, down)
        return torch.matmul(hidden, down.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, a, b, hidden, gate, up, down = ctx.saved_tensors
        grad_hidden, sigmoid = grad @ down, a.sigmoid()
        grad_a, grad_b = grad_hidden * b * sigmoid * (1 + a * (1 - sigmoid)), grad_hidden * F.silu(a)
        return grad_a @ gate + grad_b @ up, grad_a.t() @ x, grad_b.t() @ x, grad.t() @ hidden


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((16, 32), (16, 32), (32, 16)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def weights_of(*layers: nn.Linear) -> list[Tensor]:
    return [layer.weight for layer in layers]


def fused(self: FeedForward, x: Tensor) -> Tensor:
    return SwiGLU.apply(x, *weights_of(self.gate, self.up, self.down))


def test_a_module_that_multiplies_by_its_layers_weights_in_a_function_is_recorded_as_it_is(tmp_path: Path):
    """Its forward is replaced on the instance, and reads the weights by way of another function, as Unsloth's does."""
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), nn.Linear(16, 16))
    plain = deepcopy(model)
    model[0].forward = MethodType(fused, model[0])
    x = torch.randn(8, 16)

    def results(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        y = model(x)
        y.square().mean().backward()
        return [y.detach(), *(p.grad.clone() for p in model.parameters())]

    alone = results(model)
    with Recorder(tmp_path / "fused") as recorder, instrument(model, "bf16", recorder):
        assert same(alone, results(model))
    with Recorder(tmp_path / "plain") as recorder, instrument(plain, "bf16", recorder):
        results(plain)
    found, expected = rows(tmp_path / "fused"), rows(tmp_path / "plain")
    inside = {"input", "weight", "output", "grad_weight"}
    for module, tensors in {"gate": inside, "up": inside, "down": inside | {"grad_output"}, "linear": LINEAR}.items():
        assert set(found[found.module == module].tensor_name) == tensors
        for tensor in tensors:
            index = 2 if module == "linear" else 1
            pair = (value(each, index, module, tensor) for each in (found, expected))
            torch.testing.assert_close(*pair)
    with pytest.raises(InstrumentError, match=r"0 \(FeedForward\) multiplies by .* exclude=\['0'\]"):
        with instrument(model, "mxfp8", backend="torch"):
            results(model)
    with instrument(model, "mxfp8", exclude=["0"], backend="torch"):
        results(model)


class InOtherOrder(SwiGLU):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, a, b, hidden, gate, up, down = ctx.saved_tensors
        grad_hidden, sigmoid = grad @ down, a.sigmoid()
        grad_a, grad_b = grad_hidden * b * sigmoid * (1 + a * (1 - sigmoid)), grad_hidden * F.silu(a)
        of_down, of_gate, of_up = grad.t() @ hidden, grad_a.t() @ x, grad_b.t() @ x
        return grad_b @ up + grad_a @ gate, of_gate, of_up, of_down


@pytest.mark.parametrize("function", [SwiGLU, InOtherOrder])
def test_kernels_see_what_a_function_multiplies_by_the_weights_of_layers(tmp_path: Path, function: Any):
    """Two of them have one input. The same gradients and rows as of the layers themselves, up to the order of sums."""
    x, results = torch.randn(8, 16, requires_grad=True), []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(FeedForward(), nn.Linear(16, 16))
        if is_fused:
            model[0].forward = lambda x, own=model[0]: function.apply(x, *weights_of(own.gate, own.up, own.down))
        with Recorder(tmp_path / str(is_fused)) as recorder:
            with instrument(model, "bf16", recorder, products="kernel" if is_fused else {}):
                model(x).square().mean().backward()
        found = rows(tmp_path / str(is_fused)).sort_values(["layer_index", "module", "tensor_name"])
        results.append(([*found.tensor, *(p.grad for p in model.parameters())], names(found)))
    assert results[0][1] == results[1][1]
    for plain, in_function in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(in_function, plain)
    with Recorder(tmp_path / "rounded") as recorder:
        with instrument(model, "mxfp8", recorder, backend="torch", products="kernel"):
            model(x).square().mean().backward()
    for module in ("gate", "up", "down"):
        linear_products(rows(tmp_path / "rounded"), 1, module)


class Grouped(nn.Linear):
    """Two products of halves of the weight's rows, as in DeepSeek-V4."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.view(2, -1, self.in_features).transpose(1, 2)
        return torch.bmm(torch.stack([x, -x]), w).transpose(0, 1).flatten(1)


class Clamped(nn.Module):
    """Multiplies by what it makes of a layer's weight, in a method that is not `forward`, as in Gemma 3n."""

    def __init__(self, size: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.coefs = nn.Linear(size, outputs, bias=bias)

    def correct(self, x: Tensor) -> Tensor:
        return F.linear(x, self.coefs.weight.clamp(-0.1, 0.1))


class Calling(nn.Module):
    def __init__(self, size: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.inner = Clamped(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.correct(x)


class Named(nn.Module):
    """Its weights have names of their own, as in DeepSeek-V4's hyper-connections and Gemma 3's projector; a table and
    the decay of a state-space model are no weights of products."""

    def __init__(self) -> None:
        super().__init__()
        self.fn, self.projection, self.decay, self.table, self.bias = (
            nn.Parameter(torch.randn(*size)) for size in ((8, 16), (8, 16), (8, 16), (4, 16), (4, 16))
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.linear(x, self.fn.float())
        y = torch.matmul(hidden, self.projection) + self.table[:1]
        decay = -torch.exp(self.decay)
        return y * decay.sum() + self.bias[0]


@BOTH_WAYS
def test_a_weight_of_any_name_is_the_weight_of_a_layer_where_it_is_multiplied(tmp_path: Path, products: Any):
    torch.manual_seed(0)
    model, x = nn.Sequential(Named()), torch.randn(4, 16)
    covered = {(row.paths, row.recorded): row.format for row in coverage(model, "mxfp8")}
    assert covered == {("*", "layer*.fn"): "mxfp8", ("*", "layer*.projection"): "mxfp8"}
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch", products=products):
        y = model(x)
        y.sum().backward()
    q, own = partial(fake_quantize, fmt="mxfp8"), model[0]
    hidden = q(x) @ q(own.fn).t()
    expected = (q(hidden) @ q(own.projection.t()).t() + own.table[:1]) * -torch.exp(own.decay).sum() + own.bias[0]
    torch.testing.assert_close(y, expected)
    found = rows(tmp_path)
    assert torch.equal(value(found, 1, "projection", "weight"), own.projection.t())


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize(
    "copied",
    [lambda w: w.detach().t(), lambda w: w.data.t(), lambda w: w.double().float().t()],
    ids=["detach", "data", "cast"],
)
@BOTH_WAYS
def test_a_copy_of_a_weight_of_any_name_is_rounded(copied: Any, frozen: bool, products: Any):
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16), requires_grad=not frozen)

        def forward(self, x: Tensor) -> Tensor:
            return x @ copied(self.w)

    model, x = nn.Sequential(Copying()), torch.randn(4, 16)
    with instrument(model, "mxfp8", backend="torch", products=products), torch.set_grad_enabled(frozen):
        y = model(x)
    assert torch.equal(y, fake_quantize(x, "mxfp8") @ fake_quantize(model[0].w, "mxfp8").t())


@pytest.mark.parametrize("kind", [Grouped, Calling])
@BOTH_WAYS
def test_products_of_what_is_made_of_one_weight_are_intercepted(tmp_path: Path, kind: type[nn.Module], products: Any):
    model = build(kind)
    alone = step(model)
    with Recorder(tmp_path) as recorder:
        with instrument(model, "bf16", recorder, products=products):
            assert same(alone, step(model))
        with instrument(model, "mxfp8", recorder, backend="torch", products=products):
            y = step(model)[0]
    q = partial(fake_quantize, fmt="mxfp8")
    hidden = q(X) @ q(model[0].weight).t()
    if kind is Grouped:
        first, second = (
            q(x) @ q(w).t() for x, w in zip((hidden, -hidden), model[1].weight.view(2, 8, 32), strict=True)
        )
        expected = torch.cat([first, second], dim=1)
    else:
        expected = q(hidden) @ q(model[1].inner.coefs.weight.clamp(-0.1, 0.1)).t()
    assert torch.equal(y, expected)
    found = rows(tmp_path, values=False)
    assert set(found[(found.layer_index == 2) & (found.quant_type == "mxfp8")].tensor_name) == LINEAR


def test_without_a_batch_coverage_promises_no_rounding_by_layers_with_functions_of_their_own():
    class Plain(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    model = nn.ModuleDict({"own": Half(16, 16), "quantized": Quantized(16, 16), "plain": Plain(16, 16)})
    covered = {row.paths: row for row in coverage(model, "mxfp8")}
    for path in ("own", "quantized"):
        assert covered[path].format == "bf16" and "coverage(..., batch=...) shows" in covered[path].reason
    assert (covered["plain"].format, covered["plain"].reason) == ("mxfp8", "")


def test_all_refusals_of_a_pass_are_one_error_whose_patterns_can_be_pasted():
    class Layers(nn.Sequential):
        def __init__(self) -> None:
            parts = (
                nn.ModuleDict({"own": Half(16, 16), "fused": Fused(16, 16), "up": nn.Linear(16, 16)}) for _ in "123"
            )
            super().__init__(*parts)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer["up"](layer["fused"](layer["own"](x)))
            return x

    model, x = Layers(), torch.randn(4, 16)
    patterns = ["*.own", "*.fused"]
    with pytest.raises(InstrumentError) as refused, instrument(model, "mxfp8", backend="torch"):
        model(x)
    assert str(refused.value).endswith(f"exclude={patterns}")
    with instrument(model, "mxfp8", exclude=patterns, backend="torch"):
        model(x)
    before = torch.get_rng_state()
    covered = {row.paths: row for row in coverage(model, "mxfp8", batch=(x,))}
    assert torch.equal(before, torch.get_rng_state())
    assert covered["*.own"].count == covered["*.fused"].count == covered["*.up"].count == 3
    assert [covered[path].format for path in ("*.own", "*.fused", "*.up")] == ["", "", "mxfp8"]
    assert "multiplies by up.weight in the forward method" in covered["*.fused.up"].reason


class Packed(nn.Module):
    """As the layers of GPTQ and AWQ: codes of four bits, eight to an int32, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features = self.out_features = 32
        self.register_buffer("qweight", torch.randint(-(2**31), 2**31, (4, 32)).int())

    @property
    def decoded(self) -> Tensor:
        codes = torch.stack([(self.qweight >> 4 * i) & 15 for i in range(8)], 1).reshape(32, 32)
        return (codes.float() - 7.5) / 40

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.decoded


class FourBits(nn.Linear):
    """As bitsandbytes' Linear4bit: a linear layer of torch whose weight holds codes."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)
        self.weight = nn.Parameter(torch.randint(0, 256, (512, 1)).byte(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = torch.cat([self.weight & 15, self.weight >> 4], 1).reshape(32, 32)
        return F.linear(x, (codes.float() - 7.5) / 40)


class OneByte(nn.Linear):
    """As transformers' FP8Linear."""

    def __init__(self) -> None:
        super().__init__(32, 32, bias=False)
        self.weight = nn.Parameter(self.weight.detach().to(FP8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * 0.5)


@pytest.mark.parametrize("kind", [Packed, FourBits, OneByte])
@BOTH_WAYS
def test_a_base_of_codes_is_recorded_at_its_boundary(tmp_path: Path, kind: type[nn.Module], products: Any) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"base": kind(), "lora_A": nn.Linear(32, 4)})
    x = torch.randn(8, 32, requires_grad=True)

    def train() -> list[Tensor]:
        y = model["base"](x)
        y.retain_grad()
        (y.square().mean() + model["lora_A"](x).mean()).backward()
        own, x.grad = x.grad, None
        return [x.detach(), y.detach(), y.grad, own]

    plain = train()
    assert [row.recorded for row in coverage(model, "bf16") if row.paths == "base"] == ["layer0.base"]
    with (
        Recorder(tmp_path, tensors=LINEAR, scores=()) as recorder,
        instrument(model, "bf16", recorder, products=products),
    ):
        assert all(map(torch.equal, train(), plain))
    base = rows(tmp_path, module="base")
    assert sorted({*base.tensor_name} - {"weight"}) == ["grad_input", "grad_output", "input", "output"]
    for name, expected in zip(("input", "output", "grad_output"), plain, strict=False):
        assert torch.equal(value(base, 0, "base", name), expected)


@pytest.mark.parametrize("kind", [Packed, FourBits])
def test_a_recipe_that_rounds_codes_is_refused_by_name(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"base": kind(), "lora_A": nn.Linear(32, 4)})
    text = rf"base \({kind.__name__}\) can only be recorded, because its weight is already quantized"
    with pytest.raises(InstrumentError, match=text), instrument(model, "mxfp8"):
        pass
    (row,) = (row for row in coverage(model, "mxfp8") if row.paths == "base")
    assert (row.recorded, "already quantized" in row.reason) == ("", True)
    with instrument(model, "mxfp8", exclude=["base"]):
        model["base"](torch.randn(8, 32))
