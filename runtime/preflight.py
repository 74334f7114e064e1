"""Everything that can be wrong with a run, checked before a process group, a GPU or a file is touched."""

import math
from collections.abc import Callable
from importlib.util import find_spec as find_package
from typing import TYPE_CHECKING, NamedTuple

import torch

import configure
from configure import Config
from data.bins import open_tokens
from data.loader import Loader, Validation, choose_validation
from data.mixture import check_documents, check_sets, identify
from model import parameter_shapes
from router import find_spec
from runtime import RunError, distributed, memory
from runtime.branch import Branch, check_length, find_branch
from runtime.folder import RunFolder, path_of, replace

ScoreTasks = Callable[..., dict[str, float] | None]  # eval.in_loop.TaskScores
OpenTasks = Callable[[Config], ScoreTasks]  # eval.in_loop.open_tasks

if TYPE_CHECKING:
    from hf.init_from import Weights


class Plan(NamedTuple):
    """What `preflight` found out about a run. Nothing of it has been written anywhere."""

    config: Config  # its train.dtype is never "auto"
    run: RunFolder  # runs/<name>
    changes: list[str]  # `key: old -> new` against the run that is resumed, all of them allowed
    last_step: int  # of the newest checkpoint; 0 if there is none
    val_losses: dict[int, float]  # {step: nats per token} in metrics.jsonl
    identity: dict[str, str]  # sha256 of the data and of their tokenizer; a checkpoint must have the same
    loader: Loader  # training batches
    validation: Validation  # the windows of every evaluation
    device: torch.device
    dtype: torch.dtype  # autocast computes in it
    parallel: str  # "ddp", "zero2", "fsdp" or "hsdp"
    memory: memory.Memory  # estimated bytes on each rank
    initial_weights: "Weights | None"  # train.init_from; None once there is a checkpoint
    branch: Branch | None  # train.branch_from; None once there is a checkpoint
    tasks: ScoreTasks | None  # eval.tasks
    document_token: int | None  # that begins a document, with data.document_mask

    @property
    def accumulation(self) -> int:
        """Micro-batches that each rank takes in one step."""
        train = self.config.train
        return train.batch_size // (train.micro_batch_size * distributed.world_size())

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of every tensor between steps."""
        return self.parallel != "ddp"

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of one optimizer step, over all ranks."""
        return self.config.train.batch_size * self.config.model.block_size

    @property
    def autocast(self) -> torch.autocast:
        """A new autocast context in `dtype`; disabled for float32."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def check_identity(self, step: int, metadata: dict) -> None:
        """Raises RunError if the checkpoint of `step`, with this `metadata`, is of other data than `identity`."""
        for what, now in self.identity.items():
            if (then := metadata.get(what, "unknown")) != now:
                raise RunError(
                    f"{self.run}: the {what} has changed since step {step}: sha256 {then} then, {now} now. Restore "
                    f"what the run started with (data.name, data.mix, data.dir), or start over in a new folder "
                    f"(--fresh)"
                )


def check_settings(config: Config) -> None:
    """Raise RunError for settings that need what is not installed, or another formula of the router."""
    if config.log.tensorboard and find_package("tensorboard") is None:
        raise RunError("log.tensorboard = true: tensorboard is not installed: pip install tensorboard")
    try:
        spec = find_spec(config.model.router)
    except ValueError as error:
        raise RunError(f"model.router: {error}") from None
    if config.train.bias_update == "quantile" and spec is not None and spec.reach == math.inf:
        raise RunError(
            f"train.bias_update = quantile needs bounds on what experts are chosen by, and scores of model.router = "
            f"{config.model.router} have none; set --train.bias_update=sign --train.bias_update_rate=0.001, or take "
            f"exp, sigmoid, tanh or a norm over all experts, as in --model.router=sigmoid-renorm"
        )


def keep_recorded(run: RunFolder, config: Config) -> Config:
    """`RunFolder.keep_recorded`, with a line for each default that is another one since the run began."""
    kept = run.keep_recorded(config)
    for line in configure.differences(config, kept):
        if "before" in configure.KEYS[line.split(":")[0]]:
            distributed.print_once(f"{run}: {line}, as this run began; --fresh begins another run")
    return kept


def preflight(config: Config, open_tasks: OpenTasks | None = None) -> Plan:
    """Read, check and plan a run, without changing anything on disk or on a device. eval.tasks needs `open_tasks`.

    Raises:
        RunError: the run's folder, device, ranks, other weights, tasks or packages do not fit its settings.
        DataError: a data set is missing, damaged, too small, or does not fit model.vocab_size or its mixture.
    """
    check_settings(config)
    run = RunFolder(path_of(config))
    config = keep_recorded(run, config)
    changes, last_step = run.find_changes(config), run.last_step
    check_length(run, config)
    branch = None if last_step else find_branch(config)

    folders, weights, block_size = config.data.folders, [*config.data.sets.values()], config.model.block_size
    metas = check_sets(folders, config.model.vocab_size)
    if config.data.document_mask:
        check_documents(folders, metas)
    train_tokens, val_tokens = ([open_tokens(folder, split) for folder in folders] for split in ("train", "val"))
    loader = Loader(train_tokens, block_size, config.train.batch_size, config.run.seed, weights)
    validation = choose_validation(val_tokens, block_size, config.eval.windows, config.eval.spread, weights)

    device = distributed.pick_device(config.train.device)
    name = branch.dtype if branch and config.train.dtype == "auto" else config.train.dtype
    dtype = distributed.pick_dtype(name, device, config.model.router)
    config = replace(config, "train", dtype=str(dtype).removeprefix("torch."))  # recorded: a resume keeps it
    parallel, needed = memory.choose_parallelism(
        config, parameter_shapes(config.model), dtype, distributed.world_size(), distributed.local_size(), device
    )
    tasks = initial_weights = None
    if config.eval.task_names:
        assert open_tasks, "train(…, open_tasks=eval.in_loop.open_tasks) is needed with eval.tasks"
        tasks = open_tasks(config)
    if config.train.init_from and not (last_step or branch):
        from hf.init_from import read_initial_weights  # the only use of the package hf here

        initial_weights = read_initial_weights(config)
    return Plan(
        config=config,
        run=run,
        changes=changes,
        last_step=last_step,
        val_losses=(branch.trunk if branch else run).read_val_losses(),
        identity=identify(metas, weights),
        loader=loader,
        validation=validation,
        device=device,
        dtype=dtype,
        parallel=parallel,
        memory=needed,
        initial_weights=initial_weights,
        branch=branch,
        tasks=tasks,
        document_token=metas[0].tokenizer["eot"] if config.data.document_mask else None,
    )
