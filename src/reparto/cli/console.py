"""What a person sees while a run goes on, and at its end. Everything goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from reparto.units import human_count, human_seconds


def console() -> Console:
    """stderr, so that stdout stays for the JSON object; long lines are never broken."""
    width = None if sys.stderr.isatty() else 140  # a file or pipe has no width of its own
    return Console(stderr=True, soft_wrap=True, highlight=False, width=width)


class _TimeLeft(ProgressColumn):
    """Time left from the mean of the last steps."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        return Text(f"{human_seconds(left)} left" if left is not None else "", style="cyan")


class Watcher:
    """Follows metrics.jsonl while workers write it, and draws one line of progress."""

    def __init__(self, path: Path, *, total: int, done: int, out: Console) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0
        self._inode = path.stat().st_ino if path.exists() else 0
        self._rest = b""
        self._rows: list[Mapping[str, object]] = []
        self._out = out
        self._done = done
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[words]}"),
            _TimeLeft(),
            console=out,
            transient=False,
            disable=not out.is_terminal,
        )
        self._task = self._progress.add_task("", total=total, completed=done, words="starting")
        self._plain_every = max(1, (total - done) // 10)
        self._total = total

    def __enter__(self) -> Watcher:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def step(self) -> int:
        """Last step seen."""
        return int(str(self._rows[-1]["step"])) if self._rows else self._done

    def poll(self) -> None:
        """Take in new rows."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        if (status.st_ino, status.st_size >= self._at) != (self._inode, True):
            # replaced: a resume has dropped the rows that will be made again
            self._inode, self._at, self._rest = status.st_ino, 0, b""
            self._rows.clear()
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = self._rest + file.read()
            self._at = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            row = json.loads(line)
            self._rows.append(row)
            if int(row["step"]) > self._done:  # rows of an earlier life have been shown then
                self._show(row)

    def _show(self, row: Mapping[str, object]) -> None:
        recent = self._rows[-20:]
        took = sum(float(str(one["step_s"])) for one in recent)
        tokens = sum(int(str(one["num_tokens"])) for one in recent)
        hung = sum(float(str(one["exposed_comm_s"])) for one in recent)
        words = (
            f"loss {float(str(row['loss'])):.4f}  "
            f"{human_count(tokens / took if took else 0)} tokens/s  "
            f"exposed {hung / took if took else 0:.0%}"
        )
        step = int(str(row["step"]))
        self._progress.update(self._task, completed=step, words=words)
        if not self._out.is_terminal and (step % self._plain_every == 0 or step == self._total):
            self._out.print(f"step {step}/{self._total}  {words}")


def telling(out: Console) -> Callable[[str, float], None]:
    """A progress function for `data.prepare`: one line for every new thing it does."""
    last = [""]

    def told(what: str, share: float) -> None:
        if what != last[0]:
            last[0] = what
            out.print(f"data: {what}")

    return told


def cost_lines(result: Mapping[str, float], world_size: int) -> list[str]:
    """What a million tokens cost here, and on one device, from the run's own compute time."""
    tokens, seconds = result["tokens"], result["steps_s"]
    if not tokens or not seconds:
        return []
    busy = max(seconds - result["exposed_comm_s"] - result["data_wait_s"], 1e-9)
    here = world_size * seconds / tokens * 1e6
    alone = world_size * busy / tokens * 1e6
    workers = f"{world_size} worker{'s' if world_size > 1 else ''}"
    if world_size == 1:
        return [f"cost: {here:.0f} device-seconds a million tokens on one worker"]
    return [
        f"cost: {here:.0f} device-seconds a million tokens on {workers}, about {alone:.0f} on one "
        f"device (rank 0's own compute time): {here / alone - 1:+.0%} for "
        f"{alone / (here / world_size):.2f} times the speed"
    ]
