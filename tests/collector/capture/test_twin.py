"""The twin step against torch's own autograd, with operands rounded by hand."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from binade import quant
from binade.collector import Recorder, instrument
from binade.collector.capture.evaluations import _measured
from binade.collector.capture.recorder import RecorderError
from binade.data.run.evaluations import GradientTwin, read_twins

WEIGHT = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
STOCHASTIC = '[linear]\nwgrad.grad_output = "mxfp4(rounding=stochastic)"\n'


def build(dropout: float = 0.0) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16) if dropout else nn.Identity(), nn.Dropout(dropout)
    )
    with torch.no_grad():
        model[0].weight.copy_(WEIGHT)
    return model


def loss(model: nn.Module) -> Tensor:
    return model(X).sin().sum() / 64


def test_against_autograd_by_hand(tmp_path: Path):
    model = build()
    with Recorder(tmp_path) as recorder, instrument(model, "linear_mxfp4", recorder, backend="torch"):
        twin = recorder.twin(lambda: loss(model), times=5)
    weight = WEIGHT.clone().requires_grad_()
    plain = (X @ weight.t()).sin().sum() / 64
    (g,) = torch.autograd.grad(plain, weight)
    y = (quant.fake_quantize(X, "mxfp4") @ quant.fake_quantize(WEIGHT, "mxfp4").t()).requires_grad_()
    rounded = y.sin().sum() / 64
    (dy,) = torch.autograd.grad(rounded, y)
    q = quant.fake_quantize(dy, "mxfp4", 0).t() @ quant.fake_quantize(X, "mxfp4", 0)
    assert twin.loss == pytest.approx(plain.item(), rel=1e-6)
    assert twin.changes == (pytest.approx((rounded - plain).item(), rel=1e-4),)
    for row in twin.gradients:
        assert row.norm == pytest.approx(g.norm().item(), rel=1e-5)
        assert row.bias == row.bias_corrected == pytest.approx(((q - g).norm() / g.norm()).item(), rel=1e-5)
        assert row.variance == 0
        assert row.cosine == pytest.approx(torch.cosine_similarity(q.flatten(), g.flatten(), 0).item(), rel=1e-5)
    assert [row.name for row in twin.gradients] == ["step", "layer1", "0.weight"]


def test_a_pass_that_is_not_finite_is_not_counted_as_orthogonal():
    power, row = torch.tensor(1.0, dtype=torch.float64), GradientTwin("w", 1, "fc1", None, 1.0)
    dots, squares = torch.tensor([[0.9, 0.9, 0.0, 0.9], [1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    parts = torch.stack([torch.zeros(4), dots, squares, torch.zeros(4)])
    assert _measured(row, power, power * 0, parts, True).cosine == pytest.approx(0.675)  # one gradient is zero
    parts[1:3, 2] = torch.nan
    assert math.isnan(_measured(row, power, power * 0, parts, True).cosine)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_bias_of_stochastic_rounding_shrinks_to_the_true_one(tmp_path: Path):
    """True: of the mean over many gradients that are rounded by hand. MXFP4 saturates, so it is not 0."""
    (tmp_path / "mine.toml").write_text(STOCHASTIC)
    recipe, model = str(tmp_path / "mine.toml"), build()
    with Recorder(tmp_path / "runs") as recorder, instrument(model, recipe, recorder, backend="torch"):
        few, many, one = (recorder.twin(lambda: loss(model), times=m).gradients[0] for m in (4, 256, 1))
    y = (X @ WEIGHT.t()).requires_grad_()
    (dy,) = torch.autograd.grad(y.sin().sum() / 64, y)
    drawn = [quant.fake_quantize(dy, "mxfp4(rounding=stochastic)", 0, seed=seed).t() @ X for seed in range(2000)]
    g, mean = dy.t() @ X, torch.stack(drawn).mean(0)
    bias = ((mean - g).norm() / g.norm()).item()
    variance = (torch.stack(drawn) - mean).square().sum((1, 2)).mean().item() / g.norm().item() ** 2
    assert one.variance is None and one.bias_corrected is None
    assert one.bias > few.bias > many.bias == pytest.approx(bias, rel=1e-3)
    assert many.variance == pytest.approx(variance, rel=0.05)
    assert abs(few.bias_corrected - bias) < 0.2 * (few.bias - bias)
    assert many.bias**2 - many.bias_corrected**2 == pytest.approx(many.variance / 256, rel=1e-6)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_errors_are_those_of_repeated_twin_steps(tmp_path: Path):
    """Each iteration draws from seeds of its own."""
    (tmp_path / "mine.toml").write_text(STOCHASTIC)
    recipe, model = str(tmp_path / "mine.toml"), build()
    with Recorder(tmp_path / "runs") as recorder, instrument(model, recipe, recorder, backend="torch"):
        true = recorder.twin(lambda: loss(model), times=400).gradients[0]
        found = []
        for _ in range(60):
            recorder.step()
            found.append(recorder.twin(lambda: loss(model), times=8).gradients[0])
        three, two = (recorder.twin(lambda: loss(model), times=m).gradients[0] for m in (3, 2))
    bias, variance = ([getattr(row, name) for row in found] for name in ("bias_corrected", "variance"))
    mean = torch.tensor(variance).mean().item()
    assert mean == pytest.approx(true.variance, rel=0.02)
    typical = torch.tensor([row.variance_error for row in found]).mean().item()
    assert typical == pytest.approx(torch.tensor(variance).std().item(), rel=0.25)
    t = 3.18  # four pairs of passes
    inside = [abs(b - true.bias_corrected) < t * row.bias_error for b, row in zip(bias, found, strict=True)]
    assert sum(inside) >= 55
    assert three.variance_error is not None and three.bias_error is None
    assert two.variance_error is None and two.bias_corrected is not None


def test_an_instrumented_loop_writes_its_twin_steps(tmp_path: Path):
    """Delayed scales vary between passes of training, but not between those of a twin step."""
    model, inner = nn.Sequential(), nn.Sequential()
    for name, part in (("fc1", nn.Linear(32, 16)), ("fc2", nn.Linear(16, 16, bias=False))):
        inner.add_module(name, part)
    model.add_module("layers", nn.ModuleList([nn.Identity(), inner]))
    model.forward = lambda x: inner(x)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twins = []
    with Recorder(tmp_path) as recorder, instrument(model, "te_delayed", recorder, backend="torch"):
        for _ in range(2):
            twins.append(recorder.twin(lambda: loss(model), times=3))
            loss(model).backward()
            optimizer.step()
    assert read_twins(recorder.writer.directory) == twins and [twin.iteration for twin in twins] == [0, 1]
    assert all(len(twin.changes) == 1 and not twin.draws for twin in twins)
    assert [(row.name, row.layer_index, row.module) for row in twins[0].gradients] == [
        ("step", None, None),
        ("layer2", 2, None),
        ("layers.1.fc1.weight", 2, "fc1"),
        ("layers.1.fc1.bias", 2, "fc1.bias"),
        ("layers.1.fc2.weight", 2, "fc2"),
    ]


def test_training_does_not_change(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(STOCHASTIC)
    found = []
    for twins in (False, True):
        torch.manual_seed(0)
        model, recipe = build(0.5), str(tmp_path / "mine.toml")
        optimizer = torch.optim.AdamW(model.parameters())
        with Recorder(tmp_path / str(twins)) as recorder, instrument(model, recipe, recorder, backend="torch"):
            for _ in range(3):
                if twins:
                    recorder.twin(partial(loss, model), times=2)
                loss(model).backward()
                if twins:
                    recorder.twin(partial(loss, model), times=2)
                optimizer.step()
                found += [p.grad.clone() for p in model.parameters()]
                optimizer.zero_grad()
        assert recorder.iteration == 2 and recorder.micro_batch == 0
        state = [x for each in optimizer.state.values() for x in each.values()]
        found += [*(x.clone() for x in model.state_dict().values()), *state, torch.get_rng_state()]
        found += [torch.tensor(recorder.writer.status.tensors)]
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def test_needs_an_instrumented_model(tmp_path: Path):
    with Recorder(tmp_path) as recorder, pytest.raises(RecorderError, match="nothing is instrumented"):
        recorder.twin(lambda: torch.zeros(()))
