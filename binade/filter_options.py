"""The filters of commands that read the index: the fields of data.words.filter as options. No heavy import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import click

from binade.data.words.fields import IDENTITIES
from binade.data.words.filter import FIELDS, INTEGER_FIELDS, Filter
from binade.terminal import CliOption, names

FILTER = ("Filter", "These are the fields of the app's filter. Separate values with commas.")


def texts(text: str) -> list[str]:
    """The values of a filter, separated by commas."""
    values = names(text)
    if not values:
        raise click.BadParameter("names are expected, separated by commas")
    return list(values)


def numbers(text: str) -> list[int]:
    for value in texts(text):
        if not value.isdecimal() or len(value) > 9:
            raise click.BadParameter(f"{value!r} is not a number: expected whole numbers, separated by commas")
    return [int(value) for value in texts(text)]


def query_filter(text: str) -> Filter:
    """The filter in an address of the app. Parameters of the page are ignored."""
    try:
        query: str | None = urlsplit(text).query if "://" in text else text.lstrip("?")
    except ValueError:  # unbalanced brackets
        query = None
    if query is None or ("=" not in query and "://" not in text):
        example = "quant_type=mxfp8&layer_index=1"
        raise click.BadParameter(f"{text[:80]!r} is not a query: expected {example} or the URL of a page of the app")
    where, problems = Filter.from_query(parse_qs(query))
    if problems:
        raise click.BadParameter(problems[0])
    return where


def filter_params() -> list[click.Parameter]:
    return [
        CliOption(["--query"], type=query_filter, metavar="URL", help="Use the filter from a URL of the app"),
        *(
            CliOption(
                [f"--{name.replace('_', '-')}", name],
                type=numbers if name in INTEGER_FIELDS else texts,
                metavar="N,..." if name in INTEGER_FIELDS else "NAME,...",
                help=f"Restrict by {IDENTITIES[name].inline}",
                title=FILTER[0],
                about=FILTER[1],
            )
            for name in FIELDS
        ),
    ]


def filter_of(options: Mapping[str, Any]) -> Filter:
    """The filter of --query, overridden by the filter options."""
    given = {name: options[name] for name in FIELDS if options[name] is not None}
    return Filter.from_dict((options["query"] or Filter()).to_dict() | given)
