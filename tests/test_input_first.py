"""Bad input is reported before anything that the machine lacks: every command, with each of its options, gives the same
one line where no program and no optional package is installed as where all are."""

from __future__ import annotations

import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import click
import pytest
from click.types import FuncParamType

from binade.cli import HIDDEN, build
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

# What Binade may start, or say that it needs.
PROGRAMS = (
    *("apptainer", "apt-get", "c++", "chromium", "clang++", "g++", "git", "ip", "make", "nginx", "nvidia-smi", "sacct"),
    *("sbatch", "scancel", "sinfo", "squeue", "srun", "torchrun"),
)
WRONG = "no such value?"
# What the command line of a job, which click does not read, may be.
LINES = {"binade jobs add": ["run", "--launcher", "slurm"]}
Outcome = tuple[int, str, str]


def leaves(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """All commands, hidden ones and groups included."""
    hidden = HIDDEN if path == "binade" else ()
    for name in (*group.list_commands(context := click.Context(group)), *hidden):
        command = group.get_command(context, name)
        assert command
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from leaves(command, f"{path} {name}")


COMMANDS = dict(leaves(build(), "binade"))


def extras() -> set[str]:
    """The modules of the packages that pyproject.toml does not require: the extras, and triton."""
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        line.partition(">")[0].lower() for name in ("hf", "login", "tensorboard", "wandb") for line in declared[name]
    }
    named |= {"triton"}
    return {module for module, names in packages_distributions().items() if named & {name.lower() for name in names}}


def allowed(param: click.Parameter) -> list[str]:
    """The values that the shell offers: all that are allowed, where these are few."""
    offered = [
        item.value for item in param.shell_complete(click.Context(click.Command("x")), "") if item.type == "plain"
    ]
    return [value for value in offered if value]


def plausible(param: click.Parameter, path: str) -> list[str]:
    """The words of a required parameter."""
    value = LINES.get(path) if param.nargs == -1 and path in LINES else None
    if value is None:
        value = [next(iter(allowed(param)), "1" if param.type in (click.INT, click.FLOAT) else "given")]
    return value if isinstance(param, click.Argument) else [param.opts[0], *value]


def lines(path: str, command: click.Command) -> Iterator[list[str]]:
    """Command lines that cannot work, where the root is a file."""
    words = path.split()[1:]
    required = [plausible(param, path) for param in command.params if param.required]
    whole = [*words, *itertools.chain(*required)]
    takes_root = any(param.name == "root" for param in command.params)
    for left_out in range(len(required)):
        yield [*words, *itertools.chain(*(required[:left_out] + required[left_out + 1 :]))]
    yield [*words, "--no-such-option", *whole[len(words) :]]
    for param in command.params:
        if not isinstance(param, click.Option):
            if isinstance(param.type, click.Choice):
                yield [*words, WRONG]
            continue
        flag = max(param.opts, key=len)
        values = ("given", "given/below") if param.name == "root" else (WRONG, "", *allowed(param))
        option = [[flag]] if param.is_flag else [[flag, value] for value in values]
        if takes_root:
            yield from ([*words, *each, *whole[len(words) :]] for each in option)
    if takes_root:
        yield whole


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory in which TENSOR_SAVE_DIR is a file, and `given` another."""
    (place := tmp_path / "place").mkdir()
    for name in ("runs", "given"):
        (place / name).write_text("mine")
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(place / "runs"))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "BINADE_CONFIG", "BINADE_READ_ONLY"):
        monkeypatch.delenv(name, raising=False)
    return place


@pytest.fixture
def outcomes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str]], list[Outcome]]:
    """What a command line does on a bare machine, and on one with all programs, each of which leaves a file."""
    from binade.cli import main

    bare, full = tmp_path / "bare", tmp_path / "full"
    for folder in (bare, full):
        folder.mkdir()
    for name in PROGRAMS:
        (full / name).write_text(f"#!/bin/sh\necho >{place}/started; echo 7\n")
        (full / name).chmod(0o755)
    absent = extras()
    assert {"gguf", "tensorboard", "transformers", "triton", "wandb"} <= absent

    def run(words: list[str], path: Path, missing: set[str]) -> Outcome:
        with monkeypatch.context() as machine:
            machine.setenv("PATH", str(path))
            for module in missing:
                machine.setitem(sys.modules, module, None)
            try:
                status = main(words)
            except SystemExit as end:
                status = end.code
        out, err = capsys.readouterr()
        return status, out, err

    return lambda words: [run(words, bare, absent), run(words, full, set())]


def paths(path: str, command: click.Command) -> Iterator[list[str]]:
    """Command lines that name a file where a new one or a folder is expected, for each choice of the other options."""
    required = [param for param in command.params if param.required]
    for param in command.params:
        if isinstance(param, click.Option) and isinstance(param.type, FuncParamType) and param.type.func is Path:
            others = [plausible(each, path) for each in required if each is not param]
            variants = [[each.opts[0], value] for each in required if each is not param for value in allowed(each)]
            for variant in variants or [[]]:
                words = [*itertools.chain(*(each for each in others if each[:1] != variant[:1])), *variant]
                yield [*path.split()[1:], *words, param.opts[0], "given"]


def check(words: list[str], bare: Outcome, full: Outcome) -> None:
    status, out, err = bare
    assert status in (1, 2) and out == "", (words, bare)
    assert err.startswith("binade: ") and err.endswith("\n") and err[:-1].isprintable(), (words, err)
    assert bare == full, words


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", COMMANDS)
def test_bad_input_comes_before_what_the_machine_lacks(path: str, outcomes, place: Path, tmp_path: Path):
    tried = 0
    for words in lines(path, COMMANDS[path]):
        check(words, *outcomes(words))
        tried += 1
    assert tried
    assert sorted(os.listdir(place)) == ["given", "runs"] and not (tmp_path / "home").exists()
    assert (place / "given").read_text() == (place / "runs").read_text() == "mine"


@pytest.mark.parametrize("path", [path for path in COMMANDS if list(paths(path, COMMANDS[path]))])
def test_a_path_that_is_taken(path: str, outcomes, place: Path, monkeypatch):
    """On a root without runs."""
    (place / "empty").mkdir()
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(place / "empty"))
    for words in paths(path, COMMANDS[path]):
        check(words, *outcomes(words))
    assert sorted(os.listdir(place)) == ["empty", "given", "runs"] and (place / "given").read_text() == "mine"
