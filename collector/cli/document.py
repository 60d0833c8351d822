"""Prints docs/options.md: python -m binade.collector.cli.document > docs/options.md"""

from __future__ import annotations

from binade.collector.cli.options import training_params
from binade.terminal import Option


def options_page() -> str:
    """The options of `binade run` in Markdown, one table per group."""
    lines = [
        "# Options",
        "",
        "`binade run`, `batch` and `quick` take these options; the defaults are those of `run`. The page is printed by",
        "`python -m binade.collector.cli.document`.",
    ]
    titles: dict[str, list[Option]] = {}
    for param in training_params("run"):
        if isinstance(param, Option):
            titles.setdefault(param.title, []).append(param)
    for title, options in titles.items():
        about = max((option.about for option in options), key=len)
        lines += ["", f"## {title}", "", *([about, ""] if about else []), "| Option | Meaning |", "|---|---|"]
        for option in options:
            usage = " ".join([option.opts[0], *([option.metavar] if option.metavar and not option.is_flag else [])])
            lines.append(f"| `{usage}` | {option.help} |".replace("NAME|PATH", "NAME\\|PATH"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(options_page(), end="")
