"""Statistics of attention maps are of the pairs that the softmax sees, however a model masks the others."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, LlamaConfig

from binade.collector import Recorder, Watch, instrument
from binade.data.run.events import read_events
from tests.collector.instrumented import rows, value
from tests.collector.small_model import batch, build

HEADS, LENGTH, DIM = 4, 12, 8
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~CAUSAL.tril(-4)
PADDED = CAUSAL & (torch.arange(LENGTH) < torch.tensor([LENGTH, 7])[:, None])[:, None, None]  # [b, 1, s, t]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v [b, heads, s, d] and what is seen -> the context


def sdpa(q, k, v, see):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=see)


def causal(q, k, v, see):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def added(lowest: float) -> Attend:
    def attend(q, k, v, see):
        mask = torch.zeros(see.shape, dtype=q.dtype).masked_fill(~see, lowest)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def written(change: Callable[[Tensor, Tensor], Tensor]) -> Attend:
    return lambda q, k, v, see: change(q @ k.mT / math.sqrt(DIM), see).to(v.dtype) @ v


def with_bias(scores, see):
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    slopes = 0.5 ** torch.arange(1, HEADS + 1)
    biased = scores - distance * slopes[:, None, None]
    return (biased + torch.zeros(see.shape).masked_fill(~see, torch.finfo(torch.float32).min)).softmax(-1)


def capped(scores, see):
    return torch.softmax((30 * (scores / 30).tanh()).masked_fill(~see, -torch.inf), dim=-1, dtype=torch.float32)


def with_sink(scores, see):
    sinks = torch.zeros(HEADS, 1, 1).expand(len(scores), -1, LENGTH, 1)
    logits = torch.cat([scores.masked_fill(~see, -1e9), sinks], -1)
    return F.softmax(logits - logits.amax(-1, keepdim=True), dim=-1)[..., :-1]


def in_place(scores, see):
    return F.softmax(scores.masked_fill_(~see, -torch.inf), -1)


def by_hand(scores, see):
    weights = (scores - scores.amax(-1, keepdim=True)).exp() * see
    return weights / weights.sum(-1, keepdim=True)


def einsum(q, k, v, see):
    """The heads come after the queries."""
    scores = torch.einsum("bhqd,bhkd->bqhk", q, k) * DIM**-0.5
    hidden = ~see.expand(len(q), 1, LENGTH, LENGTH).transpose(1, 2)
    return torch.einsum("bqhk,bhkd->bhqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def baddbmm(q, k, v, see):
    mask = torch.zeros(see.shape).masked_fill(~see, -torch.inf).expand(len(q), HEADS, LENGTH, LENGTH).flatten(0, 1)
    probs = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=DIM**-0.5).softmax(-1)
    return torch.bmm(probs, v.flatten(0, 1)).unflatten(0, (-1, HEADS))


class Attention(nn.Module):
    def __init__(self, attend: Attend, groups: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, n * DIM, bias=False) for n in (HEADS, groups, groups))
        self.attend = attend

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))

    def forward(self, x: Tensor, see: Tensor) -> Tensor:
        return self.attend(*self.operands(x), see)


class Model(nn.Module):
    def __init__(self, attend: Attend, groups: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(attend, groups)])

    def forward(self, x: Tensor, see: Tensor) -> Tensor:
        return self.layers[0](x, see)


def with_a_large_key() -> Tensor:
    x = torch.randn(2, LENGTH, 32, generator=torch.Generator().manual_seed(1))
    x[:, -1] = 200 * torch.eye(32)[0]
    return x


def direct(model: nn.Module) -> None:
    """The last token has no query."""
    with torch.no_grad():
        model.layers[0].q.weight[:, 0] = 0


def check(root, attend: Attend, see: Tensor, groups: int = HEADS, recipe: str = "bf16") -> None:
    """A pair that is masked has by far the largest score, as of the last key, which no query but its own sees."""
    model, x = Model(attend, groups), with_a_large_key()
    direct(model)
    cores = () if attend in (sdpa, causal, grouped) or "added" in attend.__qualname__ else ("layers.0",)
    with Recorder(root, scores=()) as recorder, instrument(model, recipe, recorder, cores=cores, backend="torch"):
        model(x, see).square().sum().backward()
    with torch.no_grad():
        q, k, _ = model.layers[0].operands(x)
        scores = q @ k.repeat_interleave(HEADS // groups, 1).mT / math.sqrt(DIM)
    visible = see.expand(scores.shape)
    found = rows(root, module="core")
    assert visible.all() or scores.abs().max() > 4 * scores[visible].abs().max()
    for name in ("attention_scores", "attention_probs", "grad_scores"):
        row = found[found["tensor_name"] == name].iloc[0]
        assert (row["numel"], row["pairs_left_out"]) == (visible.sum(), (~visible).sum()), name
        assert row["nans"] == row["infs"] == 0
    if recipe != "bf16":
        return
    row = found[found["tensor_name"] == "attention_scores"].iloc[0]
    hand = scores[visible].double()
    assert [row["absmax"], row["mean"], row["std"]] == pytest.approx(
        [hand.abs().max().item(), hand.mean().item(), hand.std(correction=0).item()], rel=1e-4
    )
    probs = value(found, 1, "core", "attention_probs").reshape(-1)
    of_probs = found[found["tensor_name"] == "attention_probs"].iloc[0]
    assert of_probs["mean"] * of_probs["numel"] == pytest.approx(probs.double().sum().item(), rel=1e-5)
    assert set(found[~found["tensor_name"].isin(MAPS)]["pairs_left_out"].isna()) == {True}


MAPS = ("attention_scores", "attention_probs", "grad_scores")
FINFO = torch.finfo(torch.float32).min
WAYS = {
    "is_causal": (causal, CAUSAL),
    "bool": (sdpa, CAUSAL),
    "window": (sdpa, WINDOW),
    "padding": (sdpa, PADDED),
    "infinity": (added(-torch.inf), CAUSAL),
    "finfo": (added(FINFO), PADDED),
    "ten thousand": (added(-1e4), CAUSAL),
    "written": (written(lambda scores, see: scores.masked_fill(~see, -torch.inf).softmax(-1)), PADDED),
    "in place": (written(in_place), CAUSAL),
    "bias": (written(with_bias), CAUSAL),
    "cap": (written(capped), WINDOW),
    "sink": (written(with_sink), CAUSAL),
    "by hand": (written(by_hand), CAUSAL),
    "einsum": (einsum, PADDED),
    "baddbmm": (baddbmm, PADDED),
    "all": (sdpa, CAUSAL | True),
}


@pytest.mark.parametrize("way", WAYS)
def test_masked_pairs_are_counted_apart(tmp_path, way):
    check(tmp_path, *WAYS[way])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_masked_pairs_are_counted_apart_if_products_are_rounded(tmp_path, way):
    check(tmp_path, *WAYS[way], recipe="mxfp8")


def grouped(q, k, v, see):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=see, enable_gqa=True)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_heads_that_share_keys(tmp_path, recipe):
    check(tmp_path, grouped, PADDED, groups=2, recipe=recipe)


def test_queries_and_keys_of_other_lengths(tmp_path):
    """torch aligns a causal mask at the first key."""
    model, x = Model(lambda q, k, v, see: causal(q[:, :, :5], k, v, see)), torch.randn(2, LENGTH, 32)
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "bf16", recorder):
        model(x, CAUSAL).sum().backward()
    row = rows(tmp_path, tensor_name="attention_scores").iloc[0]
    assert (row["numel"], row["pairs_left_out"]) == (2 * HEADS * 15, 2 * HEADS * (5 * LENGTH - 15))


def test_rows_that_see_nothing_and_a_mask_of_nothing_at_all(tmp_path):
    see = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    model, x = Model(sdpa), torch.randn(2, LENGTH, 32)
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "bf16", recorder):
        model(x, see).sum().backward()
    row = rows(tmp_path, tensor_name="attention_scores").iloc[0]
    assert row["numel"] == 0 and math.isnan(row["absmax"])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_a_block_mask_and_a_bias(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[flex_attention.__module__], "_validate_device", lambda *_: None)

    def flex(q, k, v, see):
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 4), None, None, LENGTH, LENGTH, device="cpu")
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - 0.1 * (i - j), block_mask=mask)

    band = CAUSAL & ~CAUSAL.tril(-4)
    model, x = Model(flex), torch.randn(2, LENGTH, 32)
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "bf16", recorder):
        model(x, band).sum().backward()
    found = rows(tmp_path, module="core")
    for name in MAPS:
        assert found[found["tensor_name"] == name].iloc[0]["numel"] == 2 * HEADS * band.sum(), name


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_padded_batch_of_transformers(tmp_path, implementation):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes, attn_implementation=implementation)
    model = AutoModelForCausalLM.from_config(config)
    attention_mask = torch.ones(2, LENGTH, dtype=torch.long)
    attention_mask[1, 7:] = 0
    with Recorder(tmp_path, scores=()) as recorder, instrument(model, "bf16", recorder):
        model(torch.arange(2 * LENGTH).view(2, -1) % 64, attention_mask=attention_mask).logits.sum().backward()
    found = rows(tmp_path, module="core")
    for name in MAPS:
        assert found[found["tensor_name"] == name].iloc[0]["numel"] == 4 * PADDED.sum(), name


@pytest.mark.parametrize("recipe", ["bf16", "FA_mxfp8"])
def test_our_own_attention(tmp_path, recipe):
    model, (tokens, labels) = build(layers=1), batch()
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder, instrument(model, recipe, recorder, backend="torch"):
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    found = rows(tmp_path, module="core")
    for name in MAPS:
        row = found[found["tensor_name"] == name].iloc[0]
        *others, s, t = row["tensor"].shape
        assert (row["numel"], row["pairs_left_out"]) == tuple(
            math.prod(others) * n for n in (s * (s + 1) // 2, s * (s - 1) // 2)
        )
        visible = row["tensor"][..., torch.ones(s, t, dtype=torch.bool).tril()].double()
        assert row["std"] == pytest.approx(visible.std(correction=0).item(), rel=1e-4)


@pytest.mark.parametrize("recorded", ["watched", "in full"])
def test_a_trigger_sees_visible_pairs_alone(tmp_path, recorded):
    model, x = Model(sdpa), with_a_large_key()
    direct(model)
    with torch.no_grad():
        q, k, _ = model.layers[0].operands(x)
        largest = ((q @ k.mT)[..., CAUSAL] / math.sqrt(DIM)).abs().max().item()
    for factor in (0.99, 1.01):
        watch = Watch(
            "every 1 steps",
            trigger=(f"absmax > {factor * largest}",),
            stats="full" if recorded != "watched" else "basic",
        )
        root = tmp_path / str(factor)
        with Recorder(root, scores=(), watch=watch, tensors=("attention_scores",)) as recorder:
            with instrument(model, "bf16", recorder):
                model(x, CAUSAL).sum().backward()
        assert bool(read_events(recorder.writer.directory)) == (factor < 1)
