"""What a person reads while a command runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline import ranks


@cache
def console() -> Console:
    """The console of this process; of several training together only the first speaks."""
    return Console(highlight=False, quiet=not ranks.is_first())


def say(text: str) -> None:
    """One line with the wall clock. Brackets are text: names of domains come from clients."""
    console().print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {escape(text)}", soft_wrap=True)


def heading(text: str) -> None:
    """A stage begins."""
    console().rule(f"[bold]{text}")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; the first column is left-aligned, the others right-aligned."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console().print(table)
