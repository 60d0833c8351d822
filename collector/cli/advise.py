"""binade advise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.experiment_options import source_of, source_params, words_of
from binade.collector.cli.options import size
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import PARTS, RecipeError
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import Spec, SpecError
from binade.terminal import CliOption, Command, names, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.advice.advice import Advice

BY = ("site", "layer", "module", "model")  # advice.GROUPS declares these; it imports pandas, and --help does not wait
FORMATS = ("mxfp4", "nvfp4", "mxfp8")
LISTED = 8  # groups that decide


def _specs(text: str) -> tuple[str, ...]:
    try:
        return tuple(str(Spec.of(name)) for name in names(text))
    except (UnknownFormatError, SpecError) as error:
        raise click.BadParameter(str(error)) from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise click.BadParameter(f"{text!r} is not a number above 0")
    return value


def _advise(
    model: str | None,
    budget: float | None,
    memory: int | None,
    loss: float | None,
    by: str,
    parts: tuple[str, ...],
    formats: tuple[str, ...],
    most_bf16: int | None,
    output: Path | None,
    verify: int | None,
    train_iters: int,
    target: str | None,
    root: str | None,
    **given: Any,
) -> None:
    """Choose the formats that cost the least loss within a budget.

    Each group is measured in each format first, as `binade measure` does; what was measured before is used. Then the
    advised recipe is evaluated whole. MODEL is a run, a directory or GGUF file with a checkpoint, or the name of a
    model, as for `binade measure`; or a run of `binade.measure`, whose results are used as they are.
    """
    from binade.collector.advice.advice import AdviceRequest, read_advice
    from binade.collector.advice.measured import measured_advice
    from binade.data.run.store import staged_file

    limits = {"budget": budget, "memory": memory, "loss": loss}
    flags = [f"--{name}" for name, limit in limits.items() if limit is not None]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} cannot be combined: give one")
    bits = 5.5 if not flags else budget
    where = resolve_root(root)
    request = AdviceRequest(bits, loss, memory, by, formats, parts, most_bf16)
    own = _own_measurement(where, model)
    _check_output(output, formats or (() if own else FORMATS), verify, target, where)
    if own and verify is not None:
        raise ConfigError(f"--verify: {model} has no settings of a training: name a run or a model")
    config = None
    if own:
        advice = read_advice(own, request)
    else:
        request = replace(request, formats=formats or FORMATS)
        source = source_of(where, model, given)
        config = source.plan.config
        with console("advise", "pass") as shown:
            advice = measured_advice(source, request, where, say=shown.print, progress=shown.progress)
    content = _content(advice, output) if output else ""
    print_text(_described(advice))
    if output is None:
        return
    with staged_file(output) as staged:
        staged.write(content.encode())
    print_text(f"written to {output}; to train it: binade run --recipe {output}")
    if verify is not None and config is not None:
        from binade.collector.advice.verification import queue_verification, verification

        runs = verification(config, advice, str(output.resolve()), verify, train_iters)
        for job in queue_verification(where, runs, output.stem, target):
            print_text(f"job {job.id} queued: {job.title}")


def _check_output(
    output: Path | None, formats: tuple[str, ...], verify: int | None, target: str | None, root: Path
) -> None:
    """Raise ConfigError for what cannot be written or tested, before anything is measured."""
    from binade.collector.jobs.slurm import check_submits
    from binade.collector.recipes.parse import READERS
    from binade.collector.training.targets import find_target

    if output is not None and (output.suffix not in READERS or output.exists()):
        ends = " or ".join(READERS)
        wrong = "exists" if output.exists() else f"does not end in {ends}"
        raise ConfigError(f"--output {output} {wrong}: give the path to a new {ends} file")
    if verify is not None and output is None:
        raise ConfigError("--verify needs --output FILE: it trains the recipe in that file")
    if target is not None:
        if verify is None:
            raise ConfigError("--target needs --verify SEEDS: it says where these runs are trained")
        find_target(target)
        check_submits(root, Path.cwd())
    if output is not None:
        _check_writable(output, formats)


def _own_measurement(root: Path, model: str | None) -> Path | None:
    """The directory of a run of measurements, if the model is one."""
    from binade.data.run.directory import RUN_FILE, read_run
    from binade.data.run.experiment import EXPERIMENT

    directory = root / Path(model or "").name
    if not model or not (directory / RUN_FILE).exists() or read_run(directory).config.get("kind") != EXPERIMENT:
        return None
    return directory


def _content(advice: Advice, output: Path) -> str:
    """The recipe as a file. A precision file has one choice for each layer: that of the forward operands."""
    from binade.collector.recipes.files import to_toml
    from binade.collector.recipes.precision_file import write

    if output.suffix == ".toml":
        return to_toml(advice.recipe(output.stem))
    try:
        return write(advice.recipe(output.stem), forward_only=True)
    except RecipeError as error:
        raise _not_in_file(output, str(error)) from None


def _check_writable(output: Path, specs: tuple[str, ...]) -> None:
    """Raise ConfigError if one of the formats that are chosen between cannot be in the file."""
    if output.suffix != ".toml" and (wrong := [spec for spec in specs if spec not in _in_precision_file()]):
        raise _not_in_file(output, f"{wrong[0]} cannot be in a precision file")


def _in_precision_file() -> list[str]:
    """The formats that input and weight may have in a precision file."""
    from binade.collector.recipes.precision_file import precisions

    formats = (each for _, each in precisions().values())
    return [
        *dict.fromkeys(str(each.forward_a) for each in formats if each.forward_a and each.forward_a == each.forward_b)
    ]


def _not_in_file(output: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"--output {output}: {reason}; advice has one format for input and weight, where NVFP4 has two in such a "
        f"file: choose from {', '.join(_in_precision_file())} with --formats, or write a .toml file"
    )


def _described(advice: Advice) -> str:
    """The choice and what it costs whole, the frontier, the deciding groups, how it was measured, and doubts."""
    lines = [advice.sentence, "", "bits per forward value   measured loss change"]
    for row in advice.frontier.sort_values("bits").itertuples():
        name = "" if row.kind == "advised" else f"  {row.kind} {row.name}"
        lines.append(f"{row.bits:22.2f}   {row.change:+20.3g}{name}")
    high = advice.deciding.head(LISTED)
    if len(high):
        lines += ["", "groups kept wider than the narrowest format, and how much loss that saves"]
        lines += [f"    {row.group:<24} {row.format:<28} {row.saved:+.3g}" for row in high.itertuples()]
        if len(advice.deciding) > LISTED:
            lines.append(f"    and {len(advice.deciding) - LISTED} more")
    return "\n".join([*lines, *([""] if advice.doubts else []), *advice.doubts])


def _params() -> Sequence[click.Parameter]:
    limits, runs = "Choice", "Test"
    return [
        click.Argument(["model"], required=False, metavar="[MODEL]"),
        CliOption(["--budget"], type=_positive, metavar="BITS", title=limits,
               help="Average bits per value of the forward operands  [default: 5.5]"),
        CliOption(["--memory"], type=size, metavar="SIZE", title=limits,
               help="Instead of --budget: the bytes that the forward operands of a batch may take, such as 40M"),
        CliOption(["--loss"], type=_positive, metavar="X", title=limits,
               help="Instead of --budget: the fewest bits with a measured cost (divergence, else loss change) of at "
                   "most X"),
        CliOption(["--by"], type=click.Choice(BY), default="site", title=limits,
               help="Choose formats for each linear layer (site), each layer, each module in all layers, or the whole "
                   "model"),
        CliOption(["--parts"], type=words_of(tuple(PARTS)), default="linear", metavar="A,B,...", title=limits,
               help=f"{', '.join(PARTS)}; the others stay in bf16"),
        CliOption(["--formats"], type=_specs, default="", metavar="A,B,...", title=limits,
               help=f"Formats to choose from, in addition to bf16  [default: {','.join(FORMATS)}]"),
        CliOption(["--max-bf16-layers", "most_bf16"], type=click.IntRange(0), metavar="N", title=limits,
               help="At most N layers may have a product in bf16"),
        CliOption(["--output"], type=Path, metavar="FILE",
               help="Write the recipe to a new .toml file, or a .yaml file for Megatron Core"),
        CliOption(["--verify"], type=click.IntRange(1, 100), metavar="SEEDS", title=runs,
               help="Queue runs that test the recipe with this number of seeds: bf16, the best single format with "
                   "at most as many bits, and the recipe"),
        CliOption(["--train-iters"], type=click.IntRange(2), default=200, metavar="N", title=runs,
               help="Iterations of each of these runs"),
        CliOption(["--target"], metavar="NAME", title=runs,
               help="Cluster in binade.toml on which they run  [default: this machine]"),
        *source_params(),
        root_option(),
    ]  # fmt: skip


advise = Command(
    "advise",
    params=_params(),
    callback=_advise,
    cancelled="cancelled; what was measured is kept, and the same command continues",
    failed="the advice failed",
)
