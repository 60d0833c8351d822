"""What is made of the names and metadata of other tools' tensor logs."""

from __future__ import annotations

from datetime import datetime
from pathlib import PurePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from binade.collector.imports.log import TensorLog
from binade.collector.imports.model_paths import CHECKPOINT, NAME
from binade.collector.imports.registry import IMPORTERS, interpret
from binade.quant.formats import FORMATS
from tests.collector.logs_made import NAMES

STAMP = "20250912_101010"
TIME = datetime(2025, 9, 12, 10, 10, 10)
ATTENTION = {"layer_type": "attention", "operation": "forward", "contracted_axis": -1, "tensor_name": "query"}
LINEAR = {"layer_type": "linear", "operation": "forward", "component": "linear", "phase": "pre", "layer_index": 1}
FA = ATTENTION | {"phase": "pre", "component": "FA"}
WORDS = {
    "V0": ATTENTION | {"layer_index": 1, "quant_type": "mxfp8", "captured": datetime(2025, 9, 8, 9, 21, 56)},
    "V1": FA | {"layer_index": None, "quant_type": "mxfp8", "iteration": None, "rank": None},
    "V2": FA | {"layer_index": 1, "quant_type": "hifp8", "iteration": 0, "rank": 0, "micro_batch": 0},
    "V3": LINEAR | {"tensor_name": "weight", "quant_type": "bf16", "stage": None, "rank": 0, "micro_batch": None},
    "V4": FA | {"layer_index": 1, "quant_type": "mxfp8", "rank": 0, "micro_batch": 0},
    "V5a": ATTENTION | {"layer_index": 1, "quant_type": "bf16", "phase": None, "component": None, "micro_batch": 0},
    "V5c": ATTENTION | {"layer_index": 1, "quant_type": "bf16", "iteration": 4, "rank": 4, "micro_batch": 0},
    "V6": LINEAR | {"tensor_name": "input", "quant_type": "mxfp8", "iteration": 0, "rank": 0, "micro_batch": None},
    "V7": {"layer_type": None, "operation": "forward", "phase": "pre", "tensor_name": "input", "iteration": 1},
}


def words(log: TensorLog, expected: dict) -> dict:
    return {name: getattr(log, name) for name in expected}


@pytest.mark.parametrize("version", NAMES)
def test_each_version_of_name(version):
    log = interpret(PurePath("/logs", NAMES[version]))
    assert log.version == version and words(log, WORDS[version]) == WORDS[version]
    assert log.module is None and log.expert is None


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("20250908_092156_0001_attention_forward_hifp8_query", "V0", {"layer_index": None, "quant_type": "hifp8"}),
        ("20250908_092156_0001_attention_3_forward_hifp8_key", "V0", {"layer_index": 3, "tensor_name": "key"}),
        (
            "20250908_092156_0001_attention_L2_forward_mxfp_fp4_e2m1_quantized_attention_probs",
            "V0",
            {"quant_type": "mxfp4", "stage": "after", "tensor_name": "attention_probs", "layer_index": 2},
        ),
        (f"{STAMP}_0001_linear_L2_backward_pre_linear_mxfp8_grad_output", "V1", {"tensor_name": "grad_output"}),
        (
            f"{STAMP}_0001_iter012_attention_L1_forward_post_FA_mxfp_fp8_e5m2_rank10_sample002_group001_value",
            "V2",
            {"quant_type": "mxfp8_e5m2", "iteration": 12, "rank": 10, "micro_batch": 2, "tensor_name": "value"},
        ),
        (f"{STAMP}_0001_iter000_attention_L1_forward_pre_FA_mxfp8_sample001_query", "V4", {"rank": None}),
        (f"{STAMP}_10001_iter000_attention_L1_forward_pre_FA_mxfp8_sample001_query", "V4", {"micro_batch": 1}),
        (f"{STAMP}_iter000_linear_L1_backward_post_linear_mxfp8_rank00_grad_input", "V6", {"phase": "post"}),
        ("20251399_999999_iter000_linear_L1_forward_pre_linear_mxfp8_rank00_input", "V6", {"captured": None}),
        (f"{STAMP}_iter{'9' * 30}_linear_L1_forward_pre_linear_mxfp8_rank00_input", "V6", {"iteration": None}),
        ("weights", None, {"tensor_name": "weights", "quant_type": None, "operation": None}),
        ("<script>alert(1)</script>", None, {"tensor_name": None}),
        ("x" * 200, None, {"tensor_name": f"{'x' * 63}..{'x' * 63}"}),
    ],
)
def test_names_that_are_unlike_the_examples(name, version, expected):
    log = interpret(PurePath("/logs", f"{name}.pt"))
    assert log.version == version and words(log, expected) == expected


def test_a_bare_tensor_of_the_backward_pass():
    log = interpret(PurePath("/debug_tensors/iter_12/bwd_in_77.pt"))
    assert (log.version, log.iteration, log.operation, log.phase) == ("V7", 12, "backward", "pre")
    assert log.tensor_name == "grad_output" and "gradient" in log.corrections[0]
    assert interpret(PurePath("/debug_tensors/other/bwd_in_77.pt")).version is None


SPELLINGS = {
    "mxfp_fp8_e4m3": ("mxfp8", "before"),
    "mxfp_fp8_e5m2": ("mxfp8_e5m2", "before"),
    "mxfp_fp4_e2m1": ("mxfp4", "before"),
    "mxfp_fp8_e4m3_quantized": ("mxfp8", "after"),
    "mxfp_fp8_e5m2_quantized": ("mxfp8_e5m2", "after"),
    "mxfp_fp4_e2m1_quantized": ("mxfp4", "after"),
    "hifp8_quantized": ("hifp8", "after"),
    "hifp": ("hifp8", "before"),
    "hifp_quantized": ("hifp8", "after"),
    "mxfp8_e4m3": ("mxfp8", "before"),
    "mxfp": (None, "before"),
    "mxfp_quantized": (None, "after"),
    "bf16": ("bf16", None),
    "int3": (None, None),
    **{name: (name, "before") for name in FORMATS if name != "bf16"},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("version", ["V0", "V1", "V2", "V6", "metadata"])
def test_spellings_of_quant_types(spelling, version):
    """Both the quant type and the tensor's name may hold underscores."""
    forms = {
        "V0": f"{STAMP}_0001_attention_L1_forward_{spelling}_attention_scores",
        "V1": f"{STAMP}_0001_attention_L1_forward_post_FA_{spelling}_attention_scores",
        "V2": f"{STAMP}_0001_iter000_attention_L1_forward_post_FA_{spelling}_rank00_sample000_group00_attention_scores",
        "V6": f"{STAMP}_iter000_attention_L1_forward_post_FA_{spelling}_rank00_attention_scores",
        "metadata": "attention_scores",
    }
    metadata = {"quant_type": spelling} if version == "metadata" else None
    log = interpret(PurePath(forms[version] + ".pt"), metadata)
    assert (log.quant_type, log.stage) == SPELLINGS[spelling]
    assert log.original_quant_type == spelling and log.tensor_name == "attention_scores"
    assert bool(log.corrections) == (log.quant_type is None)


def test_the_directory_names_the_quant_type_where_nothing_else_does():
    assert interpret(PurePath("/logs/hifp8_quantized/x.npy")).quant_type == "hifp8"
    assert interpret(PurePath("/logs/hifp8_quantized/x.npy")).stage == "after"
    assert interpret(PurePath("/logs/hifp8/x.npy"), {"quant_type": "mxfp4"}).quant_type == "mxfp4"
    assert interpret(PurePath("/logs/linear/x.npy")).quant_type is None


def linear(operation: str, phase: str, name: str, quant: str = "mxfp8") -> PurePath:
    return PurePath(f"{STAMP}_0001_iter000_linear_L1_{operation}_{phase}_linear_{quant}_rank00_group000_{name}.pt")


def attention(phase: str, component: str, name: str, more: str = "group000") -> PurePath:
    return PurePath(f"{STAMP}_0001_iter000_attention_L1_forward_{phase}_{component}_bf16_rank00_{more}_{name}.pt")


@pytest.mark.parametrize(
    ("path", "name", "phase", "axis", "said"),
    [
        (linear("backward", "pre", "input"), "grad_output", "pre", -1, "gradient of the operation's output"),
        (linear("backward", "post", "output"), "grad_input", "post", None, "gradient of the operation's input"),
        (linear("forward", "pre", "output"), "output", "post", None, "with phase pre"),
        (linear("forward", "pre", "mm_output"), "output", "post", None, "as mm_output and with phase pre"),
        (linear("forward", "pre", "input_A"), "input", "pre", -1, "first operand"),
        (linear("forward", "pre", "input_B"), "weight", "pre", None, "second operand"),
        (linear("backward", "pre", "input_A"), "grad_output", "pre", -1, "first operand"),
        (linear("backward", "pre", "input_B"), "input_B", "pre", None, None),
        (linear("forward", "pre", "weight"), "weight", "pre", -1, None),
        (linear("backward", "pre", "weight"), "weight", "pre", -2, None),  # of dgrad
        (linear("forward", "post", "output"), "output", "post", None, None),
        (linear("forward", "pre", "input"), "input", "pre", -1, None),
        (linear("backward", "pre", "grad_output"), "grad_output", "pre", -1, None),
        (attention("pre", "attention", "attention_probs"), "query", "pre", -1, "actually the query"),
        (attention("pre", "attention", "value"), "key", "pre", -2, "actually the key"),
        (attention("post", "FA", "attention_probs"), "attention_probs", "post", -1, None),
        (attention("post", "FA", "value"), "value", "post", None, None),
        (attention("pre", "attention", "value", "sample000"), "value", "pre", None, None),  # not V3
        (attention("post", "FA", "attention_weights"), "attention_probs", "post", -1, "after softmax"),
        (attention("pre", "FA", "matmul_input_buffer"), "matmul_input_buffer", "pre", None, "memory"),
        (attention("post", "FA", "mm_output"), "mm_output", "post", None, None),
    ],
    ids=lambda value: value.stem[35:] if isinstance(value, PurePath) else "",
)
def test_corrections(path, name, phase, axis, said):
    log = interpret(path)
    assert (log.tensor_name, log.phase, log.contracted_axis) == (name, phase, axis)
    assert log.component in ("FA", "linear")
    if said is None:
        assert log.corrections == ()
    else:
        (sentence,) = log.corrections
        assert said in sentence and sentence.endswith(".")


def test_metadata_is_believed_before_the_name():
    metadata = {
        "layer_type": "linear", "operation": "backward", "phase": "post", "component": "linear", "layer_idx": 7,
        "quant_type": "mxfp4", "tensor_name": "grad_input", "iteration": 3, "rank": 2, "sample_idx": 4, "microbatch": 5,
        "save_time": "2025-01-02 03:04:05",
    }  # fmt: skip
    log = interpret(PurePath(NAMES["V2"]), metadata)
    assert (log.version, log.layer_type, log.operation, log.phase, log.component) == (
        *("V2", "linear", "backward", "post", "linear"),
    )
    assert (log.layer_index, log.quant_type, log.tensor_name, log.iteration) == (7, "mxfp4", "grad_input", 3)
    assert (log.rank, log.micro_batch, log.captured) == (2, 5, datetime(2025, 1, 2, 3, 4, 5))
    assert sum("the metadata is used" in sentence for sentence in log.corrections) == 10
    assert not interpret(PurePath(NAMES["V2"]), {"layer_idx": 1, "quant_type": "hifp8", "rank": None}).corrections


@pytest.mark.parametrize(
    "metadata",
    [
        {"layer_idx": True},
        {"layer_idx": 0},
        {"layer_idx": -1},
        {"layer_idx": 2**31},
        {"layer_idx": float("nan")},
        {"layer_idx": "one"},
        {"layer_idx": [1]},
        {"tensor_name": "<img src=x onerror=alert(1)>"},
        {"tensor_name": "'; DROP TABLE tensor; --"},
        {"tensor_name": "../../etc/passwd"},
        {"tensor_name": "a\nb"},
        {"tensor_name": "x" * 5_000_000},
        {"tensor_name": {"deep": [[[]]]}},
        {"quant_type": "[link](http://x)"},
        {"quant_type": b"mxfp8"},
        {"operation": "sideways"},
        {"phase": ["pre"]},
        {"save_time": "yesterday"},
        {"save_time": 0},
        ["no", "dict"],
        "text",
        7,
    ],
    ids=lambda metadata: str(metadata)[:40],
)
def test_what_cannot_be_believed_is_left_out_with_a_note(metadata):
    log = interpret(PurePath(NAMES["V2"]), metadata)
    assert words(log, WORDS["V2"]) == WORDS["V2"]
    (note,) = log.corrections
    assert note.endswith("was left out.") and len(note) < 120 and "<" not in note and "DROP" not in note


@pytest.mark.parametrize("absent", [None, "", "none", "None", "unknown"])
def test_what_is_absent_is_no_contradiction(absent):
    log = interpret(PurePath(NAMES["V2"]), dict.fromkeys(("layer_idx", "phase", "quant_type", "tensor_name"), absent))
    assert words(log, WORDS["V2"]) == WORDS["V2"] and log.corrections == ()


def test_texts_are_numbers_too_and_keys_are_names():
    log = interpret(PurePath("x.safetensors"), {"layer_idx": "3", "rank": "1"}, "layers.0.scores")
    assert (log.layer_index, log.rank, log.tensor_name) == (3, 1, "layers.0.scores")
    assert interpret(PurePath("x.safetensors"), {"tensor_name": "query"}, "tensor").tensor_name == "query"


LIKE_A_NAME = st.from_regex(
    r"[0-9]{8}_[0-9]{6}(_[0-9]{4})?(_iter[0-9]{1,12})?_(L[0-9])?_?(attention|linear)(_L?[0-9]{1,4})?"
    r"_(forward|backward)(_(pre|post)_(FA|linear|attention))?_[a-z0-9_]{1,20}(_rank[0-9]+)?_[\w<>'\"; ]{0,20}",
    fullmatch=True,
)
LIKE_A_DUMP = st.from_regex(
    r"Module\.layers\.[0-9]{1,12}\.[a-z_.<]{1,20}\.Linear\.(forward\.0\.(input|parameters)\.[a-z0<]{1,9}|parameters_grad\.b)"
    r"|step=[0-9]{1,12}___rank=[0-9]{0,12}___dump_index=1___name=(grad__)?(param__|non_intrusive__)?[a-z0_.<']{0,20}\.inputs\.0"
    r"|_?[a-z_<]{0,9}layers_[0-9]{1,30}_[a-z_]{1,20}_(activation|wgrad)",
    fullmatch=True,
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("layer_type", "operation", "quant_type", "tensor_name", "phase", "component", "layer_idx", "save_time", "rank",
        "iteration", "sample_idx", "microbatch", "module", "expert")  # fmt: skip


@pytest.mark.thorough
@settings(max_examples=400)
@given(
    name=LIKE_A_NAME | LIKE_A_DUMP | st.text(max_size=60),
    parent=st.text(max_size=20)
    | st.sampled_from(["iter_1", "iter_" + "9" * 40, "mxfp8", "dump_tensor_data", "iter_000002"]),
    metadata=ANYTHING
    | st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=6)
    | st.fixed_dictionaries({"meta": st.dictionaries(st.sampled_from(("name", "rank", "layer_id")), ANYTHING)}),
    key=st.none() | st.text(max_size=20) | st.just("high_precision"),
)
def test_nothing_raises_and_only_plain_words_come_out(name, parent, metadata, key):
    log = interpret(PurePath("rank_0", parent) / f"{name}.pt", metadata, key)
    assert log.quant_type in (None, *FORMATS)
    assert log.version in (None, *NAMES, *(importer.name for importer in IMPORTERS), CHECKPOINT, NAME)
    assert log.layer_type in (None, "attention", "linear")
    assert log.operation in (None, "forward", "backward", "optimizer")
    assert log.phase in (None, "pre", "post") and log.component in (None, "FA", "linear")
    assert log.stage in (None, "before", "after") and log.contracted_axis in (None, -1, -2)
    for number, least in (
        (log.layer_index, 1),
        (log.iteration, 0),
        (log.micro_batch, 0),
        (log.rank, 0),
        (log.expert, 0),
    ):
        most = 2**53 if number is log.iteration else 2**31
        assert number is None or (type(number) is int and least <= number < most)
    for word in (log.tensor_name, log.module, log.original_quant_type, *log.corrections):
        assert word is None or (word.isascii() and word.isprintable() and len(word) < 700)
        assert word is None or not set(word) & set("<>&`\\*/")
