"""Recording changes no bit of what is computed, and costs nothing where nothing is recorded."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.parallel import ParallelLinear
from binade.data.index.catalog import Catalog
from tests.collector.small_model import SCORES, build, gradients, loss, step

pytestmark = pytest.mark.slow


def test_recipe_bf16_changes_nothing_to_the_bit(tmp_path):
    plain, recorded = build(), build()
    logits = step(plain)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(recorded, "bf16", recorder):
        assert torch.equal(step(recorded), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain), gradients(recorded), strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", ["mxfp8", "FA_mxfp4"])
def test_recording_changes_nothing_to_the_bit(tmp_path, recipe):
    alone, recorded = build(), build()
    with instrument(alone, recipe):
        logits = step(alone)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(recorded, recipe, recorder):
        assert torch.equal(step(recorded), logits)
    assert all(torch.equal(a, b) for a, b in zip(gradients(alone), gradients(recorded), strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("training", [False, True], ids=["eval mode", "training mode"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_leaves_delayed_scales_alone(tmp_path, context, training, recording):
    """Values of other magnitudes between two steps."""
    losses = []
    for evaluates in (False, True):
        model = build(1)
        recorder = Recorder(tmp_path / str(evaluates), scores=(), evaluation=recording, tensors=("input",))
        with recorder, instrument(model, "te_delayed", recorder, backend="torch"):
            for _ in range(3):
                losses.append(loss(model))
                losses[-1].backward()
                recorder.step()
                if evaluates:
                    model.train(training)
                    with context():
                        model(torch.zeros(1, 7, dtype=torch.int64))
                    model.train()
    assert losses[:3] == losses[3:]


def counted_step(model: GPTModel) -> Counter[str]:
    """What torch computes, whether or not the caller's dispatch modes see it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model)
    return Counter({event.key: event.count for event in profile.key_averages() if event.key.startswith("aten::")})


def test_off_the_recorded_iterations_recording_costs_nothing(tmp_path):
    """The same operations as without a recorder, and nothing on disk. Only the micro-batch is copied, for its hash."""
    model = build()
    layers = [m for m in model.modules() if isinstance(m, ParallelLinear)]
    with instrument(model, "mxfp4", backend="torch"):
        step(model)  # gradients are there from now on
        alone = counted_step(model)
    with Recorder(tmp_path, scores=SCORES) as recorder, instrument(model, "mxfp4", recorder, backend="torch"):
        with recorder.at(0, 0, False):
            assert [layer.begin().tap for layer in layers] == [None] * len(layers)
            step(model)  # the first one is sampled for the hash of the weights
            copied = dict.fromkeys(("detach", "to", "_to_copy", "empty", "copy_"), 1)  # of the tokens
            assert counted_step(model) - alone == Counter({f"aten::{name}": count for name, count in copied.items()})
        assert list(tmp_path.rglob("*.pt")) == list(tmp_path.rglob("*.parquet")) == []
        with recorder.at(1, 0, True):
            assert None not in [layer.begin().tap for layer in layers]
            assert counted_step(model).total() > alone.total()
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors()["iteration"]) == {1}
