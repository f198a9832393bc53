"""The step that fine-tunes a pretrained model: AdamW, its loss in chunks, all parameters or adapters alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parts.distribution import on_own_tokens
from parts.pretrained.model import LanguageModel
from parts.pretrained.text import PADDING, Rows
from parts.training import by_position, state_shardings

MOST_TOKENS = 1024  # of a device, of which the logits are there at once


class State(NamedTuple):
    """What a checkpoint holds: the parameters that are trained, and the optimizer's state."""

    params: Any
    opt_state: Any


class Trainer(NamedTuple):
    """A model's functions, compiled at their first call.

    Attributes:
      init: returns the state of the first step, of the parameters, which are used up.
      step: returns the next state and the loss of rows, of a state that is used up, the fixed parameters and rows.
      held_out: returns the sums of the losses of rows and how many they are, by the position in the document [2, n].
      abstract: the shapes of a state, and how it lies on the mesh.
      params: what is trained, as it is at first.
      fixed: what is not trained.
      merge: returns the model of parameters.
    """

    init: Callable[..., State]
    step: Any
    held_out: Callable[..., jax.Array]
    abstract: State
    params: Any
    fixed: Any
    merge: Callable[..., LanguageModel]


def make_trainer(model: LanguageModel, mesh: Mesh, steps: int, accumulate: int, learning_rate: float) -> Trainer:
    """Returns the functions that train a model: its adapters, if it has any, or else all parameters."""
    has_adapters = bool(jax.tree.leaves(nnx.state(model, nnx.LoRAParam)))
    definition, params, fixed = nnx.split(model, nnx.LoRAParam if has_adapters else nnx.Param, ...)
    optimizer = make_optimizer(steps, accumulate, learning_rate)

    def losses(params: Any, fixed: Any, rows: Rows) -> jax.Array:
        model = nnx.merge(definition, params, fixed, copy=True)  # fixed are of an outer trace
        states = model.states(rows.tokens, document_ids=rows.document_ids, positions=rows.positions)
        return token_losses(model, states, rows.targets)

    def loss(params: Any, fixed: Any, rows: Rows) -> jax.Array:
        return losses(params, fixed, rows).sum() / jnp.maximum((rows.targets != PADDING).sum(), 1)

    def held_out(params: Any, fixed: Any, rows: Rows) -> jax.Array:
        ids = jnp.zeros_like(rows.tokens) if rows.document_ids is None else rows.document_ids
        return by_position(losses(params, fixed, rows), jnp.where(rows.targets == PADDING, PADDING, ids))

    def step(state: State, fixed: Any, rows: Rows) -> tuple[State, jax.Array]:
        value, grads = jax.value_and_grad(loss)(state.params, fixed, rows)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

    init = lambda params: State(params, optimizer.init(params))
    shapes = jax.eval_shape(init, params)
    shardings, whole = state_shardings(shapes, mesh), NamedSharding(mesh, P())
    of_shape = lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    return Trainer(
        init=jax.jit(init, donate_argnums=0, out_shardings=shardings),
        step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, whole)),
        held_out=jax.jit(held_out, out_shardings=whole),
        abstract=jax.tree.map(of_shape, shapes, shardings),
        params=params,
        fixed=fixed,
        merge=lambda params: nnx.merge(definition, params, fixed),
    )


def make_optimizer(steps: int, accumulate: int, learning_rate: float) -> optax.GradientTransformation:
    """Returns AdamW, of gradients that are the means over several batches; only kernels decay."""
    warmup = max(1, steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(0, learning_rate, warmup, max(steps, warmup + 1), learning_rate / 10)
    is_kernel = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )
    adam = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=is_kernel)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return optimizer if accumulate == 1 else optax.MultiSteps(optimizer, accumulate).gradient_transformation()


def token_losses(model: LanguageModel, states: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the losses [B, T] of targets, zero where there is none.

    Each device has the logits of `MOST_TOKENS` of its tokens at once, and computes them again in the gradient.
    """

    def run(tokens: tuple[jax.Array, jax.Array], kernel: jax.Array) -> jax.Array:
        batch, length = tokens[1].shape
        count = next(n for n in range(1, length + 1) if length % n == 0 and batch * length <= n * MOST_TOKENS)
        cut = lambda array: jnp.moveaxis(array.reshape(batch, count, -1, *array.shape[2:]), 1, 0)  # [chunks, B, n, ...]

        @jax.checkpoint
        def run_chunk(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
            states, targets = chunk
            logits = model.cap(states @ kernel.astype(states.dtype))
            logits = logits.astype(jnp.promote_types(states.dtype, jnp.float32))
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
            return jnp.where(targets == PADDING, 0, losses)

        losses = jax.lax.map(run_chunk, tuple(map(cut, tokens)))  # [chunks, B, n]
        return jnp.moveaxis(losses, 0, 1).reshape(batch, length)  # [B, T]

    # The kernel is narrowed in each chunk, so that its gradient is added up in its own dtype.
    return on_own_tokens(run, (states, targets), model.head_kernel())
