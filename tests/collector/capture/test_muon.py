"""Muon's momentum in a format: against torch.optim.Muon's own steps, and polar factors and singular vectors of SciPy in
float64."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from binade import quant
from binade.app.view.view import View
from binade.collector import Recorder, instrument
from binade.collector.capture.optimizer_updates import muon_update, orthogonalized
from binade.collector.recipes.files import from_toml, to_toml
from binade.collector.recipes.recipe import RecipeError
from binade.data.index.catalog import Catalog
from binade.data.run.tensor_kinds import Other, tensor_names
from binade.quant.low_rank import companded_int4, muonq
from tests.collector.instrumented import rows
from tests.collector.probes.test_optimizer_state import FP8, ROUND, STEPS, recipe, steps, train

# The quintic iteration that converges to the polar factor.
EXACT = {"ns_coefficients": (1.875, -1.25, 0.375), "ns_steps": 40}


def build(inputs: int = 40, hidden: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(200, inputs, bias=False), nn.GELU(), nn.Linear(inputs, hidden, bias=False)
    return nn.Sequential(*layers)


def orthogonal_in_torch(x: Tensor, **options: Any) -> Tensor:
    """What torch.optim.Muon subtracts from a weight for a gradient: without momentum, its orthogonalization."""
    weight = nn.Parameter(torch.zeros_like(x))
    weight.grad = x
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **options).step()
    return -weight.detach() / math.sqrt(max(1, x.shape[0] / x.shape[1]))


def polar_factors(momentum: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The orthogonal polar factor of a momentum: SciPy's, and torch's."""
    return scipy.linalg.polar(momentum.double().numpy())[0], orthogonal_in_torch(momentum, **EXACT).double().numpy()


def angle(a: np.ndarray, b: np.ndarray) -> float:
    """Between two matrices as vectors, in degrees."""
    return float(np.degrees(np.arccos(min(1, (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)))))


@pytest.mark.parametrize("shape", [(40, 50), (50, 20), (7, 7)])
@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False, "momentum": 0.5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}, EXACT],
)
def test_the_formula_is_what_torch_does(shape: tuple[int, int], options: dict[str, Any]):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(shape) * 1e-3)
    optimizer = torch.optim.Muon([weight], lr=0.02, **options)
    for _ in range(4):
        before, weight.grad = weight.detach().clone(), torch.randn(shape)
        optimizer.step()
        momentum, group = optimizer.state[weight]["momentum_buffer"], optimizer.param_groups[0]
        _, orthogonal = orthogonalized(momentum, weight.grad, group)
        update = muon_update(before, orthogonal, group)
        assert (update.double() - (weight.detach().double() - before.double())).abs().max() < 8 * 2**-24


def test_rounded_momenta_and_the_error_of_the_orthogonalized_update(tmp_path):
    """The same steps of torch alone, in which NumPy rounds; angles and alignment of torch's own orthogonalization."""
    model, other = build(), build()
    options = {"lr": 0.02, "weight_decay": 0.1}
    optimizer, plain = (torch.optim.Muon(each.parameters(), **options) for each in (model, other))
    train(tmp_path, {"momentum_buffer": FP8}, model, optimizer)
    expected: dict[str, list[np.ndarray]] = {}
    for number in range(STEPS):
        old = [p.detach().clone() for p in other.parameters()]
        steps(other, plain, range(number, number + 1))
        for w, p in zip(old, other.parameters(), strict=True):
            momentum = plain.state[p]["momentum_buffer"]
            exact = momentum.clone()
            momentum.copy_(torch.from_numpy(ROUND[FP8](momentum.numpy())))
            direction, rounded = (p.grad.lerp(each, 0.95) for each in (exact, momentum))
            o, q = (orthogonal_in_torch(each).double().numpy() for each in (direction, rounded))
            u, sizes, v = scipy.linalg.svd(direction.double().numpy(), full_matrices=False)
            known = sizes > sizes[0] * max(direction.shape) * 2**-23
            factor = math.sqrt(max(1, w.shape[0] / w.shape[1]))
            update = 0.1 * w.double().numpy() + factor * o
            values = {
                "update_error": factor * np.linalg.norm(q - o) / np.linalg.norm(update),
                "update_angle": np.degrees(np.arccos((o * q).sum() / np.linalg.norm(o) / np.linalg.norm(q))),
                "update_alignment": np.diag(u.T @ q @ v.T)[known],
                "update_singular_values": scipy.linalg.svdvals(q),
            }
            for name, each in values.items():
                expected.setdefault(name, []).append(np.atleast_1d(each))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for name, listed in expected.items():
        found = rows(tmp_path, values=False, tensor_name=name).sort_values(["iteration", "layer_index"])
        assert set(found["operation"]) == {"optimizer"}
        for (_, row), each in zip(found.iterrows(), listed, strict=True):
            assert row["mean"] == pytest.approx(each.mean(), rel=1e-3)
            assert row["max"] == pytest.approx(each.max(), rel=1e-3) and row["numel"] == each.size
    assert min(np.min(each) for each in expected["update_angle"]) > 0.5


def test_the_angle_is_that_of_polar_factors(tmp_path):
    """With an iteration that converges, in bfloat16, the angle is that of SciPy's polar factors in float64, but for the
    angles between these and what torch makes of the same momenta: angles between matrices obey the triangle inequality.
    How large these are depends on the processor's products."""
    model, other = build(48, 24), build(48, 24)
    optimizer, plain = (
        torch.optim.Muon(each.parameters(), lr=0.02, nesterov=False, **EXACT) for each in (model, other)
    )
    train(tmp_path, {"momentum_buffer": FP8}, model, optimizer)
    angles, apart = [], []
    for number in range(STEPS):
        steps(other, plain, range(number, number + 1))
        for p in other.parameters():
            momentum = plain.state[p]["momentum_buffer"]
            exact, near = polar_factors(momentum)
            momentum.copy_(torch.from_numpy(ROUND[FP8](momentum.numpy())))
            rounded, near_rounded = polar_factors(momentum)
            angles.append(angle(exact, rounded))
            apart.append(angle(exact, near) + angle(rounded, near_rounded))
    found = rows(tmp_path, values=False, tensor_name="update_angle").sort_values(["iteration", "layer_index"])
    assert (np.abs(found["mean"].to_numpy() - angles) <= np.array(apart) + 1e-3).all()
    assert min(angles) > 1 and np.median(np.array(apart) / angles) < 0.5  # but where singular values are tiny


def int4(x: np.ndarray, axis: int | None) -> np.ndarray:
    """MuonQ's quantize_sym and dequantize_sym with compand, in float64: levels of a µ-law."""
    compressed = np.sign(x) * np.log(1 + 255 * np.abs(x)) / np.log(256)
    scale = np.abs(compressed).max(axis, keepdims=True) / 7
    level = np.round(compressed / scale) * np.float16(scale).astype(float)
    return np.sign(level) * (256 ** np.abs(level) - 1) / 255


@pytest.mark.parametrize("shape", [(64, 48), (33, 100), (8, 8)])
def test_muonq_is_its_description_in_numpy(shape: tuple[int, int]):
    """Two steps: the second power iteration starts from what the first one stored."""
    torch.manual_seed(1)
    x = torch.randn(shape) @ torch.diag(torch.logspace(0, -2, shape[1])) * 3
    rank = min(shape) // 16
    start = torch.randn(shape[1], rank)
    r = start.double().numpy()
    for _ in range(2):
        found, start = muonq(x, start, 0)
        norm = np.linalg.norm(x.double().numpy())
        b = x.double().numpy() / norm
        p = scipy.linalg.qr(b @ (r / np.linalg.norm(r, axis=0)), mode="economic")[0] if rank else np.zeros((len(x), 0))
        r = b.T @ p
        rest = int4(b - p @ r.T, None)
        p, r = (int4(p, 0), int4(r, 0)) if rank else (p, r)
        expected = (rest + p @ r.T) * norm
        # Float32 puts few values on the other side of a step.
        apart = np.abs(found.numpy() - expected) > 1e-4 * np.abs(expected).max()
        assert apart.mean() < 0.02
        assert np.abs(start.numpy() - r).max(initial=0) < 1e-3 * np.abs(r).max(initial=1)
        error = np.linalg.norm(expected - x.numpy()) / np.linalg.norm(x.numpy())
        assert np.linalg.norm(found.numpy() - x.numpy()) / np.linalg.norm(x.numpy()) == pytest.approx(error, rel=0.02)


def test_companded_levels_are_fifteen():
    x = torch.linspace(-1, 1, 1001)
    y = companded_int4(x)
    assert len(y.unique()) == 15 and y[500] == 0 and torch.equal(y.sign(), y.flip(0).sign() * -1)


def test_muonq_continues_from_a_state_dict(tmp_path):
    whole, parts, again = build(), build(), build()
    file = recipe(tmp_path, {"momentum_buffer": "muonq"})
    with instrument(whole, file):
        steps(whole, torch.optim.Muon(whole.parameters()), range(STEPS))
    first = torch.optim.Muon(parts.parameters())
    with instrument(parts, file):
        steps(parts, first, range(2))
    saved = deepcopy((parts.state_dict(), first.state_dict()))
    again.load_state_dict(saved[0])
    second = torch.optim.Muon(again.parameters())
    second.load_state_dict(saved[1])
    with instrument(again, file):
        steps(again, second, range(2, STEPS))
    plain = build()
    steps(plain, torch.optim.Muon(plain.parameters()), range(STEPS))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole.parameters(), plain.parameters(), strict=True))


def test_the_first_step_uses_the_momentum_as_it_is(tmp_path):
    rounded, plain = build(), build()
    with instrument(rounded, recipe(tmp_path, {"momentum_buffer": "muonq"})):
        steps(rounded, torch.optim.Muon(rounded.parameters()), range(1))
    steps(plain, torch.optim.Muon(plain.parameters()), range(1))
    assert all(torch.equal(a, b) for a, b in zip(rounded.parameters(), plain.parameters(), strict=True))


def test_text():
    made = from_toml('[state]\nmomentum_buffer = "muonq"\nexp_avg = "bf16"', "mine")
    assert from_toml(to_toml(made), "mine") == made
    assert made.tables()["state"] == {"exp_avg": "bf16", "momentum_buffer": "muonq"}
    with pytest.raises(RecipeError, match=r"state\.exp_avg: unknown format 'muonq'"):
        from_toml('[state]\nexp_avg = "muonq"', "mine")


PRODUCTS = tensor_names(Other.NEWTON_SCHULZ)
LAYERS = 1, 3  # those of `build` that are linear, in their order


class Multiplied(TorchDispatchMode):
    """What torch multiplies, as (left, right)."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.pairs.append(tuple(x.clone() for x in args[name == "addmm" :][:2]))
        return func(*args, **kwargs or {})


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(16, 200, generator=torch.Generator().manual_seed(number)).to(model[0].weight.dtype)
    model(x).square().mean().backward()
    optimizer.step()


def record_products(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    text: str | None = None,
    tensors: tuple[str, ...] = PRODUCTS,
    scores: tuple[str, ...] = (),
) -> None:
    with Recorder(root, tensors=tensors, scores=scores, iterations=2) as recorder, instrument(model, text, recorder):
        for number in range(STEPS):
            step_of(model, optimizer, number)


OTHERS = {"nesterov": False, "momentum": 0.5, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize(
    ("more", "dtype", "state"),
    [
        ({}, torch.float32, None),
        (OTHERS, torch.bfloat16, None),  # here torch divides the momentum itself by its norm
        (OTHERS, torch.float32, {"momentum_buffer": FP8}),
    ],
    ids=["defaults", "others in bf16", "others, rounded"],
)
def test_the_operands_of_newton_schulz_are_those_that_torch_multiplies(tmp_path, more, dtype, state):
    """Each of them to the bit, in the recorded iterations, of a wide and a tall matrix; weights do not change."""
    options = {"lr": 0.02, "weight_decay": 0.1} | more
    model, other = build(24, 40).to(dtype), build(24, 40).to(dtype)
    optimizer, plain = (torch.optim.Muon(each.parameters(), **options) for each in (model, other))
    text = recipe(tmp_path, state) if state else None
    record_products(tmp_path, model, optimizer, text)
    found = rows(tmp_path)
    found = found[found["tensor_name"].isin(PRODUCTS)]
    found = found.set_index(["iteration", "layer_index", "module", "tensor_name"])["tensor"]
    with instrument(other, text):
        count = 0
        for number in range(STEPS):
            old = [p.detach().clone() for p in other.parameters()]
            with Multiplied() as saw:
                step_of(other, plain, number)
            pairs = iter(saw.pairs[-3 * len(old) * plain.param_groups[0]["ns_steps"] :])  # after those of the gradients
            for before, parameter, layer in zip(old, other.parameters(), LAYERS, strict=True):
                for step in range(1, plain.param_groups[0]["ns_steps"] + 1):
                    products = [next(pairs) for _ in range(3)]
                    if number > 1:
                        continue
                    x, gram, left, right = (found[number, layer, f"linear.ns{step}", name] for name in PRODUCTS)
                    expected = ((x, x.t()), (gram, gram), (left, right))
                    assert all(map(torch.equal, sum(products, ()), sum(expected, ())))
                    assert x.shape[0] == min(parameter.shape)
                    count += 4
                if number < 2:  # the last iterate is the update
                    last = torch.addmm(right, left, right, beta=plain.param_groups[0]["ns_coefficients"][0])
                    last = last.t() if parameter.shape[0] > parameter.shape[1] else last
                    m, n = parameter.shape
                    factor = 0.2 * math.sqrt(max(m, n)) if "adjust_lr_fn" in options else math.sqrt(max(1, m / n))
                    updated = before.mul(1 - 0.02 * 0.1).add(last, alpha=-0.02 * factor)
                    assert torch.equal(updated, parameter.detach())
    assert count == len(found) and all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_operands_of_newton_schulz_are_scored_in_the_forward_gemm_and_on_the_map(tmp_path):
    """Along the axis that the product contracts."""
    model = build()
    record_products(tmp_path, model, torch.optim.Muon(model.parameters()), scores=("mxfp8", "nvfp4"))
    found = rows(tmp_path).set_index("tensor_id")
    assert set(found["operation"]) == {"optimizer"} and set(found["gemm"]) == {"forward"}
    assert set(found["layer_index"]) == set(LAYERS)
    with Catalog.open(tmp_path) as catalog:
        scores = catalog.table("score").to_pandas()
        view = View("map", {"metric": ["sqnr_db"], "format": ["mxfp8"], "operation": ["optimizer"]})
        table = view.draw(catalog).get("map").table
        ranked = catalog.errors("mxfp8", ("tensor_name",))
    assert set(table["tensor"]) == set(PRODUCTS) and set(table["gemm"]) == {"forward"}
    assert {f"linear.ns{step}" for step in range(1, 6)} == set(table["product"]) == set(found["module"])
    assert set(ranked["tensor_name"]) == set(PRODUCTS)
    assert len(scores) == 2 * len(found) == 2 * 2 * len(LAYERS) * 5 * len(PRODUCTS)
    for row in scores.groupby("format").head(40).itertuples():
        x, name = found["tensor"][row.tensor_id], found["tensor_name"][row.tensor_id]
        dim = -2 if name == "ns_right" else -1
        expected = quant.compare(x, quant.fake_quantize(x, row.format, dim=dim))["sqnr_db"]
        assert row.gemm == "forward" and row.sqnr_db == pytest.approx(expected, abs=1e-6)


def test_an_optimizer_without_newton_schulz_is_said(tmp_path):
    model = build()
    with pytest.warns(UserWarning, match="nothing was recorded as ns_x, ns_gram, ns_left, ns_right:"):
        record_products(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1e-3), tensors=("input", *PRODUCTS))
