"""Tables of options, and how functions and modules take their options from them."""

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

_T = TypeVar("_T")
_WIDTH = 120  # of docstrings


class Option(NamedTuple):
    """An option: its default, its sentence for docstrings, and a check of a name and a value that raises errors."""

    default: Any
    doc: str
    check: Callable[[str, Any], None] = lambda name, value: None


@functools.cache
def options_of(table: Any) -> dict[str, Option]:
    """Returns the options of a TypedDict by name."""
    return {name: hint.__metadata__[0] for name, hint in inspect.get_annotations(table).items()}


def types_of(table: Any) -> dict[str, Any]:
    """Returns the types of the options of a TypedDict by name."""
    return {name: hint.__origin__ for name, hint in inspect.get_annotations(table).items()}


def read_options(table: Any, given: Mapping[str, Any], remedies: Mapping[str, str], of: str) -> Any:
    """Returns all options of a table as attributes: the given ones, each checked, and defaults for the others.

    Args:
      table: the TypedDict of the options.
      given: the keywords of a call.
      remedies: what to use instead of the argument names of other libraries.
      of: the name of the function or class, for errors.

    Raises:
      TypeError, ValueError: naming the option, its value and the remedy.
    """
    options = options_of(table)
    for name, value in given.items():
        if name not in options:
            raise TypeError(f"{of} has no argument {name!r}: {_remedy(name, remedies, options)}")
        options[name].check(name, value)
    return SimpleNamespace(**{name: given.get(name, option.default) for name, option in options.items()})


def _remedy(name: str, remedies: Mapping[str, str], known: Iterable[str]) -> str:
    """Returns a hint on what to use instead of an unknown name."""
    if name in remedies:
        return remedies[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known))}"


def taking(table: Any, *, in_full: bool = False) -> Callable[[_T], _T]:
    """Returns a decorator that adds the options of a table to the signature and docstring of a function.

    Args:
      table: the TypedDict of the options.
      in_full: whether the docstring has the sentences of all options, see `documented`.
    """
    types = types_of(table)
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[name])
        for name, one in options_of(table).items()
    ]

    def decorate(function: _T) -> _T:
        signature = inspect.signature(cast(Any, function))
        own = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        cast(Any, function).__signature__ = signature.replace(parameters=[*own, *keywords])
        return documented(table, in_full=in_full)(function)

    return decorate


def documented(table: Any, *, in_full: bool = False) -> Callable[[_T], _T]:
    """Returns a decorator that fills in the argument ``**options`` in the docstring of a function or class.

    If `in_full`, each option is listed there with its sentence; else the option names precede the existing sentence.
    """
    options = options_of(table)

    def decorate(one: _T) -> _T:
        found = re.search(r"\n( +)\*\*options: (.*)", one.__doc__ or "")
        if found is None:  # python -OO drops docstrings
            return one
        indent, sentence = found.groups()
        texts = [f"{name}: {option.doc}" for name, option in options.items()]
        texts = texts if in_full else [f"**options: {', '.join(options)}, {sentence}"]
        wrap = functools.partial(textwrap.wrap, width=_WIDTH, break_long_words=False, break_on_hyphens=False)
        lines = [line for text in texts for line in wrap(text, initial_indent=indent, subsequent_indent=indent + "  ")]
        text = "\n".join(lines)
        one.__doc__ = f"{found.string[: found.start()]}\n{text}{found.string[found.end() :]}"
        return one

    return decorate
