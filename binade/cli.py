"""The command `binade`. Sub-commands are imported when they are used, so that torch is loaded only for training."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import shell_complete

from binade.terminal import BAD_USAGE, WIDTH, ensure_home, escape_unknown, fail, usage_message

# On busy cores, OpenMP threads that spin at every barrier slow each other down tenfold; sleeping costs little.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

COMPLETE = "_BINADE_COMPLETE"
COMMANDS = {
    "Collect": {
        "run": "collector.cli.train:run",
        "batch": "collector.cli.train:batch",
        "quick": "collector.cli.train:quick",
        "ablate": "collector.cli.ablate:ablate",
        "list": "collector.cli.listing:list_",
        "jobs": "collector.cli.jobs:jobs",
        "import": "collector.cli.imports:import_",
    },
    "Analyze": {
        "serve": "app.cli:serve",
        "mcp": "app.cli:mcp",
        "measure": "collector.cli.measure:measure",
        "parity": "collector.cli.parity:parity",
        "advise": "collector.cli.advise:advise",
        "scales": "collector.cli.scales:scales",
        "compare": "collector.cli.compare_command:compare",
        "identify": "collector.cli.identify:identify",
        "conform": "collector.cli.conform:conform",
        "audit": "collector.cli.audit:audit",
        "report": "app.cli:report",
        "diff": "collector.cli.diff_command:diff",
        "export": "collector.cli.export_command:export",
        "bundle": "app.cli:bundle",
        "verify": "collector.cli.verify_command:verify",
    },
}
HIDDEN = {"slurm-rank": "collector.cli.slurm_rank:slurm_rank"}
PLACES = {name: place for commands in (*COMMANDS.values(), HIDDEN) for name, place in commands.items()}


class Binade(click.Group):
    """The commands, in the order of COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in PLACES if name not in HIDDEN]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in PLACES:
            return None
        module, _, attribute = PLACES[name].partition(":")
        command: click.Command = getattr(import_module(f"binade.{module}"), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in COMMANDS.items():
            with formatter.section(title):
                formatter.write_dl([(name, _summary(self, ctx, name)) for name in commands])


def _summary(group: click.Group, ctx: click.Context, name: str) -> str:
    command = group.get_command(ctx, name)
    return command.get_short_help_str(90) if command else ""


def build() -> Binade:
    from binade.collector.cli.megatron_fork import mode_option

    return Binade(
        "binade",
        params=[mode_option()],
        context_settings=WIDTH,
        help="Train a small quantized model and record its tensors, or index tensors recorded by other tools, then "
        "explore them in the browser.",
        epilog=f'Shell completion: eval "$({COMPLETE}=bash_source binade)", or zsh_source, fish_source.',
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    escape_unknown()
    ensure_home()
    group = build()
    if instruction := os.environ.get(COMPLETE):
        return shell_complete(group, {}, "binade", COMPLETE, instruction)
    for word in argv:
        if not word.isascii() and word != word.encode(errors="replace").decode():
            return fail(f"{word} is not valid Unicode: rename the file, or change the option; see binade --help", 2)
    from binade.collector.cli.megatron_fork import resolve

    try:
        with group.make_context("binade", resolve(argv), obj=argv) as context:
            return group.invoke(context) or 0
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package == "binade":
            raise
        extra = "mcp" if argv[0] == "mcp" else "app"
        return fail(f"{argv[0]} needs the package {package}: pip install 'binade[{extra}]'")
    except click.exceptions.Exit as end:  # after --help
        return end.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        path = error.ctx.command_path if error.ctx else "binade"
        return fail(f"a command is missing; see {path} --help", BAD_USAGE)
    except click.UsageError as error:
        return fail(usage_message(error), BAD_USAGE)
