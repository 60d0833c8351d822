"""The options of binade report. No heavy import."""

from __future__ import annotations

from pathlib import Path

import click

from binade.filter_options import filter_params
from binade.terminal import CliOption, root_option


def params() -> list[click.Parameter]:
    """The parameters of binade report."""
    return [
        CliOption(["--output"], type=Path, default="draw", metavar="DIR", help="Output directory  [default: draw]"),
        root_option(),
        CliOption(["--session"], metavar="ID", help="Report a saved session: its notes, pins and view"),
        CliOption(
            ["--paper", "papers"],
            type=click.Choice(("84mm", "174mm")),
            multiple=True,
            help="Also save each chart for a paper, at this width: SVG and PDF, 8 pt",
        ),
        CliOption(
            ["--theme"],
            type=click.Choice(("light", "dark")),
            default="light",
            help="Theme of the charts  [default: light]",
        ),
        CliOption(
            ["--jobs"],
            type=click.IntRange(1, 256),
            metavar="N",
            help="Number of drawing processes  [default: one per core]",
        ),
        *filter_params(),
    ]
