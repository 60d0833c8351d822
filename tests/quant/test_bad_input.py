"""A wrong argument gets a TypeError or ValueError that names it and what is allowed."""

from __future__ import annotations

import pytest
import torch

from binade.quant import FORMATS, UnknownFormatError, compare, fake_quantize, quantize, summarize
from binade.quant.gemm import GemmFormats

X = torch.zeros(4, 8)


@pytest.mark.parametrize("call", [fake_quantize, quantize], ids=["fake_quantize", "quantize"])
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((X, "mxfp9"), {}, UnknownFormatError, ["'mxfp9'", "mxfp8", "nvfp4", "mxfp8_e4m3"]),
        ((X, "mxfp9"), {}, ValueError, ["mxfp9"]),
        ((X, None), {}, (TypeError, ValueError), ["None"]),
        ((X.int(), "mxfp8"), {}, TypeError, ["int32", "float32", "bfloat16", "float16"]),
        ((X.double(), "mxfp8"), {}, TypeError, ["float64", "float32"]),
        (([1.0], "mxfp8"), {}, TypeError, ["Tensor", "list"]),
        ((X, "mxfp8", 2), {}, ValueError, ["dim 2", "-2 to 1"]),
        ((X, "mxfp8", -3), {}, ValueError, ["dim -3", "-2 to 1"]),
        ((torch.tensor(1.0), "mxfp8", 1), {}, ValueError, ["dim 1", "-1 to 0"]),
        ((X, "mxfp8", 0.5), {}, TypeError, ["dim", "float"]),
        ((X, "mxfp8"), {"block": 0}, ValueError, ["block=0", "16x16"]),
        ((X, "mxfp8"), {"block": -4}, ValueError, ["block=-4"]),
        ((X, "mxfp8"), {"block": 1.5}, ValueError, ["block=1.5"]),
        ((X, "mxfp8"), {"block": True}, ValueError, ["block=True"]),
        ((X, "hifp8"), {"block": 32}, ValueError, ["block", "hifp8"]),
        ((X, "mxfp8"), {"scale": "round"}, ValueError, ["scale=round", "floor, ceil, even, rceil"]),
        ((X, "hifp8"), {"scale": "floor"}, ValueError, ["scale=floor", "hifp8", "none"]),
        ((X, "nvfp4"), {"scale": "quest"}, ValueError, ["scale=quest", "nvfp4"]),
        ((X, "mxfp8"), {"rounding": "up"}, ValueError, ["rounding=up", "nearest, half_away, stochastic"]),
        ((X, "mxfp8"), {"overflow": "wrap"}, ValueError, ["overflow=wrap", "saturate"]),
        ((X, "mxfp4"), {"overflow": "inf"}, ValueError, ["overflow=inf", "mxfp4", "saturate"]),
        ((X, "mxfp8"), {"rounding": "stochastic", "seed": 0.5}, TypeError, ["seed", "float"]),
    ],
)
def test_quantizers(call, args, kwargs, error, words):
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    for word in words:
        assert word in str(caught.value)


def test_backend():
    with pytest.raises(ValueError, match="unknown backend 'jax': expected one of auto, triton, torch"):
        fake_quantize(X, "mxfp8", backend="jax")


def test_errors_come_before_work_on_empty_tensors():
    with pytest.raises(ValueError, match="jax"):
        fake_quantize(torch.zeros(0), "mxfp8", backend="jax")


def test_formats_lookup():
    assert "mxfp8_e4m3" in FORMATS and FORMATS["mxfp8_e4m3"] is FORMATS["mxfp8"] and "x" not in FORMATS
    with pytest.raises(UnknownFormatError, match="unknown format 'x': expected one of bf16, "):
        FORMATS["x"]
    assert FORMATS.get("x") is None


def test_gemm_formats_are_checked_when_written_down():
    with pytest.raises(UnknownFormatError, match="mxfp5"):
        GemmFormats(forward_a="mxfp5")


def test_compare_and_summarize():
    with pytest.raises(ValueError, match=r"\(4, 8\).*\(8, 4\)"):
        compare(X, X.t())
    with pytest.raises(TypeError, match=r"int64.*float32, bfloat16 or float16"):
        summarize(torch.arange(3))
