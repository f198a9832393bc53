"""What programs compiled for H100s and a TPU v5e send, how much of that they hide, and the memory that they take.

`python -m benchmarks.ahead_of_time`; needs no such device, and installs the plugins of jax into an environment of its
own.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.environment import ROOT, run_module
from benchmarks.programs import entry_permutes, loop_permutes
from benchmarks.timing import save
from ringjax import DilatedPattern, Segments, Window, make_mesh, ring_dilated_attention
from ringjax._kernels.tile_sizes import choose_block_size
from ringjax._mesh.axes import named
from ringjax._pattern.branch import Branch
from ringjax._schedule.make import make_schedule
from ringjax._schedule.work import Work, choose_travelling_side
from ringjax._tools.hlo import permutes
from ringjax._tools.messages import messages

TOKENS, HEADS, WIDTH = 8192, 4, 128  # tokens of one device, where eight share 65536
LENGTH = 8 * TOKENS
MANY_TOKENS = 65536  # of one device
DENSE = (LENGTH,), (1,)
PATTERN = (2048, 16384, LENGTH), (1, 4, 16)
HALOS = {"Window(4096)": (Window(4096),), "Window(20000)": (Window(20000),), "Segments(3000)": (Segments(3000),)}
LONGNET = (8192, 16384, 32768, 65536, 131072), (1, 2, 4, 8, 16)
MILLION = (65536, 131072, 262144, 524288, 1048576), (1, 2, 4, 8, 16)  # of a million tokens
TOPOLOGIES = {
    "8 H100s": ("h100", "1x1x8"),
    "4 x 8 H100s": ("h100", "1x4x8"),
    "v5e:2x4": ("v5e", "2x4"),
    "v5e:4x4": ("v5e", "4x4"),
    "v5e:4x8": ("v5e", "4x8"),
    "v5p:2x2x2": ("v5p", "2x2x2"),
    "v6e:2x4": ("v6e", "2x4"),
}
# Qwen3-0.6B's own.
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
# All of several permutes overlap: the compiler's own limit is one at a time.
OVERLAP = (("xla_gpu_experimental_parallel_collective_overlap_limit", 4),)

# What else might hide more of them, each beside that.
FLAGS = {
    "a limit of 4": OVERLAP,
    "no flag": (("xla_gpu_experimental_parallel_collective_overlap_limit", 1),),
    "a limit of 4, pipelined p2p": (*OVERLAP, ("xla_gpu_enable_pipelined_p2p", True)),
    "a limit of 4, permutes decomposed": (*OVERLAP, ("xla_gpu_collective_permute_decomposer_threshold", 0)),
    "a limit of 4, pipelined collectives": (*OVERLAP, ("xla_gpu_enable_pipelined_collectives", True)),
    "a limit of 4, loops double-buffered": (*OVERLAP, ("xla_gpu_enable_while_loop_double_buffering", True)),
    "no latency hiding scheduler": (("xla_gpu_enable_latency_hiding_scheduler", False),),
}


@functools.cache
def devices(kind: str, topology: str) -> list[Any]:
    """Returns the devices of a topology, none of which need exist."""
    if kind != "h100":
        return topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:{topology}").devices
    target = (Path(__file__).parent / "h100.txtpb").read_text()
    return topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology=topology, target_config=target
    ).devices


@functools.cache
def compile_for(
    name: str,
    gradient: bool,
    count: int | None = None,
    length: int = LENGTH,
    pattern: Any = DENSE,
    options: tuple[tuple[str, Any], ...] = (),
    is_causal: bool = True,
    implementation: Any = "xla",
    heads: int = HEADS,
    in_natural_order: bool = False,
    kv_heads: int | None = None,
    strategy: Any = "ring",
    exchange_size: int = 1,
    has_documents: bool = False,
    has_cotangent: bool = False,
    width: int = WIDTH,
    balance: Any = None,
    outer_size: int = 1,
) -> Any:
    """Returns the compiled attention in bfloat16, or its gradient, on the first `count` devices of a topology.

    The gradient is that of a sum, whose cotangent is a constant, or takes the cotangent as another argument. The mesh
    is laid out for groups of `exchange_size`; the sequence has two axes if the outer one has several devices.
    """
    kind, topology = TOPOLOGIES[name]
    ring = devices(kind, topology)[:count]
    axes = ("across", "seq") if outer_size > 1 else "seq"
    shape = (outer_size, len(ring) // outer_size)[outer_size == 1 :]
    if in_natural_order:
        mesh = Mesh(np.array(ring), ("seq",))
    else:
        mesh = make_mesh(shape, named(axes), axis_name=axes, devices=ring, exchange_size=exchange_size)
    sharding = NamedSharding(mesh, P(None, axes))
    query, key = (
        jax.ShapeDtypeStruct((1, length, count, width), jnp.bfloat16, sharding=sharding)
        for count in (heads, kv_heads or heads)
    )
    branches = pattern if isinstance(pattern[0], Branch) else DilatedPattern.of_lengths(*pattern)

    more: Any = {"documents_are_sorted": True} if has_documents else {}
    documents = [jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)] if has_documents else []

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *documents: jax.Array) -> Any:
        return ring_dilated_attention(
            query,
            key,
            value,
            pattern=branches,
            document_ids=documents[0] if documents else None,
            is_causal=is_causal,
            strategy=strategy,
            implementation=implementation,
            balance=balance,
            mesh=mesh,
            axis_name=axes,
            **more,
        )

    def total(*arrays: jax.Array) -> jax.Array:
        return attend(*arrays).astype(jnp.float32).sum()

    def pull_back(cotangent: jax.Array, *arrays: jax.Array) -> Any:
        return jax.vjp(attend, *arrays)[1](cotangent)

    function = jax.grad(total, (0, 1, 2)) if gradient else attend
    arrays = (query, key, key, *documents)
    if has_cotangent:
        function, arrays = pull_back, (query, *arrays)
    with jax.enable_x64(False):  # as programs are by default
        lowered = jax.jit(function).lower(*arrays)
        return lowered.compile(dict(options or (OVERLAP if kind == "h100" else ())))


def peak(
    count: int = 8,
    pattern: tuple[tuple[int, ...], tuple[int, ...]] = DENSE,
    implementation: Any = "xla",
    has_documents: bool = False,
    name: str = "8 H100s",
    length: int = LENGTH,
    has_cotangent: bool = False,
    width: int = WIDTH,
    strategy: Any = "ring",
    balance: Any = None,
) -> float:
    """Returns the most bytes on one of some devices during the gradient, over those of its queries."""
    more: Any = {
        "implementation": implementation,
        "has_documents": has_documents,
        "has_cotangent": has_cotangent,
        "width": width,
        "strategy": strategy,
        "balance": balance,
    }
    compiled = compile_for(name, True, count=count, length=length, pattern=pattern, **more)
    return compiled.memory_analysis().peak_memory_in_bytes / (length // count * HEADS * width * 2)


def sent(is_causal: bool, gradient: bool) -> tuple[int, int]:
    """Returns the bytes that one of 8 H100s sends for the dense pattern, and those that the schedule states."""
    pattern, block_size = DilatedPattern.of_lengths(*DENSE), choose_block_size(HEADS, 2)
    branches = make_schedule(pattern, LENGTH, 8, HEADS, is_causal, block_size)
    work = Work(pattern, HEADS, 1, HEADS, WIDTH, WIDTH, itemsize=2)
    stated = sum(
        message.times * message.num_bytes
        for message in messages(work, choose_travelling_side(work, branches), gradient)
    )
    text = compile_for("8 H100s", gradient, is_causal=is_causal).as_text()
    return sum(permute.trips * permute.bytes for permute in permutes(text)), stated


def lower_slide_encoder(count: int, gradient: bool, num_layers: int = 12) -> Any:
    """Returns the slide encoder in bfloat16 for 1,048,568 tiles on some H100s, lowered, or its gradient."""
    sys.path.insert(0, str(ROOT / "examples"))
    from parts.slide_encoder import SlideEncoder  # noqa: PLC0415  # of the examples

    ring = devices(*TOPOLOGIES["8 H100s"])[:count]
    mesh = make_mesh((count,), ("seq",), devices=ring, axis_types=(AxisType.Auto,))
    options: Any = {"mesh": mesh, "dtype": jnp.bfloat16, "remat": gradient}
    encoder = nnx.eval_shape(lambda: SlideEncoder(num_layers, **options, rngs=nnx.Rngs(0)))
    definition, params = nnx.split(encoder)
    place = lambda array, *axes: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, P(*axes)))
    tiles = 2**20 - 8
    slide = jax.ShapeDtypeStruct((1, tiles, 1536), jnp.bfloat16), jax.ShapeDtypeStruct((1, tiles, 2), jnp.float32)

    def encode(params: Any, *slide: jax.Array) -> jax.Array:
        return nnx.merge(definition, params)(*slide)[1]

    function = jax.grad(lambda *arguments: encode(*arguments).sum()) if gradient else encode
    with jax.enable_x64(False):
        return jax.jit(function).lower(jax.tree.map(place, params), *(place(array, None, "seq") for array in slide))


def slide_encoder() -> list[tuple[str, str, float]]:
    """Returns the memory of the slide encoder, and what many layers cost to compile."""
    found, seconds = [], {}
    for program, count, gradient in (("1 H100, forward", 1, False), ("8 H100s, gradient", 8, True)):
        compiled = lower_slide_encoder(count, gradient).compile(dict(OVERLAP))
        found.append(
            (
                "peak GiB",
                f"{program}, slide encoder of 1,048,568 tiles",
                compiled.memory_analysis().peak_memory_in_bytes / 2**30,
            )
        )
    for num_layers in (1, 12):
        begin = time.process_time()
        lower_slide_encoder(1, False, num_layers).compile()
        seconds[num_layers] = time.process_time() - begin
    return [*found, ("compile time", "1 H100, forward, slide encoder, 12 layers over 1", seconds[12] / seconds[1])]


def lower_fine_tuning(length: int) -> Any:
    """Returns a step of the fine-tuning example for 8 H100s, with a row of so many tokens, lowered.

    Of Qwen3-0.6B's shape: bfloat16, parameters and AdamW in float32, each block computed again.
    """
    sys.path.insert(0, str(ROOT / "examples"))
    from parts.distribution import AXES, TOKENS  # noqa: PLC0415  # of the examples
    from parts.pretrained.config import make_config  # noqa: PLC0415
    from parts.pretrained.model import LanguageModel  # noqa: PLC0415
    from parts.pretrained.text import Rows  # noqa: PLC0415
    from parts.pretrained.training import make_trainer  # noqa: PLC0415

    mesh = make_mesh((1, 1, 8, 1), AXES, (AxisType.Auto,) * 4, devices=devices(*TOPOLOGIES["8 H100s"]))
    config = make_config(QWEN3, ".", rope={"rope_type": "yarn", "factor": 4.0})
    options: Any = {"spec": P(*TOKENS, "tensor"), "remat": True, "dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    model = nnx.eval_shape(lambda: LanguageModel(config, **options, rngs=nnx.Rngs(0)))
    trainer = make_trainer(model, mesh, steps=100, learning_rate=1e-5)
    tokens = jax.ShapeDtypeStruct((1, 1, length), jnp.int32, sharding=NamedSharding(mesh, P(None, *TOKENS)))
    with jax.enable_x64(False), jax.set_mesh(mesh):
        return trainer.step.lower(trainer.abstract, trainer.fixed, Rows(tokens, tokens, None, None))


def fine_tuning() -> float:
    """Returns the most GiB on one of 8 H100s in a step of fine-tuning at 131,072 tokens."""
    compiled = lower_fine_tuning(131_072).compile(dict(OVERLAP))
    return compiled.memory_analysis().peak_memory_in_bytes / 2**30


def measure() -> list[dict[str, Any]]:
    """Returns the rows of the table."""
    rows = []
    add = lambda claim, where, value: rows.append({"claim": claim, "program": where, "value": float(value)})
    for is_causal in (False, True):
        for gradient in (False, True):
            found, stated = sent(is_causal, gradient)
            program = f"8 H100s, {'causal' if is_causal else 'full'}, {'gradient' if gradient else 'forward'}"
            add("bytes sent over those of the schedule", program, found / stated)
    add("peak bytes of a device over its queries'", "8 H100s, gradient, dense", peak())
    add("peak bytes of a device over its queries'", "8 H100s, gradient, three branches", peak(pattern=PATTERN))
    for name, pattern in (("dense", DENSE), ("three branches", PATTERN)):
        value = peak(pattern=pattern, implementation="cudnn")
        add("peak bytes of a device over its queries'", f"8 H100s, gradient, {name}, cudnn", value)
    add("peak bytes of a device over its queries'", "8 H100s, gradient, documents", peak(has_documents=True))
    # With so many tokens that TPUs hold next to none of them in their vector memory.
    length = 8 * MANY_TOKENS
    of_tpus = (
        ("a ring", ((length,), (1,)), WIDTH),
        ("a local branch", ((2048,), (1,)), WIDTH),
        ("LongNet", LONGNET, WIDTH),
        ("LongNet with heads of 64", LONGNET, 64),
    )
    for name, pattern, width in of_tpus:
        for implementation in ("xla", "mosaic"):
            more: Any = {"implementation": implementation, "has_cotangent": True, "width": width}
            value = peak(name="v5e:2x4", length=length, pattern=pattern, **more)
            add("peak bytes of a device over its queries'", f"v5e:2x4, gradient, {name}, {implementation}", value)
    long = compile_for("8 H100s", True, count=1, length=2**20, pattern=LONGNET, implementation="cudnn", heads=16)
    add("peak GiB", "1 H100, gradient, LongNet, 2^20 tokens", long.memory_analysis().peak_memory_in_bytes / 2**30)
    for row in slide_encoder():
        add(*row)
    add("peak GiB", "8 H100s, a step of Qwen3-0.6B with AdamW at 131,072 tokens", fine_tuning())
    add("peak bytes, 8 devices over 2", "H100s, gradient, dense", peak() / 4 / peak(count=2))
    for name, topology in TOPOLOGIES.items():
        length = TOKENS * len(devices(*topology))
        for gradient in (False, True):
            hidden = loop_permutes(compile_for(name, gradient, length=length, pattern=((length,), (1,))).as_text())
            program = f"{name}, {'gradient' if gradient else 'forward'}"
            add("permutes in loops that overlap", program, np.mean(hidden))
    for name in ("8 H100s", "v5e:2x4"):
        for pattern, branches in HALOS.items():
            for gradient in (False, True):
                text = compile_for(name, gradient, pattern=branches, kv_heads=1).as_text()
                program = f"{name}, causal {pattern}, {'gradient' if gradient else 'forward'}"
                add(
                    "permutes that overlap, in loops and outside",
                    program,
                    np.mean(loop_permutes(text) + entry_permutes(text)),
                )
    for name, options in FLAGS.items():
        hidden = loop_permutes(compile_for("8 H100s", True, options=options).as_text())
        add("permutes in loops that overlap, by flags", f"8 H100s, gradient, {name}", np.mean(hidden))
    hidden = loop_permutes(compile_for("v5e:4x8", True, in_natural_order=True).as_text())
    add("permutes in loops that overlap", "v5e:4x8, gradient, devices in natural order", np.mean(hidden))
    return rows


def measure_kernels() -> list[dict[str, Any]]:
    """Returns the rows of the kernels for GPUs, which need the newest jax."""
    value = peak(implementation="mosaic", has_documents=True)
    program = "8 H100s, gradient, documents, mosaic"
    return [{"claim": "peak bytes of a device over its queries'", "program": program, "value": value}]


def main() -> None:
    """Compiles everything where the plugins are, and writes the table."""
    run = functools.partial(run_module, "benchmarks.ahead_of_time")
    rows = run("measure", environment="plugins") + run("kernels", environment="cudnn")
    save("ahead_of_time", rows)


if __name__ == "__main__":
    parts = {"measure": measure, "kernels": measure_kernels}
    print(json.dumps(parts[sys.argv[1]]())) if sys.argv[1:] else main()
