"""Scores on tasks of lm-evaluation-harness while a run trains (eval.tasks), by the code of eval.downstream.

train.py imports this file only for a run that asks for tasks, and gives `TaskScores` to `train`.
"""

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from configure import Config
from data.bins import open_tokenizer
from eval import tasks
from eval.scoring import Interrupted, Scorer, scoring_dtype
from model import GPT
from runtime import RankError, RunError, distributed
from runtime.distributed import Ranks
from runtime.parallel import gather_model
from runtime.signals import Stop


@contextmanager
def name_key() -> Iterator[None]:
    """Name the key in errors within it.

    One rank per node reports a RankError: other nodes may have the documents.
    """
    try:
        yield
    except ValueError as error:
        raise (RunError if distributed.local_rank() else RankError)(
            f"eval.tasks: {error}"
        ) from error


def check_tasks(config: Config) -> tuple[Any, list[str], Path | None]:
    """The harness' TaskManager, the tasks of a run, and the folder of their files.

    Loads no documents.

    Raises RunError if the harness, a task or its file is missing.
    """
    names, folder = (
        config.eval.task_names,
        Path(config.eval.tasks_dir) if config.eval.tasks_dir else None,
    )
    with name_key():
        return tasks.check_tasks(names, folder), names, folder


class TaskScores:
    """The tasks of a run, loaded with their documents. Called at each evaluation."""

    def __init__(self, config: Config) -> None:
        """Load the tasks of eval.tasks.

        Raises RunError: the harness, a task or its documents are missing.
        """
        self.config, self.tokenizer = config, open_tokenizer(config.data.folders[0])
        # holds documents that are mapped into memory; gone with the run
        self._scratch = tempfile.TemporaryDirectory()
        checked = check_tasks(config)
        with name_key():
            self.loaded = tasks.load_tasks(*checked, self._scratch.name)

    def __call__(
        self, model: GPT, step: int, ranks: Ranks, stop: Stop, sharded: bool = False
    ) -> dict[str, float] | None:
        """Score the model after `step` steps, if eval.task_interval divides them or they are the last.

        Every rank calls it, and documents are split across them. The model is left in training
        mode, and random numbers of training stay as they are. Where weights are `sharded`, each
        rank gathers them all: with unequal batches it cannot wait for the others. `stop` is looked
        at between batches and tasks.

        Returns:
            {`tasks/NAME/acc`, `tasks/NAME/bits_per_byte`, …}, or None if any rank is asked to stop
            meanwhile.
        """
        if step % (self.config.eval.task_interval or 1) and step != self.config.train.max_steps:
            return {}
        from eval.harness import Adapter

        scored = gather_model(model) if sharded else model
        dtype, values = scoring_dtype(self.config, ranks.device), {}
        adapter = Adapter(
            Scorer(scored.eval(), dtype, ranks, is_stopped=lambda: stop.asked), self.tokenizer
        )
        try:
            for name, loaded in self.loaded.items():
                # Blocks stay as they are compiled, for the shape of training; the harness' progress
                # bars are hidden.
                with torch.compiler.set_stance("force_eager"), redirect_stderr(io.StringIO()):
                    results = tasks.score_task(
                        name, loaded, adapter, limit=self.config.eval.task_limit or None
                    )
                for task, metrics in results.items():
                    shown = {
                        key: value
                        for key, value in metrics.items()
                        if "stderr" not in key and value is not None
                    }
                    values |= {f"tasks/{task}/{key}": value for key, value in shown.items()}
                if distributed.any_rank([stop.asked], ranks)[0]:
                    return None
        except Interrupted:  # on every rank alike
            return None
        finally:
            model.train()
        return values
