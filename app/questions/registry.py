"""The twelve questions, and where each is answered."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Question:
    """A question as it stands on the overview, the page and view that answer it, and how."""

    text: str
    page: str
    icon: str
    help: str
    params: dict[str, str] = field(default_factory=dict)


QUESTIONS = (
    Question(
        "Which tensors suffer most?", "worst", ":material/leaderboard:",
        "A ranked board over layer, module, operation and tensor", {"view": "board"},
    ),
    Question(
        "Why do they suffer?", "tensor", ":material/search_insights:",
        "Magnitudes over the format’s codebook, channels, tokens", {"view": "why"},
    ),
    Question(
        "Would another format fix it?", "tensor", ":material/experiment:",
        "Round it to any formats with any options", {"view": "whatif"},
    ),
    Question(
        "Is it normal?", "tensor", ":material/show_chart:",
        "Q–Q plots against laws, other tensors and selections", {"view": "law"},
    ),
    Question(
        "Does it get worse with depth?", "worst", ":material/layers:",
        "Any metric by tensor and layer", {"view": "depth"},
    ),
    Question(
        "Does it change in training?", "worst", ":material/timeline:",
        "Any metric by iteration and layer", {"view": "training"},
    ),
    Question(
        "Which gradients flush to zero?", "worst", ":material/swap_horiz:",
        "Forward against backward, side by side", {"view": "directions", "metric": "flush_to_zero"},
    ),
    Question(
        "Which part costs the most loss?", "recipes", ":material/balance:",
        "QK, PV or the linears: each recipe’s loss and gradients against bf16’s",
    ),
    Question(
        "Is it rounding, or has it drifted?", "tensor", ":material/alt_route:",
        "bf16’s tensor, the same rounded, the quantized run’s", {"view": "drift"},
    ),
    Question(
        "Which blocks fail?", "tensor", ":material/view_module:",
        "Scales and SQNR block by block, down to the values", {"view": "blocks"},
    ),
    Question(
        "What happens inside attention?", "tensor", ":material/visibility:",
        "Probabilities, entropy and scores, head by head", {"view": "attention"},
    ),
    Question(
        "What is the format really using?", "tensor", ":material/tag:",
        "Codes, tiers of precision, entropy", {"view": "codes"},
    ),
)  # fmt: skip
