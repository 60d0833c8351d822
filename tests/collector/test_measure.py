"""`binade measure`: what it evaluates, that it continues what was interrupted, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from binade.collector import instrument
from binade.collector.datasets.loading import open_dataset
from binade.collector.datasets.samples import open_samples
from binade.collector.experiment.evaluator import Evaluator
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS
from binade.data.index.catalog import Catalog
from binade.data.run.directory import CANCELLED, DONE, list_runs
from binade.data.run.effects import measured_effects
from binade.data.run.experiment import BatchResult, read_results
from tests.collector.cli.test_cli import one_line
from tests.collector.conftest import SMALL

MODEL = ("--layers", "2", "--sequence-length", "32", "--micro-batch-size", "2")


def rows(root: Path) -> list[BatchResult]:
    (run,) = [run for run in list_runs(root)[0] if run.config.get("kind") == "experiment"]
    return read_results(run.directory)


def test_the_command_evaluates_what_it_says(command, tmp_path, capsys):
    """The seed's weights, and the sequences after those that are left out."""
    arguments = ("--sequences", "3", "--skip", "2", "--formats", "mxfp4", "--by", "part")
    assert command("measure", *MODEL, *arguments) == 0
    (found,) = measured_effects(rows(tmp_path / "runs"))
    shape = MODELS["llama32-1b"]["tiny"]
    model = GPTModel(type(shape)(**{**vars(shape), "layers": 2}))
    model.initialize(1234)
    stream = open_samples(open_dataset("wikipedia", None, shape.vocab).documents, 32, 1234, 1000, shape.vocab)
    stream.batch(2)
    expected = []
    for tokens, labels in (stream.batch(2), stream.batch(1)):
        losses = []
        for recipe in ("bf16", "linear_mxfp4"):
            with torch.no_grad(), instrument(model, recipe, backend="torch"):
                logits = model(tokens)
                losses.append([float(F.cross_entropy(x, label)) for x, label in zip(logits, labels, strict=True)])
        expected += [rounded - exact for exact, rounded in zip(*losses, strict=True)]
    assert list(found.changes) == expected
    assert "linear" in capsys.readouterr().out


def test_an_interrupted_measurement_is_continued(command, tmp_path, monkeypatch, capsys):
    """Nothing is measured twice, nothing is lost, and the result is that of one go."""
    arguments = ("measure", *MODEL, "--sequences", "4", "--formats", "mxfp4,nvfp4")
    assert command(*arguments, "--tensor-save-dir", str(tmp_path / "whole")) == 0
    passes: list[object] = []
    evaluate = Evaluator.evaluate

    def counted(*given):
        passes.append(given[1:])
        if len(passes) == 7:
            raise KeyboardInterrupt
        return evaluate(*given)

    monkeypatch.setattr(Evaluator, "evaluate", counted)
    assert command(*arguments) == 130
    (run,) = list_runs(tmp_path / "runs")[0]
    assert run.status.state == CANCELLED and len(read_results(run.directory)) == 1 + 6  # the base
    assert command(*arguments) == 0
    assert "continued after 6 measurements" in capsys.readouterr().out
    (again,) = list_runs(tmp_path / "runs")[0]
    found, whole = read_results(again.directory), rows(tmp_path / "whole")
    assert again.run_id == run.run_id and again.status.state == DONE
    assert len(passes) == len([each for each in whole if each.key.base]) + 1  # the interrupted one
    assert [(each.key, each.losses) for each in found] == [(each.key, each.losses) for each in whole]


def test_a_last_batch_that_had_fewer_sequences_is_measured_again(command, tmp_path):
    """The same run has both formats, each over the sequences that it was asked for."""
    by = ("--by", "part")
    assert command("measure", *MODEL, *by, "--sequences", "3", "--formats", "mxfp4") == 0
    assert command("measure", *MODEL, *by, "--sequences", "4", "--formats", "nvfp4") == 0
    assert [len(found.changes) for found in measured_effects(rows(tmp_path / "runs"))] == [3, 4]
    assert command("measure", *MODEL, *by, "--sequences", "4", "--formats", "mxfp4") == 0
    alone = ("--tensor-save-dir", str(tmp_path / "alone"))
    assert command("measure", *MODEL, *by, "--sequences", "4", "--formats", "mxfp4,nvfp4", *alone) == 0
    mixed, whole = (measured_effects(rows(root)) for root in (tmp_path / "runs", tmp_path / "alone"))
    assert {found.format: found.changes for found in mixed} == {found.format: found.changes for found in whole}
    with Catalog.open(tmp_path / "runs") as catalog:
        effects = catalog.effects(catalog.runs()["run_id"].tolist())
        assert not catalog.refused and effects["sequences"].tolist() == [4, 4]


@pytest.mark.slow
def test_a_run_is_measured_with_its_checkpoint_on_sequences_that_it_does_not_train_on(command, collect, tmp_path):
    run = collect("--train-iters", "2", "--checkpoint-every", "2", "--learning-rate", "0.1", "--micro-batches", "2")
    assert command("measure", run.run_id, "--sequences", "2", "--formats", "mxfp4", "--by", "part") == 0
    (measured,) = [each for each in list_runs(tmp_path / "runs")[0] if each.run_id != run.run_id]
    (found,) = measured_effects(read_results(measured.directory))
    state = torch.load(run.directory / "checkpoints" / "00000002" / "rank00.pt", weights_only=True)["model"]
    shape = MODELS["llama32-1b"]["tiny"]
    model = GPTModel(type(shape)(**{**vars(shape), "layers": 1}))
    model.load_state_dict(state)
    stream = open_samples(open_dataset("wikipedia", None, shape.vocab).documents, 32, 1234, 1000, shape.vocab)
    stream.batch(4)  # two iterations of two micro-batches
    tokens, labels = stream.batch(1)
    with torch.no_grad():
        assert found.exact[0] == float(F.cross_entropy(model(tokens)[0], labels[0]))
    assert measured.config["measured_run"] == run.run_id


def test_the_length_is_estimated_and_nothing_is_written(command, tmp_path, capsys):
    assert command("measure", *MODEL, "--formats", "mxfp4,nvfp4", "--sequences", "5", "--dry-run") == 0
    assert f"{2 * (1 + 8) * 3} passes" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_file_that_has_changed_is_measured_again(command, tmp_path, capsys):
    path = tmp_path / "mine.toml"
    arguments = ("measure", *MODEL, "--sequences", "2", "--formats", str(path), "--by", "part")
    for fmt in ("mxfp4", "mxfp8", "mxfp8"):
        path.write_text(f'[linear]\nforward = "{fmt}"\n')
        assert command(*arguments) == 0
    changed, again = measured_effects(rows(tmp_path / "runs"))
    assert changed.format == again.format and changed.changes != again.changes
    assert command(*arguments[:-4], "--formats", "mxfp8", "--by", "part") == 0
    assert measured_effects(rows(tmp_path / "runs"))[-1].changes == again.changes


WRONG = {
    "format": (("--formats", "mxfp5"), "mxfp5"),
    "delayed": (("--formats", "te_delayed"), "te_delayed"),
    "part": (("--parts", "heads"), "heads"),
    "granularity": (("--by", "head"), "head"),
    "router": (("--parts", "router"), "router"),
    "model": (("llama99",), "'llama99' is not a run of"),
    "dataset": (("--dataset", "wikipdia"), "wikipdia"),
    "length": (("--sequence-length", "1000000"), "--sequence-length"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_nothing_is_written(command, tmp_path, capsys, name):
    arguments, named = WRONG[name]
    assert command("measure", *SMALL[:2], *arguments) == 2
    err = capsys.readouterr().err
    assert one_line(err) and named in err, err
    assert not list((tmp_path / "runs").glob("2*"))


@pytest.mark.slow
def test_the_advisor_uses_what_was_measured_and_adds_the_recipe_whole(command, collect, tmp_path, capsys):
    run = collect("--no-raw")
    options = (run.run_id, "--sequences", "3", "--formats", "mxfp4,nvfp4")
    assert command("measure", *options) == 0
    before = rows(tmp_path / "runs")
    (measured,) = (each for each in list_runs(tmp_path / "runs")[0] if each.config.get("kind") == "experiment")
    capsys.readouterr()
    assert command("advise", measured.run_id, "--budget", "4.4") == 0  # from the measurement alone
    out = capsys.readouterr().out
    assert "measured loss changes add up to" in out and "3 sequences" in out and "was not evaluated whole" in out
    assert len(rows(tmp_path / "runs")) == len(before)
    assert command("advise", *options, "--budget", "4.4") == 0
    added = rows(tmp_path / "runs")[len(before) :]
    assert {result.key.text for result in added} == {"advised under 4.4 bits by site"}
    assert sum(len(result.losses) for result in added) == 3
    assert "Evaluated whole, the advised recipe changes the loss by " in capsys.readouterr().out
