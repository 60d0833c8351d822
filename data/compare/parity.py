"""Parity of two policies: how far their log-probabilities of the same tokens differ.

A rollout engine samples tokens and a trainer scores them again. For each token, l_R and l_T are its log-probabilities
under the rollout policy and the training policy, d = l_T − l_R and ρ = e^d. In exact arithmetic d is 0. Estimators of
divergences hold for tokens that were sampled from the rollout policy.

    pair = Policies.of(rollout, training, mask, sequence)
    for row in quantities(pair):
        print(row.measure.title, row.over_tokens, row.over_sequences)

Tools average in two ways: verl and NeMo-RL over all tokens, slime and miles within each sequence, then over sequences.
Both are computed. Formulas were read in verl 1dda039, NeMo-RL 7ea279a, slime 624b824, miles 31f1ca9 and prime-rl
559b447; docs/cost.md lists their names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from binade.data.compare.evidence import Measure

Floats = NDArray[np.float64]
LARGEST_LOG_RATIO = 20.0  # |d| in χ² and importance weights, as SAFETY_BOUND in verl
LARGEST_WEIGHT = 2.0  # of truncated importance weights, the default of verl and slime
ROUNDING = 1e-3  # a log-probability may exceed 0 by so much


@dataclass(frozen=True, eq=False)
class Policies:
    """The log-probabilities of the tokens that count, in nats.

    rollout, training  [tokens] float64, finite
    sequence           [tokens] from 0 to sequences − 1
    sequences          how many have a token that counts
    left_out           how many more tokens count but have a log-probability that is NaN or infinite
    """

    rollout: Floats
    training: Floats
    sequence: NDArray[np.intp]
    sequences: int
    left_out: int = 0

    @staticmethod
    def of(rollout: ArrayLike, training: ArrayLike, mask: ArrayLike, sequence: ArrayLike) -> Policies:
        """All arguments have the same shape, such as [tokens] or [sequences, tokens].

        rollout, training  log-probabilities in nats; where the mask is 0 they may be anything
        mask               1 for tokens that count, 0 for padding, prompts and the output of tools
        sequence           a number that tells the sequences apart

        Raises ValueError for other shapes, another mask, log-probabilities above 0, or if no token counts."""
        l_r, l_t = (np.asarray(logprobs, np.float64) for logprobs in (rollout, training))
        counts, ids = np.asarray(mask), np.asarray(sequence)
        if len({l_r.shape, l_t.shape, counts.shape, ids.shape}) > 1:
            shapes = f"rollout {l_r.shape}, training {l_t.shape}, mask {counts.shape}, sequence {ids.shape}"
            raise ValueError(f"the shapes differ: {shapes}; expected one shape")
        if not np.isin(counts, (0, 1)).all():
            raise ValueError(f"the mask contains {counts[~np.isin(counts, (0, 1))][0]}: expected 0 and 1")
        counts = counts.astype(bool)
        finite = counts & np.isfinite(l_r) & np.isfinite(l_t)
        if not finite.any():
            raise ValueError("no token counts: the mask is 0, or no log-probability is finite")
        for name, logprobs in (("rollout", l_r), ("training", l_t)):
            if (above := logprobs[finite].max()) > ROUNDING:
                raise ValueError(f"a {name} log-probability is {above:.4g}: expected at most 0, in nats")
        known, index = np.unique(ids[finite], return_inverse=True)
        return Policies(l_r[finite], l_t[finite], index.reshape(-1), len(known), int((counts & ~finite).sum()))

    @staticmethod
    def by_sequence(rollout: Sequence[Floats], training: Sequence[Floats]) -> Policies:
        """Two policies from the log-probabilities of the tokens of each sequence. Raises ValueError as `of`."""
        sequence = np.repeat(np.arange(len(rollout)), [len(x) for x in rollout])
        return Policies.of(np.concatenate(rollout), np.concatenate(training), np.ones(len(sequence)), sequence)

    @property
    def d(self) -> Floats:
        """log π_T − log π_R, [tokens], in nats."""
        return self.training - self.rollout

    @property
    def lengths(self) -> NDArray[np.intp]:
        """How many tokens of each sequence count, [sequences]."""
        return np.bincount(self.sequence, minlength=self.sequences)

    def sums(self, values: Floats) -> Floats:
        """The sums within sequences of values [tokens]; [sequences]."""
        return np.bincount(self.sequence, values, self.sequences).astype(np.float64)

    def means(self, values: Floats) -> Floats:
        """The means within sequences of values [tokens]; [sequences]."""
        means: Floats = self.sums(values) / self.lengths
        return means


def joined(parts: Sequence[Policies]) -> Policies:
    """The tokens of all parts; sequences of different parts are different sequences."""
    starts = np.cumsum([0, *(part.sequences for part in parts)])
    return Policies(
        np.concatenate([part.rollout for part in parts]),
        np.concatenate([part.training for part in parts]),
        np.concatenate([part.sequence + start for part, start in zip(parts, starts[:-1], strict=True)]),
        int(starts[-1]),
        sum(part.left_out for part in parts),
    )


# Of each token: [tokens]


def k1(pair: Policies) -> Floats:
    """−d = l_R − l_T, in nats. Its mean estimates KL(R ‖ T), and can be negative. verl `compute_offpolicy_metrics`
    (kl); slime `add_ppl_metrics` (kl); Schulman, joschu.net/blog/kl-approx.html."""
    return -pair.d


def k2(pair: Policies) -> Floats:
    """d²/2, in nats². verl `compute_rollout_rejection_mask` (token_k2); NeMo-RL `calculate_kl` (k2); Schulman."""
    return pair.d**2 / 2


def k3(pair: Policies) -> Floats:
    """ρ − 1 − d, in nats, at least 0. Its mean estimates KL(R ‖ T). verl `compute_offpolicy_metrics` (k3_kl); NeMo-RL
    `ClippedPGLossFn` (gen_kl_error); prime-rl `compute_importance_ratio_and_mismatch_kl` (mismatch_kl)."""
    values: Floats = np.expm1(pair.d) - pair.d
    return values


def k3_reversed(pair: Policies) -> Floats:
    """e^(−d) − 1 + d, in nats: estimates KL(T ‖ R) only for tokens sampled from the training policy; one token that is
    rare in training can dominate its mean. NeMo-RL `ClippedPGLossFn` (policy_kl_error)."""
    values: Floats = np.expm1(-pair.d) + pair.d
    return values


def js(pair: Policies) -> Floats:
    """½ (r_T − 1 − log r_T) + ½ (r_R − 1 − log r_R), in nats, where r_P = p_P / p_M and p_M = (p_T + p_R)/2. NeMo-RL
    `ClippedPGLossFn` (js_divergence_error)."""
    mixture = np.logaddexp(pair.training, pair.rollout) - np.log(2)
    above_t, above_r = pair.training - mixture, pair.rollout - mixture
    values: Floats = (np.expm1(above_t) - above_t + np.expm1(above_r) - above_r) / 2
    return values


def abs_logprob(pair: Policies) -> Floats:
    """|d|, in nats. slime `policy_loss_function` and miles (train_rollout_logprob_abs_diff)."""
    return np.abs(pair.d)


def abs_prob(pair: Policies) -> Floats:
    """|p_T − p_R|, from 0 to 1. verl `calculate_debug_metrics` (rollout_probs_diff_mean, _max, _std)."""
    values: Floats = np.abs(np.exp(pair.training) - np.exp(pair.rollout))
    return values


def multiplicative(pair: Policies) -> Floats:
    """e^|d|, at least 1. NeMo-RL `ClippedPGLossFn` (token_mult_prob_error)."""
    return np.exp(np.abs(pair.d))


def ratio(pair: Policies) -> Floats:
    """ρ = e^d, the importance weight. NeMo-RL `ClippedPGLossFn` (sampling_importance_ratio); prime-rl
    (importance_ratio)."""
    return np.exp(pair.d)


def weights(pair: Policies) -> Floats:
    """ρ with |d| at most 20. verl `compute_rollout_correction_weights` (token)."""
    return _clamped_ratio(pair.d)


def truncated_ratio(pair: Policies) -> Floats:
    """min(ρ, 2), with |d| at most 20. verl `compute_rollout_correction_weights` for tokens (rollout_is_mean); slime
    `vanilla_tis_function` with its default limit."""
    return np.minimum(_clamped_ratio(pair.d), LARGEST_WEIGHT)


def chi2_token(pair: Policies) -> Floats:
    """ρ² − 1, with |d| at most 20. Its mean estimates χ²(T ‖ R). verl `compute_offpolicy_metrics` (chi2_token), over
    tokens; slime `add_ppl_metrics` (chi2_token), within sequences first."""
    return _clamped_ratio(pair.d) ** 2 - 1


# Of each sequence: [sequences]


def chi2_sequence(pair: Policies) -> Floats:
    """e^(2Σd) − 1 of the sum over a sequence's tokens, with |Σd| at most 20. verl `compute_offpolicy_metrics`
    (chi2_seq)."""
    return _clamped_ratio(pair.sums(pair.d)) ** 2 - 1


def training_perplexity(pair: Policies) -> Floats:
    """e^(−mean l_T). verl `compute_offpolicy_metrics` (training_ppl)."""
    return np.exp(-pair.means(pair.training))


def rollout_perplexity(pair: Policies) -> Floats:
    """e^(−mean l_R). verl `compute_offpolicy_metrics` (rollout_ppl)."""
    return np.exp(-pair.means(pair.rollout))


def perplexity_ratio(pair: Policies) -> Floats:
    """e^(mean l_R − mean l_T). verl `compute_offpolicy_metrics` (ppl_ratio)."""
    return np.exp(log_perplexity(pair))


def log_perplexity(pair: Policies) -> Floats:
    """mean l_R − mean l_T, in nats. verl `compute_offpolicy_metrics` (log_ppl_diff, log_ppl_diff_max, _min)."""
    return pair.means(pair.rollout) - pair.means(pair.training)


def abs_log_perplexity(pair: Policies) -> Floats:
    """|mean l_R − mean l_T|, in nats. verl `compute_offpolicy_metrics` (log_ppl_abs_diff)."""
    return np.abs(log_perplexity(pair))


# Of all tokens: one number


def largest_logprob(pair: Policies) -> float:
    """max |d|, in nats. TRL (sampling/sampling_logp_difference/max)."""
    return float(abs_logprob(pair).max())


def largest_prob(pair: Policies) -> float:
    """max |p_T − p_R|. verl `calculate_debug_metrics` (rollout_probs_diff_max)."""
    return float(abs_prob(pair).max())


def deviation_prob(pair: Policies) -> float:
    """Standard deviation of |p_T − p_R|, divided by n − 1 as torch.std; NaN for one token. verl
    `calculate_debug_metrics` (rollout_probs_diff_std)."""
    values = abs_prob(pair)
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def pearson(pair: Policies) -> float:
    """Pearson correlation of p_T and p_R over tokens; NaN where one of them is constant. verl
    `pearson_correlation_coefficient` (rollout_actor_probs_pearson_corr)."""
    t, r = (probabilities - probabilities.mean() for probabilities in (np.exp(pair.training), np.exp(pair.rollout)))
    size = np.sqrt((t @ t) * (r @ r))
    return float(t @ r / size) if size else float("nan")


def largest_log_perplexity(pair: Policies) -> float:
    """max over sequences of mean l_R − mean l_T, in nats. verl `compute_offpolicy_metrics` (log_ppl_diff_max)."""
    return float(log_perplexity(pair).max())


def smallest_log_perplexity(pair: Policies) -> float:
    """min over sequences of mean l_R − mean l_T, in nats. verl `compute_offpolicy_metrics` (log_ppl_diff_min)."""
    return float(log_perplexity(pair).min())


# Effective sample size


def effective_share(w: Floats) -> float:
    """(Σw)² / (n Σw²) = 1 / mean((w / w̄)²) of weights w [n]: from 1/n to 1, which equal weights have.
    verl `compute_is_metrics` (rollout_is_eff_sample_size); miles `compute_ess_ratio_contribution`."""
    return float(w.sum() ** 2 / (len(w) * (w @ w)))


def _clamped_ratio(log_ratio: Floats) -> Floats:
    return np.exp(np.clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


# The table


@dataclass(frozen=True)
class Row:
    """A quantity of two policies; None where it has no such value.

    over_tokens          the mean over all tokens, or the quantity of all tokens
    over_sequences       the mean within each sequence, then over sequences; or the mean over sequences
    median_of_tokens     the median over tokens
    median_of_sequences  the median over sequences of the means within them, or of the quantity
    """

    measure: Measure
    tools: str
    over_tokens: float | None = None
    over_sequences: float | None = None
    median_of_tokens: float | None = None
    median_of_sequences: float | None = None

    @property
    def main(self) -> float | None:
        """Over tokens; of a quantity of sequences, over sequences."""
        return self.over_sequences if self.over_tokens is None else self.over_tokens


@dataclass(frozen=True)
class Quantity:
    """A quantity, the function that computes it and its names in tools."""

    measure: Measure
    compute: Callable[[Policies], Any]
    tools: str = ""


def _of(
    name: str,
    title: str,
    unit: str,
    compute: Callable[[Policies], Any],
    definition: str,
    tools: str = "",
    format: str = ".3g",
) -> Quantity:
    return Quantity(Measure(name, title, unit, definition, format), compute, tools)


TOKEN_QUANTITIES = (
    _of("k1", "KL(R‖T), k1", "nats", k1, "−d", "verl kl", "+.3g"),
    _of("k2", "Squared log ratio, k2", "nats²", k2, "d²/2", "verl token_k2"),
    _of("k3", "KL(R‖T), k3", "nats", k3, "ρ − 1 − d", "verl k3_kl; NeMo-RL gen_kl_error; prime-rl mismatch_kl"),
    _of("k3_reversed", "KL(T‖R), k3", "nats", k3_reversed, "1/ρ − 1 + d", "NeMo-RL policy_kl_error"),
    _of("js", "Jensen–Shannon", "nats", js, "½k3(T→M) + ½k3(R→M)", "NeMo-RL js_divergence_error"),
    _of("abs_logprob", "|Δ log-probability|", "nats", abs_logprob, "|d|",
        "slime, miles train_rollout_logprob_abs_diff"),
    _of("abs_prob", "|Δ probability|", "", abs_prob, "|p_T − p_R|", "verl rollout_probs_diff_mean"),
    _of("multiplicative", "Multiplicative error", "", multiplicative, "e^|d|", "NeMo-RL token_mult_prob_error", ".4g"),
    _of("ratio", "Importance ratio", "", ratio, "ρ", "NeMo-RL sampling_importance_ratio", ".4g"),
    _of("truncated_ratio", "Importance ratio, at most 2", "", truncated_ratio, "min(ρ, 2)", "verl rollout_is_mean",
        ".4g"),
    _of("chi2_token", "χ² of tokens", "", chi2_token, "ρ² − 1", "verl, slime chi2_token", "+.3g"),
)  # fmt: skip
"""Quantities of each token."""
SEQUENCE_QUANTITIES = (
    _of("chi2_sequence", "χ² of sequences", "", chi2_sequence, "e^(2Σd) − 1", "verl chi2_seq", "+.3g"),
    _of("training_perplexity", "Perplexity, training", "", training_perplexity, "e^(−mean l_T)", "verl training_ppl",
        ".4g"),
    _of("rollout_perplexity", "Perplexity, rollout", "", rollout_perplexity, "e^(−mean l_R)", "verl rollout_ppl",
        ".4g"),
    _of("perplexity_ratio", "Perplexity ratio", "", perplexity_ratio, "e^(mean l_R − mean l_T)", "verl ppl_ratio",
        ".4g"),
    _of("log_perplexity", "Δ log perplexity", "nats", log_perplexity, "mean l_R − mean l_T", "verl log_ppl_diff",
        "+.3g"),
    _of("abs_log_perplexity", "|Δ log perplexity|", "nats", abs_log_perplexity, "|mean l_R − mean l_T|",
        "verl log_ppl_abs_diff"),
)  # fmt: skip
"""Quantities of each sequence."""
WHOLE_TOKENS = (
    _of("largest_logprob", "Largest |Δ log-probability|", "nats", largest_logprob, "max |d|",
        "TRL sampling_logp_difference/max"),
    _of("largest_prob", "Largest |Δ probability|", "", largest_prob, "max |p_T − p_R|", "verl rollout_probs_diff_max"),
    _of("deviation_prob", "Deviation of |Δ probability|", "", deviation_prob, "sd of |p_T − p_R|",
        "verl rollout_probs_diff_std"),
    _of("pearson", "Pearson correlation", "", pearson, "corr(p_T, p_R)", "verl rollout_actor_probs_pearson_corr",
        ".4g"),
)  # fmt: skip
"""Quantities of all tokens."""
WHOLE_SEQUENCES = (
    _of("largest_log_perplexity", "Largest Δ log perplexity", "nats", largest_log_perplexity,
        "max (mean l_R − mean l_T)", "verl log_ppl_diff_max", "+.3g"),
    _of("smallest_log_perplexity", "Smallest Δ log perplexity", "nats", smallest_log_perplexity,
        "min (mean l_R − mean l_T)", "verl log_ppl_diff_min", "+.3g"),
)  # fmt: skip
"""Quantities of all sequences."""
SAMPLE_SIZES = (
    _of("sample_size", "Effective sample size", "%", weights, "1 / mean((w/w̄)²), w = ρ",
        "miles ess_ratio, of its ratio to the old policy", ".2f"),
    _of("truncated_sample_size", "Effective sample size, w at most 2", "%", truncated_ratio,
        "1 / mean((w/w̄)²), w = min(ρ, 2)", "verl rollout_is_eff_sample_size", ".2f"),
)  # fmt: skip
"""Shares of the tokens, by their weights; `compute` gives the weights."""


def quantities(pair: Policies) -> list[Row]:
    """All quantities of two policies, in the order of the lists above. An overflow gives infinity."""
    with np.errstate(over="ignore"):
        return [
            *(_token_row(quantity, pair) for quantity in TOKEN_QUANTITIES),
            *(Row(quantity.measure, quantity.tools, quantity.compute(pair)) for quantity in WHOLE_TOKENS),
            *(_sequence_row(quantity, pair) for quantity in SEQUENCE_QUANTITIES),
            *(
                Row(quantity.measure, quantity.tools, over_sequences=quantity.compute(pair))
                for quantity in WHOLE_SEQUENCES
            ),
            *(_sample_row(quantity, pair) for quantity in SAMPLE_SIZES),
        ]


def _token_row(quantity: Quantity, pair: Policies) -> Row:
    values = quantity.compute(pair)
    means = pair.means(values)
    return Row(
        quantity.measure,
        quantity.tools,
        float(values.mean()),
        float(means.mean()),
        float(np.median(values)),
        float(np.median(means)),
    )


def _sequence_row(quantity: Quantity, pair: Policies) -> Row:
    values = quantity.compute(pair)
    return Row(
        quantity.measure,
        quantity.tools,
        over_sequences=float(values.mean()),
        median_of_sequences=float(np.median(values)),
    )


def _sample_row(quantity: Quantity, pair: Policies) -> Row:
    w = quantity.compute(pair)
    shares = pair.sums(w) ** 2 / (pair.lengths * pair.sums(w**2))
    return Row(
        quantity.measure,
        quantity.tools,
        effective_share(w),
        float(shares.mean()),
        median_of_sequences=float(np.median(shares)),
    )


MEASURES = {
    quantity.measure.name: quantity.measure
    for quantity in (*TOKEN_QUANTITIES, *WHOLE_TOKENS, *SEQUENCE_QUANTITIES, *WHOLE_SEQUENCES, *SAMPLE_SIZES)
}
"""The measures of all quantities, in the order of the table."""
