"""Every option stands once: functions and modules have its name, default and sentence from one table."""

import inspect
from pathlib import Path

import pytest

import ringjax
from ringjax._options import AllOptions, FactoryOptions, ModuleOptions
from ringjax._pattern.option import options_of
from ringjax._pattern.options import AllReferenceOptions, WeightsOptions
from ringjax._tools.plan import PlanOptions

PACKAGE = Path(ringjax.__file__).parent
TAKERS = {
    "function": (ringjax.ring_dilated_attention, AllOptions),
    "reference": (ringjax.dilated_attention_reference, AllReferenceOptions),
    "weights": (ringjax.attention_weights, WeightsOptions),
    "function for slots": (ringjax.attention_fn, FactoryOptions),
    "module": (ringjax.RingDilatedAttention.__init__, ModuleOptions),
    "linen module": (ringjax.linen.RingDilatedAttention, ModuleOptions),
    "plan": (ringjax.plan, PlanOptions),
}


@pytest.mark.parametrize(("taker", "table"), TAKERS.values(), ids=TAKERS)
def test_signatures_have_the_options_with_their_defaults(taker, table):
    parameters = inspect.signature(taker).parameters
    for name, option in options_of(table).items():
        assert parameters[name].kind == inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == option.default
    assert not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize("name", [name for name in TAKERS if name != "module"])
def test_docstrings_name_the_options(name):
    taker, table = TAKERS[name]
    words = " ".join(taker.__doc__.split())
    names = [option for option in options_of(table) if f" {option}, " in words or f" {option}: " in words]
    assert names == [*options_of(table)]
    assert ("**options: " in words) == (taker is not ringjax.ring_dilated_attention)
    assert max(map(len, taker.__doc__.splitlines())) <= 120


def test_the_function_says_what_each_option_does():
    words = " ".join(ringjax.ring_dilated_attention.__doc__.split())
    for name, option in options_of(AllOptions).items():
        assert f"{name}: {option.doc}" in words


def test_an_option_stands_in_few_files():
    """Of one that most of the library could be told of."""
    files = [path for path in PACKAGE.rglob("*.py") if "exchange_size" in path.read_text()]
    assert len(files) <= 8, files


def test_unknown_options_are_named_with_what_is_near():
    with pytest.raises(TypeError, match="has no argument 'dilation_rate': did you mean 'dilation_rates'"):
        ringjax.attention_fn(segment_lengths=(4,), dilation_rate=(1,))
