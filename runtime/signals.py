"""Being asked to stop: SIGTERM (a scheduler, torchrun), SIGUSR1 (Slurm, ahead of a time limit), SIGINT (Ctrl-C)."""

import ctypes
import os
import signal
import sys

EXIT_CODE = 75  # of a run that was asked to stop, saved, and goes on at its next start: EX_TEMPFAIL of sysexits.h
PR_SET_PDEATHSIG = 1


class Stop:
    """`asked` is False until this process is asked to stop. Without `listen` nobody can ask."""

    def __init__(self):
        self.asked = False

    def listen(self):
        """Note the signals from now on, instead of ending by them. A second Ctrl-C ends the process at once."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
            launcher = os.getppid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # if torchrun itself is killed
            if os.getppid() != launcher:
                self.asked = True
        return self

    def _note(self, number, frame):
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
