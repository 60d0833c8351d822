"""Attention that its module does not compute by a call of its own: in functions, FlexAttention, and products."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import DebertaV2Config, DebertaV2Model

from binade.collector import coverage, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from tests.collector.instrumented import CORE, Recorder, names, rows, same, score_products, value

pytestmark = pytest.mark.slow

HEADS, LENGTH, DIM = 2, 8, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [b, s, heads, d] -> [b, s, heads, d]


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return (causal(q @ k.mT / math.sqrt(DIM)) @ v).transpose(1, 2)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * DIM**-0.5
    return torch.einsum("bhqk,bkhd->bqhd", causal(scores), v)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(len(q), -1, -1)
    probs = mask.baddbmm(batch1=q, batch2=k.mT, alpha=DIM**-0.5).softmax(-1)
    return torch.bmm(probs, v).unflatten(0, (-1, HEADS)).transpose(1, 2)


flash = SimpleNamespace(attend=by_sdpa)  # as nanochat has it


def through_a_namespace(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash.attend(q, k, v)


class Attention(nn.Module):
    def __init__(self, attend: Attend | None = None) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        y = self.attend(q, k, v) if self.attend else through_a_namespace(q, k, v)
        return self.proj(y.flatten(2))


def build(attend: Attend | None) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": Attention(attend)})])})
    model.forward = lambda x: model.layers[0].attn(x)
    return model


def run(model: nn.Module) -> list[Tensor]:
    x = torch.randn(2, LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(1))
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("attend", "cores"),
    [(None, ()), (by_sdpa, ()), *((each, ("*.attn",)) for each in (by_products, by_einsum, by_baddbmm))],
    ids=["namespace", "function", "products", "einsum", "baddbmm"],
)
def test_attention_is_found_and_its_products_are_those_of_its_operands(tmp_path, attend, cores):
    plain = run(build(attend))
    with Recorder(tmp_path / "bf16") as recorder, instrument(model := build(attend), "bf16", recorder, cores=cores):
        assert same(run(model), plain)
    model = build(attend)
    assert ("layer*.core", "mxfp8, bf16") in {(r.recorded, r.format) for r in coverage(model, "FA_mxfp8", cores=cores)}
    with Recorder(tmp_path / "mxfp8") as recorder:
        with instrument(model, "mxfp8", recorder, cores=cores, backend="torch"):
            quantized = run(model)
    assert not torch.equal(quantized[0], plain[0])
    found = rows(tmp_path / "mxfp8")
    assert names(found)[1, "core"] == dict.fromkeys(CORE, 1)
    if attend is not by_baddbmm:  # whose scores have a mask added
        score_products(found, 1, DIM**-0.5)
    with instrument(model := build(by_sdpa), "mxfp8", backend="torch"):
        assert (run(model)[0] - quantized[0]).norm() < 1e-2 * quantized[0].norm()
    other = run_recorded(tmp_path / "other", by_sdpa)  # what torch's own attention takes and gives
    recorded = rows(tmp_path / "bf16")
    gradients = ("grad_scores", "grad_query", "grad_key", "grad_value")
    for name in ("query", "key", "value", "attention_probs", "output", *gradients):
        ours, theirs = value(recorded, 1, "core", name), value(other, 1, "core", name)
        assert (ours.flatten() - theirs.flatten()).norm() < 1e-5 * theirs.norm(), name


def run_recorded(root, attend: Attend):
    with Recorder(root) as recorder, instrument(model := build(attend), "bf16", recorder):
        run(model)
    return rows(root)


def by_flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flex_attention(q, k, v, block_mask=mask).transpose(1, 2)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(tmp_path, monkeypatch):
    """torch refuses its gradients on a CPU before it calls the operator, which has them."""
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        run(build(by_flex))
    monkeypatch.setattr(sys.modules[flex_attention.__module__], "_validate_device", lambda *_: None)
    plain = run(build(by_flex))
    for recipe in ("bf16", "mxfp4"):
        results, recorded = [], []
        for attend in (by_flex, by_sdpa):
            root = tmp_path / recipe / attend.__name__
            with Recorder(root) as recorder, instrument(model := build(attend), recipe, recorder, backend="torch"):
                results.append(run(model))
            recorded.append(rows(root))
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*results, strict=True))
        assert all(map(partial(torch.allclose, atol=1e-5), results[0], plain)) == (recipe == "bf16")
        for name in CORE:
            assert torch.allclose(*(value(each, 1, "core", name) for each in recorded), atol=1e-5), name


def test_a_linear_recipe_refuses_no_attention(tmp_path):
    hidden = [lambda q, k, v: by_products(q, k, v)]

    class Unseen(Attention):
        def forward(self, x: Tensor) -> Tensor:
            self.attend = None if x.dim() == 2 else hidden[0]
            return super().forward(x)

    model = Unseen()
    x = torch.randn(2, LENGTH, HEADS * DIM)
    with Recorder(tmp_path) as recorder, instrument(model, "linear_mxfp8", recorder, backend="torch"):
        with pytest.warns(UserWarning, match=r"did not call F\.scaled_dot_product_attention"):
            model(x).sum().backward()
    assert {module for _, module in names(rows(tmp_path))} == {"qkv", "proj"}
    with pytest.raises(InstrumentError, match=r"did not call|cores=\['"), instrument(model, "mxfp8", backend="torch"):
        model(x)
    with pytest.raises(InstrumentError, match=r"cores='\*\.nope' matches no module"):
        instrument(model, "mxfp8", cores=["*.nope"]).__enter__()


def test_a_core_with_more_products_than_two_is_refused_when_it_is_only_recorded_too(tmp_path):
    """DeBERTa's attention multiplies by positions as well: what is recorded would not be QKᵀ and PV."""
    config = DebertaV2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=64, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        share_att_key=True, type_vocab_size=0,
    )  # fmt: skip
    model, x = DebertaV2Model(config), torch.arange(24).view(2, 12)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder, cores=["*.attention.self"]):
        with pytest.raises(InstrumentError, match="made more than two products of its own"):
            model(input_ids=x)
