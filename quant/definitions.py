"""The names, units and definitions of the metrics that quant computes. This file imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A metric's definition as users read it. percent: a share, shown multiplied by 100."""

    label: str
    definition: str
    unit: str = ""
    percent: bool = False


METRICS = {
    "sqnr_db": Metric("SQNR", "10·log₁₀(Σx² / Σ(q−x)²)", "dB"),
    "mse": Metric("MSE", "mean (q−x)²"),
    "relative_error": Metric("Relative error", "‖q−x‖₂ / ‖x‖₂"),
    "cosine": Metric("Cosine", "⟨x,q⟩ / (‖x‖·‖q‖)"),
    "projection": Metric("Projection", "⟨q,x⟩ / ‖x‖²; 1: rounding neither shrinks nor enlarges x on average"),
    "max_abs_error": Metric("Max. abs. error", "max |q−x|"),
    "flush_to_zero": Metric("Flushed to zero", "share of the nonzero elements that become 0", "%", percent=True),
    "underflow_of_all": Metric(
        "Underflow (of all values)", "share of all elements that are nonzero and become 0", "%", percent=True
    ),
    "saturated": Metric(
        "Saturated", "share of the elements with |x/scale| above the format's largest finite value", "%", percent=True
    ),
    "flushed_error_share": Metric(
        "Error of flushed values", "Σ(q−x)² over the values that become 0 / Σ(q−x)² over all", "%", percent=True
    ),
    "saturated_error_share": Metric(
        "Error of saturated values", "Σ(q−x)² over the values that saturate / Σ(q−x)² over all", "%", percent=True
    ),
    "relative_squared_error": Metric(
        "Relative squared error", "‖q−x‖² / ‖x‖², where x is the bf16 gradient of the same iteration and data"
    ),
    "codes_used": Metric("Codes used", "number of the format's codes that occur"),
    "code_entropy_bits": Metric("Code entropy", "−Σp·log₂ p over the codes", "bits"),
    "scale_exponent_min": Metric("Smallest scale exponent", "of the block scales; all-zero blocks are left out"),
    "scale_exponent_max": Metric("Largest scale exponent", "of the block scales; all-zero blocks are left out"),
    "kurtosis": Metric(
        "Kurtosis, with zeros",
        "E(x−μ)⁴/σ⁴ of all finite values, zeros included: 3 for normal values; subtract 3 for the excess",
    ),
    "crest_factor": Metric("Crest factor", "absmax / rms"),
    "dynamic_range": Metric("Dynamic range", "log₂(absmax / smallest nonzero magnitude)", "binades"),
    "outlier_ratio": Metric("Outliers", "share of the elements with |x−μ| > 6σ", "%", percent=True),
    "mean_energy": Metric(
        "Energy of the token mean",
        "l·‖μ‖² / ‖X‖², where μ is the mean over the l tokens: the share that center=tokens takes away",
        "%",
        percent=True,
    ),
    "ks": Metric("Kolmogorov–Smirnov", "sup |F−G|"),
    "wasserstein": Metric("Wasserstein", "∫|F⁻¹−G⁻¹|"),
    "js": Metric("Jensen–Shannon", "divergence on shared sketch bins, base 2", "bits"),
}
