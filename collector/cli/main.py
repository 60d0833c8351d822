"""binade: run, batch, quick, jobs, compare, list, import.

Exit status: 0 done, 1 failed, 2 bad usage, 130 cancelled."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from binade.collector.cli.options import configs, job_arguments, parse
from binade.collector.cli.terminal import escape_unknown, leave, one_line, put
from binade.collector.datasets.inputs import describe_inputs
from binade.collector.recipes.recipe import OPERANDS, TEN_RECIPES, RecipeError
from binade.collector.recipes.selection import by_layer
from binade.collector.training import slurm as cluster
from binade.collector.training.config import BYTE, DATASETS, MODELS, ConfigError, RunConfig
from binade.collector.training.slurm_options import slurm_options
from binade.data.access import ReadOnlyError
from binade.data.runs import RunError, resolve_root
from binade.data.store import write_atomic
from binade.data.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS, UnknownFormatError

if TYPE_CHECKING:
    from binade.collector.imports.importer import Imported

# On busy cores, OpenMP threads that spin at every barrier slow each other down tenfold; sleeping costs little.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SHOWN_REFUSALS = 10
USAGE_ERRORS = (ConfigError, RecipeError, UnknownFormatError, ReadOnlyError)


def describe(config: RunConfig, root: Path) -> str:
    shape, recipe = config.shape(), config.parsed_recipe()
    tokens = config.dp * config.micro_batches * config.micro_batch_size * config.sequence_length
    rows = [
        f"recipe    {recipe.name}",
        f"model     {config.model} {config.size}: {shape.describe()}, "
        f"vocabulary {shape.vocab}; {shape.parameters / 1e6:.1f} M weights",
        f"weights   {f'from {config.load_hf}' if config.load_hf else f'random, seed {config.seed}'}",
        f"data      {describe_inputs(config.dataset, config.tokenizer)}, {tokens} tokens an iteration",
        f"length    {config.warmup_iterations} warm-up iterations in bf16, then {config.iterations}",
        f"record    {recorded(config)}",
        f"on        {config.device}, {_ranks(config)}, operands quantized by {config.backend}",
        f"into      {root}",
    ]
    if skip := config.skip():
        model = shape.sites()
        rows.append(f"skip      {'; '.join(by_layer(model, skip.of(model), 'bf16', 'as below'))}")
    rows.append("operand by operand (part.GEMM.operand, contracted axis, format):")
    return "\n".join([*rows, *(f"    {line}" for line in recipe.lines())])


def _ranks(config: RunConfig) -> str:
    if config.world_size == 1:
        return "one rank"
    split = f"{config.tp} tensor-parallel{' with split sequences' if config.sequence_parallel else ''}"
    return f"{config.world_size} ranks ({split}, {config.dp} replicas)"


def recorded(config: RunConfig) -> str:
    """What of a run is recorded, in words."""
    if not config.save_tensors:
        return "nothing"
    taken = config.recorded_iterations
    shown = ", ".join(map(str, taken if len(taken) < 5 else [*taken[:2], "...", taken[-1]]))
    places = [
        *([f"of {', '.join(config.modules)}"] if config.modules else []),
        *([f"of layers {config.capture_layers}"] if config.capture_layers else []),
        *([f"on ranks {', '.join(map(str, config.ranks))}"] if config.ranks else []),
    ]
    values = f"kept, {_size(config.max_bytes)} at most" if config.raw else "not kept"
    return (
        f"{' '.join([', '.join(config.tensors) or 'every tensor', *places])}, {config.recorded_micro_batches} of "
        f"{config.micro_batches} micro-batches of iterations {shown}; scores in "
        f"{', '.join(config.scores) or 'no format'}; values {values}"
    )


def _size(number: int) -> str:
    """Bytes in the units of --max-bytes."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if number >= unit:
            return f"{round(number / unit, 2):,} {name}"
    return f"{number} bytes"


@dataclass
class Console:
    """A progress bar on a terminal, plain lines elsewhere."""

    bar: object = None

    def say(self, line: str) -> None:
        if self.bar is None:
            put(line)
        elif line.startswith("iteration"):
            self.bar.set_postfix_str(line.rpartition(": ")[2], refresh=False)

    def progress(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)


def collect(runs: list[RunConfig], root: Path, argv: Sequence[str]) -> None:
    from binade.collector.training.loop import prepare, train
    from binade.collector.training.ranks import started_as_rank  # torch only when something is trained

    ranks = runs[0].world_size
    if ranks > 1 and not started_as_rank():
        from binade.collector.training.launch import launch

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

            console.bar = tqdm(desc=title, total=config.warmup_iterations + config.iterations, unit="it")
        elif os.environ.get("RANK", "0") == "0":
            put(title)
        try:
            result = train(
                config,
                root,
                say=console.say,
                progress=console.progress,
                command=_command(argv),
            )
        finally:
            if console.bar is not None:
                console.bar.close()
        if os.environ.get("RANK", "0") != "0":
            continue
        put(
            f"{result.run_id}: loss {result.loss_first:.4f} to {result.loss_last:.4f}, {result.tensors} tensors, "
            f"{result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
        )


def print_comparison(root: Path, kind: str, output: Path | None) -> None:
    """Compare the recipes of a root. What was passed over is told on stderr. Raises RunError; nothing is written
    then."""
    from binade.collector.cli.compare import compare  # pandas and DuckDB only when something is compared
    from binade.collector.cli.tables import render

    try:
        comparison = compare(root)
    except OSError as error:
        raise RunError(f"{root} cannot be read: {error.strerror or error}") from error
    for reason in comparison.refused:
        print(f"binade: passed over: {one_line(reason)}", file=sys.stderr)
    if not comparison.sections:
        found = "holds no runs that can be read" if root.is_dir() else "does not exist"
        raise RunError(f"{root} {found}: name the root of some runs, or collect some with binade batch")
    written = render(comparison, kind)
    if output is None:
        put(written.removesuffix("\n"))
        return
    target = output.resolve()  # through a link, not in its place
    try:
        if target.exists() and not target.is_file():
            raise RunError(f"{output} is no regular file: give another to --output")
        write_atomic(target, written.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}; give another file to --output") from error
    put(f"{sum(len(section.rows) for section in comparison.sections)} rows written to {output}")


def bring_in(given: Namespace, root: Path, argv: Sequence[str]) -> int:
    """Import logs, tell what came of it, and the exit status."""
    from binade.collector.imports.workers import prepare

    prepare("binade.collector.imports.importer")  # its processes import torch while this one does
    from binade.collector.imports.importer import import_logs  # torch only when something is read

    console = Console()
    if sys.stderr.isatty():
        from tqdm import tqdm

        console.bar = tqdm(desc="import", unit="file")
    try:
        result = import_logs(
            Path(given.directory),
            root,
            scores=given.scores,
            workers=given.workers,
            say=lambda line: console.say(one_line(line)),
            progress=console.progress,
            command=_command(argv),
        )
    finally:
        if console.bar is not None:
            console.bar.close()
    if result.failed:
        where = result.directory / "refused.jsonl"
        put("\n".join(_refusals(result)))
        print(f"binade: every file of {one_line(given.directory)} was refused; {where} says why", file=sys.stderr)
        return 1
    if not (result.files or result.known):
        put(f"there is no file in {one_line(given.directory)}: nothing to import")
        return 0
    added = f"{result.tensors} tensors of {result.files} files, {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
    lines = [f"{result.run_id}: {added if result.files else 'nothing new'}; {result.known} files were known"]
    if result.by_version:
        lines.append("by version: " + ", ".join(f"{version} {count}" for version, count in result.by_version.items()))
    put("\n".join([*lines, *_refusals(result)]))
    return 0


def _refusals(result: Imported) -> list[str]:
    """What was refused and why, the first of many."""
    lines = [f"    {one_line(refusal.line)}" for refusal in result.refused[:SHOWN_REFUSALS]]
    if hidden := len(result.refused) - len(lines):
        lines.append(f"    and {hidden} more: {result.directory / 'refused.jsonl'}")
    return [f"refused: {len(result.refused)}", *lines] if lines else []


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["binade", *argv])


def lists() -> str:
    """What there is to choose from."""
    lines = ["models"]
    for name, sizes in MODELS.items():
        for size, shape in sizes.items():
            weights = f"{shape.parameters / 1e6:,.1f} M weights"
            lines.append(
                f"    {name} {size}: {shape.layers} layers, hidden {shape.hidden}, vocabulary {shape.vocab}, {weights}"
            )
        modules = dict.fromkeys(site.module for site in sizes["full"].sites())
        lines.append(f"        modules {', '.join(modules)}")
    lines += [
        f"datasets\n    {', '.join(DATASETS)}",
        '    a path to .jsonl, .jsonl.gz or .parquet: documents under "text"',
        "    a path to .bin/.idx, as Megatron's preprocess_data writes them: either file, or their prefix",
        f"tokenizers\n    {BYTE}: a token is a byte, 256 ends a document",
        "    a path to a Hugging Face tokenizer.json, or to its directory",
        "recipes\n    " + "\n    ".join(TEN_RECIPES),
        "    and FA_, linear_, FA_linear_ or nothing before any format: nothing quantizes everything",
        "formats",
        *(
            f"    {fmt.name:<11} {fmt.title}, {fmt.bits_per_value:g} bits a value, largest {fmt.max:g}"
            for fmt in FORMATS.values()
        ),
        *(f"    {alias:<11} the same as {name}" for alias, name in FORMATS.aliases.items()),
        "operands, for --operand-quant\n    " + "\n    ".join(OPERANDS),
        f"tensors\n    {', '.join(tensor_names())}",
    ]
    return "\n".join(lines)


def manage_jobs(given: argparse.Namespace) -> int:
    """The queue: binade jobs. Leaving it ends no job."""
    from binade.collector.cli.jobs import run_command
    from binade.collector.jobs import JobError

    try:
        status = run_command(given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who read it has seen enough: a job that is followed goes on
        leave()
        return 0
    except (*USAGE_ERRORS, JobError) as error:
        return _fail(error, 2)
    except RunError as error:
        return _fail(error, 1)
    except OSError as error:
        return _fail(RunError(f"the queue cannot be changed: {error.strerror or error}"), 1)
    except KeyboardInterrupt:
        print("binade: left; the jobs go on", file=sys.stderr)
        return 130


def _cancel(signum: int, frame: FrameType | None) -> NoReturn:
    for further in (signal.SIGTERM, signal.SIGINT):  # one is enough: let what was recorded be written down
        signal.signal(further, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    escape_unknown()
    given = parse(argv)
    if given.command == "list":
        put(lists())
        return 0
    if given.command == "jobs":
        return manage_jobs(given)
    for signum in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _cancel)
    try:
        if given.command == "compare":
            print_comparison(resolve_root(given.root), given.format, given.output)
            return 0
        root = resolve_root(given.tensor_save_dir)
        if given.command == "import":
            return bring_in(given, root, argv)
        runs = configs(given)
        slurm = slurm_options(given, runs[0])
        if given.dry_run:
            shown = [describe(config, root) for config in runs]
            if slurm:
                shown.append(f"sbatch script:\n{cluster.script(slurm, root, job_arguments(argv))}")
            put("\n\n".join(shown))
        elif slurm:
            put(cluster.submit(slurm, root, job_arguments(argv)))
        else:
            collect(runs, root, argv)
    except USAGE_ERRORS as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        print("binade: cancelled; what was recorded is kept", file=sys.stderr)
        return 130
    except (RunError, OSError, RuntimeError, MemoryError) as error:
        return _fail(error, getattr(error, "exit_status", 1))
    return 0


def _fail(error: BaseException, status: int) -> int:
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, OSError):
        message = f"the run failed: {error.strerror or message}{f' ({error.filename})' if error.filename else ''}"
    print(f"binade: {one_line(message)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
