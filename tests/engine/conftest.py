"""Tiny models, made once for all engine tests."""

from collections.abc import Callable
from functools import cache

import pytest

from scheduler.engine import tiny
from tests.engine.models import TinyModel, load_tiny, make_random


@pytest.fixture(scope="session")
def get_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """A model by name: `plain` and `hybrid` are the built-in ones, others have random weights."""

    @cache
    def get(name: str) -> TinyModel:
        if name not in ("plain", "hybrid"):
            return make_random(name)
        folder = tmp_path_factory.mktemp(name)
        tiny.make(folder, "hybrid" if name == "hybrid" else "plain")
        return load_tiny(folder)

    return get
