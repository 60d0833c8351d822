"""Draws the pictures of docs/findings.md from the roots that its commands make: python docs/findings.py [ROOT [WGRAD]]

Prints the figures that the text quotes, too. WGRAD: the root of the ablation of wgrad; without it, its picture stays.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import pandas as pd

from binade import Catalog, Filter
from binade.app.measures.map_measure import CellQuery
from binade.app.measures.results import RESULT
from binade.app.questions.shared.labels import layer_names
from binade.collector.cli.compare import sections

HERE = Path(__file__).parent / "findings"
INPUTS = Filter(recipe=("bf16",), tensor_name=("input",))
GRADIENTS = Filter(recipe=("bf16",), tensor_name=("grad_output",))
PLACE = ("layer_index", "module")


def place(table: pd.DataFrame) -> pd.Series:
    return layer_names(table["layer_index"]) + table["module"]


def formats(catalog: Catalog, where: Filter, names: list[str], by: tuple[str, ...] = PLACE) -> pd.DataFrame:
    """What each format does to the tensors of a place."""
    return pd.concat([catalog.errors(name, by, where).assign(format=name) for name in names], ignore_index=True)


def dots(table: pd.DataFrame, x: str, title: str, axis: str) -> alt.Chart:
    order = list(dict.fromkeys(table["place"]))
    return (
        alt.Chart(table.replace([float("inf")], float("nan")), title=title)
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X(f"{x}:Q", title=axis, scale=alt.Scale(zero=False, padding=12)),
            y=alt.Y("place:N", title=None, sort=order),
            color=alt.Color("format:N", title=None, legend=alt.Legend(orient="bottom", columns=2, labelLimit=300)),
            shape=alt.Shape("format:N", title=None),
        )
        .properties(width=460, height=18 * len(order))
    )


WGRADS = {
    "amd_mxfp4(without=wgrad)": "bf16",
    "amd_mxfp4(without=rotation)": "mxfp4, nearest",
    "wgrad_stochastic": "mxfp4, stochastic",
    "wgrad_random": "mxfp4, Hadamard with random signs",
    "amd_mxfp4": "mxfp4, Hadamard",
}


def ablation(root: Path) -> alt.LayerChart:
    """The gap of each recipe of WGRADS to bf16, with its interval over seeds."""
    with Catalog.open(root) as catalog:
        (section,) = sections(catalog)
    gaps = {each.label: each.gap for each in section.compared.recipes}
    table = pd.DataFrame(
        [{"wgrad": title, "gap": gaps[name].value, "low": gaps[name].low, "high": gaps[name].high, "n": gaps[name].n}
         for name, title in WGRADS.items()]
    )  # fmt: skip
    print(table.round(4).to_string())
    base = alt.Chart(table, title="Loss above bf16 by wgrad: mean and 95% interval over five seeds").encode(
        y=alt.Y("wgrad:N", title=None, sort=list(WGRADS.values()), axis=alt.Axis(labelLimit=300))
    )
    zero = alt.Chart(pd.DataFrame({"gap": [0]})).mark_rule(color="#999", strokeDash=[4, 4]).encode(x="gap:Q")
    bars = base.mark_rule(size=2, color="#4f46e5").encode(x=alt.X("low:Q", title="nats per token"), x2="high:Q")
    points = base.mark_point(filled=True, size=70, color="#4f46e5").encode(x="gap:Q")
    return (zero + bars + points).properties(width=460, height=130)


def main() -> None:
    HERE.mkdir(exist_ok=True)
    if sys.argv[2:]:
        ablation(Path(sys.argv[2])).save(HERE / "wgrad.png", scale_factor=1.2)
    with Catalog.open(sys.argv[1] if len(sys.argv) > 1 else "data/findings") as catalog:
        rows = catalog.tensors(INPUTS)
        rows = rows.groupby(["layer_index", "module"], as_index=False).agg(
            absmax=("absmax", "max"), rms=("rms", "max"), kurtosis=("kurtosis", "max")
        )
        outliers = rows.assign(place=place(rows), format="largest magnitude / rms", ratio=rows["absmax"] / rows["rms"])
        print(outliers[["place", "absmax", "ratio", "kurtosis"]].to_string())
        chart = dots(outliers, "ratio", "Inputs of linear layers: largest magnitude over rms", "max |x| / rms")
        charts = {"outliers": chart}
        for name, where, specs, title in (
            ("gradients", GRADIENTS, ["mxfp8", "mxfp8_e5m2", "fp8_e4m3", "fp8_e5m2"], "Gradients of outputs"),
            ("scales", INPUTS, ["mxfp8", "mxfp8(scale=rceil)", "mxfp4", "mxfp4(scale=rceil)"], "Inputs"),
            ("rotation", INPUTS, ["mxfp4", "mxfp4(hadamard=32)", "nvfp4", "nvfp4(hadamard=16)"], "Inputs"),
        ):
            table = formats(catalog, where, specs)
            table = table.assign(place=place(table))
            charts[name] = dots(table, "sqnr_db", f"{title}: SQNR by format", "SQNR (dB)")
            print(table.pivot(index="place", columns="format", values="sqnr_db").round(1).to_string())
            medians = formats(catalog, where, specs, ("tensor_name",))
            ends = ["sqnr_db", "sqnr_db_low", "sqnr_db_high", "flush_to_zero", "saturated"]
            print(medians[["format", "tensors", *ends]].round(5).to_string())
        gemms = RESULT.cells(CellQuery(catalog, Filter(recipe=("mxfp4",)))).rename(columns={"product": "module"})
        gemms = gemms[~gemms["module"].isin(("QK", "PV"))].assign(place=place, format=lambda table: table["gemm"])
        charts["gemms"] = dots(gemms, "value", "Results of GEMMs in mxfp4: SQNR", "SQNR of the result (dB)")
        print(gemms.pivot(index="place", columns="gemm", values="value").round(1).to_string())
    for name, each in charts.items():
        each.save(HERE / f"{name}.png", scale_factor=1.2)


if __name__ == "__main__":
    main()
