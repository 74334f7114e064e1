"""Keys that are each valid alone but not together. Every error names a remedy; the overrides in it make it valid."""

from collections.abc import Iterator
from math import gcd

from configure.schema import Config, Model, Optim, Train


def find_conflicts(config: Config, world_size: int = 1) -> list[str]:
    """List the errors between keys, one line each, for a run on `world_size` ranks."""
    return [
        *_check_model(config.model),
        *_check_training(config, world_size),
        *_check_branch(config.train, config.optim),
    ]


def _check_model(model: Model) -> Iterator[str]:
    unit = 2 * model.n_head if model.pos == "rope" else model.n_head  # rope rotates pairs of channels
    if model.n_embd % unit:
        width = "even width, which rope needs" if model.pos == "rope" else "equal width"
        yield (
            f"model.n_embd = {model.n_embd} does not divide into model.n_head = {model.n_head} heads of {width}; "
            f"set --model.n_embd={_round_up(model.n_embd, unit)}"
        )
    if model.n_kv_head and model.n_head % model.n_kv_head:
        yield (
            f"model.n_head = {model.n_head} is not a multiple of model.n_kv_head = {model.n_kv_head}; "
            f"set --model.n_kv_head={gcd(model.n_head, model.n_kv_head)}"
        )
    if model.gated and model.bias:
        yield "model.gated = true has no biases; set --model.bias=false or --model.gated=false"

    if model.router == "dense":  # has no experts, so a sweep over routers may include it
        return
    if model.top_k > model.n_expert:
        yield (
            f"model.top_k = {model.top_k} is more than model.n_expert = {model.n_expert}; "
            f"set --model.top_k={model.n_expert} or --model.n_expert={model.top_k}"
        )
    if model.gate_norm and model.gate_scale != 1:
        yield (
            f"model.gate_norm = {model.gate_norm} sets the factor on the gates that model.gate_scale = "
            f"{model.gate_scale} would set; set --model.gate_scale=1 or --model.gate_norm=0"
        )
    if model.n_dense_layer >= model.n_layer:
        yield (
            f"model.n_dense_layer = {model.n_dense_layer} leaves no layer with experts of model.n_layer = "
            f"{model.n_layer}; set --model.n_dense_layer={model.n_layer - 1} or --model.router=dense"
        )


def _check_training(config: Config, world_size: int) -> Iterator[str]:
    train, optim = config.train, config.optim
    batch, micro_batch = train.batch_size, train.micro_batch_size
    group = micro_batch * world_size
    if batch % group:
        remedy = f"--train.batch_size={_round_up(batch, group)}"
        if batch % world_size == 0:
            remedy += f" or --train.micro_batch_size={gcd(batch // world_size, micro_batch)}"
        yield (
            f"train.batch_size = {batch} is not a multiple of train.micro_batch_size = {micro_batch} times "
            f"{world_size} rank(s) = {group}; set {remedy}"
        )
    steps, end = train.max_steps, "the run ends"
    if optim.schedule == "wsd":
        steps, end = optim.decay_start(steps), f"the decay begins (optim.decay_fraction = {optim.decay_fraction:g})"
    if optim.warmup_steps > steps:
        yield (
            f"optim.warmup_steps = {optim.warmup_steps} is more than the {steps} steps after which {end}; "
            f"set --optim.warmup_steps={steps // 10}"
        )
    tasks, interval = config.eval.task_interval, config.eval.interval
    if config.eval.task_names and tasks % interval:
        yield (
            f"eval.task_interval = {tasks} is not a multiple of eval.interval = {interval}, and tasks are scored at "
            f"evaluations; set --eval.task_interval={_round_up(tasks, interval)}"
        )


def _check_branch(train: Train, optim: Optim) -> Iterator[str]:
    """A branch is the decay of its run: branch_step must be the step where it begins, and both parts have steps."""
    step, steps, start = train.branch_step, train.max_steps, optim.decay_start(train.max_steps)
    if not train.branch_from:
        if step:
            yield f"train.branch_step = {step} needs a trunk; name it (train.branch_from), or set --train.branch_step=0"
    elif optim.schedule != "wsd":
        yield f"train.branch_from = {train.branch_from} needs a decay that may follow; set --optim.schedule=wsd"
    elif start in (0, steps):
        yield f"optim.decay_fraction = {optim.decay_fraction:g}: a branch decays a part; set --optim.decay_fraction=0.2"
    elif step != start:
        yield (
            f"train.branch_step = {step} is not step {start}, where the decay begins (optim.decay_fraction = "
            f"{optim.decay_fraction:g} of train.max_steps = {steps}); set --train.branch_step={start}"
        )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
