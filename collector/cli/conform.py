"""binade conform."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from binade.terminal import FAILED, CliOption, Command, names, print_text


def _conform(kernel: str, spec: str, dim: int, device: str, seed: int, skip: str | None, junit: Path | None) -> int:
    """Test whether a quantizer computes a spec.

    KERNEL is module:function or file.py:function. It is imported and run with your rights: name only code that you
    trust. The function takes a tensor and returns it quantized and dequantized, of the same shape, dtype and device; a
    parameter named `seed` gets a seed. A module is looked for in the current directory, too.

    The inputs are every code and the midpoints between codes, ±1 ulp, at several scales; subnormals, huge values, -0,
    NaN, Inf, absmax beside powers of two, blocks of zeros, short blocks, odd shapes and strides. With stochastic
    rounding, bias, step and independence of the draws are tested, too.

    Exit status: 0 if all cases pass, else 1.
    """
    import torch

    from binade.quant.conformance.check import conform
    from binade.quant.specs import Spec

    parsed = Spec.of(spec)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(f"--device {device}: torch sees no CUDA device")
    function = load_function(kernel)
    result = conform(function, parsed, dim, seed=seed, device=device, skip=names(skip or ""))
    print_text(str(result))
    if junit is not None:
        junit.write_text(result.to_junit(), encoding="utf-8")
    return 0 if result.passed else FAILED


def load_function(kernel: str) -> Callable[..., Any]:
    """The function that module:function or file.py:function names. Raises UsageError."""
    place, colon, name = kernel.rpartition(":")
    if not colon or not place or not name:
        raise click.UsageError(f"{kernel!r} names no function: expected module:function or file.py:function")
    try:
        if place.endswith(".py"):
            path = Path(place)
            if not path.is_file():
                raise click.UsageError(f"{place} is not a file")
            spec = importlib.util.spec_from_file_location(f"binade_kernel_{path.stem}", path)
            assert spec and spec.loader
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses look for it; a file torch.py does not become torch
            sys.path.append(str(path.resolve().parent))
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(place)
    except click.UsageError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        message = (str(error) or type(error).__name__).partition("\n")[0]
        raise click.UsageError(f"{place} cannot be imported: {type(error).__name__}: {message}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise click.UsageError(f"{place} has no function {name!r}")
    if inspect.isclass(function):
        raise click.UsageError(f"{kernel} is a class: name a function, or an instance of the class")
    return function


conform = Command(
    "conform",
    params=[
        click.Argument(["kernel"], metavar="KERNEL"),
        CliOption(["--spec"], required=True, metavar="SPEC", help="What it should compute, such as mxfp8(scale=rceil)"),
        CliOption(["--dim"], type=click.Choice((-1, 0)), default=-1,
               help="The axis that blocks lie along: -1, the last, or 0, the first"),
        CliOption(["--device"], default="cpu", metavar="NAME", help="Where the inputs are"),
        CliOption(["--seed"], type=click.IntRange(min=0), default=0, metavar="N",
               help="Of inputs and draws"),
        CliOption(["--skip"], metavar="CASES",
               help="Cases to leave out, separated by commas: those on which the kernel differs on purpose"),
        CliOption(["--junit"], type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
               help="Write the cases as JUnit XML"),
    ],
    callback=_conform,
    failed="the report cannot be written",
)  # fmt: skip
