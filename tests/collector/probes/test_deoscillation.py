"""Weights that oscillate are set to their rounded values: against Primus's own code, and an optimizer written out."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from binade.collector import Recorder, instrument
from binade.collector.capture.adapters.layer import InstrumentError
from binade.collector.probes.deoscillation import Weight
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Deoscillation
from binade.data.run.events import EventKind, read_events
from binade.quant.quantizer import fake_quantize
from binade.quant.specs import Spec
from tests.collector.small_model import build, step

AMD = "mxfp4(scale=even, block=32x32)"
# What WeightDeOscRunner._track_and_snap of Primus fd1eeab returns for this walk, at the end of each period.
PRIMUS = {8: 569, 13: 352, 18: 366, 23: 299}
SUM = -34.970885990420356  # of the weights after it


def test_a_random_walk_is_snapped_as_primus_snaps_it():
    torch.manual_seed(0)
    weight, found = nn.Parameter(torch.randn(64, 64)), {}
    followed = Weight(weight, "fc1", lambda: Spec.of(AMD))
    for number in range(1, 24):
        with torch.no_grad():
            weight += torch.randn(64, 64) * 3e-2
        if (count := followed.follow(Deoscillation(5, 3.0, 3))) is not None:
            found[number] = int(count)
    assert found == PRIMUS
    assert float(weight.detach().double().sum()) == pytest.approx(SUM, abs=1e-9)


FILE = f"""
[linear]
forward.input = "mxfp4"
forward.weight = "{AMD}"
[modules.fc1]
forward.weight = "bf16"
[deoscillation]
period = 3
ratio = 1.5
start = 2
"""


def train(model, recipe: str, root: Path, steps: range, lr: float = 1e-2, after=None, scales_of=None) -> Path:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Recorder(root, scores=(), measures=(), max_bytes=0) as recorder:
        with instrument(model, recipe, recorder, scales_of=scales_of):
            for _ in steps:
                optimizer.zero_grad()
                step(model)
                optimizer.step()
                if after:
                    after()
    return recorder.writer.directory


def weights(model) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone() for name, x in model.named_parameters()}


def test_weights_that_are_rounded_are_snapped_while_the_model_trains(tmp_path):
    """The same steps without the recipe's de-oscillation, whose sums and snapping are done here in NumPy."""
    (tmp_path / "mine.toml").write_text(FILE)
    model = build(1)
    directory = train(model, str(tmp_path / "mine.toml"), tmp_path / "a", range(8))
    other, sums, snapped = build(1), {}, []
    linear = {n: p for n, p in other.named_parameters() if "linear" in n and "fc1" not in n}
    assert len(linear) == 3
    seen = 0

    def after() -> None:
        nonlocal seen
        seen += 1
        if seen < 2:
            return
        count = 0
        for name, parameter in linear.items():
            w = parameter.detach().numpy().astype(np.float32)
            q = fake_quantize(parameter.detach().bfloat16(), AMD).float().numpy()
            if name in sums:
                former, rounded, moved, jumped = sums[name]
                sums[name] = [w.copy(), q, moved + abs(w - former), jumped + abs(q - rounded)]
            else:
                sums[name] = [w.copy(), q, np.zeros_like(w), np.zeros_like(w)]
            if (seen - 2) % 3 == 0 and seen > 2:
                _, _, moved, jumped = sums[name]
                far = (moved > 0) & (jumped / np.maximum(moved, 1e-12) >= np.float32(1.5))
                w[far] = q[far]
                count += int(far.sum())
                parameter.data.copy_(torch.from_numpy(w))
                sums[name] = [w.copy(), q, np.zeros_like(w), np.zeros_like(w)]
        if (seen - 2) % 3 == 0 and seen > 2:
            snapped.append(count)

    train(other, f"{tmp_path / 'mine.toml'}(without=deoscillation)", tmp_path / "b", range(8), after=after)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    events = [event for event in read_events(directory) if event.kind == EventKind.WEIGHTS]
    assert [int(event.text.split()[0].replace(",", "")) for event in events] == snapped and min(snapped) > 0
    total = sum(p.numel() for p in linear.values())
    assert all(f"of {total:,} weights" in event.text for event in events)


def test_a_run_continues_with_the_sums_of_another(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    recipe = str(tmp_path / "mine.toml")
    whole, parts = build(1), build(1)
    train(whole, recipe, tmp_path / "whole", range(9))
    first = train(parts, recipe, tmp_path / "parts", range(4))
    train(parts, recipe, tmp_path / "parts", range(5), scales_of=first)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
    with pytest.raises(InstrumentError, match=r"no sums of de-oscillation can be read from .*deoscillation_r00"):
        with instrument(parts, recipe, scales_of=tmp_path):
            pass


def test_what_cannot_be_followed_is_said(tmp_path):
    """An optimizer that holds copies, as Megatron's distributed one does; without steps there is nothing to say."""
    (tmp_path / "mine.toml").write_text(FILE)
    model, recipe = build(1), str(tmp_path / "mine.toml")
    with warnings.catch_warnings(), instrument(model, recipe):
        warnings.simplefilter("error")
        step(model)
    copies = torch.optim.SGD([parameter.detach().clone().requires_grad_() for parameter in model.parameters()])

    def with_copies() -> None:
        with instrument(model, recipe):
            copies.step()

    with pytest.warns(UserWarning, match="no torch optimizer updated the model's weights"):
        with_copies()
    with pytest.raises(InstrumentError, match=r"two weights are called layer1\.\w+: instrument one"):
        with instrument([model, build(1)], recipe):
            pass


def test_another_format_begins_a_new_period():
    """Rounded to it, every weight jumps; none of them oscillates."""
    specs = iter([AMD] * 3 + ["nvfp4"] * 4)
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 64))
    followed = Weight(weight, "fc1", lambda: Spec.of(next(specs)))
    counts = []
    for _ in range(7):
        with torch.no_grad():
            weight += torch.randn(64, 64) * 1e-5
        counts.append(followed.follow(Deoscillation(4, 3.0, 1)))
    assert counts == [None] * 7 and followed.counted == 3


def test_amd_s_recipe_and_the_recipe_without_it():
    recipe = parse_recipe("amd_mxfp4_deosc")
    assert recipe.deoscillation == Deoscillation(200, 3.0, 1500)
    assert "de-oscillation every 200 steps from step 1500, ratio 3" in recipe.describe()
    without = parse_recipe("amd_mxfp4_deosc(without=deoscillation)")
    assert without.deoscillation is None and without.linear.formats == parse_recipe("amd_mxfp4").linear.formats
