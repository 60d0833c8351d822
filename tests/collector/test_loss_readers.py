"""Loss logs of other tools, recognized by their content: rebuilt ones, and files that the tools' packages write."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins import base_plugin
from tensorboard.plugins.scalar.scalars_plugin import OutputFormat, ScalarsPlugin
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerState

from binade.collector.errors import ConfigError
from binade.collector.imports.files import walk
from binade.collector.imports.losses import find_logs
from binade.collector.imports.readers.kind import Kind
from binade.collector.imports.readers.lines import NoLosses
from binade.collector.imports.readers.registry import READERS, looked_for
from binade.collector.imports.readers.series import Columns, Series, Window, windows_of
from binade.data.compare.loss_gaps import loss_gaps
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of, runs_with_references
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.data.run.run_notes import read_notes
from tests.collector.logs_made import tensor, write
from tests.compared import compared

LOSS = {step: round(4 - 0.3 * step, 6) for step in range(1, 5)}


@dataclass(frozen=True)
class Case:
    """A log with the losses of LOSS at each of `steps`; windows: as they must be read."""

    text: str
    reader: str
    name: str
    windows: tuple[int | None, ...] = (1, 1, 1, 1)
    steps: tuple[int, ...] = (1, 2, 3, 4)


def lines(template: str, *more: str, **values: Callable[[int], Any]) -> str:
    return "".join(
        template.format(s=step, x=loss, **{name: value(step) for name, value in values.items()}) + "\n"
        for step, loss in LOSS.items()
    ) + "".join(f"{line}\n" for line in more)


def objects(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


MEGATRON = (
    " [2026-09-11 12:06:01.98] iteration {s:8}/    5000 | consumed samples: {s:12} | elapsed time per iteration (ms): "
    "243.9 | learning rate: 1.4E-04 | global batch size: 32 | lm loss: {x:.6E} | loss scale: 1.0 | grad norm: 30.066 | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)
HISTORY = [
    *({"epoch": s / 100, "grad_norm": 1.2, "learning_rate": 1e-4, "loss": x, "step": 10 * s} for s, x in LOSS.items()),
    {"epoch": 0.4, "eval_loss": 9.0, "step": 40},
    {"epoch": 0.4, "train_loss": 9.5, "step": 40},
]
TENS = (10, 20, 30, 40)
PRINTED = "lines with a step and a loss (NeMo, nanoGPT, nanochat, MaxText, verl, slime, prime-rl and others)"
CASES = {
    "trainer_state": Case(
        json.dumps({"best_metric": None, "global_step": 40, "log_history": HISTORY, "max_steps": 40}, indent=2),
        "trainer_state.json of Hugging Face", "loss", TENS[:1] * 4, TENS,
    ),
    "trainer_state in one line": Case(
        json.dumps({"global_step": 40, "log_history": HISTORY}), "trainer_state.json of Hugging Face",
        "loss", TENS[:1] * 4, TENS,
    ),
    "TensorBoard CSV": Case(
        "Wall time,Step,Value\n" + lines("172500000{s}.5,{s},{x}"), "CSV of a TensorBoard scalar", "Value"
    ),
    "TensorBoard JSON": Case(
        json.dumps([[1725000000.5 + s, s, x] for s, x in LOSS.items()]), "JSON of a TensorBoard scalar", "value"
    ),
    "W&B chart": Case(
        '"Step","my - run - train/loss","my - run - train/loss__MIN","my - run - train/loss__MAX"\n'
        + lines('"{s}","{x}","{x}","{x}"'),
        "CSV of a chart (W&B, SwanLab)", "my - run - train/loss",
    ),
    "W&B history": Case(
        ",_step,_runtime,train/loss,train/global_step\n" + lines("{s},{s},1.5,{x},{t}", t=lambda s: 10 * s),
        "CSV (W&B history and others)", "train/loss", (None,) * 4, TENS,
    ),
    "Lightning": Case(
        "epoch,lr-AdamW,step,train_loss_epoch,train_loss_step,val_loss\n"
        + lines("0,,{t},,{x},", "0,,40,3.4,,", "0,,40,,,9.0", t=lambda s: 10 * s),
        "Lightning's metrics.csv", "train_loss_step", (1,) * 4, TENS,
    ),
    "LLaMA-Factory": Case(
        objects(
            *({"current_steps": 5 * s, "total_steps": 20, "loss": x, "lr": 1e-4, "percentage": 5.0, "elapsed_time":
               "0:00:06"} for s, x in LOSS.items()),
            {"current_steps": 20, "total_steps": 20, "eval_loss": 9.0},
        ),
        "LLaMA-Factory's trainer_log.jsonl", "loss", (5,) * 4, (5, 10, 15, 20),
    ),
    "ms-swift": Case(
        objects(
            *({"loss": x, "grad_norm": 22.3, "global_step/max_steps": f"{s}/4", "train_speed(iter/s)": 0.2}
              for s, x in LOSS.items()),
            {"eval_loss": 6.0, "global_step/max_steps": "4/4"},
            {"last_model_checkpoint": "x", "best_metric": None, "global_step": 4, "log_history": []},
        ),
        "ms-swift's logging.jsonl", "loss",
    ),
    "ms-swift, Megatron": Case(
        objects(*({"iteration": f"{10 * s}/40", "lm loss": x, "elapsed_time": "6s"} for s, x in LOSS.items())),
        "ms-swift's logging.jsonl", "lm loss", (10,) * 4, TENS,
    ),
    "JSON lines": Case(
        objects(*({"step": s, "loss": x, "lr": 1e-4, "tokens_per_second_per_gpu": 1.5} for s, x in LOSS.items())),
        "JSON lines (torchtune and others)", "loss",
    ),
    "Megatron": Case(
        "WARNING: a line\n" + lines(MEGATRON).replace("12:06", "12:07")
        + " validation loss at iteration 4 | lm loss value: 9.0E+00 | lm loss PPL: 8.1E+03 |\n",
        "Megatron's output", "lm loss",
    ),
    "Megatron, each tenth": Case(
        "".join(MEGATRON.format(s=10 * s, x=x) + "\n" for s, x in LOSS.items()),
        "Megatron's output", "lm loss", (10,) * 4, TENS,
    ),
    "golden values": Case(
        json.dumps({
            "lm loss": {"start_step": 1, "end_step": 4, "step_interval": 1,
                        "values": {str(s): x for s, x in LOSS.items()}},
            "num-zeros": {"start_step": 1, "end_step": 4, "step_interval": 1, "values": {"1": 1700.0}},
        }, indent=4),
        "Megatron's golden_values.json", "lm loss",
    ),
    "older golden values": Case(
        json.dumps({"lm loss": {"start_step": 10, "end_step": 40, "step_interval": 10, "values": [*LOSS.values()]}}),
        "Megatron's golden_values.json", "lm loss", (1,) * 4, TENS,
    ),
    "table": Case(
        "# config: debugmodel_mxfp8\n# ngpu: 16\n# step loss grad_norm\n" + lines("{s} {x} 4.0"),
        "a table with spaces (torchtitan)", "loss",
    ),
    "torchtitan": Case(
        "[titan] 2026-01-01 root - INFO - Training starts at step 1\n"
        + lines("\x1b[31m[titan] 2026-01-01 12:00:00,1 - root - INFO - step: {s:2}  \x1b[32mloss: {x:7.4f}  "
                "\x1b[38;2;180;60;0mgrad_norm:  1.4  memory: 1.0GiB(1.0%)  tps: 1,234\x1b[39m"),
        "torchtitan's output", "loss",
    ),
    "torchtune": Case(lines("Step {s} | loss:{x} lr:2e-05 tokens_per_second_per_gpu:1.5 "), "torchtune's log", "loss"),
    "llm.c": Case(
        "s:0 tel:9.0\ns:0 eval:0.25\n" + lines("s:{s} trl:{x} lr:0.000003 norm:15.3", "s:4 tel:8.0"),
        "llm.c's main.log", "trl",
    ),
    "modded-nanogpt": Case(
        "import os\nprint(f'step:{step}/{args.num_iterations} val_loss:{val_loss:.4f}')\n" + "=" * 100 + "\n"
        + lines("step:{t}/1750 val_loss:{x} train_time:12ms step_avg:1.25ms", t=lambda s: 10 * s),
        "modded-nanogpt's log", "val_loss", (1,) * 4, TENS,
    ),
    "older modded-nanogpt": Case(
        "step:0/4 val_loss:10.0 train_time:0ms step_avg:nanms\n"
        + lines("step:{s}/4 train_loss:{x} train_time:12ms step_avg:1.25ms", "step:4/4 val_loss:8.0 train_time:48ms"),
        "modded-nanogpt's log", "train_loss",
    ),
    "OLMo": Case(
        lines("2026-01-01 12:00:00 host:0 olmo_core:1 INFO [step={s}/1,000,epoch=1,eta=1h]\n    optim/LR=0.0001\n"
              "    train/CE loss={x}\n    train/PPL=12.2"),
        "OLMo's output", "train/CE loss",
    ),
    "torchtitan with validation": Case(
        lines("[titan] - INFO - step: {s:2}  loss: {x:7.4f}  grad_norm:  1.4", )
        + "[titan] - INFO - validate step:  4  loss:  9.0000  memory: 1.0GiB(1.0%)\n",
        "torchtitan's output", "loss",
    ),
    "older OLMo": Case(
        lines("host:0 olmo.train:800 INFO [step={s}/739328]\n    train/CrossEntropyLoss={x}"), "OLMo's output",
        "train/CrossEntropyLoss",
    ),
    "NeMo-RL": Case(
        json.dumps({"train/gen_kl_error": {"1": 0.001}, "train/loss": {str(s): x for s, x in LOSS.items()}}),
        "Megatron's golden_values.json", "train/loss",
    ),
    "NeMo 2": Case(
        lines("Training epoch {s}, iteration 0/1 | lr: 1.5e-07 | global_batch_size: 512 | global_step: {s} | "
              "reduced_train_loss: {x} | train_step_timing in s: 61.94 | consumed_samples: 928 | val_loss: 9.0"),
        PRINTED, "reduced_train_loss",
    ),
    "NeMo 1": Case(
        "".join(f"Epoch 0: :   1%|1    | {s}/9 [00:10<01:30, v_num=0, reduced_train_loss={x}, global_step={s}.000, "
                "consumed_samples=80.0, val_loss=9.70]\r" for s, x in LOSS.items()) + "\n",
        PRINTED, "reduced_train_loss",
    ),
    "nanoGPT": Case(
        "step 0: train loss 10.9000, val loss 10.8000\n"
        + lines("2026-01-01 09:30:39 iter {t}: loss {x}, time 1099.34ms, mfu 15.34%",
                "step 40: train loss 9.0390, val loss 9.0427", t=lambda s: 10 * s),
        PRINTED, "loss", (None,) * 4, TENS,
    ),
    "nanochat": Case(
        lines("step {s:05}/21400 (0.05%) | loss: {x:.6f} | lrm: 1.00 | dt: 1.5ms | tok/sec: 1,234 | total time: 0.00m",
              "Step 00004 | Validation bpb: 1.2345"),
        PRINTED, "loss",
    ),
    "MaxText": Case(
        lines("completed step: {s}, seconds: 1.2, TFLOP/s/device: 100.1, Tokens/s/device: 1.5, total_weights: 65536, "
              "loss: {x}", "eval metrics after step: 4, loss=9.0, total_weights=1.0"),
        PRINTED, "loss",
    ),
    "MaxText, by grep": Case(
        lines("completed step: {s}, seconds: 1.2, TFLOP/s/device: 100.1, total_weights: 65536, loss: {x}"),
        PRINTED, "loss",
    ),
    "NeMo 2, by grep": Case(
        lines("Training epoch 0, iteration {s}/99 | lr: 1.5e-07 | global_step: {s} | reduced_train_loss: {x}"),
        PRINTED, "reduced_train_loss",
    ),
    "evaluations of the same steps": Case(
        lines("step {s} loss {x}\ntest: step {s} loss 9.0\n[eval] step {s} loss 9.0\nstep {s} | val | loss 9.0"),
        PRINTED, "loss",
    ),
    "a printed dict": Case(
        lines("{{'loss': {x}, 'grad_norm': 1.0, 'step': {s}}}", "{'eval_loss': 9.0, 'step': 4}"), PRINTED, "loss"
    ),
    "fairseq": Case(
        lines('2021-03-08 12:31:36 | INFO | train_inner | {{"epoch": 1, "loss": "{x}", "num_updates": "{t}"}}',
              '2021-03-08 12:31:36 | INFO | valid | {"epoch": 1, "valid_loss": "9.0", "valid_num_updates": "40"}',
              t=lambda s: 10 * s),
        "fairseq's log", "loss", TENS[:1] * 4, TENS,
    ),
    "older fairseq": Case(
        lines("| epoch 001:    {t} / 1891 loss={x}, nll_loss=9.0, ppl=1886.05, wps=52922, num_updates={t}, lr=8.9e-05",
              "| epoch 001 | valid on 'valid' subset | valid_loss 9.0 | num_updates 40", t=lambda s: 10 * s),
        "fairseq's output", "loss", TENS[:1] * 4, TENS,
    ),
    "MLPerf": Case(
        ':::MLLOG {"key": "init_start", "value": null, "metadata": {"step_num": 0}}\n'
        + "".join(
            ":::MLLOG " + json.dumps({"key": "train_loss", "value": x, "metadata": {"samples_count": 10 * s}}) + "\n"
            for s, x in LOSS.items()
        )
        + ':::MLLOG {"key": "eval_loss", "value": 9.0, "metadata": {"samples_count": 40}}\n',
        "MLPerf's log", "train_loss", (None,) * 4, TENS,
    ),
    "DLLogger": Case(
        "".join("DLLL " + json.dumps({"type": "LOG", "step": [0, s], "data": {"average_loss": x}}) + "\n"
                for s, x in LOSS.items()) + 'DLLL {"type": "LOG", "step": [], "data": {"final_loss": 9.0}}\n',
        "NVIDIA's DLLogger", "average_loss",
    ),
    "Composer": Case(
        lines("[batch={s}/500]:\n\t Train time/batch: 1\n\t Train loss/train/total: {x}\n\t Train metrics/train/L: 9.0",
              "[Eval batch=1/10]", "\t Eval metrics/eval/LanguageCrossEntropy: 9.0"),
        "Composer's output (llm-foundry)", "loss/train/total",
    ),
    "torchtitan without a header": Case(
        lines("{s} {x}"), "a step and a loss in each line (torchtitan)", "loss"
    ),
    "xtuner": Case(
        lines("05/04 08:52:15 - mmengine - INFO - Iter(train) [  {t}/1920]  lr: 3.2e-05  eta: 0:11:00  time: 0.3458  "
              "memory: 9793  loss: {x}  decode.loss_ce: 9.0", "mmengine - INFO - Iter(val) [11/11]  loss: 9.0",
              t=lambda s: 10 * s),
        "xtuner's output (MMEngine)", "loss", (None,) * 4, TENS,
    ),
    "MindFormers": Case(
        lines("2025-04-07 15:34:27,308 - [mindformers/core/callback/callback.py:529] - INFO - {{ Epoch:[  1/  2], "
              "step:[{s:5}/   19], loss: {x}, per_step_time: 1752ms, lr: 1e-05, loss_scale: 9.0 }}"),
        "MindFormers' output", "loss",
    ),
    "NeMo-RL, printed": Case(
        lines("========================= Step {s}/100 =========================\n📊 Training Results:\n  • Loss: {x}\n"
              "  • Grad Norm: 1.0", "📊 Validation Results:", "    • Validation loss: 9.0"),
        "NeMo-RL's output", "Loss",
    ),
    "OpenRLHF": Case(
        "".join(f"Train step of epoch 0:  {s}%|#  | {n}/50 [00:01<00:10,  1.0s/it, gpt_loss={x}, loss_mean=9.0]\r"
                for s, x in LOSS.items() for n in (s, s)) + "\n",
        "OpenRLHF's output", "gpt_loss",
    ),
    "Levanter": Case(
        lines("2025-06-01T10:00:01 - 0 - levanter.callbacks - INFO - Progress on:train {s}.00it/5.00it rate:1.2it/s "
              "remaining:00:10 elapsed:00:01 postfix:loss={x}", "Progress on:eval 4.00it/5.00it postfix:loss=9.0"),
        "Levanter's output", "loss",
    ),
    "tqdm": Case(
        "".join(f"Epoch 0:  10%|#   | {s}/50 [00:01<00:10,  1.0it/s, loss={x}, v_num=0]\r" for s, x in LOSS.items())
        + "\n",
        "a progress bar (tqdm)", "loss",
    ),
    "SwanLab": Case(
        "step,mxfp8-seed1-train/loss,mxfp8-seed1-train/loss_timestamp\n" + lines("{s},{x},1735689600000"),
        "CSV of a chart (W&B, SwanLab)", "mxfp8-seed1-train/loss",
    ),
    "Comet": Case(
        json.dumps([{"name": "train/loss", "x": [*LOSS], "y": [*LOSS.values()], "type": "scatter"}]),
        "JSON of Comet", "train/loss",
    ),
    "a list of objects": Case(
        json.dumps([{"step": s, "train": {"loss": x, "lr": 1.0}} for s, x in LOSS.items()], indent=1),
        "JSON (a list of objects, or an object of lists)", "train/loss",
    ),
    "an object of lists": Case(
        json.dumps({"step": [*LOSS], "loss": [*LOSS.values()]}, indent=1),
        "JSON (a list of objects, or an object of lists)", "loss",
    ),
    "DeepSpeed": Case(
        lines("[2026-01-01 12:00:00,1] [INFO] [logging.py:96:log_dist] [Rank 0] step={s}, skipped=0, lr=[0.001], "
              "mom=[(0.9, 0.999)]\nsteps: {s} loss: {x:0.4f} iter time (s): 0.5 samples/sec: 64.0"),
        "DeepSpeed's output", "loss",
    ),
}  # fmt: skip


def read(path: Path) -> tuple[Kind, Series]:
    """The only series of a file."""
    (log,) = find_logs(walk(path, path.parent / "runs"))
    (series,) = log.reader.read(log.path, Columns())
    return log.reader, series


def attempt(path: Path) -> Series | str:
    """The only series of a file, or why it is refused."""
    try:
        return read(path)[1]
    except ConfigError as error:
        return str(error)


def events(path: Path, losses: dict[int, float], tag: str = "train/loss") -> Path:
    with SummaryWriter(str(path)) as writer:
        for step, loss in losses.items():
            writer.add_scalar(tag, loss, step)
            writer.add_scalar("train/learning_rate", 1e-4, step)
    return path


def state(path: Path, history: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    TrainerState(log_history=history, global_step=40, max_steps=40).save_to_json(str(path))
    return path


def curves(root: Path) -> dict[str, dict[int, float | None]]:
    return {
        f"{Path(run.config['source']).name}: {run.config['loss_column']}": {
            record["iteration"]: record["loss"] for record in read_losses(run.directory)
        }
        for run in list_runs(root)[0]
    }


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", ["log", "log.bin"])
def test_each_kind_is_recognized_by_its_content(tmp_path, case, name):
    (tmp_path / name).write_text(case.text + "\n")
    reader, series = read(tmp_path / name)
    assert (reader.kind, series.name) == (case.reader, case.name)
    assert series.losses == {step: LOSS[i] for i, step in enumerate(case.steps, 1)}
    assert tuple(series.windows.values()) == case.windows
    assert not (series.cut or series.damaged or series.repeated)


def test_each_kind_has_a_case():
    """Those that are not text are in test_loss_stores.py."""
    others = {"TensorBoard's event files", "Trackio's database", "MLflow's database", "MLflow's store",
              "Parquet (W&B history and others)"}  # fmt: skip
    kinds = {reader.kind for reader in READERS if not isinstance(reader, NoLosses)}
    assert {case.reader for case in CASES.values()} == kinds - others


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_log_that_is_cut_gives_no_wrong_loss(tmp_path, case):
    """Wherever it ends: one line says why it is refused, or what was read is right."""
    expected = {step: LOSS[i] for i, step in enumerate(case.steps, 1)}
    content = case.text.encode()
    for size in {*range(0, len(content), max(1, len(content) // 60)), len(content) - 1, len(content) - 2}:
        (tmp_path / "log").write_bytes(content[:size])
        result = attempt(tmp_path / "log")
        if isinstance(result, str):
            assert "\n" not in result and str(tmp_path) in result
        elif result.name == case.name:  # of two kinds of losses, the end may have the usual one
            assert result.losses.items() <= expected.items()


@pytest.mark.sampled(21)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_damaged_log_is_refused_in_one_line_or_says_what_it_lost(tmp_path, case):
    chance = random.Random(0)
    content = (case.text + "\n").encode()
    for _ in range(40):
        at = chance.randrange(len(content))
        noise = bytes(chance.choice(b'\xff\x00\n"{[,: 9e') for _ in range(chance.randrange(1, 9)))
        (tmp_path / "log").write_bytes(content[:at] + noise + content[at + chance.randrange(9) :])
        result = attempt(tmp_path / "log")
        assert not isinstance(result, str) or ("\n" not in result and len(result) < 1500)


HOSTILE = {
    "binary": (b"\0\1\2" * 99, "is not recognized as a loss log; looked for: trainer_state.json"),
    "prose": (b"Dear reader,\nthe loss, at each step, was large.\n", "is not recognized as a loss log"),
    "a sentence": (b"At step 3 the loss is 2.\nIn step 4, train loss 3 was seen.\n", "is not recognized as a loss log"),
    "history": (b'{"log_history": 3}', "expected log_history, a list"),
    "history of numbers": (b'{"log_history": [3]}', r"log_history\[0\]: expected an object"),
    "deep history": (b'{\n"log_history": ' + b"[" * 200_000, "nested too deeply|is not JSON"),
    "history cut": (b'{\n"log_history": [{"step": 1, "loss": 2}', "is not JSON .*is it cut"),
    "no step": (b'{"log_history": [{"loss": 2}]}', "no column is known to have the steps"),
    "half a step": (b'{"log_history": [{"loss": 2, "step": 1.5}]}', "the step is 1.5: expected a whole number"),
    "of": (b'{"loss": 1, "global_step/max_steps": "x/20"}\n', "'x/20' in column 'global_step/max_steps': expected"),
    "huge": (b'{"loss": 1, "global_step/max_steps": "' + b"9" * 99 + b'/20"}\n', "the step is"),
    "golden text": (b'{"lm loss": {"start_step": 1, "values": "x"}}', "expected values by step"),
    "golden list": (b'{"lm loss": [1], "start_step": 0, "values": 0}', "expected start_step, step_interval"),
    "scalars": (b"[[1.5, 1, 2.0], [1]]", r"entry 2: expected \[wall time, step, value\]"),
    "table": (b"# step loss\n1 2.0\n2 1.0 7\n", "line 3: there are 3 values: expected 2"),
    "ranks alone": (b"[Rank 0] step=10, skipped=0, lr=[0.1], mom=[0.9]\n", "DeepSpeed, which has steps .* no losses"),
    "long line": (b"s:1 trl:2.0 \n" + b"x" * (1 << 21), "a line of more than"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_read_is_one_line_and_leaves_nothing(command, capsys, tmp_path, content, message):
    (tmp_path / "log").write_bytes(content)
    assert command("import", str(tmp_path / "log")) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "log")


def test_lines_without_a_number_are_reported(command, capsys, tmp_path):
    text = CASES["Megatron"].text.splitlines(keepends=True)
    text[2] = text[2][:190] + "\n"  # another rank wrote into it
    text[3] = text[3].replace("lm loss: ", "lm loss: [W]")
    (tmp_path / "log").write_text("".join(text))
    series = read(tmp_path / "log")[1]
    assert [*series.losses] == [1, 4] or [*series.losses] == [1, 2, 4]
    assert "line 4, column 188: expected a number after '| lm loss:'" in series.damaged
    assert command("import", str(tmp_path / "log")) == 1
    assert "line 4, column 188: expected a number" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("header", "row", "options", "message"),
    [
        (
            "step,ce_loss,kl_loss",
            "1,2,3",
            ["--loss-column", "kl_loss"],
            "'ce_loss', 'kl_loss' may be the losses: choose",
        ),
        ("step/a,step/b,loss", "1,1,3", ["--step-column", "step/a"], "'step/a', 'step/b' may be the steps: choose"),
        ("Step,r - ce_loss,r - kl_loss", "1,2,3", ["--loss-column", "r - kl_loss"], "'r - ce_loss', 'r - kl_loss' may"),
    ],
)
def test_only_two_candidates_are_a_question(command, capsys, tmp_path, header, row, options, message):
    (tmp_path / "x.csv").write_text(f"{header}\n{row}\n")
    assert command("import", str(tmp_path / "x.csv")) == 2
    err = capsys.readouterr().err
    assert message in err and options[0] in err and err.count("\n") == 1
    assert command("import", str(tmp_path / "x.csv"), *options) == 0
    assert [*curves(tmp_path / "runs").values()] == [{1: 3.0}]


def test_one_candidate_with_an_unusual_name_is_read(tmp_path):
    (tmp_path / "x.csv").write_text("num_step,total_loss,eval_loss,loss_scale\n1,2,3,4\n")
    series = read(tmp_path / "x.csv")[1]
    assert (series.step_name, series.name, series.losses) == ("num_step", "total_loss", {1: 2.0})


def test_each_run_of_a_chart_is_a_run(command, capsys, tmp_path):
    """W&B's page averages points of a long chart: their minimum and maximum differ."""
    (tmp_path / "chart.csv").write_text(
        '"Step","a - train/loss","a - train/loss__MIN","a - train/loss__MAX","b - train/loss","b - train/lr"\n'
        '"1","4.0","3.5","4.5","2.0","7"\n"2","3.0","3.0","3.0","","7"\n'
    )
    assert command("import", str(tmp_path / "chart.csv")) == 0
    assert curves(tmp_path / "runs") == {
        "chart.csv: a - train/loss": {1: 4.0, 2: 3.0}, "chart.csv: b - train/loss": {1: 2.0},
    }  # fmt: skip
    assert {read_notes(run.directory).name for run in list_runs(tmp_path / "runs")[0]} == {"a", "b"}
    out = capsys.readouterr().out
    assert "1 points of a - train/loss have __MIN below __MAX" in out and "1 row left out: b - train/loss" in out
    assert command("import", str(tmp_path / "chart.csv"), "--name", "x") == 2
    assert "--name is for one training, but there are 2" in capsys.readouterr().err


def test_state_of_transformers(command, tmp_path):
    state(tmp_path / "trainer_state.json", HISTORY)
    reader, series = read(tmp_path / "trainer_state.json")
    assert reader.kind == "trainer_state.json of Hugging Face" and series.losses == {10 * s: x for s, x in LOSS.items()}
    assert command("import", str(tmp_path / "trainer_state.json")) == 0
    (run,), _ = list_runs(tmp_path / "runs")
    assert run.config["log"] == "trainer_state.json of Hugging Face" and run.config["recipe"] is None


@pytest.mark.parametrize("style", [OutputFormat.CSV, OutputFormat.JSON])
def test_downloads_from_tensorboard(tmp_path, style):
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(events(tmp_path / "logs", LOSS)))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path / "logs"))
    plugin = ScalarsPlugin(base_plugin.TBContext(data_provider=provider))
    body, _ = plugin.scalars_impl(RequestContext(), "train/loss", ".", "", style)
    (tmp_path / "download").write_text(body if isinstance(body, str) else json.dumps(body))
    series = read(tmp_path / "download")[1]
    assert series.losses == pytest.approx(LOSS, abs=1e-6) and {*series.windows.values()} == {1}


def test_a_download_of_another_scalar_is_read_only_if_it_is_named(command, tmp_path):
    for tag in ("lr", "train_loss", "val_loss"):
        (tmp_path / f"run-a-tag-{tag}.csv").write_text(CASES["TensorBoard CSV"].text)
    assert [log.label for log in find_logs(walk(tmp_path, tmp_path / "runs"))] == ["run-a-tag-train_loss.csv"]
    assert command("import", str(tmp_path / "run-a-tag-val_loss.csv")) == 0


def test_parent_folders_are_searched(command, capsys, tmp_path):
    """An output folder of the Trainer, and one of Lightning. A later checkpoint has what an earlier one has."""
    top = tmp_path / "all"
    tens = {10 * step: loss for step, loss in LOSS.items()}
    for number in (2, 3):
        state(top / f"out/checkpoint-{10 * number}/trainer_state.json", HISTORY[:number])
    events(top / "out/runs/Sep01_host", {step: 2 * loss for step, loss in tens.items()})
    version = top / "lightning_logs" / "version_0"
    version.mkdir(parents=True)
    (version / "metrics.csv").write_text(CASES["Lightning"].text)
    (version / "hparams.yaml").write_text("lr: 0.1\n")
    (top / "link.csv").symlink_to(version / "metrics.csv")
    assert command("import", str(top), "--dry-run") == 0
    listing = capsys.readouterr().out
    assert not (tmp_path / "runs").exists()
    for line in (
        "lightning_logs/version_0/metrics.csv: Lightning's metrics.csv: 4 losses (train_loss_step), step 10 to 40",
        "out/checkpoint-30/trainer_state.json: trainer_state.json of Hugging Face: 3 losses (loss), step 10 to 30",
        "out/runs/Sep01_host: TensorBoard's event files: 4 losses (train/loss), step 10 to 40",
        "left out: out/checkpoint-20/trainer_state.json: out/checkpoint-30/trainer_state.json has all of its losses",
        "not read: lightning_logs/version_0/hparams.yaml: not a tensor file, of .pt, .pth, .bin, ",
        "not read: link.csv: a symbolic link: its target is found separately",
    ):
        assert line in listing
    assert command("import", str(top), "--recipe", "mxfp8") == 0
    assert curves(tmp_path / "runs") == {
        "metrics.csv: train_loss_step": tens,
        "trainer_state.json: loss": {step: loss for step, loss in tens.items() if step <= 30},
        "Sep01_host: train/loss": pytest.approx({step: 2 * loss for step, loss in tens.items()}, abs=1e-5),
    }
    assert "out/runs/Sep01_host" in {read_notes(run.directory).name for run in list_runs(tmp_path / "runs")[0]}
    assert command("import", str(top), "--recipe", "mxfp8") == 0 and len(list_runs(tmp_path / "runs")[0]) == 3


def test_one_damaged_log_among_others(command, capsys, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "good.csv").write_text("step,loss\n1,2\n")
    (tmp_path / "logs" / "bad.csv").write_text("step,loss\n1,two\n")
    assert command("import", str(tmp_path / "logs")) == 1
    out, err = capsys.readouterr()
    assert "bad.csv, line 2: the loss is 'two'" in out and err.count("\n") == 1
    assert curves(tmp_path / "runs") == {"good.csv: loss": {1: 2.0}}
    (tmp_path / "logs" / "good.csv").unlink()
    assert command("import", str(tmp_path / "logs")) == 2 and "bad.csv, line 2" in capsys.readouterr().err


@pytest.mark.thorough
def test_losses_and_tensors_of_a_folder_are_both_imported(command, capsys, tmp_path):
    state(tmp_path / "out" / "checkpoint-40" / "trainer_state.json", HISTORY)
    write(tmp_path / "out" / "checkpoint-40" / "x.pt", tensor(0))
    assert command("import", str(tmp_path / "out"), "--dry-run") == 0
    assert "(loss), step 10 to 40" in (out := capsys.readouterr().out) and "1 tensor file in" in out
    assert command("import", str(tmp_path / "out"), "--workers", "1") == 0
    assert "1 tensors of 1 files" in capsys.readouterr().out and len(list_runs(tmp_path / "runs")[0]) == 1
    assert command("import", str(tmp_path / "out")) == 0
    out = capsys.readouterr().out
    assert "4 losses (loss)" in out and "1 tensors of 1 files" in out and "refused" not in out
    assert len(list_runs(tmp_path / "runs")[0]) == 2


def test_runs_of_binade_are_no_logs(command, tmp_path):
    (tmp_path / "x.csv").write_text("step,loss\n1,2\n")
    assert command("import", str(tmp_path / "x.csv")) == 0
    assert [log.label for log in find_logs(walk(tmp_path, tmp_path / "other"))] == ["x.csv"]


def test_a_folder_without_a_loss_log_says_what_was_looked_for(command, capsys, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "notes.txt").write_text("nothing\n")
    assert command("import", str(tmp_path / "logs"), "--recipe", "bf16") == 2
    assert f"has no loss log; looked for: {looked_for()}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "window", "expected"),
    [
        ([1, 10, 20], Window.INTERVAL, [1, 9, 10]),  # logging_first_step
        ([10, 20, 25], Window.INTERVAL, [10, 10, 5]),
        ([70, 80], Window.INTERVAL, [None, 10]),  # resumed: since when is unknown
        ([10], Window.INTERVAL, [None]),
        ([0, 10], Window.INTERVAL, [1, 10]),
        ([0, 1, 2, 4], Window.UNKNOWN, [1, 1, 1, None]),
        ([5, 6], Window.UNKNOWN, [1, 1]),
        ([10, 20], Window.UNKNOWN, [None, None]),
        ([10, 20], Window.ONE, [1, 1]),
    ],
)
def test_windows(steps, window, expected):
    assert windows_of(steps, window) == expected


def test_means_are_compared_with_means_of_as_many_iterations(command, tmp_path):
    """A Trainer with logging_steps=10 has means of ten iterations. The bf16 run is the one with most common points."""
    same = ("--model", "m", "--dataset", "d", "--seed", "1")
    single = {step: 4 - step / 100 for step in range(1, 41)}
    means = {end: sum(single[end - i] for i in range(10)) / 10 for end in TENS}

    def logs(losses: dict[int, float]) -> list[dict[str, Any]]:
        return [{"step": step, "loss": loss} for step, loss in losses.items()]

    state(tmp_path / "bf16-means.json", logs(means))
    state(tmp_path / "bf16.json", logs(single))
    state(tmp_path / "mxfp8.json", logs({step: loss + 0.5 for step, loss in means.items()}))
    state(tmp_path / "mxfp4.json", logs({step: loss + 0.25 for step, loss in single.items()}))
    (tmp_path / "hifp8.csv").write_text("step,loss\n" + "".join(f"{step},3\n" for step in TENS))
    for name in ("bf16-means.json", "bf16.json", "mxfp8.json", "mxfp4.json", "hifp8.csv"):
        recipe = name.partition(".")[0].partition("-")[0]
        assert command("import", str(tmp_path / name), "--recipe", recipe, *same) == 0
    (section,) = compared(tmp_path / "runs")
    assert section.compared
    costs = section.compared.costs.set_index("label")
    assert costs["gap"].to_dict() == pytest.approx({"mxfp8": 0.5, "mxfp4": 0.25})  # of hifp8 nobody knows
    assert costs["iterations"].to_dict() == {"mxfp8": 4, "mxfp4": 40}
    with Catalog.open(tmp_path / "runs") as catalog:
        table = runs_with_references(catalog.runs(), catalog.parts())
        gaps = loss_gaps(table, losses_of(catalog, table["run_id"].tolist()))
    recipes = table.set_index("run_id")["recipe"]
    means_of = gaps.groupby(gaps["run_id"].map(recipes))["gap"].mean().to_dict()
    assert {"mxfp8": means_of["mxfp8"], "mxfp4": means_of["mxfp4"]} == pytest.approx({"mxfp8": 0.5, "mxfp4": 0.25})
    assert "hifp8" not in means_of


@pytest.mark.parametrize("kind", ["state", "scalars"])
def test_a_document_in_one_long_line(tmp_path, kind):
    """Longer than what a file is recognized by."""
    many = range(1, 60_001)
    history = [{"step": step, "loss": 2.0} for step in many]
    document = {"log_history": history} if kind == "state" else [[1725000000.5, step, 2.0] for step in many]
    (tmp_path / "log").write_text(json.dumps(document))
    assert len(read(tmp_path / "log")[1].losses) == 60_000


def test_blank_lines_before_the_columns(tmp_path):
    (tmp_path / "log").write_text("\n\nstep,loss\n\n1,2\n")
    assert read(tmp_path / "log")[1].losses == {1: 2.0}


def test_a_nan_is_kept_as_no_loss(command, tmp_path):
    (tmp_path / "log").write_text("s:1 trl:2.0 \ns:2 trl:nan \ns:3 trl:-nan \n")
    assert math.isnan(read(tmp_path / "log")[1].losses[2])
    assert command("import", str(tmp_path / "log")) == 0
    assert curves(tmp_path / "runs") == {"log: trl": {1: 2.0, 2: None, 3: None}}
