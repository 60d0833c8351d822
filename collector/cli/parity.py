"""binade parity."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.experiment_options import BY, source_of, source_params, words_of
from binade.collector.cli.output import (
    NOTHING,
    TextTable,
    aligned,
    csv_text,
    markdown,
    output_options,
    print_or_write,
    wrapped,
)
from binade.collector.errors import ConfigError
from binade.collector.recipes.recipe import BF16
from binade.data.words.text import counted, markdown_text, number_text
from binade.terminal import CliOption, Command, one_line, print_text, resolve_root, root_option

if TYPE_CHECKING:
    from binade.collector.imports.rollouts import Rollouts
    from binade.data.compare.evidence import Estimate
    from binade.data.compare.parity import Policies, Row
    from binade.data.compare.routing import Routing
    from binade.data.run.effects import Measured
    from binade.data.run.parity_results import Replay

VALUES = ("over_tokens", "over_sequences", "median_of_tokens", "median_of_sequences")
DEFAULT_BY = ("part", "site")
BY_STEP = ("k3", "abs_logprob", "abs_prob", "pearson", "chi2_token", "chi2_sequence")
"""The quantities of the table by step: those that tools plot."""
LEGEND = (
    "R: rollout, T: training; d = log π_T − log π_R of each token, ρ = e^d. tokens: the mean over all tokens, as in "
    "verl and NeMo-RL; sequences: the mean within each sequence, then over sequences, as in slime and miles.",
    "KL, Jensen–Shannon and χ² are estimates for tokens that were sampled from the rollout policy. One or two tokens "
    "can set the mean of a χ²: its medians are beside it.",
)
OF_TEXT = (
    LEGEND[0],
    "The tokens are those of the text, not sampled from a policy: k1, k2, k3, Jensen–Shannon and χ² of the first table "
    "do not estimate divergences here. KL(R‖T) of the second table is exact at each token: it is computed over the "
    "whole vocabulary. Intervals are over sequences (Student's t).",
    "Changes of groups do not add up: rounding in one group changes what the next one receives.",
)


def _parity(
    what: tuple[str, ...],
    rollout: str | None,
    root: str | None,
    kind: str,
    output: Path | None,
    save: bool,
    **given: Any,
) -> None:
    """Compare log-probabilities of a rollout and a training policy.

    FILE is a dump of both policies' log-probabilities: train_data_step*.jsonl of NeMo-RL, token_exports/step_*/*.jsonl
    of prime-rl, or the torch file of --save-debug-train-data of slime or miles.

    With --rollout, MODEL scores the tokens of a text under two recipes instead. Then each group of products is
    rounded alone as for the rollout, which shows what causes the difference. MODEL is a run, a directory or GGUF file
    with a checkpoint, or the name of a model. The result is a run in the root, which the app shows; that of FILE is one
    with --save.
    """
    changed = {name: value for name, value in given.items() if value is not None}
    if rollout is not None:
        if len(what) > 1:
            raise click.UsageError(f"--rollout takes one model, not {len(what)}: give dumps, or two recipes on a model")
        _of_recipes(rollout, next(iter(what), None), changed, root, kind, output)
        return
    if changed:
        raise click.UsageError("--rollout is missing: the other options need the recipe that it names")
    if not what:
        raise click.UsageError("FILE is missing: give dumps of log-probabilities, or --rollout RECIPE")
    from binade.collector.imports.rollouts import read_rollouts

    files = [Path(name) for name in what]
    where = _writable(root) if save else None
    rollouts = read_rollouts(files)
    text = _csv(rollouts) if kind == "csv" else _document(rollouts, kind)
    print_or_write(text, output, "the table was")
    if where:
        from binade.collector.imports.rollouts import save_rollouts

        _name(save_rollouts(where, files, rollouts), kind == "csv" and output is None)


# Of two recipes


def _of_recipes(
    rollout: str, model: str | None, given: dict[str, Any], root: str | None, kind: str, output: Path | None
) -> None:
    """given: the options that have a value, without those of every command."""
    from binade.collector.experiment.experiment import ExperimentRequest, run_experiment
    from binade.data.compare.routing import LEGEND as LEGEND_OF_ROUTING
    from binade.data.compare.routing import read_routing
    from binade.data.run.parity_results import findings, read_gaps, replay, routing_findings

    train, operands, by = given.pop("train", BF16), given.pop("operands", False), given.pop("by", DEFAULT_BY)
    if rollout == train:
        raise ConfigError(f"--rollout and --train are both {rollout}: give two recipes")
    where = _writable(root)
    source = source_of(where, model, given)
    request = ExperimentRequest(source, (rollout,), by, (), train, operands)
    with console("parity", "pass") as shown:
        finished = run_experiment(request, where, progress=shown.progress)
    gaps = read_gaps(finished.directory)
    records = [gap.measured for gap in gaps]
    described = "; ".join(finished.described)
    heading = f"{source.plan.config.model_title}: rollout {rollout}, training {train}; {described}"
    if kind == "csv":
        rows = (
            {"group": gap.name} | row
            for gap, each in zip(records, gaps, strict=True)
            for row in csv_rows(each.policies)
        )
        text = csv_text(list(rows))
    else:
        tables = [_table(gaps[0].policies), _causes(records)]
        notes: list[str] = [*findings(records), *OF_TEXT]
        if routed := read_routing(finished.directory):
            tables += [_routing(routed), _replay(replay(records[0], routed))]
            notes += [*routing_findings(records[0], routed), LEGEND_OF_ROUTING]
            notes += [f"Not measured: {name} does not choose experts by torch.topk." for name in routed.left_out]
        text = document(heading, tables, notes, kind)
    print_or_write(text, output, "the tables were")
    _name(finished.run_id, quiet=kind == "csv" and output is None)


def _writable(root: str | None) -> Path:
    """The root of the runs, which may be written. Raises RunError and ReadOnlyError."""
    from binade.data.run.access import check_writable

    check_writable("recording a run")
    return resolve_root(root)


def _name(run_id: str, quiet: bool) -> None:
    """Name the run that has a result. quiet: the output is for a program."""
    if not quiet:
        print_text(f"run {run_id}: Runs › Cost of the app shows it")


def _causes(gaps: Sequence[Measured]) -> TextTable:
    """The gaps of groups, the largest first."""
    estimates = [(gap, gap.change, gap.divergence) for gap in gaps]
    rows = (
        (
            gap.name,
            *(cell for estimate in effects for cell in (estimate.measure.text(estimate.value), _interval(estimate))),
        )
        for gap, *effects in estimates
    )
    header = ("group", *(cell for estimate in estimates[0][1:] for cell in (estimate.measure.axis, "95% interval")))
    title = "Why: one group of products is rounded as for the rollout, everything else as for training"
    return TextTable(title, header, tuple(rows))


def _routing(routing: Routing) -> TextTable:
    """Flips, recall and order by layer, then the tokens that flip in any layer."""
    from binade.data.compare.routing import MARGIN

    header = ("router", "experts", "flips (%)", "95% interval", "recall (%)", "reordered (%)", "margin", "at flips")
    rows = []
    for layer in routing.layers:
        flips, recall, reorders = layer.estimates()
        flip, *others = (estimate.measure.text(estimate.value) for estimate in (flips, recall, reorders))
        margins = (NOTHING if isnan(x) else MARGIN.text(x) for x in (layer.margin, layer.flipped_margin))
        rows.append((layer.name, f"{layer.chosen} of {layer.experts}", flip, _interval(flips), *others, *margins))
    several = routing.any
    rows.append(("any layer", "", several.measure.text(several.value), _interval(several), *[NOTHING] * 4))
    return TextTable("Routing: the experts of the rollout against those of training", header, tuple(rows), left=2)


def _replay(replays: Iterable[Replay]) -> TextTable:
    """What of the gap disappears with the rollout's routes in training."""
    rows = (
        (
            replay.own.measure.axis,
            *(cell for e in (replay.own, replay.replayed) for cell in (e.measure.text(e.value), _interval(e))),
            NOTHING if isnan(replay.disappears) else number_text(100 * replay.disappears, ".1f"),
        )
        for replay in replays
    )
    header = ("gap", "own routes", "95% interval", "rollout's routes", "95% interval", "disappears (%)")
    return TextTable("Route replay: training with the routes of the rollout", header, tuple(rows))


def _interval(estimate: Estimate) -> str:
    if not isfinite(estimate.high - estimate.low):
        return NOTHING
    return f"{estimate.measure.text(estimate.low)} to {estimate.measure.text(estimate.high)}"


# Of dumps


def _quantities_of(rollouts: Sequence[Rollouts]) -> list[tuple[str, str, Policies]]:
    """(tool, step, policies): of all steps, then of each if there are several."""
    from binade.data.compare.parity import joined

    tools = ", ".join(dict.fromkeys(rollout.tool for rollout in rollouts))
    whole = (tools, "all", joined([rollout.policies for rollout in rollouts]))
    return [whole, *((rollout.tool, rollout.step, rollout.policies) for rollout in rollouts if len(rollouts) > 1)]


def _document(rollouts: Sequence[Rollouts], kind: str) -> str:
    (tools, _, whole), *steps = _quantities_of(rollouts)
    heading = f"{tools}: {counted(len(rollouts), 'step')}, {_size(whole)}"
    shown = [_table(whole), *([_by_step(rollouts)] if steps else [])]
    return document(heading, shown, LEGEND, kind)


def document(heading: str, shown: Iterable[TextTable], notes: Iterable[str], kind: str) -> str:
    """A heading, tables and notes, as text or Markdown."""
    if kind == "markdown":
        blocks = [f"### {markdown_text(heading)}", *map(markdown, shown)]
        return "\n\n".join([*blocks, "\n".join(f"* {markdown_text(note)}" for note in notes)]) + "\n"
    return "\n\n".join([wrapped(one_line(heading)), *map(aligned, shown), "\n".join(map(wrapped, notes))]) + "\n"


def _size(pair: Policies) -> str:
    left = f"; {counted(pair.left_out, 'token')} left out: no finite log-probability" if pair.left_out else ""
    return f"{counted(pair.sequences, 'sequence')}, {counted(len(pair.rollout), 'token')}{left}"


def _table(pair: Policies) -> TextTable:
    from binade.data.compare.parity import quantities

    header = ("quantity", "formula", "tokens", "sequences", "median token", "median sequence")
    rows = (
        (row.measure.axis, row.measure.definition, *(_cell(row, name) for name in VALUES)) for row in quantities(pair)
    )
    return TextTable("Parity of rollout and training", header, tuple(rows), left=2)


def _cell(row: Row, name: str) -> str:
    value = getattr(row, name)
    return NOTHING if value is None else number_text(value * row.measure.factor, row.measure.format)


def _by_step(rollouts: Sequence[Rollouts]) -> TextTable:
    """The quantities that tools plot, by step, with their medians over steps."""
    from binade.data.compare.parity import quantities

    by_step = [{row.measure.name: row for row in quantities(rollout.policies)} for rollout in rollouts]
    values = [[_main(by_name[name]) for name in BY_STEP] for by_name in by_step]
    medians = [nan if any(map(isnan, column)) else statistics.median(column) for column in zip(*values, strict=True)]
    steps = [*(one_line(rollout.step) for rollout in rollouts), "median"]
    measures = [by_step[0][name].measure for name in BY_STEP]
    rows = (
        (step, *(number_text(value, measure.format) for value, measure in zip(row, measures, strict=True)))
        for step, row in zip(steps, [*values, medians], strict=True)
    )
    title = "By step, over tokens (χ² of sequences: over sequences)"
    return TextTable(title, ("step", *(measure.title for measure in measures)), tuple(rows))


def _main(row: Row) -> float:
    """The value of a quantity over tokens; of one of sequences, over sequences."""
    value = row.over_sequences if row.over_tokens is None else row.over_tokens
    assert value is not None
    return value


def _csv(rollouts: Sequence[Rollouts]) -> str:
    """A row per step and quantity, in full precision. Lines end in CR LF."""
    return csv_text([
        {"tool": tool, "step": step, "sequences": pair.sequences, "tokens": len(pair.rollout),
         "left_out": pair.left_out} | quantity
        for tool, step, pair in _quantities_of(rollouts)
        for quantity in csv_rows(pair)
    ])  # fmt: skip


def csv_rows(pair: Policies) -> Iterator[dict[str, object]]:
    """The quantities of two policies, as cells by column."""
    from binade.data.compare.parity import quantities

    for row in quantities(pair):
        values = {name: getattr(row, name) for name in VALUES}
        yield {"quantity": row.measure.name, "unit": row.measure.unit.replace("%", "")} | values | {"name": row.tools}


def _params() -> list[click.Parameter]:
    recipes = "Two recipes on a model"
    return [
        click.Argument(["what"], nargs=-1, metavar="[FILE... | MODEL]"),
        *output_options(),
        CliOption(["--save"], is_flag=True, help="Keep the result of FILE as a run in the root"),
        root_option(),
        CliOption(["--rollout"], metavar="RECIPE", title=recipes,
               help="Compare this recipe or format with that of --train, instead of reading FILE"),
        CliOption(["--train"], metavar="RECIPE", title=recipes,
               help="Recipe or format of the training  [default: bf16]"),
        CliOption(["--by"], type=words_of(BY), metavar="A,B,...", title=recipes,
               help="What is changed together, as in binade measure: part, layer, module, site  "
                    f"[default: {','.join(DEFAULT_BY)}]"),
        CliOption(["--operands"], is_flag=True, flag_value=True, default=None, type=bool, title=recipes,
               help="Also change the two operands of each group one at a time, such as input and weight"),
        *source_params(),
    ]  # fmt: skip


parity = Command(
    "parity",
    params=_params(),
    callback=_parity,
    cancelled="cancelled; what was measured is kept, and the same command continues",
    failed="the parity cannot be measured",
)
