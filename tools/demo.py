"""`fermata demo`: a server with too little memory holds one of three requests, and is killed while
it does; nothing is lost.

The server is a real process and its clients speak HTTP. First it answers undisturbed, with all the
memory it wants; then the same once more, under a ceiling. At the end the demo checks its own
claims, and exits with 1 if one does not hold.
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
from functools import partial
from pathlib import Path

import openai

from tools.demo_checks import (
    AtTheKill,
    Check,
    Output,
    Seen,
    check_all,
    check_chain,
    check_ends,
    check_pauses,
)
from tools.demo_client import Answer, Clients, News
from tools.demo_journal import Account, DemoJournal
from tools.demo_moment import DemoFailed, Moment
from tools.demo_plan import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    MEASURED_LINES,
    Measured,
    MemoryPlan,
    Plan,
    make_memory_plan,
    make_plan,
    story_prompt,
)
from tools.demo_screen import Screen
from tools.demo_table import pause_lines, request_lines, run_lines, state_line
from tools.server_process import ServerFailed, ServerProcess, command, environment

NAMES = ("A", "B", "C")

LIMIT_S = 600
"""The demo gives up after this time; on a slow machine it should take a third of it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line."""

    model: str
    blas: str
    seed: int


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
        plan, uninterrupted = self.undisturbed()
        memory = self.memory_plan(uninterrupted)
        server, clients = self.start(memory)
        self.screen.say(memory.text())
        answers = self.answers(plan, NAMES)
        moment = Moment(self.journal, memory, self.screen)
        self.catch(clients, answers, moment)
        before = self.kill(server, clients, answers)
        then = self.accounts(answers)
        server, clients = self.start(memory)
        moment.release(clients)
        self.go_on(clients, answers)
        whole = [clients.read_again(answer) for answer in answers]
        self.stop(server, clients)
        self.show_table(answers, then)
        seen = Seen(answers, before, whole, self.outputs(answers), self.outputs(uninterrupted))
        found = check_all(seen, self.blas(), comparable=self.wanted.model != "fake")
        return self.verdict([self.replay(), *found, *self.check_held(answers, then)])

    def blas(self) -> str:
        """The matrix library that the server computes with."""
        return self.journal.runs()[-1].blas

    def settings(self, memory: MemoryPlan | None) -> dict[str, str]:
        """What the server is told beside its model: small blocks let short prompts have some, and
        small chunks need little memory. Without a plan for it there is no ceiling and nothing is
        saved.
        """
        chunk_tokens = str(max(CHUNK_TOKENS) if memory is None else memory.chunk_tokens)
        pressed = {"FERMATA_MEMORY__CEILING": "none"} if memory is None else memory.settings()
        return {
            "FERMATA_KV__ENABLED": str(memory is not None),
            "FERMATA_KV__BLOCK_TOKENS": str(BLOCK_TOKENS),
            "FERMATA_KV__STATE_EVERY_BLOCKS": "1",
            "FERMATA_KV__RESERVE_BYTES": "0",  # it is thrown away in a minute
            "FERMATA_SCHEDULER__CHUNK_TOKENS": chunk_tokens,
            "FERMATA_SCHEDULER__CHUNK_TOKENS_BESIDE_ROWS": chunk_tokens,
            "FERMATA_SCHEDULER__GAP_MS": "0",  # so the three answers overlap on any machine
            "FERMATA_ENGINE__BLAS": self.wanted.blas,
            "FERMATA_SERVER__PREPARE_LIMIT_MS": str(LIMIT_S * 1000),  # also on a slow machine
            "FERMATA_FAKE__STEP_MS": "10",  # the fake model is slow enough to be caught
            "FERMATA_FAKE__PREFILL_TOKENS_PER_S": "2000",
            **pressed,
        }

    def start(self, memory: MemoryPlan | None) -> tuple[ServerProcess, Clients]:
        """A server on the state folder, and clients for it."""
        server = ServerProcess(self.wanted.model, self.state, self.settings(memory))
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

    def undisturbed(self) -> tuple[Plan, list[Answer]]:
        """What is asked for on this machine, and the answers without pressure or kill."""
        server, clients = self.start(None)
        plan = make_plan(self.measure(clients), self.journal.model(), self.wanted.seed)
        self.screen.say(
            f"three chat requests at once, {plan.num_lines} lines and {plan.max_tokens} output"
            " tokens each: first undisturbed, with all the memory they want"
        )
        answers = self.answers(plan, [name.lower() for name in NAMES])
        self.follow(clients.begin, answers, silently=True)
        self.stop(server, clients)
        return plan, answers

    def memory_plan(self, answers: Sequence[Answer]) -> MemoryPlan:
        """Too little memory for these three, from what the engine measured of the model."""
        rows = [self.journal.row(answer.request_id) for answer in answers]
        longest = max(row.num_prompt_tokens for row in rows) + answers[0].max_tokens
        return make_memory_plan(self.journal.model(), longest)

    def measure(self, clients: Clients) -> Measured:
        """What prompts take, and how fast they are prefilled."""
        self.screen.say("the model loads; then its prefill rate is measured")
        rows = [
            self.journal.row(
                self.complete(clients, story_prompt("postman", count, -self.wanted.seed - count))
            )
            for count in MEASURED_LINES
        ]
        (few, many), (short, long) = MEASURED_LINES, rows
        per_line = (long.num_prompt_tokens - short.num_prompt_tokens) / (many - few)
        duration_s = max(long.prefill_duration_ns, 1) / 1e9
        rate = long.num_fed_tokens / duration_s
        self.screen.say(
            f"prefill {rate:,.0f} tokens/s, measured over {duration_s:.1f} s; BLAS: {self.blas()}"
        )
        return Measured(rate, per_line, short.num_prompt_tokens - few * per_line)

    def complete(self, clients: Clients, prompt: str) -> str:
        """One short request, whose id is returned. Raises DemoFailed."""
        try:
            return clients.complete(prompt)
        except openai.OpenAIError as error:
            raise DemoFailed(f"the server does not answer: {error}") from error

    def catch(self, clients: Clients, answers: Sequence[Answer], moment: Moment) -> None:
        """Asks for the answers until one of them is held. Raises DemoFailed when all end before."""
        self.screen.say("the same three again; one is held when memory runs short:")
        if not self.follow(clients.begin, answers, until=partial(moment.has_come, clients)):
            self.screen.rest(answers)
            raise DemoFailed("no moment at which one request is held and another decodes")

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

    def go_on(self, clients: Clients, answers: Sequence[Answer]) -> None:
        """The clients take their answers up, until all have ended."""
        self.screen.say("each client asks for what comes after its last event:")
        self.follow(clients.go_on, answers)
        self.screen.rest(answers)

    def kill(self, server: ServerProcess, clients: Clients, answers: Sequence[Answer]) -> AtTheKill:
        """SIGKILL; returns what the clients had been sent and what the journal has."""
        server.kill()
        clients.close()
        self.screen.rest(answers)
        self.screen.say(f"process {server.pid} was killed with SIGKILL. Its journal says:")
        delivered = [answer.so_far() for answer in answers]
        rows = [self.journal.row(answer.request_id) for answer in answers]
        recorded = self.outputs(answers)
        pauses = self.journal.pauses()
        newest = {pause.request_id: pause for pause in pauses}
        for answer, row, output in zip(answers, rows, recorded, strict=True):
            self.screen.line(state_line(answer, row, output, newest.get(answer.request_id)))
            answer.error = ""
        return AtTheKill(delivered, rows, recorded, pauses)

    def outputs(self, answers: Sequence[Answer]) -> list[Output]:
        """The answers as the journal has them."""
        return [self.journal.output(answer.request_id) for answer in answers]

    def accounts(self, answers: Sequence[Answer]) -> list[Account]:
        """What the journal says now of what each request was restored from, fed and gave."""
        return [self.journal.account(answer.request_id) for answer in answers]

    def check_held(self, answers: Sequence[Answer], then: Sequence[Account]) -> list[Check]:
        """That each request went on from its saved KV, after the kill and after each pause."""
        now, pauses = self.accounts(answers), self.journal.pauses()
        killed_seq = self.journal.runs()[-1].first_seq
        found = [check_ends(NAMES, [account.row for account in now])]
        for answer, was, is_now in zip(answers, then, now, strict=True):
            own = [pause for pause in pauses if pause.request_id == answer.request_id]
            num_restored = self.journal.num_tokens_at_start(answer.request_id, killed_seq)
            num_known = was.row.num_prompt_tokens + was.num_output_tokens
            num_fed = is_now.row.num_fed_tokens - was.row.num_fed_tokens
            found += [
                check_chain(answer.name, num_known, num_restored, num_fed),
                check_pauses(answer.name, own),
            ]
        return found

    def show_table(self, answers: Sequence[Answer], then: Sequence[Account]) -> None:
        """The whole story, as the journal has it."""
        self.screen.say(
            "what the journal says (before the kill + after it; times on the clock of these lines):"
        )
        start_ns = self.screen.start_ns
        requests = request_lines(NAMES, then, self.accounts(answers), start_ns)
        names = {answer.request_id: answer.name for answer in answers}
        pauses = pause_lines(names, self.journal.pauses(), start_ns)
        runs = run_lines(self.journal.runs(), start_ns)
        for line in [*requests, "", "SELECT * FROM pauses:", *pauses, "", *runs]:
            self.screen.line(f"  {line}".rstrip())

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
        num_failed = sum(check.holds is False for check in found)
        num_open = sum(check.holds is None for check in found)
        what = f"{num_failed} FAILED" if num_failed else "all hold"
        left = f"; {num_open} not comparable" if num_open else ""
        self.screen.say(f"{len(found) - num_open} checks, {what}{left}")
        return not num_failed
