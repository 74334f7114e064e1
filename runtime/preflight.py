"""Everything that can be wrong with a run, checked before a process group, a GPU or a file is touched."""

from collections.abc import Callable
from importlib.util import find_spec as find_package
from typing import TYPE_CHECKING

import torch

import configure
from configure import Config
from data.bins import open_tokens
from data.loader import Loader, choose_validation
from data.mixture import check_documents, check_sets, identify
from model import parameter_shapes
from router import find_spec
from runtime import RunError, distributed, memory
from runtime.branch import check_length, find_branch
from runtime.folder import RunFolder, path_of, replace

ScoreTasks = Callable[..., dict[str, float] | None]  # eval.in_loop.TaskScores
OpenTasks = Callable[[Config], ScoreTasks]  # its constructor

if TYPE_CHECKING:
    from hf.init_from import Weights


def check_settings(config: Config) -> None:
    """Raise RunError for settings that need a package or another formula of the router.

    Prints a warning if the router cannot learn.
    """
    if config.log.tensorboard and find_package("tensorboard") is None:
        raise RunError(
            "log.tensorboard = true: tensorboard is not installed: pip install tensorboard"
        )
    try:
        spec = find_spec(config.model.router)
    except ValueError as error:
        raise RunError(f"model.router: {error}") from None
    if spec is not None and not spec.has_gradient(config.model.top_k):
        distributed.print_once(
            f"warning: model.top_k = 1 with model.router = {config.model.router}: a norm over the one "
            "chosen expert makes all gates constant, so the loss gives the router no gradient; "
            "set --model.top_k=2, or choose a router without a norm over topk (--model.router=softmax)"
        )


class Plan:
    """What can be known of a run before it begins. Nothing of it has been written anywhere."""

    def __init__(self, config: Config, open_tasks: OpenTasks | None = None) -> None:
        """Read, check and plan, without changing anything on disk or on a device. eval.tasks needs `open_tasks`.

        Raises:
            RunError: the run's folder, device, ranks, other weights, tasks or packages do not fit
                its settings.
            DataError: a data set is missing, damaged, too small, or does not fit model.vocab_size
                or its mixture.
        """
        check_settings(config)
        self.run = RunFolder(path_of(config))
        kept = self.run.keep_recorded(config)
        for line in configure.differences(config, kept):
            # a default that is another one since the run began
            if "before" in configure.KEYS[line.split(":")[0]]:
                distributed.print_once(
                    f"{self.run}: {line}, as this run began; --fresh begins another run"
                )
        config = kept
        # `key: old -> new` against the run that is resumed, all allowed
        self.changes = self.run.find_changes(config)
        self.last_step = self.run.last_step  # of the newest checkpoint; 0 if there is none
        check_length(self.run, config)
        # train.branch_from; None once there is a checkpoint
        self.branch = None if self.last_step else find_branch(config)

        folders, weights, block_size = (
            config.data.folders,
            [*config.data.sets.values()],
            config.model.block_size,
        )
        metas = check_sets(folders, config.model.vocab_size)
        if config.data.document_mask:
            check_documents(folders, metas)
        train_tokens, val_tokens = (
            [open_tokens(folder, split) for folder in folders] for split in ("train", "val")
        )
        self.loader = Loader(
            train_tokens, block_size, config.train.batch_size, config.run.seed, weights
        )
        self.validation = choose_validation(
            val_tokens, block_size, config.eval.windows, config.eval.spread, weights
        )
        # sha256 of data and tokenizer; a checkpoint must have the same
        self.identity = identify(metas, weights)
        # The id that begins a document, with data.document_mask
        self.document_token = metas[0].tokenizer["eot"] if config.data.document_mask else None

        self.device = distributed.pick_device(config.train.device)
        name = (
            self.branch.dtype
            if self.branch and config.train.dtype == "auto"
            else config.train.dtype
        )
        # autocast computes in it
        self.dtype = distributed.pick_dtype(name, self.device, config.model.router)
        # a resume keeps it
        self.config = replace(config, "train", dtype=str(self.dtype).removeprefix("torch."))
        sizes, shapes = (
            (distributed.world_size(), distributed.local_size()),
            parameter_shapes(config.model),
        )
        # "ddp", "zero2", "fsdp" or "hsdp", and estimated bytes on each rank
        self.parallel, self.memory = memory.choose_parallelism(
            self.config, shapes, *sizes, self.device
        )
        # each rank holds a part of every tensor between steps
        self.sharded = self.parallel != "ddp"
        train = config.train
        # micro-batches of a rank's step
        self.accumulation = train.batch_size // (train.micro_batch_size * sizes[0])
        self.tokens_per_step = train.batch_size * block_size  # over all ranks
        self.tasks: ScoreTasks | None = None  # eval.tasks
        if config.eval.task_names:
            assert open_tasks, (
                "train(…, open_tasks=eval.in_loop.TaskScores) is needed with eval.tasks"
            )
            self.tasks = open_tasks(self.config)
        # train.init_from; None once there is a checkpoint
        self.initial_weights: Weights | None = None
        if config.train.init_from and not (self.last_step or self.branch):
            from hf.init_from import read_initial_weights  # the only use of the package hf here

            self.initial_weights = read_initial_weights(self.config)
        # {step: nats per token} in metrics.jsonl
        self.val_losses = (self.branch.trunk if self.branch else self.run).read_val_losses()

    @property
    def autocast(self) -> torch.autocast:
        """A new autocast context in `dtype`; disabled for float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    @property
    def shares_casts(self) -> bool:
        """Whether a step's passes share one cast of all experts' weights, which checkpointing keeps of a block only."""
        return not self.sharded and not self.config.train.activation_checkpointing

    def check_identity(self, step: int, metadata: dict) -> None:
        """Raises RunError if the checkpoint of `step`, with this `metadata`, is of other data than `identity`."""
        for what, now in self.identity.items():
            if (then := metadata.get(what, "unknown")) != now:
                raise RunError(
                    f"{self.run}: the {what} has changed since step {step}: sha256 {then} then, {now} now. Restore "
                    f"what the run started with (data.name, data.mix, data.dir), or start over in a new folder "
                    f"(--fresh)"
                )
