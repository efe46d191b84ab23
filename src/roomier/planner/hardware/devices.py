"""Table of common GPUs with their memory, their speed, and a typical node. The values come from data sheets and public
reports, not from measurements by roomier.

[Note: sources of the values]
*Rates* are dense peaks (without structured sparsity) in FLOP/s. 16-bit and tf32 products accumulate in fp32. If a data
sheet contains only the rate with sparsity, the table contains half of this rate. NVIDIA's data sheets: Tesla P100
(2016), V100 (January 2020), T4 (2019), A100 (June 2021, and "A100 80GB PCIe" of the same month), A10 and A30 (2021),
A10G (AWS edition, February 2022), A40 and RTX A6000 (2021), L4 and L40S (2023), RTX 6000 Ada (2022), H100 (2023: SXM,
PCIe, NVL), H200 (November 2024), HGX B200 and HGX B300 (2025, an eighth of the platform's value). GeForce: white papers
"NVIDIA Ampere GA102" (2021), "NVIDIA Ada" (2022), "NVIDIA RTX Blackwell" (2025), rates with fp32 accumulation. AMD:
data sheets of the Instinct MI250X (2021, half of the module, because torch sees each of its two dies as a device),
MI300X (2023) and MI325X (2024). H20: values from resellers, because no public data sheet exists. The values of H100
SXM, H200, B200, MI325X, RTX 4090 and RTX 5090 were compared with public copies (bandwidth of B200: bus width and clock
as reported by its driver, pytorch/ao#4002). The other values were entered from memory and were not compared with the
data sheets. Public copies for B300 disagree with each other.

*Memory* is the total that CUDA reports, because a run cannot use more. It is up to 9 % less than the nominal memory
size, because the driver and error correction reserve some memory. If the totals of different drivers differ, the table
contains the smallest. Sources: public out-of-memory messages ("GPU 0 has a total capacity of ...") for A100, H100, H100
NVL, H200, B300, A10G, A40, L40S, V100 32GB, RTX 5090 and MI300X; pytorch/ao#4002 (B200) and unslothai/unsloth-zoo#1053
(RTX 6000 Ada). The other totals were entered without a source.

*Share* is the fraction of the peak that matrix products of a model reach. Published values for large products are 0.74
for A100, 0.76 for V100, 0.63 for A6000, and 0.5 for RTX 3090 Ti (github.com/fanghostt/transformers-benchmarks). The
other values are assumptions based on these published values, and are lower for cards that reduce their clock to limit
power (T4, L4) and for AMD. Full steps reach a smaller share, because they include other operations and collectives,
which roomier forecasts separately: 52 to 58 % of the peak on 64 A100 (torchtitan, docs/performance.md of 2024, Llama 3
8B and 70B), 38 to 43 % on up to 16,384 H100 (Llama 3, arXiv 2407.21783, Table 4), and 46 % on TPU v4 (PaLM, arXiv
2204.02311, section 4.1).

*Links* are given for one direction. Data sheets list the sum of both directions without overhead, so the table contains
half of their values, and :meth:`Sheet.machine` multiplies the values of the table by ``LINK_EFFICIENCY``. For example,
NCCL's maintainers report 350 GB/s for H100 (data sheet: 900), and 12 GB/s for PCIe 3.0 (data sheet: 16)
(NVIDIA/nccl#864, #986). Latencies are for one step of a ring, from RCCL's table (``hwLat``, protocol Simple): 3.6 us
over NVLink, 5.7 us over PCIe, and 19.8 us over a network.

*Nodes* are the vendors' reference systems (DGX and HGX, HGX-like MI300X, Frontier for MI250X; AWS p3, g4dn, g5, g6),
with one network card per device unless the comment above the table states otherwise. For workstation cards, the table
assumes a node with eight cards on PCIe 4.0 or 5.0, 512 GiB of memory, and one shared network card of 100 Gbit/s. Each
node is assumed to have one PCIe 4.0 NVMe drive, with 6 GB/s for reads and 4 GB/s for writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

from roomier.core.device.resolve import device_name
from roomier.planner.hardware.machine import Device, Link, Machine

LINK_EFFICIENCY = 0.78
OPERATION_S = 7e-6
"""Assumed host time in seconds to start one operation of eager PyTorch on a GPU. Typical times are 5 to 10 us."""

_NVLINK_S, _PCIE_S, _NETWORK_S = 3.6e-6, 5.7e-6, 19.8e-6
_DISK_READ, _DISK_WRITE = Link(6e9, 1e-4), Link(4e9, 1e-4)
MOST_PER_NODE = 16
"""Maximum number of GPUs in a node. (A DGX-2 has 16.)"""


@dataclass(frozen=True)
class Sheet:
    """One row of the table.

    Attributes:
        device: the device of the row.
        aliases: other names of the device, including the names that CUDA reports; see :func:`plain_name`.
        capability: major version of CUDA's compute capability; 0 for devices of other vendors.
        num_links: number of NVLinks per device; 0 if the devices of a node are connected by PCIe.
        in_node, host, network: rates of the links in one direction, in bytes/s, from the data sheet.
        node_memory_bytes: host memory of a typical node.
    """

    device: Device
    aliases: tuple[str, ...]
    capability: int
    num_links: int
    in_node: float
    host: float
    network: float
    node_memory_bytes: int

    @property
    def name(self) -> str:
        """Name of the device in the table."""
        return self.device.name

    def machine(self, devices: int, num_nodes: int) -> Machine:
        """Return a machine of ``num_nodes`` nodes, each with ``devices`` devices."""
        return Machine(
            device=self.device,
            devices_per_node=devices,
            num_nodes=num_nodes,
            in_node=Link(self.in_node * LINK_EFFICIENCY, _NVLINK_S if self.in_node > self.host else _PCIE_S),
            between_nodes=Link(self.network * LINK_EFFICIENCY, _NETWORK_S),
            to_host=Link(self.host * LINK_EFFICIENCY, 1e-5),
            disk_read=_DISK_READ,
            disk_write=_DISK_WRITE,
            host_memory_bytes=self.node_memory_bytes,
            source="data sheets",
        )


# Rates are in TFLOP/s, bandwidth in TB/s, links in GB/s in one direction, and network in Gbit/s per device; "-" means
# absent. cc is the major version of the compute capability. The row mi250x is one of the two dies of a card. H100 PCIe
# and NVL: NVLink bridges connect only pairs of cards. The devices of an AWS node (a10g, l4, v100, t4) share its network
# card of 100 Gbit/s. MI300X, MI325X: 7 links of 64 GB/s. MI250X: 50 GB/s between the slowest pairs, 36 GB/s to the
# host, and half of a network card of 200 Gbit/s, as in Frontier.
_TABLE = """
name            GiB     TB/s   fp32   tf32    bf16    fp16    fp8     cc  link  links  host  network  node_GiB  share
b300            267.69  8.0    75     1125    2250    2250    4500    10  900   18     64    800      2048      0.65
b200            178.35  7.67   75     1125    2250    2250    4500    10  900   18     64    400      2048      0.65
h200            139.71  4.8    67     494.5   989.5   989.5   1979    9   450   18     64    400      2048      0.65
h100            79.1    3.35   67     494.5   989.5   989.5   1979    9   450   18     64    400      2048      0.65
h100-pcie       79.1    2.0    51     378     756     756     1513    9   -     0      64    200      1024      0.65
h100-nvl        93.0    3.9    60     417.5   835.5   835.5   1670.5  9   -     0      64    200      1024      0.65
h20             95.0    4.0    44     74      148     148     296     9   450   18     64    400      2048      0.65
a100-80gb       79.14   2.039  19.5   156     312     312     -       8   300   12     32    200      2048      0.72
a100-40gb       39.38   1.555  19.5   156     312     312     -       8   300   12     32    200      1024      0.72
a100-80gb-pcie  79.14   1.935  19.5   156     312     312     -       8   -     0      32    100      1024      0.72
a100-40gb-pcie  39.38   1.555  19.5   156     312     312     -       8   -     0      32    100      1024      0.72
a40             44.34   0.696  37.4   74.8    149.7   149.7   -       8   -     0      32    25       512       0.63
a30             23.5    0.933  10.3   82      165     165     -       8   -     0      32    25       512       0.65
a10             22.0    0.6    31.2   62.5    125     125     -       8   -     0      32    25       512       0.63
a10g            22.0    0.6    35     35      70      70      -       8   -     0      32    12.5     768       0.63
l40s            44.39   0.864  91.6   183     362     362     733     8   -     0      32    100      1024      0.63
l4              21.95   0.3    30.3   60      121     121     242.5   8   -     0      32    12.5     768       0.5
v100-32gb       31.73   0.9    15.7   -       -       125     -       7   150   6      16    12.5     768       0.72
v100-16gb       15.77   0.9    15.7   -       -       125     -       7   150   6      16    12.5     512       0.72
v100-32gb-pcie  31.73   0.9    14     -       -       112     -       7   -     0      16    12.5     512       0.72
v100-16gb-pcie  15.77   0.9    14     -       -       112     -       7   -     0      16    12.5     512       0.72
t4              14.56   0.32   8.1    -       -       65      -       7   -     0      16    12.5     384       0.5
p100            15.89   0.732  9.3    -       -       18.7    -       6   -     0      16    12.5     256       0.65
rtx5090         31.36   1.792  104.8  104.8   209.5   209.5   419     12  -     0      64    12.5     512       0.65
rtx4090         23.63   1.008  82.6   82.6    165.2   165.2   330.3   8   -     0      32    12.5     512       0.65
rtx3090         23.57   0.936  35.6   35.6    71      71      -       8   -     0      32    12.5     512       0.65
a6000           47.4    0.768  38.7   77.4    154.8   154.8   -       8   -     0      32    12.5     512       0.63
rtx6000-ada     47.37   0.96   91.1   182.1   364.2   364.2   728.5   8   -     0      32    12.5     512       0.63
mi325x          255.69  6.0    163.4  653.7   1307.4  1307.4  2614.9  0   448   0      64    400      2048      0.5
mi300x          191.69  5.3    163.4  653.7   1307.4  1307.4  2614.9  0   448   0      64    400      2048      0.5
mi250x          63.98   1.638  47.9   -       191.5   191.5   -       0   50    0      36    100      512       0.5
"""

# A name that several devices share (a100, v100) refers to the device with the least memory.
_ALIASES = {
    "b300": ("NVIDIA B300 SXM6 AC", "HGX B300", "b300-sxm"),
    "b200": ("HGX B200", "b200-sxm"),
    "h200": ("h200-sxm", "h200-141gb"),
    "h100": ("NVIDIA H100 80GB HBM3", "h100-sxm", "h100-sxm5", "h100-sxm-80gb", "h100-80gb"),
    "h100-pcie": ("h100-pcie-80gb", "h100-80gb-pcie"),
    "h100-nvl": ("h100-94gb",),
    "h20": ("h20-96gb",),
    "a100-80gb": ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", "a100-80gb-sxm"),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb", "a100-40gb-sxm", "a100"),
    "a100-80gb-pcie": ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
    "a100-40gb-pcie": ("NVIDIA A100-PCIE-40GB", "a100-pcie"),
    "a40": ("a40-48gb",),
    "a30": ("a30-24gb",),
    "a10": ("a10-24gb",),
    "a10g": ("a10g-24gb",),
    "l40s": ("l40s-48gb",),
    "l4": ("l4-24gb",),
    "v100-32gb": ("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "v100-sxm-32gb"),
    "v100-16gb": ("Tesla V100-SXM2-16GB", "v100-sxm-16gb", "v100"),
    "v100-32gb-pcie": ("Tesla V100-PCIE-32GB",),
    "v100-16gb-pcie": ("Tesla V100-PCIE-16GB", "v100-pcie"),
    "t4": ("t4-16gb",),
    "p100": ("Tesla P100-SXM2-16GB", "Tesla P100-PCIE-16GB", "p100-16gb"),
    "rtx5090": ("5090",),
    "rtx4090": ("4090",),
    "rtx3090": ("3090",),
    "a6000": ("NVIDIA RTX A6000", "a6000-48gb"),
    "rtx6000-ada": ("NVIDIA RTX 6000 Ada Generation", "6000 Ada", "a6000-ada"),
    "mi325x": ("mi325x-256gb",),
    "mi300x": ("AMD Instinct MI300X VF", "mi300x-192gb"),
    "mi250x": ("AMD Instinct MI250X/MI250", "mi250x-64gb"),
}


def _sheet(row: dict[str, str]) -> Sheet:
    number = {name: float(text) for name, text in row.items() if name != "name" and text != "-"}
    device = Device(
        name=row["name"],
        kind="cuda",
        memory_bytes=int(number["GiB"] * 2**30),
        flops_per_s={name: number[name] * 1e12 for name in ("fp32", "tf32", "bf16", "fp16", "fp8") if name in number},
        memory_bytes_per_s=number["TB/s"] * 1e12,
        product_efficiency=number["share"],
        operation_s=OPERATION_S,
    )
    return Sheet(
        device=device,
        aliases=_ALIASES[row["name"]],
        capability=int(number["cc"]),
        num_links=int(number["links"]),
        in_node=number.get("link", number["host"]) * 1e9,
        host=number["host"] * 1e9,
        network=number["network"] * 1e9 / 8,
        node_memory_bytes=int(number["node_GiB"]) * 2**30,
    )


_HEADER, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())
SHEETS = tuple(_sheet(dict(zip(_HEADER, row, strict=True))) for row in _ROWS)


def plain_name(text: str) -> str:
    """Return ``text`` in lower case without vendor names and separators: ``"NVIDIA A100-SXM4-40GB"`` ->
    ``"a100sxm440gb"``."""
    return re.sub(r"nvidia|tesla|geforce|amd|instinct|[^a-z0-9]", "", text.lower())


def sheet_of(name: str) -> Sheet | None:
    """Return the row for a name; None if there is none. Partial names do not match: ``RTX 3090 Ti`` does not match
    ``rtx3090``."""
    return known_names().get(plain_name(name))


@cache
def known_names() -> dict[str, Sheet]:
    """Return the row for each name and alias. The keys have the form that :func:`plain_name` returns."""
    return {plain_name(name): sheet for sheet in SHEETS for name in (sheet.name, *sheet.aliases)}


def peak_flops_per_s(device: torch.device, precision: str) -> float | None:
    """Return the peak rate of matrix products in FLOP/s for ``precision`` (``"16"``, ``"tf32"`` or ``"32"``).

    Returns None if the table does not contain the device or has no rate for ``precision``. CPUs are not in the table,
    because their peak rate depends on the clock under load.
    """
    sheet = sheet_of(device_name(device) or "") if device.type == "cuda" else None
    dtype = {"16": "fp16", "tf32": "tf32", "32": "fp32"}[precision]
    return None if sheet is None else sheet.device.flops_per_s.get(dtype)
