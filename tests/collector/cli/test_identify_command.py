"""`binade identify` and `binade conform` as a shell runs them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from binade.cli import main
from binade.quant import fake_quantize

KERNELS = """
import torch

def cast(x):
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype)

def flushed(x):
    y = cast(x)
    return torch.where(y.abs() < 2.0**-6, 0.0, y).to(x.dtype)
"""


@pytest.fixture
def tensors(tmp_path):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    torch.save(x, tmp_path / "x.pt")
    np.save(tmp_path / "q.npy", fake_quantize(x, "nvfp4").numpy())
    save_file({"q": fake_quantize(x, "nvfp4")}, tmp_path / "q.safetensors")
    torch.save({"tensor": x + 1}, tmp_path / "other.pt")
    return tmp_path


@pytest.mark.parametrize("q", ["q.npy", "q.safetensors:q"])
def test_identify_names_the_spec(tensors, capsys, q):
    assert main(["identify", str(tensors / "x.pt"), str(tensors / q)]) == 0
    assert "nvfp4 along axis 1: all 2,048 values, bit for bit" in capsys.readouterr().out


def test_identify_fails_if_no_spec_fits(tensors, capsys):
    assert main(["identify", str(tensors / "x.pt"), str(tensors / "other.pt")]) == 1
    assert "no spec reproduces the values" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("q", "part"), [("none.pt", "is not a file"), ("q.safetensors:w", "with one of q"), ("x.txt", "cannot be read")]
)
def test_identify_refuses_in_one_line(tensors, capsys, q, part):
    (tensors / "x.txt").write_text("no tensor")
    assert main(["identify", str(tensors / "x.pt"), str(tensors / q)]) == 2
    assert part in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert "weights_only" not in error


def test_conform_passes_and_fails(tmp_path, capsys):
    """torch's cast keeps NaN; ours too. Infinity saturates in both."""
    (kernels := tmp_path / "kernels_of_a_test.py").write_text(KERNELS)
    spec = ["--spec", "fp8_e4m3(scale=none)"]
    assert main(["conform", f"{kernels}:cast", *spec]) == 0
    assert "failed" not in capsys.readouterr().out
    report = tmp_path / "report.xml"
    assert main(["conform", f"{kernels}:flushed", *spec, "--junit", str(report)]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert ElementTree.parse(report).findall(".//failure")


def test_conform_finds_a_module_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_a_module.py").write_text(KERNELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    assert main(["conform", "kernels_of_a_module:cast", "--spec", "fp8_e4m3(scale=none)"]) == 0


@pytest.mark.parametrize(
    ("kernel", "spec", "part"),
    [
        ("kernel", "mxfp4", "module:function"),
        ("none.py:f", "mxfp4", "is not a file"),
        ("no_such_module:f", "mxfp4", "cannot be imported"),
        ("math:sqrt2", "mxfp4", "has no function"),
        ("math:sqrt", "mxfp5", "unknown format"),
        ("math:sqrt", "nvfp4(scale=eden)", "cannot be tested"),
    ],
)
def test_conform_refuses_in_one_line(capsys, kernel, spec, part):
    assert main(["conform", kernel, "--spec", spec]) == 2
    assert part in (error := capsys.readouterr().err) and error.count("\n") == 1
