"""An option of a function, and the functions and modules that take options from a table of them."""

import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_WIDTH = 120  # of docstrings


class Option(NamedTuple):
    """The default of an option, what it says, and what raises an error for a wrong value, given its name."""

    default: Any
    doc: str
    check: Callable[[str, Any], None] = lambda name, value: None


def options_of(table: Any) -> dict[str, Option]:
    """Returns the options of a TypedDict by name."""
    return {name: hint.__metadata__[0] for name, hint in inspect.get_annotations(table).items()}


def types_of(table: Any) -> dict[str, Any]:
    """Returns the types of the options of a TypedDict by name."""
    return {name: hint.__origin__ for name, hint in inspect.get_annotations(table).items()}


def read_options(table: Any, given: Mapping[str, Any]) -> Any:
    """Returns all options of a table as attributes: those that are given, each checked, and the defaults.

    Raises:
      TypeError, ValueError: naming the option, its value and the remedy.
    """
    options = options_of(table)
    for name, value in given.items():
        options[name].check(name, value)
    return SimpleNamespace(**{name: given.get(name, option.default) for name, option in options.items()})


def taking(
    table: Any, remedies: Mapping[str, str], *, in_full: bool = False
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator for a function that has the keywords of a table: its signature and docstring name them.

    Args:
      table: the TypedDict of the options.
      remedies: of names that other libraries give to arguments, what serves in their place.
      in_full: whether the docstring has the sentences of all options, see `documented`.
    """
    options, types = options_of(table), types_of(table)

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        own = {name: one for name, one in signature.parameters.items() if one.kind != one.VAR_KEYWORD}
        keywords = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=types[name])
            for name, one in options.items()
        ]
        known = {*own, *options}

        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs.keys() - known:
                raise TypeError(f"{function.__qualname__} has no argument {name!r}{_remedy(name, remedies, known)}")
            return function(*args, **kwargs)

        cast(Any, wrapped).__signature__ = signature.replace(parameters=[*own.values(), *keywords])
        return documented(table, in_full=in_full)(wrapped)

    return decorate


def _remedy(name: str, remedies: Mapping[str, str], known: Iterable[str]) -> str:
    """Returns what to say in place of a name that is unknown, as the end of a sentence."""
    if name in remedies:
        return f": {remedies[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {near[0]!r}?" if near else f": it takes {', '.join(sorted(known))}"


def documented(table: Any, *, in_full: bool = False) -> Callable[[_T], _T]:
    """Returns a decorator for a function or class, whose docstring has an argument ``**options``.

    The options stand in its place: each with its sentence, or the names of all with the sentence that is there.
    """
    options = options_of(table)

    def decorate(one: _T) -> _T:
        found = re.search(r"\n( +)\*\*options: (.*)", one.__doc__ or "")
        if found is None:  # Python may have taken docstrings away
            return one
        indent, sentence = found.groups()
        texts = [f"{name}: {option.doc}" for name, option in options.items()]
        texts = texts if in_full else [f"{', '.join(options)}: {sentence}"]
        wrap = functools.partial(textwrap.wrap, width=_WIDTH, break_long_words=False, break_on_hyphens=False)
        lines = [line for text in texts for line in wrap(text, initial_indent=indent, subsequent_indent=indent + "  ")]
        text = "\n".join(lines)
        one.__doc__ = f"{found.string[: found.start()]}\n{text}{found.string[found.end() :]}"
        return one

    return decorate
