"""Fine-tunes a pretrained language model on long texts, on simulated CPU devices or on real ones.

- `python examples/finetune_lm.py`: a tiny random model on 8 simulated devices, on the standard library's own source.
- `python examples/finetune_lm.py --weights DIR --data TEXTS --mesh fsdp=2,seq=4 --sequence-length 32k --rope yarn:4`:
  a checkpoint from the Hugging Face hub, with a longer context; see `docs/pretrained.md`.
- `--pattern window:4k,segments:32k:8`: another pattern for the layers that attend to all tokens.
- `--lora 8`: adapters alone; `--packed`: documents that do not attend to each other.
- `--resume`: from the last checkpoint on; `--generate "def main("` continues a text with it, `--save DIR` writes it for
  transformers.

Each file is a document. Wrong input ends it with exit code 2 before anything is written.
"""

import argparse
import contextlib
import functools
import math
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parts.checkpoints import Checkpoints, RunError
from parts.corpus import text_files
from parts.distribution import TOKENS, check_fits, make_mesh, parse_mesh
from parts.options import Formatter, Parser, branch, check_writable, positive, positive_number, seed
from parts.pretrained.checkpoint import check_free, load, save
from parts.pretrained.config import read_config
from parts.pretrained.generation import generate
from parts.pretrained.lora import adapt
from parts.pretrained.model import LanguageModel
from parts.pretrained.report import add_losses, needle_table, plot_losses
from parts.pretrained.text import Rows, encode, evaluation_rows, make_rows, read_tokenizer, rows_of_step, split
from parts.pretrained.tiny import write_tiny
from parts.pretrained.training import State, Trainer, make_trainer
from tokenizers import Tokenizer
from tqdm import tqdm

SHORTEST_HAYSTACK = 128  # in tokens
ROPES = ("linear", "yarn", "llama3")
# Options that must not change when a run is resumed: of the model, and of its training.
MODEL = ("weights", "rope", "pattern", "lora")
DATA = ("dtype", "packed", "sequence_length", "batch_size", "accumulate", "steps", "learning_rate", "seed")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = Parser(description=__doc__, formatter_class=Formatter)
    add = parser.add_argument
    add("--weights", type=Path, metavar="DIR", help="a checkpoint with its tokenizer.json; by default a tiny model")
    add("--data", metavar="FILE_OR_FOLDER", help="the texts; by default the standard library's source")
    add("--mesh", type=parse_mesh, help="mesh axes, such as fsdp=2,seq=4; by default all devices, seq=8")
    add("--sequence-length", type=positive, default=1024, help="tokens in a row, such as 32k")
    add("--rope", type=rope, metavar="TYPE:FACTOR[:LENGTH]", help="a rotary embedding, such as yarn:4:32k")
    add("--pattern", type=branches, help="branches, such as window:4k,segments:32k:8; all tokens by default")
    add("--lora", type=positive, metavar="RANK", help="train adapters of this rank, and nothing else")
    add("--packed", action="store_true", help="documents do not attend to each other, and begin at position 0 each")
    add("--batch-size", type=positive, help="rows at once; by default one for each device along data and fsdp")
    add("--accumulate", type=positive, default=1, help="batches for one step of the optimizer")
    add("--steps", type=positive, default=200, help="steps of the optimizer")
    add("--learning-rate", type=positive_number, help="by default 1e-5, of adapters 2e-4, of a tiny model 1e-3")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of all but trained parameters")
    add("--seed", type=seed, default=0, help="of the order of the rows, and of what is random at first")
    add("--out", type=Path, default=Path("runs/finetune_lm"), help="folder of checkpoints and plots")
    add("--checkpoint-every", type=positive, default=100, help="steps between checkpoints")
    add("--held-out-rows", type=positive, default=8, help="rows of held-out text to evaluate")
    add("--resume", type=positive, nargs="?", const=0, metavar="STEP", help="continue from the last checkpoint, or one")
    add("--generate", metavar="TEXT", help="continue a text with the last checkpoint instead of training")
    add("--tokens", type=positive, default=64, help="tokens of the continuation")
    add("--temperature", type=positive_number, help="of sampling; by default the most likely token")
    add("--save", type=Path, metavar="DIR", help="write the model for transformers after training")
    return parser.parse_args(argv)


def rope(text: str) -> dict[str, Any]:
    """Parses a rotary embedding, such as yarn:4, or yarn:4:32k where the original length is not the checkpoint's."""
    kind, *numbers = text.split(":")
    if len(numbers) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is no rotary embedding: write TYPE:FACTOR[:LENGTH], as yarn:4")
    length = {"original_max_position_embeddings": positive(numbers[1])} if numbers[1:] else {}
    return {"rope_type": kind, "factor": positive_number(numbers[0]), **length}


def branches(text: str) -> list[Any]:
    """Parses branches that are joined by commas."""
    return [branch(part) for part in text.split(",")]


class Run(NamedTuple):
    """What a run has: its mesh, a tokenizer with the tokens that end a text, and the functions of its model."""

    mesh: Mesh
    tokenizer: Tokenizer
    ends: list[int]
    trainer: Trainer

    @property
    def num_row_shards(self) -> int:
        """Over how many devices the rows of a batch are sharded."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]


class Texts(NamedTuple):
    """The rows to train on, those that are held out, and the tokens of these."""

    rows: Rows
    held_out: Rows
    tokens: np.ndarray


def prepare(arguments: argparse.Namespace, mesh: Mesh, folder: Path) -> Run:
    """Returns a run of the checkpoint in a folder.

    Raises:
      ValueError: for what is wrong in it, or in the options of its model.
    """
    tokenizer, ends = read_tokenizer(folder)
    check_fits(mesh, {"num_attention_heads of config.json": (read_config(folder).num_heads, ("tensor",))})
    model = load(
        folder,
        dtype=jnp.dtype(arguments.dtype),
        param_dtype=jnp.dtype(arguments.dtype) if arguments.lora else jnp.float32,
        mesh=mesh,
        pattern=arguments.pattern,
        rope=arguments.rope,
        spec=P(*TOKENS, "tensor"),
        remat=True,
    )
    if arguments.lora is not None:
        adapt(model, arguments.lora, arguments.seed)
    rate = 1e-3 if arguments.weights is None else 1e-5 if arguments.lora is None else 2e-4
    trainer = make_trainer(model, mesh, arguments.steps, arguments.learning_rate or rate)
    return Run(mesh, tokenizer, ends, trainer)


def read_texts(arguments: argparse.Namespace, run: Run, files: list[Path]) -> Texts:
    """Returns the rows of the files.

    Raises:
      ValueError: if there are fewer tokens to train on than a row has.
    """
    documents, held_out = split([tokens for tokens in encode(run.tokenizer, run.ends, files) if len(tokens) > 1])
    count, length = sum(map(len, documents)), arguments.sequence_length
    if count < length or not held_out:
        raise ValueError(f"--data has {count} tokens to train on, less than --sequence-length {length}: give more text")
    make = functools.partial(make_rows, length=length, is_packed=arguments.packed)
    return Texts(make(documents), make(held_out), np.concatenate(held_out))


def lay(rows: Rows, mesh: Mesh) -> Rows:
    """Returns rows [..., B, T] on the mesh."""
    put = lambda array: jax.device_put(array, NamedSharding(mesh, P(*[None] * (array.ndim - 2), *TOKENS)))
    return jax.tree.map(put, rows)


def train(arguments: argparse.Namespace, run: Run, texts: Texts, checkpoints: Checkpoints) -> State:
    """Trains, with checkpoints and a progress bar, and returns the last state."""
    state = restore(run, checkpoints) if checkpoints.step else run.trainer.init(run.trainer.params)
    if not checkpoints.step:
        print(f"held-out loss {evaluate(arguments, run, texts, 0, state):.4f} before the first step")
    with tqdm(total=arguments.steps, initial=checkpoints.step, unit="step", desc="compiling", smoothing=0) as progress:
        for step in range(checkpoints.step, arguments.steps):
            begin = time.perf_counter()
            state, loss = train_step(arguments, run, texts.rows, state, step)
            speed = arguments.accumulate * arguments.batch_size * arguments.sequence_length
            speed /= time.perf_counter() - begin
            if not math.isfinite(loss):
                raise checkpoints.lost(f"step {step + 1}: the loss is {loss}", "take a smaller --learning-rate")
            progress.set_description("training", refresh=False)
            progress.update()
            progress.write(f"step {step + 1}: loss {loss:.7f}, {speed:.0f} tokens a second")
            if step + 1 == arguments.steps or (step + 1) % arguments.checkpoint_every == 0:
                checkpoints.save(step + 1, state._asdict())
        checkpoints.wait()
    loss = evaluate(arguments, run, texts, arguments.steps, state)
    print(f"held-out loss {loss:.4f} after {arguments.steps} steps, by position in {plot_losses(arguments.out)}")
    return state


def evaluate(arguments: argparse.Namespace, run: Run, texts: Texts, step: int, state: State) -> float:
    """Writes the held-out losses at a step by position, and returns their mean."""
    size = arguments.batch_size
    rows = evaluation_rows(texts.held_out, arguments.held_out_rows, size)
    batches = (
        lay(jax.tree.map(lambda array, first=first: array[first : first + size], rows), run.mesh)
        for first in range(0, len(rows.tokens), size)
    )
    return add_losses(arguments.out, step, run.trainer, state.params, batches)


def train_step(arguments: argparse.Namespace, run: Run, rows: Rows, state: State, step: int) -> tuple[State, float]:
    """Returns the state after a step of the optimizer, and its loss."""
    shape = arguments.accumulate, arguments.batch_size
    numbers = rows_of_step(len(rows.tokens), math.prod(shape), step, arguments.seed).reshape(shape)
    batches = lay(jax.tree.map(lambda array: array[numbers], rows), run.mesh)  # [accumulate, B, T]
    state, loss = run.trainer.step(state, run.trainer.fixed, batches)
    return state, float(loss)


def restore(run: Run, checkpoints: Checkpoints) -> State:
    """Returns the state of the checkpoint to resume, on the mesh of the run, in place of the parameters before it."""
    jax.tree.map(lambda array: array.delete(), run.trainer.params)
    return State(**checkpoints.restore(run.trainer.abstract._asdict()))


def print_needles(arguments: argparse.Namespace, run: Run, texts: Texts, model: LanguageModel) -> None:
    """Prints what a trained model finds in a haystack."""
    lengths = [arguments.sequence_length // part for part in (8, 4, 2, 1)]
    lengths = [length for length in lengths if length >= SHORTEST_HAYSTACK]
    if lengths:
        print("\n".join(needle_table(model, run.tokenizer, texts.tokens, lengths, run.num_row_shards)))


def continue_text(arguments: argparse.Namespace, run: Run, params: Any) -> str:
    """Returns a continuation of the text of --generate."""
    prompt = run.tokenizer.encode(arguments.generate).ids
    tokens, drawing = [], (arguments.temperature or 0.0, arguments.seed)
    for token in generate(run.trainer.merge(params), [prompt] * run.num_row_shards, arguments.tokens, *drawing):
        if token[0] in run.ends:
            break
        tokens.append(int(token[0]))
    return run.tokenizer.decode(tokens)


def open_checkpoints(arguments: argparse.Namespace, files: list[Path]) -> Checkpoints:
    """Opens the run's checkpoints; --generate accepts one that was trained on other texts, but not a tiny model's."""
    is_read, is_tiny = arguments.generate is not None, arguments.weights is None
    names = (*MODEL, *DATA) if not is_read else (*MODEL, "seed") if is_tiny else MODEL
    values = {name: getattr(arguments, name) for name in names}
    configuration = {name: value if isinstance(value, int | None) else str(value) for name, value in values.items()}
    if is_tiny or not is_read:
        sizes = "\n".join(f"{path.name} {path.stat().st_size}" for path in files)
        configuration["texts"] = f"{len(files)} files, {zlib.crc32(sizes.encode()):x}"
    resume = arguments.resume or 0 if is_read else arguments.resume
    return Checkpoints(arguments.out / "checkpoints", configuration, resume, read_only=is_read)


def check(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Checks what a run that trains is to read and to write, and completes its options.

    Raises:
      ValueError: naming the option and the remedy.
    """
    arguments.batch_size = arguments.batch_size or mesh.shape["data"] * mesh.shape["fsdp"]
    sizes = {
        "--sequence-length": (arguments.sequence_length, ("seq",)),
        "--batch-size": (arguments.batch_size, TOKENS[0]),
    }
    check_fits(mesh, sizes)
    if arguments.rope is not None and arguments.rope["rope_type"] not in ROPES:
        raise ValueError(f"--rope {arguments.rope['rope_type']} is unknown: use one of {', '.join(ROPES)}")
    check_writable("--out", arguments.out)
    if arguments.save is not None:
        check_writable("--save", arguments.save)
        check_free(arguments.save)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program; wrong input ends it with exit code 2, a run that cannot go on with 1."""
    arguments = parse_arguments(argv)
    is_training = arguments.generate is None
    try:
        if arguments.save is not None and not is_training:
            raise ValueError("--save writes a model that was trained: leave --generate out")
        with contextlib.ExitStack() as stack:
            mesh, files = make_mesh(arguments.mesh), text_files(arguments.data)
            if is_training:
                check(arguments, mesh)
            folder = arguments.weights or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny"
            if arguments.weights is None:
                write_tiny(folder, files, arguments.seed)
            run = prepare(arguments, mesh, folder)
            texts = read_texts(arguments, run, files) if is_training else None
            checkpoints = stack.enter_context(open_checkpoints(arguments, files))
            stack.enter_context(jax.set_mesh(mesh))
            if texts is None:
                print(arguments.generate + continue_text(arguments, run, restore(run, checkpoints).params))
            else:
                model = run.trainer.merge(train(arguments, run, texts, checkpoints).params)
                if arguments.save is not None:
                    save(model, arguments.save)
                    print(f"{arguments.save} holds the model for transformers")
                if arguments.weights is not None:
                    print_needles(arguments, run, texts, model)
    except (ValueError, OSError, RunError) as error:
        print(f"finetune_lm.py: error: {error}", file=sys.stderr)
        raise SystemExit(1 if isinstance(error, RunError) else 2) from error


if __name__ == "__main__":
    main()
