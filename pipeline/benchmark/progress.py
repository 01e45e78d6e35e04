"""What a person sees while cells are measured: a bar on a terminal, a line for each cell in any case."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.benchmark.cells import Cell, CellKey
from pipeline.benchmark.documents import document_sums
from pipeline.console import console, say


class CellProgress:
    """Counts conversations of the cell under way, and cells."""

    def __init__(self, cells: int) -> None:
        self.cells = cells
        self._done = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console(),
            transient=True,
            disable=not console().is_terminal,
        )
        self._task = self._bar.add_task("", visible=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, key: CellKey, conversations: int) -> None:
        """A cell begins."""
        text = f"[{self._done + 1}/{self.cells}] {key.label}"
        self._bar.reset(self._task, total=conversations, description=text, visible=True)

    def advance(self) -> None:
        """A conversation is over; from any thread."""
        self._bar.advance(self._task)

    def finished(self, cell: Cell) -> None:
        """A cell is on disk."""
        self._done += 1
        documents = document_sums(cell.answers)
        tokens, rounds = sum(d.tokens for d in documents), sum(d.rounds for d in documents)
        tau = sum(d.committed for d in documents) / rounds if rounds else float("nan")
        say(
            f"({self._done}/{self.cells}) {cell.key.label}: τ {tau:.3f}, {tokens / cell.wall_seconds:.1f} tokens/s"
        )
