"""--resume: a run that was killed at any moment goes on as if it had not been, to the bit."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

from binade.collector.cli.jobs import add_line
from binade.collector.errors import ConfigError
from binade.data.compare.difference import difference
from binade.data.run.directory import (
    CHECKPOINTS,
    CRASHED,
    DONE,
    FAILED,
    RunInfo,
    list_runs,
    read_run,
    write_run_file,
)
from binade.data.run.evaluations import read_twins
from binade.data.run.json_files import write_json
from binade.data.run.losses import read_losses
from binade.data.run.verify import verify
from tests.collector.forked import run_forked

pytestmark = pytest.mark.slow
SMALL = (
    "--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "",
    "--warmup-iterations", "1", "--train-iters", "4", "--control-iter", "0", "--tensors",
    "input,weight,grad_output", "--checkpoint-every", "2",
)  # fmt: skip
# Where a process kills itself: a function, and in which call of it.
KILLS = {
    "after a checkpoint": ("binade.data.run.run_writer.RunWriter.append_loss", 4),
    "before a segment": ("binade.collector.capture.writing.write_segment", 3),
    "in a checkpoint": ("binade.collector.training.resume.write_json", 1),
    "while it is resumed": ("binade.collector.training.resume._cut", 1),
    "before its first checkpoint": ("binade.data.run.run_writer.RunWriter.append_loss", 1),
}


def run(root: Path, *arguments: str, kill: str | None = None, ranks: int = 1) -> int:
    """binade run in forks of this process: the exit status of the first rank."""

    def before() -> None:
        if kill:
            name, last = KILLS[kill]
            original = resolve_name(name)
            left = [last]

            def ending(*args: object, **options: object) -> object:
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            pytest.MonkeyPatch().setattr(name, ending)

    return run_forked(root, *arguments, ranks=ranks, before=before)


def only(root: Path) -> RunInfo:
    (found,) = list_runs(root)[0]
    return found


def losses(run: RunInfo) -> list[tuple[int, float, str]]:
    return [(record["iteration"], record["loss"], record["data_sha256"]) for record in read_losses(run.directory)]


def assert_same(whole: RunInfo, resumed: RunInfo) -> None:
    """Every loss, row and value is the same, and none is there twice."""
    assert resumed.status.state == DONE
    assert losses(resumed) == losses(whole)
    assert read_twins(resumed.directory) == read_twins(whole.directory)
    found = difference(whole, resumed)
    assert found.first(None) is None and not (found.only_a or found.only_b or found.incomplete)
    assert len(found.rows) == whole.status.tensors // int(whole.config["tp"])
    for name in ("tensors", "tensors_without_raw", "bytes", "iteration", "loss_first", "loss_last"):
        if name != "bytes":  # of a file that holds its time of capture
            assert getattr(resumed.status, name) == getattr(whole.status, name), name
    assert resumed.status.bytes == sum(path.stat().st_size for path in resumed.directory.glob("tensors/*/*"))
    assert not verify(resumed.directory.parent, (resumed.run_id,), print).damaged


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("recipe", "kills", "options"),
    [
        ("te_delayed", ("after a checkpoint", "in a checkpoint"), ("--tensors", "input")),
        (
            "nvidia_nvfp4(without=keep)",  # rounds stochastically
            ("before a segment", "while it is resumed"),
            ("--no-raw", "--control-iter", "2", "--watch", "every 2 steps"),
        ),
    ],
    ids=["delayed", "stochastic"],
)
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, recipe: str, kills: tuple[str, ...], options: tuple[str, ...]):
    line = (*SMALL, "--quantization", recipe, "--twin", "2", *options)
    assert run(tmp_path / "whole", *line) == 0
    root, arguments = tmp_path / "killed", line
    for kill in kills:
        assert run(root, *arguments, kill=kill) == -signal.SIGKILL
        found = only(root)
        assert found.status.state == CRASHED and not verify(root, (), print).damaged
        arguments = ("--resume", found.run_id)
    assert run(root, *arguments) == 0
    assert_same(only(tmp_path / "whole"), only(root))


@pytest.mark.thorough
def test_optimizer_state_that_a_recipe_rounds(tmp_path: Path):
    specs = ("exp_avg = 'mxfp8(rounding=stochastic)'", "exp_avg_sq = 'bf16'", "master_weight = 'bf16'")
    (tmp_path / "mine.toml").write_text("\n".join(("[state]", *specs)))
    line = (*SMALL, "--quantization", f"{tmp_path}/mine.toml")
    assert run(tmp_path / "whole", *line) == 0
    assert run(tmp_path / "killed", *line, kill="after a checkpoint") == -signal.SIGKILL
    assert run(tmp_path / "killed", "--resume", only(tmp_path / "killed").run_id) == 0
    assert_same(only(tmp_path / "whole"), only(tmp_path / "killed"))


@pytest.mark.thorough
def test_two_ranks(tmp_path: Path):
    """A run that failed after rank 1 had written a checkpoint and before rank 0 had."""
    line = (*SMALL, "--quantization", "te_delayed", "--no-raw", "--tp", "2")
    assert run(tmp_path / "whole", *line, ranks=2) == 0
    whole = only(tmp_path / "whole")
    directory = shutil.copytree(whole.directory, tmp_path / "failed" / whole.run_id)
    write_json(directory / "status.json", replace(whole.status, state=FAILED))
    first, last = sorted((directory / CHECKPOINTS).iterdir())
    (last / "rank00.json").unlink()
    (last / "of the first attempt").touch()
    assert run(directory.parent, "--resume", whole.run_id, ranks=2) == 0
    assert_same(whole, only(directory.parent))
    assert {path.name for path in last.iterdir()} == {path.name for path in first.iterdir()}


def test_what_cannot_be_resumed(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    def refused(*arguments: str) -> str:
        capfd.readouterr()
        status = run(tmp_path, *arguments)
        return f"{status} {capfd.readouterr().err.splitlines()[-1]}"

    line = (*SMALL, "--no-raw")
    assert run(tmp_path, *line, kill="before its first checkpoint") == -signal.SIGKILL
    name = only(tmp_path).run_id
    assert refused("--resume", name) == (
        f"1 binade: {name} has no checkpoint to resume from: it ended before the first one, or was started "
        "without --checkpoint-every"
    )
    only(tmp_path).directory.rename(tmp_path / "gone")
    for path in (tmp_path / "gone").iterdir():
        path.unlink() if path.is_file() else None
    assert run(tmp_path, *line, kill="after a checkpoint") == -signal.SIGKILL
    name = only(tmp_path).run_id
    assert "has no run 'nothing': give the name of a directory in it" in (unknown := refused("--resume", "nothing"))
    assert unknown.startswith("2 ")
    assert "was started with other options" in refused("--resume", name, "--seed", "3")
    with pytest.raises(ConfigError, match="leave out all options but --resume"):
        add_line(tmp_path, ["run", "--resume", name, "--seed", "3"])
    config = dict(read_run(tmp_path / name).config)
    write_run_file(tmp_path / name, config | {"recipe_toml": ""})
    assert refused("--resume", name).endswith("cannot be resumed: the recipe has changed since it started")
    write_run_file(tmp_path / name, config)
    (state,) = tmp_path.glob(f"{name}/checkpoints/*/rank00.pt")
    content = state.read_bytes()
    state.write_bytes(content[:1000])
    assert "rank00.pt cannot be read" in refused("--resume", name)
    state.write_bytes(content)
    assert run(tmp_path, "--resume", name, *line) == 0  # the options that it was started with
    assert refused("--resume", name) == f"1 binade: {name} is done: there is nothing to resume"
    assert read_run(tmp_path / name).status.iteration == 3
