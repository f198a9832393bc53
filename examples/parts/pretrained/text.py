"""Text for a pretrained model: files as documents, tokens in rows, and questions about a sentence hidden in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

PADDING = -1  # the document and the target of what is no token
NEEDLE = "\nThe secret number of {} is {}.\n"
QUESTION = "\nThe secret number of {} is"
CITIES = "Athens", "Berlin", "Cairo", "Delhi", "Lima", "Oslo", "Quito", "Rome"


class Rows(NamedTuple):
    """Arrays [R, T] of tokens, of what follows each, of documents and of places in them; no last two if not packed."""

    tokens: Any
    targets: Any
    document_ids: Any
    positions: Any


def read_tokenizer(folder: Path) -> tuple[Tokenizer, list[int]]:
    """Returns the tokenizer of a checkpoint's folder, and the tokens that end a text.

    Raises:
      ValueError: if there is none.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{folder} has no tokenizer.json: save the tokenizer there with transformers")
    settings = json.loads((folder / "config.json").read_text())
    end = settings.get("text_config", settings).get("eos_token_id")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    return tokenizer, [] if end is None else [end] if isinstance(end, int) else list(end)


def encode(tokenizer: Tokenizer, ends: list[int], files: Sequence[Path]) -> list[np.ndarray]:
    """Returns the tokens of each file, with the token that ends a text where there is one."""
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    return [np.array([*encoding.ids, *ends[:1]], np.int32) for encoding in tokenizer.encode_batch_fast(texts)]


def hold_out(documents: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the documents to train on, and every tenth of them, held out; of a single one its last tenth."""
    if len(documents) == 1:
        cut = len(documents[0]) * 9 // 10
        return [documents[0][:cut]], [documents[0][cut:]]
    return [one for number, one in enumerate(documents) if number % 10 != 9], documents[9::10] or documents[-1:]


def make_rows(documents: list[np.ndarray], length: int, is_packed: bool) -> Rows:
    """Returns documents, one after the other, in rows of a length, the last of them padded.

    Packed ones do not attend to each other, and each begins at position 0; what a row's end cuts off is one of its own.
    Else a document is followed by the next as by its own text.
    """
    stream = np.concatenate(documents)
    ids = np.repeat(np.arange(len(documents), dtype=np.int32), [len(one) for one in documents])
    following = np.append(stream[1:], PADDING)
    if is_packed:
        following[:-1][np.diff(ids) != 0] = PADDING
    num_rows = -(-len(stream) // length)
    fill = lambda array, value: np.append(array, np.full(num_rows * length - len(array), value, np.int32)).reshape(
        num_rows, length
    )
    tokens, targets = fill(stream, 0), fill(following, PADDING)
    if not is_packed:
        return Rows(tokens, targets, None, None)
    ids, index = fill(ids, PADDING), np.arange(length, dtype=np.int32)
    is_first = np.diff(ids, axis=1, prepend=PADDING - 1) != 0
    positions = index - np.maximum.accumulate(np.where(is_first, index, 0), axis=1)
    return Rows(tokens, targets, ids, positions)


def rows_of_step(num_rows: int, count: int, step: int, seed: int) -> np.ndarray:
    """Returns the numbers of the rows of a step: each epoch has all of them, in an order of its own."""
    first = step * count
    numbers = np.arange(first, first + count)
    epochs = {*(numbers // num_rows).tolist()}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(num_rows) for epoch in epochs}
    return np.array([orders[number // num_rows][number % num_rows] for number in numbers.tolist()])


class Needle(NamedTuple):
    """A text with a number hidden at a depth, from 0 to 1, and a question for it; and the number's tokens."""

    depth: float
    prompt: list[int]
    answer: list[int]


def hide_needles(tokenizer: Tokenizer, text: np.ndarray, length: int, depths: Sequence[float]) -> list[Needle]:
    """Returns texts of a length with a number hidden at a depth each, and a question for it at their end."""
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    found = []
    for depth, city, secret in zip(depths, CITIES, np.random.default_rng(length).integers(1000, 9999, 8), strict=False):
        hidden, question = encode(NEEDLE.format(city, secret)), encode(QUESTION.format(city))
        answer = encode(f"{QUESTION.format(city)} {secret}")[len(question) :]
        hay = np.resize(text, length - len(hidden) - len(question) - len(answer)).tolist()
        place = round(len(hay) * depth)
        found.append(Needle(depth, [*hay[:place], *hidden, *hay[place:], *question], answer))
    return found
