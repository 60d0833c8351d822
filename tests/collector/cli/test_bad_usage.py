"""What does not exist is bad usage: status 2 and one line, from every command."""

from __future__ import annotations

import pytest
import torch

ROOT = "{tmp}/nowhere does not exist: give a directory of runs"
TO_CSV = ("--to", "csv", "--output", "{tmp}/out")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "{tmp}/nowhere"), ROOT),
        (("compare", "{tmp}/nowhere"), ROOT),
        (("scales", "{tmp}/nowhere"), ROOT),
        (("report", "--tensor-save-dir", "{tmp}/nowhere"), ROOT),
        (("export", *TO_CSV, "--tensor-save-dir", "{tmp}/nowhere"), ROOT),
        (("bundle", "export", "mine", "--output", "{tmp}/a.zip", "--tensor-save-dir", "{tmp}/nowhere"), ROOT),
        (("bundle", "export", "mine", "--output", "{tmp}/a.zip", "--tensor-save-dir", "{tmp}"), "no session 'mine'"),
        (("bundle", "import", "{tmp}/nowhere"), "'{tmp}/nowhere' does not exist"),
        (("bundle", "import", "{tmp}"), "'{tmp}' is no file: give a bundle"),
        (("verify", "{tmp}", "nothing"), "{tmp} has no run 'nothing': give the name of a directory in it"),
        (("run", "--resume", "nothing", "--tensor-save-dir", "{tmp}"), "{tmp} has no run 'nothing'"),
        (("identify", "{tmp}/x.pt", "{tmp}/x.pt", "--tensor-scale", "nan"), "'nan' is not a finite number"),
        (("diff", "a", "b", "--tolerance", "inf"), "'inf' is not a finite number"),
        (("export",), "missing option '--to'. Choose from: tensorboard, wandb, csv"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else "",
)
def test_what_does_not_exist_is_bad_usage(command, capsys, tmp_path, arguments, message):
    torch.save(torch.ones(8, 32), tmp_path / "x.pt")
    assert command(*(word.format(tmp=tmp_path) for word in arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("binade: ") and err.count("\n") == 1 and err[:-1].isprintable(), err
    assert message.format(tmp=tmp_path) in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
