"""What ranks exchange is rounded before: against experts and gradients without rounding, rounded as TE does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from binade.collector import Recorder, instrument
from binade.collector.errors import ConfigError
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.collector.training.ranks import finish_gradients, join, rounding_tokens
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.quant.specs import Spec
from tests.collector.forked import forked, ranks_of, run_forked
from tests.quant.oracles import fp8_blocks

FP8 = Spec.of("fp8_e4m3(block=1x128)")
STOCHASTIC = Spec.of("bf16(rounding=stochastic)")
SHAPE = replace(
    MODELS["deepseek2_lite"]["tiny"], hidden=256, ffn=96, heads=4, kv_lora_rank=32, routed_experts=4, expert_ffn=32
)


def oracle(x: Tensor) -> Tensor:
    return torch.from_numpy(fp8_blocks(x.detach().numpy()))


def build() -> GPTModel:
    model = GPTModel(SHAPE, compute_dtype=torch.float32)
    model.initialize(0)
    return model


def received(layer: nn.Module, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tokens that each expert's first layer gets, and the output."""
    seen: list[Tensor] = []
    handles = [
        each.linear_fc1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        for each in (*layer.experts, layer.shared_experts)
    ]
    y = layer(x)[0]
    for handle in handles:
        handle.remove()
    return seen, y


def test_experts_receive_rounded_tokens_and_gradients_pass():
    """Written out: x + (Q(x) − x), of whose second summand no gradient is taken."""
    model = build()
    layer = model.layers[1].mlp
    torch.manual_seed(0)
    x, other = (t.requires_grad_() for t in [torch.randn(24, 2, 256)] * 2)
    other = other.detach().clone().requires_grad_()
    (*plain, shared), _ = received(layer, x)
    with rounding_tokens(model, FP8, Recorder(enabled=False), 0):
        (*tokens, same), y = received(layer, x)
    assert all(torch.equal(got, oracle(before)) for got, before in zip(tokens, plain, strict=True))
    assert sum(map(len, tokens)) == 24 * 2 * SHAPE.experts_per_token and torch.equal(shared, same)
    y.square().sum().backward()
    handles = [
        each.register_forward_pre_hook(lambda _, inputs: inputs[0] + (oracle(inputs[0]) - inputs[0]).detach())
        for each in layer.experts
    ]
    expected = layer(other)[0]
    expected.square().sum().backward()
    assert torch.equal(y, expected) and torch.equal(x.grad, other.grad)
    for handle in handles:
        handle.remove()
    assert torch.equal(received(layer, x)[0][0], plain[0])  # the context is over


def test_noise_differs_by_micro_batch_and_expert_and_twin_steps_leave_it_out(tmp_path: Path):
    model = build()
    tokens = torch.randint(257, (2, 25), generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    exact, found = loss().item(), []
    with Recorder(tmp_path, scores=(), measures=(), max_bytes=0) as recorder:
        with rounding_tokens(model, STOCHASTIC, recorder, 0), instrument(model, "bf16", recorder):
            for number in (0, 0, 1):
                with recorder.at(0, number):
                    assert recorder.twin(loss).loss == exact
                    found.append(loss().item())
    assert found[0] == found[1] != found[2] and exact not in found


def test_two_ranks_add_rounded_gradients_in_float32(tmp_path: Path):
    def gradient(rank: int) -> Tensor:
        return torch.randn(5, 300, generator=torch.Generator().manual_seed(rank)) * 10.0 ** -torch.arange(5)[:, None]

    def work(spec: Spec) -> None:
        with join(RunConfig(dp=2), tmp_path) as ranks:
            model = nn.Linear(300, 5, bias=False)
            model.weight.grad = gradient(ranks.rank if spec is FP8 else 0)
            finish_gradients(model, ranks, spec, 0, 3)
            torch.save(model.weight.grad, tmp_path / f"{ranks.rank}.pt")

    def added(spec: Spec) -> Tensor:
        assert forked(partial(work, spec), *ranks_of(tmp_path / f"{spec.format.name}.store", 2)) == [0, 0]
        one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
        assert torch.equal(one, two)
        return one

    assert torch.equal(added(FP8), (oracle(gradient(0)) + oracle(gradient(1))) / 2)
    mean = added(STOCHASTIC)  # of equal gradients: between two bf16 values where the replicas drew different numbers
    assert 0.1 < (mean != mean.bfloat16()).float().mean() < 0.6
    assert ((mean - gradient(0)).abs() <= 2**-7 * gradient(0).abs()).all()


OPTIONS = (
    "--layers", "2", "--model", "deepseek2_lite", "--micro-batch-size", "1", "--sequence-length", "16", "--backend",
    "torch", "--scores", "", "--no-raw", "--train-iters", "2", "--warmup-iterations", "1", "--control-iter", "1",
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.slow
def test_binade_run_rounds_both(tmp_path: Path):
    """The first loss shows the tokens alone, the second the gradients; the warm-up neither."""
    found = {}
    for name, text, ranks in (
        ("plain", "", 2),
        ("tokens", 'all_to_all = "fp8_e4m3"', 2),
        ("gradients", 'reduce_scatter = "mxfp4"', 2),
        ("alone", 'reduce_scatter = "mxfp4"', 1),
        ("lonely", "", 1),
    ):
        (tmp_path / f"{name}.toml").write_text(f"[communication]\n{text}\n")
        root = tmp_path / name
        assert run_forked(root, *OPTIONS, "--recipe", f"{tmp_path}/{name}.toml", "--dp", str(ranks), ranks=ranks) == 0
        (run,) = list_runs(root)[0]
        assert text in run.config["recipe_toml"]
        assert ("warning: reduce_scatter" in (run.directory / "log.txt").read_text()) == (name == "alone")
        found[name] = [record["loss"] for record in read_losses(run.directory)]
    plain, tokens, gradients = found["plain"], found["tokens"], found["gradients"]
    assert len(plain) == 3 and tokens[0] == gradients[0] == plain[0]
    assert tokens[1] != plain[1] == gradients[1] and gradients[2] not in (plain[2], tokens[2])
    assert found["alone"] == found["lonely"]


def test_a_model_without_experts_is_refused(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('[communication]\nall_to_all = "bf16"\n')
    for config in (RunConfig(), RunConfig(model="deepseek2_lite", layers=1)):
        with pytest.raises(ConfigError, match=r"rounds the tokens of all_to_all, but .* layers? has no experts"):
            plan(replace(config, recipe=f"{tmp_path}/mine.toml"))
    assert np.isfinite(plan(RunConfig(model="deepseek2_lite", recipe=f"{tmp_path}/mine.toml")).shape.parameters)
