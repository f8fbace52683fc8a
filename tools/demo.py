"""`fermata demo`: kills a server in the middle of three answers, and shows that nothing is lost.

The server is a real process, its clients speak HTTP, and the moment of the kill is read off its
journal. At the end the demo checks its own claims, and exits with 1 if one does not hold.
"""

import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import openai

from tools.demo_checks import AtTheKill, Check, Output, Seen, check_all, check_chain
from tools.demo_client import Answer, Clients, News
from tools.demo_journal import Account, DemoJournal
from tools.demo_plan import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    SAVED_PERMILLE,
    Measured,
    Plan,
    make_plan,
    measured_prompt,
    next_count,
)
from tools.demo_screen import Screen
from tools.demo_table import request_lines, run_lines, state_line
from tools.server_process import ServerFailed, ServerProcess, command, environment

NAMES = ("A", "B", "C")

TOKENS_BEFORE_KILL = 3
"""Tokens that A and B have each been sent before the server is killed."""

ATTEMPTS = 3

LIMIT_S = 600
"""The demo gives up after this time; on a slow machine it should take a third of it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line."""

    model: str
    blas: str
    seed: int


class DemoFailed(Exception):
    """The demo could not be shown to its end. One line that says where."""


def run(wanted: Wanted) -> int:
    """Shows the demo and returns the exit status: 0 when all checks hold, else 1."""
    screen = Screen(sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as Ctrl-C does
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fermata-demo-"))
        demo = Demo(wanted, Path(folder), screen, stack)
        try:
            return 0 if demo.run() else 1
        except (DemoFailed, ServerFailed) as error:
            screen.say(f"the demo failed: {error}")
            demo.show_logs()
            return 1
        except KeyboardInterrupt:
            screen.say("interrupted; the server and its folder are removed")
            return 130


class Demo:
    """One run. `state` is a folder that is thrown away afterwards."""

    def __init__(self, wanted: Wanted, state: Path, screen: Screen, stack: ExitStack) -> None:
        self.wanted = wanted
        self.state = state
        self.screen = screen
        self.stack = stack
        self.news: News = queue.SimpleQueue()
        self.journal = DemoJournal(state)
        self.deadline = time.monotonic() + LIMIT_S
        self.servers: list[ServerProcess] = []
        self.all_clients: list[Clients] = []
        stack.callback(self.close)  # after the servers, whose ends end the clients' threads

    def run(self) -> bool:
        """The whole show; returns whether all checks hold."""
        server, clients = self.start()
        plan, answers = self.catch(clients, self.measure(clients))
        before = self.kill(server, clients, answers)
        then = self.accounts(answers)
        server, clients = self.start()
        self.screen.say("each client asks for what comes after its last event:")
        self.follow(clients.go_on, answers)
        self.screen.rest(answers)
        whole = [clients.read_again(answer) for answer in answers]
        self.stop(server, clients)
        server, clients = self.start(saves_kv=False)
        self.screen.say("the same three requests once more: nothing is saved, and nobody kills")
        uninterrupted = self.answers(plan, [name.lower() for name in NAMES])
        self.follow(clients.begin, uninterrupted, silently=True)
        self.stop(server, clients)
        self.show_table(answers, then)
        chains = self.check_chains(then, self.accounts(answers))
        replay = self.replay()
        seen = Seen(answers, before, whole, self.outputs(answers), self.outputs(uninterrupted))
        found = check_all(seen, self.blas(), new_tokens=self.wanted.model == "fake")
        return self.verdict([replay, *found, *chains])

    def blas(self) -> str:
        """The matrix library that the server computes with."""
        return self.journal.runs()[-1].blas

    def settings(self, *, saves_kv: bool) -> dict[str, str]:
        """What the server is told beside its model: small chunks let the kill find a prefill, and
        small blocks let short prompts have some.
        """
        return {
            "FERMATA_KV__ENABLED": str(saves_kv),
            "FERMATA_KV__BLOCK_TOKENS": str(BLOCK_TOKENS),
            "FERMATA_KV__STATE_EVERY_BLOCKS": "1",
            "FERMATA_KV__RESERVE_BYTES": "0",  # it is thrown away in a minute
            "FERMATA_SCHEDULER__CHUNK_TOKENS_BESIDE_ROWS": str(CHUNK_TOKENS),
            "FERMATA_ENGINE__BLAS": self.wanted.blas,
            "FERMATA_SERVER__PREPARE_LIMIT_MS": str(LIMIT_S * 1000),  # also on a slow machine
            "FERMATA_FAKE__STEP_MS": "10",  # the fake model is slow enough to be caught
            "FERMATA_FAKE__PREFILL_TOKENS_PER_S": "2000",
        }

    def start(self, *, saves_kv: bool = True) -> tuple[ServerProcess, Clients]:
        """A server on the state folder, and clients for it."""
        settings = self.settings(saves_kv=saves_kv)
        server = ServerProcess(self.wanted.model, self.state, settings)
        self.stack.callback(server.close)
        self.servers.append(server)
        address = server.address()
        self.screen.say(f"process {server.pid} serves {self.wanted.model} at {address}")
        clients = Clients(address, self.wanted.seed, self.news)
        self.all_clients.append(clients)
        return server, clients

    def close(self) -> None:
        """Waits for all threads."""
        for clients in self.all_clients:
            clients.close()

    def show_logs(self) -> None:
        """What the newest server said last, for people who want to know why."""
        for server in self.servers[-1:]:
            server.close()
            for line in server.log:
                self.screen.line(f"  server: {line}")

    def measure(self, clients: Clients) -> Measured:
        """The prefill rate of all the prompts that were measured, and how long a line is."""
        self.screen.say("the model loads; then its prefill rate is measured")
        number = num_lines = num_prompt_tokens = num_fed_tokens = 0
        duration_s = 0.0
        count: int | None = 1
        while count is not None:
            number += 1
            prompt = measured_prompt(number, count, self.wanted.seed)
            row = self.journal.row(self.complete(clients, prompt))
            num_lines += count
            num_prompt_tokens += row.num_prompt_tokens
            num_fed_tokens += row.num_fed_tokens
            duration_s += row.prefill_duration_ns / 1e9
            count = next_count(number, count, duration_s)
        rate = num_fed_tokens / max(duration_s, 1e-9)
        self.screen.say(
            f"prefill {rate:,.0f} tokens/s, measured over {duration_s:.1f} s; BLAS: {self.blas()}"
        )
        return Measured(rate, num_prompt_tokens / num_lines)

    def complete(self, clients: Clients, prompt: str) -> str:
        """One short request, whose id is returned. Raises DemoFailed."""
        try:
            return clients.complete(prompt)
        except openai.OpenAIError as error:
            raise DemoFailed(f"the server does not answer: {error}") from error

    def catch(self, clients: Clients, measured: Measured) -> tuple[Plan, list[Answer]]:
        """Asks for three answers until the moment for the kill has come. Where an answer is too
        short for that, or the long prompt, it is tried again with longer ones.
        """
        for attempt in range(ATTEMPTS):
            plan = make_plan(measured, self.wanted.seed + attempt, 2**attempt)
            self.screen.say(
                f"three chat requests at once: A and B with short prompts, C with one of"
                f" {plan.num_lines} lines; {plan.max_tokens} output tokens each"
            )
            answers = self.answers(plan, NAMES)
            if self.follow(clients.begin, answers, until=self.is_moment):
                return plan, answers
            self.screen.rest(answers)
            self.screen.say("that was too fast for the kill: once more, and longer")
        raise DemoFailed("no moment at which A and B decode and C is in its prefill")

    def answers(self, plan: Plan, names: Sequence[str]) -> list[Answer]:
        """What the clients are going to ask for."""
        return [
            Answer(name, prompt, plan.max_tokens)
            for name, prompt in zip(names, plan.prompts, strict=True)
        ]

    def follow(
        self,
        begin: Callable[[Answer], None],
        answers: Sequence[Answer],
        *,
        until: Callable[[Sequence[Answer]], bool] | None = None,
        silently: bool = False,
    ) -> bool:
        """Begins the answers and shows them as they come: until the moment comes (then it returns
        True), or all have ended. Woken by what the clients are sent, never by the clock. `silently`
        keeps the texts out of a pipe.
        """
        for answer in answers:
            begin(answer)
            while not answer.request_id:  # taken in this order, so that A is first to decode
                self.next_news()
        while any(not answer.ended for answer in answers):
            self.next_news()
            if not silently or self.screen.is_terminal:
                self.screen.show(answers)
            if until is not None and until(answers):
                return True
        return False

    def next_news(self) -> None:
        """Waits for a client to be sent something. Raises DemoFailed when its stream is broken, or
        the time is up.
        """
        try:
            answer = self.news.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            raise DemoFailed(f"not done after {LIMIT_S} s") from None
        if answer.error:
            raise DemoFailed(f"{answer.name}: {answer.error}")

    def is_moment(self, answers: Sequence[Answer]) -> bool:
        """Whether A and B decode, and C is in the middle of its prefill, as the journal has it, and
        each has blocks on disk.
        """
        *short, long = answers
        if not long.request_id or any(a.position < TOKENS_BEFORE_KILL for a in short):
            return False
        *decoding, prefilling = [self.journal.row(answer.request_id) for answer in answers]
        if any(row.phase != "decoding" for row in decoding):
            return False
        if prefilling.phase != "prefilling" or not prefilling.num_fed_tokens:
            return False
        least = prefilling.num_prompt_tokens * SAVED_PERMILLE // 1000
        return self.num_saved_tokens(long) >= least and all(map(self.num_saved_tokens, short))

    def num_saved_tokens(self, answer: Answer) -> int:
        """The tokens that a row of this request could be restored to now."""
        saved = self.journal.num_saved_blocks(answer.request_id) * BLOCK_TOKENS
        return max(saved, self.journal.account(answer.request_id).num_restored_tokens)

    def kill(self, server: ServerProcess, clients: Clients, answers: Sequence[Answer]) -> AtTheKill:
        """SIGKILL; returns what the clients had been sent and what the journal has."""
        server.kill()
        clients.close()
        self.screen.rest(answers)
        self.screen.say(f"process {server.pid} was killed with SIGKILL. Its journal says:")
        delivered = [answer.so_far() for answer in answers]
        rows = [self.journal.row(answer.request_id) for answer in answers]
        recorded = self.outputs(answers)
        for answer, row, output in zip(answers, rows, recorded, strict=True):
            self.screen.line(state_line(answer, row, output))
            answer.error = ""
        return AtTheKill(delivered, rows, recorded)

    def outputs(self, answers: Sequence[Answer]) -> list[Output]:
        """The answers as the journal has them."""
        return [self.journal.output(answer.request_id) for answer in answers]

    def accounts(self, answers: Sequence[Answer]) -> list[Account]:
        """What the journal says now of what each request was restored from, fed and gave."""
        return [self.journal.account(answer.request_id) for answer in answers]

    def check_chains(self, then: Sequence[Account], now: Sequence[Account]) -> list[Check]:
        """That each request went on from its saved KV."""
        return [
            check_chain(
                name,
                was.row.num_prompt_tokens + was.num_output_tokens,
                is_now.num_restored_tokens - was.num_restored_tokens,
                is_now.row.num_fed_tokens - was.row.num_fed_tokens,
            )
            for name, was, is_now in zip(NAMES, then, now, strict=True)
        ]

    def show_table(self, answers: Sequence[Answer], then: Sequence[Account]) -> None:
        """The whole story, as the journal has it."""
        self.screen.say(
            "what the journal says (before the kill + after it; times on the clock of these lines):"
        )
        now = self.accounts(answers)
        start_ns = self.screen.start_ns
        requests = request_lines(NAMES, then, now, start_ns)
        for line in requests + run_lines(self.journal.runs(), start_ns):
            self.screen.line(f"  {line}")

    def stop(self, server: ServerProcess, clients: Clients) -> None:
        """A clean stop. Raises DemoFailed when it is none."""
        clients.close()
        status = server.stop()
        if status != 0:
            raise DemoFailed(f"the server stopped with status {status}")

    def replay(self) -> Check:
        """All decisions of both lives, decided again by another process."""
        result = subprocess.run(
            command("replay", str(self.state)),
            env=environment({}),
            capture_output=True,
            text=True,
            timeout=max(1.0, self.deadline - time.monotonic()),
            check=False,
        )
        last = (result.stdout.splitlines() or result.stderr.splitlines() or ["no output"])[-1]
        return Check(result.returncode == 0, f"replay: {last}")

    def verdict(self, found: Sequence[Check]) -> bool:
        """Shows the checks and the sum; returns whether all hold."""
        for check in found:
            self.screen.line(check.line())
        num_failed = sum(not check.holds for check in found)
        what = f"{num_failed} FAILED" if num_failed else "all hold"
        self.screen.say(f"{len(found)} checks, {what}")
        return not num_failed
