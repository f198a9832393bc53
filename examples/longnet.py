"""LongNet (arXiv 2307.02486) over bytes, with steps of training, on 8 simulated devices or on the real ones.

- `python examples/longnet.py`: a small one, in a minute on two CPU cores.
- `python examples/longnet.py --base`: the base configuration of the paper, section 4.1, with 85 million parameters and
  32,768 bytes: some minutes and 14 GB on two CPU cores.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parts.byte_model import NUM_BYTES, Block
from parts.options import Formatter, Parser, positive
from tqdm import tqdm
from train_lm import make_mesh

LENGTH = 32768
KEEP = jax.checkpoint_policies.save_only_these_names("ringjax_out", "ringjax_lse")


class LongNet(nnx.Module):
    """Predicts each next byte from the bytes before it; one block runs again and again, with other parameters."""

    def __init__(
        self,
        *,
        width: int = 768,
        num_layers: int = 12,
        num_heads: int = 12,
        segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768),
        dilation_rates: Sequence[int] = (1, 2, 4, 6, 12),
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        @nnx.split_rngs(splits=num_layers)
        @nnx.vmap
        def make_blocks(rngs: nnx.Rngs) -> Block:
            return Block(width, num_heads, segment_lengths, dilation_rates, dtype, rngs)

        initializer = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(NUM_BYTES, width, embedding_init=initializer, dtype=dtype, rngs=rngs)
        self.blocks = make_blocks(rngs)
        self.norm = nnx.RMSNorm(width, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes [B, T] to the logits [B, T, 256] of the byte after each, in float32.

        The backward computes each block again from its inputs, all but what its attention has gone around the ring for.
        """
        run = nnx.remat(lambda hidden, block: block(hidden), policy=KEEP)
        hidden = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(self.embedding(tokens), self.blocks)
        return self.embedding.attend(self.norm(hidden)).astype(jnp.float32)  # [B, T, 256]


def loss_of(model: LongNet, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the mean loss of the next bytes [B, T], in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(inputs), targets).mean()


@nnx.jit(donate_argnums=0)
def train_step(model: LongNet, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Takes a step against the gradient, and returns the loss before it and the gradient's norm."""
    loss, grads = nnx.value_and_grad(loss_of)(model, inputs, targets)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda param, grad: param - 0.1 * grad, params, grads))
    return loss, optax.tree.norm(grads)


def random_bytes(length: int) -> list[jax.Array]:
    """Returns bytes [1, length] and those that follow them, sharded along the mesh that is set."""
    tokens = np.random.default_rng(0).integers(NUM_BYTES, size=(1, length + 1), dtype=np.int32)
    sharding = NamedSharding(jax.sharding.get_mesh(), P(None, "seq"))
    return [jax.device_put(part, sharding) for part in (tokens[:, :-1], tokens[:, 1:])]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--base", action="store_true", help="the paper's, instead of --length, --width, --layers and --heads")
    add("--length", type=positive, default=4096, help="bytes of the sequence, a multiple of 16")
    add("--width", type=positive, default=96, help="width of the model, a multiple of --heads")
    add("--layers", type=positive, default=2, help="layers of the model")
    add("--heads", type=positive, default=12, help="attention heads: 12 have a token of each of the rates, up to 12")
    add("--steps", type=positive, default=2, help="steps of training")
    arguments = parser.parse_args(argv)
    if arguments.base:
        return arguments
    if arguments.length % 16:
        parser.error(f"--length {arguments.length} is no multiple of 16")
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is no multiple of --heads {arguments.heads}")
    return arguments


def make_model(arguments: argparse.Namespace) -> LongNet:
    """Returns the model, whose segments are of 1/16 of the sequence up to all of it."""
    if arguments.base:
        return LongNet(rngs=nnx.Rngs(0))
    sizes = {"width": arguments.width, "num_layers": arguments.layers, "num_heads": arguments.heads}
    segments = tuple(arguments.length // 16 * 2**number for number in range(5))
    return LongNet(**sizes, segment_lengths=segments, rngs=nnx.Rngs(0))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the forward pass and steps of training; the first of each compiles."""
    arguments = parse_arguments(argv)
    length = LENGTH if arguments.base else arguments.length
    with jax.set_mesh(make_mesh(None)):
        model = make_model(arguments)
        count = sum(array.size for array in jax.tree.leaves(nnx.state(model, nnx.Param)))
        print(f"{count / 1e6:.3g} million parameters, {length} bytes on {jax.sharding.get_mesh().size} devices")
        batch = random_bytes(length)
        calls = [("forward", nnx.jit(loss_of)), *[("step", train_step)] * arguments.steps]
        for name, call in (progress := tqdm(calls, unit="call")):
            progress.set_description(name)
            begin = time.perf_counter()
            results = jax.block_until_ready(call(model, *batch))
            seconds = time.perf_counter() - begin
            progress.write(f"{name}: {jax.tree.map(float, results)} in {seconds:.3g} s")


if __name__ == "__main__":
    main()
