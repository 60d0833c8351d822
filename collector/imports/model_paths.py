"""Tensors whose name is a path in a model: the key of a dict, or the path of a file. The path names a layer and a
module; a word says what the tensor is there.

    model.layers.0.self_attn.q_proj.weight                 a parameter, in a checkpoint of any tool
    model.decoder.layers.0.mlp.experts.linear_fc1.weight3  that of expert 3 of a rank
    params/layers_0/mlp/down_proj/kernel                   that of a Dense of Flax, [in, out]
    model.layers.0.mlp.experts.gate_up_proj                that of all experts, in a file with other parameters
    grad.model.layers.0.mlp.down_proj.weight               its gradient; also in grads.pt, or with .grad at the end
    exp_avg.model.layers.0.mlp.down_proj.weight            its state in the optimizer
    layers/3/mlp/fc1/input.pt                              an input, by the word at the end; also in a file inputs.pt
    model.layers.0.self_attn.q_proj                        of a module, as a forward hook may save it

The last one may be an input, an output or a weight: it has no name until --kind says what it is. A weight must have the
shape of one. Statistics of tensors, such as absmax, and scales are refused.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath

from binade.collector.imports.log import FOLDERS, LINEAR, SEPARATORS, TensorLog, make, place
from binade.collector.models.site import WORDS, path_parts
from binade.data.run.tensor_kinds import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    POST,
    PRE,
    TENSOR_KINDS,
    Operation,
    Phase,
    Product,
)

CHECKPOINT, NAME = "checkpoint", "module path"  # a parameter, and any other tensor that is named by a path
STEPS = ("iteration", "global_step", "iter_num")  # of Megatron, Lightning and nanoGPT
PARAMETER = re.compile(r"(?:.*_)?(?:weight|bias|gamma|beta)(?:_.+)?|lora_[AB]|e_score_correction_bias|kernel", re.ASCII)
GROUPED = re.compile(r"(weight|bias)(\d+)", re.ASCII)  # of an expert
# Layers of GPT-2 and its kin, whose weight is [in, out] in transformers (Conv1D) and [out, in] elsewhere, as are the
# weights of all experts together.
EITHER_WAY = ("c_attn", "c_proj", "c_fc")
TRANSPOSED = (
    "Its layer may keep the weight as [in, out] or as [out, in], so the axis that a GEMM contracts is not known."
)
VECTOR = "Not scored: a vector that is no parameter may be a statistic of a tensor; --kind says what it is."
# Words before or after a parameter's name, or for the name of a file or its folder.
GRADIENTS = frozenset({"grad", "grads", "gradient", "gradients", "main_grad"})
STATES = frozenset({"exp_avg", "exp_avg_sq", "momentum_buffer", "master_weight"})
OPTIMIZERS = frozenset({"optimizer", "optimizer_states", "optim"})
PARAMETERS = frozenset({"weight", "weights", "param", "params", "parameters"})
ACTIVATIONS = frozenset({"act", "acts", "activation", "activations"})
SIDES: dict[str, tuple[Operation, Phase, str]] = {
    word: (operation, phase, name)
    for words, operation, phase, name in (
        ("input inputs in x", FORWARD, PRE, "input"),
        ("output outputs out y", FORWARD, POST, "output"),
        ("grad_output grad_outputs grad_out output_grad out_grad dy dout", BACKWARD, PRE, "grad_output"),
        ("grad_input grad_inputs grad_in input_grad in_grad dx", BACKWARD, POST, "grad_input"),
        ("grad_weight weight_grad dw", BACKWARD, POST, "grad_weight"),
    )
    for word in words.split()
}
OF_FILE = frozenset({"inputs", "outputs", *(side for side in SIDES if "grad" in side)})  # which name a file, too
NO_GRADIENT = frozenset({"accum", "accumulation", "norm", "norms", "clip", "checkpointing", "scaler"})  # after "grad"
SCALES = frozenset({"absmax", "amax", "scale", "scales", "stats", "statistics"})
STATISTICS = SCALES | {
    *("absmin", "amin", "absmean", "max", "min", "mean", "std", "var", "variance", "rms", "hist", "histogram"),
    *("kurtosis", "quantile", "quantiles", "percentile", "percentiles", "zeros", "qzeros", "zeropoint"),
    *("mse", "sqnr", "count", "counts"),
}
_CONTAINER = re.compile(r"layers?|h|blocks?|encoder|decoder|resblocks", re.ASCII)
_NUMBERED = re.compile(r"(layers?|blocks?)[_-]?(\d{1,9})", re.ASCII)

KINDS = {kind.name: kind for kind in TENSOR_KINDS if kind.product is Product.LINEAR}  # what --kind may say
SAY = f"say what it is with --kind {', '.join(KINDS)}"


@dataclass(frozen=True)
class Clues:
    """What tells, besides a tensor's key and metadata, what it is.

    file            relative to the directory that is imported
    shape           of the tensor; None if it is not known
    has_parameters  whether keys of the file are names of parameters
    kind            a key of KINDS, if the user says what the tensor is
    """

    file: PurePath
    shape: tuple[int, ...] | None = None
    has_parameters: bool = False
    kind: str | None = None


def names_parameter(key: str) -> bool:
    """Whether a key is that of a parameter itself, as those of a checkpoint are."""
    parts = _parts(key)
    return len(parts) > 1 and parts[-1] in ("weight", "kernel") and not _sections(parts)


def read(metadata: object, key: str | None, clues: Clues) -> TensorLog | None:
    """None for a name that is no path in a model."""
    of_file = _of_file(clues.file)
    parts = of_key = _parts(key) if key else []
    if not of_key or (_layer_at(of_file) is not None and _layer_at(of_key) is None):
        parts = [*of_file, *of_key]
    if len(parts) < 2:
        return None
    log = _of_parameter(parts, clues) or _in_module(parts, clues)
    told = metadata if isinstance(metadata, Mapping) else {}
    iteration = make("", iteration=next((told[step] for step in STEPS if step in told), None)).iteration
    return replace(log, iteration=iteration) if log else None


def checked(log: TensorLog, key: str | None, clues: Clues) -> TensorLog:
    """A tensor that is no parameter and that no tool names: refused if it is a statistic, not scored if it may be."""
    shape = clues.shape
    if shape is None:
        return log
    last = (_parts(key) if key is not None else [clues.file.stem])[-1:]
    if words := sorted(_tokens("".join(last)) & STATISTICS):
        return replace(log, refused=f"a statistic by its name ({words[0]}), not a tensor: {SAY}")
    if len(shape) < 2 and (words := sorted(_tokens(clues.file.stem) & STATISTICS)):
        return replace(log, refused=f"a statistic by the name of its file ({words[0]}), not a tensor: {SAY}")
    if math.prod(shape) == 1:
        return replace(log, refused=f"a single value, as of a statistic, not a tensor: {SAY}")
    if len(shape) < 2:
        return replace(log, is_scored=False, corrections=(*log.corrections, VECTOR))
    return log


def of_kind(log: TensorLog, name: str) -> TensorLog:
    """A tensor that the user says to be the input, weight and so on of a linear layer: a key of KINDS. The parameters
    besides weights keep their names."""
    said = replace(log, refused=None, is_scored=True, is_unnamed=False)
    if (log.version, name) == (CHECKPOINT, "weight") or (log.tensor_name, name) == ("grad_bias", "grad_weight"):
        return said
    kind = KINDS[name]
    is_linear = log.module is None or log.module in LINEAR
    return replace(
        said,
        version=NAME if log.version == CHECKPOINT else log.version,
        layer_type=kind.layer_type if is_linear else None,
        component=kind.component if is_linear else None,
        operation=kind.operation.value,
        phase=kind.phase.value,
        tensor_name=name,
        contracted_axis=kind.contracted_axis,
        corrections=tuple(note for note in log.corrections if note not in (VECTOR, TRANSPOSED)),
    )


def _parts(name: str) -> list[str]:
    """Those of "params/layers_0/q_proj/kernel" and "['layers'][0].q_proj" are separated, too."""
    parts: list[str] = []
    for part in path_parts(name.translate(SEPARATORS)):
        numbered = _NUMBERED.fullmatch(part)
        parts += [numbered[1], str(int(numbered[2]))] if numbered else [re.sub(r"[^\w+-]", "_", part, flags=re.ASCII)]
    return parts


def _of_file(file: PurePath) -> list[str]:
    """The parts of a file's path without the folders of a step or a rank."""
    folders = [folder for folder in file.parent.parts if not _is_step(folder)]
    return _parts(".".join([*folders, file.stem])) if file.name else []


def _is_step(folder: str) -> bool:
    return any(pattern.fullmatch(folder) for pattern in FOLDERS.values())


def _layer_at(parts: list[str]) -> int | None:
    """The place of the word before the number of a layer."""
    return next((i for i in range(len(parts) - 1) if parts[i + 1].isdecimal() and _CONTAINER.fullmatch(parts[i])), None)


def _sections(parts: list[str]) -> str | None:
    """The first word that says that a parameter's name is that of its gradient or its state."""
    return next((part for part in parts if part in GRADIENTS or part in STATES), None)


def _hint(file: PurePath) -> str | None:
    """Such a word in the name of a file or of its folder, or one of SIDES or ACTIVATIONS: grads.pt, inputs_step3.pt."""
    if file.stem in OF_FILE or file.stem in STATES:
        return file.stem
    tokens: list[str] = re.findall(r"[a-z]+", file.stem.lower())
    for token, after in itertools.pairwise([*tokens, ""]):
        if f"{token}_{after}" in OF_FILE or f"{token}_{after}" in STATES:
            return f"{token}_{after}"
        if token in OF_FILE or token in ACTIVATIONS or (token in GRADIENTS and after not in NO_GRADIENT):
            return token
    folder = file.parent.name
    return folder if folder in GRADIENTS or folder in STATES or folder in ACTIVATIONS else None


def _tokens(name: str) -> set[str]:
    """ "act_scales-0" has act and scales; "absMax" has absmax, and so has "abs_max"."""
    lower = name.lower()
    return {*re.findall(r"[a-z]+", lower), *re.findall(r"[a-z]+", lower.replace("abs_max", "absmax"))}


def _of_parameter(parts: list[str], clues: Clues) -> TensorLog | None:
    """A parameter, its gradient, or its state in the optimizer."""
    hint = _hint(clues.file)
    section = _sections(parts) or (hint if hint in GRADIENTS or hint in STATES else None)
    if clues.kind == "grad_weight":
        section = "grad"
    known = GRADIENTS | STATES | ({*OPTIMIZERS, "state"} if section in STATES else set())
    parts = [part for part in parts if part not in known]
    if len(parts) > 2 and parts[0] in PARAMETERS:
        parts = parts[1:]
    if len(parts) < 2 or not OPTIMIZERS.isdisjoint(parts):
        return None
    module, name = parts[:-1], parts[-1]
    grouped = GROUPED.fullmatch(name)
    # The parameter of all experts has the name of a layer.
    is_bare = name in WORDS and "experts" in module and clues.has_parameters and hint is None
    is_gain = name == "scale" and re.search("norm|ln", module[-1].lower()) is not None  # of Flax
    is_kernel = name == "kernel"  # of Flax
    if not (grouped or is_bare or is_gain or PARAMETER.fullmatch(name)):
        return None
    words = place(".".join(parts if is_bare else module))
    if not words:
        return None
    statistic = None if is_gain or is_kernel else next(iter(sorted(_tokens(name) & STATISTICS)), None)
    if grouped:
        name, words["expert"] = grouped[1], grouped[2]
    elif is_bare or is_gain or is_kernel:
        name = "weight"
    words["layer_type"] = "linear" if words["module"] in LINEAR else None
    if section in GRADIENTS:
        log = make(NAME, **words, operation=BACKWARD.value, phase=POST.value, tensor_name=f"grad_{name}")
    elif section in STATES:
        log = make(NAME, **words, operation=OPTIMIZER.value, phase=POST.value, tensor_name=section)
    else:
        log = make(CHECKPOINT, **words, operation=FORWARD.value, phase=PRE.value, tensor_name=name)
    if log.contracted_axis is not None and is_kernel and len(clues.shape or (0, 0)) == 2:
        log = replace(log, contracted_axis=-2)
    elif log.contracted_axis is not None and (is_kernel or is_bare or module[-1] in EITHER_WAY):
        log = replace(log, contracted_axis=None, corrections=(TRANSPOSED,))
    return replace(log, refused=_no_parameter(log, name, statistic, module, clues))


def _no_parameter(log: TensorLog, name: str, statistic: str | None, module: list[str], clues: Clues) -> str | None:
    """Why a tensor is not the parameter that its name says."""
    shape = clues.shape
    if statistic:
        return f"a statistic by its name ({statistic}), not a tensor: {SAY}"
    if shape is None:
        return None
    if len(shape) < 2 and (words := sorted(_tokens(clues.file.stem) & SCALES)):
        return f"a statistic by the name of its file ({words[0]}), not a tensor: {SAY}"
    of_several = name == "kernel" or any("expert" in part or "moe" in part for part in module)
    fits = len(shape) == 2 or (len(shape) in (3, 4) and of_several)
    if name == "weight" and log.layer_type and not fits:
        size = ", ".join(map(str, shape))
        return f"the shape [{size}] is not that of a linear layer's weight, as which its name is: {SAY}"
    return None if shape else f"a single value, as of a statistic, not a tensor: {SAY}"


def _in_module(parts: list[str], clues: Clues) -> TensorLog | None:
    """The input or the output of a module, one of their gradients, or a tensor of which only the module is known."""
    if not OPTIMIZERS.isdisjoint(parts):
        return None
    which = ""
    if parts[-1].isdecimal() and (parts[-2] in SIDES or parts[-2] in WORDS):  # of several inputs or outputs
        *parts, which = parts
    said = parts[-1] if parts[-1] in SIDES else None
    module = parts[:-1] if said else parts
    at = _layer_at(module)
    leading = [part for part in module[: at or 0] if part in SIDES or part in ACTIVATIONS or part in GRADIENTS]
    module = [part for i, part in enumerate(module) if part not in leading or i >= (at or 0)]
    ends = {".".join(module[start:]) for start in range(len(module))}
    if at is None and ends.isdisjoint(WORDS.keys() | LINEAR):
        return None
    words = place(".".join(module))
    if not words:
        return None
    words["layer_type"] = "linear" if words["module"] in LINEAR else None
    hints = [word for word in (said, *leading, _hint(clues.file)) if word]
    if hints and hints[0] in SIDES:
        operation, phase, name = SIDES[hints[0]]
        name = f"{name}.{which}" if which.strip("0") else name
        log = make(NAME, **words, operation=operation.value, phase=phase.value, tensor_name=name)
        return checked(log, ".".join(parts), clues)
    is_gradient, is_activation = not GRADIENTS.isdisjoint(hints), not ACTIVATIONS.isdisjoint(hints)
    during = BACKWARD.value if is_gradient else FORWARD.value if is_activation else None
    log = replace(make(NAME, **words, operation=during), is_unnamed=True)
    return checked(log, ".".join(parts), clues)
