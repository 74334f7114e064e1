"""Requests to stop: SIGTERM (a scheduler, torchrun), SIGUSR1 (Slurm, before a time limit), SIGINT (Ctrl-C)."""

import ctypes
import os
import signal
import sys
from types import FrameType
from typing import Self

EXIT_CODE = 75  # asked to stop, saved, to be started again: EX_TEMPFAIL of sysexits.h
PR_SET_PDEATHSIG = 1


class Stop:
    """`asked` becomes True when this process is asked to stop, which takes `listen`."""

    def __init__(self) -> None:
        """Nobody has asked."""
        self.asked = False

    def listen(self) -> Self:
        """From now on signals set `asked` instead of ending the process. A second Ctrl-C is a KeyboardInterrupt."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            launcher = os.getppid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # sent if torchrun is killed
            if os.getppid() != launcher:  # it already was
                self.asked = True
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
