"""Scores on tasks of lm-evaluation-harness while a run trains (eval.tasks), by the code of eval.downstream.

This is the one place where training uses the package eval: it is imported only for a run that asks for tasks.
"""

import io
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import torch

from configure import Config
from data.bins import open_tokenizer
from data.tokenizer import Tokenizer
from model import GPT
from runtime import RankError, RunError, distributed
from runtime.distributed import Ranks
from runtime.parallel import gather_model
from runtime.signals import Stop


class TaskScores:
    """The tasks of a run, loaded with their documents."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        """Check and load the tasks. Raises ValueError: the harness, a task or its documents are missing."""
        from eval import tasks

        self.config, self.tokenizer, names = config, tokenizer, config.eval.task_names
        folder = Path(config.eval.tasks_dir) if config.eval.tasks_dir else None
        options = tasks.Options("task", "eval.tasks_dir")
        manager = tasks.build_task_manager(names)
        tasks.check_tasks(manager, names, folder, options)
        self._scratch = tempfile.TemporaryDirectory()  # holds documents that are mapped into memory; gone with the run
        specs = {name: tasks.write_task_spec(manager, name, folder, self._scratch.name) for name in names}
        self.loaded = tasks.load_tasks(manager, specs, folder, options)

    def is_due(self, step: int) -> bool:
        """Whether the evaluation at `step` scores tasks; the last one does."""
        every = self.config.eval.task_interval
        return not every or step % every == 0 or step == self.config.train.max_steps

    def measure(self, model: GPT, ranks: Ranks, stop: Stop, sharded: bool) -> dict[str, float] | None:
        """Score the model. Every rank calls it; random numbers of training stay as they are.

        Args:
            model: on its device. It is left in training mode.
            ranks: this rank; documents are split across all.
            stop: whether this rank is asked to stop; looked at between batches and tasks.
            sharded: whether ranks hold parts of its weights. Each gathers the full weights then, as generation with a
                cache and unequal batches cannot wait for the other ranks.

        Returns:
            {`tasks/NAME/acc`, `tasks/NAME/bits_per_byte`, …}, or None if any rank is asked to stop meanwhile.
        """
        from eval import tasks
        from eval.harness import Adapter
        from eval.scoring import Interrupted, Scorer

        scored = gather_model(model) if sharded else model
        dtype = tasks.scoring_dtype(self.config, ranks.device)
        scored.eval()
        scorer = Scorer(scored, dtype, ranks, is_stopped=lambda: stop.asked)
        adapter, values, interrupted = Adapter(scorer, self.tokenizer), {}, False
        for name, loaded in self.loaded.items():
            # Blocks stay as they are compiled, for the shape of training; the harness' progress bars are hidden.
            try:
                with torch.compiler.set_stance("force_eager"), redirect_stderr(io.StringIO()):
                    found = tasks.score_task(name, loaded, adapter, limit=self.config.eval.task_limit or None)
            except Interrupted:  # on every rank alike
                interrupted = True
                break
            for task, metrics in found.items():
                shown = {key: value for key, value in metrics.items() if "stderr" not in key and value is not None}
                values |= {f"tasks/{task}/{key}": value for key, value in shown.items()}
            interrupted = distributed.any_rank([stop.asked], ranks)[0]
            if interrupted:
                break
        model.train()
        return None if interrupted else values


def open_tasks(config: Config) -> TaskScores | None:
    """The tasks of eval.tasks, for the tokenizer of the run's data; None if there are none.

    Raises:
        RunError: lm-evaluation-harness, a task or its documents are missing.
    """
    if not config.eval.task_names:
        return None
    try:
        return TaskScores(config, open_tokenizer(config.data.folders[0]))
    except ValueError as error:
        # One rank per node reports a RankError: other nodes may have the documents.
        raise (RunError if distributed.local_rank() else RankError)(f"eval.tasks: {error}") from error
