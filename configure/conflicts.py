"""Keys that are each valid alone but not together."""

from math import gcd

from configure.schema import Config, Optim, Train


def find_conflicts(config: Config, world_size: int = 1) -> list[str]:
    """Errors between keys that are each valid alone, one line each with its remedy, for `world_size` ranks."""
    model, train, optim = config.model, config.train, config.optim
    errors = []

    head_unit = model.n_head * (2 if model.pos == "rope" else 1)  # rope rotates pairs of channels
    if model.n_embd % head_unit:
        width = "even width, which rope needs" if model.pos == "rope" else "equal width"
        errors.append(
            f"model.n_embd = {model.n_embd} does not divide into model.n_head = {model.n_head} heads of "
            f"{width}; set --model.n_embd={-(-model.n_embd // head_unit) * head_unit}"
        )

    if model.n_kv_head and model.n_head % model.n_kv_head:
        fitting = [n for n in range(1, model.n_head + 1) if model.n_head % n == 0]
        nearest = min(fitting, key=lambda n: abs(n - model.n_kv_head))
        errors.append(
            f"model.n_head = {model.n_head} is not a multiple of model.n_kv_head = {model.n_kv_head}; "
            f"set --model.n_kv_head={nearest}"
        )

    if model.top_k > model.n_expert and model.router != "dense":
        errors.append(
            f"model.top_k = {model.top_k} is more than model.n_expert = {model.n_expert}; "
            f"set --model.top_k={model.n_expert} or --model.n_expert={model.top_k}"
        )

    if model.gate_norm and model.gate_scale != 1 and model.router != "dense":
        errors.append(
            f"model.gate_norm = {model.gate_norm} sets the factor on the gates that model.gate_scale = "
            f"{model.gate_scale} would set; set --model.gate_scale=1 or --model.gate_norm=0"
        )

    if model.gated and model.bias:
        errors.append(
            "model.gated = true: a gated MLP has no biases, but model.bias = true; set --model.bias=false or "
            "--model.gated=false"
        )

    if model.n_dense_layer >= model.n_layer and model.router != "dense":
        errors.append(
            f"model.n_dense_layer = {model.n_dense_layer} leaves no layer with experts of model.n_layer = "
            f"{model.n_layer}; set --model.n_dense_layer={model.n_layer - 1} or --model.router=dense"
        )

    group = train.micro_batch_size * world_size
    if train.batch_size % group:
        remedy = f"--train.batch_size={-(-train.batch_size // group) * group}"
        if train.batch_size % world_size == 0:
            remedy += f" or --train.micro_batch_size={gcd(train.batch_size // world_size, train.micro_batch_size)}"
        if train.batch_size % train.micro_batch_size == 0 and world_size > 1:
            most = train.batch_size // train.micro_batch_size
            fitting = ", ".join(str(n) for n in range(1, min(most, 4096) + 1) if most % n == 0)
            remedy += f", or start {fitting} ranks"
        errors.append(
            f"train.batch_size = {train.batch_size} is not a multiple of train.micro_batch_size = "
            f"{train.micro_batch_size} times {world_size} rank(s) = {group}; set {remedy}"
        )

    if optim.warmup_steps > train.max_steps:
        errors.append(
            f"optim.warmup_steps = {optim.warmup_steps} is more than train.max_steps = {train.max_steps}; "
            f"set --optim.warmup_steps={train.max_steps // 10}"
        )
    elif optim.schedule == "wsd" and optim.warmup_steps > (start := optim.decay_start(train.max_steps)):
        errors.append(
            f"optim.warmup_steps = {optim.warmup_steps} goes beyond step {start}, where the decay begins "
            f"(optim.decay_fraction = {optim.decay_fraction:g} of train.max_steps = {train.max_steps}); "
            f"set --optim.warmup_steps={start // 10}"
        )

    tasks, every = config.eval.task_interval, config.eval.interval
    if config.eval.task_names and tasks % every:
        errors.append(
            f"eval.task_interval = {tasks} is not a multiple of eval.interval = {every}, and tasks are scored at "
            f"evaluations; set --eval.task_interval={-(-tasks // every) * every}"
        )
    return errors + _find_branch_conflicts(train, optim)


def _find_branch_conflicts(train: Train, optim: Optim) -> list[str]:
    """Errors between train.branch_from, train.branch_step and the schedule."""
    step, steps, start = train.branch_step, train.max_steps, optim.decay_start(train.max_steps)
    if not train.branch_from:
        words = f"train.branch_step = {step} needs a trunk; name it (train.branch_from), or set --train.branch_step=0"
        return [words] if step else []
    if optim.schedule != "wsd":
        return [f"train.branch_from = {train.branch_from} needs a decay that may follow; set --optim.schedule=wsd"]
    if start in (0, steps) and step in (0, start):
        part = "all" if start == 0 else "nothing"
        return [
            f"optim.decay_fraction = {optim.decay_fraction:g} of train.max_steps = {steps}: a branch is the decay of a "
            f"run, which is {part} here; set --optim.decay_fraction=0.2"
        ]
    if step >= steps:
        return [
            f"train.branch_step = {step} is not before train.max_steps = {steps}, the end of the branch's decay; set "
            f"--train.max_steps={step + max(1, step // 4)}"
        ]
    if step != start:
        return [
            f"train.branch_step = {step}, but optim.decay_fraction = {optim.decay_fraction:g} of train.max_steps = "
            f"{steps} begins at step {start}; set --train.branch_step={start} or "
            f"--optim.decay_fraction={(steps - step) / steps}"
        ]
    return []
