"""What every user pays before the first step: the equations, the tracing and the compiling of a gradient.

`python -m benchmarks.compile_time`: LongNet's five branches, causal, for eight simulated devices and for eight H100s,
which need not exist; each case runs in a process of its own. Processor seconds, of all threads; the bars are those of a
machine with two cores.
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ringjax
from benchmarks.ahead_of_time import TOPOLOGIES, devices
from benchmarks.environment import run_module
from benchmarks.timing import save

LENGTH, HEADS, WIDTH = 32768, 8, 64
CASES = {
    "five branches, 2048 to 32768": ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16)),
    "one branch": ((LENGTH,), (1,)),
}
SIMULATED, COMPILED = "8 simulated devices", "8 H100s"


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program, those of inner programs each time that they are used."""
    for equation in jaxpr.eqns:
        yield equation
        is_program = lambda leaf: hasattr(leaf, "eqns")
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(parameter):
                yield from equations(parameter)


def gradient(segment_lengths: Any, dilation_rates: Any, mesh: Any) -> tuple[Any, list[Any]]:
    """Returns the gradient of causal attention, and the shapes of its arguments."""
    pattern: Any = {
        "segment_lengths": segment_lengths,
        "dilation_rates": dilation_rates,
        "is_causal": True,
        "mesh": mesh,
    }
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = jax.ShapeDtypeStruct((1, LENGTH, HEADS, WIDTH), jnp.float32, sharding=sharding)

    def attend(*arrays: jax.Array) -> Any:
        out: Any = ringjax.ring_dilated_attention(*arrays, **pattern)
        return out.sum()

    return jax.jit(jax.grad(attend, (0, 1, 2))), [shape] * 3


def measure(case: str, target: str) -> dict[str, Any]:
    """Returns the row of one case, compiled for one target."""
    jax.config.update("jax_num_cpu_devices", 8)
    found = jax.devices() if target == SIMULATED else devices(*TOPOLOGIES[target])
    mesh = jax.make_mesh((8,), ("seq",), axis_types=(AxisType.Auto,), devices=found)
    segment_lengths, dilation_rates = CASES[case]
    function, shapes = gradient(segment_lengths, dilation_rates, mesh)
    jax.jit(jax.grad(lambda array: jnp.sin(array).sum())).lower(shapes[0]).compile()  # jax's own first steps
    times = [time.process_time()]
    traced = function.trace(*shapes)
    lowered = traced.lower()
    times.append(time.process_time())
    lowered.compile()
    times.append(time.process_time())
    names = [equation.primitive.name for equation in equations(traced.jaxpr.jaxpr)]
    return {
        "gradient of": case,
        "for": target,
        "equations": len(names),
        "casts of varying axes": sum(name in ("pvary", "pcast") for name in names),
        "tracing and lowering, s": times[1] - times[0],
        "compiling, s": times[2] - times[1],
        "StableHLO, kB": len(lowered.as_text()) / 1000,
    }


def main() -> None:
    """Measures each case in a process of its own, and writes the table."""
    environments = {SIMULATED: None, COMPILED: "plugins"}
    save(
        "compile_time",
        [
            run_module("benchmarks.compile_time", case, target, environment=environment)
            for case in CASES
            for target, environment in environments.items()
        ],
    )


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:]))) if len(sys.argv) > 1 else main()
