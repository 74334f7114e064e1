"""What is due at a step: evaluation, a checkpoint, a line of metrics, the end."""

import time
from typing import NamedTuple

from runtime import distributed
from runtime.distributed import Ranks
from runtime.preflight import Plan
from runtime.signals import Stop


class Due(NamedTuple):
    """What to do once a number of steps are done, before the next; the same on all ranks."""

    evaluate: bool
    save: bool
    stop: bool  # some rank was asked to stop


class Cadence:
    """Decides what is due.

    Every rank asks at every step; they agree through their hosts, no device is waited for.
    """

    def __init__(self, plan: Plan, start: int, ranks: Ranks, stop: Stop) -> None:
        """`start`: step of the checkpoint that the run resumes from, or 0."""
        self.config, self.ranks, self.stop = plan.config, ranks, stop
        self.saved_step, self.saved_at = start, time.monotonic()
        evaluated = start > 0 and start in plan.val_losses
        # as rank 0 sees it
        self.evaluated_step = start if distributed.gather(evaluated, ranks.control)[0] else -1

    def at(self, step: int) -> Due:
        """What is due after `step` steps.

        A rank that is asked to stop makes all ranks save and stop.
        """
        train, last = self.config.train, step == self.config.train.max_steps
        minutes = (time.monotonic() - self.saved_at) / 60
        # by the clock of one rank
        late = self.ranks.rank == 0 and 0 < train.checkpoint_minutes <= minutes
        stop, late = distributed.any_rank([self.stop.asked, late], self.ranks)
        interval = (
            max(1, train.max_steps // 10)
            if train.checkpoint_interval < 0
            else train.checkpoint_interval
        )
        on_interval = (interval and step % interval == 0) or step in train.kept_steps
        evaluate = (step % self.config.eval.interval == 0 or last) and step != self.evaluated_step
        return Due(
            evaluate=evaluate and not stop,
            save=step > self.saved_step and bool(stop or late or last or on_interval),
            stop=stop,
        )

    def is_log_due(self, step: int) -> bool:
        """Whether step number `step` (from 1) ends an interval of metrics."""
        return step % self.config.log.interval == 0 or step == self.config.train.max_steps

    def note_save(self, step: int) -> None:
        """Note that a checkpoint of `step` is being written; the clock starts anew."""
        self.saved_step, self.saved_at = step, time.monotonic()
