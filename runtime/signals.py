"""Requests to stop: SIGTERM (scheduler), SIGUSR1 (Slurm), SIGINT (Ctrl-C), SIGHUP (terminal)."""

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
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class _Terminal(io.FileIO):
    """Output that ignores EIO: a terminal may be closed before its signal SIGHUP arrives."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


class Stop:
    """`asked` becomes True when this process is asked to stop, once `listen` was called."""

    def __init__(self) -> None:
        self.asked = False
        self.terminals: list[int] = []  # descriptors of output that is lost at SIGHUP

    def listen(self) -> Self:
        """Make signals set `asked` instead of ending the process.

        A second Ctrl-C is a KeyboardInterrupt.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self._note)
        # also where SIGHUP is ignored: a closed terminal must not end the run
        if os.isatty(1):
            sys.stdout = _open_terminal(1)
            self.terminals.append(1)
        if os.isatty(2):
            sys.stderr = _open_terminal(2)
            self.terminals.append(2)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun may be killed
            end_with_parent(os.getppid())
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if number == signal.SIGHUP:
            null = os.open(os.devnull, os.O_WRONLY)
            for terminal in self.terminals:  # writing to them would fail, before the save
                os.dup2(null, terminal)


def _open_terminal(descriptor: int) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(_Terminal(descriptor, "w", closefd=False))
    return io.TextIOWrapper(buffer, errors="backslashreplace", line_buffering=True)


def end_with_parent(parent: int) -> None:
    """Have Linux send SIGTERM when `parent` dies for any reason; train.py then saves and ends."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)
