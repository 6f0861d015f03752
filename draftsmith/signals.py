"""SIGINT and SIGTERM as a request: finish the step, save once, say how to continue."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """A context in which SIGINT or SIGTERM sets `name`; a second SIGINT ends the process at once.

    A second SIGTERM has none: schedulers, launchers and terminals each send one to every process, and pass on others'.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> StopRequest:
        self._before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = self.name or signal.Signals(number).name
        if number == signal.SIGINT:
            # Not what was there before: a shell starts background jobs with SIGINT ignored.
            signal.signal(number, signal.default_int_handler)
