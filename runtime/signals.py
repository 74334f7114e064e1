"""Requests to stop: SIGTERM (of a scheduler), SIGUSR1 (Slurm), SIGINT (Ctrl-C), SIGHUP (the terminal was closed)."""

import ctypes
import errno
import io
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any, Self

EXIT_CODE = 75  # asked to stop, saved, to be started again: EX_TEMPFAIL of sysexits.h
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class _Terminal(io.FileIO):
    """A terminal that may be closed: what is written between its end and the signal that tells of it is dropped."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


class Stop:
    """`asked` becomes True when this process is asked to stop, which takes `listen`."""

    def __init__(self) -> None:
        self.asked = False
        self.terminals: list[int] = []  # output that is lost at SIGHUP

    def listen(self) -> Self:
        """From now on signals set `asked` instead of ending the process.

        A second Ctrl-C is a KeyboardInterrupt.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # it is under nohup
            signal.signal(signal.SIGHUP, self._note)
            self.terminals = [number for number in (1, 2) if os.isatty(number)]
            for name, number in ("stdout", 1), ("stderr", 2):
                if number in self.terminals:
                    buffer = io.BufferedWriter(_Terminal(number, "w", closefd=False))
                    setattr(
                        sys,
                        name,
                        io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True),
                    )
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun may be killed
            end_with_parent(os.getppid())
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGHUP:
            null = os.open(os.devnull, os.O_WRONLY)
            for terminal in self.terminals:  # writing there would fail, before the save
                os.dup2(null, terminal)


def end_with_parent(parent: int) -> None:
    """Have Linux send this process SIGTERM when its `parent` dies, however it does: train.py then saves and ends."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)
