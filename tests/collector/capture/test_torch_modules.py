"""Instrumenting plain torch modules: nothing changes that should not, all is recorded, nothing is missed in silence."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from binade import collector
from binade.collector import Watch, coverage, instrument
from binade.collector.capture.adapters import torch_modules
from binade.collector.capture.adapters.layer import InstrumentError
from binade.data.run.directory import list_runs
from tests.collector.instrumented import (
    BOTH_WAYS,
    CORE,
    FORWARD_LINEAR,
    LINEAR,
    Recorder,
    linear_products,
    names,
    rows,
    same,
    score_products,
    state,
    train,
    value,
)

pytestmark = pytest.mark.slow

HIDDEN, HEADS, LENGTH, LAYERS = 32, 2, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [b, s, h]
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down_proj = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down_proj(F.relu(self.up(x), inplace=True))


class Decoder(nn.Module):
    """recompute: whether blocks are checkpointed, and if so by which kind."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.recompute = recompute

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return x @ self.embed.weight.t()


def tokens_of(micro_batch: int) -> Tensor:
    return torch.randint(50, (2, LENGTH + 1), generator=torch.Generator().manual_seed(micro_batch))


def loss(model: nn.Module, micro_batch: int) -> Tensor:
    tokens = tokens_of(micro_batch)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def build(recompute: bool | None = None) -> Decoder:
    torch.manual_seed(0)
    return Decoder(recompute)


EXPECTED = {
    **{(layer, word): LINEAR for layer in (1, 2) for word in ("qkv", "proj", "up", "fc2")},
    **{(layer, "core"): CORE for layer in (1, 2)},
}


def counts(each: int, expected: dict[tuple[int, str], set[str]] = EXPECTED) -> dict:
    return {site: dict.fromkeys(of_site, each) for site, of_site in expected.items()}


KINDS = pytest.mark.parametrize("recompute", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])


@pytest.mark.sampled(2)
@KINDS
def test_recording_changes_no_bit(tmp_path, recompute):
    plain = train(build(recompute), loss, micro_batches=2)
    model = build(recompute)
    before = state(model)
    with Recorder(tmp_path, max_bytes=0) as recorder, instrument(model, None, recorder):
        recorded = train(model, loss, micro_batches=2, after=recorder.step)
    assert same(recorded, plain)
    assert state(model) == before
    found = rows(tmp_path, values=False)
    assert names(found) == counts(2 * 2)
    assert found.groupby(["iteration", "micro_batch"]).size().to_dict() == {
        (iteration, micro): sum(map(len, EXPECTED.values())) for iteration in (0, 1) for micro in (0, 1)
    }
    assert set(found["quant_type"]) == {"bf16"}
    assert set(found["recomputed"]) == {recompute is not None}


@pytest.mark.sampled(1)
@KINDS
def test_mxfp8_products_are_those_of_the_recorded_operands(tmp_path, recompute):
    model = build(recompute)
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        train(model, loss, steps=1)
    found = rows(tmp_path)
    assert names(found) == counts(1)
    for layer in (1, 2):
        linear_products(found, layer, "proj")
        block = build().blocks[layer - 1]
        for module, linear in (("qkv", block.attention.qkv_proj), ("up", block.up), ("fc2", block.down_proj)):
            linear_products(found, layer, module, linear.bias)
        score_products(found, layer, (HIDDEN // HEADS) ** -0.5)


@pytest.mark.thorough
def test_quantized_losses_are_the_same_recorded_recomputed_or_not(tmp_path):
    runs = []
    for recompute in (None, True, False):
        for recorded in (False, True):
            model = build(recompute)
            recorder = Recorder(tmp_path / f"{recompute}", enabled=recorded)
            with recorder, instrument(model, "mxfp8", recorder, backend="torch"):
                runs.append(train(model, loss, after=recorder.step))
    assert all(same(run, runs[0]) for run in runs)
    assert not same(runs[0], train(build(), loss))


def test_passes_of_a_model_that_is_one_layer_are_counted(tmp_path):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        with torch.no_grad():
            model(torch.ones(1, 8))
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
    found = rows(tmp_path, values=False, tensor_name="output")
    assert list(found["iteration"]) == [0, 1] and set(found["operation"]) == {"forward"}


def test_an_evaluation_is_recorded_on_request(tmp_path):
    model = build(True).eval()
    with Recorder(tmp_path, evaluation=True) as recorder, torch.no_grad():
        with instrument(model, "mxfp8", recorder, backend="torch"):
            loss(model, 0)
    assert names(rows(tmp_path)) == counts(
        1,
        {
            site: CORE & {n for n in CORE if "grad" not in n} if site[1] == "core" else FORWARD_LINEAR
            for site in EXPECTED
        },
    )
    assert set(rows(tmp_path)["recomputed"]) == {False}


@torch.no_grad()
def estimate_loss(model: nn.Module) -> None:
    """As nanoGPT does, before the first step and then every few."""
    model.eval()
    for micro_batch in (7, 8):
        loss(model, micro_batch)
    model.train()


@pytest.mark.thorough
@pytest.mark.parametrize("evaluation", [False, True])
def test_training_is_recorded_though_evaluation_comes_first(tmp_path, alone, evaluation):
    model = build(True)
    with Recorder(tmp_path, micro_batches=1, evaluation=evaluation) as recorder, instrument(model, None, recorder):
        for _ in range(2):
            estimate_loss(model)
            train(model, loss, steps=1, micro_batches=2, after=recorder.step)
    found = rows(tmp_path)
    trained = found[found["operation"] != "evaluation"]
    assert names(trained[trained["iteration"] == 0]) == names(trained[trained["iteration"] == 1]) == counts(1)
    first = trained[trained["iteration"] == 0]
    assert torch.equal(value(first, 1, "qkv", "input"), value(alone[0], 1, "qkv", "input"))
    evaluated = found[found["operation"] == "evaluation"]
    assert set(evaluated["micro_batch"]) == ({0} if evaluation else set())
    assert len(evaluated) == 2 * evaluation * sum(not name.startswith("grad") for e in EXPECTED.values() for name in e)


def test_a_reentrant_checkpoint_around_the_model_is_training(tmp_path):
    """Its first pass runs without gradients, as an evaluation does."""
    model = nn.Sequential(nn.Linear(8, 8))
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        checkpoint(model, torch.ones(2, 8, requires_grad=True), use_reentrant=True).sum().backward()
    found = rows(tmp_path)
    assert set(found["tensor_name"]) == LINEAR and set(found["operation"]) == {"forward", "backward"}


def test_a_run_of_evaluations_alone_says_so(tmp_path):
    model = build().eval()
    recorder = Recorder(tmp_path)
    recorder.__enter__()
    with instrument(model, None, recorder):
        loss(model, 0), loss(model, 1)
    with pytest.warns(UserWarning, match="nothing was recorded: all 2 forward passes ran in eval mode"):
        recorder.__exit__(None, None, None)


def test_evaluations_between_steps_that_are_not_recorded_are_no_run_of_evaluations(tmp_path, recwarn):
    model = build()
    with collector.Recorder(tmp_path, iterations=0, watch=Watch(find_nan=True)) as recorder:
        with instrument(model, "bf16", recorder):
            loss(model, 0).backward()
            with torch.no_grad():
                loss(model.eval(), 1)
    assert not [str(warning.message) for warning in recwarn if "eval mode" in str(warning.message)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[pd.DataFrame]:
    """What is recorded of each of three micro-batches in a pass of its own, of a model that recomputes nothing."""

    def recorded(micro_batch: int) -> pd.DataFrame:
        model, path = build(), tmp_path_factory.mktemp("alone")
        with Recorder(path) as recorder, instrument(model, None, recorder):
            loss(model, micro_batch).backward()
        return rows(path)

    return list(map(recorded, range(3)))


@pytest.mark.thorough
def test_a_recomputed_pass_belongs_to_its_own_micro_batch(tmp_path, alone):
    """Several forward passes before their backward passes, as in a pipeline."""
    model = build(True)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        losses = [loss(model, micro_batch) for micro_batch in range(3)]
        for value_ in losses:
            value_.backward()
    found = rows(tmp_path)
    assert names(found) == counts(3)
    for micro_batch, one in enumerate(alone):
        for name in ("input", "grad_output", "grad_weight"):
            assert torch.equal(
                value(found, 2, "up", name, micro_batch=micro_batch), value(one, 2, "up", name)
            )  # fmt: skip


@pytest.mark.thorough
@KINDS
@pytest.mark.parametrize("order", ["one backward pass", "the first without one", "after an evaluation"])
def test_gradients_belong_to_the_pass_that_they_are_of(tmp_path, alone, recompute, order):
    model = build(recompute)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        if order == "after an evaluation":
            with torch.no_grad():
                loss(model, 0)
        losses = [loss(model, micro_batch) for micro_batch in (0, 1)]
        if order == "one backward pass":
            (losses[0] + losses[1]).backward()
        else:
            losses[1].backward()
    found = rows(tmp_path)
    passes = {1: 1}  # micro-batch of the data to that of the rows
    passes |= {0: 0} if order == "one backward pass" else {}
    gradients = found[found["tensor_name"] == "grad_output"]
    assert set(gradients["micro_batch"]) == set(passes.values())
    for data, micro_batch in passes.items():
        one = alone[data]
        for name in ("grad_output", "grad_weight", "grad_input"):
            assert torch.equal(value(found, 2, "up", name, micro_batch=micro_batch), value(one, 2, "up", name)), name
    repeated = set() if recompute is None else set(passes.values())
    if recompute is not None:
        assert set(found[found["recomputed"]]["micro_batch"]) == repeated


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bias", [True, False])
def test_one_vector_is_as_a_matrix_of_one_row(tmp_path, bias):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 32, bias=bias)), torch.randn(32, requires_grad=True)
    for recipe in ("linear_bf16", "mxfp8"):
        with Recorder(tmp_path / recipe) as recorder, instrument(model, recipe, recorder, backend="torch"):
            vector, matrix = model(x), model(x[None])
            vector.sum().backward(), matrix.sum().backward()
        assert torch.equal(vector, matrix[0])
        found = rows(tmp_path / recipe)
        for name in LINEAR:
            first, second = (value(found, 1, "linear", name, micro_batch=each) for each in (0, 1))
            assert torch.equal(first.reshape(second.shape), second), name


def test_counts_are_limited_by_iterations_and_micro_batches(tmp_path):
    model = build()
    layers, states = {name: each for name, each in state(model).items() if name}, []

    def after() -> None:
        recorder.step()
        states.append({name: each for name, each in state(model).items() if name} == layers)

    with Recorder(tmp_path, iterations=2, micro_batches=1, max_bytes=0) as recorder, instrument(model, None, recorder):
        train(model, loss, steps=4, micro_batches=2, after=after)
    assert names(rows(tmp_path, values=False)) == counts(2)
    assert states == [False, True, True, True]  # layers of which nothing is recorded any more are left alone


class ModelError(RuntimeError):
    pass


@pytest.mark.parametrize("where", ["inside", "in the model"])
def test_puts_the_model_back_after_an_exception(where):
    model = build()
    before = state(model)
    stop = model.blocks[1].norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(ModelError()))
    with pytest.raises(ModelError), instrument(model, "mxfp8", backend="torch"):
        if where == "inside":
            raise ModelError
        loss(model, 0)
    stop.remove()
    assert state(model) == before
    assert torch.overrides._get_current_function_mode() is None
    assert torch.isfinite(loss(model, 0))


def test_a_bias_and_autocast_are_those_of_torch(tmp_path):
    """In the format of the operands themselves nothing is rounded: what differs could only be the way to compute."""
    for context in (torch.autocast("cpu", enabled=False), torch.autocast("cpu", torch.bfloat16)):
        outputs = []
        for recipe in (None, "linear_bf16"):
            model = build()
            with context, instrument(model, recipe):
                value_ = loss(model, 0)
            value_.backward()
            outputs.append([value_.detach(), *(p.grad for p in model.parameters())])
        assert same(*outputs)
    with torch.autocast("cpu", torch.bfloat16), Recorder(tmp_path) as recorder:
        for recipe in ("mxfp8", "bf16"):
            model = build()
            with instrument(model, recipe, recorder, backend="torch"):
                loss(model, 0).backward()
    assert set(rows(tmp_path)["dtype"]) == {"bfloat16"}


class TestRefusals:
    """A module that is not intercepted is named."""

    def refused(self, model: nn.Module, match: str, recipe: str = "mxfp8", **options) -> None:
        before = state(model)
        with pytest.raises(InstrumentError, match=match), instrument(model, recipe, backend="torch", **options):
            model(torch.randn(3, 4, 8))
        assert state(model) == before

    def test_multihead_attention(self):
        model = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True))
        self.refused(
            model, r"1\.self_attn \(MultiheadAttention\) cannot be intercepted: it computes its products itself"
        )
        with instrument(model, "linear_mxfp8", exclude=["1.self_attn"], backend="torch"):
            model(torch.randn(3, 4, 8))

    def test_scripted_and_recurrent_modules(self):
        self.refused(nn.Sequential(torch.jit.script(nn.Linear(8, 8))), r"it is compiled")
        self.refused(nn.Sequential(nn.LSTM(8, 8)), r"0 \(LSTM\) cannot be intercepted: a recurrent network")

    def test_a_weight_used_behind_its_module(self):
        class Sly(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(8, 8)
                self.late = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return self.late(x) @ next(self.inner.parameters()).to(torch.float64).t().float()

        self.refused(nn.Sequential(Sly()), r"0 \(Sly\) computes a product with 0\.inner\.weight by \w+ that is not")
        with instrument(model := nn.Sequential(Sly()), "mxfp8", exclude=["0"], backend="torch"):
            model(torch.randn(3, 4, 8))

    @pytest.mark.parametrize(
        "copied",
        [
            lambda w: w.to(torch.bfloat16).float().t(),
            lambda w: w.detach().t(),
            lambda w: w.data.t(),
            lambda w: torch.stack([w, w])[1].t(),
            lambda w: F.normalize(w).t(),
        ],
        ids=["cast", "detach", "data", "stack", "normalize"],
    )
    @pytest.mark.parametrize("how", ["frozen", "no_grad", "reentrant"])
    def test_a_copy_of_a_weight_without_a_gradient(self, copied, how):
        class Sly(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.late = nn.Linear(8, 8)
                self.w = nn.Parameter(torch.randn(8, 8), requires_grad=how != "frozen")

            def product(self, x: Tensor) -> Tensor:
                w = self.w  # written as `copied(self.w)`, it would be found, and its product replaced
                return self.late(x) @ copied(w)

            def forward(self, x: Tensor) -> Tensor:
                if how == "reentrant":
                    return checkpoint(self.product, x.requires_grad_(), use_reentrant=True)
                with torch.set_grad_enabled(how != "no_grad"):
                    return self.product(x)

        self.refused(nn.Sequential(Sly()), r"0 \(Sly\) computes a product with 0\.w by \w+ that is not")

    @pytest.mark.parametrize(
        "product",
        [
            lambda x, w: torch.inner(x, w),
            lambda x, w: torch.mv(w, x[0, 0]),
            lambda x, w: torch.addmv(x[0, 0], w, x[0, 0]),
            lambda x, w: torch.dot(w.flatten()[:8], x[0, 0]),
            lambda x, w: torch.linalg.matmul(x, w),
            lambda x, w: torch.linalg.multi_dot([x[0], w, w]),
            lambda x, w: torch.chain_matmul(x[0], w),
        ],
        ids=["inner", "mv", "addmv", "dot", "matmul", "multi_dot", "chain_matmul"],
    )
    def test_products_by_other_names(self, product):
        class Sly(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.late = nn.Linear(8, 8)
                self.w = nn.Parameter(torch.randn(8, 8))

            def forward(self, x: Tensor) -> Tensor:
                return product(self.late(x), self.w)

        self.refused(nn.Sequential(Sly()), r"0 \(Sly\) computes a product with 0\.w by \w+ that is not")

    def test_a_model_that_is_instrumented_already(self):
        model = build()
        with instrument(model, "mxfp8", backend="torch"):
            inside = loss(model, 0)
            with pytest.raises(InstrumentError, match="is already instrumented: exit that `with` block first"):
                instrument(model, "mxfp4", backend="torch").__enter__()
            assert torch.equal(loss(model, 0), inside)

    def test_a_method_that_was_replaced_meanwhile(self):
        model = build()
        block = instrument(model, "mxfp8", backend="torch")
        block.__enter__()
        theirs = model.blocks[0].up.forward
        model.blocks[0].up.forward = lambda x: theirs(x)
        with pytest.raises(InstrumentError, match=r"Linear\.forward was replaced in the instrumented model"):
            block.__exit__(None, None, None)
        del model.blocks[0].up.forward
        assert torch.equal(loss(model, 0), loss(build(), 0))  # all others were put back

    def test_attention_written_out(self):
        class Written(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                return (self.q(x) @ x.mT).softmax(-1) @ x

        self.refused(nn.Sequential(Written()), r"0 \(Written\) computes a product of activations", recipe="FA_mxfp8")
        with instrument(model := nn.Sequential(Written()), "linear_mxfp8", backend="torch"):
            model(torch.randn(3, 4, 8))

    def test_a_linear_layer_with_a_forward_of_its_own(self):
        class Twice(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return 2 * super().forward(x)

        class Silent(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return torch.einsum("bsi,oi->bso", x, self.weight)

        self.refused(
            nn.Sequential(Silent(8, 8)),
            r"0 \(Silent\) did not multiply by its weight with a function .*exclude=\['0'\]",
        )
        model, x = nn.Sequential(Twice(8, 8)), torch.randn(3, 4, 8)
        with instrument(model, "linear_bf16"):
            assert torch.equal(model(x), 2 * F.linear(x, model[0].weight, model[0].bias))
        with instrument(model, "linear_mxfp4", backend="torch"):
            assert not torch.equal(model(x), 2 * F.linear(x, model[0].weight, model[0].bias))

    def test_a_function_that_attends_for_its_module(self):
        def attend(x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

        class Outsourcing(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return attend(super().forward(x))

        self.refused(nn.Sequential(Outsourcing(8, 8)), r"0 \(Outsourcing\) computes .* scaled_dot_product_attention")

    def test_a_module_that_stopped_attending(self):
        class Sometimes(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.dim() == 3 else F.scaled_dot_product_attention(x, x, x)

        model = nn.Sequential(nn.Linear(8, 8), Sometimes())
        self.refused(model, r"1 \(Sometimes\) did not call F\.scaled_dot_product_attention")

    def test_patterns_leave_out_what_is_refused_and_nothing_else(self):
        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell, self.a = nn.RNN(8, 8), nn.Linear(8, 8)
                self.inner = nn.ModuleDict({"cell": nn.Linear(8, 8)})

        model = nn.Sequential(Nested(), nn.Linear(8, 8), nn.LSTM(8, 8))
        with pytest.raises(InstrumentError) as refused:
            instrument(model, "mxfp8").__enter__()
        # "*.cell" would match 0.inner.cell, and "*" everything.
        assert str(refused.value).endswith("To leave them out on purpose: exclude=['0.cell', '2']")

    def test_nothing_to_instrument_and_unknown_paths(self):
        self.refused(nn.LayerNorm(8), "LayerNorm has no layer to instrument")
        self.refused(nn.Linear(8, 8), "exclude='nope' matches no module of Linear", exclude=["nope"])


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "blind"])
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "grouped"])
def test_the_answered_attention_is_torchs(mask, groups):
    """Quantized to float32's own values (bf16 operands of a product given in bf16 are not rounded), it is torch's
    attention up to the order of sums."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, length, 8, generator=generator, requires_grad=True)
        for heads, length in ((4, 5), (groups, 7), (groups, 7))
    )
    given = {
        "none": {},
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(2, 1, 5, 7, generator=generator) > 0.3},
        "float": {"attn_mask": torch.randn(5, 7, generator=generator), "scale": 0.3},
        "blind": {"attn_mask": torch.arange(5)[:, None].expand(5, 7) > 1},
    }[mask]

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups != 4, **given)

    def run(recipe: str | None) -> list[Tensor]:
        for x in (q, k, v):
            x.grad = None
        with instrument(core := Core(), recipe, backend="torch"):
            y = core(q, k, v)
        y.square().sum().backward()
        return [y.detach(), *(x.grad.clone() for x in (q, k, v))]

    # FP16 holds these values to 2^-11: near, and certainly computed by the answered path.
    for ours, theirs in zip(run("fp16"), run(None), strict=True):
        assert torch.isfinite(ours).all()
        assert not torch.equal(ours, theirs)
        assert (ours - theirs).norm() < 2**-9 * theirs.norm()


class TestEnvironment:
    @pytest.mark.thorough
    def test_names_recipe_root_and_switch(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))
        monkeypatch.setenv("CUSTOM_QUANT_TYPE", "hifp8")
        model = build()
        with Recorder() as recorder, instrument(model, recorder=recorder, backend="torch"):
            loss(model, 0).backward()
        assert set(rows(tmp_path / "runs")["quant_type"]) == {"hifp8"}
        with Recorder() as recorder, instrument(model, "linear_mxfp8", recorder, backend="torch"):
            loss(model, 0).backward()
        assert set(rows(tmp_path / "runs")["recipe"]) == {"hifp8", "linear_mxfp8"}

    @pytest.mark.parametrize("word", ["0", "false", "OFF"])
    def test_switched_off_nothing_is_written_and_all_else_works(self, tmp_path, monkeypatch, word):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", word)
        model, recording = build(), build()
        with Recorder(tmp_path) as recorder, instrument(recording, "mxfp8", recorder, backend="torch"):
            off = train(recording, loss, after=recorder.step)
        assert list_runs(tmp_path)[0] == [] and not os.listdir(tmp_path)
        with instrument(model, "mxfp8", backend="torch"):
            assert same(off, train(model, loss))

    def test_a_word_that_is_neither_is_refused(self, monkeypatch):
        monkeypatch.setenv("TENSOR_SAVE_ENABLED", "maybe")
        with pytest.raises(ValueError, match="TENSOR_SAVE_ENABLED='maybe' is neither on nor off"):
            Recorder()


def test_skipped_and_captured_layers_are_chosen_by_site(tmp_path: Path):
    model = build()
    with Recorder(tmp_path) as recorder:
        with instrument(model, "mxfp8", recorder, backend="torch", skip="first", capture="[.]core"):
            loss(model, 0).backward()
    found = rows(tmp_path)
    assert set(found["module"]) == {"core"}
    assert found.groupby("layer_index")["quant_type"].unique().map(list).to_dict() == {1: ["bf16"], 2: ["mxfp8"]}


def test_two_branches_with_the_same_names_are_told_apart(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"left": nn.ModuleList([Block()]), "right": nn.ModuleList([Block()])})
    model.forward = lambda x: model["left"][0](x) + model["right"][0](x)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        model(torch.randn(2, 4, HIDDEN)).sum().backward()
    found = rows(tmp_path)
    assert {"core", "right.core", "up", "right.up"} <= set(found["module"])
    assert set(found[found["module"].str.endswith("core")]["layer_type"]) == {"attention"}


def test_a_copied_model_is_not_disturbed():
    model = build()
    twin = copy.deepcopy(model)
    with instrument(model, "mxfp4", backend="torch"):
        inside = loss(model, 0)
        assert torch.equal(loss(twin, 0), loss(build(), 0))
    assert not torch.equal(inside, loss(model, 0))


def test_a_copy_made_inside_is_a_model_of_its_own():
    model = build()
    before = state(model)
    with instrument(model, "mxfp4", backend="torch"):
        twin = copy.deepcopy(model)
    assert state(model) == before
    assert torch.equal(loss(twin, 0), loss(build(), 0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(loss(twin, 0), loss(build(), 0))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("module.layers.3._orig_mod.mlp.up_proj", "layer4.up"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.self_attn.q_proj", "layer1.q"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer", "layer1.q"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.mine", "layer1.q.lora_A.mine"),
        ("bert.encoder.layer.2.attention.self.query", "layer3.q"),
        ("bert.encoder.layer.2.attention.output.dense", "layer3.proj"),
        ("bert.encoder.layer.2.intermediate.dense", "layer3.fc1"),
        ("bert.encoder.layer.2.output.dense", "layer3.fc2"),
        ("transformer.h.5.attn.c_proj", "layer6.proj"),
        ("transformer.h.5.mlp.c_proj", "layer6.fc2"),
        ("layers.3.attention.wq", "layer4.q"),
        ("layers.3.attention.wo", "layer4.proj"),
        ("layers.3.feed_forward.w2", "layer4.fc2"),
        ("model.layers.0.attn.Wqkv", "layer1.qkv"),
        ("model.layers.0.mlp.Wo", "layer1.fc2"),
        ("decoder.block.2.layer.0.SelfAttention.o", "layer3.proj"),
        ("decoder.block.2.layer.2.DenseReluDense.wi_0", "layer3.gate"),
        ("decoder.block.2.layer.2.DenseReluDense.wo", "layer3.fc2"),
        ("gpt_neox.layers.1.attention.dense", "layer2.proj"),
        ("distilbert.transformer.layer.0.attention.q_lin", "layer1.q"),
        ("model.layers.0.block_sparse_moe.experts.7.w2", "layer1.expert7.fc2"),
    ],
)
def test_usual_paths_have_the_same_words(path: str, expected: str):
    assert torch_modules.site(path)[0].name == expected


class Tied(nn.Module):
    def __init__(self, name: str, tied: bool) -> None:
        super().__init__()
        self.table, self.fc1 = nn.Embedding(40, 32), nn.Linear(32, 32)
        self.add_module(name, nn.Linear(32, 40, bias=False))
        self.head = getattr(self, name)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc1(self.table(x)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "tied", "is_head"), [("out", True, True), ("lm_head", False, True), ("out", False, True)]
)
def test_the_head_of_a_plain_model_stays_as_it_is(tmp_path: Path, name: str, tied: bool, is_head: bool):
    found = {}
    for head in (False, True):
        model = Tied(name, tied)
        with Recorder(tmp_path / f"head {head}") as recorder, instrument(model, "linear_mxfp8", recorder, head=head):
            model(torch.arange(40)[None])
        found[head] = set(rows(tmp_path / f"head {head}")["module"])
    plain = {"fc1", "out"}
    assert found == ({False: {"fc1"}, True: {"fc1", "head"}} if is_head else {False: plain, True: plain})


def test_coverage_lists_what_is_recorded_and_what_is_left(tmp_path: Path):
    model = nn.ModuleDict({"body": build(), "conv": nn.Conv1d(2, 2, 1), "rnn": nn.LSTM(8, 8)})
    before = state(model)
    found = coverage(model, "FA_mxfp8", skip="first", exclude=["*.down_proj"])
    assert state(model) == before
    assert {row.paths: row.reason for row in found if not row.recorded} == {
        "body.embed": "embedding",
        "body.blocks.*.norm": "not a product",
        "body.blocks.*.down_proj": "excluded",
        "conv": "convolution",
        "rnn": "a recurrent network's products cannot be intercepted",
    }
    core = [row for row in found if row.recorded == "layer*.core"]
    assert [(row.count, row.format, row.reason) for row in core] == [(1, "bf16", "skip"), (1, "mxfp8, bf16", "")]
    with_weights = sum(bool(module._parameters) for module in model.modules())
    assert sum(row.count for row in found) == with_weights + 2  # the cores have none
    assert str(found).count("\n") == len(found) + 1


class Compiled:
    """A back end that counts its graphs' runs, and changes no bit: it runs them as they are."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        self.graphs += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph.forward(*arguments)

        return run


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["model", "model, called before", "module.compile", "blocks", "later", "at"])
def test_what_is_compiled_is_recorded_eagerly_and_compiled_elsewhere(tmp_path: Path, how: str):
    plain = train(build(), loss, steps=4)
    torch._dynamo.reset()
    counted = Compiled()
    raw = build()

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=counted)

    model = compiled(raw) if how.startswith(("model,", "at")) or how == "model" else raw
    if how == "model, called before":
        loss(model, 0)
    if how == "module.compile":
        raw.compile(backend=counted)
    if how == "blocks":
        raw.blocks = nn.ModuleList(map(compiled, raw.blocks))
    before = counted.runs
    recorder = Recorder(tmp_path, iterations=1)
    seen: list[int] = []
    with recorder, instrument(raw if how == "later" else model, None, recorder):
        model = compiled(raw) if how == "later" else model
        if how == "at":
            found = train_at(model, recorder, seen, counted)
        else:
            found = train(model, loss, steps=4, after=lambda: seen.append(counted.runs - before))
        assert torch._dynamo.explain(raw.forward)(tokens_of(0)[:, :-1]).graph_break_count == 0
    assert same(found, plain)
    assert names(rows(tmp_path)) == counts(1)
    graphs = LAYERS if how == "blocks" else 1
    assert seen[0] == 0 and seen[-1] - seen[-2] == graphs  # recorded eagerly, compiled afterwards
    assert counted.graphs == (1 if how == "blocks" else graphs)  # once: two blocks share their code


def test_a_compiled_model_is_quantized_as_it_would_be_otherwise():
    model = build()
    with instrument(model, "mxfp8", backend="torch"):
        expected = loss(model, 0)
    compiled = torch.compile(model, backend=Compiled())
    with instrument(compiled, "mxfp8", backend="torch"):
        assert torch.equal(loss(compiled, 0), expected)
    assert not torch.equal(loss(compiled, 0), expected)


def train_at(model: nn.Module, recorder: Recorder, seen: list[int], counted: Compiled) -> list:
    """As `train` of 4 steps, of which the first is recorded."""
    iteration = iter(range(4))

    def one(model: nn.Module, micro_batch: int) -> Tensor:
        number = next(iteration)
        with recorder.at(number, 0, record=number == 0):
            return loss(model, micro_batch)

    return train(model, one, steps=4, after=lambda: seen.append(counted.runs))


class Biased(nn.Module):
    """Attention with a bias by position, which is a weight but no operand of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.table)


def test_a_bias_by_position_is_no_product():
    model, x = Biased(), torch.randn(2, 8, 32)
    plain = model(x)
    with instrument(model, "linear_mxfp8"):
        assert not torch.equal(model(x), plain)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [None, False], ids=["plain", "recomputed"])
@pytest.mark.parametrize("how", ["model", "module.compile", "blocks"])
def test_other_functions_stay_compiled(tmp_path: Path, how: str, recompute: bool | None):
    expected = train(build(recompute), loss, steps=2)
    torch._dynamo.reset()
    of_model, of_others = Compiled(), Compiled()
    model: Any = build(recompute)
    if how == "blocks":
        model.blocks = nn.ModuleList(torch.compile(b, backend=of_model, fullgraph=True) for b in model.blocks)
    elif how == "model":
        model = torch.compile(model, backend=of_model, fullgraph=True)
    else:
        model.compile(backend=of_model, fullgraph=True)
    before = state(model)
    scaled = torch.compile(lambda x: x * 2 / 2, backend=of_others, fullgraph=True)
    with Recorder(tmp_path) as recorder, instrument(model, None, recorder):
        found = train(model, lambda *given: scaled(loss(*given)), steps=2)
    assert same(found, expected)
    assert state(model) == before
    assert (of_model.runs, of_others.runs) == (0, 2)
    assert names(rows(tmp_path)) == counts(2)


@BOTH_WAYS
def test_compiled_functions_in_a_recomputed_core_run_eagerly(monkeypatch: pytest.MonkeyPatch, products: Any):
    def trained() -> list:
        model = build(recompute=False)
        with instrument(model, "FA_mxfp8", backend="torch", products=products):
            return train(model, loss)

    expected, counted = trained(), Compiled()
    compiled = torch.compile(F.scaled_dot_product_attention, backend=counted)
    with monkeypatch.context() as changed:
        changed.setattr(Attention, "forward", compiled_attention(compiled))
        assert same(trained(), expected)
    assert not counted.runs


def compiled_attention(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Attention, x: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scaled_dot_product_attention = attend
        return self.out_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return forward
