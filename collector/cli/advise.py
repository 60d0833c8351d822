"""binade advise."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    from binade.collector.advice.costs import Costs
    from binade.data.catalog import Catalog
    from binade.data.filter import Filter

BY = ("site", "layer", "module", "model")  # choice.GROUPS declares these; it imports SciPy, and --help does not wait
LISTED = 8  # operands that decide


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


def _batch(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text)
    if not match:
        raise click.BadParameter(f"{text!r} is not a micro-batch: write sequences and their length, such as 8x4096")
    return int(match[1]), int(match[2])


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
    seconds: float | None,
    speedup: float | None,
    device: str | None,
    devices: Path | None,
    batch: tuple[int, int] | None,
    by: str,
    parts: tuple[str, ...],
    specs: tuple[str, ...],
    tiles: bool,
    most_bf16: int | None,
    measure: bool,
    sequences: int,
    first: int | None,
    predicted: bool,
    output: Path | None,
    verify: int | None,
    train_iters: int,
    target: str | None,
    **filters: Any,
) -> None:
    """Choose a format for every operand to minimize the predicted loss change within a budget of bits or time.

    ROOT contains runs recorded with --measures loss and some --scores  [default: $TENSOR_SAVE_DIR, else data/runs].
    Only bf16 runs are used, if there are any. The choice is among the formats that the runs were scored in.
    """
    from binade.collector.advice.advice import AdviceRequest, queue_verification, roofline_of, verification
    from binade.collector.advice.advice import advise as choose
    from binade.collector.advice.roofline import find_device
    from binade.collector.jobs.slurm import check_submits
    from binade.collector.recipes.parse import READERS
    from binade.collector.training.targets import find_target
    from binade.data.catalog import Catalog
    from binade.data.store import staged_file

    limits = {"budget": budget, "memory": memory, "loss": loss, "time": seconds, "speedup": speedup}
    given = [f"--{name}" for name, limit in limits.items() if limit is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} cannot be combined: give one")
    if device is None and any(option is not None for option in (seconds, speedup, devices, batch)):
        raise ConfigError(
            "--time, --speedup, --devices and --batch need --device: it says what times are predicted for"
        )
    chip = find_device(device, devices) if device is not None else None
    if output is not None and (output.suffix not in READERS or output.exists()):
        ends = " or ".join(READERS)
        wrong = "exists" if output.exists() else f"does not end in {ends}"
        raise ConfigError(f"--output {output} {wrong}: give the path to a new {ends} file")
    if verify is not None and output is None:
        raise ConfigError("--verify needs --output FILE: it trains the recipe in that file")
    measured = _Measured(measure, sequences, first, predicted)
    if target is not None:
        if verify is None:
            raise ConfigError("--target needs --verify SEEDS: it says where these runs are trained")
        find_target(target)
    where = resolve_root(root)
    with Catalog.open(where) as catalog:
        for reason in catalog.refused:
            fail(f"skipped: {reason}")
        known = _costs(where, catalog, filter_of(filters), parts, AdviceRequest(specs=specs, by=by), measured)
        with quiet():
            roofline = roofline_of(catalog, known, chip, batch) if chip else None
            bits = budget if memory is None else 8 * memory / known.values
            share = 1 / speedup if speedup else None
            if seconds is not None and roofline is not None:
                share = seconds / roofline.bf16
            if not given and roofline is None:
                bits = 5.5
            advice = choose(known, AdviceRequest(bits, loss, share, by, specs, tiles, most_bf16), roofline)
        content = _content(advice, output) if output else ""
        if target is not None:
            check_submits(where, Path.cwd())  # before the recipe is written
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


@dataclass(frozen=True)
class _Measured:
    """Which effects are used: measure them first, on so many sequences, for the first of the groups; or predictions
    only."""

    first: bool
    sequences: int
    groups: int | None
    predicted: bool

    def __post_init__(self) -> None:
        if self.first and self.predicted:
            raise ConfigError("--measure and --predicted contradict each other: give one")


def _costs(
    root: Path,
    catalog: Catalog,
    where: Filter | None,
    parts: tuple[str, ...],
    request: AdviceRequest,
    measured: _Measured,
) -> Costs:
    from binade.collector.advice.costs import costs
    from binade.collector.advice.measured import measured_costs

    with quiet():
        known = costs(catalog, where, parts)
    if measured.first:
        _measure(root, catalog, known, request, parts, measured)
        catalog.sync()
    with quiet():
        return known if measured.predicted else measured_costs(catalog, known, request.by)


def _measure(
    root: Path, catalog: Catalog, known: Costs, request: AdviceRequest, parts: tuple[str, ...], measured: _Measured
) -> None:
    """Measure what is chosen between, on sequences that the runs of the costs did not read."""
    from binade.collector.advice.advice import plan_of
    from binade.collector.advice.measured import by_prediction
    from binade.collector.training.measure import Measurement, measure_effects, unread

    planned = plan_of(catalog, known, "measure your own model with binade.measure(..., root=ROOT)")
    by = tuple(dict.fromkeys(("part", "part" if request.by == "model" else request.by)))
    specs, where = request.specs or tuple(known.specs), unread(planned, planned.config.sequence_length)
    groups = by_prediction(known, request.by)[: measured.groups]
    asked = Measurement(planned, specs, by, parts, measured.sequences, groups=groups, **where)
    with console("measure", "pass") as shown:
        run_id, _ = measure_effects(asked, root, say=shown.print, progress=shown.progress)
    print_text(f"measured in {run_id}\n")


def _content(advice: Advice, output: Path) -> str:
    """The recipe as a file. A precision file has one choice for each layer: that of the forward operands."""
    from binade.collector.recipes.files import to_toml
    from binade.collector.recipes.precision_file import write

    if output.suffix == ".toml":
        return to_toml(advice.recipe(output.stem))
    try:
        return write(replace(advice, chosen=advice.forward).recipe(output.stem), forward_only=True)
    except RecipeError as error:
        raise ConfigError(f"--output {output}: {error}; choose from these with --specs") from None


def _described(advice: Advice) -> str:
    """A description of the choice, the frontier, the deciding operands, and reasons for doubt."""
    times = "   ms per step   of bf16's time" if advice.roofline else ""
    lines = [advice.sentence, "", f"bits per forward value   {advice.kind:>9} loss change{times}"]
    for row in advice.frontier.sort_values("share" if advice.timed else "bits").itertuples():
        name = "" if row.kind == "advised" else f"  {row.kind} {row.name}"
        times = f"   {row.ms:11.4g}   {row.share:14.1%}" if advice.roofline else ""
        lines.append(f"{row.bits:22.2f}   {row.change:+21.3g}{times}{name}")
    high = advice.deciding.head(LISTED)
    if len(high):
        lines += ["", "operands kept wider than the narrowest format, and how much loss that saves"]
        lines += [f"    {row.place:<24} {row.spec:<28} {row.saved:+.3g}" for row in high.itertuples()]
        if len(advice.deciding) > LISTED:
            lines.append(f"    and {len(advice.deciding) - LISTED} more")
    if advice.unplaced:
        lines += ["", f"not shown, because some of their formats were not scored: {', '.join(advice.unplaced)}"]
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
               help="Instead of --budget: the fewest bits, or with --device the least time, with a predicted loss "
                   "change of at most X"),
        CliOption(["--device"], metavar="NAME", title=limits,
               help="Predict the time of a step on this device, such as H100 or B200. Without --budget, --memory or "
                   "--loss, the budget is one of time, by default halfway between bf16 and the fastest choice"),
        CliOption(["--time", "seconds"], type=_positive, metavar="SECONDS", title=limits,
               help="With --device: the predicted time of a step, forward and backward of a micro-batch"),
        CliOption(["--speedup"], type=_positive, metavar="X", title=limits,
               help="With --device: how many times as fast as bf16 a step is predicted to be"),
        CliOption(["--batch"], type=_batch, metavar="SEQUENCESxLENGTH", title=limits,
               help="With --device: the micro-batch whose time is predicted, such as 8x4096  [default: the run's]"),
        CliOption(["--devices"], type=Path, metavar="FILE", title=limits,
               help="With --device: a .toml file that describes further devices"),
        CliOption(["--by"], type=click.Choice(BY), default="site", title=limits,
               help="Choose formats for each linear layer (site), each layer, each module in all layers, or the whole "
                   "model  [default: site]"),
        CliOption(["--parts"], type=_parts, default="linear", metavar="A,B,...", title=limits,
               help=f"{', '.join(PARTS)}; the others stay in bf16  [default: linear]"),
        CliOption(["--specs"], type=_specs, default="", metavar="A,B,...", title=limits,
               help="Formats to choose from, in addition to bf16  [default: all that were scored]"),
        CliOption(["--tiles"], is_flag=True, title=limits,
               help="Round weights in tiles only, such as nvfp4(block=16x16)"),
        CliOption(["--max-bf16-layers", "most_bf16"], type=click.IntRange(0), metavar="N", title=limits,
               help="At most N layers may have a GEMM in bf16"),
        CliOption(["--measure"], is_flag=True, title=limits,
               help="Measure the change of the loss of each group in each format first, as `binade measure` does; what "
                   "was measured before is used in any case"),
        CliOption(["--sequences"], type=click.IntRange(1, 1_000_000), default=8, metavar="N", title=limits,
               help="With --measure: sequences that are evaluated  [default: 8]"),
        CliOption(["--first"], type=click.IntRange(1), metavar="N", title=limits,
               help="With --measure: measure only the N groups with the largest predicted loss change; the others stay "
                   "predicted  [default: all]"),
        CliOption(["--predicted"], is_flag=True, title=limits,
               help="Use predictions, even where effects were measured"),
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
