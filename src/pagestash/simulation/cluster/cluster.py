"""Clusters: what a device computes, holds and sends, from a TOML file.

`h100:256` is 256 devices of the shipped file `h100`; `mine.toml:16` is 16 devices of a file of one's own. Files
give every number with its source. Rates are bytes or operations a second, each way where a link has two.

Time of a product [m, k] x [k, n], and of a kernel that reads and writes `b` bytes:

    product  = max(2·m·n·k / (rate · efficiency · shape(m, n, k)), bytes / memory)
    kernel   = b / memory                                     memory = bandwidth · its efficiency

where `shape` is the part of the multiprocessors' work that is of use: products run in tiles of 128 x 128, as many
at a time as there are multiprocessors, and fill and drain a pipeline along k.
"""

import math
from dataclasses import MISSING, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from pagestash.sizes import parse_bytes
from pagestash.toml import read_toml

Precision = Literal["bf16", "fp8", "mxfp8", "fp32"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
ELEMENT_BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1, "mxfp8": 1, "fp32": 4}

SAVED_BYTES: dict[Precision, float] = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 33 / 32, "fp32": 4.0}
"""Of an element of a product's input as it is saved for backward; MXFP8 has a scale for every 32."""

SHIPPED = ("h100", "h200", "b200", "gb200")
TILE, FILL = 128, 256
"""Rows and columns of a product's tile; elements along k that its pipeline takes to fill and drain."""
MOST_DEVICES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator."""

    memory: int
    memory_bandwidth: float
    memory_efficiency: float
    processors: int
    """Multiprocessors, each of which computes one tile of a product at a time."""
    product_workspace: int
    """Bytes that one product has as its workspace."""
    outside: int
    """Bytes that are not torch's."""
    kernel: float = 0.0
    """Seconds that a kernel takes beside its bytes and operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Operations a second by precision, dense."""

    bf16: float
    fp8: float
    mxfp8: float
    fp32: float
    efficiency: float
    """Part of the rate that a large product reaches."""
    attention_efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """Bytes a second between a device and its host, while all devices of the node copy."""

    out: float
    back: float
    both: float
    """Each way while both ways are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(HostLink):
    """The host of a node."""

    memory: int
    """Which the node's devices share."""
    launch: float = 0.0
    """Seconds in which it launches a kernel."""
    region: float = 0.0
    """Seconds that a recomputed region takes it, forward and backward together, beside launches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """How devices are connected."""

    devices: int
    """Devices of one host."""
    nvlink: float
    nvlink_efficiency: float
    nvlink_devices: int
    """Devices that reach each other by NVLink."""
    network: float
    """Of one device."""
    network_efficiency: float
    latency: float
    """Seconds of a collective beside its bytes."""
    dispatch_processors: int = 0
    """Multiprocessors that dispatch and combine take from the compute beside them."""
    beside_compute: float = 1.0
    """Seconds of dispatch and combine beside compute, over those alone."""

    @property
    def nvlink_rate(self) -> float:
        return self.nvlink * self.nvlink_efficiency

    @property
    def network_rate(self) -> float:
        return self.network * self.network_efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a measured run has over its prediction; `pagestash calibrate` finds both."""

    kernels: float = 1.0
    """Rate of products, attention and memory, over what their efficiencies say."""
    allocated: float = 1.0
    """Allocated bytes at the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices of one kind."""

    name: str
    devices: int
    device: Device
    matmul: Matmul
    host: Host
    node: Node
    calibration: Calibration = Calibration()

    def __post_init__(self) -> None:
        if not 1 <= self.devices <= MOST_DEVICES:
            raise ValueError(
                f"cluster {self.name}:{self.devices}: expected 1 to {MOST_DEVICES:,} devices, like h100:256"
            )

    # --- compute ---

    @property
    def memory_rate(self) -> float:
        """Bytes that kernels read and write a second."""
        return self.device.memory_bandwidth * self.device.memory_efficiency * self.calibration.kernels

    def product_seconds(self, m: float, n: float, k: float, precision: Precision, groups: int = 1) -> float:
        """Time of `groups` products [m, k] x [k, n] in one launch: read both operands, write the result."""
        if not (m and n and k):
            return 0.0
        operations = 2 * groups * m * n * k
        rate = getattr(self.matmul, precision) * self.matmul.efficiency * self.shape(m, n, k, groups)
        rate *= self.calibration.kernels
        size = ELEMENT_BYTES[precision]
        traffic = groups * (size * (m * k + k * n) + 2 * m * n)
        return max(operations / rate, traffic / self.memory_rate)

    def shape(self, m: float, n: float, k: float, groups: int = 1) -> float:
        """The part of the multiprocessors' work that is of use."""
        rows, columns = math.ceil(m / TILE), math.ceil(n / TILE)
        tiles = groups * rows * columns
        waves = math.ceil(tiles / self.device.processors)
        used = tiles / (waves * self.device.processors)
        return (m / (rows * TILE)) * (n / (columns * TILE)) * used * k / (k + FILL)

    def attention_seconds(self, operations: float) -> float:
        """Time of attention's scores, which are in 16 bits in every precision."""
        rate = self.matmul.bf16 * self.matmul.attention_efficiency * self.calibration.kernels
        return operations / rate

    def kernel_seconds(self, size: float) -> float:
        """Time of a kernel that reads and writes so many bytes."""
        return size / self.memory_rate

    # --- communication ---

    def group_rate(self, ranks: int) -> float:
        """Bytes that one device sends a second in an all-to-all of `ranks` neighbours.

        NVLink and the network work side by side, each on its share of the peers; the slower one decides.
        """
        node, inside = self.node, min(ranks, self.node.nvlink_devices)
        if ranks <= inside:
            return node.nvlink_rate
        outside = (ranks - inside) / (ranks - 1)
        network = node.network_rate / outside
        return network if inside == 1 else min(network, node.nvlink_rate / (1 - outside))

    def send_rate(self, stride: int) -> float:
        """Bytes a second between devices that are `stride` apart: pipeline stages."""
        return self.node.nvlink_rate if stride < self.node.nvlink_devices else self.node.network_rate

    def all_to_all_seconds(self, sent: float, ranks: int) -> float:
        """Time in which each of `ranks` devices sends `sent` bytes to the others."""
        return self.node.latency + sent / self.group_rate(ranks) if ranks > 1 and sent else 0.0

    def gather_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Time of an all-gather that gives each device `size` bytes, or of a reduce-scatter of as many.

        A ring of devices that are `stride` apart: every one sends `size · (ranks - 1) / ranks`, and the slowest
        link decides, which between hosts is the network of each of their devices together.
        """
        if ranks <= 1 or not size:
            return 0.0
        node, rate = self.node, self.node.nvlink_rate
        if ranks * stride > node.nvlink_devices:
            rate = min(rate, node.network_rate * max(1, node.nvlink_devices // stride))
        return node.latency + size * (ranks - 1) / ranks / rate

    @property
    def host_bytes_a_device(self) -> int:
        """Host memory of a node divided over its devices."""
        return self.host.memory // self.node.devices


_TABLES: dict[str, type] = {
    "device": Device,
    "matmul": Matmul,
    "host": Host,
    "node": Node,
    "calibration": Calibration,
}
_BYTES = ("memory", "product_workspace", "outside")
_COUNTS = ("processors", "devices", "nvlink_devices", "dispatch_processors")
_MAY_BE_ZERO = ("latency", "launch", "region", "kernel", "dispatch_processors")


def read_cluster(text: str) -> Cluster:
    """The cluster of `h100:256`, or of a TOML file: `mine.toml:16`.

    >>> read_cluster("h100:256").devices
    256
    """
    name, colon, count = text.rpartition(":")
    if not colon:
        raise ValueError(f"cluster {text!r}: expected a name and a number of devices, like h100:256")
    try:
        devices = int(count)
    except ValueError:
        raise ValueError(f"cluster {text!r}: {count!r} is no number of devices, as in h100:256") from None
    return load_cluster(name, devices)


def load_cluster(name: str | Path, devices: int) -> Cluster:
    """`devices` devices of a shipped cluster or of a file."""
    path = cluster_file(name)
    return parse_cluster(read_toml(path), devices, str(path))


def cluster_file(name: str | Path) -> Path:
    """The file of a shipped cluster, or one's own."""
    if str(name) in SHIPPED:
        return Path(str(files("pagestash.simulation.cluster").joinpath("files", f"{name}.toml")))
    if str(name).endswith(".toml"):
        return Path(name)
    raise ValueError(
        f"cluster {str(name)!r}: expected {', '.join(SHIPPED[:-1])} or {SHIPPED[-1]}, or a TOML file"
    )


def parse_cluster(tables: dict[str, Any], devices: int, where: str = "cluster") -> Cluster:
    """The cluster of tables as `load_cluster` reads them."""
    for key in tables:
        if key not in ("name", *_TABLES):
            raise ValueError(f"{where}: unknown key {key!r}; expected name, {', '.join(_TABLES)}")
    name = tables.get("name", Path(where).stem)
    if not isinstance(name, str):
        raise ValueError(f"{where}: name={name!r}: expected text")
    tables = {"calibration": {}} | tables
    made = {key: _parse_table(tables.get(key), kind, f"{where}: [{key}]") for key, kind in _TABLES.items()}
    return Cluster(name=name, devices=devices, **made)


def _parse_table(table: Any, kind: Any, where: str) -> Any:
    if not isinstance(table, dict):
        raise ValueError(f"{where} is missing: expected a table")
    known = {field.name: field for field in fields(kind)}
    for name in table:
        if name not in known:
            raise ValueError(f"{where} has an unknown key {name!r}; expected {', '.join(known)}")
    for name, field in known.items():
        if name not in table and field.default is MISSING:
            raise ValueError(f"{where} lacks {name}")
    return kind(**{name: _parse_number(value, name, f"{where} {name}") for name, value in table.items()})


def _parse_number(value: Any, name: str, where: str) -> float | int:
    if name in _BYTES:
        return parse_bytes(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where}={value!r}: expected a number")
    if name in _COUNTS and value != int(value):
        raise ValueError(f"{where}={value!r}: expected a whole number")
    if name.endswith("efficiency") and not 0 < value <= 1:
        raise ValueError(f"{where}={value!r}: expected a part of 1")
    if value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ValueError(f"{where}={value!r}: expected more than 0")
    return int(value) if name in _COUNTS else float(value)
