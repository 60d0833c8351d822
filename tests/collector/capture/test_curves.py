"""Instrumented runs that are compared: what run.json says of them, their curves, which of them saw the same data."""

from __future__ import annotations

import hashlib
import json
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from binade.app.questions.recipes.question import RECIPES
from binade.app.questions.shared.selection import Selection
from binade.collector import Recorder, TrainerCallback, coverage, instrument
from binade.collector.capture import curves
from binade.collector.errors import ConfigError
from binade.collector.imports.files import walk
from binade.collector.imports.losses import find_logs
from binade.collector.imports.readers.series import Columns
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.compare.comparison import gradient_pairs
from binade.data.compare.loss_gaps import costs, loss_gaps, with_outcomes
from binade.data.compare.same_data import window_of
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of, runs_with_references
from binade.data.run.directory import RunError, RunInfo, list_runs, read_run
from binade.data.run.losses import LOSS, read_losses
from binade.data.run.records import read_lines
from binade.data.words.filter import Filter
from tests.compared import compared, gaps_of, printed

VOCAB, WIDTH = 48, 32


class Model(nn.Module):
    def __init__(self, seed: int = 0, head: str = "output", tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, VOCAB), nn.Linear(VOCAB, WIDTH)) for _ in range(2))
        self.add_module(head, nn.Linear(WIDTH, VOCAB, bias=False))
        self.head = [getattr(self, head)]
        if tied:
            self.head[0].weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: torch.Tensor = self.head[0](x)
        return logits


def batch(number: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(number))


def train(
    root: Path, recipe: str, *, seed: int = 0, data: int = 0, steps: int = 3, change: int = 99, **options: Any
) -> tuple[RunInfo, list[float]]:
    """Two micro-batches a step, of which the first step is recorded. Other data from the step `change` on."""
    model, losses = Model(seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(root, iterations=1, scores=(), **options) as recorder, instrument(model, recipe, recorder):
        for step in range(steps):
            total = torch.zeros(())
            for micro_batch in range(2):
                tokens = batch(100 * (data + (step >= change)) + 2 * step + micro_batch)
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / 2
                loss.backward()
                total += loss.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(loss=total, tokens=32, grad_norm=norm)
            losses.append(total.item())
            total.zero_()  # as loops do that log a running loss
    return read_run(recorder.writer.directory), losses


def test_curves_and_description(tmp_path):
    run, losses = train(tmp_path, "mxfp8")
    recipe = parse_recipe("mxfp8")
    wanted = {"recipe": "mxfp8", "operands": recipe.lines(), "recipe_toml": to_toml(recipe), "model": "Model"}
    wanted |= {"parameters": sum(p.numel() for p in Model().parameters()), "tp": 1, "dp": 1}
    assert {name: run.config[name] for name in wanted} == wanted
    lines = read_losses(run.directory)
    assert read_lines(LOSS, run.directory, "loss.jsonl").problem is None
    assert [line["loss"] for line in lines] == losses and [line["iteration"] for line in lines] == [0, 1, 2]
    assert [line["recorded"] for line in lines] == [True, False, False]
    assert all(line["tokens"] == 32 and line["grad_norm"] > 0 for line in lines)
    digests = [""]
    for number in range(6):
        read = b"torch.int64 (2, 8) " + batch(number)[:, :-1].contiguous().numpy().tobytes()
        digests.append(hashlib.sha256(digests[-1].encode() + read).hexdigest())
    assert [line["data_sha256"] for line in lines] == digests[2::2]
    assert (run.status.iteration, run.status.loss_first, run.status.loss_last) == (2, losses[0], losses[-1])
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.tensors()["recipe"]) == {"mxfp8"} and set(catalog.tensors()["model"]) == {"Model"}


def test_what_the_user_says_stays(tmp_path):
    run, _ = train(tmp_path, "mxfp8", config={"model": "mine", "seed": 7})
    assert (run.config["model"], run.config["seed"], run.config["recipe"]) == ("mine", 7, "mxfp8")


def test_an_invalid_description_leaves_the_old_one(tmp_path):
    with Recorder(tmp_path) as recorder:
        with pytest.raises(RunError, match="recipe"):
            recorder.describe(recipe=5)
        assert read_run(recorder.writer.directory).config.get("recipe") is None


def test_a_pair_shows_its_gap(tmp_path):
    (base, plain), (own, quantized) = (train(tmp_path, recipe) for recipe in ("bf16", "mxfp8"))
    gap = [a - b for a, b in zip(quantized, plain, strict=True)]
    with Catalog.open(tmp_path) as catalog:
        table = runs_with_references(catalog.runs(), catalog.parts())
        assert table.set_index("run_id")["references"][own.run_id] == (base.run_id,)
        found = loss_gaps(table, losses_of(catalog, table["run_id"].tolist()))
        assert found[found["run_id"] == own.run_id]["gap"].tolist() == gap
        (row,) = costs(found, with_outcomes(table, {})).to_dict("records")
        assert row["gap"] == pytest.approx(sum(gap) / 3) and row["iterations"] == 3
    (section,) = compared(tmp_path)
    assert section.compared and section.gradients is not None
    assert section.compared.recipes[0].gap.value == pytest.approx(sum(gap) / 3)
    assert section.gradients["tensors"].tolist() == [8]


def test_each_comparison_takes_the_bf16_run_that_has_most_of_it(command, tmp_path):
    """The newest bf16 run is a log of one loss, without gradients."""
    root = tmp_path / "runs"
    (base, plain), (own, quantized) = (train(root, recipe) for recipe in ("bf16", "mxfp8"))
    (tmp_path / "log.csv").write_text("step,loss\n2,9.5\n")
    assert command("import", str(tmp_path / "log.csv"), "--recipe", "bf16", "--like", base.run_id) == 0
    with Catalog.open(root) as catalog:
        table = runs_with_references(catalog.runs(), catalog.parts())
        references = table.set_index("run_id")["references"][own.run_id]
        assert len(references) == 2 and references[1] == base.run_id
        found = loss_gaps(table, losses_of(catalog, table["run_id"].tolist())).query("run_id == @own.run_id")
        assert found["gap"].tolist() == [a - b for a, b in zip(quantized, plain, strict=True)]
        errors, unread = gradient_pairs(catalog, table[table["run_id"] == own.run_id], "recipe", "grad_weight", 0)
    assert len(errors) == 8 and not unread


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", [{"seed": 1}, {"data": 1}], ids=str)
def test_other_weights_or_data_do_not_match(tmp_path, other):
    train(tmp_path, "bf16", **other)
    train(tmp_path, "mxfp8")
    with Catalog.open(tmp_path) as catalog:
        assert runs_with_references(catalog.runs(), catalog.parts())["references"].map(len).tolist().count(0) == 1
    assert not gaps_of(tmp_path)


@pytest.mark.thorough
def test_runs_match_while_their_data_agrees(tmp_path):
    train(tmp_path, "bf16", change=2)
    train(tmp_path, "mxfp8")
    (section,) = compared(tmp_path)
    assert section.compared and section.compared.costs["iterations"].tolist() == [2]


def test_losses_without_data_do_not_match(tmp_path):
    for recipe in ("bf16", "mxfp8"):
        with Recorder(tmp_path, config={"recipe": recipe}) as recorder:
            recorder.log(loss=1.0)
            recorder.step()
            recorder.log(loss=float("nan"))
    assert [line["loss"] for line in read_losses(list_runs(tmp_path)[0][0].directory)] == [1.0, None]
    assert not gaps_of(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("every", "iterations", "windows"), [(1, [0, 1, 2], [1, 1, 1]), (2, [1], [2])])
def test_trainer_logs_by_itself(tmp_path, every, iterations, windows):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes))
    data = [{"input_ids": batch(i)[0], "labels": batch(i)[0]} for i in range(12)]
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=every, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    with Recorder(tmp_path / "runs", iterations=1, scores=()) as recorder:
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[TrainerCallback("mxfp8", recorder)])
        trainer.train()
    trainer.save_state()
    run = read_run(recorder.writer.directory)
    lines = [line for line in read_losses(run.directory) if line["loss"] is not None]
    history = [each for each in trainer.state.log_history if "loss" in each]
    assert [line["loss"] for line in lines] == [each["loss"] for each in history]
    assert [line["grad_norm"] for line in lines] == [each["grad_norm"] for each in history]
    assert [line["iteration"] for line in lines] == iterations
    assert len({line["data_sha256"] for line in lines}) == len(iterations)
    assert [window_of(line) for line in lines] == windows
    assert (run.config["model"], run.config["recipe"]) == ("LlamaForCausalLM", "mxfp8")
    (log,) = find_logs(walk(tmp_path / "out", tmp_path / "runs"))  # trainer_state.json, as the Trainer has written it
    (series,) = log.reader.read(log.path, Columns())
    assert [*series.losses.values()] == [each["loss"] for each in history]
    assert [*series.windows.values()] == windows or len(windows) == 1  # of a single loss, the file does not say it


def fine_tune(root: Path, recipe: str, steps: int, resume: str | None = None, **settings: Any) -> RunInfo:
    """A run of transformers' Trainer, with a checkpoint after the second step, or resumed from one."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes))
    data = [{"input_ids": batch(i)[0], "labels": batch(i)[0]} for i in range(24)]
    arguments = TrainingArguments(
        str(root / f"out-{recipe}"), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, save_steps=2, disable_tqdm=True, **settings,
    )  # fmt: skip
    with Recorder(root / "runs", iterations=1, scores=(), label=recipe) as recorder:
        callback = TrainerCallback(recipe, recorder)
        Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train(resume_from_checkpoint=resume)
    return read_run(recorder.writer.directory)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_trainer_that_resumes_is_compared(tmp_path):
    plain = fine_tune(tmp_path, "bf16", 4)
    fine_tune(tmp_path, "mxfp8", 2)
    checkpoint = tmp_path / "out-mxfp8" / "checkpoint-2"
    resumed = fine_tune(tmp_path, "mxfp8", 4, str(checkpoint))
    lines, whole = read_losses(resumed.directory), read_losses(plain.directory)
    assert [line["iteration"] for line in lines] == [2, 3]
    assert [line["data_sha256"] for line in lines] == [line["data_sha256"] for line in whole[2:]]
    with Catalog.open(tmp_path / "runs") as catalog:
        table = runs_with_references(catalog.runs(), catalog.parts())
        gaps = loss_gaps(table, losses_of(catalog, table["run_id"].tolist()))
    own = gaps[gaps["run_id"] == resumed.run_id]
    expected = [line["loss"] - other["loss"] for line, other in zip(lines, whole[2:], strict=True)]
    assert own["gap"].tolist() == expected
    (section,) = compared(tmp_path / "runs")
    found = section.compared.costs.set_index("run_id")["gap"]
    assert found[resumed.run_id] == pytest.approx(sum(expected) / 2)
    with pytest.raises(ConfigError, match="restore_callback_states_from_checkpoint=True replaces this callback"):
        fine_tune(tmp_path, "mxfp8", 4, str(checkpoint), restore_callback_states_from_checkpoint=True)


@pytest.mark.slow
def test_a_checkpoint_that_does_not_say_what_was_read(tmp_path):
    fine_tune(tmp_path, "bf16", 3)
    checkpoint = tmp_path / "out-bf16" / "checkpoint-2"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    del state["stateful_callbacks"]["TrainerCallback"]  # as without this callback
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    resumed = fine_tune(tmp_path, "mxfp8", 3, str(checkpoint))
    why = "it starts at iteration 2, and what was read before is unknown"
    text = printed(tmp_path / "runs")
    assert f"mxfp8: {why}." in text and "seed None" not in text
    with Catalog.open(tmp_path / "runs") as catalog:
        selection = Selection(catalog, Filter())
        drawn = RECIPES.draw(selection, {"of": "cost", "against": "bf16", "gradient": None, "at": None, "ladder": None})
    assert any(f"mxfp8: {why}." in problem for problem in drawn.problems)
    assert resumed.status.state == "done"


def test_the_window_of_a_loss(tmp_path):
    with Recorder(tmp_path) as recorder, pytest.raises(ConfigError, match="window is 0"):
        recorder.log(loss=1.0, window=0)


def left(model: nn.Module) -> set[str]:
    return {row.paths for row in coverage(model, "mxfp8") if row.reason.startswith("LM head")}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["output", "to_logits", "classifier", "decoder", "lm_head"])
def test_a_head_is_found_whatever_its_name(name, tied):
    assert left(Model(head=name, tied=tied)) == {name}


def test_heads_with_other_places_and_widths():
    table, up, down = nn.Embedding(256, 64), nn.Linear(64, 256), nn.Linear(256, 64)
    assert left(nn.Sequential(table, up)) == {"*"}
    assert left(nn.ModuleDict({"emb": table, "body": down, "decoder": nn.Linear(32, 256)})) == {"decoder"}
    several = nn.ModuleList([nn.Linear(64, 256), nn.Linear(64, 256)])
    assert left(nn.ModuleDict({"emb": table, "body": down, "heads": several})) == {"heads.*"}


def test_an_ordinary_last_layer_is_no_head():
    table, up, down = nn.Embedding(256, 64), nn.Linear(64, 256), nn.Linear(256, 64)
    assert not left(nn.ModuleDict({"emb": table, "up": up, "down": down}))
    layers = nn.ModuleList(nn.ModuleDict({"down": down, "up": nn.Linear(64, 256)}) for _ in range(2))
    assert not left(nn.ModuleDict({"emb": table, "layers": layers}))
    square = nn.ModuleDict({"emb": nn.Embedding(64, 64), "up": up, "down": down})  # its width is the vocabulary
    assert not left(square)


def test_head_can_be_quantized():
    rows = {row.recorded: row.format for row in coverage(Model(), "mxfp8", head=True)}
    assert rows["layer0.head"] == "mxfp8"


def test_run_json_stays_sealed(tmp_path):
    run, _ = train(tmp_path, "bf16")
    assert "crc32" in json.loads((run.directory / "run.json").read_bytes())


class Reader(nn.Module):
    """Reads images or embeddings besides ids, as models of several kinds of inputs do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any, extra: Any = None) -> torch.Tensor:
        ids = batch["ids"] if isinstance(batch, Mapping) else batch.ids
        result: torch.Tensor = self.layer(self.embedding(ids))
        return result


@dataclass
class Batch:
    ids: torch.Tensor
    image: torch.Tensor | None


def read(batch: Any, extra: Any = None) -> str:
    """The hash of a micro-batch of these arguments."""
    sha = hashlib.sha256()
    curves._update(sha, curves._copies(curves.read_by((batch, extra))))
    return sha.hexdigest()


def test_all_that_enters_the_model_is_data():
    ids, image = torch.arange(8).reshape(2, 4), torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    mask, other = torch.ones(2, 4, dtype=torch.bool), image.clone()
    other[1, 2, 4] += 1e-3
    part = mask.clone()
    part[0, 0] = False
    large = torch.zeros(3000, 1024)
    changed = large.clone()
    changed[:, 511] = 1  # a column
    nested = [torch.nested.nested_tensor([ids[0], ids[1][:size]], layout=torch.jagged) for size in (2, 3)]
    pairs = [
        ({"ids": ids, "image": image}, {"ids": ids, "image": other}),
        (UserDict(ids=ids, image=image), UserDict(ids=ids, image=other)),  # as BatchEncoding
        (Batch(ids, image), Batch(ids, other)),
        ([ids, (image, None)], [ids, (other, None)]),
        ({"ids": ids, "deep": {"list": [image]}}, {"ids": ids, "deep": {"list": [other]}}),
        ({"ids": ids, "mask": mask}, {"ids": ids, "mask": part}),
        ({"ids": ids, "image": image.bfloat16()}, {"ids": ids, "image": (other * 2).bfloat16()}),
        ({"ids": ids, "at": torch.tensor(0.5)}, {"ids": ids, "at": torch.tensor(0.25)}),
        ({"ids": ids, "mask": large}, {"ids": ids, "mask": changed}),
        ({"ids": ids, "image": image}, {"ids": ids}),
        ({"wave": image.to(torch.complex64)}, {"wave": other.to(torch.complex64)}),
        (nested[0], nested[1]),
    ]
    for first, second in pairs:
        assert read(first) == read(first) and read(first) != read(second)
    assert read({"ids": ids}, extra=image) != read({"ids": ids}, extra=other)


def test_activations_are_no_data():
    """They depend on weights, which recipes train differently."""
    ids, weight = torch.arange(8), nn.Parameter(torch.ones(8))
    assert read({"ids": ids, "x": weight * 2}) == read({"ids": ids, "x": weight * 3}) == read({"ids": ids})
    assert read({"x": weight * 2}) != read({"x": weight * 3})


def test_other_images_are_other_data(tmp_path):
    ids = batch(0)

    def digests(recipe: str, image: torch.Tensor) -> list[str]:
        model = Reader()
        with Recorder(tmp_path, label=recipe, iterations=1, scores=()) as recorder, instrument(model, recipe, recorder):
            for _ in range(2):
                model({"ids": ids, "image": image}).sum().backward()
                recorder.log(loss=1.0)
        return [line["data_sha256"] for line in read_losses(recorder.writer.directory)]

    image = torch.randn(2, 3, 4)
    assert digests("bf16", image) == digests("mxfp8", image)
    assert not set(digests("bf16", image)) & set(digests("mxfp8", image + 1))
