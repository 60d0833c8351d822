"""The layouts of quantized weights, as a registry. To read another one, add a row to LAYOUTS.

A row says how the configuration names the tool, which tensors one weight is stored as, and what they stand for. The
first row that fits the names and dtypes of a checkpoint's tensors is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from binade.data.exchange.quantized import bitsandbytes
from binade.data.exchange.quantized.stored import (
    Decoded,
    StoredWeight,
    awq,
    floats,
    gptq,
    gptq_shape,
    integers,
    mxfp4,
    mxfp8,
    nvfp4,
    packed,
    packed_bits,
    packed_shape,
)

Shape = tuple[int, ...]
F8, F4 = ("F8_E4M3", "F8_E5M2"), ("U8", "I8", "F4")
REAL = ("F32", "BF16", "F16")
E8M0 = ("U8", "F8_E8M0")


def _same(stored: StoredWeight) -> Shape:
    return stored.sizes["codes"]


def _halved(stored: StoredWeight) -> Shape:
    *rows, columns = stored.sizes["codes"]
    return (*rows, 2 * columns)


def _blocks(stored: StoredWeight) -> Shape:
    experts, rows, groups, width = stored.sizes["codes"]
    return experts, groups * width * 2, rows


def _awq_shape(stored: StoredWeight) -> Shape:
    inputs, words = stored.sizes["codes"]
    return 8 * words, inputs


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How a tool stores a quantized weight.

    name        what it is, for people; {bits} stands for those of a code
    method      the quant_method of the configuration
    codes       the name of the tensor with the codes; {module} and {param} stand for those of the weight
    dtypes      that this tensor may have, as safetensors names them
    parts       the other tensors that must exist: what they are, their names and dtypes
    optional    those that may exist
    dimensions  of the codes; None for any number
    shape       of the parameter
    decode      the values. Raises LayoutError
    bits        of a code, where the name has them. Raises LayoutError
    transposed  whether the parameter is [..., in, out], of [..., out, in] values
    """

    name: str
    method: str
    codes: str = "{module}.{param}"
    dtypes: tuple[str, ...]
    parts: Mapping[str, tuple[str, tuple[str, ...]]]
    optional: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    dimensions: int | None = None
    shape: Callable[[StoredWeight], Shape] = _same
    decode: Callable[[StoredWeight], Decoded]
    bits: Callable[[StoredWeight], int] | None = None
    transposed: bool = False

    def words(self, stored: StoredWeight) -> str:
        """What a weight is, for people. Raises LayoutError."""
        return self.name.format(bits=self.bits(stored) if self.bits else "")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        pattern = re.escape(self.codes).replace(r"\{module\}", r"(?P<module>.+)")
        return re.compile(pattern.replace(r"\{param\}", r"(?P<param>[^.]+)"))

    def find(self, name: str, dtypes: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
        """The weight whose codes a tensor has, and the names of its tensors; None if the tensor has none of this
        layout. dtypes: of all tensors of the checkpoint."""
        match = self._pattern.fullmatch(name)
        if match is None or dtypes[name] not in self.dtypes:
            return None
        words = {"param": "weight"} | match.groupdict()
        found = {"codes": name}
        for role, (template, allowed) in {**self.parts, **self.optional}.items():
            part = template.format(**words)
            if dtypes.get(part) in allowed:
                found[role] = part
            elif role in self.parts:
                return None
        return "{module}.{param}".format(**words), found

    def has_codes(self, name: str) -> bool:
        """Whether a tensor of this name may have the codes of a weight."""
        match = self._pattern.fullmatch(name)
        return match is not None and match.groupdict().get("param") != "bias"

    def needed(self, name: str) -> list[str]:
        """The names of the other tensors that the codes of this name need."""
        match = self._pattern.fullmatch(name)
        words = {"param": "weight"} | (match.groupdict() if match else {})
        return [template.format(**words) for template, _ in self.parts.values()]


_CT, _AO = "compressed-tensors", "torchao"
_QDATA = "{module}._{param}_qdata"
_SMOOTHED = {"inputs": ("{module}.pre_quant_scale", REAL)}  # ModelOpt's AWQ: the input is multiplied by it


def _scale(name: str, dtypes: tuple[str, ...] = REAL) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {"scale": (name, dtypes)}


def _of_floats(
    method: str,
    scale: str,
    packed: str = "{module}.{param}",
    four_bits: tuple[str, ...] = ("U8",),
    real: tuple[str, ...] = REAL,
    optional: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType({}),
) -> tuple[WeightLayout, ...]:
    """FP8 with floating-point scales, MXFP8, and MXFP4 whose codes are `packed`. real: the dtypes of the scales of FP8;
    four_bits: of the codes of MXFP4."""
    return (
        WeightLayout(name="FP8", method=method, dtypes=F8, parts=_scale(scale, real), optional=optional, decode=floats),
        WeightLayout(
            name="MXFP8", method=method, dtypes=F8, parts=_scale(scale, E8M0), optional=optional, decode=mxfp8
        ),
        WeightLayout(
            name="MXFP4",
            method=method,
            codes=packed,
            dtypes=four_bits,
            parts=_scale(scale, E8M0),
            optional=optional,
            shape=_halved,
            decode=mxfp4,
        ),
    )


LAYOUTS = (
    *_of_floats("fp8", "{module}.{param}_scale_inv", four_bits=F4, real=(*REAL, "F8_E8M0")),
    WeightLayout(
        name="MXFP4",
        method="mxfp4",
        codes="{module}.{param}_blocks",
        dtypes=("U8",),
        dimensions=4,
        parts=_scale("{module}.{param}_scales", ("U8",)),
        shape=_blocks,
        decode=mxfp4,
        transposed=True,
    ),
    WeightLayout(
        name="INT8",
        method=_CT,
        dtypes=("I8",),
        parts=_scale("{module}.{param}_scale"),
        optional={"zero": ("{module}.{param}_zero_point", ("I8",))},
        decode=integers,
    ),
    WeightLayout(
        name="INT{bits}, packed",
        method=_CT,
        codes="{module}.{param}_packed",
        dtypes=("I32",),
        shape=packed_shape,
        parts=_scale("{module}.{param}_scale") | {"shape": ("{module}.{param}_shape", ("I64",))},
        optional={"zero": ("{module}.{param}_zero_point", ("I32",))},
        decode=packed,
        bits=packed_bits,
    ),
    WeightLayout(
        name="NVFP4",
        method=_CT,
        codes="{module}.{param}_packed",
        dtypes=("U8",),
        shape=_halved,
        decode=nvfp4,
        parts=_scale("{module}.{param}_scale", F8) | {"divisor": ("{module}.{param}_global_scale", REAL)},
    ),
    *_of_floats(_CT, "{module}.{param}_scale", packed="{module}.{param}_packed"),
    WeightLayout(
        name="NVFP4",
        method="modelopt",
        dtypes=("U8",),
        shape=_halved,
        decode=nvfp4,
        parts=_scale("{module}.{param}_scale", F8) | {"outer": ("{module}.{param}_scale_2", REAL)},
        optional=_SMOOTHED,
    ),
    *_of_floats("modelopt", "{module}.{param}_scale", optional=_SMOOTHED),
    WeightLayout(
        name="FP8", method=_AO, codes=_QDATA, dtypes=F8, parts=_scale("{module}._{param}_scale"), decode=floats
    ),
    WeightLayout(
        name="INT8",
        method=_AO,
        codes=_QDATA,
        dtypes=("I8",),
        parts=_scale("{module}._{param}_scale"),
        optional={"zero": ("{module}._{param}_zero_point", ("I8",))},
        decode=integers,
    ),
    WeightLayout(
        name="NVFP4",
        method=_AO,
        codes=_QDATA,
        dtypes=("U8",),
        parts=_scale("{module}._{param}_scale", F8),
        optional={"outer": ("{module}._{param}_per_tensor_scale", REAL)},
        shape=_halved,
        decode=nvfp4,
    ),
    WeightLayout(
        name="MXFP8", method=_AO, codes=_QDATA, dtypes=F8, parts=_scale("{module}._{param}_scale", E8M0), decode=mxfp8
    ),
    WeightLayout(
        name="MXFP4",
        method=_AO,
        codes=_QDATA,
        dtypes=("U8",),
        parts=_scale("{module}._{param}_scale", E8M0),
        shape=_halved,
        decode=mxfp4,
    ),
    WeightLayout(
        name="AWQ INT4",
        method="awq",
        codes="{module}.qweight",
        dtypes=("I32",),
        dimensions=2,
        shape=_awq_shape,
        parts=_scale("{module}.scales") | {"zero": ("{module}.qzeros", ("I32",))},
        decode=awq,
    ),
    WeightLayout(
        name="GPTQ INT{bits}",
        method="gptq",
        codes="{module}.qweight",
        dtypes=("I32",),
        dimensions=2,
        shape=gptq_shape,
        parts=_scale("{module}.scales") | {"zero": ("{module}.qzeros", ("I32",))},
        optional={"group": ("{module}.g_idx", ("I32",))},
        decode=gptq,
        bits=lambda stored: stored.whole("bits"),
    ),
    *(
        WeightLayout(
            name=kind.upper(),
            method="bitsandbytes",
            dtypes=("U8",),
            shape=bitsandbytes.four_bits_shape,
            parts=_scale("{module}.{param}.absmax", ("F32", "U8"))
            | {
                "table": ("{module}.{param}.quant_map", ("F32",)),
                "state": (f"{{module}}.{{param}}.quant_state.bitsandbytes__{kind}", ("U8",)),
            },
            optional={
                "nested": ("{module}.{param}.nested_absmax", ("F32",)),
                "nested_table": ("{module}.{param}.nested_quant_map", ("F32",)),
            },
            decode=bitsandbytes.four_bits,
        )
        for kind in ("nf4", "fp4")
    ),
    WeightLayout(
        name="INT8",
        method="bitsandbytes",
        dtypes=("I8",),
        parts=_scale("{module}.SCB", ("F32",)),
        dimensions=2,
        decode=bitsandbytes.int8,
    ),
)
