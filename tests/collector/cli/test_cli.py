"""The command line: what it refuses, how it says so, and what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import termios

import click
import pytest

from binade.collector.cli.megatron_fork import resolve
from binade.collector.cli.options import parse
from binade.collector.datasets.inputs import DATASETS
from binade.collector.models.registry import MODELS
from binade.collector.recipes.recipe import OPERANDS, TEN_RECIPES
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.run.directory import list_runs
from binade.data.run.losses import read_losses
from binade.data.run.run_writer import RunWriter
from binade.data.run.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS
from tests.conftest import PROJECT, ended, run_collector, start_python

RUN = ("run", "--backend", "torch", "--training-config", "fast")
WRONG = {
    "no command": (),
    "unknown command": ("walk",),
    "unknown option": ("run", "--fast"),
    "option of two lines": ("run", "--fo\no\x1b[31m"),
    "model": (*RUN, "--model", "llama99"),
    "model of two lines": (*RUN, "--model", "a\nb"),
    "size": (*RUN, "--size", "huge"),
    "dataset": (*RUN, "--dataset", "wikipdia"),
    "dataset with escapes": (*RUN, "--dataset", "\x1b[31mred\n.jsonl"),
    "missing file": (*RUN, "--dataset", "/nowhere/x.jsonl"),
    "dataset that is not Unicode": (*RUN, "--dataset", "/nowhere/\udcff.jsonl"),
    "root that is not Unicode": (*RUN, "--tensor-save-dir", "/nowhere/\udcff"),
    "missing archive": (*RUN, "--dataset", "/nowhere/x.jsonl.gz"),
    "directory as dataset": (*RUN, "--dataset", "/tmp/.jsonl"),
    "recipe": (*RUN, "--quantization", "mxfp9"),
    "recipe of quick": ("quick", "FA_"),
    "quick without recipe": ("quick",),
    "one recipe of a batch": ("batch", "--quantization", "bf16,nope"),
    "no recipe of a batch": ("batch", "--quantization", ","),
    "linear format": (*RUN, "--linear-quant", "fp3"),
    "QK format": (*RUN, "--qk-quant", "FA_mxfp8"),
    "PV format": (*RUN, "--pv-quant", "x"),
    "score format": (*RUN, "--scores", "mxfp8,fp3"),
    "tensor": (*RUN, "--tensors", "query,weights"),
    "device": (*RUN, "--device", "tpu"),
    "backend": (*RUN, "--backend", "numpy"),
    "no ranks": (*RUN, "--tp", "0"),
    "more recorded than there are": (*RUN, "--micro-batches", "1", "--collect-micro-batches", "2"),
    "training config": ("run", "--training-config", "slow"),
    **{f"{part} format": (*RUN, f"--{part}-quant", "fp3") for part in ("router", "forward", "dgrad", "wgrad")},
    "empty format": (*RUN, "--dgrad-quant", ""),
    "router of a model without one": (*RUN, "--router-quant", "mxfp8"),
    "router's operand in a model without one": (*RUN, "--operand-quant", "router.forward.input=mxfp8"),
    "operand": (*RUN, "--operand-quant", "linear.dgrad.grad=mxfp8"),
    "operand without a format": (*RUN, "--operand-quant", "linear.dgrad.grad_output"),
    "operand of two formats": (
        *(*RUN, "--operand-quant", "qk.forward.key=mxfp8", "--operand-quant", "qk.forward.key=mxfp4"),
    ),
    "several recipes of a run": (*RUN, "--quantization", "mxfp8,mxfp4"),
    "layer to skip": (*RUN, "--skip-layers", "3"),
    "layers to skip of two lines": (*RUN, "--skip-layers", "first,a\nb"),
    "bad pattern to skip": (*RUN, "--skip-layers", "first,layer("),
    "no layer to skip": (*RUN, "--skip-layers", ","),
    "layer to record": (*RUN, "--capture-layers", "router"),
    "bad pattern to record": (*RUN, "--capture-layers", "*"),
    "module": (*RUN, "--modules", "qkv,fc3"),
    "module of another model": (*RUN, "--modules", "kv_up"),
    "no such module in these layers": (
        *(*RUN, "--model", "deepseek2_lite", "--capture-layers", "first", "--modules", "router"),
    ),
    "tensors that the modules do not have": (*RUN, "--modules", "fc1,fc2", "--tensors", "query,key"),
    "rank beyond the last": (*RUN, "--ranks", "0,1"),
    "negative rank": (*RUN, "--ranks", "-1"),
    "rank that is no number": (*RUN, "--ranks", "all"),
    "every iteration of how many": (*RUN, "--control-iter", "0"),
    "fewer trained than recorded": (*RUN, "--control-iter", "3", "--train-iters", "2"),
    "one trained too few": (*RUN, "--control-iter", "3", "--capture-every", "2", "--train-iters", "4"),
    "shortened option": (*RUN, "--quantiz", "mxfp8"),
    "shortened option of the old spelling": ("--mod", "batch"),
    "shortened command": ("runs",),
    "two modes": ("--mode", "batch", "--mode", "single"),
    "unknown mode": ("--mode", "serial"),
    "mode beside a command": ("run", "--mode", "batch"),
    "command beside a mode": ("--mode", "batch", "run"),
    "options without a command": ("--quant-type", "mxfp8"),
    "two spellings": (*RUN, "--quantization", "mxfp8", "--quant-type", "mxfp4"),
    "two spellings, one the default": (*RUN, "--quantization", "mxfp8", "--quant-type", "bf16"),
    "two spellings of quick": ("quick", "mxfp8", "--quant-type", "mxfp4"),
    "quick by mode without recipe": ("--mode", "quick"),
    "recording on and off": (*RUN, "--save-tensors", "--no-save-tensors"),
    "tensors of a run that records nothing": (*RUN, "--no-save-tensors", "--tensors", "query"),
    "layers of a run that records nothing": (*RUN, "--no-save-tensors", "--capture-layers", "first"),
    "NaNs of a run that records nothing": (*RUN, "--no-save-tensors", "--find-nan"),
    "bytes of a run that records nothing": (*RUN, "--no-save-tensors", "--max-bytes", "1M"),
    "bytes of values that are not kept": (*RUN, "--no-raw", "--max-bytes", "1"),
    "model of a name too long": (*RUN, "--model", "x" * 300),
    "negative learning rate": (*RUN, "--learning-rate", "-0.1"),
    "learning rate that is no number": (*RUN, "--learning-rate", "nan"),
    "infinite learning rate": (*RUN, "--learning-rate", "inf"),
    "seed beyond 64 bits": (*RUN, "--seed", "9" * 30),
    "negative seed": (*RUN, "--seed", "-1"),
    **{
        f"more than a thousand million as {option}": (*RUN, f"--{option}", "9" * 20, "--dry-run")
        for option in (
            "control-iter",
            "train-iters",
            "warmup-iterations",
            "micro-batches",
            "vocab-size",
            "dp",
            "max-bytes",
        )
    },
    "sequence beyond the model": (*RUN, "--sequence-length", "131073"),
    **{
        f"{value} as {option}": (*RUN, f"--{option}", value)
        for option, values in {
            "control-iter": ("0", "-1", "x", "1.5"),
            "train-iters": ("0", "-1", "x", "1.5", ""),
            "warmup-iterations": ("-1",),
            "micro-batches": ("0", "-3"),
            "collect-micro-batches": ("-1",),
            "capture-every": ("0", "-1"),
            "micro-batch-size": ("0", "-1"),
            "sequence-length": ("0", "-1"),
            "layers": ("0", "-1", "17", "99"),
            "max-bytes": ("-1", "-5M", "lots", "5X", "M", "", "nan", "inf", "1e999"),
        }.items()
        for value in values
    },
}


def one_line(text: str) -> bool:
    return text.startswith("binade: ") and text.endswith("\n") and text[:-1].isprintable()


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_exit_2(command, capsys, tmp_path, name):
    assert command(*WRONG[name]) == 2
    out, err = capsys.readouterr()
    assert one_line(err), err
    assert out == "" and list(tmp_path.iterdir()) == []


def test_wrong_input_in_a_process_of_its_own(tmp_path):
    done = run_collector("run", "--dataset", "wikipdia", root=tmp_path / "runs", env={})
    assert (done.returncode, done.stdout) == (2, "")
    allowed = "wikipedia, dolma, python-docs, or a path to .bin/.idx, .jsonl, .jsonl.gz or .parquet"
    assert done.stderr == f"binade: unknown dataset 'wikipdia': expected {allowed}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_bad_line_of_a_dataset_is_exit_2(command, capsys, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n{"txt": "x"}\n')
    assert command(*RUN, "--dataset", str(tmp_path / "x.jsonl")) == 2
    assert "x.jsonl, line 2: " in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("root", ["/proc/binade", "/proc/self/fd/binade"])
def test_an_unwritable_root_is_exit_1(command, capsys, root):
    assert command(*RUN, "--tensor-save-dir", root) == 1
    err = capsys.readouterr().err
    assert one_line(err) and "cannot write to" in err and "--tensor-save-dir" in err


@pytest.mark.parametrize("root", ["file", "file/below"])
@pytest.mark.parametrize("arguments", [RUN, (*RUN, "--device", "cuda"), ("jobs", "add", *RUN)], ids=" ".join)
def test_a_root_that_is_a_file_is_exit_2(command, capsys, tmp_path, root, arguments):
    (tmp_path / "file").write_text("mine")
    assert command(*arguments, "--tensor-save-dir", str(tmp_path / root)) == 2
    message = f"{tmp_path / 'file'} is a file: the root of the runs must be a directory"
    assert capsys.readouterr() == ("", f"binade: {message}\n")
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("arguments", [RUN, ("compare",), ("import", "."), ("jobs",)], ids=" ".join)
@pytest.mark.parametrize("root", ["a\udcff", "~nobody-of-that-name/runs"])
def test_a_root_that_cannot_be_written_down_is_exit_1(command, capsys, tmp_path, monkeypatch, root, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSOR_SAVE_DIR", root)
    assert command(*arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and one_line(err) and "--tensor-save-dir" in err and list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_is_exit_2(command, capsys, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert command(*RUN, "--device", "cuda") == 2
    assert "torch sees no GPU here: use --device cpu" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_beyond_the_memory_is_refused_before_it_starts(command, capsys, tmp_path):
    assert command(*RUN, "--model", "llama31-8b", "--size", "full") == 2
    error = capsys.readouterr().err
    assert one_line(error) and "llama31-8b full with 32 layers needs 134." in error and "are free on cpu: use" in error
    assert list(tmp_path.iterdir()) == []


def test_what_diverges_fails(command, capsys, tmp_path):
    small = ("--layers", "1", "--sequence-length", "32", "--no-raw", "--scores", "", "--tensors", "query")
    assert command(*RUN, *small, "--learning-rate", "1e30", "--control-iter", "3") == 1
    assert one_line(capsys.readouterr().err)
    ((run,), _) = list_runs(tmp_path / "runs")
    assert run.status.state == "failed" and "diverged" in run.status.reason and run.status.tensors > 0


def test_a_batch_goes_on_after_what_diverged(command, capsys, tmp_path):
    small = ("--layers", "1", "--sequence-length", "32", "--no-save-tensors", "--train-iters", "3")
    assert command("batch", "--quantization", "bf16,mxfp4", *small, "--learning-rate", "1e30") == 1
    _, err = capsys.readouterr()
    assert one_line(err) and "2 of 2 runs diverged: bf16 (the loss is nan at iteration 2" in err and "; mxfp4 (" in err
    (runs, _) = list_runs(tmp_path / "runs")
    assert [run.config["recipe"] for run in runs] == ["bf16", "mxfp4"]
    for run in runs:
        assert [step["loss"] is None for step in read_losses(run.directory)] == [False, False, True]
    assert command("compare", str(tmp_path / "runs")) == 0
    assert "mxfp4  diverged at iteration 2; bf16 diverged at iteration 2" in capsys.readouterr().out


def test_a_batch_says_what_it_did_not_train(command, capsys, tmp_path, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunWriter, "append_loss", full)
    small = ("--layers", "1", "--sequence-length", "32", "--no-save-tensors", "--train-iters", "2")
    assert command("batch", "--quantization", "bf16,mxfp8,mxfp4", *small) == 1
    assert "not trained: mxfp8, mxfp4" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [RUN, ("quick", "mxfp8"), ("batch",)], ids=["run", "quick", "batch"])
def test_dry_run_writes_nothing(command, capsys, tmp_path, arguments):
    assert command(*arguments, "--dry-run") == 0
    out, err = capsys.readouterr()
    assert err == "" and list(tmp_path.iterdir()) == []
    assert out.count("operand by operand") == (10 if arguments == ("batch",) else 1)
    assert str(tmp_path / "runs") in out


def formats_of(out: str) -> dict[str, str]:
    """{"linear.dgrad.weight": "mxfp8"} of a dry run's last lines."""
    lines = [line.split() for line in out.splitlines() if line.startswith("    ")]
    return {line[0]: line[-1] for line in lines}


def test_dry_run_shows_each_operand(command, capsys):
    assert command("run", "--quantization", "FA_linear_mxfp8", "--pv-quant", "mxfp4", "--dry-run") == 0
    formats = formats_of(capsys.readouterr().out)
    assert formats["linear.dgrad.grad_output"] == "mxfp8_e5m2"
    assert formats["linear.forward.input"] == formats["qk.forward.query"] == "mxfp8"
    assert formats["qk.dquery.key"] == "bf16" and formats["pv.forward.value"] == "mxfp4"
    assert len(formats) == 18


def test_dry_run_shows_what_is_more_exact(command, capsys):
    arguments = ("run", "--quantization", "linear_mxfp8", "--dry-run")
    assert command(*arguments) == 0
    before = formats_of(capsys.readouterr().out)
    assert command(*arguments, "--wgrad-quant", "bf16", "--dgrad-quant", "mxfp4", "--operand-quant",
                   "linear.dgrad.grad_output=mxfp6_e3m2, qk.forward.key=mxfp8_e4m3") == 0  # fmt: skip
    after = formats_of(capsys.readouterr().out)
    assert {name: after[name] for name in after if after[name] != before[name]} == {
        "linear.dgrad.grad_output": "mxfp6_e3m2",
        "linear.dgrad.weight": "mxfp4",
        "linear.wgrad.grad_output": "bf16",
        "linear.wgrad.input": "bf16",
        "qk.forward.key": "mxfp8",
    }


def line_of(out: str, word: str) -> str:
    (line,) = [line for line in out.splitlines() if line.startswith(word)]
    return line.removeprefix(word).strip()


def test_dry_run_shows_what_is_skipped_and_recorded(command, capsys):
    recorded = ("--control-iter", "9", "--capture-every", "3", "--modules", "core,qkv", "--capture-layers", "2-4,last",
                "--tensors", "query,input", "--collect-micro-batches", "0", "--micro-batches", "2")  # fmt: skip
    full = ("run", "--size", "full", "--quantization", "mxfp8", "--dry-run")
    assert command(*full, *recorded, "--skip-layers", r"first,last,layer3\.core") == 0
    out = capsys.readouterr().out
    assert line_of(out, "skip") == "layers 1, 16: bf16; layers 2, 4-15: as below; layer 3: core bf16, the rest as below"
    assert line_of(out, "length") == "0 warm-up iterations in bf16, then 25 with the recipe"
    assert line_of(out, "record").startswith(
        "query, input of core, qkv of layers 2-4,last, 2 of 2 micro-batches of iterations 0, 3, ..., 24; "
    )
    assert line_of(out, "record").endswith("; values kept, 4.0 GiB at most")
    for size, shown in (("1", "1 bytes"), ("1536", "1.5 KiB"), ("500M", "500.0 MiB"), ("3T", "3.0 TiB")):
        assert command(*full, "--max-bytes", size) == 0
        assert line_of(capsys.readouterr().out, "record").endswith(f"; values kept, {shown} at most")
    assert command(*full, "--no-raw") == 0
    assert line_of(capsys.readouterr().out, "record").endswith("; values not kept")
    assert command(*full, "--no-save-tensors") == 0
    assert line_of(capsys.readouterr().out, "record") == "nothing"


def test_list_shows_everything(command, capsys):
    assert command("list") == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    for name in [*FORMATS, *FORMATS.aliases, *MODELS, *DATASETS, *TEN_RECIPES, *OPERANDS, *tensor_names()]:
        assert name in words
    for module in ("qkv", "core", "fc2", "kv_down", "router", "shared_fc1"):
        assert module in words
    for fmt in FORMATS.values():
        assert f"{fmt.max:g}." in words


def test_list_shows_one_kind(command, capsys):
    assert command("list", "recipes") == 0
    out = capsys.readouterr().out
    assert "nvidia_nvfp4          NVIDIA NVFP4 pre-training (code, excerpt; partly uncertain)" in out
    assert "without=A+B" in out and "llama32-1b" not in out
    assert "    linear.dgrad    nvfp4(rounding=stochastic) × nvfp4(block=16x16)\n" in out
    assert "    linear.wgrad    fp8_e4m3(scale=float32) × rounded fp8_e4m3(scale=deepgemm)\n" in out
    assert "        mxfp8 rounds gradients to mxfp8_e5m2\n" in out
    assert command("list", "formats") == 0
    assert "gradients: mxfp8_e5m2 in recipes of this name; mxfp8 in those named mxfp8_e4m3\n" in capsys.readouterr().out
    assert command("list", "recipe") == 2 and "'recipes'" in capsys.readouterr().err


def test_a_recipe_of_ones_own(command, capsys, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("title = 'Mine'\n[linear]\nforward = 'nvfp4'\n[keep]\nlayers = 'last'\n")
    assert command("run", "--recipe", str(path), "--skip-layers", "proj", "--dry-run") == 0
    out = capsys.readouterr().out
    assert line_of(out, "recipe") == "mine: Mine" and "linear.forward.weight       input size   nvfp4" in out
    assert line_of(out, "skip") == "layer 1: proj bf16, the rest as below; layer 2: bf16"
    path.write_text("[linear]\nforward = 'nvfp5'\n")
    assert command("run", "--recipe", str(path), "--dry-run") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"recipe {path}: linear.forward.input: " in error and "nvfp5" in error


def test_a_dry_run_tells_where_a_published_recipe_is_from(command, capsys):
    assert command("run", "--recipe", "deepseek_v3", "--dry-run") == 0
    out = capsys.readouterr().out
    assert line_of(out, "source") == "arXiv 2412.19437 (excerpt)" and "uncertain From memory: " in out
    assert "linear.wgrad.input          tokens       the rounded forward operand in fp8_e4m3(scale=deepgemm)" in out


PLAIN = {
    ("--mode", "single"): ("run",),
    ("--mode=single", "--quant-type", "hifp8"): ("run", "--quantization", "hifp8"),
    ("--model", "llama31-8b", "--mode", "batch"): ("batch", "--model", "llama31-8b"),
    ("--mode", "batch", "--quant-type", "bf16,FA_mxfp8"): ("batch", "--quantization", "bf16,FA_mxfp8"),
    ("--quant-type", "mxfp8", "--mode", "quick"): ("quick", "mxfp8"),
    ("--mode", "quick", "mxfp8"): ("quick", "mxfp8"),
    ("--mode", "quick", "--mode", "quick", "--quantization", "mxfp8"): ("quick", "mxfp8"),
    ("run", "--save-tensors", "--quant-type", "mxfp4"): ("run", "--quantization", "mxfp4"),
    ("run", "--quant-type", "mxfp4", "--quantization", "mxfp4"): ("run", "--quantization", "mxfp4"),
    ("quick", "--seed", "3", "mxfp4", "--quant-type", "mxfp4"): ("quick", "mxfp4", "--seed", "3"),
}


@pytest.mark.parametrize("old", PLAIN, ids=" ".join)
def test_old_spellings_mean_the_new_ones(old):
    assert parse(resolve(old)).runs == parse(PLAIN[old]).runs


FORK = (PROJECT / "docs" / "megatron_fork.md").read_text().partition("## Visualization")[0]


@pytest.mark.parametrize(("old", "new"), re.findall(r"^\|.*?`([^`]+)` \| `binade ([^`]+)` \|$", FORK, re.MULTILINE))
def test_lines_of_the_megatron_fork_work_or_name_the_new_one(old, new):
    """Those of docs/megatron_fork.md, which are the fork's own documents' word for word."""
    said, expected = "", new.split()
    try:
        found = resolve(old.split())
    except click.UsageError as error:
        said = error.message
    assert f"binade {new}" in said if said else found == expected or parse(found) == parse(expected)


def test_help_tells_old_spellings_and_precedence(command, capsys):
    assert command("--help") == 0
    assert "--mode [single|collect|batch|quick|visualize|both] Deprecated: use the commands below" in " ".join(
        capsys.readouterr().out.split()
    )
    for name in ("run", "batch", "quick"):
        assert command(name, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "--quant-type" in text and "Old name of --quantization" in text
        assert "--save-tensors Accepted for compatibility" in text
        assert "recipe < part (linear, qk, pv, router) < GEMM (forward, dgrad, wgrad) < operand" in text


def test_explicit_sizes_win_over_fast(command, capsys):
    assert command("quick", "mxfp8", "--sequence-length", "64", "--dry-run") == 0
    assert " 64 tokens per iteration" in capsys.readouterr().out
    assert command("run", "--training-config", "fast", "--micro-batch-size", "3", "--dry-run") == 0
    assert " 384 tokens per iteration" in capsys.readouterr().out
    assert command("run", "--dry-run") == 0
    assert " 512 tokens per iteration" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1073741824", 1 << 30), ("500M", 500 << 20), ("4g", 4 << 30), ("1.5K", 1536), ("2T", 2 << 40)],
)
def test_sizes(text, size):
    assert parse(["run", "--max-bytes", text]).runs[0].max_bytes == size


def test_output_that_is_no_terminal_is_plain_lines(command, capsys, tmp_path):
    small = ("--layers", "1", "--sequence-length", "32", "--no-raw", "--scores", "")
    assert command("batch", "--quantization", "bf16,FA_mxfp4", "--backend", "torch", *small) == 0
    out, err = capsys.readouterr()
    assert err == "" and all(line.isprintable() for line in out.splitlines())
    lines = out.splitlines()
    assert lines[0] == "[1/2] bf16" and "[2/2] FA_mxfp4" in lines
    runs, _ = list_runs(tmp_path / "runs")
    assert [run.config["recipe"] for run in runs] == ["bf16", "FA_mxfp4"]
    for run in runs:
        log = (run.directory / "log.txt").read_text().splitlines()
        told = [line[9:] for line in log if not line[9:].startswith("iteration")]
        assert set(told) <= set(lines) and len(told) >= 4
    assert not any(line.startswith("iteration") for line in lines)  # of one run they are shown, of several not


@pytest.mark.thorough
@pytest.mark.slow
def test_a_terminal_without_a_character_is_shown_its_code(tmp_path):
    (tmp_path / "lög.jsonl").write_text('{"text": "' + "word " * 100 + '"}')
    small = ("--layers", "1", "--sequence-length", "32", "--no-raw", "--scores", "", "--dataset")
    environment = {"PYTHONIOENCODING": "ascii"}
    runs = tmp_path / "räume"
    done = run_collector(*RUN, *small, str(tmp_path / "lög.jsonl"), root=runs, env=environment)
    assert (done.returncode, done.stderr) == (0, "") and r"l\xf6g.jsonl" in done.stdout
    done = run_collector(*RUN, *small, str(tmp_path / "lüg.jsonl"), root=runs, env=environment)
    assert done.returncode == 2 and r"l\xfcg.jsonl does not exist" in done.stderr and one_line(done.stderr)
    done = run_collector("bundle", "export", "x", "--output", "ü.zip", root=runs, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("binade: ") and done.stderr.count("\n") == 1


SMALL_RUN = (*RUN, "--layers", "1", "--sequence-length", "32", "--no-raw", "--scores", "")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [("list",), (*RUN, "--dry-run"), ("jobs",), SMALL_RUN], ids=" ".join)
@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(tmp_path, arguments):
    read, write = os.pipe()
    os.close(read)
    done = run_collector(*arguments, root=tmp_path, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
    assert [run.status.state for run in list_runs(tmp_path)[0]] == ["done"] * (arguments is SMALL_RUN)


@pytest.mark.slow
def test_a_terminal_gets_a_progress_bar(tmp_path):
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 100))
    small = ("--layers", "1", "--sequence-length", "32", "--no-raw", "--control-iter", "2")
    done = run_collector(*RUN, *small, root=tmp_path, stderr=theirs)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0 and "2/2" in shown and "100%" in shown
    assert "iteration 0" not in done.stdout and len(done.stdout.splitlines()) == 1


def test_the_run_remembers_what_it_was_asked(command, tmp_path):
    small = ("--layers", "1", "--sequence-length", "32", "--no-raw", "--scores", "", "--tensors", "query,key")
    more = (
        "--operand-quant",
        "qk.dkey.query=bf16",
        "--skip-layers",
        "proj",
        "--modules",
        "core",
        "--capture-every",
        "2",
    )
    assert command(*RUN, *small, *more, "--dataset", "dolma", "--quantization", "hifp8", "--seed", "7") == 0
    ((run,), _) = list_runs(tmp_path / "runs")
    config = json.loads((run.directory / "run.json").read_text())
    asked = {"dataset": "dolma", "recipe": "hifp8", "seed": 7, "layers": 1, "raw": False, "tensors": ["query", "key"]}
    asked |= {"operand_quant": ["qk.dkey.query=bf16"], "skip_layers": "proj", "modules": ["core"], "train_iters": 1}
    assert {key: config[key] for key in asked} == asked
    assert "qk.dkey.query               queries      bf16" in config["operands"]
    assert config["backend"] == "torch" and config["device"].startswith("cpu") and len(config["operands"]) == 24
    assert config["command"].startswith("binade run ") and "--seed 7" in config["command"]
    assert set(config["versions"]) == {"torch", "triton", "numpy", "python"} and config["data"]["documents"] == 35


def test_the_defaults_can_be_run():
    plan(RunConfig())


@pytest.mark.parametrize(
    ("given", "iterations", "recorded"),
    [
        ({}, 1, [0]),
        ({"control_iter": 3}, 3, [0, 1, 2]),
        ({"control_iter": 3, "capture_every": 4}, 9, [0, 4, 8]),
        ({"control_iter": 3, "capture_every": 4, "train_iters": 20}, 20, [0, 4, 8]),
        ({"control_iter": 0, "capture_every": 4, "train_iters": 9}, 9, [0, 4, 8]),
        ({"control_iter": 0, "train_iters": 2}, 2, [0, 1]),
        ({"control_iter": 2, "save_tensors": False}, 2, []),
    ],
)
def test_which_iterations_are_recorded(given, iterations, recorded):
    config = RunConfig(**given)
    plan(config)
    assert config.iterations == config.to_dict()["train_iters"] == iterations
    assert [i for i in range(iterations) if config.records(i)] == recorded == list(config.recorded_iterations)


def test_an_interrupt_that_python_only_reports_comes_again():
    """Raised in a destructor, as in a callback of an import, it is lost."""
    code = """if True:
        import signal, time
        from binade.terminal import catch_signals
        class Lost:
            def __del__(self):
                signal.raise_signal(signal.SIGTERM)
        catch_signals()
        try:
            Lost()
            time.sleep(600)
        except KeyboardInterrupt:
            print("interrupted")"""
    done = ended(start_python("-c", code))
    assert (done.stdout, done.stderr) == ("interrupted\n", "")


def test_the_end_of_a_process_waits_for_threads_and_exit_handlers_but_frees_nothing():
    """As Python's own end, of which only the last step is left out: it frees what torch has made, in seconds."""
    code = """if True:
        import atexit, os, sys, threading, time
        class Freed:
            def __del__(self):
                os.write(1, b"freed, ")
        sys.modules["kept"] = Freed()
        atexit.register(os.write, 1, b"exit handler, ")
        threading.Thread(target=lambda: (time.sleep(0.1), os.write(1, b"thread, "))).start()
        sys.stdout.write("buffer")
        {}"""
    ours, pythons = "from binade.terminal import end_process; end_process(3)", "sys.exit(3)"
    done = ended(start_python("-c", code.format(ours), env={"PYTHONUNBUFFERED": ""}))
    assert (done.returncode, done.stdout, done.stderr) == (3, "thread, exit handler, buffer", "")
    python = ended(start_python("-c", code.format(pythons), env={"PYTHONUNBUFFERED": ""}))
    assert (python.returncode, python.stderr) == (3, "") and python.stdout.startswith("thread, exit handler, buffer")
    assert "freed" in python.stdout
