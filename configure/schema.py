"""Every key a config file may set: its type, range, default and meaning, and the checks that span several keys.

The defaults are the 125M-active model of *Understanding the Mixture-of-Experts with Nadaraya-Watson Kernel*. Where the
paper is silent (warm-up, last learning rate, weight decay, clipping) they follow the 125M file of its first author's
DAPE repository. A new key is one line here: `--help`, overrides and errors follow from it.
"""

from math import gcd
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from router import ROUTERS

FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"


class Section(BaseModel):
    """Strict (no int for a bool, no string for a number), frozen, no unknown keys, no nan or inf."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Run(Section):
    name: str = Field("", pattern=f"^({FILE_NAME})?$", description="folder of the run; empty: file, router, sweep")
    dir: str = Field("runs", min_length=1, description="folder that holds all runs")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of initialisation, dropout and data order")


class Model(Section):
    n_layer: int = Field(12, ge=1, le=2**10, description="transformer blocks")
    n_head: int = Field(12, ge=1, le=2**10, description="attention heads a block")
    n_embd: int = Field(768, ge=1, le=2**17, description="width of the residual stream")
    block_size: int = Field(512, ge=1, le=2**20, description="context length, tokens")
    vocab_size: int = Field(50304, ge=2, le=2**16, description="tokens known; GPT-2's 50257 padded to a multiple of 64")
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropping an activation")
    router: Literal[*ROUTERS] = Field(
        "kern", description="how tokens choose experts; dense: one MLP of hidden width top_k * expert_hidden instead"
    )
    n_expert: int = Field(64, ge=1, le=2**14, description="experts a block; ignored by dense")
    top_k: int = Field(8, ge=1, le=2**14, description="experts a token uses")
    expert_hidden: int = Field(384, ge=1, le=2**17, description="hidden width of one expert")
    gate_scale: float = Field(1.0, gt=0, description="constant factor on all gates, beside the router's own c")
    pos: Literal["learned", "rope"] = Field("learned", description="how positions enter: embedding table or rotary")
    tie_embeddings: bool = Field(True, description="output layer shares the token embedding's weights")
    bias: bool = Field(
        False, description="biases in LayerNorms, attention and dense MLP, as in GPT-2; experts have none"
    )
    init_std: float = Field(
        0.02, gt=0, description="std of initial weights, / sqrt(2 n_layer) onto the residual stream"
    )
    backend: Literal["auto", "reference", "torch", "triton"] = Field(
        "auto", description="implementation of experts and LM head"
    )


class Data(Section):
    name: str = Field("books3", pattern=f"^{FILE_NAME}$", description="prepared corpus, a folder of data.dir")
    dir: str = Field("data", min_length=1, description="folder that holds all prepared corpora")


class Train(Section):
    batch_size: int = Field(256, ge=1, le=2**24, description="sequences an optimizer step, over all ranks")
    micro_batch_size: int = Field(32, ge=1, le=2**24, description="sequences a rank puts through the model at once")
    max_steps: int = Field(50_000, ge=1, description="optimizer steps in all")
    init_from: str = Field(
        "",
        description="folder of the weights to begin with: a GPT-2 checkpoint of Hugging Face, an exported model or a "
        "run; empty: random ones",
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        "float16", description="autocast type; auto: bfloat16 where the hardware multiplies it fast, else float32"
    )
    device: Literal["auto", "cuda", "cpu"] = Field("auto", description="auto: cuda where there is one")
    compile: bool = Field(False, description="torch.compile every block")
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = Field(
        "auto",
        description="how ranks share the model; ddp: a copy each, fsdp: parts over all ranks, hsdp: parts over those "
        "of a node; auto: the first of ddp, hsdp, fsdp that fits",
    )
    activation_checkpointing: bool = Field(False, description="keep blocks' inputs alone, compute the rest again")
    timeout_minutes: float = Field(10.0, gt=0, le=7 * 24 * 60, description="longest wait of a rank for the others")
    balance_loss_coef: float = Field(0.0, ge=0, description="weight of the balance loss, mean over layers; 0: off")
    z_loss_coef: float = Field(0.0, ge=0, description="weight of the router z-loss, mean over layers; 0: off")
    bias_update_rate: float = Field(0.0, ge=0, description="step of the selection bias that balances loads; 0: off")
    loss_spike: Literal["off", "warn", "skip"] = Field(
        "off", description="what to do about a loss far above the last 128: nothing, say so, or skip the step too"
    )
    spike_sigma: float = Field(6.0, gt=0, description="how far: standard deviations above their mean")
    max_skipped_steps: int = Field(20, ge=1, description="skipped steps in a row that stop the run")
    checkpoint_interval: int = Field(5000, ge=0, description="steps between checkpoints; 0: no such")
    checkpoint_minutes: float = Field(30.0, ge=0, description="minutes between checkpoints; 0: no such")
    keep_checkpoints: int = Field(2, ge=1, description="latest checkpoints kept on disk")
    on_save_error: Literal["stop", "warn"] = Field(
        "stop", description="when a checkpoint cannot be written: stop, or say so and go on without"
    )
    deterministic: bool = Field(False, description="ask torch for operations that give the same bits each time")


class Optim(Section):
    lr: float = Field(6e-4, gt=0, description="peak learning rate of AdamW")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="last learning rate of the cosine, as a part of lr")
    warmup_steps: int = Field(500, ge=0, description="steps of linear warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the gradient's running mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="decay of the squared gradient's running mean")
    eps: float = Field(1e-8, gt=0, description="added to AdamW's denominator")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, matrices only")
    grad_clip: float = Field(1.0, ge=0, description="largest global gradient norm; 0: off")


class Eval(Section):
    interval: int = Field(1000, ge=1, description="steps between evaluations")
    windows: int = Field(2048, ge=1, description="validation windows of block_size tokens, the same every time")


class Log(Section):
    interval: int = Field(10, ge=1, description="steps between lines of metrics")
    wandb: Literal["online", "offline", "disabled"] = Field("disabled", description="Weights & Biases mode")
    project: str = Field("nanokern", min_length=1, description="Weights & Biases project")
    group: str = Field("", description="Weights & Biases group; empty: the config file's name")


class Config(Section):
    """All settings of one run. Built by `configure.load`, which also runs `check`."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    eval: Eval = Eval()
    log: Log = Log()


SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in Config.model_fields.items()}
# Dotted key -> its JSON schema (type, bounds, choices, default, description).
KEYS: dict[str, dict] = {
    f"{section}.{name}": schema
    for section, model in SECTIONS.items()
    for name, schema in model.model_json_schema()["properties"].items()
}


def check(config: Config, world_size: int = 1) -> list[str]:
    """What is wrong between keys that are each valid alone, one line a fault with its remedy; empty if all is well."""
    model, train, optim = config.model, config.train, config.optim
    dense = ROUTERS[model.router] is None
    faults = []

    head_unit = model.n_head * (2 if model.pos == "rope" else 1)  # rope turns pairs of channels
    if model.n_embd % head_unit:
        width = "even width, which rope needs" if model.pos == "rope" else "equal width"
        faults.append(
            f"model.n_embd = {model.n_embd} does not divide into model.n_head = {model.n_head} heads of "
            f"{width}; set --model.n_embd={-(-model.n_embd // head_unit) * head_unit}"
        )

    if model.top_k > model.n_expert and not dense:
        faults.append(
            f"model.top_k = {model.top_k} is more than model.n_expert = {model.n_expert}; "
            f"set --model.top_k={model.n_expert} or --model.n_expert={model.top_k}"
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
        faults.append(
            f"train.batch_size = {train.batch_size} is not a multiple of train.micro_batch_size = "
            f"{train.micro_batch_size} times {world_size} rank(s) = {group}; set {remedy}"
        )

    if optim.warmup_steps > train.max_steps:
        faults.append(
            f"optim.warmup_steps = {optim.warmup_steps} is more than train.max_steps = {train.max_steps}; "
            f"set --optim.warmup_steps={train.max_steps // 10}"
        )

    return faults
