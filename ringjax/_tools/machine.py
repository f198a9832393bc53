"""The figures of devices: their memory, and what they compute and send in a second."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringjax._tools.messages import Message


@dataclasses.dataclass(frozen=True)
class Machine:
    """The figures of a device, and of the links between devices.

    Args:
      name: what the device is called.
      platform: ``"cuda"``, ``"tpu"`` or ``"cpu"``.
      operations: the most operations in a second, by the itemsize of the numbers.
      memory: the bytes of its memory.
      memory_bandwidth: the bytes that its memory reads or writes in a second.
      link_bandwidth: the bytes in a second, one way, from a device to others in its node; in a grid, to the next one.
      network_bandwidth: the bytes in a second, one way, from a device to those of other nodes.
      node_size: the number of devices that links connect.
      is_grid: whether links connect only neighboring devices, so that longer distances take several links.
      dimensions: those of the grid, in each of which a device has two neighbors. Its devices are assumed to form a
        cube whose opposite sides are linked.
      latency: the seconds that a message takes, however short.
      pair_seconds: the seconds that a pair takes besides its products, such as for its exponential; 0 if products of
        other pairs hide them.
      is_measured: whether attention reached these rates; else they are peak rates.
    """

    name: str
    platform: str
    operations: Mapping[int, float]
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    node_size: int
    is_grid: bool = False
    dimensions: int = 1
    latency: float = 0.0
    pair_seconds: float = 0.0
    is_measured: bool = False

    def rate(self, itemsize: int) -> float:
        """Returns the most operations in a second on numbers of this itemsize, or of the next one that is known."""
        known = sorted(self.operations)
        return self.operations[next((size for size in known if size >= itemsize), known[-1])]

    def seconds(self, message: Message, num_devices: int) -> float:
        """Returns the least time of a message, summed over its `times`, if `num_devices` devices in a row send it."""
        is_inside = self.is_inside(message, num_devices)
        one = self._inside(message, num_devices) if is_inside else self._across(message)
        return message.times * (one + self.latency)

    def beside(self, head_parts: int) -> "Machine":
        """Returns the figures for the devices of a sequence whose heads are cut over others, which lie nearer."""
        return dataclasses.replace(self, node_size=max(1, self.node_size // head_parts))

    @property
    def hides_messages(self) -> bool:
        """Whether devices compute while messages are in flight; CPUs copy messages themselves."""
        return self.platform != "cpu"

    def is_inside(self, message: Message, num_devices: int) -> bool:
        """Returns whether a message stays inside one node, on every device."""
        span = num_devices if message.collective == "permute" else message.distance
        return num_devices <= self.node_size or self.node_size % (message.span or span) == 0

    def _inside(self, message: Message, num_devices: int) -> float:
        seconds, distance = message.num_bytes / self.link_bandwidth, message.distance
        if not self.is_grid:
            return seconds
        if message.collective == "permute":
            # It takes every link on the shortest way, and no way is longer than half of each side of the cube.
            dimensions, side = self._cube(num_devices)
            return seconds * min(distance, max(1.0, dimensions * side / 2))
        dimensions, side = self._cube(distance)
        if message.collective == "all_to_all":
            # Of each device's messages, also to itself, a quarter of the side passes the two links of a dimension.
            return seconds * distance / max(1, distance - 1) * max(1 / distance, side / 8)
        return seconds / (2 * dimensions)

    def _cube(self, num_devices: int) -> tuple[int, float]:
        """Returns the dimensions and the side of a cube of so many devices; few devices have fewer dimensions."""
        dimensions = min(self.dimensions, max(1, num_devices.bit_length() - 1))
        return dimensions, num_devices ** (1 / dimensions)

    def _across(self, message: Message) -> float:
        if message.collective in ("permute", "all_to_all"):
            return message.num_bytes / self.network_bandwidth
        # Each node receives what all others have, over the network cards of all its devices.
        shared = message.num_bytes * (message.distance - self.node_size) / max(1, message.distance - 1)
        return max(message.num_bytes / self.link_bandwidth, shared / self.node_size / self.network_bandwidth)


def _gpu(name: str, half: float, single: float, gibibytes: int, memory: float, link: float, network: float) -> Machine:
    operations = {2: half, 4: single, 8: single / 2}
    return Machine(name, "cuda", operations, gibibytes * 2**30, memory, link, network, node_size=8, latency=5e-6)


def _tpu(
    name: str, half: float, gibibytes: int, memory: float, link: float, network: float, size: int, dimensions: int
) -> Machine:
    operations = {2: half, 4: half / 6}  # a float32 product takes six bfloat16 ones
    sizes = {"node_size": size, "is_grid": True, "dimensions": dimensions}
    return Machine(name, "tpu", operations, gibibytes * 2**30, memory, link, network, **sizes, latency=1e-6)


# The vendors' figures: dense products, one direction of links. Networks have one 400 Gb/s card for each GPU (200 for
# the A100), and 100 Gb/s for each TPU.
MACHINES = {
    machine.name: machine
    for machine in (
        _gpu("A100", 312e12, 19.5e12, 80, 2.04e12, 300e9, 25e9),
        _gpu("H100", 989e12, 67e12, 80, 3.35e12, 450e9, 50e9),
        _gpu("H200", 989e12, 67e12, 141, 4.8e12, 450e9, 50e9),
        _gpu("B200", 2250e12, 75e12, 180, 8e12, 900e9, 50e9),
        _tpu("v5e", 197e12, 16, 0.82e12, 45e9, 12.5e9, 256, 2),
        _tpu("v5p", 459e12, 95, 2.77e12, 90e9, 12.5e9, 8960, 3),
        _tpu("v6e", 918e12, 32, 1.64e12, 90e9, 12.5e9, 256, 2),
        # One of many cores; `ringjax plan --measure` writes the figures of this machine.
        Machine("cpu", "cpu", {4: 50e9, 8: 25e9}, 4 * 2**30, 10e9, 3e9, 1e9, node_size=2**20, latency=1e-4),
    )
}
# The names that jax gives to TPUs.
_TPU_KINDS = {"v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v5p": "v5p", "v6 lite": "v6e", "v6e": "v6e"}


def find_machine(device: str | Machine) -> Machine:
    """Returns the figures of a device, given its name or a file of figures.

    Raises:
      ValueError: if no device and no file has this name.
      TypeError: if it is not a string.
    """
    if isinstance(device, Machine):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device={device!r} must be the name of a device, such as 'H100', or a file of figures")
    known = {name.lower(): machine for name, machine in MACHINES.items()}
    if device.lower() in known:
        return known[device.lower()]
    if Path(device).is_file():
        return read_machine(device)
    raise ValueError(
        f"device={device!r} is unknown: use one of {', '.join(MACHINES)}, or a file of figures such as "
        "`ringjax plan --measure` writes"
    )


def read_machine(path: str) -> Machine:
    """Returns the figures in a file of JSON.

    Raises:
      ValueError: if they are not those of a `Machine`.
    """
    try:
        figures: dict[str, Any] = json.loads(Path(path).read_text())
        figures["operations"] = {int(size): float(rate) for size, rate in figures["operations"].items()}
        machine = Machine(**figures)
        _check_figures(machine)
        return machine
    except (KeyError, TypeError, ValueError, AttributeError, OSError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Machine))
        raise ValueError(f"device={path!r} is no file of figures ({error}): give, in JSON, {names}") from None


def _check_figures(machine: Machine) -> None:
    """Checks what a file says of a device.

    Raises:
      ValueError: for a figure that no device has.
    """
    rates = {f"operations[{size}]": rate for size, rate in machine.operations.items()}
    rates |= {name: getattr(machine, name) for name in ("memory", "memory_bandwidth", "link_bandwidth")}
    rates |= {name: getattr(machine, name) for name in ("network_bandwidth", "node_size")}
    if not machine.operations:
        raise ValueError("operations is empty")
    costs = {name: getattr(machine, name) for name in ("latency", "pair_seconds")}
    for name, rate in {**rates, **costs}.items():
        is_number = isinstance(rate, int | float) and math.isfinite(rate)
        if not is_number or rate < 0 or (rate == 0 and name not in costs):
            raise ValueError(f"{name} is {rate!r}, which is no positive number")
    for name in ("is_grid", "is_measured"):
        if not isinstance(getattr(machine, name), bool):
            raise ValueError(f"{name} is {getattr(machine, name)!r}, which is neither true nor false")
    for name in ("node_size", "dimensions"):
        if not (isinstance(size := getattr(machine, name), int) and size > 0):
            raise ValueError(f"{name} is {size!r}, which is no positive integer")
    if not isinstance(machine.name, str) or machine.platform not in ("cuda", "tpu", "cpu"):
        raise ValueError(
            f"name and platform are {machine.name!r} and {machine.platform!r}; platforms are cuda, tpu, cpu"
        )


def known_machine(platform: str, kind: str) -> Machine | None:
    """Returns the figures of a device of this platform and kind, as jax names both; None if none are known.

    Platforms are named as programs are lowered for them: "cuda", not "gpu".
    """
    if platform == "tpu":
        own, _, _ = kind.lower().removeprefix("tpu").partition(",")  # drops ", measured"
        return MACHINES.get(_TPU_KINDS.get(own.strip(), ""))
    names = [name for name, machine in MACHINES.items() if machine.platform == platform == "cuda"]
    found = next((name for name in names if re.search(rf"\b{name}\b", kind, re.IGNORECASE)), None)
    return MACHINES.get("cpu" if platform == "cpu" else found or "")


def machine_of(platform: str, kind: str) -> Machine:
    """Returns the figures of a device, or, if it is unknown, those of another under a name that says so."""
    known = known_machine(platform, kind)
    if known is not None:
        return known
    other = MACHINES["v5e" if platform == "tpu" else "H100"]
    device = f"{platform} device {kind!r}" if kind else f"{platform} device"
    return dataclasses.replace(other, name=f"unknown {device}, with the figures of {other.name}")
