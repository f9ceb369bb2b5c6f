"""What is known of models without asking them: their windows.

A dated table of public figures. What is missing or different at your server is set with `open_model(…, context_window=…)`,
`Compaction(window=…)` or `retinue … --context-window`.
"""

from __future__ import annotations

from functools import cache

from msgspec import Struct

DATED = "2026-11-19"
"""The day on which the table was compared with `genai-prices`. Its test prints the lines that are missing."""

UNKNOWN_WINDOW = 32_000
"""The tokens that a model is assumed to read if nothing is known of it."""


class ModelProfile(Struct, frozen=True):
    """The known properties of a model."""

    context_window: int | None = None
    """The tokens that it reads and writes in one request; None if not known."""


@cache
def profile(name: str) -> ModelProfile:
    """Return what is known of a model, by "provider:model". Dated and regional names have the figures of their family."""
    provider, _, model = name.partition(":")
    found = _find(_MAKERS.get(provider, provider), model)
    if found is None:  # a router: "openrouter:anthropic/claude-…", "bedrock:us.anthropic.claude-…"
        found = _find(*_behind(model))
    return ModelProfile(found)


def _find(maker: str, model: str) -> int | None:
    families = _WINDOWS.get(maker, {})
    return families.get(max((one for one in families if model.startswith(one)), key=len, default=""))


def _behind(model: str) -> tuple[str, str]:
    """Return the maker and the name of a model at a provider that has models of many makers."""
    for mark in ("/", "."):
        for place, word in enumerate(parts := model.split(mark)):
            maker = _MAKERS.get(word, word)
            if maker in _WINDOWS and parts[place + 1 :]:
                rest = mark.join(parts[place + 1 :])
                return maker, rest.replace(".", "-") if maker == "anthropic" else rest
    return "", model


_MAKERS = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "azure": "openai",
    "google-gla": "google",
    "google-vertex": "google",
    "google-cloud": "google",
    "gemini": "google",
    "mistralai": "mistral",
    "grok": "x-ai",
    "xai": "x-ai",
}
"""The makers in the table by other names of them."""

_TABLE: dict[str, dict[int, str]] = {
    "anthropic": {
        200_000: """
            claude- claude-2 claude-3-5-haiku-latest claude-3-5-sonnet claude-3-7-sonnet-latest claude-3-haiku
            claude-3-opus-latest claude-3-sonnet claude-haiku-4-5 claude-opus-4-0 claude-opus-4-1
            claude-opus-4-5 claude-sonnet-4-0 claude-sonnet-4-5
        """,
        1_000_000: """
            claude-fable-5 claude-haiku-5-5 claude-opus-4-6 claude-opus-4-7 claude-opus-4-8 claude-opus-5
            claude-sonnet-4-6 claude-sonnet-5
        """,
    },
    "cerebras": {
        32_768: "llama3.1-8b",
        65_536: "qwen-3.8-27b",
        128_000: "llama-3.3-70b",
        131_072: "gemma-4-31b gpt-oss-120b qwen-3-32b zai-glm-4.7",
    },
    "cohere": {
        4_096: "command-light",
        8_192: "c4ai-aya-expanse-8b",
        128_000: "c4ai-aya-expanse-32b embed-v4.0",
    },
    "deepseek": {
        64_000: "deepseek-chat deepseek-reasoner",
        128_000: "deepseek-v3.1-terminus deepseek-v3.2",
        1_000_000: "deepseek-flash deepseek-v4-flash deepseek-v4-pro",
    },
    "google": {
        8_192: "gemini-2.5-flash-lite-preview-tts gemini-2.5-flash-tts gemini-2.5-pro-tts gemini-embedding-2",
        32_768: "gemini-1.0-pro-vision-001 gemini-pro",
        131_072: "gemini-3.8-live",
        262_144: "gemma-4-26b-a4b-it gemma-4-31b-it",
        1_000_000: """
            gemini-2.5-pro gemini-3-pro gemini-3.1-pro gemini-1.5-flash gemini-1.5-pro gemini-2.0-flash
            gemini-2.5-flash-image gemini-2.5-flash-lite gemini-3-flash-preview gemini-3-pro-image-preview
            gemini-3.1-flash-image-preview gemini-3.1-flash-lite gemini-3.5-flash gemini-3.6-flash
            gemini-3.7-flash gemini-3.8-flash gemini-flash-1.5-8b
        """,
        1_048_576: "gemini-2.5-flash gemini-4-argon",
        2_000_000: "gemini-pro-1.5",
    },
    "groq": {
        512: "meta-llama/llama-prompt-guard-2-22m meta-llama/llama-prompt-guard-2-86m",
        4_000: "canopylabs/orpheus-arabic-saudi canopylabs/orpheus-v1-english",
        131_072: """
            deepseek-r1-distill-llama-70b meta-llama/llama-4-maverick-17b-128e-instruct
            meta-llama/llama-guard-4-12b moonshotai/kimi-k2-instruct openai/gpt-oss-120b openai/gpt-oss-20b
            openai/gpt-oss-safeguard-20b qwen/qwen3-32b qwen/qwen3.8-27b
        """,
    },
    "minimax": {
        64_000: "M2-her",
        204_800: "MiniMax-M2",
        1_000_000: "MiniMax-M3.1-Flash minimax-m3",
        1_000_192: "minimax-01",
    },
    "mistral": {
        8_000: "codestral-embed-2505",
        8_192: "mistral-embed",
        16_384: "mistral-ocr-2512 mistral-ocr-4-0 mistral-ocr-4-1 voxtral-mini-2602",
        32_768: "voxtral-small-24b-2507",
        131_072: "ministral-3b-2512",
        256_000: "codestral",
        262_144: """
            devstral-2512 ministral-14b-2512 ministral-8b-2512 mistral-large-2512 mistral-medium-3-5
            mistral-small-2603
        """,
        1_048_576: "mistral-large-4",
    },
    "moonshotai": {
        8_192: "moonshot-v1-8k",
        32_768: "moonshot-v1-32k",
        131_072: "kimi-k2-0711-preview moonshot-v1-128k",
        262_144: "kimi-k2-0905-preview kimi-k2-thinking kimi-k2-turbo-preview kimi-k2.5 kimi-k2.6 kimi-k2.7-code",
        1_048_576: "kimi-k3",
    },
    "openai": {
        8_192: "computer-use gpt-4 text-embedding-3-large text-embedding-3-small text-embedding-ada-002",
        16_000: "gpt-4o-mini-realtime-preview gpt-4o-mini-transcribe gpt-4o-transcribe",
        16_385: "gpt-3.5-turbo",
        32_000: "gpt-4-32k gpt-4o-realtime-preview gpt-realtime",
        128_000: """
            chatgpt-4o-latest gpt-4-turbo gpt-4-vision-preview gpt-4o gpt-5.3 gpt-audio gpt-realtime-2 o1-mini
            o1-preview
        """,
        131_072: "gpt-oss-120b gpt-oss-20b gpt-oss-safeguard-20b",
        200_000: "codex-mini o1 o3 o4-mini",
        400_000: "gpt-5 gpt-5.3-codex gpt-5.4-mini gpt-5.4-nano",
        1_000_000: "gpt-4.1 gpt-5.5",
        1_050_000: """
            gpt-5.4 gpt-5.6-luna gpt-5.6-sol gpt-5.6-terra gpt-6-astra gpt-6-luna gpt-6-sol gpt-6.1-sol
            gpt-6.1-terra
        """,
    },
    "x-ai": {
        32_768: "grok-2-1212 grok-2-vision-1212",
        131_072: "grok-3",
        256_000: "grok-4-0709 grok-build-0.1 grok-code-fast-1",
        500_000: "grok-4.5 grok-4.6 grok-4.7",
        1_000_000: "grok-4.20 grok-4.3",
        2_000_000: """
            grok-4-1-fast-non-reasoning grok-4-1-fast-reasoning grok-4-fast-non-reasoning grok-4-fast-reasoning
        """,
    },
}
"""The beginnings of the names of models, by maker and window. The longest beginning counts."""

_WINDOWS = {
    maker: {beginning: window for window, names in windows.items() for beginning in names.split()}
    for maker, windows in _TABLE.items()
}


def known_makers() -> frozenset[str]:
    """Return the makers whose models are in the table."""
    return frozenset(_WINDOWS)
