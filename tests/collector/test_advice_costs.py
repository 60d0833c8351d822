"""The advisor's costs, from operands and effects made by hand: against every choice there is."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from binade.collector.advice.advice import AdviceRequest, advise
from binade.collector.advice.costs import AdviceError, Costs, Operands, bits_of, with_effects
from binade.collector.models.site import Site
from binade.data.effects import EffectGroup
from tests.collector.effect_rows import effect, random_effects

SPECS = ("mxfp4", "nvfp4", "mxfp8")
PLACES = [(layer, module) for layer in (1, 2, 3) for module in ("fc1", "fc2")]
SITES = [EffectGroup("linear", *place) for place in PLACES]
SEQUENCES = 6
FIELDS = {"forward_a": "input", "forward_b": "weight", "dgrad_grad": "grad_output", "dgrad_b": "weight"}


def operands(fields: tuple[str, ...] = ("forward_a", "forward_b")) -> Operands:
    rows: list[dict[str, Any]] = [
        {"part": "linear", "layer_index": layer, "module": module, "gemm": field.partition("_")[0], "field": field,
         "tensor_name": FIELDS[field], "spec": spec, "values": 64.0, "noise": 1 / bits_of(spec),
         "tensor_id": f"{layer}{module}{field}"}
        for (layer, module), field, spec in itertools.product(PLACES, fields, SPECS)
    ]  # fmt: skip
    return Operands(pd.DataFrame(rows), ("run",))


def measured(effects: pd.DataFrame, by: str = "site", of: Operands | None = None) -> Costs:
    costs = with_effects(of or operands(), effects, by)
    assert costs
    return costs


def test_the_choice_is_the_best_of_the_measured_ones():
    effects = random_effects(SITES, SPECS, SEQUENCES)
    used = measured(effects)
    assert used.unmeasured == () and used.sequences == SEQUENCES and used.specs == list(SPECS)
    advice = advise(used, AdviceRequest(6.0))
    sizes = effects.set_index(["layer_index", "module", "format"])["divergence"].to_dict()
    best = min(
        sum(sizes.get((*place, spec), 0.0) for place, spec in zip(PLACES, specs, strict=True))
        for specs in itertools.product((*SPECS, "bf16"), repeat=len(PLACES))
        if np.mean([16 if spec == "bf16" else bits_of(spec) for spec in specs]) <= 6.0
    )
    assert advice.chosen["cost"].sum() == pytest.approx(best, rel=1e-3)
    chosen = advice.chosen.groupby(["layer_index", "module"])["spec"].agg(["nunique", "first"])
    assert (chosen["nunique"] == 1).all()  # both operands of a GEMM, as they were measured
    by_place = {(row.layer_index, row.module, row.format): row for row in effects.itertuples()}
    taken = [by_place[(*place, row["first"])] for place, row in chosen.iterrows() if row["first"] != "bf16"]
    assert advice.change == pytest.approx(sum(row.change for row in taken))
    saved = {f"linear.{row.layer_index}.{row.module}.forward": by_place[row.layer_index, row.module, "mxfp4"].change
             - row.change for row in taken if row.format != "mxfp4"}  # fmt: skip
    listed = advice.forward.groupby("group")["saved"].sum()
    assert {place: listed[place] for place in saved} == pytest.approx(saved)
    together = np.sum([row.change_by_sequence for row in taken], axis=0)
    assert advice.error == pytest.approx(stats.sem(together))
    low, high = stats.t.interval(0.95, SEQUENCES - 1, together.mean(), stats.sem(together))
    assert (advice.estimate.low, advice.estimate.high) == pytest.approx((low, high))
    assert "6 groups of forward operands in mxfp4, nvfp4, mxfp8, one at a time, on 6 sequences" in advice.doubts[0]


def test_groups_that_were_not_measured_stay_in_bf16_and_are_named():
    used = measured(random_effects(SITES[:4], SPECS, SEQUENCES))
    assert used.unmeasured == tuple(SITES[4:])
    advice = advise(used, AdviceRequest(9.0))
    assert "Kept in bf16, because they were not measured: layer3 fc1 linear, layer3 fc2 linear." in advice.doubts
    assert set(advice.chosen.loc[advice.chosen["layer_index"] == 3, "spec"]) == {"bf16"}
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == {"bf16"}
    with pytest.raises(AdviceError, match=r"budget of 5 bits .* takes at least 8.167 bits"):  # (4 · 4.25 + 2 · 16) / 6
        advise(used, AdviceRequest(5.0))


def test_a_format_that_was_not_measured_in_a_group_is_not_chosen_there():
    rows = random_effects(SITES, SPECS, SEQUENCES)
    advice = advise(measured(rows[rows["format"] == "nvfp4"]), AdviceRequest(10.0))
    assert set(advice.chosen["spec"]) <= {"nvfp4", "bf16"}
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == {"nvfp4", "bf16"}
    with pytest.raises(AdviceError, match="not measured: mxfp8; choose from nvfp4"):
        advise(measured(rows[rows["format"] == "nvfp4"]), AdviceRequest(10.0, specs=("mxfp8",)))


@pytest.mark.parametrize("by", ["layer", "module", "model"])
def test_a_group_is_measured_as_it_is_chosen(by: str):
    groups = {
        "layer": [EffectGroup("linear", layer) for layer in (1, 2, 3)],
        "module": [EffectGroup("linear", None, module) for module in ("fc1", "fc2")],
        "model": [EffectGroup("linear")],
    }[by]
    rows = [effect(spec, group, [0.1 / bits_of(spec)] * 3) for group in groups for spec in SPECS]
    used = measured(pd.DataFrame(rows), by)
    assert used.unmeasured == ()
    table = used.table[used.table["spec"] == "mxfp4"]
    assert table["change"].sum() == pytest.approx(len(groups) * 0.1 / 4.25)
    assert with_effects(operands(), pd.DataFrame(rows), "site") is None


def test_a_change_below_zero_costs_nothing_where_no_divergence_is_known():
    used = measured(pd.DataFrame([effect("mxfp4", EffectGroup("linear"), [-0.2, -0.1])]), "model")
    own = used.table[used.table["spec"] == "mxfp4"]
    assert own["cost"].sum() == 0 and own["change"].sum() == pytest.approx(-0.15)


def test_one_sequence_advises_nothing_and_a_mix_must_be_better():
    once = pd.DataFrame([effect(spec, site, [0.1 / bits_of(spec)]) for site in SITES for spec in SPECS])
    said = advise(measured(once), AdviceRequest(6.0)).sentence
    assert said.startswith("One sequence cannot tell formats apart: ") and "not advised" in said
    signs = [1.0, -1.0, 1.0, -1.0]
    alike = [effect(spec, site, [s * (at + 1) for s in signs], 1 / bits_of(spec))
             for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip
    said = advise(measured(pd.DataFrame(alike)), AdviceRequest(6.0)).sentence
    assert said.startswith("Advised: ") and " alone, " in said and "which is not less (difference " in said


TILE = "nvfp4(block=16x16)"


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (AdviceRequest(9), {"mxfp4", "nvfp4", "mxfp8", TILE, "bf16"}),
        (AdviceRequest(9, specs=("nvfp4",)), {"nvfp4", "bf16"}),
        (AdviceRequest(9, tiles=True), {TILE, "bf16"}),
        (AdviceRequest(9, most_bf16=2), {"mxfp4", "nvfp4", "mxfp8", TILE}),
        (AdviceRequest(16, most_bf16=3), {"mxfp4", "nvfp4", "mxfp8", TILE, "bf16"}),
    ],
)
def test_a_single_format_is_one_that_the_request_allows(request_: AdviceRequest, allowed: set[str]):
    used = measured(random_effects(SITES, (*SPECS, TILE), SEQUENCES))
    assert set(advise(used, request_).frontier.query("kind == 'uniform'")["name"]) == allowed


def test_a_single_format_above_the_limit_of_the_cost_is_not_advised():
    """In mxfp4 all groups together cost 0.12; the changes of the loss hardly differ from sequence to sequence."""
    rows = [effect(spec, site, [-0.1, 0.1, 0.1, -0.1], 0.02 * (spec == "mxfp4")) for site in SITES for spec in SPECS]
    tight = advise(measured(pd.DataFrame(rows)), AdviceRequest(None, 0.11))
    assert tight.uniform is None and not tight.alone and tight.forward["cost"].sum() <= 0.11
    assert "no single format within the limits takes as few bits" in tight.sentence
    assert " measured cost of 0.11: effects of" in tight.recipe("mine").about.title
    loose = advise(measured(pd.DataFrame(rows)), AdviceRequest(None, 0.13))
    assert loose.alone and loose.uniform is not None and loose.uniform["name"] == "mxfp4"


def test_what_is_advised_is_what_the_recipe_has():
    """A mix that was measured to lose less, or the single format; backward operands as chosen."""
    of = operands(tuple(FIELDS))
    sizes = {"mxfp4": 0.3, "nvfp4": 0.2, "mxfp8": 0.01}
    signs = [1.0, -1.0, 1.0, -1.0]
    better = [effect(spec, site, [sizes[spec] * (at + 1) * x for x in (1, 1.1, 0.9, 1)], sizes[spec] * (at + 1))
              for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip
    alike = [effect(spec, site, [s * (at + 1) for s in signs], sizes[spec] * (at + 1))
             for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip
    for rows, alone in ((better, False), (alike, True)):
        advice = advise(measured(pd.DataFrame(rows), of=of), AdviceRequest(6.0))
        recipe, wanted = advice.recipe("mine"), advice.backward
        assert advice.alone == alone == ("Advised: nvfp4 alone, " in advice.sentence)
        forward = advice.forward.assign(spec="nvfp4") if alone else advice.forward
        assert alone or forward["spec"].nunique() == 2
        for row in [*forward.itertuples(), *wanted.itertuples()]:
            assert recipe.linear_of(Site(row.layer_index, row.module)).rounded_to(row.field) == row.spec
        assert ("nvfp4 alone" in recipe.about.title) == alone


def test_what_is_saved_is_in_comparison_with_the_narrowest_format_of_the_request():
    of = operands(tuple(FIELDS))
    rows = random_effects(SITES, SPECS, SEQUENCES)
    advice = advise(measured(rows, of=of), AdviceRequest(7.0, specs=("nvfp4", "mxfp8")))
    change = rows.set_index(["layer_index", "module", "format"])["change"].to_dict() | {
        (*place, "bf16"): 0.0 for place in PLACES
    }
    for (layer, module), own in advice.forward.groupby(["layer_index", "module"]):
        expected = change[layer, module, "nvfp4"] - change[layer, module, own["spec"].iloc[0]]
        assert own["saved"].sum() == pytest.approx(expected)
    backward = advice.backward
    noise = backward["spec"].map({"nvfp4": 1 / 4.5, "mxfp8": 1 / 8.25, "bf16": 0.0})
    assert backward["saved"].tolist() == pytest.approx((1 / 4.5 - noise).tolist())
    assert set(backward["spec"]) > {"nvfp4"}


def test_backward_operands_that_were_not_scored_in_the_formats_do_not_forbid_a_limit_of_bf16_layers():
    used = measured(random_effects(SITES, [TILE], SEQUENCES), of=operands(tuple(FIELDS)))
    advice = advise(used, AdviceRequest(9.0, specs=(TILE,), most_bf16=1))
    assert set(advice.backward["spec"]) == {"bf16"}
    assert advice.forward.loc[advice.forward["spec"] == "bf16", "layer_index"].nunique() <= 1


def test_effects_of_one_run_come_before_those_of_others():
    """The error of a sum is known for effects of the same sequences."""
    long = pd.DataFrame([effect("nvfp4", SITES[0], [1.0] * 9, run="long")])
    rows = pd.concat([long, random_effects(SITES, SPECS, SEQUENCES)], ignore_index=True)
    used = measured(rows)
    assert used.sequences == SEQUENCES and "Measured in a:" in used.method
    assert math.isfinite(advise(used, AdviceRequest(6.0)).error)


def test_all_operands_together_are_compared_with_the_sum_of_their_groups():
    groups = random_effects(SITES, ["mxfp4"], SEQUENCES)
    changes = list(np.random.default_rng(1).normal(1, 0.1, SEQUENCES))
    whole = pd.DataFrame([effect("mxfp4", EffectGroup("linear"), changes)])
    (said,) = measured(pd.concat([groups, whole], ignore_index=True)).together
    low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(changes), stats.sem(changes))
    assert f"measured together {np.mean(changes):+.3g} nats (95% interval {low:+.3g} to {high:+.3g}, " in said
    assert f"the sum of their groups {groups['change'].sum():+.3g} nats" in said


def test_backward_operands_have_the_least_noise_that_was_scored():
    """Formats in which they were not scored are not chosen for them, and bits beyond the budget are said."""
    of = operands(tuple(FIELDS))
    rows = random_effects(SITES, SPECS, SEQUENCES)
    chosen = advise(measured(rows, of=of), AdviceRequest(8.25)).backward
    assert set(chosen["spec"]) == {"mxfp8"} and chosen["change"].isna().all()
    backward = of.table["gemm"] != "forward"
    wide = Operands(of.table[~backward | (of.table["spec"] == "mxfp8")], of.runs)
    advice = advise(measured(rows, of=wide), AdviceRequest(5.0))
    assert set(advice.backward["spec"]) == {"mxfp8"}
    assert (
        "Backward operands take 8.25 bits: no narrower format that they were scored in is allowed by the choice."
        in (advice.doubts)
    )


def test_recipes_are_no_formats_to_choose():
    rows = [effect("linear_mxfp4", site, [0.1, 0.2]) for site in SITES]
    assert with_effects(operands(), pd.DataFrame(rows), "site") is None
