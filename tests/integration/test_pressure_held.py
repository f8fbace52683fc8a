"""Requests that a real server holds because memory is short: all of them come to their end."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from tests.integration.events import parse_stream
from tests.integration.http_server import running
from tests.integration.kv_serving import recorded
from tests.integration.test_http_clients import assert_empty

TEXT = "/v1/completions"
MODEL_BYTES = 1_040_000
"""Weights, and a chunk of 128 tokens."""


@dataclass(frozen=True)
class Tight:
    """Prompts of so many tokens under a ceiling that holds `rows_bytes` of rows: one of three has
    room, and most of a second.
    """

    phase: str
    num_prompt_tokens: int
    max_tokens: int
    rows_bytes: int
    reserve: dict[str, Any]

    def groups(self, state_bytes: int) -> dict[str, Any]:
        """Settings of a server."""
        return {
            "fake": {
                "step_ms": 1,
                "prefill_tokens_per_s": 5_000,
                "kv_step_tokens": 32,
                "state_bytes": state_bytes,
            },
            "memory": {
                "ceiling": MODEL_BYTES + self.rows_bytes + 2 * state_bytes,
                "sample_ms": 10,
                **self.reserve,
            },
            "kv": {
                "memory_bytes": 0,
                "reserve_bytes": 0,
                "block_tokens": 32,
                "writing_bytes": 100_000 + state_bytes,
            },
            "scheduler": {"chunk_tokens": 128, "gap_ms": 0},
        }

    def asked(self, number: int) -> dict[str, Any]:
        """One of three prompts that share nothing."""
        return {
            "model": "default",
            "prompt": (f"{number} is the number of this prompt; " * 50)[: self.num_prompt_tokens],
            "max_tokens": self.max_tokens,
            "ignore_eos": True,
            "stream": True,
        }

    def is_in_phase(self, pause: events.RequestPaused) -> bool:
        """Whether the pause came in the middle of prefill, or of decode."""
        if self.phase == "prefilling":
            return 32 < pause.num_cached_tokens < self.num_prompt_tokens - 1
        return 8 <= pause.num_output_tokens <= self.max_tokens - 8


PREFILL = Tight("prefilling", 600, 30, 1_000_000, {"reserve": "chunk"})
DECODE = Tight("decoding", 200, 260, 900_000, {"growth_tokens": 1})


def text_of(answer: httpx.Response) -> str:
    """The text of a stream that came to its proper end."""
    found = parse_stream(answer.text)
    assert found[-1].data == "[DONE]", answer.text[-300:]
    return "".join(event.text for event in found)


@pytest.mark.parametrize("state_bytes", [0, 30_000])
@pytest.mark.parametrize("tight", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_three_prompts_that_do_not_fit_together_all_finish(
    tmp_path: Path, tight: Tight, state_bytes: int
) -> None:
    groups = tight.groups(state_bytes)
    with running(tmp_path, **groups) as server, ThreadPoolExecutor(3) as pool:
        alone = [text_of(server.http.post(TEXT, json=tight.asked(n))) for n in range(3)]
        assert recorded(tmp_path, events.PauseStarted) == [], "alone each of them fits"
        server.http.post("/v1/cache/clear").raise_for_status()
        answers = [pool.submit(server.http.post, TEXT, json=tight.asked(n)) for n in range(3)]
        assert [text_of(answer.result()) for answer in answers] == alone
        assert_empty(server)
    assert recorded(tmp_path, events.RequestAborted) == []
    assert len(recorded(tmp_path, events.RequestFinished)) == 6
    pauses = recorded(tmp_path, events.RequestPaused)
    resumes = recorded(tmp_path, events.RequestResumed)
    assert any(tight.is_in_phase(pause) for pause in pauses)
    assert len(pauses) == len(resumes)
    assert [resume.num_lost_tokens for resume in resumes] == [0] * len(resumes)
