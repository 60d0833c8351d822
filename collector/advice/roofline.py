"""A roofline: the least time that the GEMMs of a step take on a device, by the formats of their operands.

A GEMM takes the longer of two times: its FLOP at the peak rate of the slower operand's format, and its bytes (the
operands in their formats, the result in bf16) at the bandwidth of memory. Before it, each operand that is not in bf16
is read in bf16 and written in its format. QKᵀ and PV are whole products of their own, neither causal nor fused. This is
an estimate and a bound: it leaves out everything but GEMMs, and launch overhead, overlap and communication. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from binade.collector.advice.costs import BF16_BITS, bits_of
from binade.collector.errors import ConfigError
from binade.collector.models.shape import Shape
from binade.collector.models.site import HEAD, Site
from binade.collector.models.specs import LinearSpec
from binade.collector.recipes.recipe import BF16
from binade.collector.training.devices import Device
from binade.collector.training.targets import read_config, targets_file
from binade.quant.specs import OPERAND_FIELDS

GEMMS = tuple(zip(OPERAND_FIELDS[::2], OPERAND_FIELDS[1::2], strict=True))  # the two operands of each
PUBLISHED = Path(__file__).with_name("devices.toml")
MEANING = (
    "Times are estimates, the least that the GEMMs of one micro-batch take at a device's peak rates, forward and "
    "backward, with QKᵀ and PV not fused; without launch overhead, overlap and communication."
)

Place = tuple[str, int, str]
"""part, layer_index and module of a product."""
Operand = tuple[str, int, str, str]
"""The same and a field of GemmFormats."""


@dataclass(frozen=True)
class ProductCost:
    """`count` products of a [m, k] and b [k, n] in a micro-batch. Its GEMMs take equal FLOP: forward = a b,
    dgrad = grad bᵀ, wgrad = aᵀ grad. m is fractional where it is a share of the tokens."""

    part: str
    site: Site
    m: float
    k: int
    n: int
    count: int = 1

    @property
    def place(self) -> Place:
        return self.part, self.site.layer_index, self.site.module

    @property
    def flop(self) -> float:
        """FLOP of each of its GEMMs."""
        return 2.0 * self.count * self.m * self.k * self.n

    def seconds(self, specs: Mapping[str, str], device: Device) -> float:
        """The least time of one of its GEMMs. specs: those of its two operands, by their fields of GemmFormats."""
        m, k, n = self.m, self.k, self.n
        values = {"a": self.count * m * k, "b": self.count * k * n, "grad": self.count * m * n}
        moved = quantizing = 0.0  # bytes
        for field, spec in specs.items():
            size = values.pop(field.partition("_")[2])
            moved += size * bits_of(spec) / 8
            quantizing += 0 if spec == BF16 else size * (BF16_BITS + bits_of(spec)) / 8
        moved += sum(values.values()) * BF16_BITS / 8  # the result
        rate, bandwidth = min(map(device.rate, specs.values())), device.bandwidth * 1e12
        return max(self.flop / rate, moved / bandwidth) + quantizing / bandwidth


def products(shape: Shape, batch: int, length: int) -> tuple[ProductCost, ...]:
    """The products of a micro-batch of `batch` sequences of `length` tokens. The experts of a layer are one, with the
    tokens that reach each on average."""
    experts = Counter((spec.site.layer_index, spec.site.module) for spec in shape.specs())
    listed = [ProductCost("head", HEAD, batch * length, shape.hidden, shape.vocab)]
    for spec in {(spec.site.layer_index, spec.site.module): spec for spec in shape.specs()}.values():
        site = Site(spec.site.layer_index, spec.site.module)
        if isinstance(spec, LinearSpec):
            part, tokens = "router" if site.module == "router" else "linear", float(batch * length * spec.share)
            count = experts[site.layer_index, site.module]
            listed.append(ProductCost(part, site, tokens, spec.inputs, spec.outputs, count))
        else:  # queries that share keys and values are one matrix
            queries, count = length * spec.heads // spec.kv_heads, batch * spec.kv_heads
            listed.append(ProductCost("qk", site, queries, spec.head_dim, length, count))
            listed.append(ProductCost("pv", site, queries, length, spec.value_dim, count))
    return tuple(listed)


@dataclass(frozen=True)
class Roofline:
    """The products of a step on a device."""

    device: Device
    products: tuple[ProductCost, ...]

    @cached_property
    def by_place(self) -> dict[Place, ProductCost]:
        return {product.place: product for product in self.products}

    def step(self, specs: Mapping[Operand, str]) -> float:
        """Seconds of the step. specs: operands that it does not name are in bf16."""
        return sum(
            product.seconds({field: specs.get((*product.place, field), BF16) for field in gemm}, self.device)
            for product in self.products
            for gemm in GEMMS
        )

    @cached_property
    def bf16(self) -> float:
        """Seconds of the step in bf16."""
        return self.step({})


def read_devices(path: Path | None = None) -> dict[str, Device]:
    """The devices by name: published ones, those of binade.toml, those of this file; later ones replace earlier ones.
    Raises ConfigError for an invalid file."""
    devices: dict[str, Device] = {}
    for file in filter(None, (PUBLISHED, targets_file(), path)):
        devices |= read_config(file).devices
    return devices


def find_device(name: str, path: Path | None = None) -> Device:
    """The device of `read_devices`. Raises ConfigError."""
    devices = read_devices(path)
    if name not in devices:
        raise ConfigError(f"there is no device {name!r}: choose from {', '.join(devices)}, or add it (docs/advisor.md)")
    return devices[name]
