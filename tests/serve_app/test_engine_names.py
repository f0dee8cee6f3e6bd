"""An engine's actor is named by all that it was made from."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.engine import engine_options, engine_recipes
from serve_app.settings import ModelSettings

BASE: dict[str, Any] = {"id": "m", "source": "a.gguf"}


@pytest.mark.parametrize(
    "change",
    [
        {"source": "b.gguf"},
        {"source": "org/model", "revision": "abc"},
        {"dtype": "float32"},
        {"scheduler": {"max_model_len": 64}},
        {"scheduler": {"async_scheduling": True}},
        {"kv_cache": {"pages": 64}},
    ],
)
def test_D04_other_weights_under_the_same_name_are_another_engine(change: dict[str, Any]) -> None:
    """So nothing of the old engine's cache is served: its actor, and the cache with it, is never taken over."""
    [before] = engine_recipes(ModelSettings(**BASE), "cpu")
    [same] = engine_recipes(ModelSettings(**BASE), "cpu")
    [after] = engine_recipes(ModelSettings(**{**BASE, **change}), "cpu")
    assert before.name == same.name != after.name


def test_async_scheduling_is_off_unless_it_is_asked_for() -> None:
    assert not engine_options(ModelSettings(**BASE), "cuda").async_scheduling
    wanted = ModelSettings(**BASE, scheduler={"async_scheduling": True})  # type: ignore[arg-type]
    assert engine_options(wanted, "cuda").async_scheduling
