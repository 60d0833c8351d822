"""Quantities of two policies, against torch and scipy on padded batches, and against exact divergences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from binade.data.compare.parity import MEASURES, Policies, joined, quantities

SHAPE = (5, 40)


def batch(seed: int = 0, spread: float = 0.1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rollout, training, mask), each [sequences, tokens]; the padding is NaN, sequences have 1 to 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    training = -torch.rand(SHAPE, generator=generator, dtype=torch.float64) * 5 - spread * 8
    rollout = training + spread * torch.randn(SHAPE, generator=generator, dtype=torch.float64).clamp(-8, 8)
    mask = torch.arange(SHAPE[1])[None] < torch.tensor([1, 12, 40, 25, 7])[:, None]
    mask[2, 5:9] = False  # the output of a tool
    return rollout.where(mask, torch.nan), training.where(mask, -torch.inf), mask


def policies(rollout, training, mask) -> Policies:
    return Policies.of(rollout, training, mask, np.arange(SHAPE[0])[:, None].repeat(SHAPE[1], 1))


def by_name(pair: Policies) -> dict:
    return {row.measure.name: row for row in quantities(pair)}


def token_values(rollout: torch.Tensor, training: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each token, in torch. The comments name what computes the same, at the commits that data/compare/parity.py
    names."""
    d = training - rollout
    safe = d.clamp(-20, 20)  # verl SAFETY_BOUND
    middle = torch.log((training.exp() + rollout.exp()) / 2)
    toward = [(each - middle).exp() - 1 - (each - middle) for each in (training, rollout)]
    return {
        "k1": rollout - training,  # verl rollout_corr_helper.compute_offpolicy_metrics: kl
        "k2": d.square() / 2,  # NeMo-RL algorithms/utils.calculate_kl: k2
        "k3": d.exp() - 1 - d,  # the same: k3; prime-rl loss.compute_importance_ratio_and_mismatch_kl
        "k3_reversed": (-d).exp() - 1 + d,  # NeMo-RL loss_functions.ClippedPGLossFn: policy_kl_error
        "js": (toward[0] + toward[1]) / 2,  # the same: js_divergence_error
        "abs_logprob": d.abs(),  # slime megatron_utils/loss.policy_loss_function: train_rollout_logprob_abs_diff
        "abs_prob": (training.exp() - rollout.exp()).abs(),  # verl debug/metrics.calculate_debug_metrics
        "multiplicative": d.abs().exp(),  # NeMo-RL ClippedPGLossFn: token_mult_prob_error
        "ratio": d.exp(),  # the same: sampling_importance_ratio
        "truncated_ratio": safe.exp().clamp(max=2),  # verl compute_rollout_correction_weights: token
        "chi2_token": safe.exp().square() - 1,  # verl compute_offpolicy_metrics: chi2_token
    }


@pytest.mark.parametrize("spread", [1e-3, 0.1, 3.0])
def test_tokens_average_in_both_ways(spread: float):
    rollout, training, mask = batch(spread=spread)
    found = by_name(policies(rollout, training, mask))
    for name, values in token_values(rollout, training).items():
        within = torch.stack([row[kept].mean() for row, kept in zip(values, mask, strict=True)])
        expected = [values[mask].mean(), within.mean(), np.median(values[mask]), np.median(within)]
        row = found[name]
        got = [row.over_tokens, row.over_sequences, row.median_of_tokens, row.median_of_sequences]
        assert got == pytest.approx([float(each) for each in expected], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("spread", [1e-3, 0.1, 3.0])
def test_sequences(spread: float):
    """verl rollout_corr_helper.compute_offpolicy_metrics."""
    rollout, training, mask = batch(1, spread)
    found = by_name(policies(rollout, training, mask))
    l_t, l_r = (
        torch.stack([row[kept].mean() for row, kept in zip(each, mask, strict=True)]) for each in (training, rollout)
    )
    total = torch.where(mask, training - rollout, 0).sum(1)
    expected = {
        "chi2_sequence": (2 * total.clamp(-20, 20)).exp() - 1,
        "training_perplexity": (-l_t).exp(),
        "rollout_perplexity": (-l_r).exp(),
        "perplexity_ratio": (l_r - l_t).exp(),
        "log_perplexity": l_r - l_t,
        "abs_log_perplexity": (l_r - l_t).abs(),
    }
    for name, values in expected.items():
        row = found[name]
        assert row.over_sequences == pytest.approx(float(values.mean())), name
        assert row.median_of_sequences == pytest.approx(float(np.median(values))), name
        assert row.over_tokens is row.median_of_tokens is None
    assert found["largest_log_perplexity"].over_sequences == pytest.approx(float((l_r - l_t).max()))
    assert found["smallest_log_perplexity"].over_sequences == pytest.approx(float((l_r - l_t).min()))


def test_all_tokens():
    """verl debug/metrics.calculate_debug_metrics, rollout_corr_helper.compute_is_metrics (C = 2); miles
    math_utils.compute_ess_ratio_contribution."""
    rollout, training, mask = batch(2, 0.8)
    found = by_name(policies(rollout, training, mask))
    p_t, p_r = training[mask].exp(), rollout[mask].exp()
    assert found["pearson"].over_tokens == pytest.approx(stats.pearsonr(p_t, p_r).statistic)
    assert found["deviation_prob"].over_tokens == pytest.approx(float(torch.std((p_t - p_r).abs())))
    assert found["largest_prob"].over_tokens == pytest.approx(float((p_t - p_r).abs().max()))
    assert found["largest_logprob"].over_tokens == pytest.approx(float((training - rollout)[mask].abs().max()))
    w = (training - rollout).exp()
    for name, weights in (("sample_size", w), ("truncated_sample_size", w.clamp(max=2))):
        every = weights[mask] / weights[mask].mean()
        assert found[name].over_tokens == pytest.approx(float(1 / every.square().mean()))
        shares = [
            float(row[kept].sum() ** 2 / (kept.sum() * row[kept].square().sum()))
            for row, kept in zip(weights, mask, strict=True)
        ]
        assert found[name].over_sequences == pytest.approx(np.mean(shares))


def test_estimates_are_divergences_where_tokens_follow_the_rollout_policy():
    """Each token of a vocabulary occurs as often as the rollout policy samples it: means are exact expectations."""
    counts = np.array([1, 2, 5, 12, 30, 50])
    p_r, p_t = counts / counts.sum(), special.softmax(np.log(counts) + np.array([0.5, -0.3, 0.2, 0.1, -0.2, 0.0]))
    tokens = np.repeat(np.arange(len(counts)), counts)
    rows = by_name(Policies.of(np.log(p_r[tokens]), np.log(p_t[tokens]), np.ones(100), np.zeros(100)))
    kl = special.rel_entr(p_r, p_t).sum()
    assert rows["k1"].over_tokens == pytest.approx(kl) == rows["k3"].over_tokens
    assert rows["ratio"].over_tokens == pytest.approx(1)
    assert rows["chi2_token"].over_tokens == pytest.approx(((p_t - p_r) ** 2 / p_r).sum())
    assert rows["sample_size"].over_tokens == pytest.approx(1 / (1 + rows["chi2_token"].over_tokens))


def test_equal_policies_have_no_gap():
    rollout, _, mask = batch()
    rows = by_name(policies(rollout, rollout, mask))
    one = {"multiplicative", "ratio", "truncated_ratio", "perplexity_ratio", "sample_size", "truncated_sample_size"}
    for name, row in rows.items():
        if name in one or name == "pearson":
            assert (row.over_sequences if row.over_tokens is None else row.over_tokens) == pytest.approx(1)
        elif name not in ("training_perplexity", "rollout_perplexity"):
            assert {row.over_tokens, row.over_sequences} <= {0, None}, name


def test_truncated_sampling_shifts_every_log_probability_by_the_mass_that_it_keeps():
    """vLLM's processed log-probabilities are those of the kept tokens alone."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    full = logits.log_softmax(-1)
    kept = full.where(full >= full.topk(10).values[:, -1:], -torch.inf)
    token = kept.argmax(-1, keepdim=True)
    rollout = kept.log_softmax(-1).gather(1, token)[:, 0]
    rows = by_name(Policies.of(rollout, full.gather(1, token)[:, 0], torch.ones(200), torch.zeros(200)))
    assert rows["k1"].over_tokens == pytest.approx(-float(kept.logsumexp(-1).mean()))


def test_parts_are_joined_without_mixing_their_sequences():
    parts = [policies(*batch(seed)) for seed in (0, 1)]
    whole = joined(parts)
    assert whole.sequences == 10
    first, second, both = map(by_name, (*parts, whole))
    for name, row in both.items():
        if row.over_sequences is not None and not name.startswith(("largest", "smallest")):
            assert row.over_sequences == pytest.approx((first[name].over_sequences + second[name].over_sequences) / 2)


def test_tokens_without_a_finite_log_probability_are_left_out_and_counted():
    rollout, training, mask = batch()
    training[1, 3], rollout[3, 0] = -torch.inf, torch.nan
    pair = policies(rollout, training, mask)
    assert pair.left_out == 2
    mask[1, 3] = mask[3, 0] = False
    assert quantities(pair) == quantities(policies(rollout, training, mask))


def test_one_rare_token_dominates_the_reversed_estimate():
    """The example of NeMo-RL's docs/guides/grpo.md, at 7ea279a: about 9 and 22,015."""
    rows = by_name(Policies.of([-5.0], [-15.0], [1], [0]))
    assert rows["k3"].over_tokens == pytest.approx(9, abs=1e-3)
    assert rows["k3_reversed"].over_tokens == pytest.approx(22_015, abs=1)


def test_an_overflow_is_infinite():
    rows = by_name(Policies.of([-900.0, -1.0], [-0.1, -1.0], [1, 1], [0, 0]))
    assert rows["k3"].over_tokens == np.inf and np.isfinite(rows["chi2_token"].over_tokens)
    assert np.isfinite(rows["sample_size"].over_tokens)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (([-1.0], [-1.0, -2.0], [1, 1], [0, 0]), "shapes"),
        (([-1.0, -2.0], [-1.0, -2.0], [1, 2], [0, 0]), "mask contains 2"),
        (([-1.0, -2.0], [-1.0, -2.0], [0, 0], [0, 0]), "no token counts"),
        (([-1.0, 0.3], [-1.0, -2.0], [1, 1], [0, 0]), "rollout log-probability is 0.3"),
    ],
)
def test_wrong_input(given, named):
    with pytest.raises(ValueError, match=named):
        Policies.of(*given)


def test_every_quantity_has_a_measure():
    names = [row.measure.name for row in quantities(Policies.of([-1.0], [-1.5], [1], [0]))]
    assert list(MEASURES) == names
