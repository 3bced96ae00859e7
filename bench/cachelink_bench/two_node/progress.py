"""A progress bar with the time left, on standard error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from cachelink_bench.two_node.measure import OnWork


@contextmanager
def watching(*, quiet: bool = False) -> Iterator[Watch]:
    """Shows a bar for the ``with``; where nobody watches, nothing."""
    shown_on = Console(stderr=True, highlight=False)
    progress = Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=shown_on,
        disable=quiet or not shown_on.is_terminal,
    )
    with progress:
        yield Watch(progress)


class Watch:
    """Starts the bar once it is known how much there is to do."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __call__(self, work: float) -> OnWork:
        """Starts it.

        Args:
            work: all of it, in any unit.
        """
        task = self._progress.add_task("", total=work)

        def show(what: str, done: float) -> None:
            self._progress.update(task, description=what, advance=done)

        return show
