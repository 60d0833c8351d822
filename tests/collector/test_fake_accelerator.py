"""Rows of an accelerator that is neither a CPU nor CUDA are those of a CPU, shown on one that is not there."""

from __future__ import annotations

import re

import pytest

from tests.conftest import run_python


@pytest.mark.thorough
@pytest.mark.slow
def test_what_another_accelerator_computes_is_recorded():
    done = run_python("-m", "tests.collector.fake_accelerator", timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    recipes = re.findall(r"^(\S.*): 22 tensors$", done.stdout, re.MULTILINE)
    assert recipes == ["bf16", "mxfp8", "mxfp8(rounding=stochastic)", "nvidia_nvfp4(without=keep)", "te_delayed"]
