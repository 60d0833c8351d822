"""binade advise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.options import size
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import PARTS, RecipeError
from binade.filter_options import filter_of, filter_params
from binade.quant.formats import UnknownFormatError
from binade.quant.specs import Spec, SpecError
from binade.terminal import CliOption, Command, fail, names, print_text, quiet, resolve_root

if TYPE_CHECKING:
    from binade.collector.advice.advice import Advice, AdviceRequest
    from binade.collector.advice.costs import Operands
    from binade.data.catalog import Catalog

BY = ("site", "layer", "module", "model")  # costs.GROUPS declares these; it imports pandas, and --help does not wait
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


def _parts(text: str) -> tuple[str, ...]:
    parts = names(text)
    if not parts or set(parts) - set(PARTS):
        raise click.BadParameter(f"{text!r}: expected {', '.join(PARTS)}, separated by commas")
    return parts


def _advise(
    root: str | None,
    budget: float | None,
    memory: int | None,
    loss: float | None,
    by: str,
    parts: tuple[str, ...],
    specs: tuple[str, ...],
    tiles: bool,
    most_bf16: int | None,
    measure: bool,
    sequences: int,
    output: Path | None,
    verify: int | None,
    train_iters: int,
    target: str | None,
    **filters: Any,
) -> None:
    """Choose a format for every operand to minimize the measured loss change within a budget of bits.

    ROOT contains bf16 runs recorded with some --scores, and what `binade measure` measured of their model
    [default: $TENSOR_SAVE_DIR, else data/runs]. The choice is among the formats that were measured.
    """
    from binade.collector.advice.advice import AdviceRequest, queue_verification, verification
    from binade.collector.advice.advice import advise as choose
    from binade.collector.advice.costs import costs, operands_of
    from binade.collector.jobs.slurm import check_submits
    from binade.collector.recipes.parse import READERS
    from binade.collector.training.targets import find_target
    from binade.data.catalog import Catalog
    from binade.data.store import staged_file

    limits = {"budget": budget, "memory": memory, "loss": loss}
    given = [f"--{name}" for name, limit in limits.items() if limit is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined: give one")
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
    request = AdviceRequest((budget or 5.5) if loss is None else None, loss, by, specs, tiles, most_bf16)
    where = resolve_root(root)
    if target is not None:
        check_submits(where, Path.cwd())  # before anything is measured or written
    with Catalog.open(where) as catalog:
        for reason in catalog.refused:
            fail(f"skipped: {reason}")
        with quiet():
            operands = operands_of(catalog, filter_of(filters), parts)
        if measure:
            if output is not None:
                _check_writable(output, request.specs or tuple(operands.specs))
            _measure(where, catalog, operands, request, parts, sequences)
            catalog.sync()
        with quiet():
            known = costs(catalog, operands, by)
            if memory is not None:
                request = replace(request, bits=8 * memory / known.values)
            advice = choose(known, request)
        content = _content(advice, output) if output else ""
        print_text(_described(advice))
        if output is None:
            return
        with staged_file(output) as staged:
            staged.write(content.encode())
        print_text(f"written to {output}; to train it: binade run --recipe {output}")
        if verify is not None:
            runs = verification(catalog, advice, str(output.resolve()), verify, train_iters)
            for job in queue_verification(where, runs, output.stem, target):
                print_text(f"job {job.id} queued: {job.title}")


def _measure(
    root: Path, catalog: Catalog, operands: Operands, request: AdviceRequest, parts: tuple[str, ...], sequences: int
) -> None:
    """Measure what is chosen between, on sequences that the runs of the operands did not read."""
    from binade.collector.advice.advice import plan_of
    from binade.collector.experiment.experiment import ExperimentRequest, run_experiment
    from binade.collector.experiment.source import ExperimentSource, unread

    planned = plan_of(catalog, operands, "measure your own model with binade.measure(..., root=ROOT)")
    by = tuple(dict.fromkeys(("part", "part" if request.by == "model" else request.by)))
    specs, where = request.specs or tuple(operands.specs), unread(planned, planned.config.sequence_length)
    measured = ExperimentRequest(ExperimentSource(planned, sequences, **where), specs, by, parts)
    with console("measure", "pass") as shown:
        finished = run_experiment(measured, root, say=shown.print, progress=shown.progress)
    print_text(f"measured in {finished.run_id}\n")


def _content(advice: Advice, output: Path) -> str:
    """The recipe as a file. A precision file has one choice for each layer: that of the forward operands."""
    from binade.collector.recipes.files import to_toml
    from binade.collector.recipes.precision_file import write

    if output.suffix == ".toml":
        return to_toml(advice.recipe(output.stem))
    try:
        return write(replace(advice, chosen=advice.forward).recipe(output.stem), forward_only=True)
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
        f"file: choose from {', '.join(_in_precision_file())} with --specs, or write a .toml file"
    )


def _described(advice: Advice) -> str:
    """A description of the choice, the frontier, the deciding groups, how it was measured and reasons for doubt."""
    lines = [advice.sentence, "", "bits per forward value   measured loss change"]
    for row in advice.frontier.sort_values("bits").itertuples():
        name = "" if row.kind == "advised" else f"  {row.kind} {row.name}"
        lines.append(f"{row.bits:22.2f}   {row.change:+20.3g}{name}")
    high = advice.deciding.head(LISTED)
    if len(high):
        lines += ["", "groups kept wider than the narrowest format, and how much loss that saves"]
        lines += [f"    {row.place:<24} {row.spec:<28} {row.saved:+.3g}" for row in high.itertuples()]
        if len(advice.deciding) > LISTED:
            lines.append(f"    and {len(advice.deciding) - LISTED} more")
    return "\n".join([*lines, *([""] if advice.doubts else []), *advice.doubts])


def _params() -> Sequence[click.Parameter]:
    limits, runs = "Choice", "Test"
    return [
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        CliOption(["--budget"], type=_positive, metavar="BITS", title=limits,
               help="Average bits per operand value, separately for forward and backward  [default: 5.5]"),
        CliOption(["--memory"], type=size, metavar="SIZE", title=limits,
               help="Instead of --budget: the bytes that the forward operands of a micro-batch may take, such as 40M"),
        CliOption(["--loss"], type=_positive, metavar="X", title=limits,
               help="Instead of --budget: the fewest bits with a measured cost (divergence, else loss change) of at "
                   "most X"),
        CliOption(["--by"], type=click.Choice(BY), default="site", title=limits,
               help="Choose formats for each linear layer (site), each layer, each module in all layers, or the whole "
                   "model  [default: site]"),
        CliOption(["--parts"], type=_parts, default="linear", metavar="A,B,...", title=limits,
               help=f"{', '.join(PARTS)}; the others stay in bf16  [default: linear]"),
        CliOption(["--specs"], type=_specs, default="", metavar="A,B,...", title=limits,
               help="Formats to choose from, in addition to bf16  [default: all that were measured; with --measure, "
                   "all that were scored]"),
        CliOption(["--tiles"], is_flag=True, title=limits,
               help="Round weights in tiles only, such as nvfp4(block=16x16)"),
        CliOption(["--max-bf16-layers", "most_bf16"], type=click.IntRange(0), metavar="N", title=limits,
               help="At most N layers may have a GEMM in bf16"),
        CliOption(["--measure"], is_flag=True, title=limits,
               help="Measure the change of the loss of each group in each format first, as `binade measure` does; what "
                   "was measured before is used in any case"),
        CliOption(["--sequences"], type=click.IntRange(1, 1_000_000), default=8, metavar="N", title=limits,
               help="With --measure: sequences that are evaluated  [default: 8]"),
        CliOption(["--output"], type=Path, metavar="FILE",
               help="Write the recipe to a new .toml file, or a .yaml file for Megatron Core"),
        CliOption(["--verify"], type=click.IntRange(1, 100), metavar="SEEDS", title=runs,
               help="Queue runs that test the recipe with this number of seeds: bf16, the best single format with "
                   "at most as many bits, and the recipe"),
        CliOption(["--train-iters"], type=click.IntRange(2), default=200, metavar="N", title=runs,
               help="Iterations of each of these runs  [default: 200]"),
        CliOption(["--target"], metavar="NAME", title=runs,
               help="Cluster in binade.toml on which they run  [default: this machine]"),
        *filter_params(),
    ]  # fmt: skip


advise = Command(
    "advise",
    params=_params(),
    callback=_advise,
    cancelled="cancelled; jobs that were queued stay",
    failed="the advice cannot be written",
)
