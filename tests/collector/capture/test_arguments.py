"""Arguments of the public functions that record: each wrong one gives one clear message, and leaves no run."""

from __future__ import annotations

import math
import re

import pytest
from torch import nn

from binade import Merge, Recorder, Watch, instrument
from binade.collector.errors import ConfigError

COUNT = "expected a whole number"


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("root", 5, "root is 5: expected the path of a directory"),
        ("label", 5, "label is 5: expected a string"),
        ("config", [1], "config is a list: expected a dict"),
        ("tensors", 5, "tensors is 5: expected a tuple of names"),
        ("tensors", [5], "an item of tensors is 5: expected a name"),
        ("scores", None, "scores is None: expected a tuple of names"),
        ("measures", 3, "measures is 3: expected a tuple of names"),
        ("iterations", "two", f"iterations is 'two': {COUNT}, 0 or more"),
        ("iterations", -1, f"iterations is -1: {COUNT}, 0 or more"),
        ("iterations", True, f"iterations is True: {COUNT}, 0 or more"),
        ("micro_batches", 1.5, f"micro_batches is 1.5: {COUNT}, 0 or more"),
        ("max_bytes", "4G", f"max_bytes is '4G': {COUNT}, 0 or more"),
        ("max_bytes", math.nan, f"max_bytes is nan: {COUNT}, 0 or more"),
        ("max_bytes", math.inf, f"max_bytes is inf: {COUNT}, 0 or more"),
        ("evaluation", "yes", "evaluation is 'yes': expected True or False"),
        ("watch", "every step", "watch is 'every step': expected a Watch"),
        ("merge", 1, "merge is 1: expected a Merge"),
        ("enabled", 3, "enabled is 3: expected True or False"),
    ],
)
def test_arguments_of_a_recorder(argument, value, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        Recorder(**{"root": tmp_path, argument: value})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "argument", "value", "message"),
    [
        (Watch, "watch", 5, "--watch is 5: expected text"),
        (Watch, "capture_steps", "two", f"--capture-steps is 'two': {COUNT}"),
        (Watch, "ring", 1.5, f"--ring is 1.5: {COUNT}"),
        (Watch, "cooldown", math.nan, f"--cooldown is nan: {COUNT}"),
        (Watch, "find_nan", "yes", "--find-nan is 'yes': expected True or False"),
        (Watch, "trigger", 5, "trigger is 5: expected a tuple of names"),
        (Merge, "unmerged", 5, "unmerged of Merge is 5: expected a tuple of ranks"),
        (Merge, "unmerged", ("a",), f"a rank in unmerged of Merge is 'a': {COUNT}"),
        (Merge, "ranks", 4, "ranks of Merge is 4: expected a Ranks"),
    ],
)
def test_grouped_options(options, argument, value, message):
    with pytest.raises(ConfigError) as refused:
        options(**{argument: value})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("model", None, "model is a NoneType: expected a torch module, or a list of them"),
        ("model", [], "model is a list: expected a torch module, or a list of them"),
        ("recipe", 5, "recipe is 5: expected the name of a recipe or a format, or a Recipe"),
        ("recipe", "mxfp88", "unknown recipe 'mxfp88'"),
        ("backend", "cuda", "backend='cuda': expected one of auto, triton, torch"),
        ("skip", 5, "skip is 5: expected layers"),
        ("capture", "5-7", "'5-7' is not a layer of the model"),
        ("exclude", "a", "exclude='a' is a single string"),
        ("cores", [3], "an item of cores is 3: expected a name"),
        ("products", 5, "products is 5: expected a dict"),
        ("products", {3: "a"}, "a path in products is 3: expected that of a module"),
        ("products", {"*": 4}, "the equation of * in products is 4: expected text"),
        ("seed", "x", f"seed is 'x': {COUNT}"),
        ("iterations", 0.5, f"iterations is 0.5: {COUNT}"),
        ("scales_of", 5, "scales_of is 5: expected the directory of a run"),
    ],
)
def test_what_instrument_refuses_leaves_no_run(argument, value, message, tmp_path):
    arguments = {"model": nn.Sequential(nn.Linear(32, 32)), "recipe": "mxfp8", argument: value}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        with Recorder(tmp_path) as recorder, instrument(recorder=recorder, **arguments):
            pass
    assert not any(tmp_path.iterdir())


def test_a_recorder_of_another_type():
    with (
        pytest.raises(ConfigError, match="recorder is 5: expected a Recorder"),
        instrument(nn.Linear(2, 2), recorder=5),
    ):
        pass


def test_a_run_that_fails_otherwise_is_kept(tmp_path):
    with pytest.raises(OSError, match="the data is gone"), Recorder(tmp_path):
        raise OSError("the data is gone")
    (run,) = tmp_path.iterdir()
    assert "the data is gone" in (run / "status.json").read_text()
