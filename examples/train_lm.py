"""Trains a byte-level language model with ring dilated attention, on simulated CPU devices or on real ones.

Whole files are packed into sequences as documents, which do not attend to each other.

- `python examples/train_lm.py`: on 8 simulated devices, or the real ones, on the standard library's own source.
- `python examples/train_lm.py --mesh data=2,seq=4`: on another mesh; the axes are data, fsdp, seq and tensor.
- `python examples/train_lm.py --distributed`: as one of several processes; all of them see the same --out.
- `python examples/train_lm.py --resume`: from the last checkpoint on.
- `python examples/train_lm.py --sample "def main("`: continues a prompt with the last checkpoint.
- `python examples/train_lm.py --compare runs/other`: draws its held-out bits by position beside another run's.

Wrong input ends it with exit code 2 before anything is compiled, a run that cannot go on with exit code 1.
"""

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from parts.byte_model import NGRAM_BITS, NGRAMS, ByteModel, features
from parts.checkpoints import Checkpoints, RunError
from parts.corpus import (
    SEPARATOR,
    Corpus,
    Rows,
    bigram_bits,
    evaluation_rows,
    load_corpus,
    pack,
    training_rows,
    zlib_bits,
)
from parts.distribution import TOKENS, check_fits, join, local_region, make_mesh, parse_mesh
from parts.metrics import COLUMNS, POSITIONS, Metrics, Row, plot, read_positions
from parts.options import Formatter, Parser, check_writable, in_options, positive, positive_number, seed
from parts.training import State, Trainer, define_model, first_not_finite, make_trainer
from tqdm import tqdm

# What a run may not change when it is resumed: the model, and which batch each step takes.
MODEL = ("width", "layers", "heads", "ngram_bits", "segment_lengths", "dilation_rates")
DATA = ("seed", "batch_size", "sequence_length")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--data", metavar="FILE_OR_FOLDER", help="the text; by default the standard library's source")
    add("--mesh", type=parse_mesh, help="mesh axes, such as data=2,fsdp=2,seq=4; by default all devices, seq=8")
    add("--sequence-length", type=positive, default=8192, help="bytes in a sequence")
    add("--batch-size", type=positive, help="sequences in a step; by default one for each device along data and fsdp")
    add("--steps", type=positive, default=400, help="steps of training")
    add("--learning-rate", type=positive_number, default=0.02, help="the peak; it warms up and then decays")
    add("--width", type=positive, default=128, help="width of the model")
    add("--layers", type=positive, default=2, help="layers of the model")
    add("--heads", type=positive, default=8, help="attention heads")
    add("--ngram-bits", type=ngram_bits, default=NGRAM_BITS, help="bits that tell the last 2, 3, 4 and 6 bytes apart")
    add("--segment-lengths", type=integers, default=(256, 2048, 8192), help="of the pattern's branches")
    add("--dilation-rates", type=integers, default=(1, 4, 8), help="of the pattern's branches")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of the computation")
    add("--seed", type=seed, default=0, help="of the parameters and the order of the data")
    add("--out", type=Path, default=Path("runs/train_lm"), help="folder of checkpoints and metrics")
    add("--checkpoint-every", type=positive, default=100, help="steps between checkpoints")
    add("--evaluation-batches", type=positive, default=16, help="batches of held-out text in an evaluation")
    add(
        "--compare",
        type=Path,
        metavar="FOLDER",
        help="the --out of another run on the same text, to draw beside this one",
    )
    add("--profile", action="store_true", help="write a profile of three steps, from the third on, under --out")
    add("--tensorboard", action="store_true", help="write the metrics for TensorBoard, too, under --out")
    add("--debug-nans", action="store_true", help="stop at the first tensor with a NaN or an infinity, and name it")
    add("--resume", type=positive, nargs="?", const=0, metavar="STEP", help="continue from the last checkpoint, or one")
    add("--sample", metavar="PROMPT", help="continue a prompt instead of training")
    add("--sample-bytes", type=positive, default=256, help="bytes of the continuation")
    add("--distributed", action="store_true", help="join the other processes of a cluster")
    variable = lambda name: os.environ.get(f"JAX_{name}")
    add("--coordinator", default=variable("COORDINATOR_ADDRESS"), metavar="HOST:PORT", help="of process 0")
    add("--num-processes", type=positive, default=variable("NUM_PROCESSES"), help="the number of processes")
    add("--process-index", type=int, default=variable("PROCESS_ID"), help="the number of this process, from 0 on")
    add("--peer-timeout", type=positive, default=20, help="seconds without a sign of life of a process until all end")
    # What the command line leaves open is the checkpoint's, if there is one to go on from, else the default.
    open_flags = dict.fromkeys((*MODEL, *DATA))
    arguments = parser.parse_args(argv, argparse.Namespace(**open_flags))
    arguments.defaults = {name: parser.get_default(name) for name in open_flags}
    if arguments.resume is None and arguments.sample is None:
        complete(arguments, arguments.defaults)
    return arguments


def complete(arguments: argparse.Namespace, configuration: dict[str, Any]) -> None:
    """Takes the flags that were not given from a configuration."""
    for name in (*MODEL, *DATA):
        value = configuration[name]
        if getattr(arguments, name) is None:
            setattr(arguments, name, tuple(value) if isinstance(value, list) else value)


def stored_configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the configuration of the checkpoint that the run goes on from."""
    with Checkpoints(arguments.out / "checkpoints", {}, arguments.resume or 0, read_only=True) as checkpoints:
        return checkpoints.stored


def ngram_bits(text: str) -> int:
    """Parses a number of bits of those that tokens have."""
    if positive(text) > NGRAM_BITS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than the {NGRAM_BITS} bits that tokens have")
    return int(text)


def integers(text: str) -> tuple[int, ...]:
    """Parses numbers that are joined by commas."""
    return tuple(positive(part) for part in text.split(","))


def train(arguments: argparse.Namespace, mesh: Mesh, corpus: Corpus) -> None:
    """Trains, with checkpoints, metrics and a progress bar."""
    shape = arguments.batch_size, arguments.sequence_length
    load = functools.partial(load_batch, mesh, shape)
    held_out = evaluation_rows(corpus.held_out, shape, arguments.evaluation_batches)
    is_first = jax.process_index() == 0  # this process alone writes metrics; all write checkpoints
    define_model(arguments)  # nothing is written before all that can be wrong is known
    arguments.out.mkdir(parents=True, exist_ok=True)
    with open_checkpoints(arguments, corpus) as checkpoints:
        # Before the first step, in which the others wait for this process, as they do not when they end.
        yardsticks = {}
        if is_first:
            yardsticks["bigram table"] = bigram_bits(corpus.train, [pack(rows, shape[1]) for rows in held_out])
            yardsticks["zlib"] = zlib_bits(held_out)
        trainer = make_trainer(arguments, mesh)
        state = restore(checkpoints, trainer) if checkpoints.step else trainer.init()
        evaluate = make_evaluation(trainer, [load(rows) for rows in held_out])
        board = arguments.out / "tensorboard" if arguments.tensorboard else None
        metrics = Metrics(arguments.out / "metrics.csv", checkpoints.step, board) if is_first else None
        steps = range(checkpoints.step, arguments.steps)
        profiled = profiled_steps(steps) if arguments.profile else steps[:0]
        bar = {"initial": steps.start, "total": steps.stop, "unit": "step", "disable": not is_first, "smoothing": 0}
        for step in (progress := tqdm(steps, desc="compiling", **bar)):
            leave_out_compiling(progress, step - steps.start)
            if step in profiled[:1]:
                jax.profiler.start_trace(arguments.out / "profile")
            begin = time.perf_counter()
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state, loss, finite = trainer.step(
                    state, *load(training_rows(corpus.train, step, arguments.seed, shape))
                )
                loss = float(loss)
            if step in profiled[-1:]:
                jax.profiler.stop_trace()
            speed = math.prod(shape) / (time.perf_counter() - begin)
            if name := first_not_finite(finite):
                raise checkpoints.lost(f"step {step + 1}: {name} is not finite", "take a smaller --learning-rate")
            row = dict.fromkeys(COLUMNS, math.nan) | {"step": step + 1, "loss": loss, "tokens_per_second": speed}
            row |= {"bits_per_byte": loss / math.log(2)}
            is_due = step + 1 == arguments.steps or (step + 1) % arguments.checkpoint_every == 0
            scores = evaluate(state) if is_due else None
            if scores is not None:
                row["held_out_bits_per_byte"] = scores[0].sum() / scores[1].sum()
            try:
                if metrics:
                    metrics.add(row, scores)
            except OSError as error:
                raise checkpoints.lost(f"the metrics could not be written: {error}", "make room") from error
            if is_due:
                checkpoints.save(step + 1, state._asdict())
            progress.set_description("training", refresh=False)
            progress.set_postfix(loss=f"{loss:.3f}", bits=f"{row['bits_per_byte']:.3f}", tokens_per_s=f"{speed:.0f}")
        checkpoints.wait()
    if metrics and (rows := metrics.read()):
        report(arguments.out, rows, yardsticks, arguments.compared)


def leave_out_compiling(progress: Any, done: int) -> None:
    """Lets a bar tell its pace from the second step on, when one is done: the first one was compiled."""
    if done == 1 and not progress.disable:
        progress.initial, progress.start_t = progress.n, time.time()
        progress.refresh()


def report(out: Path, rows: list[Row], yardsticks: dict[str, float], compared: dict[str, list[Row]]) -> None:
    """Draws what the run has written, and prints its end."""
    own = read_positions(out) if (out / POSITIONS).exists() else []  # none where it was at its end when it began
    plot(out / "loss.png", rows, yardsticks, {str(out): own, **compared})
    sizes = lambda positions: [row["bytes"] for row in positions]
    if own and any(sizes(own) != sizes(other) for other in compared.values()):
        print("--compare is of a run on other held-out text: its bits by position cannot be compared")
    figures = ", ".join(f"{name} {bits:.3f}" for name, bits in yardsticks.items())
    print(f"held-out bits per byte: {figures}, model {rows[-1]['held_out_bits_per_byte']:.3f}")
    print(f"{out} has loss.png, metrics.csv, {POSITIONS} and checkpoints: go on with --resume, or --sample PROMPT")


def load_batch(mesh: Mesh, shape: tuple[int, int], rows: Rows) -> list[jax.Array]:
    """Returns the arrays of a batch, of which each process reads only what its devices hold."""
    batch = pack(rows, shape[1], local_region(mesh, shape))
    sharding = NamedSharding(mesh, TOKENS)
    make = lambda array: jax.make_array_from_process_local_data(sharding, array, (*shape, *array.shape[2:]))
    return [make(array) for array in batch]


def make_evaluation(trainer: Trainer, batches: list[list[jax.Array]]) -> Callable[[State], np.ndarray]:
    """Returns a function that gives the bits and the bytes of these batches by position [2, n]."""
    to_bits = np.array([[1 / math.log(2)], [1.0]])
    score = lambda params, batch: np.asarray(trainer.held_out(params, *batch), np.float64)
    return lambda state: sum(score(state.params, batch) for batch in batches) * to_bits


def open_checkpoints(arguments: argparse.Namespace, corpus: Corpus | None = None) -> Checkpoints:
    """Opens the run's checkpoints; one to sample from may be of any text, in any order."""
    names = MODEL if corpus is None else (*MODEL, *DATA)
    configuration = {name: getattr(arguments, name) for name in names} | ({"text": corpus.digest} if corpus else {})
    configuration = {name: list(value) if isinstance(value, tuple) else value for name, value in configuration.items()}
    resume = arguments.resume if arguments.sample is None else arguments.resume or 0
    return Checkpoints(arguments.out / "checkpoints", configuration, resume, read_only=arguments.sample is not None)


def profiled_steps(steps: range) -> range:
    """Returns the steps to profile: three, or as many as there are, from the third on, as the first compiles."""
    if len(steps) < 3:
        raise ValueError(f"--profile is of steps from the third on, and this run has {len(steps)}: give more --steps")
    return steps[2:5]


def restore(checkpoints: Checkpoints, trainer: Trainer) -> State:
    """Returns the state of the checkpoint to resume, on the mesh of the run."""
    return State(**checkpoints.restore(trainer.abstract._asdict()))


def sample(arguments: argparse.Namespace, mesh: Mesh) -> bytes:
    """Continues the prompt with the last checkpoint, at temperature 0.7."""
    with open_checkpoints(arguments) as checkpoints, jax.set_mesh(mesh):
        trainer = make_trainer(arguments, mesh)
        params = restore(checkpoints, trainer).params
    # On one device: a prompt is short, and of any length.
    params = jax.device_put(jax.device_get(params), jax.devices()[0])
    before = [SEPARATOR] * (max(NGRAMS) - 1)
    prompt = [SEPARATOR, *arguments.sample.encode()]
    tokens_of = lambda text: jnp.asarray(features(np.array([*before, *text], np.uint8)))[None]  # [1, T, 5]
    model = nnx.merge(define_model(arguments), params)  # for single tokens, which no mesh cuts
    model.init_cache(1, len(prompt) + arguments.sample_bytes)

    @nnx.jit(static_argnames="prefill")
    def next_byte(model: ByteModel, tokens: jax.Array, position: int, prefill: bool = False) -> jax.Array:
        logits = model(tokens, decode=True, prefill=prefill)[0, -1] / 0.7
        return jax.random.categorical(jax.random.fold_in(jax.random.key(arguments.seed), position), logits)

    text = [*prompt, int(next_byte(model, tokens_of(prompt), len(prompt), prefill=True))]
    for position in range(len(prompt) + 1, len(prompt) + arguments.sample_bytes):
        text.append(int(next_byte(model, tokens_of(text[-max(NGRAMS) :])[:, -1:], position)))
    return bytes(text[1:])


def run(arguments: argparse.Namespace) -> None:
    """Checks all that can be checked without compiling, then trains or samples."""
    if arguments.distributed:
        if arguments.sample is not None:
            raise ValueError("--sample runs in one process: leave --distributed out")
        join(arguments.coordinator, arguments.num_processes, arguments.process_index, arguments.peer_timeout)
    mesh = make_mesh(arguments.mesh, arguments.num_processes if arguments.distributed else None)
    if arguments.resume is not None or arguments.sample is not None:
        complete(arguments, arguments.defaults | stored_configuration(arguments))
    if arguments.batch_size is None:
        arguments.batch_size = mesh.shape["data"] * mesh.shape["fsdp"]
    check_fits(
        mesh,
        {
            "--sequence-length": (arguments.sequence_length, ("seq",)),
            "--batch-size": (arguments.batch_size, ("data", "fsdp")),
            "--heads": (arguments.heads, ("tensor",)),
            "--width": (arguments.width, ("fsdp",)),
        },
    )
    if arguments.profile:
        profiled_steps(range(arguments.steps))
    if arguments.sample is None and not arguments.distributed:  # each of several would see what others write
        check_writable("--out", arguments.out)
    arguments.compared = {}  # read before hours of training: a folder without is an error
    if arguments.compare is not None:
        if arguments.compare.resolve() == arguments.out.resolve():
            raise ValueError(f"--compare {arguments.compare} is --out, too: give another run's")
        arguments.compared = {str(arguments.compare): read_positions(arguments.compare)}
    if arguments.sample is not None:
        print(sample(arguments, mesh).decode(errors="replace"))
        return
    with jax.set_mesh(mesh):
        train(arguments, mesh, load_corpus(arguments.data, arguments.sequence_length))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; wrong input ends it with exit code 2, a run that cannot go on with 1."""
    arguments = parse_arguments(argv)
    try:
        run(arguments)
    except (ValueError, OSError, RunError) as error:
        names = ("segment_lengths", "--segment-lengths"), ("dilation_rates", "--dilation-rates")
        message = in_options(error, {"num_heads": "--heads", "qkv_features": "--width", **dict(names)})
        print(f"train_lm.py: error: {message}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunError) else 2) from error
    except jax.errors.JaxRuntimeError as error:
        if not arguments.distributed:
            raise
        reason = str(error).splitlines()[0]
        print(f"train_lm.py: error: {reason}: if another process died, see its log; --resume goes on", file=sys.stderr)
        os._exit(1)  # at once: a process that is gone is not to be waited for


if __name__ == "__main__":
    main()
