"""Optimizer state that a recipe rounds: against torch's optimizers, ml_dtypes, and formulas written out in NumPy."""

from __future__ import annotations

import itertools
import warnings
from copy import deepcopy
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.capture.optimizer_updates import adam_update
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.collector.training.config import RunConfig
from binade.collector.training.ranks import join
from tests.collector.forked import forked, ranks_of
from tests.collector.instrumented import rows
from tests.quant.oracles import E2M1, fp8_blocks, mx

FP8 = "fp8_e4m3(block=1x128)"
STEPS = 4


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


ROUND = {
    FP8: lambda x: fp8_blocks(x.reshape(-1, x.shape[-1])).reshape(x.shape),
    "bf16": bf16,
    "fp16": lambda x: x.astype(np.float16).astype(np.float32),
    "mxfp4": lambda x: mx(x, grid=E2M1),
}
CASES = {
    "moments in fp8": {"exp_avg": FP8, "exp_avg_sq": FP8},
    "all": {"exp_avg": FP8, "exp_avg_sq": "bf16", "master_weight": "bf16"},
    "weight": {"master_weight": "bf16"},
    "fp16": {"exp_avg": "fp16", "exp_avg_sq": "bf16"},
}


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 8, bias=False))


def backward(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(16, 200, generator=generator)).square().mean().backward()


def recipe(folder: Path, state: dict[str, str], more: str = "") -> str:
    file = folder / "mine.toml"
    file.write_text("[state]\n" + "".join(f'{name} = "{spec}"\n' for name, spec in state.items()) + more)
    return str(file)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, after=lambda: None) -> None:
    for number in numbers:
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        after()


def train(
    root: Path, state: dict[str, str], model: nn.Module, optimizer: torch.optim.Optimizer, more: str = "", **options
) -> None:
    with Recorder(root, scores=(), measures=(), max_bytes=0) as recorder:
        with instrument(model, recipe(root, state, more), recorder, **options):
            steps(model, optimizer, range(STEPS))


def measured(root: Path, name: str) -> np.ndarray:
    """[steps, weights]"""
    found = rows(root, values=False, tensor_name=name).sort_values(["iteration", "layer_index"])
    assert set(found["operation"]) <= {"optimizer"} and set(found["module"]) <= {"0", "3", "linear"}
    return found["mean"].to_numpy().reshape(-1, 2)


def adam(w, m, v, step: int, lr: float, decay: float) -> np.ndarray:
    """Loshchilov and Hutter, algorithm 2, in float64."""
    m, v = m.astype(np.float64) / (1 - 0.9**step), v.astype(np.float64) / (1 - 0.95**step)
    return -lr * (m / (np.sqrt(v) + 1e-8) + decay * w.astype(np.float64))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.AdamW, {"foreach": True, "betas": (0.8, 0.999), "maximize": True}),
        (torch.optim.Adam, {"weight_decay": 0.1, "lr": torch.tensor(1e-3)}),
    ],
)
def test_the_formula_is_what_torch_does(kind, options):
    """Of weights as small as their updates, whose difference float32 can hold."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(40, 50))
    optimizer = kind([weight], **{"lr": 1e-3} | options)
    for _ in range(5):
        before, weight.grad = weight.detach().clone(), torch.randn(40, 50)
        optimizer.step()
        update = adam_update(before, optimizer.state[weight], optimizer.param_groups[0])
        error = (update.double() - (weight.detach().double() - before.double())).abs().max()
        assert update.abs().max() > 5e-4 and error < 8 * 2**-24 * weight.abs().max()  # eight roundings


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_s_state_is_rounded_and_its_updates_are_measured(tmp_path, case):
    """The same steps of torch alone, in which NumPy and ml_dtypes round."""
    state, lr, decay = CASES[case], 1e-3, 0.1
    model, other = build(), build()
    options = {"lr": lr, "betas": (0.9, 0.95), "weight_decay": decay}
    optimizer, plain = (torch.optim.AdamW(each.parameters(), **options) for each in (model, other))
    train(tmp_path, state, model, optimizer)
    errors, lost = [], []
    for number in range(STEPS):
        before = [p.detach().clone().numpy() for p in other.parameters()]
        steps(other, plain, range(number, number + 1))
        for w, parameter in zip(before, other.parameters(), strict=True):
            held = plain.state[parameter] | {"master_weight": parameter.detach()}
            unrounded = {name: held[name].numpy().copy() for name in ("exp_avg", "exp_avg_sq")}
            for name, spec in state.items():
                held[name].copy_(torch.from_numpy(ROUND[spec](held[name].numpy())))
            if w.ndim == 2:
                update = adam(w, *unrounded.values(), number + 1, lr, decay)
                again = adam(w, held["exp_avg"].numpy(), held["exp_avg_sq"].numpy(), number + 1, lr, decay)
                if "master_weight" in state:
                    again = bf16((w + again).astype(np.float32)) - w.astype(np.float64)
                errors.append(np.linalg.norm(again - update) / np.linalg.norm(update))
                lost.append(((update != 0) & (parameter.detach().numpy() == w)).sum() / (update != 0).sum())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(optimizer.state[a][name], plain.state[b][name]) for name in ("exp_avg", "exp_avg_sq"))
    # A weight that is rounded for the first time is not measured.
    errors, lost = (each[2 * ("master_weight" in state) :] for each in (errors, lost))
    found = measured(tmp_path, "update_error").ravel()
    assert len(found) == len(errors) > 4 and np.min(found) > 1e-4
    # Float32 decides a few roundings of w + Δw otherwise than float64.
    assert np.allclose(found, errors, rtol=1e-3 if "master_weight" in state else 1e-5)
    assert np.allclose(measured(tmp_path, "lost_updates").ravel(), lost, atol=1e-7)
    assert (np.max(lost) > 0.05) == ("master_weight" in state)


@pytest.mark.parametrize("spec", ["bf16", "bf16(rounding=stochastic)"])
def test_small_updates_are_lost_in_bf16_unless_rounding_is_stochastic(tmp_path, spec):
    """An update below half an ulp of ml_dtypes' bfloat16 leaves the weight as it is, if it is rounded to nearest; with
    stochastic rounding, the mean of many weights follows that of float32."""
    model, exact = build(), build()
    for each in (model, exact):
        for p in each.parameters():
            p.data.copy_(torch.from_numpy(bf16(p.detach().numpy())))
    start = model[0].weight.detach().clone()
    train(tmp_path, {"master_weight": spec}, model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0))
    steps(exact, torch.optim.AdamW(exact.parameters(), lr=1e-5, weight_decay=0), range(STEPS))
    assert np.array_equal(bf16(model[0].weight.detach().numpy()), model[0].weight.detach().numpy())
    w = start.numpy().astype(ml_dtypes.bfloat16)
    neighbors = (np.nextafter(w, ml_dtypes.bfloat16(end)).astype(float) for end in (-np.inf, np.inf))
    certain = np.minimum(*(np.abs(each - w.astype(float)) for each in neighbors)) / 2 > 2e-5
    lost = measured(tmp_path, "lost_updates")[:, 0]
    moved, wanted = (x[0].weight.detach().numpy() - start.numpy() for x in (model, exact))
    if spec == "bf16":
        assert np.mean(certain) > 0.8 and np.all(lost >= np.mean(certain)) and not moved[certain].any()
    else:
        assert moved[certain].any() and np.all(lost > 0.5)
    sign = np.sign(wanted[certain])
    share = (sign * moved[certain]).mean() / (sign * wanted[certain]).mean()
    deviation = moved[certain].std() / np.sqrt(certain.sum()) / np.abs(wanted[certain]).mean()
    assert share == 0 if spec == "bf16" else abs(share - 1) < 4 * deviation < 0.5


def test_the_error_of_a_weight_goes_to_the_first_moment(tmp_path):
    """ECO's formula in NumPy, after torch's own step."""
    state = {"master_weight": "bf16", "exp_avg": FP8}
    model, other = build(), build()
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0}
    optimizer, plain = (torch.optim.AdamW(each.parameters(), **options) for each in (model, other))
    train(tmp_path, state, model, optimizer, more='weight_errors = "momentum"\n')
    for number in range(STEPS):
        steps(other, plain, range(number, number + 1))
        for parameter in other.parameters():
            held, w = plain.state[parameter], parameter.detach().numpy().astype(np.float64)
            m, v = (held[name].numpy().astype(np.float64) for name in ("exp_avg", "exp_avg_sq"))
            error = w - bf16(w.astype(np.float32))
            size = np.sqrt(v / (1 - 0.95 ** (number + 1))) + 1e-8
            owed = (1 - 0.9 ** (number + 1)) / 1e-3 * (1 - 1 / 0.9) * size * error
            held["exp_avg"].copy_(torch.from_numpy(ROUND[FP8]((m + owed).astype(np.float32))))
            parameter.data.copy_(torch.from_numpy(bf16(w.astype(np.float32))))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert np.allclose(a.detach(), b.detach(), rtol=2**-7, atol=1e-6)  # a float32 sum may tip a rounding
        assert torch.isclose(optimizer.state[a]["exp_avg"], plain.state[b]["exp_avg"], rtol=0.07).float().mean() > 0.98
    assert not len(measured(tmp_path, "update_error"))


def test_moments_that_rounding_leaves_as_they_were_are_counted(tmp_path):
    """Q(βm + (1 − β)g) = m, of torch's own steps with NumPy's rounding."""
    state = {"exp_avg": "mxfp4", "exp_avg_sq": "bf16"}
    model, other = build(), build()
    options = {"lr": 1e-3, "betas": (0.98, 0.999)}
    optimizer, plain = (torch.optim.AdamW(each.parameters(), **options) for each in (model, other))
    train(tmp_path, state, model, optimizer)
    stale = {name: [] for name in state}
    for number in range(STEPS):
        before = {(p, name): plain.state[p][name].numpy().copy() for p in plain.state for name in state}
        steps(other, plain, range(number, number + 1))
        for parameter, (name, spec) in itertools.product(other.parameters(), state.items()):
            exact = plain.state[parameter][name].numpy().copy()
            rounded = ROUND[spec](exact)
            plain.state[parameter][name].copy_(torch.from_numpy(rounded))
            if parameter.ndim == 2 and number:  # the first step creates the moments
                old = before[parameter, name]
                stale[name].append(((exact != old) & (rounded == old)).sum() / (exact != old).sum())
    for name, expected in stale.items():
        assert np.allclose(measured(tmp_path, f"stale_{name}").ravel(), expected, atol=1e-6)
    assert np.max(stale["exp_avg"]) > 0.1


def test_only_adam_has_a_moment_for_the_errors_of_weights(tmp_path):
    model = build()
    with pytest.raises(InstrumentError, match=r"weight_errors of 0\.weight: only of torch\.optim\.Adam"):
        file = recipe(tmp_path, {"master_weight": "bf16"}, 'weight_errors = "momentum"\n')
        with instrument(model, file):
            steps(model, torch.optim.SGD(model.parameters(), lr=0.1), range(1))


def test_noise_depends_on_seed_step_and_weight_alone(tmp_path):
    found = []
    for number, seed in enumerate((0, 0, 1)):
        (folder := tmp_path / str(number)).mkdir()
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        specs = {"exp_avg": "mxfp8(rounding=stochastic)", "master_weight": "bf16(rounding=stochastic)"}
        if number == 1:  # without a recorder
            with instrument(model, recipe(folder, specs), seed=seed):
                steps(model, optimizer, range(STEPS))
        else:
            train(folder, specs, model, optimizer, seed=seed)
        found.append(model[0].weight.detach())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_a_state_dict_continues(tmp_path):
    state = CASES["all"]
    whole, parts = build(), build()
    train(tmp_path, state, whole, torch.optim.AdamW(whole.parameters()))
    first = torch.optim.AdamW(parts.parameters())
    with instrument(parts, recipe(tmp_path, state)):
        steps(parts, first, range(2))
    saved = deepcopy((parts.state_dict(), first.state_dict()))
    again = build()
    second = torch.optim.AdamW(again.parameters())
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    with instrument(again, recipe(tmp_path, state)):
        steps(again, second, range(2, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_each_rank_of_fsdp2_rounds_its_rows(tmp_path):
    """Blocks along the last axis are those of the whole weight; both ranks have the same data."""
    (folder := tmp_path / "noisy").mkdir()
    file, noisy = recipe(tmp_path, CASES["all"]), recipe(folder, {"master_weight": "bf16(rounding=stochastic)"})

    def linear() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(200, 24, bias=False), nn.GELU(), nn.Linear(24, 8, bias=False))

    def trained(model: nn.Module, recipe: str = file) -> list[torch.Tensor]:
        with instrument(model, recipe):
            steps(model, torch.optim.AdamW(model.parameters()), range(STEPS))
        return [p.detach() for p in model.parameters()]

    def work() -> None:
        with join(RunConfig(dp=2), tmp_path) as ranks:
            sharded = trained(fully_shard(linear()))
            torch.save([p.full_tensor() for p in sharded], tmp_path / f"{ranks.rank}.pt")
            torch.save(trained(linear(), noisy), tmp_path / f"noisy{ranks.rank}.pt")

    assert forked(work, *ranks_of(tmp_path / "store", 2)) == [0, 0]
    for rank in range(2):
        assert all(map(torch.equal, torch.load(tmp_path / f"{rank}.pt"), trained(linear())))
    assert all(map(torch.equal, *(torch.load(tmp_path / f"noisy{rank}.pt") for rank in range(2))))  # replicas


def test_recorded_state_is_the_rounded_one(tmp_path):
    model = build()
    with Recorder(tmp_path, scores=(), measures=(), tensors=("exp_avg", "weight")) as recorder:
        with instrument(model, recipe(tmp_path, {"exp_avg": "bf16"}), recorder, capture="1"):
            steps(model, torch.optim.AdamW(model.parameters()), range(1))
    found = rows(tmp_path, tensor_name="exp_avg")
    assert len(found) and all(np.array_equal(bf16(x.numpy()), x.numpy()) for x in found["tensor"])
    assert set(rows(tmp_path, values=False, tensor_name="update_error")["layer_index"]) == {1}


def test_other_optimizers_lose_updates_and_a_missing_tensor_is_said(tmp_path):
    model, state = build(), {"exp_avg": "bf16", "master_weight": "bf16"}
    with pytest.warns(UserWarning, match="the recipe's state has exp_avg, but nothing was rounded to it"):
        train(tmp_path, state, model, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert len(measured(tmp_path, "lost_updates")) == STEPS - 1 and not len(measured(tmp_path, "update_error"))
    assert all(np.array_equal(bf16(p.detach().numpy()), p.detach().numpy()) for p in model.parameters())
    assert np.all(measured(tmp_path, "lost_updates") > 0.5)
    with warnings.catch_warnings():  # without a step, nothing is missing
        warnings.simplefilter("error")
        with instrument(model, recipe(tmp_path, state)):
            backward(model, 0)


def test_communication_is_refused(tmp_path):
    text = '[communication]\nreduce_scatter = "bf16"\n'
    with pytest.raises(InstrumentError, match="choose the recipe without it, as in ") as refused:
        with instrument(build(), recipe(tmp_path, {"exp_avg": "bf16"}, text)):
            pass
    with instrument(build(), str(refused.value).partition(" as in ")[2]):  # what the message proposes
        pass


def test_a_step_that_a_scaler_skips_is_not_measured(tmp_path):
    """A fused optimizer is called all the same, and leaves the weights as they are."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with Recorder(tmp_path, scores=(), measures=(), max_bytes=0) as recorder:
        with instrument(model, recipe(tmp_path, {"exp_avg": "bf16"}), recorder):
            for number in range(4):
                optimizer.zero_grad()
                scaler.scale(model(torch.randn(16, 200)).square().mean()).backward()
                if number in (0, 2):
                    next(model.parameters()).grad[0, 0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
    assert len(measured(tmp_path, "lost_updates")) == 2
    assert np.all(np.isfinite(measured(tmp_path, "update_error")))


@pytest.mark.parametrize(
    ("key", "spec", "message"),
    [
        ("exp_avg_sq", "fp8_e4m3(hadamard=16)", "second moment may be negative"),
        ("exp_avg", "fp8_e4m3(center=tokens)", "only operands of GEMMs have center"),
        ("master_weight", "fp8_e4m3(history=4)", "only operands of GEMMs have history"),
    ],
)
def test_specs_that_no_state_can_have_are_refused(tmp_path, key, spec, message):
    with pytest.raises(RecipeError, match=message):
        parse_recipe(recipe(tmp_path, {key: spec}))
