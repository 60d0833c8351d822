"""Transformer Engine's modules are watched. Without a GPU a stand-in with its interfaces (v2.9) is: its signatures,
attributes and parameter names are TE's, its products those of operands rounded to MXFP8 in functions of their own.

BINADE_TRANSFORMER_ENGINE is the directory of a checkout, whose source the stand-in's interfaces are compared with:
git clone -b v2.9 https://github.com/NVIDIA/TransformerEngine
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector import coverage, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.recipes.parse import parse_recipe
from binade.data.index.catalog import Catalog
from tests.collector.instrumented import CORE, LINEAR, Recorder, names, rounded, rows, state, value

pytestmark = pytest.mark.slow

WIDTH, HEADS, LENGTH = 64, 4, 8
MODULES = ("layernorm_qkv", "core_attention", "proj", "fc1")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return rounded(x, "mxfp8") @ rounded(weight, "mxfp8").t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Base(nn.Module):
    tp_size, tp_group, sequence_parallel = 1, None, False


class Linear(_Base):
    parallel_mode, fuse_wgrad_accumulation = None, False

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, return_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features) / 8)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.return_bias = return_bias

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        y = _Product.apply(inp, self.weight)
        y = y if self.bias is None or self.return_bias else y + self.bias
        return (y, self.bias) if self.return_bias else y


class LayerNormLinear(Linear):
    normalization, zero_centered_gamma, eps = "LayerNorm", False, 1e-5

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.layer_norm_weight = nn.Parameter(torch.rand(in_features))
        self.layer_norm_bias = nn.Parameter(torch.rand(in_features))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False) -> Any:
        shape = self.layer_norm_weight.shape
        return super().forward(F.layer_norm(inp, shape, self.layer_norm_weight, self.layer_norm_bias, self.eps))


class LayerNormMLP(_Base):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.fc1_weight = nn.Parameter(torch.zeros(ffn_hidden_size, hidden_size))
        self.fc2_weight = nn.Parameter(torch.zeros(hidden_size, ffn_hidden_size))

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        return inp


class GroupedLinear(_Base):
    parallel_mode, fuse_wgrad_accumulation = None, False

    def __init__(self, num_gemms: int, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.randn(out_features, in_features) / 8))

    def forward(self, inp: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Tensor:
        parts = enumerate(inp.split(m_splits))
        return torch.cat([_Product.apply(x, getattr(self, f"weight{i}")) for i, x in parts])


class UnfusedDotProductAttention(nn.Module):
    softmax_scale = 0.25

    def __init__(self, softmax_scale: float) -> None:
        super().__init__()


class DotProductAttention(_Base):
    cp_group, softmax_type, return_max_logit = None, "vanilla", False

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        *,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.attention_dropout, self.attn_mask_type, self.qkv_format = attention_dropout, attn_mask_type, qkv_format
        self.window_size = window_size or (-1, 0)
        self.unfused_attention = UnfusedDotProductAttention(0.25)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        *,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        core_attention_bias_type: str = "no_bias",
        inference_params: Any = None,
    ) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)
        return y.permute(2, 0, 1, 3).flatten(2)


KINDS = (Linear, LayerNormLinear, LayerNormMLP, GroupedLinear, DotProductAttention)


@pytest.fixture(scope="module")
def checkout() -> list[ast.Module]:
    """The source of the package, of its modules and of its attention."""
    directory = os.environ.get("BINADE_TRANSFORMER_ENGINE")
    if not directory:
        pytest.skip("BINADE_TRANSFORMER_ENGINE names no checkout of Transformer Engine")
    package = Path(directory, "transformer_engine", "pytorch")
    files = [package / "__init__.py", *package.glob("module/**/*.py"), *package.glob("attention/**/*.py")]
    return [ast.parse(file.read_text()) for file in files]


@pytest.mark.parametrize("kind", [*KINDS, UnfusedDotProductAttention])
def test_the_stand_in_has_the_interfaces_of_transformer_engine(checkout, kind):
    classes = {each.name: each for tree in checkout for each in tree.body if isinstance(each, ast.ClassDef)}
    exported = {each.name for node in checkout[0].body if isinstance(node, ast.ImportFrom) for each in node.names}
    assert kind not in KINDS or kind.__name__ in exported
    real = classes[kind.__name__]
    methods = {each.name: each.args for each in real.body if isinstance(each, ast.FunctionDef)}
    for name in vars(kind).keys() & {"__init__", "forward"}:
        theirs = [each.arg for each in methods[name].args]
        defaults = dict(zip(theirs[::-1], map(ast.unparse, methods[name].defaults[::-1]), strict=False))
        ours = inspect.signature(getattr(kind, name)).parameters.values()
        positional = [each.name for each in ours if each.kind is not each.KEYWORD_ONLY]
        assert positional == theirs[: len(positional)]
        given = {each.name: repr(each.default) for each in ours if each.default is not each.empty}
        assert given.items() <= defaults.items()
    required = [each for each in inspect.signature(kind).parameters.values() if each.default is each.empty]
    instance = kind(*(4 for _ in required))
    bases = [real, *(classes[name] for base in real.bases if (name := ast.unparse(base)) in classes)]
    nodes = [node for base in bases for node in ast.walk(base)]
    stored = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    texts |= {ast.unparse(node)[2:-1] for node in nodes if isinstance(node, ast.JoinedStr)}
    assert {re.sub(r"\d+$", "{i}", name) for name in instance._parameters} <= texts
    assert {*dir(instance)} - {*dir(nn.Module()), *instance._parameters} <= stored


@pytest.fixture(params=["stand-in", "transformer_engine"])
def te(request, monkeypatch) -> Iterator[Any]:
    if request.param == "transformer_engine":
        real = pytest.importorskip("transformer_engine.pytorch", reason="Transformer Engine is not installed")
        if not torch.cuda.is_available():
            pytest.skip("Transformer Engine needs a GPU")
        with torch.device("cuda"):
            yield real
        return
    package = ModuleType("transformer_engine.pytorch")
    for kind in KINDS:
        setattr(package, kind.__name__, kind)
        monkeypatch.setattr(kind, "__module__", "transformer_engine.pytorch")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    yield package


class Block(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.layernorm_qkv = te.LayerNormLinear(WIDTH, 3 * WIDTH)
        heads = {"attn_mask_type": "causal", "qkv_format": "sbhd", "attention_dropout": 0.0}
        self.core_attention = te.DotProductAttention(HEADS, WIDTH // HEADS, **heads)
        self.proj = te.Linear(WIDTH, WIDTH, return_bias=True)
        self.fc1 = te.GroupedLinear(2, WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [s, b, h]
        q, k, v = self.layernorm_qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        y, bias = self.proj(self.core_attention(q, k, v))
        return self.fc1((y + bias).flatten(0, 1), [10, 2 * LENGTH - 10])


class Model(nn.Module):
    def __init__(self, te: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(te)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def build(te: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(te)


def run(model: nn.Module, passes: int = 1) -> tuple[list[Tensor], dict[str, SimpleNamespace]]:
    """Results and gradients of passes that are all in flight at once, and what the first pass's modules saw."""
    seen: dict[str, SimpleNamespace] = {}
    block = model.layers[0]

    def hook(module: nn.Module, args: tuple, result: Any) -> None:
        y = result[0] if isinstance(result, tuple) else result
        each = seen.setdefault(next(n for n, m in block.named_children() if m is module), SimpleNamespace(x=args, y=y))
        if each.y is y:
            y.register_hook(lambda grad: setattr(each, "grad", grad))

    handles = [getattr(block, name).register_forward_hook(hook) for name in MODULES]
    results = []
    for each in range(passes):
        torch.manual_seed(each + 1)
        results.append(model(torch.randn(LENGTH, 2, WIDTH, requires_grad=True)))
    for y in results:  # the first first, as pipelines do
        y.square().sum().backward()
    for handle in handles:
        handle.remove()
    return [*results, *(p.grad for p in model.parameters())], seen


def test_what_transformer_engine_computes_is_recorded(te, tmp_path):
    plain, _ = run(build(te))
    model = build(te)
    before = state(model)
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder, instrument(model, None, recorder):
        recorded, seen = run(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    found = rows(tmp_path)
    sites = {"qkv": LINEAR - {"grad_input"}, "core": CORE, "proj": LINEAR, "fc1": LINEAR}
    assert {module: set(of) for (layer, module), of in names(found).items() if layer == 1} == sites
    block = model.layers[0]
    for name, module, weights in (
        ("proj", "proj", [block.proj.weight]),
        ("fc1", "fc1", [block.fc1.weight0, block.fc1.weight1]),
    ):
        of = {each: value(found, 1, module, each) for each in sites[module]}
        assert torch.equal(of["input"], seen[name].x[0].cpu())
        assert torch.equal(of["weight"], torch.cat(weights).detach().cpu())
        assert torch.equal(of["output"], seen[name].y.cpu())
        assert torch.equal(of["grad_output"], seen[name].grad.cpu())
        assert torch.equal(of["grad_weight"], torch.cat([w.grad for w in weights]).cpu())
    shape = block.layernorm_qkv.layer_norm_weight
    x = F.layer_norm(seen["layernorm_qkv"].x[0], shape.shape, shape, block.layernorm_qkv.layer_norm_bias, 1e-5)
    assert torch.allclose(value(found, 1, "qkv", "input"), x.cpu(), atol=1e-6)
    query, key, probs = (value(found, 1, "core", each) for each in ("query", "key", "attention_probs"))
    scores = (query @ key.mT * 0.25).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    assert torch.allclose(probs, scores.softmax(-1), atol=1e-6)
    context = seen["core_attention"].y.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
    assert torch.equal(value(found, 1, "core", "output"), context.cpu())
    with Catalog.open(tmp_path) as catalog:
        scored = set(catalog.scores()["tensor_id"])
    operands = ("input", "weight", "grad_output", "query", "key", "value")
    assert set(found[found["tensor_name"].isin(operands)]["tensor_id"]) <= scored
    assert state(model) == before


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:2 forward and backward passes")
def test_gradients_belong_to_their_pass(te, tmp_path):
    found = []
    for passes in (1, 2):
        model = build(te)
        with Recorder(tmp_path / str(passes)) as recorder, instrument(model, None, recorder):
            run(model, passes)
        found.append(rows(tmp_path / str(passes)))
    first, second = (value(found[1], 1, "proj", "grad_weight", micro_batch=each) for each in (0, 1))
    assert torch.allclose(first + second, model.layers[0].proj.weight.grad.cpu())
    for name in ("grad_output", "grad_weight"):
        for module in ("qkv", "fc1"):
            assert torch.equal(*(value(each, 1, module, name, micro_batch=0) for each in found))


def test_recipes_that_would_replace_its_kernels_are_refused(te):
    model = build(te)
    before = state(model)
    with pytest.raises(InstrumentError, match=r"layers\.0\.layernorm_qkv.* can only be recorded.*exclude=\['layers"):
        with instrument(model, "mxfp8"):
            pass
    with pytest.raises(InstrumentError, match=r"layers\.0\.proj \(Linear\) can only be recorded"):
        with instrument(model, "linear_mxfp8", exclude=["layers.0.l*"]):
            pass
    with instrument(model, "FA_mxfp8", exclude=["*.core_attention"]):
        pass
    assert state(model) == before
    assert {row.format for row in coverage(model, "mxfp8") if "only be recorded" in row.reason} == {""}
    flash = parse_recipe("bf16", softmax="flash")  # which its kernels decide
    assert {row.kind for row in coverage(model, flash) if "only be recorded" in row.reason} == {"DotProductAttention"}
    assert {row.recorded for row in coverage(model)} == {"layer*.qkv", "layer*.core", "layer*.proj", "layer*.fc1"}


def test_what_cannot_be_computed_again_is_refused(te, tmp_path):
    with pytest.raises(InstrumentError, match=r"^the model \(LayerNormMLP\) cannot be intercepted: .*internally"):
        instrument(te.LayerNormMLP(WIDTH, WIDTH)).__enter__()
    model = te.DotProductAttention(HEADS, WIDTH // HEADS, window_size=(4, 0))
    x = torch.randn(LENGTH, 2, HEADS, WIDTH // HEADS)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        with pytest.raises(InstrumentError, match=r"attn_mask_type='padding', window_size=\(4, 0\), which"):
            model(x, x, x, attn_mask_type="padding")
