"""The command `binade`: one command line over the collector's commands and the app's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

APP = ("serve", "report", "bundle")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _main(argv)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package == "binade":
            raise
        print(f"binade: {argv[0]} needs the package {package}: pip install 'binade[app]'", file=sys.stderr)
        return 1


def _main(argv: list[str]) -> int:
    if argv and argv[0] in APP:
        from binade.app import cli as app

        return app.main(argv)
    from binade.collector.cli import main as collector

    return collector.main(argv)
