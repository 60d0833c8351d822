"""binade report: its options. No heavy import, so that a slip is told at once."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from binade.data.filter import FIELDS, INTEGER_FIELDS, LABELS, Filter, FilterError


def add_to(command: argparse.ArgumentParser) -> None:
    command.add_argument("--output", type=Path, default=Path("draw"), metavar="DIR", help="the folder that is written")
    command.add_argument("--tensor-save-dir", metavar="ROOT", help="the runs: else TENSOR_SAVE_DIR, else data/runs")
    command.add_argument("--session", metavar="ID", help="the report of a saved session: its notes, pins and view")
    command.add_argument("--zip", type=Path, metavar="FILE", help="also a ZIP of PNG, SVG, CSV and JSON")
    command.add_argument("--theme", choices=("light", "dark"), default="light", help="of the pictures")
    command.add_argument("--jobs", type=_jobs, metavar="N", help="processes that draw: one a core")
    command.add_argument(
        "--query",
        type=_query,
        default=Filter(),
        metavar="URL",
        help="the filter of an address of the app, or of its ?query",
    )
    filters = command.add_argument_group("filter", "values separated by commas; as in the app's sidebar")
    for name in FIELDS:
        filters.add_argument(
            f"--{name.replace('_', '-')}",
            type=_numbers if name in INTEGER_FIELDS else _texts,
            metavar="N,..." if name in INTEGER_FIELDS else "NAME,...",
            help=LABELS.get(name, name),
        )


def filter_of(given: argparse.Namespace) -> Filter:
    """The query's filter with the options', which win where both name a field. Raises FilterError beside --session."""
    named = {name: getattr(given, name) for name in FIELDS if getattr(given, name) is not None}
    found = Filter.from_dict(given.query.to_dict() | named)
    if given.session and found.items():
        raise FilterError("a session has its own filter: give --session without others")
    return found


def _query(text: str) -> Filter:
    """Parameters that are no filter fields are a page's own, and left out."""
    try:
        query = urlsplit(text).query if "://" in text else text.lstrip("?")
    except ValueError:  # brackets that do not close
        query = None
    if query is None or ("=" not in query and "://" not in text):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no query: expected quant_type=mxfp8&layer_index=1 or the like, or an address of the app"
        )
    found, problems = Filter.from_query(parse_qs(query))
    if problems:
        raise argparse.ArgumentTypeError(problems[0])
    return found


def _texts(text: str) -> list[str]:
    values = [value.strip() for value in text.split(",") if value.strip()]
    if not values:
        raise argparse.ArgumentTypeError("names are expected, separated by commas")
    return values


def _numbers(text: str) -> list[int]:
    values = _texts(text)
    bad = next((value for value in values if not value.isdecimal() or len(value) > 9), None)
    if bad is not None:
        raise argparse.ArgumentTypeError(f"{bad!r} is no number: expected whole numbers, separated by commas")
    return [int(value) for value in values]


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes: give one from 1 to 256")
    return int(text)
