"""Errors as the user meets them: what is wrong, where, what is legal, what is nearest.

Every error that can reach a user is one of three kinds, and the kind is the exit status:

| class | exit | meaning |
|---|---|---|
| `UserError` | 2 | the input is wrong; nothing was started |
| `CheckFailed` | 3 | a check ran and did not hold |
| `Fault` | 4 | a fault ended a run |

`cli/` prints `str(error)` and exits with `error.exit_code`; it never shows a traceback for these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class RepartoError(Exception):
    """Base of all errors meant for a person; `exit_code` is the process's exit status."""

    exit_code: ClassVar[int] = 1


class UserError(RepartoError, ValueError):
    """The user's input is wrong. Exit status 2.

    what    one sentence: the fact that is wrong, with the value found
    where   the field, file or option (`data.batch_size`, `RUN.toml`, `--plan`)
    legal   what would be accepted
    nearest the smallest change that makes it right, ready to copy
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, what: str, *, where: str = "", legal: str = "", nearest: str = "") -> None:
        self.what = what
        self.where = where
        self.legal = legal
        self.nearest = nearest
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [f"{self.where}: {self.what}" if self.where else self.what]
        if self.legal:
            lines.append(f"  legal: {self.legal}")
        if self.nearest:
            lines.append(f"  nearest: {self.nearest}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, str]:
        """The four fields, for `--json` and for passing an error between processes."""
        return {
            "what": self.what,
            "where": self.where,
            "legal": self.legal,
            "nearest": self.nearest,
        }


class CheckFailed(RepartoError):
    """A check was made and did not hold (verify, checkpoint check, a drill). Exit status 3."""

    exit_code: ClassVar[int] = 3


class Fault(RepartoError):
    """A fault ended a run: a killed rank, a time-out, a disagreement. Exit status 4.

    The message names rank, step, cause, last good checkpoint and the next action.
    """

    exit_code: ClassVar[int] = 4


class PeerLost(Fault):
    """A collective broke because another rank is gone or late: a consequence, rarely the cause."""


def nearest_word(word: str, words: Iterable[str]) -> str:
    """The one of `words` most like `word`, or an empty string if none is alike."""
    found = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return found[0] if found else ""
