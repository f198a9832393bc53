"""Compiles a plan: the bytes that its programs send, and their memory, for devices that need not be present."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ringjax._attention import ring_dilated_attention
from ringjax._mesh.device_order import make_mesh
from ringjax._mesh.mesh import lowered_platform
from ringjax._tools.comparison import Comparison, mebibytes, options_with
from ringjax._tools.forecast import Forecast
from ringjax._tools.hlo import bytes_sent

# The boxes of chips that exist, by the number of chips: flat, and three-dimensional for the v5p.
_FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_DEEP = {1: "1x1x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}


class Compiled(NamedTuple):
    """The bytes that a compiled program sends from one device, and that it holds there at the peak."""

    sent: int
    memory: int


def find_devices(comparison: Comparison, target: str | None = None) -> list[Any]:
    """Returns devices to compile for: those of this machine, or those that a jax plugin describes.

    Args:
      comparison: the comparison, which names the device and the number of devices.
      target: a file that describes the GPU to XLA, if this machine has none.

    Raises:
      ValueError: if the devices can neither be found nor described.
    """
    machine, count, found = comparison.machine, comparison.call.num_devices, jax.devices()
    platform, name = machine.platform, machine.name
    if lowered_platform(found[0].platform) == platform and len(found) >= count:
        return found[:count]
    size = min(machine.node_size, count)
    boxes = _DEEP if name == "v5p" else _FLAT
    reason = ""
    try:
        if platform == "tpu" and count in boxes:
            host = {"chips_per_host_bounds": [1, 1, 1]} if count == 1 else {}
            return topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{boxes[count]}", **host).devices
        if platform == "cuda" and target is not None and count % size == 0:
            topology = topologies.get_topology_desc(
                platform="cuda",
                topology_name=name.lower(),
                topology=f"1x{count // size}x{size}",
                target_config=Path(target).read_text(),
            )
            return topology.devices
    except (RuntimeError, UnicodeDecodeError) as error:  # no plugin, or one that cannot read the description
        reason = f" ({str(error).splitlines()[0]})"
    raise ValueError(
        f"device={name!r}: {count} of them are not there to compile for{reason}; for TPUs install jax[tpu] and take "
        f"one of {', '.join(map(str, boxes))} chips, for GPUs install jax's CUDA plugin and give --target-config"
    )


def compile_forecast(comparison: Comparison, one: Forecast, devices: list[Any]) -> Compiled:
    """Compiles a strategy for the devices of its comparison, and returns what the program sends and holds."""
    call, work = comparison.call, comparison.call.work
    size = one.ring_ulysses_size
    inner, axes = call.num_inner_devices or len(devices), ("across", "seq")
    shape = len(devices) // inner, inner
    mesh = make_mesh(shape, axes, (AxisType.Auto,) * 2, axis_name=axes, devices=devices, exchange_size=size)
    sharding = NamedSharding(mesh, P(None, axes))
    length = -(-call.num_queries // len(devices)) * len(devices)
    kv_heads = work.local_heads(1)
    sizes = (work.num_heads, work.width), (kv_heads, work.width), (kv_heads, work.value_width)
    sizes = (*sizes, (work.num_heads, work.value_width))
    dtype = call.request.query.dtype
    shapes = [jax.ShapeDtypeStruct((work.batch, length, *size), dtype, sharding=sharding) for size in sizes]
    options: dict[str, Any] = {
        "pattern": call.pattern,
        "is_causal": call.is_causal,
        "strategy": one.strategy,
        "mesh": mesh,
        "axis_name": axes,
        **options_with(call, one.strategy),
    }
    needs, documents = call.request.needs, None
    if "document_ids" in needs:
        documents = jax.ShapeDtypeStruct((work.batch, length), jnp.int32, sharding=sharding)
    options |= {"logits_soft_cap": 50.0} if "logits_soft_cap" in needs else {}
    options |= {"dropout_rate": 0.1, "dropout_seed": 0} if "dropout_rate" in needs else {}
    options |= {"return_max_logit": True} if "return_max_logit" in needs else {}

    def run(arrays: list[Any], documents: Any) -> tuple[Any, list[Any]]:
        def attend(*arrays: Any) -> tuple[Any, list[Any]]:
            out, *greatest = jax.tree.leaves(ring_dilated_attention(*arrays, document_ids=documents, **options))
            return out, greatest

        if not comparison.has_gradient:
            return attend(*arrays[:3])
        _, pullback, greatest = jax.vjp(attend, *arrays[:3], has_aux=True)
        return pullback(arrays[3]), greatest

    with jax.enable_x64(dtype.itemsize == 8):
        compiled = jax.jit(run, out_shardings=(sharding, None)).lower(shapes, documents).compile()
    return Compiled(sum(bytes_sent(str(compiled.as_text())).values()), memory_of(compiled))


def memory_of(compiled: Any) -> int:
    """Returns the bytes that a device holds at the peak of a compiled program, as its compiler states.

    They are arguments, results and temporaries: on TPUs those in device memory or, if these have more bytes, those in
    vector memory.
    """
    stated = compiled.memory_analysis()
    devices = jax.tree.leaves(compiled.input_shardings)[0].device_set
    if any(device.platform != "cpu" for device in devices):
        return stated.peak_memory_in_bytes
    # The peak that XLA's CPU compiler states leaves out temporaries.
    given = stated.argument_size_in_bytes + stated.output_size_in_bytes - stated.alias_size_in_bytes
    return given + stated.temp_size_in_bytes


def print_compiled(comparison: Comparison, devices: list[Any]) -> None:
    """Prints the stated figures of each strategy beside those of the compiled program."""
    lines: list[tuple[str, ...]] = [
        ("strategy", "stated to be sent", "compiled", "held at least", "compiled", "at most")
    ]
    for one in comparison.forecasts:
        found = compile_forecast(comparison, one, devices)
        stated = one.num_bytes("forward") + one.num_bytes("backward")
        numbers = stated, found.sent, one.memory.at_least, found.memory, one.memory.at_most
        lines.append((one.strategy, *map(mebibytes, numbers)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print()
    for first, *rest in lines:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
