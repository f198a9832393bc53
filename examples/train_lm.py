"""Trains a byte-level language model with ring dilated attention, on simulated CPU devices or on real ones.

Whole files are packed into sequences as documents, which do not attend to each other.

- `python examples/train_lm.py`: on 8 simulated devices, or the real ones, on the standard library's own source.
- `python examples/train_lm.py --mesh data=2,seq=4`: on another mesh.
- `python examples/train_lm.py --resume`: from the last checkpoint on.
- `python examples/train_lm.py --sample "def main("`: continues a prompt with the last checkpoint.
"""

import argparse
import contextlib
import csv
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from byte_model import ByteModel
from corpus import PADDING, SEPARATOR, Corpus, bigram_bits, evaluation_batches, load_corpus, training_batch
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from tqdm import tqdm

matplotlib.use("agg")
from matplotlib import pyplot as plt

COLUMNS = ("step", "loss", "bits_per_byte", "tokens_per_second", "held_out_bits_per_byte")


class State(NamedTuple):
    """What a checkpoint holds: the parameters and the optimizer's state; the step is the checkpoint's number."""

    params: Any
    opt_state: Any


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    integers = lambda text: tuple(int(part) for part in text.split(","))
    parser.add_argument("--data", metavar="FILE_OR_FOLDER", help="the text; default: the standard library's source")
    parser.add_argument("--mesh", type=parse_mesh, help="mesh axes, such as data=2,seq=4; default: all devices, seq=8")
    parser.add_argument("--sequence-length", type=int, default=8192, help="bytes in a sequence")
    parser.add_argument("--batch-size", type=int, default=1, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=300, help="steps of training")
    parser.add_argument("--learning-rate", type=float, default=0.02, help="the peak; it warms up and then decays")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--segment-lengths", type=integers, default=(512, 2048, 8192), help="of the pattern's branches")
    parser.add_argument("--dilation-rates", type=integers, default=(1, 4, 16), help="of the pattern's branches")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of the computation")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and the order of the data")
    parser.add_argument("--out", type=Path, default=Path("runs/train_lm"), help="folder of checkpoints and metrics")
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--evaluation-batches", type=int, default=16, help="batches of held-out text in an evaluation")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument("--sample", metavar="PROMPT", help="continue a prompt instead of training")
    parser.add_argument("--sample-bytes", type=int, default=256, help="bytes of the continuation")
    return parser.parse_args(argv)


def parse_mesh(text: str) -> dict[str, int]:
    """Parses mesh axes such as "data=2,seq=4"; both axes are there, with size 1 if not named."""
    sizes = {"data": 1, "seq": 1}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is no mesh axis: write data=N or seq=N, joined by a comma")
        sizes[name] = int(size)
    return sizes


def make_mesh(sizes: dict[str, int] | None) -> Mesh:
    """Makes the mesh; CPU devices are simulated, as many as it takes."""
    wanted = math.prod(sizes.values()) if sizes else 8
    with contextlib.suppress(RuntimeError):  # raised if the devices exist already
        jax.config.update("jax_num_cpu_devices", wanted)
    if sizes is None:
        sizes = {"data": 1, "seq": 8 if jax.default_backend() == "cpu" else jax.device_count()}
    wanted = math.prod(sizes.values())
    if wanted > jax.device_count():
        raise ValueError(f"--mesh {sizes} asks for {wanted} devices, but there are {jax.device_count()}: ask for fewer")
    devices = jax.devices()[:wanted]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def make_model(arguments: argparse.Namespace) -> tuple[Any, Any, optax.GradientTransformation]:
    """Returns the model's definition, its parameters and the optimizer."""
    model = ByteModel(
        width=arguments.width,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        segment_lengths=arguments.segment_lengths,
        dilation_rates=arguments.dilation_rates,
        dtype=jnp.dtype(arguments.dtype),
        rngs=nnx.Rngs(arguments.seed),
    )
    warmup = max(1, arguments.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0, arguments.learning_rate, warmup, max(arguments.steps, warmup + 1), arguments.learning_rate / 20
    )
    optimizer = optax.contrib.muon(schedule, adam_b2=0.98, muon_weight_dimension_numbers=matrices)
    return *nnx.split(model), optimizer


def matrices(params: Any) -> Any:
    """Says which axes of each kernel are its inputs and its outputs; Muon leaves the rest, None, to Adam."""

    def axes(path: Any, array: jax.Array) -> MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path)
        if array.ndim < 2 or "'embedding'" in name:
            return None
        if array.ndim == 2:
            return MuonDimensionNumbers(0, 1)
        return MuonDimensionNumbers((0, 1), 2) if "'out'" in name else MuonDimensionNumbers(0, (1, 2))

    return jax.tree_util.tree_map_with_path(axes, params)


def make_steps(definition: Any, optimizer: optax.GradientTransformation) -> tuple[Callable[..., Any], ...]:
    """Returns the compiled functions: a training step, and the loss in nats per byte."""

    def loss_of(params: Any, inputs: jax.Array, targets: jax.Array, document_ids: jax.Array) -> jax.Array:
        logits = nnx.merge(definition, params)(inputs, document_ids=document_ids)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses.mean(where=document_ids != PADDING)

    def train(state: State, *batch: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(state.params, *batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(train, donate_argnums=0), jax.jit(loss_of)


def train(arguments: argparse.Namespace, mesh: Mesh, corpus: Corpus) -> list[dict[str, float]]:
    """Trains, with checkpoints, metrics and a progress bar, and returns the metrics of each step."""
    shape = (arguments.batch_size, arguments.sequence_length)
    held_out = list(evaluation_batches(corpus.held_out, shape, arguments.evaluation_batches))
    bigram = bigram_bits(corpus.train, held_out)
    sharding = NamedSharding(mesh, P("data", "seq"))
    put = lambda batch: [jax.device_put(array, sharding) for array in batch]

    definition, params, optimizer = make_model(arguments)
    state = jax.device_put(State(params, optimizer.init(params)), NamedSharding(mesh, P()))
    train_step, loss_of = make_steps(definition, optimizer)
    sizes = [np.sum(batch.document_ids != PADDING) for batch in held_out]
    mean = functools.partial(np.average, weights=sizes)
    evaluate = lambda state: mean([loss_of(state.params, *put(batch)) for batch in held_out]) / math.log(2)

    rows: list[dict[str, float]] = []
    with open_checkpoints(arguments) as checkpoints:
        first = 0
        if arguments.resume:
            first, state = restore(checkpoints, state)
            rows = read_metrics(arguments.out / "metrics.csv", first)
        elif checkpoints.latest_step() is not None:
            raise ValueError(f"{arguments.out} holds a run: continue it with --resume, or choose another --out")
        progress = tqdm(range(first, arguments.steps), initial=first, total=arguments.steps, unit="step")
        for step in progress:
            begin = time.perf_counter()
            state, loss = train_step(state, *put(training_batch(corpus.train, step, arguments.seed, shape)))
            loss = float(loss)
            speed = math.prod(shape) / (time.perf_counter() - begin)
            row = dict.fromkeys(COLUMNS, math.nan) | {"step": step + 1, "loss": loss}
            row |= {"bits_per_byte": loss / math.log(2), "tokens_per_second": speed}
            is_last = step + 1 == arguments.steps
            if is_last or (step + 1) % arguments.checkpoint_every == 0:
                row["held_out_bits_per_byte"] = evaluate(state)
                checkpoints.save(step + 1, args=ocp.args.StandardSave(state._asdict()))
            rows.append(row)
            write_metrics(arguments.out / "metrics.csv", rows)
            progress.set_postfix(loss=f"{loss:.3f}", bits=f"{row['bits_per_byte']:.3f}", tokens_per_s=f"{speed:.0f}")
        checkpoints.wait_until_finished()
    plot(arguments.out / "loss.png", rows, bigram)
    if rows:
        print(f"held-out bits per byte: bigram {bigram:.3f}, model {rows[-1]['held_out_bits_per_byte']:.3f}")
    return rows


def open_checkpoints(arguments: argparse.Namespace) -> ocp.CheckpointManager:
    """Opens the run's checkpoints, of which the last two are kept."""
    folder = (arguments.out / "checkpoints").absolute()
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2))


def restore(checkpoints: ocp.CheckpointManager, state: State) -> tuple[int, State]:
    """Returns the number of steps of the last checkpoint, and its state laid out as the given one is."""
    step = checkpoints.latest_step()
    if step is None:
        raise ValueError(f"there is no checkpoint in {checkpoints.directory}: train first, or correct --out")
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state._asdict())
    return step, State(**checkpoints.restore(step, args=ocp.args.StandardRestore(abstract)))


def write_metrics(path: Path, rows: list[dict[str, float]]) -> None:
    """Writes the metrics of all steps as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)  # pyright: ignore[reportArgumentType]


def read_metrics(path: Path, steps: int) -> list[dict[str, float]]:
    """Reads the metrics of the first steps."""
    with path.open(newline="") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    return [row for row in rows if row["step"] <= steps]


def plot(path: Path, rows: list[dict[str, float]], bigram: float) -> None:
    """Draws the loss curve beside the bigram model's."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["bits_per_byte"] for row in rows], label="training", linewidth=1)
    held_out = [(row["step"], row["held_out_bits_per_byte"]) for row in rows]
    axes.plot(*zip(*[point for point in held_out if not math.isnan(point[1])], strict=True), "o-", label="held out")
    axes.axhline(bigram, color="gray", linestyle="--", label="bigram table, held out")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def sample(arguments: argparse.Namespace, mesh: Mesh) -> bytes:
    """Continues the prompt with the last checkpoint, at temperature 0.7."""
    definition, params, optimizer = make_model(arguments)
    state = jax.device_put(State(params, optimizer.init(params)), NamedSharding(mesh, P()))
    with open_checkpoints(arguments) as checkpoints:
        _, state = restore(checkpoints, state)
    prompt = [SEPARATOR, *arguments.sample.encode()]
    model = nnx.merge(definition, state.params)
    model.init_cache(1, len(prompt) + arguments.sample_bytes)

    @nnx.jit(static_argnames="prefill")
    def next_byte(model: ByteModel, tokens: jax.Array, position: int, prefill: bool = False) -> jax.Array:
        logits = model(tokens, decode=True, prefill=prefill)[0, -1] / 0.7
        return jax.random.categorical(jax.random.fold_in(jax.random.key(arguments.seed), position), logits)

    sampled = [int(next_byte(model, jnp.array([prompt]), len(prompt), prefill=True))]
    for position in range(len(prompt) + 1, len(prompt) + arguments.sample_bytes):
        sampled.append(int(next_byte(model, jnp.array([sampled[-1:]]), position)))
    return bytes([*prompt[1:], *sampled])


def main(argv: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Runs the program; wrong input ends it with exit code 2."""
    arguments = parse_arguments(argv)
    try:
        mesh = make_mesh(arguments.mesh)
        arguments.out.mkdir(parents=True, exist_ok=True)
        with jax.set_mesh(mesh):
            if arguments.sample is not None:
                print(sample(arguments, mesh).decode(errors="replace"))
                return []
            return train(arguments, mesh, load_corpus(arguments.data, arguments.sequence_length))
    except (ValueError, OSError) as error:
        print(f"train_lm.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
