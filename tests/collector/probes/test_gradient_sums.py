"""The measure "accumulated": against sums of the gradients that torch's hooks see, and Megatron's main_grad."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from binade.collector import Recorder, instrument
from binade.data.run.events import EventKind, read_events
from tests.collector.instrumented import rows

BATCHES = 5


class Loop:
    """Three steps of a small model, and what the gradients of its two weights were: float64, by step."""

    def __init__(self, root, dtype: torch.dtype = torch.float32, lose: Callable | None = None, **options) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8, bias=False)).to(dtype)
        weights = [model[0].weight, model[2].weight]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        returned: list[list[Tensor]] = [[], []]
        self.expected: list[list[float]] = []
        for seen, weight in zip(returned, weights, strict=True):
            weight.register_hook(lambda gradient, seen=seen: seen.append(gradient.double()))
        with (
            Recorder(root, scores=(), measures=("accumulated",), max_bytes=0, **options) as recorder,
            instrument(model, "mxfp8", recorder, backend="torch"),
        ):
            for _ in range(3):
                optimizer.zero_grad()
                for seen in returned:
                    seen.clear()
                for number in range(BATCHES):
                    first = [None if w.grad is None else w.grad.clone() for w in weights]
                    model(torch.randn(6, 24, dtype=dtype)).square().mean().backward()
                    if lose:
                        lose(number, weights, first)
                for parameter in model.parameters():
                    parameter.grad /= BATCHES
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                sums = [torch.stack(seen).sum(0).numpy() for seen in returned]
                seen = [w.grad.double().numpy() for w in weights]
                factor = np.median([np.vdot(s, g) / np.vdot(s, s) for s, g in zip(sums, seen, strict=True)])
                differences = [factor * s - g for s, g in zip(sums, seen, strict=True)]
                self.expected.append(
                    [np.linalg.norm(d) / np.linalg.norm(g) for d, g in zip(differences, seen, strict=True)]
                )
                optimizer.step()
        self.events = read_events(recorder.writer.directory)


def measured(root) -> list[list[float]]:
    found = rows(root, values=False, tensor_name="accumulation_error").sort_values(["iteration", "layer_index"])
    assert set(found["operation"]) <= {"optimizer"}
    return found["mean"].to_numpy().reshape(-1, 2).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_sound_loop_differs_by_rounding_alone(tmp_path, dtype):
    """The gradients are averaged and clipped after the backward passes."""
    loop = Loop(tmp_path, dtype)
    found = measured(tmp_path)
    floor = 1e-6  # the float32 sum's own rounding
    assert np.allclose(found, loop.expected, rtol=1e-3, atol=floor) and len(found) == 3
    assert not loop.events
    assert (np.max(found) > 1e-4) == (dtype == torch.bfloat16)


def test_a_lost_micro_batch_is_named(tmp_path):
    def lose(number: int, weights: list[Tensor], before: list[Tensor | None]) -> None:
        if number == 3:
            weights[1].grad = before[1]

    loop = Loop(tmp_path, torch.bfloat16, lose)
    found = measured(tmp_path)
    assert np.allclose(found, loop.expected, rtol=1e-2)
    assert [(event.kind, event.iteration) for event in loop.events] == [(EventKind.WARNING, n) for n in range(3)]
    assert all(np.array(found)[:, 1] > 0.1)


@pytest.mark.parametrize("to_none", [True, False], ids=["none", "zeros"])
def test_gradients_that_are_cleared_between_micro_batches_are_lost(tmp_path, to_none):
    """The hooks of the loop have seen all gradients, the optimizer those after the second micro-batch alone."""

    def clear(number: int, weights: list[Tensor], before: list[Tensor | None]) -> None:
        if number == 1:
            for weight in weights:
                weight.grad = None if to_none else torch.zeros_like(weight)

    loop = Loop(tmp_path, lose=clear)
    assert np.allclose(measured(tmp_path), loop.expected, rtol=1e-3) and np.min(loop.expected) > 0.01
    assert [event.iteration for event in loop.events] == [0, 1, 2]
    assert all("5 micro-batches" in event.text and "cleared after 2 of them" in event.text for event in loop.events)


class Steps:
    """Five micro-batches of a model of two layers and one step of SGD, as a loop runs them; what was recorded."""

    def __init__(self, root, loop: Callable, optimizers: Callable | None = None, steps: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 8, bias=False))
        optimizer = (optimizers or (lambda p: torch.optim.SGD(p, lr=0.1)))(list(self.model.parameters()))
        with (
            Recorder(root, scores=(), measures=("accumulated",), max_bytes=0) as recorder,
            instrument(self.model, "bf16", recorder),
        ):
            for step in range(steps):
                loop(self.model, optimizer, step)
        self.events = [event.text for event in read_events(recorder.writer.directory)]
        self.errors = rows(root, values=False, tensor_name="accumulation_error")["mean"].tolist()


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (model(torch.randn(6, 24)).square().mean() * scale).backward()


def skips(model, optimizer, step) -> None:
    """A micro-batch overflows, and the loop drops what was accumulated."""
    for number in range(4):
        backward(model, torch.inf if number == 1 else 1.0)
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            optimizer.zero_grad()
    optimizer.step()


def sharpness_aware(model, optimizer, step) -> None:
    """Written out, with .data, which leaves the versions of the weights as they are."""
    backward(model)
    moved = [0.05 * p.grad for p in model.parameters()]
    for p, e in zip(model.parameters(), moved, strict=True):
        p.data.add_(e)
    optimizer.zero_grad()
    backward(model)
    for p, e in zip(model.parameters(), moved, strict=True):
        p.data.sub_(e)
    optimizer.step()
    optimizer.zero_grad()


def own_buffers(model, optimizer, step) -> None:
    """The loop adds gradients up itself, and replaces p.grad before the step."""
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(4):
        backward(model)
        for p, total in zip(model.parameters(), sums, strict=True):
            total += p.grad
            p.grad = None
    for p, total in zip(model.parameters(), sums, strict=True):
        p.grad = total / 4
    optimizer.step()
    optimizer.zero_grad()


def closure(model, optimizer, step) -> None:
    def again() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(6, 24)).square().mean()
        loss.backward()
        return loss

    optimizer.step(again)


def in_halves(model, optimizer, step) -> None:
    for _ in range(3):
        backward(model)
    for half in optimizer:
        half.step()
        half.zero_grad()


def scaled(model, optimizer, step) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaler.scale(model(torch.randn(6, 24)).square().mean() / 3).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "optimizers"),
    [
        (skips, None),
        (sharpness_aware, None),
        (own_buffers, None),
        (closure, lambda p: torch.optim.LBFGS(p, max_iter=3)),
        (in_halves, lambda p: [torch.optim.SGD(p[:1], lr=0.1), torch.optim.Adam(p[1:])]),
        (scaled, lambda p: torch.optim.AdamW(p, fused=True)),
        (scaled, lambda p: torch.optim.AdamW(p, foreach=True)),
    ],
    ids=["skips", "sharpness aware", "own buffers", "closure", "halves", "fused", "foreach"],
)
def test_what_sound_loops_do_is_no_loss(tmp_path, loop, optimizers):
    found = Steps(tmp_path, loop, optimizers, steps=3)
    assert max(found.errors, default=0) < 1e-6 and not found.events
    assert bool(found.errors) != (loop is closure)  # within a step, nothing can be compared


def test_gradients_from_before_the_last_step_and_those_that_are_gone(tmp_path):
    def never_cleared(model, optimizer, step) -> None:
        backward(model)
        optimizer.step()

    found = Steps(tmp_path / "never", never_cleared, steps=2)
    assert max(found.errors[:2]) < 1e-6 < 0.05 < max(found.errors[2:]) and len(found.events) == 1

    def cleared_too_late(model, optimizer, step) -> None:
        backward(model)
        optimizer.zero_grad(set_to_none=bool(step))
        optimizer.step()

    found = Steps(tmp_path / "gone", cleared_too_late, steps=2)
    assert [text.split(": ")[1] for text in found.events] == [
        "the optimizer sees no gradient, or one of zeros, although its micro-batch had one, and 1 more"
    ] * 2


def test_nothing_is_compared_unless_all_micro_batches_are_recorded(tmp_path):
    assert not Loop(tmp_path / "part", micro_batches=2).events
    assert not measured(tmp_path / "part")
    assert len(Loop(tmp_path / "first", iterations=1).expected) - 2 == len(measured(tmp_path / "first")) == 1


@pytest.mark.parametrize("recorded", [1, 2])
def test_a_micro_batch_that_at_leaves_out(tmp_path, recorded):
    layer = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with Recorder(tmp_path, measures=("accumulated",)) as recorder, instrument(layer, "bf16", recorder):
        for number in range(2):
            with recorder.at(0, number, record=number < recorded):
                layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    found = rows(tmp_path, values=False, tensor_name="accumulation_error")
    assert len(found) == (recorded == 2) and not read_events(recorder.writer.directory)


def test_a_weight_that_is_multiplied_transposed_too_is_not_compared(tmp_path):
    """As of a tied autoencoder."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.mid = nn.Linear(24, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.mid(self.enc(x)).relu(), self.enc.weight.t())

    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        Recorder(tmp_path, scores=(), measures=("accumulated",), max_bytes=0) as recorder,
        instrument(model, "mxfp8", recorder, backend="torch"),
    ):
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(3):
                model(torch.randn(6, 24)).square().mean().backward()
            optimizer.step()
    assert not read_events(recorder.writer.directory)
    found = rows(tmp_path, values=False, tensor_name="accumulation_error")
    assert set(found["module"]) == {"mid"} and len(found) == 2
