"""What the newcomer sees: progress, tables and text; all other output goes to a log file."""

import contextlib
import faulthandler
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import mmcollate
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo.engine import Batch

MAX_WIDTH = 100
WAYS = {
    "alias": "the item's own tensor; nothing is copied",
    "view": "the items' own memory in a new shape; nothing is copied",
    "list": "a list of the items' own tensors; nothing is copied",
    "gather": "copied once, by mmcollate, into one new tensor",
    "reference": "left to vLLM's own code",
}


def take_over_output(log: Path, give_up_after: float) -> Console:
    """From now on, whatever writes to this process's stdout and stderr writes to `log`, and only
    the console returned here to the terminal. Crashes and hangs still report to stderr."""
    stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    stderr = os.fdopen(os.dup(2), "w")
    console = Console(file=stdout, highlight=False)
    # Fixed here, because rich would later ask the descriptors that are redirected now.
    console.width = min(MAX_WIDTH, console.width)
    log.parent.mkdir(parents=True, exist_ok=True)
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    faulthandler.enable(stderr)
    faulthandler.dump_traceback_later(give_up_after, exit=True, file=stderr)
    return console


class Steps:
    """A line for each step, and a progress bar under them on a terminal."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._number = 0
        self._bar = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=40),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps done,"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            # Else rich shows on the console what anything prints meanwhile.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> "Steps":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        self._number += 1
        self._console.print(f"  {self._number}. {what}")
        yield
        self._bar.advance(self._task)


def show_batch(console: Console, number: int, batch: Batch, times: tuple[float, float]) -> set[str]:
    """One table; returns the ways that occur in it."""
    [plan] = mmcollate.explain(batch.items, **batch.options, file=io.StringIO()).groups
    items = f"{plan.num_items} item{'s' * (plan.num_items != 1)}"
    table = Table(box=box.SQUARE)
    table.add_column("field", min_width=20)
    table.add_column("placement", min_width=10)
    table.add_column("way", min_width=10)
    table.add_column("size in bytes", justify="right", min_width=14)
    for field in plan.fields:
        table.add_row(field.name, field.placement, field.way, f"{field.nbytes:,}")
    ours, theirs = times
    console.print(f"\n[bold]Batch {number}: modality {batch.modality}, {items}[/bold]")
    console.print(table)
    console.print(f"Microseconds to make it: mmcollate {ours:,.1f}, vLLM's own code {theirs:,.1f}")
    return {field.way for field in plan.fields}


def show_legend(console: Console, ways: set[str], device: str, repeats: int) -> None:
    entries = [
        ("item", "one image or video of a request, as named tensors: its fields"),
        ("batch", "the items of one modality from all requests, joined field by field"),
        ("placement cpu", "stays in the host's memory, where the model reads it"),
        ("placement device", f"goes to the model's device, here: {device}"),
        *((f"way {way}", meaning) for way, meaning in WAYS.items() if way in ways),
        (
            "microseconds",
            f"medians of {repeats} repetitions each on the same items, taking turns, one thread;"
            " true of this machine right now, with whatever else runs on it",
        ),
    ]
    show_pairs(console, "Reading the tables", entries)


def show_pairs(console: Console, title: str, pairs: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for left, right in pairs:
        grid.add_row(f"  {left}", Text(right))  # as it is: square brackets are no markup
    console.print()
    console.print(f"[bold]{title}[/bold]")
    console.print(grid)


def show_log(console: Console, log: Path, lines: int = 60) -> None:
    """The end of what was hidden; very long lines cut."""
    sys.stdout.flush()
    sys.stderr.flush()
    tail = log.read_text(errors="replace").splitlines()[-lines:]
    console.rule(f"the last {len(tail)} lines of {os.path.relpath(log)}")
    for line in tail:
        console.out(line[:500])
    console.rule()
