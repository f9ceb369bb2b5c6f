"""Prices of models, from `genai-prices` or from your own rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

from ..core.errors import ConfigurationError
from ..core.runs import Usage

Rates = tuple[float, float] | tuple[float, float, float]
"""Dollars for a million tokens of input, of output and, if it differs, of cached input."""

Price = Callable[[str, Usage], float | None]
"""Returns the cost of a call of a model, None if unknown. It is called if the provider reports no cost."""

_MILLION = 1_000_000


def prices(own: Mapping[str, Rates] | None = None) -> Price:
    """Return the price function for `Runtime(price=prices())`: dollars by the list of `genai-prices`, without network.

    `own` has rates of your own by `"provider:model"` or `"provider:*"`, and wins. A model that is in neither has no
    known price: its calls count as 0, with a warning, and fail a run that has a limit on cost.
    """
    try:
        from genai_prices import Usage as Units
        from genai_prices import calc_price
    except ImportError as exc:
        raise ConfigurationError('prices() needs: pip install "retinue[prices]"') from exc
    rates = {name: _checked(name, given) for name, given in (own or {}).items()}

    def price(model: str, usage: Usage) -> float | None:
        provider, _, name = model.partition(":")
        known = rates.get(model) or rates.get(f"{provider}:*")
        if known is not None:
            return _by_rates(known, usage)
        cached = min(usage.cached_tokens, usage.input_tokens)
        units = Units(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            cache_read_tokens=cached or None,
            cache_write_tokens=min(usage.cache_write_tokens, usage.input_tokens - cached) or None,
        )
        try:
            return float(calc_price(units, name, provider_id=provider).total_price)
        except LookupError:
            return None

    price("openai:gpt-4o", Usage())  # loads the list now, not while a run waits
    return price


def ask_price(price: Price, model: str, usage: Usage) -> tuple[float | None, str]:
    """Return the cost of a call, and a note if the price function failed. The answer was paid for and is kept either way."""
    try:
        cost = price(model, usage)
        if cost is None or 0 <= cost < inf:
            return cost, ""
        return None, f" (the price function gave {cost})"
    except Exception as exc:
        return None, f" (the price function failed: {type(exc).__name__}: {exc})"


def _checked(name: str, given: Rates) -> Rates:
    if ":" not in name:
        raise ConfigurationError(f"prices: {name!r} is not of the form 'provider:model' or 'provider:*'")
    if len(given) not in (2, 3) or any(rate < 0 for rate in given):
        raise ConfigurationError(f"prices: {name!r} needs (input, output) or (input, output, cached), none below 0")
    return given


def _by_rates(rates: Rates, usage: Usage) -> float:
    cached = min(usage.cached_tokens, usage.input_tokens)
    for_cached = rates[2] if len(rates) == 3 else rates[0]
    fresh = usage.input_tokens - cached
    return (fresh * rates[0] + cached * for_cached + usage.output_tokens * rates[1]) / _MILLION
