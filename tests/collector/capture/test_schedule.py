"""binade.schedule: a run that leaves quantization goes on like one that is instrumented otherwise from there on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import binade
from binade.collector import Recorder, Watch, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.errors import ConfigError
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import OPERANDS
from binade.data.catalog import Catalog
from binade.data.events import EventKind, read_events
from tests.collector.small_model import build, end_step, loss

pytestmark = pytest.mark.slow
STEPS = 5


def losses(root, recipes: dict[int, str], schedule=(), skip=None, **options) -> tuple[list[float], Recorder]:
    """Of a model trained under the recipe of the latest step among `recipes`, each in a context of its own."""
    model, found = build(layers=1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starts = [*recipes, STEPS]
    with Recorder(root, watch=Watch(**options), iterations=0, tensors=("weight",), scores=()) as recorder:
        for start, end in pairwise(starts):
            with instrument(
                model, recipes[start], recorder, backend="torch", schedule=schedule, skip=skip if start else None
            ):
                for _ in range(start, end):
                    value = loss(model)
                    value.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    found.append(value.item())
                    end_step(recorder)
    return found, recorder


@pytest.mark.parametrize(
    ("switch", "later", "skip"),
    [({}, "bf16", None), ({"layers": r"fc1"}, "mxfp4", r"fc1"), ({"gemm": "forward"}, "without forward", None)],
    ids=["everything", "a layer", "a GEMM"],
)
def test_from_a_step_on(tmp_path, switch, later, skip):
    if later == "without forward":
        names = [name for name in OPERANDS if ".forward." in name and not name.startswith("router")]
        later = parse_recipe("mxfp4", operands=[f"{name}=bf16" for name in names])
    expected, _ = losses(tmp_path / "two", {0: "mxfp4", 3: later}, skip=skip)
    found, recorder = losses(tmp_path / "one", {0: "mxfp4"}, [binade.schedule(at=3, **switch)])
    assert found == expected
    assert found[3:] != losses(tmp_path / "none", {0: "mxfp4"})[0][3:]
    (event,) = read_events(recorder.writer.directory)
    assert "runs in bf16 (layers: " in event.text
    assert (event.kind, event.iteration) == (EventKind.SCHEDULE, 3)


def test_when_a_trigger_fires(tmp_path):
    """Which is known one step later, before the next but one begins."""
    trigger = "absmax > 0 for 2"
    switch = binade.schedule(layers="fc2", when=trigger)
    options = {"watch": "every step", "trigger": (trigger,), "capture_steps": 0}
    _, recorder = losses(tmp_path, {0: "mxfp8"}, [switch], **options)
    change = read_events(recorder.writer.directory)[-1]
    assert (change.kind, change.trigger, change.iteration) == (EventKind.SCHEDULE, trigger, 3)
    with Catalog.open(tmp_path) as catalog:
        table = catalog.tensors()
    for row in table.itertuples():
        left = row.module == "fc2" and row.iteration >= 3
        assert row.quant_type == ("bf16" if left else "mxfp8")
        assert (row.format is None or row.format != row.format) == left


def test_refuses_what_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="one of at="):
        binade.schedule()
    with pytest.raises(ConfigError, match="dgrad"):
        binade.schedule(gemm="backward", at=1)
    with pytest.raises(InstrumentError, match="'nan'"), Recorder(tmp_path) as recorder:
        with instrument(build(layers=1), "mxfp8", recorder, schedule=[binade.schedule(when="nan")]):
            pass
