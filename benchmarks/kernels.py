"""What kernels for TPUs cost, counted in the compiler's final schedules: no chip is needed, and none has run them.

A TPU's core issues one bundle of instructions in a cycle. Bundles are a lower bound of time, as nothing waits in them;
the products alone are the bound of bundles. `python -m benchmarks.kernels`.
"""

import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.environment import run_module
from benchmarks.timing import save
from ringjax import DilatedPattern, Segments, ring_dilated_attention
from ringjax._kernels.attention_step import AttentionStep, PaddedRows, make_mask
from ringjax._kernels.block_list import FULL, BlockList, list_blocks
from ringjax._kernels.interface import Request
from ringjax._kernels.mosaic import ROWS_BY_KIND, MosaicTpu
from ringjax._kernels.softmax import Weighting
from ringjax._kernels.tpu.kernels import STEP_ROWS
from ringjax._mesh.placement import Placement
from ringjax._parallel.plan import Plan
from ringjax._schedule.make import make_schedule

LENGTH, HEADS, WIDTH = 8192, 4, 128
# The topology of a chip's description, and the products of numbers that its matrix units begin in a cycle.
CHIPS = {"v5e": ("v5e:2x4", 4 * 128**2), "v5p": ("v5p:2x2x2", 4 * 128**2), "v6e": ("v6e:2x4", 2 * 256**2)}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "documents": {"document_ids": np.arange(LENGTH)[None] // 3000},
    "soft cap": {"logits_soft_cap": 20.0},
    "dropout": {"dropout_rate": 0.1, "dropout_seed": 1},
}
PRODUCTS = {"forward": 2, "query_gradient": 3, "key_gradient": 4}
# The regions of a kernel that multiply, in order; tiles that are cut may be taken part by part.
REGIONS = {3: ("whole", "cut", "one part"), 2: ("whole", "one part")}
LONGNET = (2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)


class Region(NamedTuple):
    """A part of a kernel that multiplies matrices: its bundles, the share of matrix slots in use, and spills."""

    bundles: int
    mxu_busy: float
    spills: int


@functools.cache
def mesh_of(chip: str) -> Mesh:
    """Returns a mesh of one chip."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0]).devices
    return Mesh(np.array(devices[:1]), ("seq",))


def compile_on(chip: str, function: Any, *shapes: tuple[int, ...]) -> None:
    """Compiles a function of arrays in bfloat16 for one chip."""
    sharding = NamedSharding(mesh_of(chip), P())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    jax.jit(function).lower(*arrays).compile()


def compile_own(chip: str, feature: str) -> None:
    """Compiles causal attention, with its gradient."""
    arguments = {"pattern": [Segments(LENGTH)], "is_causal": True, "mesh": mesh_of(chip), **FEATURES[feature]}
    attend = functools.partial(ring_dilated_attention, implementation="mosaic", **arguments)
    results = lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0])
    compile_on(chip, results, *3 * [(1, LENGTH, HEADS, WIDTH)])


def compile_splash(chip: str) -> None:
    """Compiles jax's splash attention, with its gradient."""
    sizes: dict[str, Any] = {"block_q": 512, "block_kv": STEP_ROWS, "block_kv_compute": 512}
    sizes |= {"block_q_dkv": STEP_ROWS, "block_kv_dkv": 512, "block_kv_dkv_compute": 512}
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((LENGTH, LENGTH))] * HEADS),
        block_sizes=splash_attention_kernel.BlockSizes(**sizes, use_fused_bwd_kernel=True),
    )
    results = lambda *arrays: jax.vjp(kernel, *arrays)[1](arrays[0])
    compile_on(chip, results, *3 * [(HEADS, LENGTH, WIDTH)])


def compile_flash(chip: str) -> None:
    """Compiles jax's older flash attention."""
    sizes = flash_attention.BlockSizes(block_q=512, block_k_major=STEP_ROWS, block_k=512, block_b=1)
    attend = functools.partial(flash_attention.flash_attention, causal=True, block_sizes=sizes)
    compile_on(chip, attend, *3 * [(1, HEADS, LENGTH, WIDTH)])


PROGRAMS = {
    **{feature: functools.partial(compile_own, feature=feature) for feature in FEATURES},
    "splash attention": compile_splash,
    "flash attention": compile_flash,
}


def count(chip: str, program: str) -> dict[str, Any]:
    """Returns the regions of each kernel of a program, in order, and the bundles of all of it."""
    with tempfile.TemporaryDirectory() as folder:
        # Read when the compiler is loaded, which is below.
        options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final"
        os.environ["LIBTPU_INIT_ARGS"] = options
        PROGRAMS[program](chip)
        found = {}
        for path in sorted(Path(folder).glob("*-final_bundles.txt")):
            name = path.name.split("-")[1].split(".")[0]
            kernel = None if "late-" in path.name else _read(path)
            if kernel and kernel["regions"]:
                found[name.removeprefix("ringjax_")] = kernel
        return found


def _read(path: Path) -> dict[str, Any]:
    bundles: list[str] = []
    for line in path.read_text().splitlines():
        if re.match(r" *(0x[0-9a-f]+|0) +([A-Z]{2})? *: ", line):
            bundles.append(line)
        elif bundles:
            bundles[-1] += line
    (of_bundles,) = path.parent.glob(re.sub(r"-\d\d-final_bundles.txt$", "-*-per-bundle-utilization.txt", path.name))
    _, names, capacities, _, *rows = of_bundles.read_text().splitlines()
    slot = [name.strip() for name in names.split(",")].index("MXU")
    busy = [int(row.split()[slot]) for row in rows]
    begins: dict[str, int] = {}
    ranges = []
    for number, bundle in enumerate(bundles):
        begins |= dict.fromkeys(re.findall(r"Start region (\d+)", bundle), number)
        ranges += [(begins[end], number + 1) for end in re.findall(r"End region (\d+)", bundle) if end in begins]
    multiplies = lambda start, stop: sum("vmatmul" in bundle for bundle in bundles[start:stop]) >= 8
    ranges = sorted({one for one in ranges if multiplies(*one)})
    is_inside = lambda one, other: one != other and other[0] <= one[0] and one[1] <= other[1]
    innermost = [one for one in ranges if not any(is_inside(other, one) for other in ranges)]
    regions = [
        Region(
            stop - start,
            sum(busy[start:stop]) / int(capacities.split()[slot]) / (stop - start),
            sum(len(re.findall(r"vst \[vmem:\[#allocation\w*_spill", bundle)) for bundle in bundles[start:stop]),
        )
        for start, stop in innermost
    ]
    return {"bundles": len(bundles), "regions": regions}


def counted(chip: str, program: str) -> dict[str, Any]:
    """Returns what `count` does, of a process of its own."""
    found = run_module("benchmarks.kernels", chip, program)
    return {name: {**one, "regions": [Region(*region) for region in one["regions"]]} for name, one in found.items()}


def named(kernel: dict[str, Any]) -> dict[str, Region]:
    """Returns the regions of one of our kernels by their names."""
    return dict(zip(REGIONS[len(kernel["regions"])], kernel["regions"], strict=True))


def num_pairs(chip: str, kernel: str, case: str) -> int:
    """Returns the pairs of a tile that stays and of what comes by."""
    rows = ROWS_BY_KIND.get(chip[:2], (512, 512))
    stationary, streamed = rows[::-1] if kernel == "key_gradient" else rows
    return stationary * (streamed if case == "one part" else STEP_ROWS)


def rows_of(chip: str, program: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of the table for one program."""
    rows = []
    for name, kernel in found.items():
        regions = named(kernel) if program in FEATURES else {"largest": max(kernel["regions"])}
        for case, region in regions.items():
            row = {"chip": chip, "program": program, "kernel": name, "case": case}
            row |= {"MXU busy": region.mxu_busy, "spills over bundles": region.spills / region.bundles}
            bound = PRODUCTS.get(name, 0) * num_pairs(chip, name, case) * WIDTH / CHIPS[chip][1]
            rows.append({**row, "bundles over bound": region.bundles / bound if program in FEATURES else "not known"})
    return rows


def steps_of(schedule: Any, pattern: DilatedPattern, stationary: int) -> int:
    """Returns how many steps a kernel takes in a schedule, for one head; no mask cuts a tile in them."""
    shape, mosaic = jax.ShapeDtypeStruct((1, schedule.queries.length, 1, WIDTH), jnp.bfloat16), MosaicTpu()
    schedule, _ = mosaic.serve(Request(shape, shape, shape, "tpu"), schedule)
    rows = Plan(pattern, (schedule,), 1, Weighting(1.0), Placement()).rows(schedule)._replace(is_whole=True)
    padded = PaddedRows(rows, rows.shard[None], False)

    @jax.jit
    def list_steps() -> BlockList:
        of_keys = padded._replace(rows=padded.rows.of_keys())
        blocks = make_mask(AttentionStep(schedule, mosaic.see(padded), mosaic.see(of_keys))).blocks
        return list_blocks(blocks if stationary == 0 else blocks.transposed(), STEP_ROWS // 512)

    steps = list_steps()
    assert (np.asarray(steps.notes)[: int(steps.length)] & 3 == FULL).all()
    return int(steps.length)


def bundles_of_pairs(found: dict[str, Any], pattern: Any, length: int) -> dict[str, float]:
    """Returns the bundles that all kernels take for each pair that attends, forward and with the gradient."""
    read = DilatedPattern.of_lengths(*pattern)
    schedules = make_schedule(read, length, 1, 1, False)
    num_pairs = sum(length * (segment // rate) // rate for segment, rate in zip(*pattern, strict=True))
    steps = [sum(steps_of(schedule, read, stationary) for schedule in schedules) for stationary in (0, 1)]
    taken = {}
    for kernel, stationary in (("forward", 0), ("query_gradient", 0), ("key_gradient", 1)):
        # What is outside of the regions that multiply is taken in every step, at most.
        regions = named(found[kernel])
        beside = found[kernel]["bundles"] - sum(region.bundles for region in regions.values())
        taken[kernel] = (regions["whole"].bundles + beside) * steps[stationary] / num_pairs
    return {"forward": taken["forward"], "with gradient": sum(taken.values())}


def longnet(found: dict[str, Any], length: int = 131072) -> dict[str, float]:
    """Returns the bundles of LongNet for each pair, over those of segments of 2048 tokens alone."""
    own, dense = (bundles_of_pairs(found, pattern, length) for pattern in (LONGNET, ((2048,), (1,))))
    return {direction: own[direction] / dense[direction] for direction in own}


def measure() -> list[dict[str, Any]]:
    """Returns the rows of the table: of all programs on one chip, and of the plainest on the others."""
    pairs = [("v5e", program) for program in PROGRAMS]
    pairs += [(chip, program) for chip in ("v5p", "v6e") for program in ("plain", "splash attention")]
    return [row for pair in pairs for row in rows_of(*pair, counted(*pair))]


def main() -> None:
    """Counts everything in an environment with the plugins, or what a process of it was asked for."""
    match sys.argv[1:]:
        case []:
            save("kernels", run_module("benchmarks.kernels", "all", environment="plugins"))
        case ["all"]:
            print(json.dumps(measure()))
        case [chip, program]:
            print(json.dumps(count(chip, program)))


if __name__ == "__main__":
    main()
