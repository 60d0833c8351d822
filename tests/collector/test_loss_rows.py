"""Which rows of a loss log are the training's: numbers as people write them, validation, runs, ranks, epochs, units."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from binade.collector.errors import ConfigError
from binade.collector.imports.files import walk
from binade.collector.imports.losses import find_logs
from binade.collector.imports.readers.kind import Confidence, Start
from binade.collector.imports.readers.lines import Lines
from binade.collector.imports.readers.numbers import number_of, whole_of
from binade.collector.imports.readers.registry import READERS, reader_of
from binade.collector.imports.readers.series import NATS, UNKNOWN_UNIT, Columns, Notes, Repeats, Series
from binade.data.run.directory import list_runs
from binade.data.run.losses import LOSS as KIND
from binade.data.run.losses import read_losses
from binade.data.run.records import read_lines

STEPS = (1, 2, 3, 4, 5, 6)
LOSS = {step: round(3 - 0.1 * step, 3) for step in STEPS}
MANY = {1: 3.5, 999: 3.25, 1000: 3.125, 1100: 3.0, 20000: 2.75}
Log = dict[int, float]


def read(folder: Path, text: str, name: str = "log", columns: Columns | None = None) -> tuple[Series, ...]:
    path = folder / name
    path.write_text(text)
    (log,) = find_logs(walk(path, folder / "runs"))
    return log.reader.read(path, columns or Columns())


def rows(template: str, losses: Log = LOSS) -> str:
    return "".join(template.format(s=step, x=loss) + "\n" for step, loss in losses.items())


def table(header: str, *groups: tuple[str, Log], by_step: bool = False) -> str:
    """A CSV file with `header`, of which the first column tells the groups apart."""
    lines = [(step, f"{name},{step},{loss}\n") for name, losses in groups for step, loss in losses.items()]
    return f"{header}\n" + "".join(line for _, line in (sorted(lines, key=lambda line: line[0]) if by_step else lines))


@given(st.floats(allow_nan=False), st.integers(0, 2**53))
def test_numbers_that_python_numpy_and_torch_print_are_read_whole(loss, step):
    for text in (repr(loss), f"{loss:.17e}", repr(np.float64(loss))):
        assert number_of(text) == loss
    if math.isfinite(loss) and abs(loss) > 1e300:  # rounded to four decimals, it may be infinite
        return
    printed = repr(torch.tensor(loss, dtype=torch.float64, requires_grad=True))
    assert number_of(printed) == pytest.approx(loss, 1e-3, 1e-3)
    assert whole_of(f"{step:,}") == whole_of(f"{step:_}") == whole_of(f"{step:,}/{step:,}") == step
    if math.isfinite(loss) and abs(loss) < 1e15:
        assert number_of(f"{loss:,.4f}") == float(f"{loss:.4f}")
        german = f"{loss:,.4f}".translate(str.maketrans(",.", ".,"))
        assert number_of(german, decimal_comma=True) == float(f"{loss:.4f}")


@pytest.mark.parametrize("text", ["1K", "1.5M", "25%", "2.5nats", "1.2.3", "1,23,456", "0x10", "2 000", "", "１２",
                                  "2.5s", "--1", "1e", "9" * 500, "1e999"])  # fmt: skip
def test_a_part_of_a_number_is_never_read(text):
    for read_number in (number_of, whole_of):
        with pytest.raises(ValueError, match="expected"):
            read_number(text)


def test_a_loss_with_one_comma_before_three_digits_is_a_question():
    with pytest.raises(ValueError, match=r"may be 2345 or 2\.345"):
        number_of("2,345")
    assert [number_of(text) for text in ("2,34", "0,345", "1,234,567")] == [2.34, 0.345, 1234567]
    assert whole_of("2,345") == 2345


NUMBERS = {
    "flame": "\x1b[36mstep: {s:>8,} token: {s:>15,}  \x1b[32mloss: {x:7.4f}  \x1b[34mlr: 3.0e-04 gnorm:  1.00 \x1b[39m",
    "a loop": "step {s:>6,} | loss {x:.4f} | lr 3.00e-04",
    "underscores": "iter {s:_} loss={x}",
    "numpy": "step {s:,}: loss=np.float64({x}) lr=1e-4",
    "torch": "step {s} loss: tensor({x}, device='cuda:0', grad_fn=<NllLossBackward0>) done",
    "decimal comma": "step {s} | loss {x!s} | lr 1",
    "Megatron": " iteration {s:,}/ 50,000 | lm loss: {x:.6E} | loss scale: 1.0 |",
    "JSON": '{{"step": "{s:,}", "loss": "{x}"}}',
    "of": "[iter {s:,}/20,000] loss: {x:.3e}",
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_steps_and_losses_as_logs_print_them(tmp_path, kind):
    text = rows(NUMBERS[kind], MANY)
    text = text.replace(".", ",") if kind == "decimal comma" else text
    if kind == "decimal comma":  # three digits after a comma may be thousands
        text = rows("step {s} | loss {x:.4f} | lr 1", MANY).replace(".", ",")
    (series,) = read(tmp_path, text)
    assert series.losses == MANY and not series.damaged


def test_a_csv_file_of_a_country_with_decimal_commas(tmp_path):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=";")
    writer.writerows([["step", "loss"], *([step, f"{loss:.3f}".replace(".", ",")] for step, loss in MANY.items())])
    assert read(tmp_path, text.getvalue())[0].losses == MANY


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ("step 1 loss 3.0\nstep 2 loss 2.9\nstep 999 loss 2.8\nstep 1.1K loss 2.7\n", "line 4, column 6: .*'1.1K'"),
        ("step 1 loss 3.0\nstep 2 loss 2.9\nstep 3 loss 2.8\nstep 4 loss 27%\n", "line 4, column 13: .*'27%'"),
        ("step 1 loss 3.0\nstep 2 loss 2.9\nstep 3 loss 2.8\nstep 20 000 loss 2.7\n", "line 4, column 6: .*no space"),
    ],
)
def test_what_is_not_read_whole_names_its_line_and_column(command, capsys, tmp_path, lines, where):
    (series,) = read(tmp_path, lines)
    assert len(series.losses) == 3 and len(series.damaged) == 1
    assert command("import", str(tmp_path / "log")) == 1
    assert re.search(where, capsys.readouterr().out)


SPLITS = {
    "split": ("split,step,loss", "train", "val"),
    "phase": ("phase,step,loss", "training", "validation"),
    "mode": ("mode,iter,loss", "train", "eval"),
    "subset": ("subset,step,loss", "train_c4", "val_c4"),
    "a column of any name": ("which,step,loss", "train", "test"),
    "is_train": ("is_train,step,loss", "1", "0"),
    "eval": ("eval,step,loss", "False", "True"),
}


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_validation_is_left_out_and_said(tmp_path, kind, form):
    header, train, val = SPLITS[kind]
    nines = dict.fromkeys(LOSS, 9.0)
    text = table(header, (train, LOSS), (val, {**nines, 7: 9.0}), by_step=True)
    if form == "jsonl":
        text = "".join(json.dumps(row) + "\n" for row in csv.DictReader(io.StringIO(text)))
    (series,) = read(tmp_path, text)
    assert series.losses == LOSS and any("7 losses of validation data left out" in fact for fact in series.facts)
    name = header.split(",")[0]
    (chosen,) = read(tmp_path, text, columns=Columns(rows=((name, val),)))
    assert chosen.losses == {**nines, 7: 9.0} and chosen.where == f"{name}={val}"


@pytest.mark.parametrize("template", ["step={s} split={k} loss={x}", "step {s} loss {x} mode: {k}",
                                      "[{k}] step {s} loss {x}",
                                      "{{'phase': '{k}', 'step': {s}, 'loss': {x}}}"])  # fmt: skip
def test_lines_of_validation_are_left_out_and_said(tmp_path, template):
    text = "".join(template.format(s=s, x=x, k="train") + "\n" + template.format(s=s, x=9, k="val") + "\n"
                   for s, x in LOSS.items())  # fmt: skip
    (series,) = read(tmp_path, text)
    assert series.losses == LOSS and series.name == "loss" and "6 lines of validation data left out" in series.facts


def test_a_table_with_a_row_per_metric(tmp_path):
    text = "step,tag,value\n" + rows("{s},train/loss,{x}\n{s},val/loss,9.0\n{s},lr,0.1")
    (series,) = read(tmp_path, text, "log.csv")
    assert (series.name, series.losses) == ("train/loss", LOSS)


UP = {step: loss + 1 for step, loss in LOSS.items()}


@pytest.mark.parametrize("column", ["run", "run_name", "experiment", "seed"])
def test_a_table_of_several_runs_is_several_runs(command, tmp_path, column):
    (tmp_path / "log.csv").write_text(table(f"{column},step,loss", ("1", LOSS), ("2", UP), by_step=True))
    assert command("import", str(tmp_path / "log.csv")) == 0
    found = {run.config["loss_column"]: {r["iteration"]: r["loss"] for r in read_losses(run.directory)}
             for run in list_runs(tmp_path / "runs")[0]}  # fmt: skip
    assert found == {f"loss, {column}=1": LOSS, f"loss, {column}=2": UP}
    assert command("import", str(tmp_path / "log.csv")) == 0 and len(list_runs(tmp_path / "runs")[0]) == 2


def test_another_column_that_tells_losses_apart_is_a_question(command, capsys, tmp_path):
    (tmp_path / "log.csv").write_text(table("precision,step,loss", ("bf16", LOSS), ("mxfp8", UP), by_step=True))
    assert command("import", str(tmp_path / "log.csv")) == 2
    assert "--rows precision=bf16 or --rows precision=mxfp8" in capsys.readouterr().err
    assert command("import", str(tmp_path / "log.csv"), "--rows", "precision") == 2
    assert command("import", str(tmp_path / "log.csv"), "--rows", "precision=fp32") == 2
    assert "'precision' has 'bf16', 'mxfp8'" in capsys.readouterr().err
    (tmp_path / "long.csv").write_text(table("precision,step,loss", ("bf16", LOSS), ("mxfp8", UP)))
    assert command("import", str(tmp_path / "long.csv")) == 2
    err = capsys.readouterr().err
    assert "--rows precision=bf16 or --rows precision=mxfp8" in err and err.count("\n") == 1
    assert command("import", str(tmp_path / "long.csv"), "--rows", "precision=mxfp8") == 0


@pytest.mark.parametrize("template", ["[rank{r}] step {s} loss {x}", "[Rank {r}] step={s}, loss={x}",
                                      "{r}: step {s} loss {x}", "[default{r}]:step {s} | loss {x}"])  # fmt: skip
@pytest.mark.parametrize("by_step", [True, False])
def test_one_of_several_ranks_is_read(tmp_path, template, by_step):
    lines = [(s, template.format(r=r, s=s, x=x + r) + "\n") for r in (2, 0, 10) for s, x in LOSS.items()]
    lines = sorted(lines, key=lambda line: line[0]) if by_step else lines
    (series,) = read(tmp_path, "".join(line for _, line in lines))
    assert series.losses == LOSS and "the losses of rank 0 were read, 12 of others left out" in series.facts


@pytest.mark.parametrize(("template", "length"), [
    ("Epoch: {e}, Step: {s}, Rank: 0, loss = {x}", 6),
    ("Epoch {e}:  10%|#   | {s}/8 [00:01<00:10,  1.0it/s, loss={x}]", 8),
    ("- INFO - {{ Epoch:[{e:3}/  2], step:[{s:5}/    9], loss: {x}, per_step_time: 1ms }}", 9),
    ("- mmengine - INFO - Epoch(train)  [{e}][ {s}/6]  lr: 1e-4  loss: {x}", 6),
    ('{{"epoch": {e}, "step": {s}, "loss": {x}}}', 6),
])  # fmt: skip
def test_steps_that_start_again_in_each_epoch_go_on(tmp_path, template, length):
    text = "".join(template.format(e=e, s=s, x=x + e) + "\n" for e in (1, 2, 3) for s, x in LOSS.items())
    (series,) = read(tmp_path, text)
    assert series.losses == {s + e * length: x + e + 1 for e in range(3) for s, x in LOSS.items()}
    assert any("start again in each of 3 epochs" in fact for fact in series.facts)


def test_a_training_that_was_resumed_replaces_what_it_repeats(tmp_path):
    """Also by a NaN: it diverged the second time."""
    first, again = dict.fromkeys(range(1, 21), 3.0), {s: math.nan if s == 18 else 2.0 for s in range(17, 31)}
    text = rows("{s},{x}", first) + rows("{s},{x}", again)
    (series,) = read(tmp_path, "step,loss\n" + text)
    assert series.losses == pytest.approx({s: x for s, x in first.items() if s < 17} | again, nan_ok=True)
    assert any("goes back from step 20 to 17, as if resumed" in fact and "4 earlier" in fact for fact in series.facts)


def test_steps_that_start_again_without_an_epoch_are_a_question(command, capsys, tmp_path):
    (tmp_path / "log").write_text(rows("step {s} loss {x}") + rows("step {s} loss {x}", UP))
    assert command("import", str(tmp_path / "log")) == 2
    err = capsys.readouterr().err
    assert "after step 6, the steps start again at 1" in err and "--repeats last, first, mean or continue" in err
    expected = {
        Repeats.LAST: UP, Repeats.FIRST: LOSS, Repeats.MEAN: {s: x + 0.5 for s, x in LOSS.items()},
        Repeats.CONTINUE: LOSS | {s + 6: x for s, x in UP.items()},
    }  # fmt: skip
    for way, losses in expected.items():
        (series,) = read(tmp_path, (tmp_path / "log").read_text(), columns=Columns(repeats=way))
        assert series.losses == pytest.approx(losses)


def test_micro_batches_are_averaged_unless_the_step_has_its_own_line(tmp_path):
    def micro(template: str) -> str:
        lines = (template.format(s=s, x=round(x + m / 8, 6)) for s, x in LOSS.items() for m in (-1, 0, 4))
        return "".join(f"{line}\n" for line in lines)

    mean = pytest.approx({s: x + 1 / 8 for s, x in LOSS.items()})
    (labelled,) = read(tmp_path, micro("step {s} micro_batch 1/3 loss {x}"))
    (bare,) = read(tmp_path, micro("step {s} loss {x}"))
    assert labelled.losses == mean and "the loss of a step is the mean of its micro-batches" in labelled.facts
    assert bare.losses == mean and any("each step has 3 losses" in fact for fact in bare.facts)
    with_step = "Step {s} micro step 0 | loss 9.0\nStep {s} micro step 1 | loss 8.0\nStep {s} | loss {x}"
    (whole,) = read(tmp_path, rows(with_step))
    assert whole.losses == LOSS and any("12 of micro-batches left out" in fact for fact in whole.facts)


def test_a_third_of_the_losses_is_not_left_out_without_a_question(tmp_path):
    with pytest.raises(ConfigError, match="3 of 6 losses are of a step that has another one, such as step 1"):
        read(tmp_path, "step,loss\n1,3\n1,2\n1,1\n2,2\n3,3\n3,2\n")


NO_NATS = {
    "verl": '{{"step": {s}, "data": {{"actor/pg_loss": {x}, "critic/score/mean": 0.5}}}}',
    "verl, printed": "(TaskRunner pid=1) step:{s} - actor/pg_loss:np.float64({x}) - actor/lr:0.1",
    "slime": "[2026-05-01 12:00:01] model.py:640 - step {s}: {{'train/loss': {x}, 'train/pg_loss': {x}}}",
    "prime-rl": "12:01:01 SUCCESS Step {s} | Time: 1.2s | Loss: {x:.4f} | Entropy: 0.32 | Mismatch KL: 0.0012",
    "NeMo-RL": "===== Step {s}/9 =====\n📊 Training Results:\n  • Loss: {x}\n  • Avg Reward: 0.4",
    "OpenRLHF": "Train step of epoch 0:  5%|# | {s}/6 [00:01<00:10, 1.0s/it, loss={x}, acc=0.5, chosen_reward=0.1]",
    "TRL": '{{"step": {s}, "loss": {x}, "reward": 0.5, "kl": 0.1}}',
    "DPO": '{{"step": {s}, "loss": {x}, "rewards/chosen": 0.5}}',
    "fairseq": "| epoch 001:    4 / 9 loss={x}, nll_loss=9.0, num_updates={s}, lr=8.9e-05",
}
OF_NATS = {
    "supervised, by TRL": '{{"step": {s}, "loss": {x}, "entropy": 0.5, "mean_token_accuracy": 0.4}}',
    "supervised, by prime-rl": "12:01:01 SUCCESS Step {s} | Time: 1.2s | Loss: {x:.4f} | Grad. Norm: 0.01 | LR: 1e-6",
    "cross entropy": "step {s} | cross_entropy: 2.0 | loss: {x}",
}


@pytest.mark.parametrize(("kind", "template"), [*NO_NATS.items(), *OF_NATS.items()])
def test_the_unit_of_a_loss_is_kept(command, capsys, tmp_path, kind, template):
    unit = UNKNOWN_UNIT if kind in NO_NATS else NATS
    (series,) = read(tmp_path, rows(template))
    assert (series.losses, series.unit) == (LOSS, unit)
    assert command("import", str(tmp_path / "log")) == 0
    assert ("the unit of the losses is unknown" in capsys.readouterr().out) == (unit == UNKNOWN_UNIT)
    assert [run.config["loss_unit"] for run in list_runs(tmp_path / "runs")[0]] == [unit]
    other = "nats" if unit == UNKNOWN_UNIT else "unknown"
    assert command("import", str(tmp_path / "log"), "--loss-unit", other) == 0
    assert [run.config["loss_unit"] for run in list_runs(tmp_path / "runs")[0]] == [{"nats": NATS}.get(other, other)]


def test_losses_that_are_not_finite_are_kept_as_such(command, tmp_path):
    (tmp_path / "log.csv").write_text("step,loss\n1,2\n2,inf\n3,-Infinity\n4,NaN\n")
    assert command("import", str(tmp_path / "log.csv")) == 0
    (run,), _ = list_runs(tmp_path / "runs")
    assert read_lines(KIND, run.directory, "loss.jsonl").problem is None
    lost = {r["iteration"]: r["logged"] for r in read_losses(run.directory) if r.get("not_finite")}
    assert lost == {2: "inf", 3: "-inf", 4: "nan"}


@pytest.mark.parametrize("kind", [kind for kind in READERS if isinstance(kind, Lines)], ids=lambda kind: kind.kind)
def test_each_kind_of_text_reads_its_example_and_no_other(tmp_path, kind):
    """Three such lines are recognized, whatever number the step is."""
    text = "".join(kind.line.replace("10", str(step), 1) + "\n" for step in (10, 11, 12))
    (tmp_path / "log").write_text(text)
    assert reader_of(Start.of(tmp_path / "log"), Confidence.COLUMNS) is kind
    assert [*kind.read(tmp_path / "log", Columns())[0].losses.values()] == [11.521] * 3


ADVICE = {
    "what a Trainer prints": ("{'loss': 2.5, 'grad_norm': 1.0, 'epoch': 0.1}\n" * 3, "give trainer_state.json"),
    "W&B's own log": (":W&B\xee", "export the history of the run as CSV"),
    "text with commas": ("2025-09-01 10:00:01,000 - INFO - step one, two\n" * 3, "is not recognized as a loss log"),
    "a percent sign": ("step 1 loss 2%\nstep 2 loss 3%\nstep 3 loss 4%\n", "line 1, column 13: expected a number"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ADVICE.values(), ids=ADVICE)
def test_a_file_without_losses_says_what_to_give(command, capsys, tmp_path, text, message):
    (tmp_path / "log").write_text(text)
    assert command("import", str(tmp_path / "log")) == 2
    err = capsys.readouterr().err
    assert message in err and "CSV (" not in err.replace("CSV (W&B history and others)", "") and err.count("\n") == 1


HOSTILE = {
    "digits": "step {} loss 1\n", "loss digits": "step 1 loss {}\n", "dots": "step 1. loss 1.{}\n", "e": "loss: 1{}e\n",
}  # fmt: skip
FILLS = ["9", "loss ", "step 9 ", "loss=", "np.float64(", "epoch ", "rank", "\x1b[", "a/", "1,", "'", "[", "val "]


@pytest.mark.parametrize("fill", FILLS)
def test_the_time_of_a_line_grows_with_its_length_alone(tmp_path, fill):
    """Four times the length takes less than nine times as long: sixteen times if it were the square."""

    def seconds(size: int) -> float:
        text = "".join(line.format(fill * (size // len(fill))) for line in HOSTILE.values())
        path = tmp_path / "log"
        path.write_text(text * 2 + "step 1 loss 2\n")
        start = Start.of(path)
        begin = time.process_time()
        for kind in READERS:
            kind.recognize(start)
            with suppress(ConfigError, NotImplementedError):
                list(kind.rows(path, Notes()))
        return time.process_time() - begin

    seconds(1000)
    least = max(0.05, min(seconds(5_000) for _ in range(2)))
    assert min(seconds(20_000) for _ in range(2)) < 9 * least


def test_rows_with_ever_new_keys_take_time_in_proportion(tmp_path):
    def seconds(number: int) -> float:
        text = "".join(json.dumps({"step": i, "loss": 1.0, f"x{i} loss": 1, f"y{i}": 2}) + "\n" for i in range(number))
        begin = time.process_time()
        read(tmp_path, text, "log.jsonl")
        return time.process_time() - begin

    seconds(100)
    assert seconds(16_000) < 9 * max(0.05, seconds(4_000))
