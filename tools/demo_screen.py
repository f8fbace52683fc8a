"""How the demo shows itself: on a terminal the answers grow in place, in a pipe there are plain
lines.
"""

import shutil
import time
from collections.abc import Sequence
from typing import TextIO

from tools.demo_client import Answer

LINE_CHARACTERS = 76
"""In a pipe, text is printed in lines of about this length."""

UP_AND_CLEAR = "\x1b[{}A\x1b[J"


class Screen:
    """One run of the demo on stdout."""

    def __init__(self, stdout: TextIO) -> None:
        self.stdout = stdout
        self.is_terminal = stdout.isatty()
        self.started = time.monotonic()
        self.start_ns = time.time_ns()  # the same moment on the clock of the journal
        self.painted_lines = 0
        self.printed: dict[str, int] = {}

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def say(self, text: str) -> None:
        """One line about what happens, with the time since the start."""
        self.line(f"[{self.elapsed_s:6.1f} s] {text}")

    def line(self, text: str) -> None:
        """One line, below everything that stands there."""
        self.wipe()
        print(text, file=self.stdout, flush=True)

    def show(self, answers: Sequence[Answer]) -> None:
        """The answers as far as they have come."""
        if self.is_terminal:
            self.paint(answers)
            return
        for answer in answers:
            self.print_lines(answer)

    def paint(self, answers: Sequence[Answer]) -> None:
        """On a terminal: the end of each answer in a line of its own, painted over."""
        width = shutil.get_terminal_size().columns - 1
        self.wipe()
        for answer in answers:
            head = f"  {answer.name} {answer.position:3} tokens | "
            room = max(width - len(head), 1)
            self.stdout.write(head + clean(answer.text)[-room:] + "\n")
        self.stdout.flush()
        self.painted_lines = len(answers)

    def wipe(self) -> None:
        """Takes away what was painted."""
        if self.painted_lines:
            self.stdout.write(UP_AND_CLEAR.format(self.painted_lines))
            self.painted_lines = 0

    def print_lines(self, answer: Answer) -> None:
        """In a pipe: what has come since the last line, if it is enough for one."""
        start = self.printed.get(answer.name, 0)
        while len(answer.text) - start >= LINE_CHARACTERS:
            space = answer.text.rfind(" ", start, start + LINE_CHARACTERS)
            cut = space + 1 if space > start else start + LINE_CHARACTERS
            self.print_text(answer.name, answer.text[start:cut])
            start = cut
        self.printed[answer.name] = start

    def rest(self, answers: Sequence[Answer]) -> None:
        """What is left of the answers, at an end or a break. On a terminal: the whole texts."""
        self.wipe()
        for answer in answers:
            start = 0 if self.is_terminal else self.printed.get(answer.name, 0)
            if answer.text[start:].strip():
                self.print_text(answer.name, answer.text[start:])
            self.printed[answer.name] = len(answer.text)

    def print_text(self, name: str, text: str) -> None:
        print(f"  {name} | {clean(text)}", file=self.stdout, flush=True)


def clean(text: str) -> str:
    """The text in one line, without what a terminal would take for a command."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
