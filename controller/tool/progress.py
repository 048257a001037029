"""Shows the progress of a wait: bars for services on a terminal, else a line for each change; later the reasons."""

from __future__ import annotations

from types import TracebackType

from rich import progress as bars
from rich.table import Column
from rich.text import Text

from .output import Console
from .wait import WaitVerdict


class Progress:
    """Shows verdicts; on a terminal only the reasons remain at the end. `quiet`: shows only the reasons."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._bars = _make_bars(console) if console.is_terminal and not quiet else None
        self._tasks: dict[str, bars.TaskID] = {}
        self._last: object = None
        self._written = ""
        self._shown: set[tuple[str, ...]] = set()

    def __enter__(self) -> Progress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def show(self, verdict: WaitVerdict, *, reasons: bool = False) -> None:
        """Show the current verdict; `reasons`: also why each service is not ready, each reason once."""
        if reasons:
            self._write_reasons(verdict)
        if self._bars:
            self._draw(self._bars, verdict)
            self._bars.refresh()
        elif not self._quiet:
            self._write(verdict)

    def _write_reasons(self, verdict: WaitVerdict) -> None:
        for part in verdict.parts:
            for reason in part.reasons:
                if (part.name, *reason.key) not in self._shown:
                    self._shown.add((part.name, *reason.key))
                    self._console.print(Text(f"  {part.name}: {reason.words}"), soft_wrap=True)

    def _draw(self, drawn: bars.Progress, verdict: WaitVerdict) -> None:
        for part in verdict.parts:
            if part.name not in self._tasks:
                self._tasks[part.name] = drawn.add_task(part.name, total=None, counted="", message="")
            total = part.wanted or None
            counted = "" if part.wanted is None else f"{part.ready}/{part.wanted}"
            done = min(part.ready, total) if total else 0
            message = part.message.partition("\n")[0]
            drawn.update(self._tasks[part.name], total=total, completed=done, counted=counted, message=message)
        if verdict.parts:
            if "" in self._tasks:
                drawn.remove_task(self._tasks.pop(""))
            return
        if "" not in self._tasks:
            self._tasks[""] = drawn.add_task("", total=None, counted="", message="")
        drawn.update(self._tasks[""], message=verdict.message)

    def _write(self, verdict: WaitVerdict) -> None:
        """Write the message once for each state; times and loads in it change at every look."""
        parts = [(part.name, part.ready, part.wanted, part.key) for part in verdict.parts]
        state = (verdict.notices, parts) if parts else verdict.message
        if state != self._last and verdict.message != self._written:
            self._written = verdict.message
            self._console.print(Text(verdict.message), soft_wrap=True)
        self._last = state


def _make_bars(console: Console) -> bars.Progress:
    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.fields[counted]}", markup=False),
        bars.TimeElapsedColumn(),
        bars.TextColumn("{task.fields[message]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    return bars.Progress(*columns, console=console, transient=True)
