"""The command lines of the Megatron fork's scripts, with `binade` in place of the script: see docs/megatron_fork.md.

Other spellings are translated. A line that corresponds to two commands is refused, and the message shows both. No
torch.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import click

from binade.terminal import CliOption

MODES = {"single": "run", "collect": "run", "batch": "batch", "quick": "quick"}
TWO_COMMANDS = ("visualize", "both")
RENAMED = {"--tensor-path": "--tensor-save-dir", "--data-path": "--dataset", "--tokenizer-path": "--tokenizer"}
PARTS = ("--linear-quant", "--qk-quant", "--pv-quant")
ATTENTION = "--fa-quantization"
PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}


def mode_option() -> CliOption:
    modes = [*MODES, *TWO_COMMANDS]
    return CliOption(["--mode"], type=click.Choice(modes), multiple=True, help="Deprecated: use the commands below")


def resolve(argv: Sequence[str]) -> list[str]:
    """The command line in the form that `binade` accepts. Raises click.UsageError, with the new spelling if any."""
    first, *rest = argv or [""]
    if first == "--list":
        return ["list", *rest]
    if first in ("--check", "--restore"):
        raise click.UsageError(
            f"{first} is not needed here, since no source is changed: binade run --dry-run prints what is quantized"
        )
    if first in ("single", "collect", *TWO_COMMANDS):
        if rest and not rest[0].startswith("-"):
            rest.insert(0, "--quant-type")
        return _command(first, rest)
    if not first.startswith("--") or first in ("--help", "--version"):
        return [first, *_translated(rest)] if first in MODES.values() else list(argv)
    parser = click.Command("binade", params=[mode_option()], add_help_option=False, context_settings=PASS_ON)
    with parser.make_context("binade", list(argv)) as context:
        modes = sorted(set(context.params["mode"]))
        if len(modes) > 1:
            raise click.UsageError(f"--mode is {' and '.join(modes)}: give one", context)
        if not modes and "--help" in context.args:
            return context.args
        if not modes:
            line = shlex.join(["binade", *_command("single", context.args)])
            raise click.UsageError(f"give the command before its options: {line}", context)
        return _command(modes[0], context.args)


def _command(mode: str, words: Sequence[str]) -> list[str]:
    if mode in MODES:
        return [MODES[mode], *_translated(words)]
    folders = [click.Option(["--tensor-dir"], default="enhanced_tensor_logs"), click.Option(["--output-dir"])]
    parser = click.Command("binade", params=[*folders], add_help_option=False, context_settings=PASS_ON)
    with parser.make_context("binade", list(words)) as context:
        given = context.params
        step = ["import", given["tensor_dir"]] if mode == "visualize" else _command("single", context.args)
        report = ["report", "--output", given["output_dir"] or "draw"]
    step = ["--quantization" if word == "--quant-type" else word for word in step]
    line = " && ".join(shlex.join(["binade", *command]) for command in (step, report))
    raise click.UsageError(f"{mode} is replaced by two commands: {line}")


def _translated(words: Sequence[str]) -> list[str]:
    """The options of run, batch and quick in Binade's spelling."""
    options: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name not in (*RENAMED, *PARTS, ATTENTION) or not (equals or rest):
            options.append(word)
            continue
        value = value if equals else rest.pop(0)
        if name == ATTENTION:
            options += _of_attention(value)
        else:
            options += [RENAMED.get(name, name), "bf16" if name in PARTS and value == "none" else value]
    return options


def _of_attention(value: str) -> list[str]:
    """--fa-quantization is bf16, or qk_, pv_ or qk_pv_ before a format."""
    if value == "bf16":
        return ["--quantization", "bf16"]
    named = re.fullmatch(r"(qk|pv|qk_pv)_(.+)", value)
    if not named:
        raise click.UsageError(f"{ATTENTION} {value}: expected bf16, or qk_, pv_ or qk_pv_ before a format")
    parts = [word for part in named[1].split("_") for word in (f"--{part}-quant", named[2])]
    return ["--quantization", "bf16", *parts]
