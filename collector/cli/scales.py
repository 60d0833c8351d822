"""binade scales."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from binade.collector.errors import ConfigError
from binade.filter_options import filter_of, filter_params
from binade.terminal import CliOption, Command, fail, print_text, quiet, resolve_root

if TYPE_CHECKING:
    from binade.collector.advice.scales import Sweep


def _scales(root: str | None, fmt: str, history: int, output: Path | None, **filters: Any) -> None:
    """Find the tensor scale that suits each recorded operand.

    ROOT contains runs with values on disk  [default: $TENSOR_SAVE_DIR, else data/runs]. Each tensor is rounded with
    scales 2^k around the one that delayed scaling computes from its absmax; a margin of M divides that scale by 2^M. A
    loss scale multiplies gradients by such a factor, so the margins show its effect, too.
    All operands are rounded to one format: for gradients in E5M2, run it once more with --format fp8_e5m2.
    """
    from binade.collector.advice.scales import recipe, sweep
    from binade.collector.recipes.files import to_toml
    from binade.data.index.catalog import Catalog
    from binade.data.run.store import staged_file

    if output is not None and (output.suffix != ".toml" or output.exists()):
        wrong = "exists" if output.exists() else "does not end in .toml"
        raise ConfigError(f"--output {output} {wrong}: give the path to a new .toml file")
    with Catalog.open(resolve_root(root, exists=True)) as catalog:
        for reason in catalog.refused:
            fail(f"skipped: {reason}")
        with quiet():
            scale_sweep = sweep(catalog, filter_of(filters), fmt)
    print_text(_described(scale_sweep))
    if output is not None:
        with staged_file(output) as staged:
            staged.write(to_toml(recipe(scale_sweep, output.stem, history)).encode())
        print_text(f"written to {output}; to train it: binade run --recipe {output}")


def _described(sweep: Sweep) -> str:
    """What was read, and for each operand the best scale, its stability, and the best scheme for each block."""
    import pandas as pd

    from binade.collector.advice.scales import (
        BLOCKS,
        MARGINS,
        OPERAND,
        SQNR,
        best_blocks,
        best_margin,
        groups,
        spread,
        tiers,
    )
    from binade.data.compare.evidence import SHARE, spread_of
    from binade.quant.specs import Spec

    names = tiers(Spec.of(sweep.fmt))
    swept: list[dict[str, object]] = []
    stability: list[dict[str, object]] = []
    blocks: list[dict[str, object]] = []
    for place, trials in groups(sweep.trials, OPERAND):
        best = best_margin(trials)
        sqnr = spread(trials, best.margin, "sqnr_db")
        operand: dict[str, object] = {"operand": " ".join(place)}
        swept.append(
            operand
            | {"tensors": sqnr.n, "no scale": spread(trials, None, "sqnr_db").text, "scaled": sqnr.text}
            | {"10th to 90th": f"{SQNR.text(sqnr.low)} to {SQNR.text(sqnr.high)}", "margin": best.margin}
            | {"alike": f"{best.alike[0]} to {best.alike[-1]}"}
            | {"flushed, no scale": spread(trials, None, "flush_to_zero").text}
            | {"flushed": spread(trials, best.margin, "flush_to_zero").text}
            | {name: spread(trials, best.margin, name).text for name in ("saturated", *names)}
        )
        moves = sweep.stability[(sweep.stability[OPERAND] == list(place)).all(axis=1)]
        if len(moves):
            lost, share = spread_of(SQNR, moves["lost"]), float((moves["moved"] <= 1).mean())
            ends = f"{SQNR.text(lost.low)} to {SQNR.text(lost.high)}"
            stable = {"pairs": len(moves), "moved by at most 1": f"{SHARE.text(share)}%"}
            stability.append(operand | stable | {"lost": lost.text, "10th to 90th": ends})
        chosen = best_blocks(sweep.blocks[(sweep.blocks[OPERAND] == list(place)).all(axis=1)])
        columns = (chosen[name] for name in ("block", "spec", "sqnr_db"))
        by_block = {
            block: f"{SQNR.text(sqnr_db)} {Spec.of(spec).scale}" for block, spec, sqnr_db in zip(*columns, strict=True)
        }
        blocks.append(operand | {block: by_block.get(block, "") for block in BLOCKS})
    left = f"; {sweep.unfit} are 0 or not finite" if sweep.unfit else ""
    tables = {
        f"{sweep.trials['tensor'].nunique():,} of {sweep.of:,} tensors with values on disk were read, all values of "
        f"each{left}. Margins {MARGINS[0]} to {MARGINS[-1]}; alike: those that the tensors "
        "cannot tell from the best. SQNR, shares and tiers are medians over tensors.": swept,
        "From one recorded iteration to the next: how often the best k moves by at most 1, and the SQNR lost with the "
        "previous k": stability,
        "Without history: SQNR (dB) with each block, along the axis that the first of its GEMMs contracts, and the "
        "scheme with the highest": blocks,
    }
    return "\n\n".join(
        f"{title}\n{pd.DataFrame(rows).to_string(index=False)}" for title, rows in tables.items() if rows
    )


scales = Command(
    "scales",
    params=[
        click.Argument(["root"], required=False, metavar="[ROOT]"),
        CliOption(["--format", "fmt"], default="hifp8", metavar="NAME",
               help="hifp8, or an FP8 format without blocks, such as fp8_e5m2"),
        CliOption(["--history"], type=click.IntRange(1, 999_999_999), default=16, metavar="N",
               help="Number of absmax values from which the recipe computes a scale"),
        CliOption(["--output"], type=Path, metavar="FILE",
               help="Write delayed scaling with these margins to a new .toml file"),
        *filter_params(),
    ],
    callback=_scales,
    failed="the scales cannot be found",
)  # fmt: skip
