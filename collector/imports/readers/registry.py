"""The kinds of loss logs. To read another one, add a row: its name, what finds a step and losses, its unit, a line."""

from __future__ import annotations

from binade.collector.imports.readers.events import Events
from binade.collector.imports.readers.json_logs import (
    MLPERF_STEPS,
    JsonDocument,
    JsonLines,
    PrefixedJson,
    comet_curves,
    dllogger_row,
    golden_values,
    is_comet,
    is_golden,
    is_records,
    is_tensorboard,
    is_trainer_state,
    mlperf_row,
    records,
    tensorboard_scalars,
    trainer_history,
)
from binade.collector.imports.readers.kind import Confidence, Kind, Start
from binade.collector.imports.readers.lines import Lines, NoLosses, PrintedLines
from binade.collector.imports.readers.series import UNKNOWN_UNIT, Repeats, Window
from binade.collector.imports.readers.tables import (
    LIGHTNING_LOSSES,
    Bare,
    Chart,
    Csv,
    Parquet,
    Spaced,
    Sqlite,
    is_lightning,
    is_tensorboard_csv,
    mlflow_metric,
    mlflow_row,
    pairs,
    trackio_row,
)

BITS = "fairseq logs bits, to base 2"

# The surest kind reads a file; of several, the first one.
READERS: tuple[Kind, ...] = (
    JsonDocument(
        kind="trainer_state.json of Hugging Face",
        example="checkpoint-100/trainer_state.json",
        columns="`step` and `loss` of `log_history`",
        steps=("step",), losses=("loss",), window=Window.INTERVAL, looks=is_trainer_state, values=trainer_history,
    ),
    Events(
        kind="TensorBoard's event files",
        example="runs/",
        columns="the tags `train/loss`, `lm loss`, `loss_metrics/global_avg_loss` and others",
        steps=("step",), whole_folder=True,
    ),
    Csv(
        kind="CSV of a TensorBoard scalar",
        example="tb.csv",
        columns="`Wall time,Step,Value`",
        steps=("step",), losses=("value",), looks=is_tensorboard_csv,
    ),
    JsonDocument(
        kind="JSON of a TensorBoard scalar",
        example="tb.json",
        columns="`[[wall time, step, value], ...]`",
        steps=("step",), losses=("value",), looks=is_tensorboard, values=tensorboard_scalars,
    ),
    Chart(
        kind="CSV of a chart (W&B, SwanLab)",
        example="wandb_export.csv",
        columns="`Step`, one series for each `RUN - train/loss`; `__MIN`, `__MAX` and `_timestamp` are left out",
    ),
    Csv(
        kind="Lightning's metrics.csv",
        example="lightning_logs/version_0/metrics.csv",
        columns="`step`, `train_loss_step` or `train_loss`",
        steps=("step",), losses=LIGHTNING_LOSSES, window=Window.ONE, looks=is_lightning,
    ),
    JsonLines(
        kind="LLaMA-Factory's trainer_log.jsonl",
        example="trainer_log.jsonl",
        columns="`current_steps`, `loss`",
        steps=("current_steps",), losses=("loss",), window=Window.INTERVAL,
        signature=frozenset({"current_steps", "total_steps"}),
    ),
    JsonLines(
        kind="ms-swift's logging.jsonl",
        example="logging.jsonl",
        columns="`global_step/max_steps` or `iteration` as `N/M`, `loss` or `lm loss`",
        steps=("global_step/max_steps", "iteration"), losses=("loss", "lm loss"), window=Window.INTERVAL, of=True,
    ),
    JsonLines(
        kind="JSON lines (torchtune and others)",
        example="losses.jsonl",
        columns="the keys `step`, `iteration` and others; `loss`, `train/loss` and others",
    ),
    PrefixedJson(
        kind="MLPerf's log",
        example="mlperf.log",
        columns="`:::MLLOG`, `train_loss`, `step_num` or `samples_count` as the step",
        steps=MLPERF_STEPS, losses=("train_loss",), prefix=":::MLLOG ", row=mlperf_row,
    ),
    PrefixedJson(
        kind="NVIDIA's DLLogger",
        example="dllogger.json",
        columns="`DLLL`, `step` as a number or [epoch, step], `data` with `loss` or `average_loss`",
        prefix="DLLL ", row=dllogger_row,
    ),
    PrefixedJson(
        kind="fairseq's log",
        example="fairseq.log",
        columns="`train_inner`, `num_updates`, `loss`",
        steps=("num_updates",), losses=("loss",), window=Window.INTERVAL, prefix="| train_inner | ",
        unit=UNKNOWN_UNIT, not_nats=BITS,
    ),
    Lines(
        kind="fairseq's output",
        example="train.out",
        columns="`num_updates=`, `loss=`",
        step=r"\bnum_updates={N}", loss=r"[ ,](loss)=", skip=r"\bvalid on ", window=Window.INTERVAL,
        unit=UNKNOWN_UNIT, not_nats=BITS,
        line="| epoch 001:    450 / 1891 loss=11.521, nll_loss=9.881, ppl=1886.05, num_updates=10, lr=8.9e-05",
    ),
    Lines(
        kind="Megatron's output",
        example="megatron.log",
        columns="`iteration N/ M`, `lm loss:`",
        step=r"\biteration +{N} \|", loss=r"\| (lm loss):", end=r"\s*\|", losses=("lm loss",), window=Window.INTERVAL,
        line=" iteration       10/    5000 | consumed samples: 320 | lm loss: 1.152100E+01 | loss scale: 1.0 |",
    ),
    JsonDocument(
        kind="Megatron's golden_values.json",
        example="golden_values_dev.json",
        columns='`values` of `lm loss`, by step; also `{"train/loss": {"1": X, ...}}` (NeMo-RL)',
        steps=("step",), losses=("lm loss", "train/loss"), window=Window.ONE, looks=is_golden, values=golden_values,
    ),
    Spaced(
        kind="a table with spaces (torchtitan)",
        example="torchtitan_mxfp8.txt",
        columns="`# step loss grad_norm`, then a row for each step",
        window=Window.ONE,
    ),
    Lines(
        kind="torchtitan's output",
        example="torchtitan.log",
        columns="`step: N`, `loss:`",
        step=r"\bstep: +{N} ", loss=r" (loss):", skip=r"validate step:",
        line="[titan] 2026-01-01 12:00:00,1 - root - INFO - step: 10  loss: 11.5210  grad_norm:  1.4",
    ),
    Lines(
        kind="torchtune's log",
        example="log_1725000000.txt",
        columns="`Step N |`, `loss:`",
        step=r"^Step {N} \|", loss=r" (loss):",
        line="Step 10 | loss:11.521 lr:2e-05 tokens_per_second_per_gpu:1.5",
    ),
    Lines(
        kind="llm.c's main.log",
        example="main.log",
        columns="`s:N`, `trl:`, or `tel:` (validation) alone",
        step=r"^s:{N} ", loss=r" (trl|tel):", losses=("trl", "tel"),
        line="s:10 trl:11.521 lr:0.000003 norm:15.3",
    ),
    Lines(
        kind="modded-nanogpt's log",
        example="0a1b2c.txt",
        columns="`step:N/M`, `train_loss:`, or `val_loss:` (validation) alone",
        step=r"\bstep:([0-9][0-9,]*)/([0-9][0-9,]*) ", loss=r"\b(train_loss|val_loss):",
        losses=("train_loss", "val_loss"),
        line="step:10/1750 train_loss:11.521 train_time:12ms step_avg:1.25ms",
    ),
    Lines(
        kind="OLMo's output",
        example="olmo.log",
        columns="`[step=N/M,...]`, then `train/CE loss=`",
        step=r"\[step={N}[,\]]", loss=r"^\s+(train/(?:CE loss|CrossEntropyLoss))=", below=True,
        losses=("train/ce loss", "train/crossentropyloss"), window=Window.UNKNOWN,
        line="INFO [step=10/1,000,epoch=1,eta=1h]\n    train/CE loss=11.521",
    ),
    Lines(
        kind="Composer's output (llm-foundry)",
        example="composer.log",
        columns="`[batch=N/M]:`, then `Train loss/train/total:`",
        step=r"\[batch={N}\]:", loss=r"\bTrain (loss/train/total):", below=True,
        line="[batch=10/100]:\n\t Train time/batch: 9\n\t Train loss/train/total: 11.521",
    ),
    Lines(
        kind="NeMo-RL's output",
        example="nemo_rl.log",
        columns="`=== Step N/M ===`, then `Loss:`",
        step=r"=+ Step {N} =+", loss=r"^\s*[^\w\s]?\s*(Loss):", below=True,
        line="========= Step 10/100 =========\nTraining Results:\n  - Loss: 11.521",
    ),
    Lines(
        kind="xtuner's output (MMEngine)",
        example="xtuner.log",
        columns="`Iter(train) [N/M]`, `loss:`",
        step=r"(?:Iter\(train\) *\[|Epoch\(train\) *\[[0-9]+\]\[) *{N}\]", loss=r"\s(loss):", window=Window.UNKNOWN,
        line="11/15 18:22:07 - mmengine - INFO - Iter(train) [  10/1545]  lr: 4.0e-05  memory: 7529  loss: 11.5210",
    ),
    Lines(
        kind="MindFormers' output",
        example="mindformers.log",
        columns="`step:[N/M]`, `loss:`",
        step=r"\bstep:\[ *{N}\]", loss=r"[ ,](loss):",
        line="- INFO - { Epoch:[  1/  2], step:[   10/   19], loss: 11.521, per_step_time: 1752ms, loss_scale: 1.0 }",
    ),
    Lines(
        kind="Levanter's output",
        example="levanter.log",
        columns="`Progress on:train N it`, `loss=`",
        step=r"Progress on:train ([0-9.]+[kM]?)it/([0-9.]+)", loss=r"[:,](loss)=", window=Window.UNKNOWN,
        line="INFO - Progress on:train 10.0it/70.0it rate:76.8s/it remaining:1:05:15 postfix:loss=11.521",
    ),
    Lines(
        kind="OpenRLHF's output",
        example="openrlhf.log",
        columns="`Train step of epoch E: ... N/M`, `gpt_loss=` or `loss=`",
        step=r"Train step of epoch [0-9]+:.*\| *{N} \[", loss=r"[ ,\[](\w*loss)=", losses=("gpt_loss", "loss"),
        repeats=Repeats.FIRST,  # tqdm prints a step again with the loss of the next one
        line="Train step of epoch 0:  20%|##        | 10/50 [00:01<00:10,  1.0s/it, gpt_loss=11.521, loss_mean=11.6]",
    ),
    Lines(
        kind="DeepSpeed's output",
        example="deepspeed.log",
        columns="`steps: N`, `loss:`, which only pipelines log",
        step=r"\bsteps: {N} ", loss=r"\b(loss):", losses=("loss",),
        line="steps: 10 loss: 11.5210 iter time (s): 0.5 samples/sec: 64.0",
    ),
    PrintedLines(
        kind="lines with a step and a loss (NeMo, nanoGPT, nanochat, MaxText, verl, slime, prime-rl and others)",
        example="train.log",
        columns="`global_step: N`, `step N`, `iteration N/M` or `iter N`; `loss: X`, `train loss X`, "
        "`reduced_train_loss=X`",
        line="iter 10: loss 11.521, time 1099.34ms, mfu 15.34%",
    ),
    Lines(
        kind="a progress bar (tqdm)",
        example="progress.log",
        columns="`N/M [...`, `loss=`",
        step=r"\| *{N} \[", loss=r"[ ,\[]((?:train_)?loss)[=:]", window=Window.UNKNOWN, repeats=Repeats.FIRST,
        skip=r"(?i)^\s*\W*(?:val|eval|test)", confidence=Confidence.COLUMNS,
        line="Epoch 1:  20%|##        | 10/50 [00:01<00:10,  1.0s/it, loss=11.521]",
    ),
    JsonDocument(
        kind="JSON of Comet",
        example="comet.json",
        columns="`name`, `x` and `y` of each curve",
        steps=("step",), looks=is_comet, values=comet_curves,
    ),
    JsonDocument(
        kind="JSON (a list of objects, or an object of lists)",
        example="history.json",
        columns="the keys `step`, `iteration` and others; `loss`, `train/loss` and others",
        looks=is_records, values=records,
    ),
    Sqlite(
        kind="Trackio's database",
        example="project.db",
        columns="`step` and `loss` of each run",
        table="metrics", has=frozenset({"run_name", "step", "metrics"}), row=trackio_row,
        query="SELECT run_name, step, metrics FROM metrics ORDER BY id",
    ),
    Sqlite(
        kind="MLflow's database",
        example="mlflow.db",
        columns="`key`, `value` and `step` of each run",
        table="metrics", has=frozenset({"run_uuid", "key", "value", "step", "is_nan"}), row=mlflow_row,
        query="SELECT run_uuid, key, value, step, is_nan FROM metrics ORDER BY run_uuid, key, timestamp, step",
    ),
    Parquet(
        kind="Parquet (W&B history and others)",
        example="history.parquet",
        columns="`_step`, `step` and others; `loss`, `train/loss` and others",
    ),
    Csv(
        kind="CSV (W&B history and others)",
        example="history.csv",
        columns="`step`, `global_step`, `_step` and others; `loss`, `train/loss`, `lm loss` and others",
    ),
    Bare(
        kind="MLflow's store",
        example="mlruns/0/RUN/metrics/loss",
        columns="a time, the loss and the step in each line of `metrics/NAME`",
        losses=("loss", "train/loss", "train_loss", "training_loss"), steps=("step",), names=mlflow_metric,
    ),
    Bare(
        kind="a step and a loss in each line (torchtitan)",
        example="losses/llama3_cuda.txt",
        columns="two columns between spaces, if the file is named or has `loss` in its name or its folder's",
        steps=("step",), losses=("loss",), window=Window.ONE, names=pairs,
    ),
    NoLosses(
        kind="what the Trainer of Hugging Face prints",
        example="train.out",
        columns="nothing, since it has no steps: import `trainer_state.json`",
        pattern=r"\{'loss': [^{}\n]*'epoch': ",
        advice="what the Trainer of Hugging Face prints, which has losses and no steps: give trainer_state.json of its "
        "last checkpoint",
    ),
    NoLosses(
        kind="DeepSpeed's output without losses",
        example="deepspeed.log",
        columns="nothing, since it has steps alone: import the log of the training script",
        pattern=r"\[Rank [0-9]+\] step=[0-9]+, skipped=[0-9]+, lr=",
        advice="output of DeepSpeed, which has steps and learning rates but no losses: give the log of the training "
        "script",
    ),
    NoLosses(
        kind="W&B's binary log",
        example="run-abc.wandb",
        columns="nothing: export the run's history as CSV, or import the Parquet file of its history",
        magic=b":W&B",
        advice="W&B's binary log: export the history of the run as CSV from its page, or with "
        "wandb.Api().run(PATH).history().to_csv('history.csv')",
    ),
)  # fmt: skip


def reader_of(start: Start, least: Confidence) -> Kind | None:
    """The kind of a file that begins like this; None if none is as sure as `least`."""
    surest = ((reader.recognize(start), isinstance(reader, NoLosses), reader) for reader in READERS)
    confidence, _, reader = max(surest, key=lambda found: found[:2])
    return reader if confidence >= least else None


def looked_for() -> str:
    """The kinds, for a message about a file that is none of them."""
    return ", ".join(reader.kind for reader in READERS if not isinstance(reader, NoLosses))
