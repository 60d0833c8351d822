"""Loss logs that pandas, json and TensorBoard's own writer wrote, imported and compared."""

from __future__ import annotations

import json
import math
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_FLOAT
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from binade.cli import main
from binade.collector import Recorder, instrument
from binade.collector.imports.readers import table, text
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import runs_with_references
from binade.data.run.directory import CRASHED, DONE, RunInfo, list_runs
from binade.data.run.losses import LOSS, read_losses
from binade.data.run.records import read_lines
from binade.data.run.run_notes import read_notes
from tests.collector.forked import forked, kill_at
from tests.collector.logs_made import tensor, write
from tests.compared import compared, gaps_of, printed

STEPS = np.arange(1, 51)
BF16 = 2 + 8 * np.exp(-STEPS / 20)
SAME = ("--model", "llama-8b", "--dataset", "c4", "--seed", "1")


@pytest.fixture
def bring(command: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    """binade import of tmp_path/name with a recipe."""
    return lambda name, *more, recipe="mxfp8": command("import", str(tmp_path / name), "--recipe", recipe, *more)


def run_of(tmp_path: Path) -> RunInfo:
    ((run,), refused) = list_runs(tmp_path / "runs")
    assert refused == []
    return run


def curve(tmp_path: Path) -> dict[int, float | None]:
    return {record["iteration"]: record["loss"] for record in read_losses(run_of(tmp_path).directory)}


def write_csv(path: Path, loss: np.ndarray = BF16, step: str = "iteration", name: str = "lm loss") -> None:
    path.parent.mkdir(exist_ok=True)
    pd.DataFrame({step: STEPS, "lr": 1e-3, name: loss}).to_csv(path, index=False)


def write_json(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_events(path: Path, loss: np.ndarray, steps: np.ndarray = STEPS, **style: bool) -> None:
    with SummaryWriter(str(path)) as writer:
        for step, value in zip(steps.tolist(), loss.tolist(), strict=True):
            writer.add_scalar("train/loss", value, step, **style)
            writer.add_scalar("lr", 1e-3, step)
            writer.add_histogram("weights", np.arange(3.0), step)


def test_csv_json_lines_and_events_are_compared_with_their_bf16_run(bring, capsys, tmp_path):
    write_csv(tmp_path / "bf16.csv")
    write_json(tmp_path / "mxfp8.jsonl", [{"step": int(i), "loss": x} for i, x in zip(STEPS, BF16 + 0.25, strict=True)])
    write_events(tmp_path / "events", (BF16 + 0.5)[:30], STEPS[:30])
    write_events(tmp_path / "events", (BF16 + 0.5)[30:], STEPS[30:], new_style=True)  # a restart adds a file
    write_csv(tmp_path / "unknown.csv", BF16 + 1)
    assert bring("bf16.csv", *SAME, recipe="bf16") == 0
    assert bring("mxfp8.jsonl", *SAME) == 0 and bring("events", *SAME, recipe="hifp8") == 0
    assert "not compared" not in capsys.readouterr().out
    assert bring("unknown.csv", "--model", "llama-8b", "--dataset", "c4", recipe="mxfp4") == 0
    assert "not compared with other runs: that needs --seed" in capsys.readouterr().out
    assert gaps_of(tmp_path / "runs") == {
        "mxfp8": pytest.approx(0.25),
        "hifp8": pytest.approx(0.5, abs=1e-6),  # a scalar is a float32
    }
    (section,) = compared(tmp_path / "runs")
    assert section.compared and set(section.compared.costs["iterations"]) == {50}
    for run in list_runs(tmp_path / "runs")[0]:
        assert read_lines(LOSS, run.directory, "loss.jsonl").problem is None


@pytest.mark.thorough
def test_a_log_is_like_a_run(bring, command, capsys, tmp_path):
    write_csv(tmp_path / "mxfp8.csv", BF16 + 0.25)
    with Recorder(tmp_path / "runs", label="bf16") as recorder, instrument(model := nn.Linear(32, 32), None, recorder):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for loss in [0.0, *BF16.tolist()]:  # its iterations are counted from 0
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
            recorder.log(loss=loss)
    own = recorder.session.run_id
    assert bring("mxfp8.csv", "--like", own) == 0
    assert "not compared" not in capsys.readouterr().out
    (section,) = compared(tmp_path / "runs")
    assert section.compared.costs["iterations"].tolist() == [50]
    assert gaps_of(tmp_path / "runs") == {"mxfp8": pytest.approx(0.25)}
    with Catalog.open(tmp_path / "runs") as catalog:
        table = runs_with_references(catalog.runs(), catalog.parts()).set_index("recipe")
    assert table["references"]["mxfp8"] == (own,) and table["settings"].nunique() == 1
    write_csv(tmp_path / "again.csv", BF16 + 0.5)
    (imported,) = (run.run_id for run in list_runs(tmp_path / "runs")[0] if run.run_id != own)
    assert bring("again.csv", "--like", imported, recipe="hifp8") == 0
    assert gaps_of(tmp_path / "runs")["hifp8"] == pytest.approx(0.5)


def test_a_run_that_nothing_can_be_like(bring, capsys, tmp_path):
    write_csv(tmp_path / "x.csv")
    for name in ("none", "../runs", ""):
        assert bring("x.csv", "--like", name) == 2
        error = capsys.readouterr().err
        assert f"--like {name!r} is not a run of " in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()
    assert bring("x.csv") == 0
    (run,) = list_runs(tmp_path / "runs")[0]
    write_csv(tmp_path / "y.csv")
    assert bring("y.csv", "--like", run.run_id, "--seed", "1") == 2
    assert "leave out --seed" in capsys.readouterr().err
    assert bring("y.csv", "--like", run.run_id) == 0
    assert f"a run other than {run.run_id}, of which its model, dataset and seed are" in capsys.readouterr().out
    assert "its model, dataset and seed are unknown" in printed(tmp_path / "runs")


def test_what_a_log_does_not_say_is_asked_for_once_on_a_terminal(tmp_path):
    for name in ("a.csv", "b.csv"):
        write_csv(tmp_path / "logs" / name)
    line = [sys.executable, "-m", "binade", "import", str(tmp_path / "logs"), "--recipe", "mxfp8", "--model", "mine",
            "--tensor-save-dir", str(tmp_path / "runs")]  # fmt: skip
    controller, terminal = pty.openpty()
    os.write(controller, b"\n" + b"one\n" + b"1\n")
    done = subprocess.run(line, stdin=terminal, stderr=terminal, stdout=subprocess.PIPE, text=True, timeout=60)
    asked = os.read(controller, 1 << 16).decode()
    assert done.returncode == 0 and "--dataset," in done.stdout and "--seed" not in done.stdout
    assert [asked.count(word) for word in ("Model: ", "Dataset: ", "Seed: ", "Seed: Error: 'one' is")] == [0, 1, 2, 1]
    configs = [run.config for run in list_runs(tmp_path / "runs")[0]]
    assert [(each["model"], each["dataset"], each["seed"]) for each in configs] == [("mine", None, 1)] * 2


def test_what_the_log_says_is_kept(bring, capsys, tmp_path):
    loss = BF16.copy()
    loss[[3, 49]] = np.nan, np.inf
    frame = pd.DataFrame({"global_step": [*STEPS[::-1], 10, 10], "train_loss": [*loss[::-1], 7.0, 8.0]})
    frame.loc[len(frame)] = [51, None]
    frame.to_csv(tmp_path / "x.csv", index=False, na_rep="")
    frame["train_loss"] = frame["train_loss"].where(frame["global_step"] != 4)
    assert bring("x.csv", "--name", "mine") == 0
    expected = {int(step): float(x) for step, x in zip(STEPS, loss, strict=True)} | {10: 8.0}
    del expected[4]  # pandas wrote the NaN as an empty cell
    assert curve(tmp_path) == {step: x if math.isfinite(x) else None for step, x in sorted(expected.items())}
    assert list(curve(tmp_path)) == sorted(expected)
    assert "2 losses were left out: the last finite one of each step counts" in capsys.readouterr().out
    run = run_of(tmp_path)
    assert (run.status.state, run.status.iteration, run.status.tensors) == (DONE, 50, 0)
    assert (run.status.loss_first, run.status.loss_last) == (loss[0], loss[48])
    assert read_notes(run.directory).name == "mine"
    write_json(
        tmp_path / "x.jsonl", [{"step": 0, "loss": math.nan}, {"step": 2, "loss": "NaN"}, {"step": 1.0, "loss": 3}]
    )
    assert bring("x.jsonl", "--tensor-save-dir", str(tmp_path / "json" / "runs")) == 0
    assert curve(tmp_path / "json") == {0: None, 1: 3.0, 2: None}


def test_the_same_column_of_the_same_log_is_the_same_run(bring, tmp_path):
    table = pd.DataFrame({"Step": STEPS, "a - loss": BF16, "b - loss": BF16 + 1})
    table[:20].to_csv(tmp_path / "x.csv", index=False)
    assert bring("x.csv", *SAME, "--loss-column", "a - loss", "--name", "mine") == 0
    first = run_of(tmp_path)
    table.to_csv(tmp_path / "x.csv", index=False)
    assert bring("x.csv", "--loss-column", "a - loss", recipe="hifp8") == 0
    again = run_of(tmp_path)
    assert again.run_id == first.run_id and len(curve(tmp_path)) == 50 and again.status.iteration == 50
    assert again.config["recipe"] == "hifp8" and again.config["seed"] is None  # what the last import said
    assert read_notes(again.directory).name == "mine"
    assert bring("x.csv", "--loss-column", "b - loss") == 0 and len(list_runs(tmp_path / "runs")[0]) == 2


BAD = {
    "no loss": ("step,lr\n1,2\n", "give --loss-column NAME; it has 'step', 'lr'"),
    "no step": ("loss,lr\n1,2\n", "give --step-column NAME; it has 'loss', 'lr'"),
    "no number": ("step,loss\n1,2\n2,two\n", "line 3: the loss is 'two'"),
    "no whole step": ("step,loss\n1.5,2\n", "line 2: the step is 1.5"),
    "negative": ("step,loss\n-1,2\n", "line 2: the step is -1"),
    "infinite step": ("step,loss\ninf,2\n", "line 2: the step is inf"),
    "decimal comma": ("step,loss\n1,2,5\n", "line 2: there are more values than columns"),
    "twice": ("step,loss,loss\n1,2,3\n", "a column name twice"),
    "empty": ("", "x.csv is empty (0 bytes): expected a row for each step"),
    "header": ("step,loss\n", "x.csv has no rows"),
    "one line cut": ("step,loss", "x.csv has no complete row (the last line has no line break"),
    "short": ("step,loss,lr\n1,2,3\n2\n", "line 3: there are fewer values than columns: expected 3"),
    "no loss in a row": ("step,lr,loss\n1,2,3\n2,3\n", "line 3: there are fewer values than columns"),
    "step missing": ("step,loss\n1,2\n,3\n", "line 3: there is a loss, but 'step' has no step"),
    "too large": ("step,loss\n9007199254740992,2\n", "expected a whole number from 0 to 9,007,199,254,740,991"),
    "open quote": ('step,loss\n1,2\n2,"3\n3,4\n4,5\n', "line 3 is not CSV (unexpected end of data): is a quote not"),
    "two open quotes": ('step,loss,note\n1,2,"a\n2,3,b\n3,4,c"\n4,5,d\n', "line 2: a value contains a line break"),
    "open in the header": ('step,"loss\n1,2\n2,3\n', "line 1 is not CSV"),
    "losses missing": ("step,loss\n1,\n", "has no losses in 'loss'"),
    "quote": ('step,loss\n1,"' + "2" * 200_000 + '"\n', "is not CSV"),
    "long": ("step,loss\n1," + "2" * text.LONGEST_LINE, "a line of more than 1,048,576 characters"),
}  # fmt: skip
BAD_JSON = {
    "no object": ("[1, 2]\n", "line 1 is not a JSON object"),
    "no JSON": ('{"step": 1, "loss": 2}\nstep=2 loss=1\n', "line 2 is not JSON"),
    "nested": ("[" * 100_000 + "\n", "line 1 is not JSON"),
    "list": ('{"step": 1, "loss": [2]}\n', "line 1: the loss is '[2]'"),
    "digits": ('{"step": 1, "loss": ' + "9" * 400 + "}\n", "line 1: the loss is '999"),
    "nothing": ("", "x.jsonl is empty (0 bytes)"),
    "blank lines": ("\n\n", "x.jsonl has no rows"),
    "no step here": ('{"step": 1, "loss": 2}\n{"loss": 3}\n', "line 2: there is a loss, but 'step' has no step"),
    "step of a bool": ('{"step": true, "loss": 2}\n', "line 1: the step is 'True'"),
    "loss of a bool": ('{"step": 1, "loss": true}\n', "line 1: the loss is 'True'"),
    "bytes": ('{"step": 1, "loss": 2, "x": "\udcff"}\n', "is not UTF-8"),
}


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [*((".csv", *bad) for bad in BAD.values()), *((".jsonl", *bad) for bad in BAD_JSON.values())],
    ids=[*BAD, *BAD_JSON],
)
def test_a_bad_log_is_one_line_and_leaves_nothing(bring, capsys, tmp_path, suffix, text, message):
    (tmp_path / f"x{suffix}").write_text(text, errors="surrogateescape")
    assert bring(f"x{suffix}") == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1 and len(err) < 500
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.jsonl", '{"step": 1, "loss": 2}\n\n{"step": 2, "lo'),
        ("x.csv", "step,loss\n1,2\n2,1"),
        ("x.csv", "step,loss\r1,2\r2,1"),
    ],
)
def test_a_last_line_that_is_cut_short_is_left_out(bring, capsys, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert bring(name) == 0 and curve(tmp_path) == {1: 2.0}
    assert "left out: the last line has no line break" in capsys.readouterr().out


LOGS = {
    "Hugging Face": (
        "x.jsonl",
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 2, "train_loss": 2.5}\n',
        {1: 3, 2: 2},
        "(loss), step 1 to 2\n    not read: train_loss;",
    ),
    "the mean first": ("x.jsonl", '{"step": 2, "train_loss": 2.5}\n{"step": 1, "loss": 3.0}\n', {1: 3}, "(loss), step"),
    "W&B": ("x.csv", "_step,loss,train/global_step\n0,3,10\n1,2,20\n", {10: 3, 20: 2}, "not read: _step;"),
    "blank": ("x.csv", "Step,Loss\n1,3\n2, \n3,None\n", {1: 3}, "2 rows left out: Loss is empty"),
    "NaN later": ("x.csv", "step,loss\n1,3\n1,nan\n2,nan\n2,4\n", {1: 3, 2: 4}, "2 losses were left out"),
}


@pytest.mark.parametrize(("name", "text", "losses", "summary"), LOGS.values(), ids=LOGS)
def test_usual_logs(bring, capsys, tmp_path, name, text, losses, summary):
    (tmp_path / name).write_text(text)
    assert bring(name) == 0 and curve(tmp_path) == losses and summary in capsys.readouterr().out


def test_bad_event_files(bring, capsys, tmp_path, monkeypatch):
    write_events(tmp_path / "cut", BF16)
    (whole,) = (tmp_path / "cut").iterdir()
    whole.write_bytes(whole.read_bytes()[:-20])
    assert bring("cut") == 0 and 40 < len(curve(tmp_path)) <= 50  # its writer was killed
    (tmp_path / "events.out.tfevents.1").write_bytes(b"\0" * 99)
    (tmp_path / "events.out.tfevents.2").touch()
    os.mkfifo(tmp_path / "events.out.tfevents.3")
    capsys.readouterr()
    for number, status in ((1, 2), (2, 2), (3, 2)):
        assert bring(f"events.out.tfevents.{number}") == status
    assert capsys.readouterr().err.count("\n") == 3
    monkeypatch.setitem(sys.modules, "tensorboard.util.tensor_util", None)
    assert bring("cut") == 2 and "pip install 'binade[tensorboard]'" in capsys.readouterr().err


def test_no_loss_of_a_damaged_event_file_is_left_out_silently(bring, capsys, tmp_path):
    """Bytes at random places: whatever is not read is said, with exit status 1, and what is read is right."""
    write_events(tmp_path / "events", BF16)
    (path,) = (tmp_path / "events").iterdir()
    whole, chance = path.read_bytes(), random.Random(0)
    assert bring("events") == 0
    expected = curve(tmp_path)
    for _ in range(25):
        at = chance.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        capsys.readouterr()
        status = bring("events")
        out, err = capsys.readouterr()
        if status == 2:  # the first record
            assert "record 1: the checksum of its length is wrong" in err
            continue
        found = curve(tmp_path)
        lost = len(expected) - len(found)
        assert status == 1 and "is damaged and was not read" in err and found.items() <= expected.items()
        assert re.search(
            r"not read: .*, record \d+( after step \d+)?: (its checksum|the checksum of its length) is", out
        )
        assert lost <= 1 or "bytes after it are lost" in out
        assert run_of(tmp_path).config["not_read"]
    path.write_bytes(whole)
    assert bring("events") == 0 and curve(tmp_path) == expected and not run_of(tmp_path).config["not_read"]


def test_a_damaged_file_among_several(bring, capsys, tmp_path):
    write_events(tmp_path / "events", BF16[:30], STEPS[:30])
    write_events(tmp_path / "events", BF16[30:], STEPS[30:])
    first, _ = sorted((tmp_path / "events").iterdir())
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    assert bring("events") == 1 and set(range(31, 51)) <= set(curve(tmp_path))
    assert str(first) in capsys.readouterr().out


def record(content: bytes, length: int | None = None) -> bytes:
    """A record of an event file; length: as its header gives it."""
    header = struct.pack("<Q", len(content) if length is None else length)
    crc = [struct.pack("<I", masked_crc32c(part)) for part in (header, content)]
    return header + crc[0] + content + crc[1]


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1])
def test_a_record_that_claims_a_huge_length_is_refused(bring, capsys, tmp_path, length):
    (tmp_path / "events.out.tfevents.1").write_bytes(record(b"x", length))
    assert bring("events.out.tfevents.1") == 2
    err = capsys.readouterr().err
    assert "record 1: it is longer than the file" in err and err.count("\n") == 1


@pytest.mark.parametrize("sizes", [(20_000, 10_000), (100_000, 100_000), (1,)])
def test_a_tensor_that_is_not_a_scalar_is_not_expanded(bring, capsys, tmp_path, sizes):
    """One value stands for all."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in sizes])
    tensor = TensorProto(dtype=DT_FLOAT, tensor_shape=shape, float_val=[1.0])
    event = Event(step=1, summary=Summary(value=[Summary.Value(tag="loss", tensor=tensor)]))
    (tmp_path / "events.out.tfevents.1").write_bytes(record(event.SerializeToString()))
    tracemalloc.start()
    assert bring("events.out.tfevents.1") == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 28 and "has no rows" in capsys.readouterr().err


def test_a_directory_with_tensors_and_events_is_imported_as_either(command, bring, capsys, tmp_path):
    write_events(tmp_path / "both", BF16)
    write(tmp_path / "both" / "below" / "x.pt", tensor(0))
    assert bring("both") == 0 and len(curve(tmp_path)) == 50
    assert command("import", str(tmp_path / "both"), "--recipe", "mxfp8", "--scores", "mxfp8") == 2
    assert "--scores is for tensors, but" in capsys.readouterr().err
    assert command("import", str(tmp_path / "both"), "--scores", "mxfp8", "--workers", "1") == 0
    assert "1 tensors of 1 files" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("x.csv", "--recipe", "bf16", "--scores", "mxfp8"), "--scores is for tensors"),
        (("x.csv", "--scores", "mxfp8"), "--scores is for tensors, but"),
        (("x.csv", "--recipe", "bf16", "--name", "x" * 81), "--name"),
        (("logs", "--loss-column", "x"), "--loss-column is for losses"),
        (("x.txt", "--recipe", "bf16"), "x.txt is empty (0 bytes)"),
    ],
)
def test_wrong_options(command, capsys, tmp_path, arguments, message):
    write_csv(tmp_path / "x.csv")
    (tmp_path / "logs").mkdir()
    (tmp_path / "x.txt").touch()
    assert command("import", str(tmp_path / arguments[0]), *arguments[1:]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "runs").exists()


def test_too_many_steps(bring, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MOST_STEPS", 49)
    write_csv(tmp_path / "x.csv")
    assert bring("x.csv") == 2 and "more than 49 steps" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["replace-1", "replace-2", "replace-3", "replace-4", "fsync-2"])
def test_a_killed_import_never_has_losses_with_the_settings_of_others(bring, tmp_path, moment):
    """Those of the old import or of the new one: losses of mxfp4 never look like losses of mxfp8, and none are lost."""
    write_csv(tmp_path / "x.csv", BF16)
    assert bring("x.csv", recipe="mxfp4") == 0
    before = curve(tmp_path)
    write_csv(tmp_path / "x.csv", BF16 + 1)

    def attempt() -> int:
        call, left = moment.split("-")
        kill_at(call, int(left))
        return main(["import", str(tmp_path / "x.csv"), "--recipe", "mxfp8"])

    status = forked(partial(attempt), {})
    after = curve(tmp_path)
    recipe = run_of(tmp_path).config["recipe"]
    new = dict(zip(STEPS.tolist(), (BF16 + 1).tolist(), strict=True))
    assert (recipe, after) in (("mxfp4", before), ("mxfp8", new))
    assert status == [-signal.SIGKILL] and run_of(tmp_path).status.state in (DONE, CRASHED)
    assert bring("x.csv", recipe="mxfp8") == 0 and curve(tmp_path)[1] == BF16[0] + 1
    assert run_of(tmp_path).status.state == DONE
    assert not [path for path in run_of(tmp_path).directory.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_leaves_an_imported_run_as_it_was(command, capsys, tmp_path, small_disk):
    log, root = tmp_path / "x.csv", small_disk / "runs"
    write_csv(log, BF16)
    line = ("import", str(log), "--tensor-save-dir", str(root), "--recipe")
    assert command(*line, "mxfp4") == 0
    (before,), _ = list_runs(root)
    losses = (before.directory / "loss.jsonl").read_bytes()
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bfree * 4096))
    capsys.readouterr()
    assert command(*line, "mxfp8") == 1
    assert capsys.readouterr().err.count("\n") == 1
    (after,), refused = list_runs(root)
    assert not refused and (after.status.state, after.config) == (DONE, before.config)
    assert (after.directory / "loss.jsonl").read_bytes() == losses
    (small_disk / "filler").unlink()
    assert command(*line, "mxfp8") == 0 and list_runs(root)[0][0].config["recipe"] == "mxfp8"
