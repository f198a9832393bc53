"""What kernels for Hopper GPUs cost, counted in the compiler's final instructions; no GPU is needed.

While the matrix units multiply, each quarter of a processor issues one instruction in a cycle, for a warp of each of
both warpgroups. Issue slots over the cycles of products are a lower bound of time over its bound: below one, the
instructions may hide behind the products. Nothing here knows how long anything waits.

`python -m benchmarks.gpu_kernels`; needs Python 3.12.
"""

import json
import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.ahead_of_time import devices
from benchmarks.environment import folder_of, run_module
from benchmarks.timing import save
from ringjax import Segments, ring_dilated_attention

# As many heads as fill the processors of an H100: then blocks of threads take chains of tiles.
LENGTH, HEADS = 8192, 16
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "heads of 64": {},
    "documents": {"document_ids": np.arange(LENGTH)[None] // 3000},
    "soft cap": {"logits_soft_cap": 20.0},
    "dropout": {"dropout_rate": 0.1, "dropout_seed": 1},
}
ARGUMENTS["all at once"] = ARGUMENTS["documents"] | ARGUMENTS["soft cap"] | ARGUMENTS["dropout"]
PEERS = ("jax's attention_mgpu",)
_PRODUCTS_IN_A_CYCLE = 2048  # of numbers, by the matrix units of a processor
_MANY = 40  # instructions that a branch skips: those of a mask


class Counted(NamedTuple):
    """A kernel: its registers at the start, the bytes that it spills, and issue slots over the cycles of products.

    The last where no mask cuts a tile, and where one does.
    """

    registers: int
    spilled: int
    whole: float
    cut: float


def compile_program(name: str) -> None:
    """Compiles causal attention with its gradient, or a peer without a mask, for an H100."""
    width = 64 if name == "heads of 64" else 128
    sharding = NamedSharding(Mesh(np.array(devices("h100", "1x1x8")[:1]), ("seq",)), P())
    dtype = jnp.float16 if name in PEERS else jnp.bfloat16
    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, width), dtype, sharding=sharding)
    attend = _peer if name in PEERS else _own(name, sharding.mesh)
    jax.jit(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0])).lower(array, array, array).compile()


def _own(name: str, mesh: Any) -> Any:
    arguments = {"pattern": [Segments(LENGTH)], "is_causal": True, "mesh": mesh, **ARGUMENTS[name]}
    return lambda *arrays: ring_dilated_attention(*arrays, implementation="mosaic", **arguments)


def _peer(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention_mgpu  # noqa: PLC0415

    gradients: Any = dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(64, 128, max_concurrent_steps=2, compute_wgs_bwd=2, **gradients)
    return attention_mgpu.attention(query, key, value, config)


def count(name: str) -> dict[str, Counted]:
    """Returns what each kernel of a program costs, which a process of its own compiles."""
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder) / "bin"
        tools.mkdir()
        for tool in ("ptxas", "nvdisasm"):
            (found,) = folder_of("cudnn").glob(f"lib/python*/site-packages/nvidia/*/bin/{tool}")
            (tools / tool).symlink_to(found)
        variables = {"CUDA_ROOT": folder, "MOSAIC_GPU_DUMP_TO": folder}
        variables |= {"MOSAIC_GPU_DUMP_SASS": "1", "MOSAIC_GPU_DUMP_PTXAS": "1"}
        run_module("benchmarks.gpu_kernels", name, environment="cudnn", variables=variables)
        paths = sorted(Path(folder).glob("*.sass_ctrl"))
        # Those of jax have no names of their own.
        own = r"^ringjax_|_\d+$" if name in ARGUMENTS else "^$"
        return {re.sub(own, "", path.stem): _read(path) for path in paths}


def _read(path: Path) -> Counted:
    said = path.with_suffix(".ptxas").read_text()
    registers, spilled = (re.findall(words, said) for words in (r"Used (\d+) registers", r"(\d+) bytes spill"))
    instructions, labels = _instructions(path)
    jumps = [(at, labels[to]) for at, (_, to) in enumerate(instructions) if to in labels]
    loops = [(to, at + 1) for at, to in jumps if to <= at]
    cycles = lambda loop: sum(_cycles(name) for name, _ in instructions[slice(*loop)])
    # Barriers that wait are loops too, which may have all of this one inside.
    start, stop = min(loops, key=lambda loop: (-cycles(loop), loop[1] - loop[0]))
    skipped, end = 0, start
    for at, to in sorted(jumps):
        if end <= at < to <= stop and to - at > _MANY and start <= at:
            skipped, end = skipped + to - at, to
    slots = stop - start
    bound = cycles((start, stop))
    return Counted(int(registers[0]), sum(map(int, spilled)), (slots - skipped) / bound, slots / bound)


def _instructions(path: Path) -> tuple[list[tuple[str, str | None]], dict[str, int]]:
    """Returns the names of instructions with the label that they jump to, and where labels are."""
    instructions: list[tuple[str, str | None]] = []
    labels = {}
    for line in path.read_text().splitlines():
        if label := re.match(r"\s*\.?(L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*)", line):
            target = re.search(r"\((\.?)(L_x_\d+)\)", found[2]) if found[1] == "BRA" else None
            instructions.append((found[1], target and target[2]))
    return instructions, labels


def _cycles(name: str) -> float:
    sizes = re.search(r"(\d+)x(\d+)x(\d+)", name) if name.startswith("HGMMA") else None
    return math.prod(map(int, sizes.groups())) / _PRODUCTS_IN_A_CYCLE if sizes else 0


def rows_of(name: str) -> list[dict[str, Any]]:
    """Returns the rows of the table for one program."""
    names = {"whole": "issue slots over cycles of products, whole", "cut": "cut"}
    names |= {"registers": "registers", "spilled": "spilled bytes"}
    return [
        {"program": name, "kernel": kernel, **{names[field]: getattr(numbers, field) for field in names}}
        for kernel, numbers in count(name).items()
    ]


def main() -> None:
    """Counts everything, or compiles what a process was asked for."""
    if sys.argv[1:]:
        compile_program(sys.argv[1])
        print(json.dumps("compiled"))
        return
    save("gpu_kernels", [row for name in (*ARGUMENTS, *PEERS) for row in rows_of(name)])


if __name__ == "__main__":
    main()
