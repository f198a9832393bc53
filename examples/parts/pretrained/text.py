"""Text for a pretrained model: files as documents, tokens in rows, and questions about a sentence hidden in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from parts.corpus import hold_out

PADDING = -1  # the document and the target of padding
NEEDLE = "\nThe secret number of {} is {}.\n"
QUESTION = "\nThe secret number of {} is"
CITIES = "Athens", "Berlin", "Cairo", "Delhi", "Lima", "Oslo", "Quito", "Rome"


class Rows(NamedTuple):
    """Tokens, targets, document ids and positions, each [R, T]; the last two are None unless rows are packed."""

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
    end = {**settings, **settings.get("text_config", {})}.get("eos_token_id")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower one
        raise ValueError(f"{path} is no tokenizer ({error}): save it with transformers") from None
    tokenizer.no_truncation()
    return tokenizer, [] if end is None else [end] if isinstance(end, int) else list(end)


def encode(tokenizer: Tokenizer, ends: list[int], files: Sequence[Path]) -> list[np.ndarray]:
    """Returns the tokens of each file, with the token that ends a text where there is one."""
    encodings = tokenizer.encode_batch_fast([*map(read_text, files)])
    return [np.array([*encoding.ids, *ends[:1]], np.int32) for encoding in encodings]


def read_text(path: Path) -> str:
    """Returns the text of a file, in which bytes that are no UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def split(documents: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the documents to train on, and those that are held out; of a single one its last tenth."""
    if len(documents) > 1:
        return hold_out(documents)
    cut = len(documents[0]) * 9 // 10
    return [documents[0][:cut]], [documents[0][cut:]]


def make_rows(documents: list[np.ndarray], length: int, is_packed: bool) -> Rows:
    """Returns documents in rows of a length, one after the other; the last row is padded.

    If packed, documents do not attend to each other and positions restart at 0; the part of a document behind a row's
    end counts as a new document. Otherwise documents run on as one text.
    """
    stream = np.concatenate(documents)
    ids = np.repeat(np.arange(len(documents), dtype=np.int32), [len(document) for document in documents])
    targets = np.append(stream[1:], np.int32(PADDING))
    if is_packed:
        targets[:-1][np.diff(ids) != 0] = PADDING
    num_padding = -len(stream) % length
    fill = lambda array, value: np.pad(array, (0, num_padding), constant_values=value).reshape(-1, length)  # [R, T]
    tokens, targets, ids = fill(stream, 0), fill(targets, PADDING), fill(ids, PADDING)
    if not is_packed:
        return Rows(tokens, targets, None, None)
    index = np.arange(length, dtype=np.int32)
    is_first = np.diff(ids, axis=1, prepend=PADDING - 1) != 0
    positions = index - np.maximum.accumulate(np.where(is_first, index, 0), axis=1)
    return Rows(tokens, targets, ids, positions)


def evaluation_rows(rows: Rows, count: int, multiple: int) -> Rows:
    """Returns at most so many rows, evenly spaced, and rows without targets up to a multiple."""
    count = min(count, len(rows.tokens))
    numbers = np.linspace(0, len(rows.tokens) - 1, count).astype(int)
    blanks = (0, PADDING, PADDING, 0)
    pad = lambda array, blank: np.pad(array[numbers], ((0, -count % multiple), (0, 0)), constant_values=blank)
    return Rows(*(None if array is None else pad(array, blank) for array, blank in zip(rows, blanks, strict=True)))


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
    begin = tokenizer.encode("").ids  # special tokens that models expect first
    needles = []
    for depth, city, secret in zip(depths, CITIES, np.random.default_rng(length).integers(1000, 9999, 8), strict=False):
        hidden, question = encode(NEEDLE.format(city, secret)), encode(QUESTION.format(city))
        answer = encode(f"{QUESTION.format(city)} {secret}")[len(question) :]
        rest = length - sum(map(len, (begin, hidden, question, answer)))
        hay = np.resize(text[~np.isin(text, begin)], rest).tolist()
        place = round(rest * depth)
        needles.append(Needle(depth, [*begin, *hay[:place], *hidden, *hay[place:], *question], answer))
    return needles
