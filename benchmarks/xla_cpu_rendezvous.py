"""XLA:CPU starts collectives behind a loop while collectives inside of the loop are still to come.

`python benchmarks/xla_cpu_rendezvous.py`, which needs jax alone, aborts with jax 0.10.2 and 0.12.0.1 (`rendezvous.h:
Check failed: id < num_threads`). Each device runs a loop of a collective-permute and a product, and a chain of ten
collective-permutes of another array, which only a scheduling edge of XLA's ThunkExecutor orders behind the loop. Once
an operation of the loop's body ends on another thread, `WhileThunk::Execute` returns an event that is not available
yet. This releases the edge, and the chain starts while iterations of the loop have permutes to run. All permutes have
channel 1: those of the chain on one device and those of the loop on another meet in one rendezvous.

With DEVICES = 2 it may also hang, or deliver wrong data; with ROWS = 1, where the arrays differ in size, it corrupts
the heap. It passes where the chain depends on the loop's result (argument "dependent"), for which
`jax.lax.optimization_barrier` is not enough, and with
XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

DEVICES, ROWS = 8, 256  # rows of the chain's array on each device


def loop_and_chain(x: jax.Array, y: jax.Array) -> Any:
    """Returns the result of the loop, and all results of the chain: a buffer that both used would order them."""
    rotate = lambda array: jax.lax.ppermute(array, "x", [(i, (i + 1) % DEVICES) for i in range(DEVICES)])
    x, _ = jax.lax.scan(lambda x, _: (jnp.sin(rotate(x) @ x), None), x, length=20)
    chain = [y + 0 * x[:1] if "dependent" in sys.argv else y]
    for _ in range(10):
        chain.append(rotate(chain[-1]))
    return x, chain


def main() -> None:
    """Runs the program thirty times, and checks the chain."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(jax.devices(), "x")
    function = jax.jit(jax.shard_map(loop_and_chain, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x, y = jnp.ones((DEVICES * 256, 256)), jnp.arange(DEVICES * ROWS * 256.0).reshape(DEVICES * ROWS, 256)
    for _ in range(30):
        _, chain = jax.block_until_ready(function(x, y))
        for hops, array in enumerate(chain):
            assert (array == jnp.roll(y, ROWS * hops, 0)).all(), "wrong data"
    print("passed")


if __name__ == "__main__":
    main()
