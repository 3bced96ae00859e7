"""Progress of the demonstration on standard error: one line a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from cachelink_core.rpc import types


class StepLine:
    """The line of one step, told by handoffs and answers how far they are."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def handoff(self, event: types.Progress) -> None:
        """Shows the prefill, then what is sent."""
        if event.prefilled_tokens < event.tokens or not event.raw_bytes:
            self._show("prefill", event.prefilled_tokens, event.tokens)
        else:
            self._show("send", event.sent_raw_bytes, event.raw_bytes)

    def answer(self, done: int, total: int) -> None:
        """Shows the tokens of the answer."""
        self._show("answer", done, total)

    def _show(self, phase: str, done: int, total: int) -> None:
        self._progress.update(self._task, phase=phase, completed=done, total=max(1, total))


class Steps:
    """All lines together. It is a context manager; where nobody watches it shows nothing."""

    def __init__(self, shown_on: Console, *, quiet: bool) -> None:
        """Prepares the lines.

        Args:
            shown_on: standard error.
            quiet: show nothing at all.
        """
        self._progress = Progress(
            TextColumn("{task.description:<20}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[phase]:<8}"),
            TimeElapsedColumn(),
            console=shown_on,
            disable=quiet or not shown_on.is_terminal,
        )

    @contextmanager
    def step(self, name: str) -> Iterator[StepLine]:
        """Shows one step from its begin to its end."""
        task = self._progress.add_task(name, total=1, phase="")
        yield StepLine(self._progress, task)
        self._progress.update(task, phase="done", total=1, completed=1)
        self._progress.stop_task(task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()
