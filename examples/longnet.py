"""LongNet's base configuration (arXiv 2307.02486, section 4.1) over bytes, with a step of training.

`python examples/longnet.py` computes the loss and the gradient of 32768 bytes on 8 simulated devices, or on the real
ones, and prints what each takes. It wants some minutes and 12 GiB on two CPU cores.
"""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from byte_model import NUM_BYTES, ByteModel
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import make_mesh

LENGTH = 32768


def make_longnet(
    *,
    width: int = 768,
    num_layers: int = 12,
    num_heads: int = 12,
    segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768),
    dilation_rates: Sequence[int] = (1, 2, 4, 6, 12),
    dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> ByteModel:
    """Returns the model; the backward of a block computes it again from its inputs, all but its attention."""
    return ByteModel(
        width=width,
        num_layers=num_layers,
        num_heads=num_heads,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        dtype=dtype,
        is_rematerialised=True,
        rngs=rngs,
    )


def loss_of(model: ByteModel, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean loss of the next bytes [B, T], in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


@nnx.jit
def train_step(model: ByteModel, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes a step against the gradient, and returns the loss before it and the gradient's norm."""
    loss, grads = nnx.value_and_grad(loss_of)(model, inputs, targets)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads))
    return loss, optax.global_norm(grads)


def random_bytes(length: int) -> list[jax.Array]:
    """Returns bytes [1, length] and those that follow them, sharded along the mesh that is set."""
    tokens = np.random.default_rng(0).integers(NUM_BYTES, size=(1, length + 1), dtype=np.int32)
    sharding = NamedSharding(jax.sharding.get_mesh(), P(None, "seq"))
    return [jax.device_put(part, sharding) for part in (tokens[:, :-1], tokens[:, 1:])]


def main() -> None:
    """Runs the forward pass and a step of training, each with its compilation."""
    with jax.set_mesh(make_mesh(None)):
        model = make_longnet(rngs=nnx.Rngs(0))
        count = sum(array.size for array in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"{count / 1e6:.0f} million parameters, {LENGTH} bytes on {jax.sharding.get_mesh().size} devices")
        batch = random_bytes(LENGTH)
        for name, call in {"forward": nnx.jit(loss_of), "step": train_step}.items():
            begin = time.perf_counter()
            results = jax.block_until_ready(call(model, *batch))
            print(f"{name}: {jax.tree.map(float, results)} in {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
