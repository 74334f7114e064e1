"""Decide what is due at a step: evaluation, a checkpoint, a line of metrics, the end."""

import time
from typing import NamedTuple

from configure import Config
from runtime import distributed
from runtime.checkpoint import Saver
from runtime.distributed import Ranks
from runtime.launch import Stop


class Due(NamedTuple):
    """Work that is due between two steps; the same on all ranks."""

    evaluate: bool
    save: bool
    stop: bool  # some rank was asked to stop


class Cadence:
    """Decides what is due.

    Every rank asks at every step. They agree through their hosts, without waiting for a device.
    """

    def __init__(
        self, config: Config, start: int, evaluated: bool, ranks: Ranks, stop: Stop, saver: Saver
    ) -> None:
        """Begin at step `start`.

        Args:
            config: the run's settings.
            start: step of the checkpoint that the run resumes from, or 0.
            evaluated: True if that step's validation loss is logged; rank 0's value counts.
            ranks: this rank and the others.
            stop: set when this process is asked to stop.
            saver: knows if a save is being written, and if it hangs.
        """
        self.config = config
        self.ranks = ranks
        self.stop = stop
        self.saver = saver
        self.saved_step = start
        self.saved_at = time.monotonic()
        evaluated = start > 0 and distributed.gather(evaluated, ranks.control)[0]
        self.evaluated_step = start if evaluated else -1

    def at(self, step: int) -> Due:
        """Decide what is due after `step` steps.

        If one rank is asked to stop, all ranks save and stop.
        """
        train = self.config.train
        is_last = step == train.max_steps
        is_late = self.ranks.rank == 0 and self._is_late(step)
        flags = [self.stop.asked, is_late, self.saver.hangs()]
        stop, is_late, hangs = distributed.any_rank(flags, self.ranks)
        self.saver.end_if(hangs)
        save = stop or is_late or is_last or self._is_on_interval(step)
        evaluate = is_last or step % self.config.eval.interval == 0
        return Due(
            evaluate=evaluate and step != self.evaluated_step and not stop,
            save=save and step > self.saved_step,
            stop=stop,
        )

    def _is_late(self, step: int) -> bool:
        """True if a checkpoint is due by the clock, which only rank 0 asks.

        With train.checkpoint_interval = -1 one is due at each tenth of the run, or as soon after it
        as the last one is complete.
        """
        train = self.config.train
        if 0 < train.checkpoint_minutes * 60 <= time.monotonic() - self.saved_at:
            return True
        tenth = max(1, train.max_steps // 10)
        is_new_tenth = step // tenth > self.saved_step // tenth
        return train.checkpoint_interval == -1 and is_new_tenth and not self.saver.is_writing()

    def _is_on_interval(self, step: int) -> bool:
        """True if train.checkpoint_interval or train.keep_steps asks for a checkpoint."""
        train = self.config.train
        interval = train.checkpoint_interval
        return step in train.kept_steps or (interval > 0 and step % interval == 0)

    def is_log_due(self, step: int) -> bool:
        """True if step number `step` (from 1) ends an interval of metrics."""
        return step % self.config.log.interval == 0 or step == self.config.train.max_steps

    def note_save(self, step: int) -> None:
        """Note that a checkpoint of `step` is being written, and restart the clock."""
        self.saved_step = step
        self.saved_at = time.monotonic()
