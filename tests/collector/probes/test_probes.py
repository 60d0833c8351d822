"""What a recording notices by itself in training code that is wrong, and in such that is not."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from binade.collector import instrument
from binade.collector.errors import ConfigError
from binade.collector.models.site import Site
from binade.collector.probes import registry
from binade.collector.probes.probe import Finding, Probe
from binade.data.run.directory import list_runs
from binade.data.run.events import read_events
from tests.collector.instrumented import Recorder, rows
from tests.conftest import PROJECT

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self, reentrant: bool | None = None, preserve: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.dropout = nn.Dropout(0.5)
        self.reentrant, self.preserve = reentrant, preserve

    def block(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(self.up(x).relu()))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.block(x)
        x = x.requires_grad_()
        return checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)


def events(root: Path) -> list[str]:
    (run,) = list_runs(root)[0]
    return [event.text for event in read_events(run.directory)]


def train(root: Path, model: nn.Module, update, steps: int = 4, recipe: str = "mxfp8") -> list[str]:
    """The events of a training whose optimizer steps are `update(step)`."""
    with Recorder(root) as recorder, instrument(model, recipe, recorder, backend="torch"):
        for step in range(steps):
            model(X.clone()).square().mean().backward()
            update(step)
            model.zero_grad()
            recorder.step()
    return events(root)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
def test_a_recomputed_pass_that_differs_is_named_once(tmp_path: Path, recipe: str, reentrant: bool, preserve: bool):
    torch.manual_seed(0)
    model = Model(reentrant, preserve)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = train(tmp_path, model, lambda step: optimizer.step(), recipe=recipe)
    named = [text for text in found if text.startswith("layer0.down input: the recomputed pass differs from the first")]
    assert found == named and len(named) == (not preserve)


def sgd(model: nn.Module, left: nn.Module | None = None, rate: float = 0.1):
    def update(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                if left is None or all(parameter is not other for other in left.parameters()):
                    parameter -= rate * parameter.grad

    return update


def test_a_weight_that_the_optimizer_forgets_is_named_once(tmp_path: Path):
    torch.manual_seed(0)
    model = Model()
    (text,) = train(tmp_path, model, sgd(model, left=model.up))
    assert text.startswith("layer0.up weight did not change from iteration 0 to 1, although the gradient is not 0")


def test_weights_of_bfloat16_whose_updates_are_too_small_are_named(tmp_path: Path):
    """All of them: then three steps are needed, as one may have been skipped."""
    torch.manual_seed(0)
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())

    def update(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_((parameter.bfloat16() - 1e-7 * parameter.grad.bfloat16()).float())

    (text,) = train(tmp_path, model, update)
    assert text.startswith("layer0.up weight and 1 more did not change from iteration 2 to 3")


@pytest.mark.parametrize("case", ["trained", "frozen", "skipped"])
def test_training_that_is_as_it_should_be_has_no_event(tmp_path: Path, case: str):
    torch.manual_seed(0)
    model = Model()
    if case == "frozen":
        model.up.weight.requires_grad_(False)
    step = sgd(model, left=model.up) if case == "frozen" else sgd(model)
    assert not train(tmp_path, model, (lambda at: at == 1 or step(at)) if case == "skipped" else step)


class ByHand(torch.autograd.Function):
    """Calls a layer, and computes its gradients itself."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, layer: nn.Module) -> Tensor:
        ctx.save_for_backward(x, weight)
        return layer(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("case", ["by hand", "frozen", "unused", "target"])
def test_backward_products_that_a_function_computes_itself_are_named_once(tmp_path: Path, recipe: str, case: str):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if case == "target":  # of the same layers, without gradients
                with torch.no_grad():
                    target = self.down(self.up(-x))
                return self.down(self.up(x)) - target
            if case == "unused":
                checkpoint(self.up, x.requires_grad_(), use_reentrant=True)
                return self.down(self.up(x))
            return self.down(ByHand.apply(x, self.up.weight, self.up))

    torch.manual_seed(0)
    model = Model()
    if case == "frozen":
        model.up.weight.requires_grad_(False)
    step = sgd(model, left=model.up) if case == "frozen" else sgd(model)
    found = train(tmp_path, model, step, recipe=recipe)
    assert [text.partition(",")[0] for text in found] == ["layer0.up weight has a gradient"] * (case == "by hand")


def test_a_probe_is_one_class_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Largest(Probe):
        def __init__(self, recording):
            pass

        def see(self, rows):
            for row in rows:
                if row.summary.absmax == 100.0:
                    yield Finding(row.identity.iteration, "an input of 100", "somewhere")

    monkeypatch.setattr(registry, "WARNINGS", (*registry.WARNINGS, Largest))
    model = Model()
    with Recorder(tmp_path, iterations=1) as recorder, instrument(model, "bf16", recorder):
        model(torch.full((4, 8), 100.0)).sum().backward()
    assert "an input of 100" in events(tmp_path)


@pytest.mark.parametrize("positioned", [False, True])
def test_a_probe_is_told_of_the_moments_that_it_has_methods_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positioned: bool
):
    """In the order of the training: a step of two micro-batches, whose second layer is recomputed."""
    told: list[str] = []

    class Told(Probe):
        observes = frozenset(("a", "grad"))
        attach = lambda self, undo: undo.callback(told.append, "detached")  # noqa: E731
        begin_pass = lambda self, moment: told.append(f"pass {moment.micro_batch}")  # noqa: E731
        before_product = lambda self, layer, product, moment: told.append(f"before {layer.name}")  # noqa: E731
        before_step = lambda self, optimizer: told.append("before step")  # noqa: E731
        after_step = lambda self, optimizer: told.append("after step")  # noqa: E731
        end_iteration = lambda self, iteration: told.append(f"end {iteration}")  # noqa: E731
        save = lambda self, directory: told.append("save")  # noqa: E731
        close = lambda self: told.append("close")  # noqa: E731

        def observe(self, observed):
            seen = observed.seen
            assert (observed.summary is None) == observed.again
            assert observed.summary is None or observed.summary().absmax == observed.values().abs().max()
            told.append(f"{observed.layer.name} {seen.name}{' again' * observed.again}")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.down, self.up(x), use_reentrant=False)

    monkeypatch.setattr(registry, "OF_A_MODEL", (*registry.OF_A_MODEL, lambda instrumented: Told()))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for micro_batch in range(2):
            with recorder.at(0, micro_batch) if positioned else nullcontext():
                model(X.clone()).square().mean().backward()
        optimizer.step()
        with recorder.at(1, 0) if positioned else nullcontext():
            model(X.clone())
    micro_batch = ["before up", "up a", "before down", "down a", "down grad", "down a again", "up grad"]
    step = ["pass 0", *micro_batch, "pass 1", *micro_batch, "before step", "after step", "end 0"]
    assert told == [*step, "pass 0", *micro_batch[:4], "save", "end 1", "detached", "close"]


def test_the_moments_of_a_probe_end_with_an_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []

    class Told(Probe):
        end_iteration = lambda self, iteration: told.append("end")  # noqa: E731
        after_step = lambda self, optimizer: told.append("step")  # noqa: E731
        close = lambda self: told.append("close")  # noqa: E731

    monkeypatch.setattr(registry, "OF_A_MODEL", (lambda instrumented: Told(),))
    model = Model()
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        model(X.clone())
        raise ZeroDivisionError
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert told == ["end"]


@pytest.mark.parametrize("stepped", [False, True])
def test_a_probe_of_a_run_ends_once_and_what_it_reports_then_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stepped: bool
):
    told: list[str] = []

    class Told(Probe):
        def __init__(self, recording):
            self.recording = recording

        def see(self, rows):
            told.append(f"see {rows[0].identity.iteration}")
            return ()

        def end_iteration(self, iteration):
            told.append(f"end {iteration}")

        def close(self):
            told.append("close")
            self.recording.report(lambda: [Finding(1, "reported at the end")])

    monkeypatch.setattr(registry, "WARNINGS", (Told, lambda recording: None))
    model = Model()
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for _ in range(2):
            model(X.clone()).square().mean().backward()
            if stepped or not recorder.iteration:
                recorder.step()
    assert [word for word in told if not word.startswith("see")] == ["end 0", "end 1", "close"]
    assert told[-1] == "close" and {"see 0", "see 1"} <= set(told)
    assert events(tmp_path) == ["reported at the end"]


def test_a_probe_that_observes_what_no_product_shows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Input(Probe):
        observes = frozenset(("input",))

    monkeypatch.setattr(registry, "OF_A_MODEL", (lambda instrumented: Input(),))
    with pytest.raises(ValueError, match="Input observes 'input': expected some of a, b, grad"):
        with instrument(Model(), "bf16"):
            pass


def test_what_a_probe_keeps_is_checked_as_what_a_user_records(tmp_path: Path):
    with Recorder(tmp_path) as recorder:
        for x, operation, problem in [
            (X.double(), "forward", "x is float64, which is not recorded"),
            (X, "forwards", "operation='forwards' of x"),
            (X.sum(), "forward", "x is a scalar"),
        ]:
            with pytest.raises(ConfigError, match=problem):
                recorder.keep("x", x, Site(1, "fc1"), operation)
    recorder.keep("x", X, Site(1, "fc1"), "forward")  # there is no run


def test_the_example_of_the_architecture_records_and_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (PROJECT / "docs/architecture.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page.partition("## Probes")[2].partition("## Pages")[0], re.DOTALL)
    names: dict[str, object] = {"__name__": "example"}
    exec(compile(source, "architecture.md", "exec"), names)
    monkeypatch.setattr(registry, "WARNINGS", (names["GradientNorms"],))
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected: list[float] = []
    with Recorder(tmp_path) as recorder, instrument(model, "bf16", recorder):
        for scale in (1.0, 0.0):
            optimizer.zero_grad()
            (model(X.clone()).square().mean() * scale).backward()
            expected += [model.up.weight.grad.norm().item(), model.down.weight.grad.norm().item()]
            optimizer.step()
    kept = rows(tmp_path, tensor_name="grad_norm").sort_values(["iteration", "tensor_id"])
    assert [x.item() for x in kept["tensor"]] == pytest.approx(expected)
    assert events(tmp_path) == ["layer0.up: the gradient of the weight is zero"]
