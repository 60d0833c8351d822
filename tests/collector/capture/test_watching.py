"""A Recorder that watches: what of which step is on the disk, and what a trigger adds."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress

import pandas as pd
import pytest
import torch

from binade.collector import Recorder, Watch, instrument
from binade.collector.capture.monitor import Monitor
from binade.collector.errors import ConfigError
from binade.data.index.catalog import Catalog
from binade.data.run.directory import read_status
from binade.data.run.events import EventKind, read_events
from tests.collector.small_model import build, end_step, loss
from tests.conftest import PROJECT

NAMES = ("input", "weight")
pytestmark = pytest.mark.slow
BASIC = {"tensors": 8, "sketched": 0, "kept": 0}
WHOLE = {"tensors": 8, "sketched": 8, "kept": 8}


Found = dict[int, dict[str, int]]


def trained(
    root, steps: int, at_step=lambda step, model: None, more=None, **options
) -> tuple[Recorder, dict[int, dict[str, int]]]:
    """Train under mxfp8; of each iteration what is on the disk. options of Watch, more of Recorder."""
    model = build(layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        Recorder(root, watch=Watch(**options), **{"tensors": NAMES, "scores": ()} | (more or {})) as recorder,
        instrument(model, "mxfp8", recorder, backend="torch"),
    ):
        for step in range(steps):
            at_step(step, model)
            found = loss(model)
            recorder.log(found)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()
            end_step(recorder)
    with Catalog.open(root) as catalog:
        counts = catalog.ask(
            "SELECT iteration, count(*) AS tensors, count(path) AS kept, count(sketch_start)::BIGINT AS sketched"
            " FROM tensor GROUP BY ALL ORDER BY ALL"
        )
    return recorder, {row.pop("iteration"): row for row in counts.to_dict("records")}


def test_a_watched_step_has_the_statistics_of_a_recorded_one_without_sketch_and_values(tmp_path):
    _, found = trained(tmp_path / "watched", 7, more={"tensors": ()}, watch="every 3 steps")
    assert found == {step: BASIC | {"tensors": 35} for step in (0, 3, 6)}
    trained(tmp_path / "recorded", 4, more={"max_bytes": 0, "measures": (), "tensors": ()})
    tables = []
    for root in ("watched", "recorded"):
        with Catalog.open(tmp_path / root) as catalog:
            table = catalog.tensors()
            tables.append(table[table["iteration"] == 3].sort_values("tensor_id", key=lambda ids: ids.str[-2:]))
    keys = ["layer_index", "module", "tensor_name"]
    watched, recorded = (table.set_index(keys).sort_index() for table in tables)
    same = ["absmax", "absmin", "zeros", "sqnr_db", "flush_to_zero", "saturated", "format", "shape", "numel"]
    assert watched[same].equals(recorded[same])
    for name in ("mean", "rms", "std", "skewness", "kurtosis"):  # sums in another order
        assert watched[name].to_numpy() == pytest.approx(recorded[name].to_numpy(), rel=1e-9, abs=1e-12), name
    assert watched["sqnr_db"].notna().sum() == 18


def test_a_trigger_records_the_steps_around_it(tmp_path, caplog):
    def jump(step, model):
        if step == 5:
            model.layers[0].mlp.linear_fc1.weight.data[0, 0] = 1e32

    options = {"watch": "every 100 steps", "trigger": ("absmax > 1e30",), "ring": 2, "capture_steps": 2}
    recorder, found = trained(tmp_path, 9, jump, **options)
    assert found == {0: BASIC, 3: BASIC, 4: BASIC, 5: BASIC, 7: WHOLE, 8: WHOLE}
    trigger, capture = events = read_events(recorder.writer.directory)
    logged = [record for record in caplog.records if record.name == "binade"]
    assert [record.getMessage() for record in logged] == [str(event) for event in events]
    assert [record.args for record in logged] == [(event,) for event in events]
    assert (trigger.kind, trigger.iteration, trigger.trigger) == (EventKind.TRIGGER, 5, "absmax > 1e30")
    assert (trigger.place, capture.kind, capture.iteration, capture.until) == (
        "layer1.fc1 weight", EventKind.CAPTURE, 7, 8,
    )  # fmt: skip
    assert "before it, iterations 3 to 4 are kept" in trigger.text


def test_the_budgets_hold(tmp_path):
    """The ring's memory, the captures' bytes, and the cool-down."""
    options = {"watch": "every step", "trigger": ("absmax > 0",), "capture_steps": 1}
    recorder, found = trained(tmp_path / "bytes", 8, cooldown=1, capture_bytes=1, **options)
    events = read_events(recorder.writer.directory)
    assert [event.iteration for event in events if event.kind == EventKind.TRIGGER] == [0, 2, 4, 6]
    # The second capture was asked for before the first was on the disk.
    assert sum(event.kind == EventKind.CAPTURE for event in events) == 2
    assert "capture budget is used up" in events[-1].text
    assert sum(each["kept"] > 0 for each in found.values()) == 2
    trigger = {"trigger": ("loss > 1 for 5",), "ring": 3, "capture_steps": 0}
    assert list(trained(tmp_path / "ring", 6, **trigger)[1]) == [1, 2, 3, 4]
    assert list(trained(tmp_path / "small", 6, ring_bytes=8 * 2048, **trigger)[1]) == [3, 4]


def measured(root, losses, **options) -> tuple[Recorder, pd.DataFrame]:
    """A tensor of each step, without a model, and its loss: the last one ends the run."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    x[:4] = 1e3
    with suppress(ZeroDivisionError), Recorder(root, scores=(), watch=Watch(**options)) as recorder:
        for step, each in enumerate(losses):
            with recorder.at(step, 0, record=False):
                recorder.record("x", x, layer=1, module="norm", operation="forward", phase="pre")
            recorder.log(each)
        raise ZeroDivisionError
    with Catalog.open(root) as catalog:
        return recorder, catalog.tensors()


def test_the_ring_is_kept_if_the_loss_ends_the_run(tmp_path):
    recorder, found = measured(tmp_path, [1.0] * 6 + [math.nan], trigger=("nan",), ring=3)
    assert sorted(found["iteration"]) == [3, 4, 5, 6]
    (event,) = read_events(recorder.writer.directory)
    assert (event.iteration, "iterations 3 to 5 are kept" in event.text) == (6, True)


@pytest.mark.parametrize("trigger", ["kurtosis > 3", "skewness > 0", "absmin > 0"])
def test_every_moment_can_be_a_trigger(tmp_path, trigger):
    recorder, found = measured(tmp_path, [1.0], watch="every step", trigger=(trigger,))
    assert read_events(recorder.writer.directory)[0].trigger == trigger
    assert found["kurtosis"].item() > 3


def test_a_segment_whose_bytes_cannot_be_counted_keeps_its_files(tmp_path, monkeypatch):
    def removed(monitor, segment, rows):
        raise FileNotFoundError(segment)

    monkeypatch.setattr(Monitor, "wrote", removed)
    with pytest.raises(FileNotFoundError), Recorder(tmp_path, scores=()) as recorder:
        recorder.record("x", torch.ones(4), layer=1, module="norm", operation="forward", phase="pre")
    assert len(list(tmp_path.rglob("*.pt"))) == read_status(recorder.writer.directory).tensors == 1


@pytest.mark.parametrize(
    ("option", "text"),
    [({"watch": "often"}, "every 100 steps"), ({"stats": "some"}, "basic, full"), ({"ring": -1}, "0 or more"),
     ({"trigger": "nan"}, "tuple"), ({"trigger": ("foo",)}, "LIMIT")],
)  # fmt: skip
def test_refuses_what_it_cannot_do(option, text):
    with pytest.raises(ConfigError, match=text):
        Watch(**option)


def test_triggers_are_checked_without_assertions():
    code = "from binade.collector.capture.watching import WatchOptions as W; W(trigger=('foo',)).check()"
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert "ConfigError" in done.stderr and "LIMIT" in done.stderr
