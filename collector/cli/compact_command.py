"""binade compact."""

from __future__ import annotations

import click

from binade.collector.cli.console import console
from binade.terminal import FAILED, Command, Option, fail, print_text, resolve_root


def _compact(root: str | None, size: int, dry_run: bool) -> int:
    """Merge the small segments of runs that have ended into large ones.

    ROOT contains the runs  [default: $TENSOR_SAVE_DIR, else data/runs]. Imports, and runs that are still being
    recorded, are left unchanged. During the merge, the app can still read the root, and other runs can be recorded.
    Exit status 1 if a run was skipped; the reason is printed.
    """
    from binade.data.compact import compact  # imports pyarrow

    with console("compact", "run") as shown:
        found = compact(resolve_root(root), size << 20, dry_run=dry_run, done=shown.progress)
    for line in found.skipped:
        fail(f"skipped: {line}")
    merged = "would be merged" if dry_run else "merged"
    print_text(f"{found.before} segments of {found.nbytes / 1e6:,.0f} MB {merged} into {found.after}")
    return FAILED if found.skipped else 0


compact = Command(
    "compact",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        Option(["--size"], type=click.IntRange(1, 4096), default=128, show_default=True, metavar="MiB",
               help="Merge segments smaller than this into segments of at least this size"),
        Option(["--dry-run"], is_flag=True, help="Print what would be merged, and merge nothing"),
    ],
    callback=_compact,
    cancelled="cancelled: what was merged is complete; run the command again to merge the rest",
    failed="the runs cannot be read",
)  # fmt: skip
