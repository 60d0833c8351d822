"""Training code as people write it: two passes before one backward pass, parts in eval mode, several optimizers, hooks,
transforms of torch.func, models that are saved or called by another method while they are instrumented."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from binade import collector, quant
from binade.collector import InstrumentError, coverage, instrument
from binade.data.run.directory import list_runs
from binade.data.run.events import read_events
from binade.quant import fake_quantize
from tests.collector.instrumented import BOTH_WAYS, Recorder, rows

X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def events(root: Path) -> list[str]:
    (run,) = list_runs(root)[0]
    return [event.text for event in read_events(run.directory)]


class Encoder(nn.Module):
    def __init__(self, checkpointed: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
        self.proj = nn.Linear(32, 16)
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.proj(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backbone", ["train", "eval"])
def test_a_recomputed_pass_draws_what_its_first_did_whatever_mode_a_part_is_in(backbone: str, reentrant: bool):
    """Of two passes before one backward pass, as in contrastive training."""

    def gradients(checkpointed: bool | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Encoder(checkpointed)
        model.layers.train(backbone == "train")
        with instrument(model, "mxfp8(rounding=stochastic)", backend="torch"):
            x = X.clone().requires_grad_()
            first, second = model(x), model(x * 1.1)
            F.cross_entropy(first @ second.T, torch.arange(8)).backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients(reentrant), gradients(None)))


def test_a_parametrized_weight_is_not_computed_but_by_the_model(tmp_path: Path):
    """Spectral norm's power iteration changes its buffers each time that the weight is asked for."""

    def trained(recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 32), spectral_norm(nn.Linear(32, 32)), nn.Linear(32, 4))
        before = [buffer.clone() for buffer in model.buffers()]
        exclude = ["*.parametrizations.weight.*"]
        coverage(model, "bf16", exclude=exclude)
        assert all(map(torch.equal, before, model.buffers()))
        context = instrument(model, "bf16", recorder, exclude=exclude) if recorded else nullcontext()
        with context:
            for _ in range(2):
                model(torch.arange(8)).square().mean().backward()
        return [*model.buffers(), *(parameter.grad for parameter in model.parameters())]

    with Recorder(tmp_path) as recorder:
        assert all(map(torch.equal, trained(True), trained(False)))


TRANSFORMS: dict[str, Callable[[nn.Module, list[nn.Module]], Tensor]] = {
    "ensemble": lambda model, models: vmap(lambda p, b, x: functional_call(model, (p, b), (x,)), in_dims=(0, 0, None))(
        *stack_module_state(models), X
    ),
    "gradients of each row": lambda model, models: vmap(
        grad(lambda p, x: functional_call(model, p, (x,)).square().sum()), in_dims=(None, 0)
    )({name: p.detach() for name, p in model.named_parameters()}, X)["0.weight"],
    "jvp": lambda model, models: jvp(model, (X,), (torch.ones_like(X),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_run_as_they_are_or_are_refused(tmp_path: Path, name: str):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 4)) for _ in range(3)]
    model, compute = models[0], TRANSFORMS[name]
    expected = compute(model, models)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        with pytest.warns(UserWarning, match="transforms of torch.func .* are not recorded"):
            assert torch.equal(compute(model, models), expected)
        model(X).sum().backward()  # which is recorded
    assert len(rows(tmp_path, values=False, tensor_name="grad_weight")) == 2
    with instrument(model, "mxfp8", backend="torch"):
        with pytest.raises(InstrumentError, match=r"0 runs in a transform of torch.func .*exclude=\['0'\]"):
            compute(model, models)


def test_an_input_of_a_frozen_layer_may_be_overwritten():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.frozen = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x += torch.tanh(self.frozen(x))
            return x

    torch.manual_seed(0)
    model = Block()
    with instrument(model, "mxfp8", backend="torch"):
        model(X).sum().backward()
    x = fake_quantize(X, "mxfp8") @ fake_quantize(model.first.weight, "mxfp8").t() + model.first.bias
    h = fake_quantize(x, "mxfp8") @ fake_quantize(model.frozen.weight, "mxfp8").t() + model.frozen.bias
    of_h = 1 - torch.tanh(h).square()
    of_x = 1 + fake_quantize(of_h, "mxfp8_e5m2") @ fake_quantize(model.frozen.weight, "mxfp8", dim=0)
    assert torch.allclose(model.first.bias.grad, of_x.sum(0), rtol=1e-4)


def test_an_instrumented_model_can_be_saved(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 32), Encoder(None), nn.Linear(16, 4))
    file = io.BytesIO()
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        model(torch.arange(8)).sum().backward()
        torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    assert torch.equal(saved(torch.arange(8)), model(torch.arange(8)))
    assert rows(tmp_path, values=False)["iteration"].max() == 0  # what was loaded records nothing


class LoRALinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__(inputs, outputs)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.randn(outputs, rank))
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + (x @ self.lora_A.T @ self.lora_B.T) * 2


def test_the_parts_of_lora_in_a_linear_layer_are_layers(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(32, 32), nn.ReLU(), LoRALinear(32, 4))
    covered = coverage(model, "mxfp8", batch=(X,))
    parts = [(row.recorded, row.format) for row in covered if row.kind == "LoRALinear"]
    assert parts == [(f"layer*.{name}", "mxfp8") for name in ("linear", "lora_A", "lora_B")]
    layer = model[0]
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        seen: list[Tensor] = []
        layer.register_forward_hook(lambda module, args, result: seen.append(result.detach()))
        model(X).square().mean().backward()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return fake_quantize(x, "mxfp8") @ fake_quantize(weight, "mxfp8").t()

    lora = product(product(X, layer.lora_A), layer.lora_B)
    assert torch.allclose(seen[0], product(X, layer.weight) + layer.bias + 2 * lora, rtol=1e-5, atol=1e-5)
    recorded = rows(tmp_path, values=False, tensor_name="grad_weight")
    assert set(recorded["module"]) == {"lora_A", "lora_B"} and len(recorded) == 4


@BOTH_WAYS
def test_products_of_a_method_that_is_not_forward_are_rounded(tmp_path: Path, products: Any):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 4))

        def predict(self, x: Tensor) -> Tensor:
            return F.relu(x @ self.up) @ self.down

        def forward(self, x: Tensor) -> Tensor:
            return self.predict(x)

    torch.manual_seed(0)
    model = Model()
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch", products=products):
        y = model.predict(X)
        y.sum().backward()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        return fake_quantize(x, "mxfp8") @ fake_quantize(weight, "mxfp8", dim=0)

    assert torch.allclose(y, product(F.relu(product(X, model.up)), model.down), rtol=1e-5, atol=1e-5)
    assert len(rows(tmp_path, values=False)) == 11  # the input needs no gradient


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("change", ["clamp", "halve"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("axes", [2, 3])
def test_a_gradient_that_a_hook_changes_is_recorded_as_the_product_gets_it(
    tmp_path: Path, recipe: str, change: str, bias: bool, axes: int
):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 16, bias=bias), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.register_hook(lambda g: g.clamp(-1e-4, 1e-4) if change == "clamp" else g / 2)
            return self.down(F.relu(h))

    torch.manual_seed(0)
    model = Model()
    with Recorder(tmp_path) as recorder, instrument(model, recipe, recorder, backend="torch"):
        model(X if axes == 2 else X.view(2, 4, 32)).square().mean().backward()
    kept = rows(tmp_path, module="up").set_index("tensor_name")["tensor"]
    g, x = kept["grad_output"].flatten(0, -2), kept["input"].flatten(0, -2)
    if recipe != "bf16":
        g, x = fake_quantize(g, "mxfp8_e5m2", dim=0), fake_quantize(x, "mxfp8", dim=0)
    assert torch.allclose(kept["grad_weight"], g.t() @ x, rtol=1e-4, atol=1e-8)


def test_two_models_of_a_recorder_whose_layers_have_one_name_are_named(tmp_path: Path):
    generator, critic = (nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)) for _ in range(2))
    with Recorder(tmp_path) as recorder, instrument(generator, "bf16", recorder):
        with pytest.warns(UserWarning, match="two models have layer1.linear and 1 more: their rows cannot be told"):
            with instrument(critic, "bf16", recorder):
                pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with instrument(nn.Sequential(nn.ReLU(), nn.Linear(4, 1)), "bf16", recorder):
                pass


def test_gradients_of_a_pass_that_returns_a_dataclass_are_its_own(tmp_path: Path):
    @dataclass
    class Output:
        loss: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Output:
            return Output(self.down(checkpoint(self.up, x, use_reentrant=True)).square().mean())

    torch.manual_seed(0)
    model = Model()
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for micro_batch in range(3):
            loss = model(X[: 8 - micro_batch].clone().requires_grad_()).loss
            if micro_batch:  # the first is skipped
                loss.backward()
    kept = rows(tmp_path, module="up", tensor_name="grad_output").sort_values("micro_batch")
    assert [(row.micro_batch, len(row.tensor)) for row in kept.itertuples()] == [(1, 7), (2, 6)]
    assert not events(tmp_path)


def test_a_weight_whose_gradient_is_cleared_before_the_first_steps_is_not_named(tmp_path: Path):
    """As loops freeze a layer in the first epoch."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for step in range(4):
            model["down"](model["up"](X).relu()).square().mean().backward()
            if step < 2:
                model["down"].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
    assert not events(tmp_path)


@pytest.mark.parametrize("case", ["adversarial", "every second step", "forgotten"])
def test_weights_whose_optimizer_steps_less_often_are_not_named(tmp_path: Path, case: str):
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(32, 32), "down": nn.Linear(32, 1)})
    first, second = (torch.optim.SGD(model[name].parameters(), 0.1) for name in ("up", "down"))
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for step in range(8):
            model.zero_grad()
            model["down"](model["up"](X).relu()).square().mean().backward()
            turn = second if case == "adversarial" and step % 2 else first
            turn.step()
            if case == "every second step" and step % 2:
                second.step()
            recorder.step()
    named = ["layer0.down weight did not change from iteration 2 to 3, although the gradient is not 0"]
    assert [text.partition(":")[0] for text in events(tmp_path)] == named * (case == "forgotten")


def test_a_gradient_of_the_weight_that_is_no_product_s_is_no_hidden_product(tmp_path: Path):
    """A regularizer of the weights, whose gradient comes before the recomputation."""
    torch.manual_seed(0)
    model = Encoder(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(X.clone().requires_grad_()).square().mean()
            (loss + 1e-3 * sum(p.square().sum() for p in model.parameters())).backward()
            optimizer.step()
    assert not events(tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_default_dtype_is_not_that_of_the_statistics(tmp_path: Path, dtype: torch.dtype):
    """Lightning's bf16-true sets torch's default dtype while the model trains."""

    def trained(recipe: str, root: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        with collector.Recorder(root, enabled=root is not None) as recorder:
            with instrument(model, recipe, recorder, backend="torch"):
                for _ in range(3):
                    model(X.to(dtype)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return list(model.parameters())

    torch.set_default_dtype(dtype)
    try:
        for recipe in ("bf16", "mxfp8"):
            assert all(map(torch.equal, trained(recipe, tmp_path / recipe), trained(recipe, None)))
    finally:
        torch.set_default_dtype(torch.float32)
    table = rows(tmp_path / "mxfp8", tensor_name="input", module="linear", iteration=0, layer_index=1)
    (row,) = table.itertuples()
    assert row.sqnr_db == pytest.approx(quant.score(row.tensor, "mxfp8").sqnr_db)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("name", ["lm_head", "to_logits"])
def test_a_head_that_is_registered_before_the_blocks_stays_as_it_is(name: str):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, Head() if name == "lm_head" else nn.Linear(32, 64))
            self.table = nn.Embedding(64, 32)
            self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    left = {row.paths: row.reason for row in coverage(Model(), "mxfp8") if row.kind == "Linear"}
    assert left == {"lm_head.linear" if name == "lm_head" else name: "LM head, unless head=True", "blocks.*": ""}


def test_other_tables_than_the_vocabulary_s_make_no_heads():
    """A classifier of two labels is no head, though there are two types of tokens."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    covered = coverage(transformers.BertForSequenceClassification(config), "linear_mxfp8")
    assert {row.paths: row.format for row in covered if row.paths in ("classifier", "bert.pooler.dense")} == {
        "classifier": "mxfp8", "bert.pooler.dense": "mxfp8",
    }  # fmt: skip


def test_a_linear_layer_beside_a_weight_of_three_axes_is_no_router():
    """XLNet's relative attention has weights [width, heads, head size]."""
    config = transformers.XLNetConfig(vocab_size=64, d_model=32, n_layer=1, n_head=2, d_inner=64)
    covered = coverage(transformers.XLNetModel(config), "linear_mxfp8")
    assert {row.recorded: row.format for row in covered if ".ff." in row.paths and row.kind == "Linear"} == {
        "layer*.layer_1": "mxfp8", "layer*.layer_2": "mxfp8",
    }  # fmt: skip


def test_the_experts_of_nllb_have_a_router_and_numbers():
    config = transformers.NllbMoeConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64,
        encoder_attention_heads=2, decoder_attention_heads=2, num_experts=4, encoder_sparse_step=1,
        decoder_sparse_step=1,
    )  # fmt: skip
    covered = coverage(transformers.NllbMoeModel(config), "linear_mxfp8")
    kinds = {row.recorded: row.format for row in covered if ".ffn." in row.paths and row.paths.startswith("encoder")}
    assert kinds == {
        "layer*.encoder.router": "bf16", "layer*.expert*.encoder.fc1": "mxfp8", "layer*.expert*.encoder.fc2": "mxfp8",
    }  # fmt: skip


def test_buffers_that_a_pass_replaces_are_put_back(tmp_path: Path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 1)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().mean()
            return self.down(self.up(x / self.scale).relu()).mean()

    model = Model()
    before = model.scale
    coverage(model, "mxfp8", batch=(3 * X,))
    with Recorder(tmp_path, iterations=1) as recorder, instrument(model, "mxfp8", recorder, backend="torch"):
        recorder.twin(lambda: model(3 * X), times=2)
        recorder.evaluate(lambda model, x: model(x)[None], [3 * X])
    assert model.scale is before and model.scale == 1


def test_a_layer_that_an_excluded_module_multiplies_is_left_with_it(tmp_path: Path):
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    model, x = transformers.MambaForCausalLM(config), torch.arange(24).view(2, 12)
    covered = {row.paths.rpartition(".")[2]: row for row in coverage(model, "linear_mxfp8", exclude=["*.mixer"])}
    assert (covered["dt_proj"].format, covered["dt_proj"].reason) == (
        "", "an excluded module multiplies by its weight",
    )  # fmt: skip
    with Recorder(tmp_path, iterations=1) as recorder:
        with instrument(model, "linear_mxfp8", recorder, exclude=["*.mixer"], backend="torch"):
            model(input_ids=x, labels=x).loss.backward()
    recorded = set(rows(tmp_path, values=False)["module"])
    assert recorded == {row.recorded.rpartition(".")[2] for row in covered.values() if row.recorded}


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        h = x @ up.t()
        ctx.save_for_backward(x, up, down, h)
        return h.relu() @ down.t()

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, up, down, h = ctx.saved_tensors
        of_h = (g @ down) * (h > 0)
        return of_h @ up, of_h.t() @ x, g.t() @ h.relu()


def test_gradients_that_a_fused_function_computes_and_that_are_recorded_are_not_hidden(tmp_path: Path):
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return Fused.apply(x, self.up.weight, self.down.weight)

    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
    assert not events(tmp_path) and "up" in set(rows(tmp_path, values=False, tensor_name="grad_weight")["module"])


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8(rounding=stochastic)"])
def test_a_pass_by_which_a_pipeline_learns_shapes_is_not_of_the_training(tmp_path: Path, recipe: str):
    """torch.distributed.pipelining runs each stage once on memory that nothing was written to."""

    def trained(shapes_known: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

        def loss_of(y: Tensor, target: Tensor) -> Tensor:
            loss = (y - target).square().mean()
            losses.append(loss.item())
            return loss

        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        schedule = Schedule1F1B(stage, 2, loss_fn=loss_of)
        if shapes_known:
            schedule.step(X, target=torch.zeros_like(X))
            optimizer.zero_grad()
        root = tmp_path / str(shapes_known)
        with Recorder(root) as recorder, instrument(model, recipe, recorder, backend="torch"):
            del losses[:]
            for _ in range(2):
                schedule.step(X, target=torch.zeros_like(X))
                optimizer.step()
                optimizer.zero_grad()
        counts = rows(root, values=False, tensor_name="output").groupby(["iteration", "micro_batch"]).size()
        assert counts.to_dict() == {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 2}
        return losses[-4:]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert trained(shapes_known=False) == trained(shapes_known=True)
    finally:
        dist.destroy_process_group()


class Chunked(nn.Module):
    """The logits are computed by a convolution of width 1, or by the training loop."""

    def __init__(self, convolved: bool) -> None:
        super().__init__()
        self.up, self.logits, self.convolved = nn.Linear(32, 16), nn.Linear(16, 4, bias=False), convolved

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return F.conv1d(h[..., None], self.logits.weight[..., None])[..., 0] if self.convolved else h


@pytest.mark.parametrize("case", ["convolution", "loop", "called", "frozen", "not recorded"])
def test_a_weight_that_is_multiplied_out_of_sight_is_named_once(tmp_path: Path, case: str):
    torch.manual_seed(0)
    model = Chunked(case == "convolution")
    model.logits.weight.requires_grad_(case != "frozen")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    iterations = 0 if case == "not recorded" else None
    with Recorder(tmp_path, iterations=iterations) as recorder, instrument(model, "bf16", recorder):
        for _ in range(2):
            y = model(X)
            if case != "convolution":
                y = model.logits(y) if case == "called" else F.linear(y, model.logits.weight)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    named = [text for text in events(tmp_path) if text.startswith("layer0.logits weight has a gradient, but no prod")]
    assert events(tmp_path) == named and len(named) == (case in ("convolution", "loop"))


@pytest.mark.parametrize("case", ["shared layer", "two passes", "two regions", "albert"])
def test_a_layer_that_a_region_of_autocast_uses_twice_has_the_same_gradient(tmp_path: Path, case: str):
    """Autocast casts its weight once, so that both gradients are added in bfloat16."""

    def gradients(recorded: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        config = transformers.AlbertConfig(
            vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=32,
        )  # fmt: skip
        model = transformers.AlbertModel(config) if case == "albert" else layer
        region = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
        with Recorder(tmp_path, enabled=recorded) as recorder:
            with instrument(model, "bf16", recorder) if recorded else nullcontext():
                if case == "two regions":
                    with region():
                        y = model(X)
                    with region():
                        y = y + model(2 * X)
                else:
                    with region():
                        if case == "albert":
                            y = model(torch.arange(24).view(2, 12)).last_hidden_state
                        else:
                            y = model(model(X)) if case == "shared layer" else model(X) + model(2 * X)
                y.float().square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(True), gradients(False)))
