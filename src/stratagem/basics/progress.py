"""Progress bars: drawn in a terminal and in a notebook, a line now and then in a pipe."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

Show = Callable[[str, float, str], None]
"""Shows what is being done, how much of it is (0 to 1), and a remark."""

LINE_SECONDS = 5.0
"""Between two lines in a pipe."""

SURE = 0.03
"""Of less than this share being done nobody can say how long the rest takes."""


@contextmanager
def progress_bar(*, enabled: bool = True) -> Iterator[Show]:
    """Yield a function that moves a bar on standard error; the bar is gone at the end.

    Example:
        >>> with progress_bar(enabled=False) as show:
        ...     show("searching", 0.5, "best 18.0 ms")

    Raises:
        TypeError: when `enabled` is anything but True or False, such as a function to be told.
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"progress is {enabled!r}; it says whether a bar is shown: give True or False"
        )
    console = Console(stderr=True, markup=False, emoji=False)
    if not enabled:
        yield lambda what, fraction, remark: None
    elif console.is_jupyter:
        with _notebook_bar() as show:
            yield show
    elif console.is_terminal:
        with _terminal_bar(console) as show:
            yield show
    else:
        yield _lines(console)


def status_file(path: Path) -> Show:
    """A function that keeps what it shows in a file, for another process to show."""

    def show(what: str, fraction: float, remark: str) -> None:
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(json.dumps([what, fraction, remark]))
        temporary.replace(path)

    return show


def show_status(path: Path, show: Show) -> None:
    """Show what another process keeps in a file; nothing while there is none."""
    if path.exists():
        show(*json.loads(path.read_text()))


class _ThreeLines(Progress):
    """What is being done, its bar, and the remark, a line each: no width cuts one for another."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            yield _line(task.description)
            yield self.make_tasks_table([task])
            yield _line(task.fields["remark"])


def _line(words: str) -> Text:
    return Text(f"  {words}", no_wrap=True, overflow="ellipsis")


@contextmanager
def _terminal_bar(console: Console) -> Iterator[Show]:
    columns = (
        TextColumn(" "),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with _ThreeLines(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=1.0, remark="", left="")
        left = _Left()
        yield lambda what, fraction, remark: bar.update(
            task, description=what, completed=fraction, remark=remark, left=left.after(fraction)
        )


@contextmanager
def _notebook_bar() -> Iterator[Show]:
    from IPython.display import DisplayHandle

    handle: Any = DisplayHandle()  # type: ignore[no-untyped-call]
    handle.display({"text/html": ""}, raw=True)
    left = _Left()

    def show(what: str, fraction: float, remark: str) -> None:
        words = [html.escape(each) for each in (what, left.after(fraction), remark)]
        bar = f"{words[0]}<br><progress value={fraction:.3f}></progress> {words[1]}<br>{words[2]}"
        handle.update({"text/html": bar}, raw=True)

    try:
        yield show
    finally:
        handle.update({"text/html": ""}, raw=True)


def _lines(console: Console) -> Show:
    shown = time.monotonic()
    left = _Left()

    def show(what: str, fraction: float, remark: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= LINE_SECONDS:
            shown = time.monotonic()
            words = [f"{fraction:.0%}", remark, left.after(fraction)]
            line = f"  {what}: {', '.join(filter(None, words))}"
            console.print(line, highlight=False, soft_wrap=True)

    return show


class _Left:
    """How long the rest takes if it goes on as it did until now."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def after(self, fraction: float) -> str:
        """In words; none as long as it cannot be told."""
        if not SURE <= fraction < 1.0:
            return ""
        seconds = (time.monotonic() - self._started) * (1.0 - fraction) / fraction
        minutes, rest = divmod(round(seconds), 60)
        return f"about {minutes} min {rest} s left" if minutes else f"about {rest} s left"
