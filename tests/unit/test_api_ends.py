"""What a client is told of a request that did not end well."""

import re

import pytest

from api.ends import from_end, stopped
from api.errors import BUSY, ApiError, overloaded
from scheduler.streams import StreamEnd

DETAIL = "memory in use 503.4GB, ceiling 500.0GB"
OVERFLOW = re.compile(r"too long|too large|context|exceed|maximum|limit of", re.IGNORECASE)
"""Words by which agents take an error for an overflow, and throw their history away."""


def error_of(kind: str, reason: str) -> ApiError:
    end = StreamEnd(kind, reason, DETAIL, num_prompt_tokens=7, num_output_tokens=3)  # pyright: ignore[reportArgumentType]
    return from_end(end, retry_after_s=17)


@pytest.mark.parametrize(
    ("kind", "reason", "status", "code", "retryable"),
    [
        ("aborted", "memory", 503, "server_is_overloaded", True),
        ("aborted", "memory_wait", 503, "server_is_overloaded", True),
        ("aborted", "engine_failed", 500, "engine_failed", False),
        ("aborted", "server_deaths", 500, "server_deaths", False),
        ("cancelled", "deadline", 504, "deadline_exceeded", True),
        ("cancelled", "cancel_requested", 410, "request_cancelled", False),
        ("cancelled", "client_gone", 410, "request_cancelled", False),
        ("cancelled", "nobody_attached", 410, "request_cancelled", False),
        ("cancelled", "on_restart", 410, "request_cancelled", False),
    ],
)
def test_each_end_has_its_status_its_code_and_its_retry(
    kind: str, reason: str, status: int, code: str, retryable: bool
) -> None:
    error = error_of(kind, reason)
    assert (error.status, error.code) == (status, code)
    assert error.more["reason"] == reason
    assert error.more["retryable"] is retryable
    if retryable:
        assert error.headers == {"retry-after": "17", "retry-after-ms": "17000"}
    else:
        assert error.headers == {"x-should-retry": "false"}
    assert not re.search(r"\d", error.message), "some clients look for status numbers in the words"
    assert not OVERFLOW.search(error.message)
    if kind == "aborted":
        assert error.body()["error"]["detail"] == DETAIL  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("reason", BUSY)
def test_a_busy_server_says_why_in_words_without_numbers(reason: str) -> None:
    error = overloaded(reason, 9)
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.more == {"reason": reason, "retryable": True}
    assert error.headers["retry-after"] == "9"
    assert not re.search(r"\d", error.message)
    assert not OVERFLOW.search(error.message)


def test_an_answer_that_a_stop_came_before_can_be_read_later() -> None:
    error = stopped("req_500")
    assert (error.status, error.code) == (503, "server_is_overloaded")
    assert error.more["stream"] == "/v1/requests/req_500/stream"
    assert not re.search(r"\d", error.message), "an id may hold any number"
