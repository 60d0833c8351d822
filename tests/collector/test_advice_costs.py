"""The advice from effects made by hand: against every choice there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from binade.collector.advice.advice import ADVISED, Advice, AdviceRequest, Operands, advise, rounding_of
from binade.collector.errors import AdviceError
from binade.collector.models.site import Site
from binade.data.run.effects import Measured
from binade.data.run.experiment import ALL_PRODUCTS, EffectGroup
from binade.quant.specs import OPERAND_FIELDS, Spec
from tests.collector.effect_rows import effect, random_effects

SPECS = ("mxfp4", "nvfp4", "mxfp8")
PLACES = [(layer, module) for layer in (1, 2, 3) for module in ("fc1", "fc2")]
SITES = [EffectGroup("linear", *place) for place in PLACES]
SEQUENCES = 6
OPERANDS = [Operands("linear", layer, module, 64 * layer, 32) for layer, module in PLACES]
SIZES = {group: operands.a + operands.b for group, operands in zip(SITES, OPERANDS, strict=True)}


def advice_of(effects: Sequence[Measured], request: AdviceRequest, operands: Sequence[Operands] = OPERANDS) -> Advice:
    return advise("run", operands, effects, request)


def width(name: str) -> float:
    return 16 if name == "bf16" else Spec.of(name).bits_per_value


def test_the_choice_is_the_best_of_the_measured_ones():
    effects = random_effects(SITES, SPECS, SEQUENCES)
    advice = advice_of(effects, AdviceRequest(6.0))
    assert advice.unmeasured == () and advice.sequences == SEQUENCES
    by_place = {(str(each.group), each.format): each for each in effects}
    best = math.inf
    for formats in itertools.product((*SPECS, "bf16"), repeat=len(SITES)):
        bits = sum(SIZES[group] * width(fmt) for group, fmt in zip(SITES, formats, strict=True))
        if bits <= 6 * sum(SIZES.values()):
            own = [by_place.get((str(group), fmt)) for group, fmt in zip(SITES, formats, strict=True)]
            best = min(best, sum(each.divergences[0] for each in own if each))
    assert advice.chosen["cost"].sum() == pytest.approx(best, rel=1e-3)
    assert advice.bits <= 6 + 1e-3 and advice.chosen["group"].is_unique and len(advice.chosen) == len(SITES)
    taken = [by_place[row.group, row.format] for row in advice.chosen.itertuples() if row.format != "bf16"]
    together = np.sum([each.changes for each in taken], axis=0)
    low, high = stats.t.interval(0.95, SEQUENCES - 1, together.mean(), stats.sem(together))
    found = advice.estimate.value, advice.estimate.low, advice.estimate.high
    assert found == pytest.approx((together.mean(), low, high))
    assert "6 groups of forward operands in mxfp4, nvfp4, mxfp8, one at a time, on 6 sequences" in advice.doubts[0]


def test_groups_that_were_not_measured_stay_in_bf16_and_are_named():
    effects = random_effects(SITES[:4], SPECS, SEQUENCES)
    alike = [operands._replace(a=64) for operands in OPERANDS]
    advice = advice_of(effects, AdviceRequest(9.0), alike)
    assert advice.unmeasured == tuple(SITES[4:])
    assert "Kept in bf16, because they were not measured: layer3 fc1 linear and layer3 fc2 linear." in advice.doubts
    assert set(advice.chosen.loc[advice.chosen["layer"] == 3, "format"]) == {"bf16"}
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == {"bf16"}
    with pytest.raises(AdviceError, match=r"budget of 5 bits .* takes at least 8.167 bits"):  # (4 · 4.25 + 2 · 16) / 6
        advice_of(effects, AdviceRequest(5.0), alike)


def test_a_format_that_was_not_measured_is_not_chosen():
    effects = random_effects(SITES, ["nvfp4"], SEQUENCES)
    advice = advice_of(effects, AdviceRequest(10.0))
    assert set(advice.chosen["format"]) <= {"nvfp4", "bf16"}
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == {"nvfp4", "bf16"}
    with pytest.raises(AdviceError, match="not measured: mxfp8; choose from nvfp4"):
        advice_of(effects, AdviceRequest(10.0, formats=("mxfp8",)))


@pytest.mark.parametrize("by", ["layer", "module", "model"])
def test_a_group_is_measured_as_it_is_chosen(by: str):
    groups = {
        "layer": [EffectGroup("linear", layer) for layer in (1, 2, 3)],
        "module": [EffectGroup("linear", None, module) for module in ("fc1", "fc2")],
        "model": [EffectGroup("linear")],
    }[by]
    effects = [effect(spec, group, [0.1 / width(spec)] * 3) for group in groups for spec in SPECS]
    advice = advice_of(effects, AdviceRequest(4.25, by=by))
    assert advice.unmeasured == () and set(advice.chosen["format"]) == {"mxfp4"}
    assert advice.estimate.value == pytest.approx(len(groups) * 0.1 / 4.25)
    assert {advice.recipe("x").linear_of(Site(*place)).rounded_to("forward_a") for place in PLACES} == {"mxfp4"}
    with pytest.raises(AdviceError, match="no group of products by site was measured in run"):
        advice_of(effects, AdviceRequest(6.0))


def test_a_change_below_zero_costs_nothing_where_no_divergence_is_known():
    advice = advice_of([effect("mxfp4", EffectGroup("linear"), [-0.2, -0.1])], AdviceRequest(6.0, by="model"))
    assert advice.chosen["cost"].sum() == 0 and advice.estimate.value == pytest.approx(-0.15)
    assert "the sum of their changes of the loss" in advice.doubts[0]


def test_one_sequence_advises_nothing_and_a_mix_must_be_better():
    once = [effect(spec, site, [0.1 / width(spec)]) for site in SITES for spec in SPECS]
    said = advice_of(once, AdviceRequest(6.0)).sentence
    assert said.startswith("One sequence cannot tell formats apart: ") and "not advised" in said
    signs = [1.0, -1.0, 1.0, -1.0]
    alike = [effect(spec, site, [s * (at + 1) for s in signs], 1 / width(spec))
             for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip
    said = advice_of(alike, AdviceRequest(6.0)).sentence
    assert said.startswith("Advised: ") and " alone, " in said and "which is not less (difference " in said


def test_a_group_takes_the_sequences_that_all_groups_have():
    effects = random_effects(SITES, SPECS, SEQUENCES)
    short = [shortened(each, 4) if each.group == SITES[0] else each for each in effects]
    advice = advice_of(short, AdviceRequest(6.0))
    assert advice.sequences == 4 and all(len(changes) == 4 for changes in advice.options["by_sequence"])
    of = {(str(each.group), each.format): np.mean(each.changes[:4]) for each in effects}
    rounded = advice.options[advice.options["format"] != "bf16"]
    assert rounded["change"].tolist() == pytest.approx([of[row.group, row.format] for row in rounded.itertuples()])


def shortened(of: Measured, sequences: int) -> Measured:
    return of._replace(changes=of.changes[:sequences], divergences=of.divergences[:sequences])


TILE = "nvfp4(block=16x16)"


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (AdviceRequest(9), {"mxfp4", "nvfp4", "mxfp8", TILE, "bf16"}),
        (AdviceRequest(9, formats=("nvfp4",)), {"nvfp4", "bf16"}),
        (AdviceRequest(9, most_bf16=2), {"mxfp4", "nvfp4", "mxfp8", TILE}),
        (AdviceRequest(16, most_bf16=3), {"mxfp4", "nvfp4", "mxfp8", TILE, "bf16"}),
    ],
)
def test_a_single_format_is_one_that_the_request_allows(request_: AdviceRequest, allowed: set[str]):
    advice = advice_of(random_effects(SITES, (*SPECS, TILE), SEQUENCES), request_)
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == allowed


def test_a_single_format_above_the_limit_of_the_cost_is_not_advised():
    """In mxfp4 all groups together cost 0.12; the changes of the loss hardly differ from sequence to sequence."""
    effects = [effect(spec, site, [-0.1, 0.1, 0.1, -0.1], 0.02 * (spec == "mxfp4")) for site in SITES for spec in SPECS]
    tight = advice_of(effects, AdviceRequest(None, 0.11))
    assert tight.uniform == "" and not tight.alone and tight.chosen["cost"].sum() <= 0.11
    assert "no single format within the limits takes as few bits" in tight.sentence
    assert " measured cost of 0.11: effects of" in tight.recipe("mine").about.title
    loose = advice_of(effects, AdviceRequest(None, 0.13))
    assert loose.alone and loose.uniform == "mxfp4"


def test_bytes_are_bits_of_all_forward_values():
    effects = random_effects(SITES, SPECS, SEQUENCES)
    in_bytes = advice_of(effects, AdviceRequest(None, memory=sum(SIZES.values()) * 6 // 8))
    assert in_bytes.chosen["format"].tolist() == advice_of(effects, AdviceRequest(6.0)).chosen["format"].tolist()


def mixed(alike: bool = False) -> list[Measured]:
    sizes = {"mxfp4": 0.3, "nvfp4": 0.2, "mxfp8": 0.01}
    signs = [1.0, -1.0, 1.0, -1.0]
    if alike:
        return [effect(spec, site, [s * (at + 1) for s in signs], sizes[spec] * (at + 1))
                for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip
    return [effect(spec, site, [sizes[spec] * (at + 1) * x for x in (1, 1.1, 0.9, 1)], sizes[spec] * (at + 1))
            for at, site in enumerate(SITES) for spec in SPECS]  # fmt: skip


@pytest.mark.parametrize("alike", [False, True])
def test_what_is_advised_is_what_the_recipe_has(alike: bool):
    """A mix that was measured to lose less, or the single format; the backward operands have the same formats."""
    advice = advice_of(mixed(alike), AdviceRequest(6.0))
    recipe = advice.recipe("mine")
    assert advice.alone == alike == ("Advised: nvfp4 alone, " in advice.sentence)
    assert set(advice.advised["format"]) == ({"nvfp4"} if alike else set(advice.chosen["format"]))
    assert alike or len(set(advice.chosen["format"])) > 1
    for row, place in zip(advice.advised.itertuples(), PLACES, strict=True):
        assert {recipe.linear_of(Site(*place)).quant_type_of(field) for field in OPERAND_FIELDS} == {row.format}
    assert ("nvfp4 alone" in recipe.about.title) == alike


def test_what_is_saved_is_in_comparison_with_the_narrowest_format_of_the_request():
    effects = mixed()
    advice = advice_of(effects, AdviceRequest(7.0, formats=("nvfp4", "mxfp8")))
    change = {(str(each.group), each.format): np.mean(each.changes) for each in effects}
    assert len(advice.deciding) and not advice.alone
    for row in advice.deciding.itertuples():
        other = change.get((row.group, row.format), 0.0)
        assert row.saved == pytest.approx(change[row.group, "nvfp4"] - other)


def test_the_whole_is_the_evaluation_of_what_is_advised_and_of_nothing_else():
    effects, request = mixed(), AdviceRequest(6.0)
    before = advice_of(effects, request)
    assert before.whole is None and any("was not evaluated whole" in doubt for doubt in before.doubts)
    changes = [0.5, 0.7, 0.6, 0.4]
    whole = effect("advised", ALL_PRODUCTS, changes)
    other = whole._replace(key=replace(whole.key, recipe_sha256="0" * 64))
    assert advice_of([*effects, other], request).whole is None
    same = whole._replace(key=replace(whole.key, recipe_sha256=rounding_of(before.recipe(ADVISED))))
    advice = advice_of([*effects, other, same], request)
    low, high = stats.t.interval(0.95, 3, np.mean(changes), stats.sem(changes))
    assert advice.whole and (advice.whole.value, advice.whole.low, advice.whole.high) == pytest.approx(
        (0.55, low, high)
    )
    assert "Evaluated whole, the advised recipe changes the loss by +0.55 nats (95% interval " in advice.sentence
    assert not any("was not evaluated whole" in doubt for doubt in advice.doubts)


def test_recipes_single_operands_and_other_bases_are_no_formats_to_choose():
    linear = [effect("linear_mxfp4", site, [0.1, 0.2]) for site in SITES]
    part = [effect("mxfp4", site, [0.1, 0.2]) for site in SITES]
    operand = [each._replace(key=replace(each.key, operand="weight", is_whole=False)) for each in part]
    on_other = [each._replace(key=replace(each.key, base=replace(each.key, base=None))) for each in part]
    for effects in (linear, operand, on_other):
        with pytest.raises(AdviceError, match="no group of products by site was measured"):
            advice_of(effects, AdviceRequest(6.0))
