"""The windows of models: a dated table, and what a user sets."""

from __future__ import annotations

import pytest

from retinue.errors import ConfigurationError
from retinue.models import FallbackModel, open_model, profile
from retinue.models.profiles import DATED, known_makers
from retinue.testing import ScriptedModel


def test_the_table_knows_every_model_that_genai_prices_knows() -> None:
    """If this fails, genai-prices has newer models: add the lines that it prints, and set DATED."""
    from genai_prices.data import providers

    missing: list[str] = []
    for provider in providers:
        if provider.id not in known_makers():
            continue
        for model in provider.models:
            is_others = provider.id == "google" and model.id.startswith("claude")
            known = profile(f"{provider.id}:{model.id}").context_window
            if model.context_window is not None and known != model.context_window and not is_others:
                missing.append(f"{provider.id}: {model.context_window:_}: {model.id} (the table has {known})")
    assert not missing, f"the table of {DATED} is out of date:\n" + "\n".join(missing)


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("anthropic:claude-sonnet-4-5-20250929", 200_000),
        ("anthropic:claude-sonnet-5", 1_000_000),
        ("openai:gpt-4o-2024-08-06", 128_000),
        ("openai-chat:gpt-4.1-mini", 1_000_000),
        ("openrouter:anthropic/claude-sonnet-4.5", 200_000),
        ("openrouter:openai/gpt-5", 400_000),
        ("bedrock:us.anthropic.claude-opus-4-6-v1", 1_000_000),
        ("google-gla:gemini-2.5-flash", 1_048_576),
        ("ollama:qwen3", None),
        ("testing:scripted", None),
        ("", None),
    ],
)
def test_the_window_of_a_name(name: str, window: int | None) -> None:
    assert profile(name).context_window == window


def test_a_window_is_set_where_it_is_known_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    known, given = open_model("openai:gpt-4o"), open_model("ollama:qwen3", context_window=16_384)
    assert (getattr(known, "context_window", 0), getattr(given, "context_window", 0)) == (128_000, 16_384)
    assert getattr(open_model("ollama:qwen3"), "context_window", 0) is None
    assert FallbackModel(known, given, ScriptedModel([])).context_window == 16_384
    assert FallbackModel(ScriptedModel([]), ScriptedModel([])).context_window is None
    with pytest.raises(ConfigurationError, match="context_window is a number of tokens, at least 1, not 0"):
        open_model("ollama:qwen3", context_window=0)
