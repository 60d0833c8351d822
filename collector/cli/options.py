"""The command line: its options, the old spellings among them, and the runs that they ask for. No torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import NoReturn

from binade.collector.cli.terminal import one_line
from binade.collector.recipes.recipe import TEN_RECIPES
from binade.collector.training.config import (
    BACKENDS,
    BYTE,
    DATASETS,
    DEFAULT_SCORES,
    DEVICES,
    MODELS,
    SIZES,
    ConfigError,
    RunConfig,
    check,
    fast,
)
from binade.collector.training.slurm_options import add_options as add_start_options
from binade.data.runs import is_unicode
from binade.data.tensor_kinds import tensor_names

MODES = {"single": "run", "batch": "batch", "quick": "quick"}

ABOUT_LAYERS = (
    "LAYERS is first, last, 3, 2-4, or a regular expression searched in names such as layer1.qkv, layer1.core and "
    "layer2.expert3.fc1; several with commas, which separate everywhere but in braces."
)
ABOUT_FORMATS = (
    "Formats in the place of the recipe's. What is more exact wins: recipe < part (linear, qk, pv, router) < GEMM "
    "(forward, dgrad, wgrad) < operand. bf16 turns each off. Operands are named as --dry-run prints them. "
    + ABOUT_LAYERS
)


class UsageError(ConfigError):
    """The command line cannot be read. The message says why, and where help is."""


class Parser(argparse.ArgumentParser):
    """Errors are one line, and options are written out: a typo is no abbreviation."""

    def __init__(self, **settings: object) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{one_line(message)}; see python -m {self.prog} --help")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the defaults that are words or numbers."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = (
            action.default != ""
            and isinstance(action.default, (str, int, float))
            and not isinstance(action.default, bool)
        )
        return super()._get_help_string(action) if told else action.help


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line read; bad usage ends the process with status 2 and one line."""
    try:
        return read(argv)
    except UsageError as error:
        print(f"binade: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def read(argv: Sequence[str]) -> argparse.Namespace:
    """The command line read. Raises UsageError."""
    for word in argv:
        if not is_unicode(word):  # it could be opened, but neither written into run.json nor indexed
            raise UsageError(f"{one_line(word)} is not valid Unicode: rename the file, or write the option anew")
    if argv and argv[0].startswith("--"):  # no command comes first: an old spelling may name it
        old = _old_parser()
        given, rest = old.parse_known_args(argv)
        modes = set(given.mode or ())
        if len(modes) > 1:
            old.error(f"--mode is {' and '.join(sorted(modes))}: give one")
        if not modes and "--help" not in rest:
            old.error("the command comes first: run, batch, quick, compare, list or import")
        argv = [*(MODES[mode] for mode in modes), *rest]
    return build_parser().parse_args(argv)


def job_arguments(argv: Sequence[str]) -> list[str]:
    """What a job is to be run with: a command line that `parse` takes, less what tells how it is started."""
    start = Parser(prog="binade", add_help=False)
    add_start_options(start)
    return start.parse_known_args(argv)[1]


def _old_parser() -> Parser:
    old = Parser(prog="binade", add_help=False)
    old.add_argument("--mode", choices=MODES, action="append", help="old spelling of the commands run, batch and quick")
    return old


def build_parser() -> Parser:
    parser = Parser(
        prog="binade",
        description="Train a small quantized model and record its tensors, or index those recorded elsewhere.",
        parents=[_old_parser()],
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="run | batch | quick | jobs | compare | list | import"
    )
    run = commands.add_parser("run", help="one run", formatter_class=Help)
    batch = commands.add_parser("batch", help="one run a recipe", formatter_class=Help)
    quick = commands.add_parser("quick", help="the smallest useful run", formatter_class=Help)
    quick.add_argument("named", nargs="?", type=_names, metavar="RECIPE", help="a format or recipe, see `list`")
    for command, metavar, shown in (
        (run, "RECIPE", "see `list` (default: bf16)"),
        (batch, "A,B,...", "recipes, see `list` (default: the ten of it)"),
        (quick, "RECIPE", "the same, as an option"),
    ):
        command.add_argument("--quantization", type=_names, metavar=metavar, help=shown)
        command.add_argument("--quant-type", type=_names, metavar=metavar, help="old spelling of --quantization")
        _add_options(command)
    quick.set_defaults(training_config="fast", warmup_iterations=2)
    compare = commands.add_parser("compare", help="the recipes of a root side by side", formatter_class=Help)
    compare.add_argument("root", nargs="?", metavar="ROOT", help="of the runs; else $TENSOR_SAVE_DIR, data/runs")
    compare.add_argument("--format", choices=("text", "csv", "markdown"), default="text", help="how it is written")
    compare.add_argument("--output", type=Path, metavar="FILE", help="write it there, not to the terminal")
    _add_jobs(commands.add_parser("jobs", help="the queue of runs: list, add, follow, cancel and more"))
    commands.add_parser("list", help="models, datasets, recipes, formats, operands, modules")
    _add_import(commands.add_parser("import", help="index tensor logs that other tools wrote", formatter_class=Help))
    return parser


def _add_jobs(parser: Parser) -> None:
    root = Parser(add_help=False)
    for each, default in ((parser, None), (root, argparse.SUPPRESS)):
        where = "root of the runs; else $TENSOR_SAVE_DIR, data/runs"
        each.add_argument("--tensor-save-dir", metavar="DIR", default=default, help=where)
    parser.set_defaults(all=False)
    actions = parser.add_subparsers(dest="action", metavar="list | add | follow | cancel | retry | delete | at-once")
    listed = actions.add_parser("list", parents=[root], help="the jobs and their states (also done without a word)")
    listed.add_argument("--all", action="store_true", help="all that have ended, not the latest only")
    added = actions.add_parser("add", parents=[root], help="queue runs: a command line of run, batch or quick")
    added.add_argument("line", nargs=argparse.REMAINDER, metavar="run|batch|quick ...", help="a job for each run of it")
    for name, what in (("follow", "print a job's log until it ends"), ("retry", "queue the same again")):
        actions.add_parser(name, parents=[root], help=what).add_argument("id", type=int, help="number of the job")
    for name, what in (
        ("cancel", "end jobs, and keep what they recorded"),
        ("delete", "forget jobs that have ended; their runs stay"),
    ):
        command = actions.add_parser(name, parents=[root], help=what)
        command.add_argument("ids", type=int, nargs="+", metavar="id", help="numbers of jobs")
    command.add_argument("--with-run", action="store_true", help="and delete their runs with all tensors")
    many = actions.add_parser("at-once", parents=[root], help="how many jobs may run at the same time")
    many.add_argument("count", type=int, metavar="N")
    actions.add_parser("serve", parents=[root], help="work through the queue until it is empty (started by the others)")


def _add_import(parser: Parser) -> None:
    parser.add_argument("directory", metavar="DIR", help="where .pt, .safetensors and .npy files lie, at any depth")
    _add_scores(parser, "every tensor")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one a core)")
    _add_root(parser)


def _add_scores(parser: argparse._ActionsContainer, tried_on: str) -> None:
    parser.add_argument(
        "--scores",
        type=_names,
        default=DEFAULT_SCORES,
        metavar="A,B,...",
        help=f"formats to try on {tried_on} (default: {','.join(DEFAULT_SCORES)})",
    )


def _add_root(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--tensor-save-dir", metavar="DIR", help="root of the runs; else $TENSOR_SAVE_DIR, data/runs")


def _add_options(parser: Parser) -> None:
    d = RunConfig()
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", default=d.model, help=", ".join(MODELS))
    what.add_argument("--size", default=d.size, help=", ".join(SIZES))
    files = "a .jsonl, .jsonl.gz or .parquet file, or Megatron's .bin/.idx (either file, or their prefix)"
    what.add_argument("--dataset", default=d.dataset, metavar="NAME|PATH", help=f"{', '.join(DATASETS)}, {files}")
    tokenizers = f"{BYTE}, or a Hugging Face tokenizer.json or its directory (default: {BYTE}; none with .bin/.idx)"
    what.add_argument("--tokenizer", default=argparse.SUPPRESS, metavar="NAME|PATH", help=tokenizers)
    vocabulary = "tokens of the model (default: its own, see `list`)"
    what.add_argument("--vocab-size", type=int, default=argparse.SUPPRESS, metavar="N", help=vocabulary)
    what.add_argument("--layers", type=int, metavar="N", help="shorten the model to its first N")
    what.add_argument("--load-hf", metavar="DIR", help="start from a Hugging Face safetensors checkpoint")

    formats = parser.add_argument_group("what is quantized", ABOUT_FORMATS)
    for name, meaning in (
        ("linear", "of every linear layer"),
        ("qk", "of QK^T's operands"),
        ("pv", "of PV's operands"),
        ("router", "of the experts' router, which no recipe quantizes"),
        ("forward", "of the linear layers' forward GEMM"),
        ("dgrad", "of the linear layers' GEMM for the input's gradient"),
        ("wgrad", "of the linear layers' GEMM for the weight's gradient"),
    ):
        formats.add_argument(f"--{name}-quant", metavar="FORMAT", help=meaning)
    formats.add_argument(
        "--operand-quant", type=_names, action="extend", metavar="PART.GEMM.OPERAND=FORMAT,...",
        help="of single operands, as linear.dgrad.grad_output=mxfp6_e3m2,qk.forward.key=bf16; taken literally, where "
        "mxfp8 otherwise makes a gradient mxfp8_e5m2",
    )  # fmt: skip
    formats.add_argument("--skip-layers", default=d.skip_layers, metavar="LAYERS", help="these stay in bf16")

    how = parser.add_argument_group("how long")
    how.add_argument(
        "--warmup-iterations", type=int, default=d.warmup_iterations, metavar="N", help="in bf16, before the others"
    )
    how.add_argument(
        "--train-iters", type=int, metavar="N", help="iterations under the recipe (default: as many as recording takes)"
    )
    how.add_argument(
        "--micro-batches", type=int, metavar="N", help="of an iteration (default: as many as are recorded)"
    )
    quick = fast(d)
    for name, unit in (("micro_batch_size", "sequences"), ("sequence_length", "tokens")):
        shown = f"{unit} (default: {getattr(d, name)}; fast: {getattr(quick, name)})"
        how.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, metavar="N", help=shown)
    how.add_argument(
        "--training-config", choices=("standard", "fast"), default="standard", help="fast: a quarter of the tokens"
    )
    how.add_argument("--learning-rate", type=float, default=d.learning_rate, metavar="X", help="of AdamW")
    how.add_argument("--seed", type=int, default=d.seed, metavar="N", help="of weights and data")

    kept = parser.add_argument_group("what is recorded", "LAYERS is as above.")
    kept.add_argument(
        "--control-iter", type=int, default=d.control_iter, metavar="N", help="iterations; 0 for every one"
    )
    kept.add_argument(
        "--capture-every", type=int, default=d.capture_every, metavar="N",
        help="take one iteration in N: the first, and N later the next",
    )  # fmt: skip
    kept.add_argument(
        "--collect-micro-batches", type=int, default=d.collect_micro_batches, metavar="N",
        help="of each of these iterations the first N; 0 for all",
    )  # fmt: skip
    kept.add_argument("--tensors", type=_names, default=(), metavar="A,B,...", help=f"of {', '.join(tensor_names())}")
    kept.add_argument("--modules", type=_names, default=(), metavar="A,B,...", help="as qkv, core, fc1; see `list`")
    kept.add_argument("--capture-layers", default=d.capture_layers, metavar="LAYERS", help="only these")
    kept.add_argument("--ranks", type=_ranks, default=(), metavar="0,1,...", help="only what these ranks hold")
    _add_scores(kept, "operands")
    kept.add_argument("--no-raw", dest="raw", action="store_false", help="statistics and sketches only")
    kept.add_argument(
        "--max-bytes", type=_size, default=d.max_bytes, metavar="SIZE", help="for tensor files, a run: 500M, 4G"
    )
    kept.add_argument("--save-tensors", action="store_true", default=None, help="old spelling of what is the default")
    kept.add_argument(
        "--no-save-tensors", action="store_true", help="record nothing at all: train, and keep the losses"
    )

    where = parser.add_argument_group("where")
    _add_root(where)
    where.add_argument("--device", default=d.device, help=", ".join(DEVICES))
    where.add_argument("--backend", default=d.backend, help=f"what quantizes operands: {', '.join(BACKENDS)}")
    where.add_argument("--tp", type=int, default=d.tp, metavar="N", help="tensor-parallel ranks")
    where.add_argument("--sequence-parallel", action="store_true", help="split sequences among them between layers")
    where.add_argument("--dp", type=int, default=d.dp, metavar="N", help="replicas, each with its own micro-batches")
    add_start_options(parser)


def configs(given: argparse.Namespace) -> list[RunConfig]:
    """The runs that a command line asks for, checked. Raises ConfigError and its kin."""
    if given.save_tensors and given.no_save_tensors:
        raise ConfigError("--save-tensors and --no-save-tensors contradict each other: give one")
    chosen = [name for name in ("tensors", "modules", "capture_layers", "ranks") if getattr(given, name)]
    if given.no_save_tensors and chosen:
        option = f"--{chosen[0].replace('_', '-')}"
        raise ConfigError(f"--no-save-tensors records nothing, and {option} chooses what is recorded: give one")
    if given.max_bytes != RunConfig().max_bytes and not (given.raw and not given.no_save_tensors):
        option = "--no-save-tensors" if given.no_save_tensors else "--no-raw"
        raise ConfigError(f"{option} keeps no values, and --max-bytes bounds their files: give one")
    options = vars(given) | {
        "save_tensors": not given.no_save_tensors,
        "operand_quant": tuple(given.operand_quant or ()),
    }
    if options["micro_batches"] is None:
        options["micro_batches"] = max(1, given.collect_micro_batches)
    known = {f.name for f in fields(RunConfig)} - {"recipe"}
    base = fast(RunConfig()) if given.training_config == "fast" else RunConfig()
    base = replace(base, **{name: value for name, value in options.items() if name in known})
    runs = [replace(base, recipe=recipe) for recipe in _recipes(given)]
    for config in runs:
        check(config)
    return runs


def _recipes(given: argparse.Namespace) -> tuple[str, ...]:
    """The recipes by whichever of their spellings."""
    spellings = {
        "RECIPE": getattr(given, "named", None),
        "--quantization": given.quantization,
        "--quant-type": given.quant_type,
    }
    said = {spelling: recipes for spelling, recipes in spellings.items() if recipes is not None}
    if len(set(said.values())) > 1:
        raise ConfigError(f"{' and '.join(said)} name different recipes: give one of them")
    defaults = {"run": ("bf16",), "batch": TEN_RECIPES, "quick": ()}
    recipes = next(iter(said.values()), defaults[given.command])
    if not recipes:
        raise ConfigError(f"{given.command} needs a recipe: a name of `binade list`")
    if len(recipes) > 1 and given.command != "batch":
        raise ConfigError(f"{given.command} takes one recipe, not {len(recipes)}: use batch for several")
    return recipes


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} are no ranks: write numbers from 0, as 0,2") from None


def _size(text: str) -> int:
    """A number of bytes: 500M, 4G, 1073741824."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500M, 4G or a number of bytes") from None
