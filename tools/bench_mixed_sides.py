"""Who plays the mixed workload: a server over HTTP, or mlx-lm's `BatchGenerator` in a process of
its own.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx2
import msgspec

from tools.bench_mixed_load import STREAM_BEFORE, Played, Prompt, Workload

START_LIMIT_S = 180
"""Until a peer's server answers: it loads the model, and some compile first."""

ANSWER_LIMIT_S = 300
STOP_LIMIT_S = 20


class SideFailed(Exception):
    """A side did not start, ended, or gave no tokens."""


class Side(Protocol):
    """One that plays the workload. Idle between two rounds."""

    name: str

    def play(self, workload: Workload) -> Played:
        """One round. Raises SideFailed, or httpx2.HTTPError."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Answer:
    """A streamed answer as it comes: when each token came. `begun` is set when `wanted` have come;
    setting `leave` ends it with the next one.
    """

    wanted: int = 1
    times: list[float] = field(default_factory=list[float])
    error: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def read(self, client: httpx2.Client, path: str, body: dict[str, object]) -> None:
        """Asks and reads, in a thread of its own."""
        try:
            with client.stream("POST", path, json=body) as stream:
                stream.raise_for_status()
                for line in stream.iter_lines():
                    if is_token(line):
                        self.times.append(time.monotonic())
                    if len(self.times) >= self.wanted:
                        self.begun.set()
                    if self.leave.is_set():
                        break
        except httpx2.HTTPError as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self.begun.set()
            self.ended.set()


def is_token(line: str) -> bool:
    """Whether this line of a stream brings a token: some text, or what was asked of a token whose
    text is not whole yet.
    """
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
    content = choices[0].get("delta", {}).get("content")
    return bool(content or choices[0].get("text") or choices[0].get("logprobs"))


def chat(model: str, prompt: Prompt) -> dict[str, object]:
    """A chat request that every server understands. Fermata and some others do not end a turn
    early when `ignore_eos` is set; the rest overlook it.
    """
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt.text}],
        "max_tokens": prompt.max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }


class HttpSide:
    """A server at this address, which serves a model under this name."""

    def __init__(self, name: str, address: str, model: str) -> None:
        self.name = name
        self.model = model
        self.client = httpx2.Client(base_url=address, timeout=ANSWER_LIMIT_S, trust_env=False)

    def play(self, workload: Workload) -> Played:
        """See `Side`."""
        running = self.ask(workload.stream, Answer(wanted=STREAM_BEFORE))
        running.begun.wait(ANSWER_LIMIT_S)
        sent = time.monotonic()
        four = [self.ask(prompt, Answer()) for prompt in workload.four]
        for answer in (running, *four):
            if not answer.ended.wait(ANSWER_LIMIT_S) or answer.error or not answer.times:
                raise SideFailed(f"{self.name}: {answer.error or 'an answer has no text'}")
        return Played(
            [at - sent for at in running.times], [[at - sent for at in a.times] for a in four]
        )

    def ask(self, prompt: Prompt, answer: Answer) -> Answer:
        """Begins to read an answer."""
        body = chat(self.model, prompt)
        arguments = (self.client, "/v1/chat/completions", body)
        threading.Thread(target=answer.read, args=arguments, daemon=True).start()
        return answer

    def close(self) -> None:
        self.client.close()


class CommandSide(HttpSide):
    """Another server, started with a command in which `{model}` and `{port}` are filled in."""

    def __init__(self, command: str, folder: Path, log: Path) -> None:
        port = free_port()
        words = [word.format(model=folder, port=port) for word in shlex.split(command)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=peer_environment(),
                start_new_session=True,
            )
        self.log = log
        super().__init__(Path(words[0]).name, f"http://127.0.0.1:{port}", str(folder))
        try:
            self.model = self.wait_for_model()
        except SideFailed:
            self.close()
            raise

    def wait_for_model(self) -> str:
        """The name under which it serves the model, as soon as it answers."""
        begun = time.monotonic()
        while time.monotonic() - begun < START_LIMIT_S:
            if self.process.poll() is not None:
                raise SideFailed(f"{self.name} ended: {self.last_words()}")
            with contextlib.suppress(httpx2.HTTPError, ValueError):
                answer = self.client.get("/v1/models")
                if answer.status_code == 200:
                    served = [each["id"] for each in answer.json().get("data", [])]
                    return served[0] if served else self.model
            time.sleep(0.2)
        raise SideFailed(f"{self.name} does not answer after {START_LIMIT_S} s")

    def last_words(self) -> str:
        """The end of what it has printed."""
        return self.log.read_text(errors="replace")[-500:]

    def close(self) -> None:
        super().close()
        end(self.process)


class BatchSide:
    """mlx-lm's `BatchGenerator`, driven by `tools/bench_mixed_batch.py`: prompts go to it and times
    come back, a line each. There is neither HTTP nor text.
    """

    name = "batch_generator"

    def __init__(self, folder: Path, blas: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.bench_mixed_batch", str(folder), blas],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def play(self, workload: Workload) -> Played:
        """See `Side`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        prompts = [workload.stream, *workload.four]
        asked = [{"tokens": each.tokens, "max_tokens": each.max_tokens} for each in prompts]
        try:
            print(json.dumps(asked), file=self.process.stdin, flush=True)
        except OSError as error:
            raise SideFailed(f"{self.name} has ended: {error}") from error
        line = self.process.stdout.readline()
        if not line:
            raise SideFailed(f"{self.name} ended with status {self.process.wait()}")
        return msgspec.json.decode(line, type=Played)

    def close(self) -> None:
        end(self.process)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Ends a peer and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_LIMIT_S)


def peer_environment() -> dict[str, str]:
    """With the matrix library that Fermata chooses for a large model on a CPU, where there is one:
    the comparison is one of schedulers.
    """
    from scheduler.engine.blas import OPENBLAS, gpu

    if gpu() is not None or not has_library(OPENBLAS):
        return dict(os.environ)
    return os.environ | {"LD_PRELOAD": OPENBLAS}


def has_library(name: str) -> bool:
    """Whether a process can load it. Asked in a process of its own, which then has it loaded."""
    question: Sequence[str] = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({name!r})"]
    return subprocess.run(question, check=False, stderr=subprocess.DEVNULL).returncode == 0


def free_port() -> int:
    """A port that was free a moment ago: other servers do not say which one they took."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
