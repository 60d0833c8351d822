"""Dumps of log-probabilities, laid out as the sources write them, and the table of `binade parity`."""

from __future__ import annotations

import csv
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from binade.collector.imports.rollouts import read_rollouts
from binade.data.compare.parity import Policies
from binade.data.run.directory import list_runs
from binade.data.run.parity_results import read_parity
from tests.collector.cli.test_cli import one_line

ROLLOUT = [[0.0, -0.5, -1.5, -0.25], [0.0, -2.0, -1.0, -0.125], [0.0, -3.0, -0.75, -0.5]]
TRAINING = [[0.0, -0.625, -1.25, -0.25], [0.0, -2.5, -1.0, -0.25], [0.0, -2.0, -0.5, -0.5]]
MASK = [[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]]


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def nemo(folder: Path, whole: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Path:
    """`Logger.log_batched_dict_as_jsonl` of NeMo-RL: batches of one, so each value is in a list of one. The first token
    has no log-probability, whatever is there."""
    records = [
        {
            "content": ["text"],
            "rewards": [1.0],
            "input_lengths": [4],
            "token_ids": [[5, 6, 7, 8]],
            "token_loss_mask": [[1, *mask[1:]]],
            "sample_loss_mask": [kept],
            "generation_logprobs": [[9.0, *rollout[1:]]],
            "prev_logprobs": [training],
            "idx": at,
        }
        for at, (rollout, training, mask, kept) in enumerate(zip(ROLLOUT, TRAINING, MASK, whole, strict=True))
    ]
    return lines(folder / "train_data_step12.jsonl", records)


def prime(folder: Path, **more: Any) -> Path:
    """`TokenExporter` of prime-rl: null where a value is not finite, and for weights that are the default."""
    records = [
        {
            "schema_version": 1,
            "step": 12,
            "rank": 0,
            "token_ids": [5, 6, 7, 8],
            "loss_mask": [bool(each) for each in mask],
            "inference_logprobs": [None, *rollout[1:]],
            "trainer_logprobs": training,
            "rl_weights": [None] * 4,
            "ref_kl_weights": [None] * 4,
        }
        | more
        for rollout, training, mask in zip(ROLLOUT, TRAINING, MASK, strict=True)
    ]
    return lines(folder / "token_exports" / "step_12" / "rank_0.jsonl", records)


def slime(folder: Path) -> Path:
    """`_build_dump_payload` of slime, format version 2: only tokens of the response; lists or tensors."""
    samples = [
        {
            "data_parallel_rank": 0,
            "sample_index": at,
            "response_lengths": 3,
            "loss_masks": torch.tensor(mask[1:]),
            "log_probs": torch.tensor(training[1:]),
            "rollout_log_probs": rollout[1:],
        }
        for at, (rollout, training, mask) in enumerate(zip(ROLLOUT, TRAINING, MASK, strict=True))
    ]
    content = {"format_version": 2, "rollout_id": 12, "rank": 0, "samples": samples, "dp_shards": [{"rank": 0}]}
    torch.save(content, folder / "12.pt")
    return folder / "12.pt"


def miles(folder: Path) -> Path:
    """`save_debug_train_data_for_rank` of miles: a list per key."""
    columns = {
        "log_probs": [torch.tensor(each[1:]) for each in TRAINING],
        "rollout_log_probs": [torch.tensor(each[1:]) for each in ROLLOUT],
        "loss_masks": [torch.tensor(each[1:]) for each in MASK],
        "response_lengths": [3, 3, 3],
    }
    torch.save({"rollout_id": 12, "rank": 0, "rollout_data": columns, "cp_rank": 0, "cp_size": 1}, folder / "12_0.pt")
    return folder / "12_0.pt"


DUMPS = {"NeMo-RL": nemo, "prime-rl": prime, "slime": slime, "miles": miles}


@pytest.mark.parametrize("tool", DUMPS)
def test_each_tool_gives_the_same_tokens(tool: str, tmp_path: Path):
    (found,) = read_rollouts([DUMPS[tool](tmp_path)])
    expected = Policies.of(ROLLOUT, TRAINING, MASK, np.arange(3)[:, None].repeat(4, 1))
    assert (found.tool, found.step, found.policies.left_out) == (tool, "12", 0)
    for name in ("rollout", "training", "sequence"):
        assert (getattr(found.policies, name) == getattr(expected, name)).all()


def test_a_sample_that_nemo_rl_masks_does_not_count(tmp_path: Path):
    (found,) = read_rollouts([nemo(tmp_path, (1.0, 0.0, 1.0))])
    assert list(found.policies.lengths) == [3, 1]


@pytest.mark.parametrize(("ref", "count"), [([None] * 4, 2), ([0.0, 0.0, 0.0, 0.5], 4)])
def test_tokens_that_prime_rl_did_not_sample_do_not_count(ref, count, tmp_path: Path):
    """trainer/rl/train.py: of the mask, those with a weight of rl or ref_kl."""
    (found,) = read_rollouts([prime(tmp_path, rl_weights=[1.0, 1.0, 0.0, 0.0], ref_kl_weights=ref)])
    assert len(found.policies.rollout) == count


def test_a_value_that_is_not_finite_is_left_out_and_counted(tmp_path: Path):
    (found,) = read_rollouts([prime(tmp_path, trainer_logprobs=[0.0, None, -1.0, -0.5])])
    assert (len(found.policies.rollout), found.policies.left_out) == (4, 2)


def test_files_of_one_step_are_joined(tmp_path: Path):
    """The ranks of prime-rl; sequences of different files are different sequences."""
    (found,) = read_rollouts([prime(tmp_path / "a"), prime(tmp_path / "b")])
    assert found.policies.sequences == 6


def test_the_table_by_step_in_each_format(command, tmp_path: Path, capsys):
    first, second = str(nemo(tmp_path)), str(nemo(tmp_path / "b").rename(tmp_path / "train_data_step13.jsonl"))
    assert command("parity", first, second) == 0
    text = capsys.readouterr().out
    assert "NeMo-RL: 2 steps, 6 sequences, 12 tokens" in text and "By step" in text
    d = [t - r for rs, ts, ms in zip(ROLLOUT, TRAINING, MASK, strict=True)
         for r, t, m in zip(rs, ts, ms, strict=True) if m]  # fmt: skip
    (row,) = [line.split() for line in text.splitlines() if line.startswith("|Δ log-probability| (nats)")]
    assert float(row[-4]) == pytest.approx(np.mean(np.abs(d)), rel=5e-3)
    assert command("parity", first, second, "--format", "markdown") == 0
    table = capsys.readouterr().out
    assert table.startswith("### NeMo-RL") and r"\|Δ log-probability\| (nats)" in table
    assert command("parity", first, second, "--format", "csv", "--output", str(tmp_path / "parity.csv")) == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "parity.csv").read_bytes().decode())))
    assert {each["step"] for each in rows} == {"all", "12", "13"}
    assert "parity.csv" in capsys.readouterr().out
    by_name = {each["quantity"]: each for each in rows if each["step"] == "13"}
    assert float(by_name["k3"]["over_tokens"]) == pytest.approx(np.mean(np.expm1(d) - d))


class Harm:
    def __reduce__(self):
        return print, ("run",)


def harm(folder: Path) -> Path:
    (folder / "train.pt").write_bytes(pickle.dumps({"samples": [Harm()]}))
    return folder / "train.pt"


def torch_harm(folder: Path) -> Path:
    torch.save({"samples": [Harm()]}, folder / "train.pt")
    return folder / "train.pt"


def rollout_only(folder: Path) -> Path:
    """slime's --save-debug-rollout-data."""
    torch.save({"rollout_id": 1, "samples": [{"rollout_log_probs": [-1.0], "tokens": [1, 2]}]}, folder / "1.pt")
    return folder / "1.pt"


def text(name: str, content: str):
    def write(folder: Path) -> Path:
        (folder / name).write_text(content)
        return folder / name

    return write


WRONG = {
    "verl": (text("1.jsonl", '{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}\n'), "verl"),
    "pickle": (harm, "train.pt cannot be read"),
    "torch_pickle": (torch_harm, "which could run code"),
    "rollout_only": (rollout_only, "--save-debug-train-data"),
    "empty": (text("1.jsonl", "\n"), "contains no sequence"),
    "other": (text("1.jsonl", '{"loss": 1.0}\n'), "line 1"),
    "cut": (lambda folder: cut(nemo(folder)), "line 3"),
    "text": (lambda folder: prime(folder, trainer_logprobs=["-1"] * 4), "trainer_logprobs is not a list of numbers"),
    "lengths": (lambda folder: prime(folder, trainer_logprobs=[-1.0] * 3), "4 rollout log-probabilities, 3"),
    "version": (lambda folder: prime(folder, schema_version=2), "schema_version is 2"),
    "probabilities": (lambda folder: prime(folder, trainer_logprobs=[0.5] * 4), "log-probability is 0.5"),
    "missing": (lambda folder: folder / "none.jsonl", "none.jsonl"),
}


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-20])
    return path


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_one_line(name: str, command, tmp_path: Path, capsys):
    write, named = WRONG[name]
    target = tmp_path / "parity.csv"
    assert command("parity", str(write(tmp_path)), "--output", str(target)) == 2
    out, err = capsys.readouterr()
    assert one_line(err) and named in err and not out and not target.exists()


def test_saved_dumps_are_a_run(command, tmp_path: Path, capsys):
    first = nemo(tmp_path / "a")
    second = first.with_name("train_data_step13.jsonl")
    second.write_bytes(first.read_bytes())
    assert command("parity", str(first), str(second), "--save") == 0
    (run,), _ = list_runs(tmp_path / "runs")
    assert run.run_id in capsys.readouterr().out
    found = read_parity(run.directory)
    assert (found.tool, [step.name for step in found.steps]) == ("NeMo-RL", ["all", "12", "13"])
    d = np.concatenate([np.subtract(t, r)[np.array(m) > 0] for r, t, m in zip(ROLLOUT, TRAINING, MASK, strict=True)])
    values = {value.measure.name: value.over_tokens for value in found.steps[1].values}
    assert (values["k1"], values["k2"]) == pytest.approx((-d.mean(), (d**2 / 2).mean()))
    assert np.mean(found.gaps[0].changes) == pytest.approx(
        np.mean(
            [np.abs(np.subtract(t, r)[np.array(m) > 0]).mean() for r, t, m in zip(ROLLOUT, TRAINING, MASK, strict=True)]
        )
    )
    assert command("parity", str(first), str(second), "--save", "--format", "csv") == 0
    assert len(list_runs(tmp_path / "runs")[0]) == 1 and run.run_id not in capsys.readouterr().out
    assert command("parity", str(first)) == 0 and len(list_runs(tmp_path / "runs")[0]) == 1
