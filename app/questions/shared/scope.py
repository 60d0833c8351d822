"""Which run and iteration an answer is about: runs and iterations are never mixed unless the user groups by them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

from binade.app.draw.formatting import first_formats
from binade.app.questions.shared.runs import every_run, labels_of
from binade.data.index.catalog import USED, Catalog
from binade.data.run.directory import DONE
from binade.data.words.filter import Filter
from binade.data.words.text import counted

SHOWN = 3  # runs that a subtitle names
OF_RUNS = ("recipe", "quant_type")  # with groups by one of these, a run of each recipe is kept


@dataclass(frozen=True)
class Scope:
    """What an answer was computed from. The answer gives the first three, `totalled` the others.

    where    the filter, with its runs and iterations
    counts   how many there are of what the answer's tables list: ((12, "operand"),); () where these are tensors
    of_runs  how many runs it could have used; 0 for those with tensors that the user's filter selects
    runs, tensors, with_values  how many runs and tensors `where` selects, and how many of these have values on disk
    """

    where: Filter
    counts: tuple[tuple[int, str], ...] = ()
    of_runs: int = 0
    runs: int = 0
    tensors: int = 0
    with_values: int = 0

    def totalled(self, opened: Catalog, chosen: Filter) -> Self:
        """The scope with its totals. chosen: the user's filter."""
        totals = opened.totals(self.where)
        runs, of_runs = totals.runs, self.of_runs
        if of_runs:  # these may have losses alone
            runs = len(self.where.run_id)
        else:
            of_runs = runs if chosen == self.where else opened.totals(chosen).runs
        return replace(self, of_runs=of_runs, runs=runs, tensors=totals.tensors, with_values=totals.with_values)

    @property
    def sentence(self) -> str:
        """ "90 tensors · 1 of 8 runs · iteration 3 · all with values", or with what the answer counts in place of the
        tensors."""
        tensors = ((self.tensors, "tensor"),)
        counts = self.counts or tensors
        runs = counted(self.runs, "run") if self.runs == self.of_runs else f"{self.runs:,} of {self.of_runs:,} runs"
        at = self.where.iteration
        iterations = (
            "" if not at else f"iteration {at[0]}" if len(at) == 1 else f"{len(at)} iterations"
        )  # fmt: skip
        kept = "all with values" if self.with_values == self.tensors else f"{self.with_values:,} with values"
        first = " and ".join(counted(*count) for count in counts)
        return " · ".join(filter(None, (first, runs, iterations, kept * (counts == tensors))))


def scoped(opened: Catalog, where: Filter, apart: Collection[str] = (), scored: bool = False) -> Filter:
    """The filter, restricted to one run and iteration: the newest finished run whose recipe rounds the GEMMs of linear
    layers, else the newest finished one, else the newest, and the last recorded iteration of it.

    apart: the fields that the answer keeps apart. With run_id, all runs are kept; with recipe or quant_type, the newest
    run of each recipe, one that rounds what its name says if there is any; with iteration, all iterations. Several runs
    are shown at the last iteration that all have.
    scored: only runs and iterations with scored operands count, if there are any.
    """
    pairs = opened.distinct(("run_id", "iteration"), where, scored)
    if pairs.empty:
        pairs = opened.distinct(("run_id", "iteration"), where)
    if pairs.empty:
        return where
    runs = opened.runs()
    runs = runs[runs["run_id"].isin(pairs["run_id"])]  # newest first
    linear = runs["run_id"].map(every_run(opened).set_index("run_id")["linear"])
    whole = linear.notna() & (linear != "bf16")  # an ablation that rounds attention alone does not show a format
    runs = runs.iloc[((runs["state"] != DONE) * 2 + ~whole).argsort(kind="stable")]
    if "run_id" in apart:
        chosen = runs["run_id"].tolist()
    elif not set(apart).isdisjoint(OF_RUNS):
        rounded = every_run(opened).set_index("run_id")["rounded"]
        other = runs["run_id"].map(rounded) != runs["recipe"]  # a run of bf16 with PV in mxfp4 is not what bf16 means
        chosen = runs.iloc[other.argsort(kind="stable")].drop_duplicates("recipe")["run_id"].tolist()
    else:
        chosen = runs["run_id"].tolist()[:1]
    where = replace(where, run_id=tuple(chosen))
    recorded = pairs[pairs["run_id"].isin(chosen)].dropna()
    if "iteration" in apart or recorded.empty:
        return where
    counts = recorded["iteration"].value_counts()
    shared = counts.index[counts == recorded["run_id"].nunique()]
    if not len(shared):  # the runs have no iteration in common
        shared = recorded["iteration"][recorded["run_id"] == recorded["run_id"].iloc[0]]
    return replace(where, iteration=(int(max(shared)),))


def scope_of(opened: Catalog, where: Filter) -> str:
    """What a scoped filter selects, as a subtitle says it: "mxfp4 · iteration 11"."""
    labels = labels_of(opened)
    runs = [labels.get(run, run) for run in where.run_id]
    shown = ", ".join(runs) if len(runs) <= SHOWN else f"{len(runs)} runs"
    iterations = f"iteration {where.iteration[0]}" if len(where.iteration) == 1 else "each recorded iteration"
    return " · ".join(filter(None, (shown, iterations)))


def default_format(opened: Catalog, where: Filter, as_used: bool = False) -> str:
    """The format that is shown where none is chosen: that of the run in question, or for a run that rounds nothing the
    scored format with the fewest bits per value. "" where nothing is scored. as_used: of a run that rounds any operand,
    USED, which alone shows all that the run rounded."""
    within = scoped(opened, where, scored=True)
    if as_used and opened.kept(("formats used", within), lambda: opened.formats_used(within)):
        return USED
    scored = first_formats(opened, where) or first_formats(opened)
    formats = {spec for spec in _formats_of(opened, within) if spec in scored}
    return next((spec for spec in scored if spec in formats), next(iter(scored), ""))


def _formats_of(opened: Catalog, where: Filter) -> list[str]:
    return [str(spec) for spec in opened.distinct(("format",), where)["format"].dropna()]
