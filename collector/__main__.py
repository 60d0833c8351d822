"""python -m collector: run, batch, quick, compare, list. Exit status: 0 done, 1 failed, 2 bad usage, 130 cancelled."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from collector.config import (
    BACKENDS,
    DATASETS,
    DEFAULT_SCORES,
    DEVICES,
    MODELS,
    SIZES,
    TENSOR_NAMES,
    ConfigError,
    RunConfig,
    check,
    fast,
)
from collector.recipe import TEN_RECIPES, RecipeError
from collector.words import one_line
from data.runs import RunError, resolve_root
from data.store import write_atomic
from quant.formats import FORMATS, UnknownFormat

# On busy cores, OpenMP threads that spin at every barrier slow each other down tenfold; sleeping costs little.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

BAD_USAGE = (ConfigError, RecipeError, UnknownFormat)


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"collector: {one_line(message)}; see python -m {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _size(text: str) -> int:
    """A number of bytes: 500M, 4G, 1073741824."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 500M, 4G or a number of bytes") from None


def build_parser() -> Parser:
    parser = Parser(prog="collector", description="Train a small quantized model and record its tensors.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="run | batch | quick | compare | list")

    run = commands.add_parser("run", help="one run", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    run.add_argument("--quantization", dest="recipe", default="bf16", metavar="RECIPE", help="see `list`")
    batch = commands.add_parser(
        "batch", help="one run a recipe", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    batch.add_argument(
        "--quantization",
        dest="recipes",
        type=_names,
        default=TEN_RECIPES,
        metavar="A,B,...",
        help="recipes, see `list`",
    )
    quick = commands.add_parser(
        "quick", help="the smallest useful run", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    quick.add_argument("recipe", metavar="RECIPE", help="a format or recipe, see `list`")
    for command in (run, batch, quick):
        _add_options(command)
    quick.set_defaults(training_config="fast", warmup_iterations=2)
    compare = commands.add_parser("compare", help="loss, error, size and time by recipe")
    compare.add_argument("root", nargs="?", metavar="ROOT", help="of the runs; else $TENSOR_SAVE_DIR, data/runs")
    compare.add_argument("--format", choices=("text", "csv", "markdown"), default="text", help="default: text")
    compare.add_argument("--output", type=Path, metavar="FILE", help="write it there instead of printing it")
    commands.add_parser("list", help="models, sizes, datasets, recipes, formats")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    d = RunConfig()
    what = parser.add_argument_group("what is trained")
    what.add_argument("--model", default=d.model, help=", ".join(MODELS))
    what.add_argument("--size", default=d.size, help=", ".join(SIZES))
    what.add_argument("--dataset", default=d.dataset, help=f"{', '.join(DATASETS)}, or a .jsonl(.gz) file")
    what.add_argument("--layers", type=int, default=None, help="shorten the model")
    what.add_argument("--load-hf", metavar="DIR", help="start from a Hugging Face safetensors checkpoint")
    what.add_argument("--linear-quant", metavar="FORMAT", help="override the recipe for linear layers")
    what.add_argument("--qk-quant", metavar="FORMAT", help="override the recipe for QK^T's operands")
    what.add_argument("--pv-quant", metavar="FORMAT", help="override the recipe for PV's operands")
    what.add_argument("--router-quant", metavar="FORMAT", help="quantize the router of the experts too")
    how = parser.add_argument_group("how long")
    how.add_argument("--warmup-iterations", type=int, default=d.warmup_iterations, help="in bf16, before the others")
    how.add_argument("--control-iter", type=int, default=d.control_iter, help="iterations under the recipe, then stop")
    how.add_argument("--micro-batches", type=int, default=None, help="a step's micro-batches; default as collected")
    quick = fast(d)
    for name, unit in (("micro_batch_size", "sequences"), ("sequence_length", "tokens")):
        shown = f"{unit} (default: {getattr(d, name)}; fast: {getattr(quick, name)})"
        how.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, help=shown)
    how.add_argument(
        "--training-config", choices=("standard", "fast"), default="standard", help="fast: a quarter of the tokens"
    )
    how.add_argument("--learning-rate", type=float, default=d.learning_rate)
    how.add_argument("--seed", type=int, default=d.seed)
    kept = parser.add_argument_group("what is recorded")
    kept.add_argument(
        "--collect-micro-batches", type=int, default=d.collect_micro_batches, help="of each recorded iteration"
    )
    kept.add_argument(
        "--capture-every", type=int, default=d.capture_every, metavar="N", help="record one iteration in N"
    )
    kept.add_argument("--tensors", type=_names, default=(), metavar="A,B,...", help=f"of {', '.join(TENSOR_NAMES)}")
    kept.add_argument(
        "--scores", type=_names, default=DEFAULT_SCORES, metavar="A,B,...", help="formats to try on operands"
    )
    kept.add_argument("--no-raw", dest="raw", action="store_false", help="statistics and sketches only")
    kept.add_argument("--max-bytes", type=_size, default=d.max_bytes, help="for tensor files, a run: 500M, 4G")
    where = parser.add_argument_group("where")
    where.add_argument("--tensor-save-dir", metavar="DIR", help="root of the runs; else $TENSOR_SAVE_DIR, data/runs")
    where.add_argument("--device", default=d.device, help=", ".join(DEVICES))
    where.add_argument("--backend", default=d.backend, help=f"what quantizes operands: {', '.join(BACKENDS)}")
    where.add_argument("--tp", type=int, default=d.tp, help="tensor-parallel ranks")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done, operand by operand")


def configs(given: argparse.Namespace) -> list[RunConfig]:
    """The runs that a command line asks for, checked. Raises ConfigError and its kin."""
    recipes = given.recipes if given.command == "batch" else (given.recipe,)
    if not recipes:
        raise ConfigError("--quantization names no recipe")
    options = vars(given)
    if options["micro_batches"] is None:
        options["micro_batches"] = max(1, given.collect_micro_batches)
    known = {f.name for f in fields(RunConfig)} - {"recipe"}
    base = fast(RunConfig()) if given.training_config == "fast" else RunConfig()
    base = replace(base, **{name: value for name, value in options.items() if name in known})
    runs = [replace(base, recipe=recipe) for recipe in recipes]
    for config in runs:
        check(config)
    return runs


def describe(config: RunConfig, root: Path) -> str:
    shape, recipe = config.shape(), config.parsed_recipe()
    tokens = config.micro_batches * config.micro_batch_size * config.sequence_length
    rows = [
        f"recipe    {recipe.name}",
        f"model     {config.model} {config.size}: {shape.describe()}; {shape.parameters / 1e6:.1f} M weights",
        f"weights   {f'from {config.load_hf}' if config.load_hf else f'random, seed {config.seed}'}",
        f"data      {config.dataset}, {tokens} tokens an iteration",
        f"length    {config.warmup_iterations} warm-up iterations in bf16, then {config.control_iter}",
        f"record    {', '.join(config.tensors) or 'every tensor'} of {config.collect_micro_batches} of "
        f"{config.micro_batches} micro-batches, every {config.capture_every} iteration(s); scores in "
        f"{', '.join(config.scores) or 'no format'}; values {'kept' if config.raw else 'not kept'}",
        f"on        {config.device}, operands quantized by {config.backend}",
        f"into      {root}",
        "operand by operand (GEMM, operand, contracted axis, format):",
        *(f"    {line}" for line in recipe.lines()),
    ]
    return "\n".join(rows)


@dataclass
class Console:
    """A progress bar on a terminal, plain lines elsewhere."""

    bar: object = None

    def say(self, line: str) -> None:
        if self.bar is None:
            print(line, flush=True)
        elif line.startswith("iteration"):
            self.bar.set_postfix_str(line.rpartition(": ")[2], refresh=False)

    def progress(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)


def collect(runs: list[RunConfig], root: Path, argv: Sequence[str]) -> None:
    from collector.train import train  # torch only when something is trained

    terminal = sys.stderr.isatty()
    for number, config in enumerate(runs, 1):
        console = Console()
        title = f"[{number}/{len(runs)}] {config.recipe}" if len(runs) > 1 else config.recipe
        if terminal:
            from tqdm import tqdm

            console.bar = tqdm(desc=title, total=config.warmup_iterations + config.control_iter, unit="it")
        else:
            print(title, flush=True)
        try:
            result = train(
                config,
                root,
                say=console.say,
                progress=console.progress,
                command=shlex.join(["python", "-m", "collector", *argv]),
            )
        finally:
            if console.bar is not None:
                console.bar.close()
        print(
            f"{result.run_id}: loss {result.loss_first:.4f} to {result.loss_last:.4f}, {result.tensors} tensors, "
            f"{result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s",
            flush=True,
        )


def print_comparison(root: Path, kind: str, output: Path | None) -> None:
    """Compare the recipes of a root. What was passed over is told on stderr. Raises RunError; nothing is written
    then."""
    from collector.compare import compare  # pandas and DuckDB only when something is compared
    from collector.tables import render

    try:
        comparison = compare(root)
    except OSError as error:
        raise RunError(f"{root} cannot be read: {error.strerror or error}") from error
    for reason in comparison.refused:
        print(f"collector: passed over: {one_line(reason)}", file=sys.stderr)
    if not comparison.sections:
        found = "holds no runs that can be read" if root.is_dir() else "does not exist"
        raise RunError(f"{root} {found}: name the root of some runs, or collect some with python -m collector batch")
    written = render(comparison, kind)
    if output is None:
        _put(written)
        return
    target = output.resolve()  # through a link, not in its place
    try:
        if target.exists() and not target.is_file():
            raise RunError(f"{output} is no regular file: give another to --output")
        write_atomic(target, written.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}; give another file to --output") from error
    print(f"{sum(len(section.rows) for section in comparison.sections)} rows written to {output}")


def _put(text: str) -> None:
    """Print it, escaped where the terminal lacks a character; a reader that has seen enough (head) may leave."""
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain when it exits


def print_lists() -> None:
    print("models")
    for name, sizes in MODELS.items():
        for size, shape in sizes.items():
            weights = f"{shape.parameters / 1e6:,.1f} M weights"
            print(f"    {name} {size}: {shape.layers} layers, hidden {shape.hidden}, {weights}")
    print(f"datasets\n    {', '.join(DATASETS)}, or a path to .jsonl(.gz)")
    print("recipes\n    " + "\n    ".join(TEN_RECIPES))
    print("    and FA_, linear_, FA_linear_ or nothing before any format: nothing quantizes everything")
    print("formats")
    for fmt in FORMATS.values():
        print(f"    {fmt.name:<11} {fmt.title}, {fmt.bits_per_value:g} bits a value, largest {fmt.max:g}")
    for alias, name in FORMATS.aliases.items():
        print(f"    {alias:<11} the same as {name}")


def _cancel(signum: int, frame: FrameType | None) -> NoReturn:
    for further in (signal.SIGTERM, signal.SIGINT):  # one is enough: let what was recorded be written down
        signal.signal(further, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    given = build_parser().parse_args(argv)
    if given.command == "list":
        print_lists()
        return 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _cancel)
    try:
        if given.command == "compare":
            print_comparison(resolve_root(given.root), given.format, given.output)
            return 0
        runs = configs(given)
        root = resolve_root(given.tensor_save_dir)
        if given.dry_run:
            print("\n\n".join(describe(config, root) for config in runs))
            return 0
        collect(runs, root, argv)
    except BAD_USAGE as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        print("collector: cancelled; what was recorded is kept", file=sys.stderr)
        return 130
    except (RunError, OSError, RuntimeError, MemoryError) as error:
        return _fail(error, 1)
    return 0


def _fail(error: BaseException, status: int) -> int:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, OSError):
        message = f"the run failed: {error.strerror or message}{f' ({error.filename})' if error.filename else ''}"
    print(f"collector: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
