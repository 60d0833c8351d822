"""binade run, batch, quick."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from binade.collector.cli.console import console
from binade.collector.cli.options import request_of, training_params
from binade.collector.errors import ConfigError
from binade.collector.training.plan import Plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.terminal import Command, print_text, resolve_root

HELP = {
    "run": "Train with one recipe and record tensors.",
    "batch": "Train with several recipes, one run per recipe.",
    "quick": "Train the smallest useful run of a format or recipe.",
}


def _command(name: str) -> Command:
    return Command(
        name,
        params=training_params(name),
        callback=_run,
        help=HELP[name],
        cancelled="cancelled; what was recorded is kept",
        failed="the run failed",
    )


@click.pass_context
def _run(context: click.Context, /, **params: Any) -> None:
    request = request_of(context.command.name or "", params)
    root = resolve_root(request.root)
    plans = request.plans_in(root)
    on_cluster = request.start.for_run(plans[0].config) is not None
    if request.resume and on_cluster:
        raise ConfigError("--resume continues a run on this machine: leave out --target and --launcher")
    if request.start.dry_run:
        from binade.collector.jobs.command_line import describe
        from binade.collector.jobs.queue import next_script

        script = next_script(root, plans, request.start)
        shown = [describe(plan, root) for plan in plans]
        print_text("\n\n".join([*shown, *([f"sbatch script:\n{script}"] if script else [])]))
    elif on_cluster:
        queue(root, plans, request.start)
    else:
        collect(plans, root, None if plans[0].branch else request.resume)


def queue(
    root: Path, plans: list[Plan], start: SlurmOptions, titles: Sequence[str] = (), tags: Sequence[str] = ()
) -> None:
    """Queue the runs here or on a cluster, print their jobs, and start the runner that follows them."""
    from binade.collector.jobs import add_runs, start_runner, view_of

    for job in add_runs(root, plans, start, titles, tags=tags):
        cluster = view_of(root, job).cluster
        print_text(f"job {job.id} queued{f' as Slurm job {cluster.id}' if cluster else ''}: {job.title}")
    start_runner(root)


def collect(plans: list[Plan], root: Path, resume: str | None = None) -> None:
    """Train each run in this process, or start the ranks that do. resume: a run to continue. After a run that diverged
    the others are trained, but not on several ranks. Raises DivergedError at the end, and other errors at once; what
    was not trained is printed."""
    from binade.collector.training.loop import DivergedError, prepare, train
    from binade.collector.training.ranks import started_as_rank

    if plans[0].config.world_size > 1 and not started_as_rank():
        from binade.collector.training.launch import launch

        for plan in plans:
            prepare(plan)
        for together in [[plan] for plan in plans] if plans[0].branch else [plans]:
            launch(together, root, resume)
        return
    first_rank = os.environ.get("RANK", "0") == "0"
    lengths = [plan.config.warmup_iterations + plan.config.iterations for plan in plans]
    start, diverged = time.monotonic(), []
    with console("", "it", sum(lengths), bar=not started_as_rank(), brief=len(plans) > 1) as shown:

        def advance(before: int, done: int, of: int) -> None:
            shown.progress(before + done, sum(lengths))

        for number, plan in enumerate(plans, 1):
            before, recipe = sum(lengths[: number - 1]), plan.config.recipe
            title = f"[{number}/{len(plans)}] {recipe}" if len(plans) > 1 else recipe
            if first_rank:
                shown.title(title)
            try:
                result = train(plan, root, say=shown.say, progress=partial(advance, before), resume=resume)
            except (Exception, KeyboardInterrupt) as error:
                rest = [other.config.recipe for other in plans[number:]]
                if isinstance(error, DivergedError) and len(plans) > 1 and not started_as_rank():
                    diverged.append(f"{recipe} ({error})")
                    shown.print(f"{recipe}: {error}")
                    continue
                if rest and first_rank:
                    shown.print(f"not trained: {', '.join(rest)}")
                raise
            if first_rank:
                left = (time.monotonic() - start) / (before + lengths[number - 1]) * sum(lengths[number:])
                shown.print(
                    f"{result.run_id}: loss {result.loss_first:.4f} to {result.loss_last:.4f}, {result.tensors} "
                    f"tensors, {result.bytes / 1e6:.1f} MB in {result.seconds:.1f} s"
                    f"{f'; about {left:.0f} s left' * (number < len(plans))}"
                )
    if diverged:
        raise DivergedError(f"{len(diverged)} of {len(plans)} runs diverged: {'; '.join(diverged)}")


run, batch, quick = map(_command, HELP)
