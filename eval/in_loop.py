"""Score tasks of lm-evaluation-harness while a run trains (eval.tasks), as eval.downstream does.

train.py imports this file only for a run that asks for tasks, and gives `TaskScores` to `train`.
"""

import io
import tempfile
from contextlib import redirect_stderr
from pathlib import Path

import torch

from configure import Config
from data.tokenizer import open_tokenizer
from eval.scoring import Interrupted, Scorer, scoring_dtype
from eval.tasks import check_tasks, load_tasks, score_task
from model import GPT
from runtime import RankError, RunError, distributed
from runtime.distributed import Ranks
from runtime.launch import Stop
from runtime.parallel import gather_model


class TaskScores:
    """Scores a run's model at each evaluation, on tasks loaded once with their documents."""

    def __init__(self, config: Config) -> None:
        """Load the tasks of eval.tasks.

        Raises RunError if the harness, a task or its documents are missing.
        """
        self.config = config
        self.tokenizer = open_tokenizer(config.data.folders[0])
        # Documents are mapped into memory from this folder; it is deleted when the run ends.
        self._scratch = tempfile.TemporaryDirectory()
        names = config.eval.task_names
        folder = Path(config.eval.tasks_dir) if config.eval.tasks_dir else None
        try:
            manager = check_tasks(names, folder)
            self.loaded = load_tasks(manager, names, folder, self._scratch.name)
        except ValueError as error:
            # one rank per node reports a RankError: other nodes may have the documents
            kind = RunError if distributed.local_rank() else RankError
            raise kind(f"eval.tasks: {error}") from error

    def __call__(
        self, model: GPT, step: int, ranks: Ranks, stop: Stop, sharded: bool = False
    ) -> dict[str, float] | None:
        """Score the model after `step` steps, if scores are due: see eval.task_interval.

        Every rank calls it, and documents are split across them. The model is left in training
        mode; random numbers are seeded. `sharded` weights are gathered whole on
        each rank: batches are unequal, so ranks cannot wait for each other. `stop` is asked between
        batches and tasks.

        Returns:
            {`tasks/NAME/acc`, `tasks/NAME/bits_per_byte`, …}; empty if no scores are due; None if
            any rank is asked to stop meanwhile.
        """
        interval = self.config.eval.task_interval or 1
        if step % interval and step != self.config.train.max_steps:
            return {}
        from eval.harness import Adapter

        scored_model = gather_model(model) if sharded else model
        dtype = scoring_dtype(self.config, ranks.device)
        scorer = Scorer(scored_model.eval(), dtype, ranks, is_stopped=lambda: stop.asked)
        adapter = Adapter(scorer, self.tokenizer)
        values = {}
        try:
            for name, loaded in self.loaded.items():
                # Blocks are compiled for the shape of training, so they run uncompiled here. The
                # harness' progress bars are hidden.
                with torch.compiler.set_stance("force_eager"), redirect_stderr(io.StringIO()):
                    results, _ = score_task(name, loaded, adapter)
                for task, metrics in results.items():
                    for key, value in metrics.items():
                        if "stderr" not in key and value is not None:
                            values[f"tasks/{task}/{key}"] = value
                if distributed.any_rank([stop.asked], ranks)[0]:
                    return None
        except Interrupted:  # raised on every rank
            return None
        finally:
            model.train()
        return values
