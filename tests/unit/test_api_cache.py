"""A clear is answered when it is done, or after a moment."""

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from api import cache
from api.deps import Api
from scheduler.prefix import BlockIndex
from scheduler.state import SchedulerState
from scheduler.views import CacheView, view_cache


def api_of(*clearing: bool) -> Api:
    """A server whose clear is under way at these looks."""
    looks = iter(clearing)

    async def view() -> CacheView:
        state = SchedulerState(index=BlockIndex(), clearing=next(looks))
        return view_cache(state, clear_is_waiting=False)

    return cast("Api", SimpleNamespace(service=SimpleNamespace(view_cache=view)))


def test_it_looks_until_all_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CLEAR_LOOK_S", 0)
    done, after = asyncio.run(cache.cleared(api_of(True, True, False)))
    assert (done, after.clearing) == (True, False)


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "CLEAR_WAIT_S", 0)
    done, after = asyncio.run(cache.cleared(api_of(True)))
    assert (done, after.clearing) == (False, True)


def test_a_clear_that_no_step_has_taken_is_under_way() -> None:
    assert view_cache(SchedulerState(), clear_is_waiting=True).clearing


def test_the_domain_of_an_earlier_run_is_not_shown() -> None:
    """Another model or another layout may come, until the engine is ready."""
    state = SchedulerState(index=BlockIndex(domain="d" * 64))
    assert view_cache(state, clear_is_waiting=False).domain is None
    state.engine_ready = True
    assert view_cache(state, clear_is_waiting=False).domain == "d" * 64
