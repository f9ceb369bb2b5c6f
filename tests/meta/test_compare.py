"""Our programs in docs/compare.md run, and are no longer than those of other libraries.

`python examples/compare/run.py --langgraph` runs the others, which take seconds each to import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from ..prepared import PYTHON, ROOT

TOPICS = sorted(
    folder.name for folder in (ROOT / "examples/compare").iterdir() if folder.is_dir() and folder.name[0] != "_"
)


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", ROOT / "examples/compare/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compare"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def environment(compare: ModuleType) -> Iterator[dict[str, str]]:
    with compare.scripted_server() as environment:
        yield environment


@pytest.mark.parametrize("topic", TOPICS)
def test_program_runs(compare: ModuleType, environment: dict[str, str], topic: str) -> None:
    printed = compare.run_program(ROOT / f"examples/compare/{topic}/with_retinue.py", environment, PYTHON)
    assert compare.TOPICS[topic].prints in printed


@pytest.mark.parametrize("topic", TOPICS)
def test_program_is_no_longer_than_the_others(compare: ModuleType, topic: str) -> None:
    ours, pydantic_ai, langgraph = (
        compare.count_lines(ROOT / f"examples/compare/{topic}/with_{library}.py")
        for library in ("retinue", "pydantic_ai", "langgraph")
    )
    assert ours <= pydantic_ai
    assert ours < langgraph


def test_page_is_current(compare: ModuleType) -> None:
    assert compare.PAGE.read_text() == compare.show_all(), "run: python examples/compare/run.py --write"
