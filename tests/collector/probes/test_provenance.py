"""The first NaN or Inf of a step is traced to the operation that made it, wherever it is planted."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from binade.collector import Recorder, Watch, instrument
from binade.collector.capture.adapters.products import tensors_in
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.collector.probes import provenance
from binade.data.run.events import read_events
from binade.data.run.segment import read_tables
from binade.data.run.tensor_files import load
from tests.collector.small_model import batch, build, end_step

pytestmark = pytest.mark.slow
OVERFLOWS = [("bf16", torch.float16), ("hifp8(overflow=inf)", torch.float32)]  # recipe, dtype
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


class Planted(torch.autograd.Function):
    """The identity, whose gradient has one NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[-1] = torch.nan
        return gradient


@contextmanager
def planted(module: nn.Module, where: str):
    """One NaN in the module's result, or in the gradient of its input; of an embedding, in that of its weight."""
    own, before = module.forward, vars(module).get("forward")

    def forward(x, *args, **kwargs):
        if where == "backward" and isinstance(module, nn.Embedding):
            return F.embedding(x, Planted.apply(module.weight))
        if where == "backward":
            return own(Planted.apply(x), *args, **kwargs)
        result = own(x, *args, **kwargs)
        y = result[0] if isinstance(result, tuple) else result
        spoiled = y.clone()
        spoiled[(-1,) * y.dim()] = torch.nan
        return (spoiled, *result[1:]) if isinstance(result, tuple) else spoiled

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def culprits(root, model, steps, recipe="bf16", **options) -> list[str]:
    """The places that are named, of the steps: functions that run the model forward and backward."""
    with Recorder(root, watch=Watch(find_nan=True, cooldown=0, **options), iterations=0) as recorder:
        with instrument(model, recipe, recorder, backend="torch"):
            for step in steps:
                step()
                model.zero_grad()
                recorder.step()
                recorder.settle()
    return [event.place for event in read_events(recorder.writer.directory)]


def families() -> dict[str, GPTModel]:
    shape = MODELS["deepseek2_lite"]["tiny"]
    deepseek = GPTModel(replace(shape, layers=2, vocab=384))
    deepseek.initialize(0)
    return {"llama": build(layers=2), "deepseek": deepseek}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", ["llama", "deepseek"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("share", ["some", pytest.param("all", marks=pytest.mark.thorough)])
def test_names_the_module_that_a_nan_is_planted_in(tmp_path, family, where, share):
    """Modules of a model, one a step: all, or every fourth one of the Llama and every eighth one of the DeepSeek."""
    model = families()[family]
    called = {}
    tokens, labels = batch()

    def run():
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()

    def note(name, module, args, result):
        if next(tensors_in((result,))).is_floating_point():  # not the tokens of each expert
            called.setdefault(name, args)

    handles = [each.register_forward_hook(partial(note, name)) for name, each in model.named_modules()]
    run()
    for handle in handles:
        handle.remove()
    takes_gradient = {name for name, args in called.items() if args and args[0].requires_grad} | {"embedding"}
    chosen = sorted(called if where == "forward" else takes_gradient)
    assert len(chosen) > 15
    chosen = chosen[:: 1 if share == "all" else 4 if family == "llama" else 8]

    def step(name):
        def planting():
            # Routing by NaN fails in the model: what made it is found nevertheless.
            fails = suppress(RuntimeError) if "router" in name else nullcontext()
            with planted(model.get_submodule(name), where), fails:
                run()

        return planting

    assert culprits(tmp_path, model, [run, *map(step, chosen), run]) == [name or "the model" for name in chosen]


class Small(nn.Module):
    """A linear layer, what the model itself computes, and another layer."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.to(dtype)
        self.factor = 1.0

    def forward(self, x):
        return self.second(self.norm(self.first(x)) * self.factor)


def test_overflow_data_loss_weights_and_what_is_between_modules(tmp_path):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model = Small()

    def run(x=x, factor=1.0, scale=1.0):
        model.factor = factor
        (model(x).square().sum() * scale).backward()

    def with_a_bad_weight():
        kept = model.norm.weight.data.clone()
        model.norm.weight.data[3] = torch.inf
        run()
        model.norm.weight.data.copy_(kept)

    bad = x.clone()
    bad[1, 2] = torch.nan
    steps = [run, lambda: run(bad), lambda: run(scale=torch.nan), lambda: run(factor=torch.inf), with_a_bad_weight]
    assert culprits(tmp_path, model, steps) == ["data", "loss", "the model", "norm"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("recipe", "dtype"), OVERFLOWS)
@pytest.mark.parametrize("waits", [True, False])
def test_overflow_of_a_format(tmp_path, monkeypatch, recipe, dtype, waits):
    """A product beyond 65,504 in fp16; an operand beyond HiF8's range where that becomes Inf. The operands are kept,
    on a GPU those of the second one; their largest magnitude is known from the first."""
    monkeypatch.setattr(provenance, "stays", lambda x: not waits)
    x = torch.full((4, 8), 100.0, dtype=dtype)
    model = Small(dtype)
    model.norm.weight.data.fill_(1000.0)
    model.norm.bias.data.fill_(60000.0)
    model.second.weight.data.fill_(2.0)
    if recipe != "bf16":
        model.norm.bias.data.fill_(1e6)

    def run():
        model(x).float().square().sum().backward()

    inputs = []
    model.second.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach()))
    assert culprits(tmp_path, model, [run, run], recipe) == ["second", "second"]
    from binade.data.index.catalog import Catalog  # not where only a GPU is

    with Catalog.open(tmp_path) as catalog:
        rows = catalog.tensors().set_index("tensor_name")
        assert set(rows["iteration"]) == {0 if waits else 1}
        (first, _) = read_events(tmp_path / rows["run_id"].iloc[0])
        assert f"finite (absmax {inputs[0].abs().max().item():.3g}), but" in first.text
        assert list(rows.index) == [*(f"non_finite_operand{number}" for number in (1, 2, 3)), "non_finite_result1"]
        assert (rows["infs"] + rows["nans"] > 0).tolist() == [False] * 3 + [True]
        kept = catalog.load(rows.loc["non_finite_operand2", "tensor_id"])
        assert torch.equal(kept, model.second.weight)


@pytest.mark.parametrize(("recipe", "dtype"), OVERFLOWS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])])
@pytest.mark.parametrize("waits", [True, False])
def test_the_operands_of_a_backward_pass_are_kept(tmp_path, monkeypatch, recipe, dtype, device, waits):
    """Of an overflow of the gradients, against what hooks saw; on a GPU, of the second one."""
    monkeypatch.setattr(provenance, "stays", lambda x: not waits)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(inplace=True), nn.Linear(300, 8)).to(device, dtype)
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    seen = {"operand2": model[2].weight, "operand3": model[2].bias}
    model[2].register_forward_pre_hook(lambda module, args: seen.update(operand1=args[0].detach().clone()))
    model[2].register_full_backward_hook(lambda module, computed, given: seen.update(grad_output1=given[0].clone()))

    def run(scale=1.0):
        (model(x).float() * scale).sum().backward()

    assert culprits(tmp_path, model, [run, *[partial(run, 6e4)] * 2], recipe) == ["2", "2"]
    (run,) = (file.parent for file in tmp_path.glob("*/run.json"))
    found = [row for segment in run.glob("segments/*") for row in read_tables(segment)["tensor"].to_pylist()]
    rows = {row["tensor_name"]: row for row in found}  # without DuckDB, which a GPU's machine need not have
    assert len(rows) == len(found) and rows.keys() == {f"non_finite_{name}" for name in (*seen, "result1")}
    for row in found:
        assert (row["iteration"], row["operation"]) == (1 if waits else 2, "backward")
    assert rows["non_finite_result1"]["infs"] + rows["non_finite_result1"]["nans"] > 0
    for name, operand in seen.items():
        assert torch.equal(load(run / rows[f"non_finite_{name}"]["path"]), operand.detach().cpu())
    for event in read_events(run):
        assert f"(absmax {seen['grad_output1'].abs().max().item():.3g})" in event.text


class Mixed(nn.Module):
    """A module that multiplies by the weight of a layer instead of calling it."""

    def __init__(self):
        super().__init__()
        self.unseen = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(x, self.unseen.weight)


class Parts(nn.Module):
    """Layers that the model calls, one that it does not call, a buffer, and a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.mixed = nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8), Mixed()
        self.scale, self.last = nn.BatchNorm1d(8, momentum=None).eval(), nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.mixed(self.first(self.table(tokens)))
        return self.last(self.scale(x))


def cause(root, loop, optimizer=torch.optim.SGD, **options):
    """(iteration, place, text) of the first event of three iterations, which the loop runs; None without one."""
    torch.manual_seed(0)
    model = Parts()
    model.train = lambda mode=True: model  # the buffers stay
    steps = optimizer([p for p in model.parameters() if p is not model.table.weight], **{"lr": 0.1} | options)
    with Recorder(root, watch=Watch(find_nan=True), iterations=0) as recorder, instrument(model, "bf16", recorder):
        for iteration in range(3):
            loop(model, steps, recorder, iteration)
            steps.zero_grad()
    events = [event for event in read_events(recorder.writer.directory) if event.kind == "non-finite"]
    return (events[0].iteration, events[0].place, events[0].text) if events else None


TOKENS = torch.arange(12) % 5


def usual(model, optimizer, recorder, iteration, before=lambda: None, between=lambda: None, factor=1.0):
    before()
    (model(TOKENS).square().mean() * factor).backward()
    between()
    optimizer.step()


def test_a_sound_loop_has_no_cause(tmp_path):
    assert cause(tmp_path, usual) is None


@pytest.mark.parametrize("where", ["first.weight", "first.bias", "mixed.unseen.weight", "table.weight"])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_weight_that_other_code_has_written(tmp_path, where, when):
    """Loaded at first, and later over a finite one, in place or through .data."""

    def loop(model, optimizer, recorder, iteration):
        def damage():
            if iteration == when:
                weight = model.get_parameter(where)
                if when == 1:
                    weight.data[0] = torch.nan
                else:
                    model.load_state_dict(model.state_dict() | {where: torch.full_like(weight, torch.inf)})

        usual(model, optimizer, recorder, iteration, damage)

    iteration, place, text = cause(tmp_path, loop)
    assert (iteration, place) == (when, where.rpartition(".")[0]) and where in text
    assert ("loaded or initialized" in text, "other code has written it" in text) == (when == 0, when > 0)


def test_a_weight_that_is_damaged_between_micro_batches_and_mended_before_the_step(tmp_path):
    def loop(model, optimizer, recorder, iteration):
        model(TOKENS).square().mean().backward()
        kept = model.first.weight.detach().clone()
        model.first.weight.data.fill_(torch.nan)
        model(TOKENS).square().mean().backward()
        model.first.weight.data.copy_(kept)
        for p in model.parameters():
            p.grad = None
        optimizer.step()

    iteration, place, text = cause(tmp_path, loop)
    assert (iteration, place) == (0, "first") and "finite in the forward pass of iteration 0" in text


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"lr": 1e38, "foreach": False}),
        (torch.optim.SGD, {"lr": 1e38, "foreach": True}),
        (torch.optim.AdamW, {"lr": float("inf")}),
        (torch.optim.LBFGS, {"lr": float("inf")}),
    ],
    ids=["sgd", "foreach", "adamw", "lbfgs"],
)
def test_an_optimizer_that_makes_it(tmp_path, optimizer, options):
    def loop(model, optimizer, recorder, iteration):
        def closure():
            optimizer.zero_grad()
            loss = model(TOKENS).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            usual(model, optimizer, recorder, iteration, factor=1e6)

    iteration, _, text = cause(tmp_path, loop, optimizer, **options)
    assert iteration == 0 and f"the step of {optimizer.__name__}" in text and "made it" in text


def test_a_gradient_that_is_spoiled_after_the_backward_pass(tmp_path):
    def loop(model, optimizer, recorder, iteration):
        usual(model, optimizer, recorder, iteration, between=lambda: model.last.weight.grad.mul_(torch.nan))

    iteration, place, text = cause(tmp_path, loop)
    assert (iteration, place) == (0, "last") and "those that the backward pass computed were" in text


def test_a_buffer(tmp_path):
    def loop(model, optimizer, recorder, iteration):
        model.scale.running_mean[2] = torch.nan
        usual(model, optimizer, recorder, iteration)

    assert cause(tmp_path, loop)[1:] == ("scale", "scale, forward: its buffer scale.running_mean is not finite")


def test_what_the_training_loop_computes_between_parts_of_the_model(tmp_path):
    def loop(model, optimizer, recorder, iteration):
        x = model.first(model.table(TOKENS)) * (torch.inf if iteration == 1 else 1.0)
        model.last(x).square().mean().backward()
        optimizer.step()

    iteration, place, text = cause(tmp_path, loop)
    assert (iteration, place) == (1, "last") and "the training loop gave it" in text


@pytest.mark.parametrize("find_nan", [True, False])
def test_a_loss_that_is_logged_and_has_no_backward_pass(tmp_path, find_nan):
    """A loop that skips such steps."""
    model = Small()
    watch = Watch(find_nan=find_nan)
    with Recorder(tmp_path, watch=watch, iterations=0) as recorder, instrument(model, "bf16", recorder):
        for loss in (1.0, torch.tensor(torch.nan), float("inf"), 1.0):
            model(torch.ones(4, 8)).sum().backward()
            recorder.log(loss=loss)
            recorder.step()
    (event,) = read_events(recorder.writer.directory)
    assert (event.kind, event.iteration, event.place) == ("non-finite" if find_nan else "warning", 1, "loss")
    assert "logged" in event.text


def test_a_copy_of_the_model_is_not_traced(tmp_path):
    model, x = Small(), torch.full((4, 8), torch.nan)
    with Recorder(tmp_path, watch=Watch(find_nan=True), iterations=0) as recorder, instrument(model, "bf16", recorder):
        model(torch.ones(4, 8)).sum().backward()
        copy = deepcopy(model)
        copy(x).sum().backward()
        recorder.step()
    copy(x)
    assert not read_events(recorder.writer.directory)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_is_found_fires_the_trigger_nan(tmp_path):
    model = Small()
    watch = Watch(find_nan=True, trigger=("nan",), capture_steps=1)
    with Recorder(tmp_path, watch=watch, iterations=0) as recorder, instrument(model, "bf16", recorder):
        for factor in (1.0, torch.inf, 1.0, 1.0):
            model.factor = factor
            model(torch.ones(4, 8)).sum().backward()
            end_step(recorder)
    found, fired, captured = read_events(recorder.writer.directory)
    assert (found.kind, found.iteration, fired.kind, fired.trigger) == ("non-finite", 1, "trigger", "nan")
    assert "some values are NaN or Inf" in fired.text
    assert (captured.kind, captured.iteration) == ("capture", 3)


def test_backward_passes_on_two_threads_take_different_places(tmp_path):
    """Autograd has one thread for each device; here they change between any two lines."""
    notes: list = []

    def traced_line(*_):
        time.sleep(0)
        return traced_line

    with Recorder(tmp_path) as recorder:
        traced = provenance.Provenance(nn.Linear(2, 2), recorder, {})

        def backward():
            for _ in range(50):
                traced._gradient(notes, torch.ones(2))

        threads = [threading.Thread(target=backward) for _ in range(2)]
        threading.settrace(traced_line)
        try:
            for thread in threads:
                thread.start()
        finally:
            threading.settrace(None)
        for thread in threads:
            thread.join()
    assert sorted(at for at, _ in notes) == [*range(1, 101)]
