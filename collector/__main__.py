"""python -m collector: run, batch, quick, list. Exit status: 0 done, 1 failed, 2 bad usage, 130 cancelled."""

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
    BYTE,
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
from collector.inputs import describe_inputs
from collector.recipe import TEN_RECIPES, RecipeError
from data.runs import RunError, resolve_root
from quant.formats import FORMATS, UnknownFormat

# On busy cores, OpenMP threads that spin at every barrier slow each other down tenfold; sleeping costs little.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

BAD_USAGE = (ConfigError, RecipeError, UnknownFormat)


class Parser(argparse.ArgumentParser):
    """Errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"collector: {one_line(message)}; see python -m {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def one_line(text: str) -> str:
    """What a user typed may hold line breaks and escape sequences: shown, not obeyed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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
    commands = parser.add_subparsers(dest="command", required=True, metavar="run | batch | quick | list")

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
    commands.add_parser("list", help="models, sizes, datasets, recipes, formats")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
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
    where.add_argument("--sequence-parallel", action="store_true", help="split sequences among them between layers")
    where.add_argument("--dp", type=int, default=d.dp, help="data-parallel replicas, each with its own micro-batches")
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
        f"model     {config.model} {config.size}: {shape.describe()}, "
        f"vocabulary {shape.vocab}; {shape.parameters / 1e6:.1f} M weights",
        f"weights   {f'from {config.load_hf}' if config.load_hf else f'random, seed {config.seed}'}",
        f"data      {describe_inputs(config.dataset, config.tokenizer)}, {tokens} tokens an iteration",
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
    from collector.ranks import started_as_rank  # torch only when something is trained
    from collector.train import prepare, train

    ranks = runs[0].tp * runs[0].dp
    if ranks > 1 and not started_as_rank():
        from collector.launch import launch

        for config in runs:
            prepare(config)
        launch(argv, root, ranks)
        return
    terminal = sys.stderr.isatty() and not started_as_rank()
    for number, config in enumerate(runs, 1):
        console = Console()
        title = f"[{number}/{len(runs)}] {config.recipe}" if len(runs) > 1 else config.recipe
        if terminal:
            from tqdm import tqdm

            console.bar = tqdm(desc=title, total=config.warmup_iterations + config.control_iter, unit="it")
        elif os.environ.get("RANK", "0") == "0":
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
        if os.environ.get("RANK", "0") != "0":
            continue
        print(
            f"{result.run_id}: loss {result.loss_first:.4f} to {result.loss_last:.4f}, {result.tensors} tensors, "
            f"{result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s",
            flush=True,
        )


def print_lists() -> None:
    print("models")
    for name, sizes in MODELS.items():
        for size, shape in sizes.items():
            weights = f"{shape.parameters / 1e6:,.1f} M weights"
            print(
                f"    {name} {size}: {shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocab}, {weights}"
            )
    print(f"datasets\n    {', '.join(DATASETS)}")
    print('    a path to .jsonl, .jsonl.gz or .parquet: documents under "text"')
    print("    a path to .bin/.idx, as Megatron's preprocess_data writes them: either file, or their prefix")
    print(f"tokenizers\n    {BYTE}: a token is a byte, 256 ends a document")
    print("    a path to a Hugging Face tokenizer.json, or to its directory")
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
        return _fail(error, getattr(error, "exit_status", 1))
    return 0


def _fail(error: BaseException, status: int) -> int:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, OSError):
        message = f"the run failed: {error.strerror or message}{f' ({error.filename})' if error.filename else ''}"
    print(f"collector: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
