"""The way of a NaN through a step, against hooks of torch, and the page that shows it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from binade import plots
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.collector import Recorder, Watch, instrument
from binade.data.index.catalog import Catalog
from binade.data.run.events import Event, EventKind, append_event, read_events
from tests.collector.small_model import batch, build

pytestmark = pytest.mark.slow
CULPRIT, STEP = "layers.0.mlp.linear_fc1", 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, list[str]]:
    """A root with a run in whose step a result becomes Inf, and the modules without children that computed something
    that is not finite after it, in order."""
    root, model = tmp_path_factory.mktemp("provenance"), build(layers=2)
    tokens, labels = batch()
    reached: list[str] = []
    with Recorder(root, watch=Watch("every step", find_nan=True)) as recorder, instrument(model, "mxfp8", recorder):
        for step in range(STEP + 1):
            if step == STEP:

                def spoil(module, args, result):
                    y = result[0] if isinstance(result, tuple) else result
                    y.data[0, 0, 0] = torch.inf

                def note(name):
                    def hook(module, args, result):
                        y = result[0] if isinstance(result, tuple) else result
                        if not torch.isfinite(y).all():
                            reached.append(name)

                    return hook

                model.get_submodule(CULPRIT).register_forward_hook(spoil, prepend=True)
                for name, module in model.named_modules():
                    if not [*module.children()]:
                        module.register_forward_hook(note(name))
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            model.zero_grad()
            recorder.step()
    return root, reached


@pytest.fixture
def catalog(recorded):
    with Catalog.open(recorded[0]) as opened:
        yield opened


def non_finite(run: Path) -> Event:
    """The run has another event: no optimizer steps, so its weights stay the same."""
    (found,) = (event for event in read_events(run) if event.kind == EventKind.NON_FINITE)
    return found


def test_the_chain_is_what_was_not_finite_in_the_order_of_execution(recorded, catalog):
    (run,) = catalog.runs()["run_id"]
    event = non_finite(catalog.root / run)
    assert (event.place, event.layer, event.module) == (CULPRIT, 1, "fc1")
    orders = [event.order, *(each.order for each in event.chain)]
    assert orders == sorted(orders)
    forward = [each.place for each in event.chain if each.operation == "forward"]
    assert [CULPRIT, *forward] == [*recorded[1], "the model"]
    backward = [each.place for each in event.chain if each.operation == "backward"]
    assert backward[0] == "loss" and CULPRIT in backward


def test_the_answer_has_the_chain_the_ranks_and_the_steps_before(recorded, catalog, tmp_path):
    (run,) = catalog.runs()["run_id"]
    found = non_finite(catalog.root / run)
    drawn = plots.provenance(catalog)
    assert f"{CULPRIT}, forward" in drawn.verdict
    assert drawn.scope.counts == ((len(drawn.tables["ranks"]), "rank"),)
    table = next(figure for figure in drawn.figures if figure.name == "chain").table
    assert table["place"].tolist() == [CULPRIT, *(each.place for each in found.chain)]
    before = next(figure for figure in drawn.figures if figure.name == "before_absmax").table
    rows = catalog.tensors()
    rows = rows[(rows["module"] == "fc1") & (rows["layer_index"] == 1) & (rows["tensor_name"] == "input")]
    own = before[before["tensor_name"] == "input"]
    assert own["absmax"].tolist() == rows.sort_values("iteration")["absmax"].tolist() and len(own) == STEP + 1
    assert set(drawn.tables["operands"]["tensor_name"]) >= {"non_finite_operand1", "non_finite_result1"}


def test_what_a_backward_pass_took_is_shown(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).half()
    with Recorder(tmp_path, watch=Watch(find_nan=True)) as recorder, instrument(model, "bf16", recorder):
        (model(torch.ones(40, 8).half()).float() * 6e4).sum().backward()
    with Catalog.open(tmp_path) as catalog:
        drawn = plots.provenance(catalog)
    assert "1, backward" in drawn.verdict
    operands = [f"non_finite_operand{number}" for number in (1, 2, 3)]
    names = ["non_finite_grad_output1", *operands, "non_finite_result1"]
    assert drawn.tables["operands"]["tensor_name"].tolist() == names


def test_of_several_ranks_the_earliest_is_first(recorded, tmp_path):
    root = tmp_path / "root"
    (run,) = (path for path in recorded[0].iterdir() if (path / "run.json").exists())
    shutil.copytree(run, root / run.name)
    (root / run.name / "ranks").mkdir(exist_ok=True)
    append_event(root / run.name, Event(EventKind.NON_FINITE, STEP, "data made it", "t", rank=1, place="data", order=1))
    with Catalog.open(root) as catalog:
        drawn = plots.provenance(catalog)
    assert drawn.tables["ranks"]["rank"].tolist() == [1, 0] and "on rank 1: data made it" in drawn.verdict


def test_the_page_and_its_pin_show_the_same(recorded, catalog, visit):
    at = visit(recorded[0], "runs", view="provenance")
    assert any(CULPRIT.rpartition(".")[2].replace("_", "\\_") in text.value for text in at.markdown)
    pin = pins.draw(catalog, Pin("runs", {"view": ["provenance"]}, "chain"))
    assert [figure.name for figure in pin.figures] == ["chain"]


def test_without_an_event_the_page_says_so(collected):
    with Catalog.open(collected) as opened:
        assert "find_nan" in plots.provenance(opened).problems[0]
