"""Check all that can be wrong with a run, before a process group, GPU or file is touched."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from configure import Config
from configure.schema import replace
from data.bins import open_tokens
from data.loader import Loader, Validation, check_documents, check_sets, choose_validation, identify
from kernels import choose_backend
from router import find_spec
from runtime import RunError, distributed
from runtime.folder import Branch, RunFolder, check_length, find_branch, path_of
from runtime.kernel_check import check_kernels
from runtime.memory import Memory, plan_memory

ScoreTasks = Callable[..., dict[str, float] | None]  # eval.in_loop.TaskScores
InitialWeights = Any  # hf.init_from.Weights, which imports from here


class Data(NamedTuple):
    """The data sets of a run."""

    loader: Loader  # windows to train on
    validation: Validation  # windows to validate on
    identity: dict[str, str]  # sha256 of data and tokenizer; a checkpoint must have the same
    document_token: int | None  # id that starts a document, with data.document_mask


@dataclass(frozen=True)
class Plan:
    """All that is known of a run before it starts. Nothing has been written anywhere.

    Attributes:
        config: the settings, with what a resume keeps and with train.dtype resolved.
        run: the folder of the run.
        changes: lines `key: old -> new` against the run that is resumed; all are allowed.
        last_step: step of the newest checkpoint; 0 if there is none.
        branch: the trunk and the step of train.branch_from; None once there is a checkpoint.
        data: the windows of the data sets.
        device: where this rank computes.
        dtype: the type that autocast computes in.
        memory: estimated bytes on each rank.
        accumulation: micro-batches of one rank in a step.
        tasks: scores the model on eval.tasks; None without such tasks.
        initial_weights: weights of train.init_from; None once there is a checkpoint.
        evaluated_steps: steps whose validation loss is in metrics.jsonl.
    """

    config: Config
    run: RunFolder
    changes: list[str]
    last_step: int
    branch: Branch | None
    data: Data
    device: torch.device
    dtype: torch.dtype
    memory: Memory
    accumulation: int
    tasks: ScoreTasks | None
    initial_weights: InitialWeights | None
    evaluated_steps: set[int]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step over all ranks."""
        return self.config.train.batch_size * self.config.model.block_size


def plan_run(
    config: Config,
    open_tasks: Callable[[Config], ScoreTasks],
    read_weights: Callable[[Config], InitialWeights],
) -> Plan:
    """Read, check and plan, without changing anything on disk or on a device.

    Args:
        config: the run's settings.
        open_tasks: opens the scorer of eval.tasks; called if there are any.
        read_weights: reads the weights of train.init_from; called if the run starts from them.

    Raises:
        RunError: the run's folder, device, ranks, initial weights, tasks or packages do not fit its
            settings.
        DataError: a data set is missing, damaged, too small, or does not fit model.vocab_size or
            its mixture.
    """
    check_router(config)
    run = RunFolder(path_of(config))
    config = run.keep_recorded(config)
    changes = run.find_changes(config)
    last_step = run.last_step
    check_length(run, config)
    branch = find_branch(config) if last_step == 0 else None

    data = open_data(config)
    device = distributed.pick_device(config.train.device)
    dtype_name = config.train.dtype
    if branch and dtype_name == "auto":
        dtype_name = branch.trunk.config.train.dtype
    dtype = distributed.pick_dtype(dtype_name, device, config.model.router)
    check_backend(config, device, dtype)
    config = replace(config, "train", dtype=str(dtype).removeprefix("torch."))  # a resume keeps it
    memory = plan_memory(config, device)
    tasks = open_tasks(config) if config.eval.task_names else None
    initial_weights = None
    if config.train.init_from and last_step == 0 and branch is None:
        initial_weights = read_weights(config)

    logged_run = branch.trunk if branch else run
    return Plan(
        config=config,
        run=run,
        changes=changes,
        last_step=last_step,
        branch=branch,
        data=data,
        device=device,
        dtype=dtype,
        memory=memory,
        accumulation=config.train.batch_size
        // (config.train.micro_batch_size * distributed.world_size()),
        tasks=tasks,
        initial_weights=initial_weights,
        evaluated_steps=set(logged_run.val_losses),
    )


def check_plan(plan: Plan) -> None:
    """Check, in a claimed folder, that nobody has trained the run since it was planned.

    Raises RunError if its config or its newest checkpoint is another.
    """
    now = RunFolder(plan.run.path)
    if now.last_step != plan.last_step or now.recorded != plan.run.recorded:
        raise RunError(
            f"{plan.run}: another process changed this run, then at step {plan.last_step} and now "
            f"at step {now.last_step}, while this one was starting. Start the same command again: "
            "it resumes the run as it is now"
        )


def check_router(config: Config) -> None:
    """Raise RunError for an unknown router; warn of one that cannot learn."""
    try:
        spec = find_spec(config.model.router)
    except ValueError as error:
        raise RunError(f"model.router: {error}") from None
    if spec is not None and not spec.has_gradient(config.model.top_k):
        distributed.print_once(
            f"warning: model.top_k = 1 with model.router = {config.model.router}: a norm over the "
            "one chosen expert makes all gates constant, so the loss gives the router no gradient; "
            "set --model.top_k=2, or choose a router without a norm over topk "
            "(--model.router=softmax)"
        )


def check_backend(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Raise RunError if model.backend cannot compute here, or if its kernels do so wrongly.

    "auto" takes torch's operators in both cases.
    """
    backend = config.model.backend
    try:
        if choose_backend(backend, device, dtype) == "triton" and device.type == "cuda":
            n_token = config.train.micro_batch_size * config.model.block_size
            check_kernels(config.model, n_token, device, dtype)
            choose_backend(backend, device, dtype)
    except ValueError as error:
        raise RunError(f"model.backend: {error}") from None


def open_data(config: Config) -> Data:
    """Check and open the data sets. Raises DataError if they do not fit the model or each other."""
    folders = config.data.folders
    metas = check_sets(folders, config.model.vocab_size)
    document_token = None
    if config.data.document_mask:
        check_documents(folders, metas)
        document_token = metas[0].tokenizer["eot"]
    weights = list(config.data.sets.values())
    block_size = config.model.block_size
    train_tokens = [open_tokens(folder, "train") for folder in folders]
    val_tokens = [open_tokens(folder, "val") for folder in folders]
    loader = Loader(train_tokens, block_size, config.train.batch_size, config.run.seed, weights)
    validation = choose_validation(val_tokens, block_size, config.eval.windows, weights)
    return Data(loader, validation, identify(metas, weights), document_token)
