"""Every key a config file may set: its type, range, default and meaning; check.py checks several together.

The defaults are the 125M-active model of *Understanding the Mixture-of-Experts with Nadaraya-Watson
Kernel*. Where the paper is silent (warm-up, final learning rate, weight decay, clipping) they
follow the 125M file of its first author's DAPE repository. To add a key, add one line here:
`--help`, overrides and errors follow from it.

This package imports no torch, so that a typo in a config file is reported within a second.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
ROUTER_FILE = Path(__file__).parents[1] / "router.py"


@cache
def read_router_names(file: Path = ROUTER_FILE) -> list[str]:
    """The keys of the dict literal ROUTERS, a line each, read from the source: importing router.py imports torch."""
    routers = file.read_text(encoding="utf-8").partition("\nROUTERS: ")[2].partition("\n}")[0]
    return re.findall(r'^    "(.+?)":', routers, re.MULTILINE)


class Section(BaseModel):
    """Strict (no int for a bool, no string for a number), frozen, no unknown keys, no NaN or Inf, printable text."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _refuse_control_characters(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.isprintable():
            raise ValueError("expected printable text")
        return value


class Run(Section):
    """Where a run writes, and its seed."""

    name: str = Field(
        "", pattern=f"^({FILE_NAME})?$", description="folder of the run; empty: file, router, sweep"
    )
    dir: str = Field("runs", min_length=1, description="folder that holds all runs")
    seed: int = Field(
        0, ge=0, lt=2**32, description="seed of initialisation, dropout and data order"
    )


class Model(Section):
    """The architecture; model.py reads it."""

    n_layer: int = Field(12, ge=1, le=2**10, description="transformer blocks")
    n_head: int = Field(12, ge=1, le=2**10, description="attention heads per block")
    n_kv_head: int = Field(
        0, ge=0, le=2**10, description="heads of keys and values, shared by query heads; 0: n_head"
    )
    qk_norm: Literal["off", "head", "all"] = Field(
        "off", description="norm of queries and keys: per head or over all"
    )
    n_embd: int = Field(768, ge=1, le=2**17, description="width of the residual stream")
    block_size: int = Field(512, ge=1, le=2**20, description="context length in tokens")
    vocab_size: int = Field(
        50304, ge=2, le=2**16, description="vocabulary; GPT-2's 50257 padded to a multiple of 64"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="probability of dropping an activation")
    router: str = Field(
        "kern",
        description="how tokens choose experts; dense: one MLP as wide as all experts that a token takes; "
        'a formula such as "tanh, post=l2 over topk, gamma, c=2" is a router, too',
        json_schema_extra={"enum": [*read_router_names()]},
    )
    n_expert: int = Field(64, ge=1, le=2**14, description="experts per block; ignored by dense")
    top_k: int = Field(8, ge=1, le=2**14, description="experts per token")
    expert_hidden: int = Field(384, ge=1, le=2**17, description="hidden width of one expert")
    activation: Literal["gelu", "silu"] = Field(
        "gelu", description="activation of MLPs and experts; gelu is exact"
    )
    gated: bool = Field(
        False, description="MLPs and experts compute activation(x W_gate) * (x W_up), as in SwiGLU"
    )
    n_shared_expert: int = Field(
        0, ge=0, le=2**10, description="experts that every token takes, computed as one MLP"
    )
    n_dense_layer: int = Field(
        0, ge=0, le=2**10, description="first blocks that have the MLP of dense, no experts"
    )
    n_hash_layer: int = Field(
        0,
        ge=0,
        le=2**10,
        description="first blocks whose experts the token's id chooses; nothing balances their loads",
    )
    gate_scale: float = Field(
        1.0, gt=0, le=2**16, description="constant factor on all gates, times the router's own c"
    )
    gate_norm: float = Field(
        0.0, ge=0, le=2**16, description="initial size of a token's gates; 0: the router's own"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field(
        "layernorm", description="rmsnorm: without mean and bias"
    )
    norm_eps: float = Field(1e-5, gt=0, description="added to the variance in each norm")
    pos: Literal["learned", "rope"] = Field(
        "learned", description="position embeddings: a learned table or rotary"
    )
    rope_base: float = Field(
        1e4, ge=1, description="base of rotary angles: pair i turns by base^(-2i / head width)"
    )
    tie_embeddings: bool = Field(
        True, description="the LM head shares the token embedding's weights"
    )
    bias: bool = Field(
        False, description="biases as in GPT-2: LayerNorms, attention, dense MLP; experts have none"
    )
    init_std: float = Field(
        0.02, gt=0, description="std of initial weights, / sqrt(2 n_layer) in residual projections"
    )
    router_init_ratio: float = Field(
        1.0, gt=0, description="std of routers' initial weights, as a fraction of init_std"
    )
    backend: Literal["auto", "reference", "torch", "triton"] = Field(
        "auto", description="kernels of experts, LM head"
    )

    @field_validator("router")
    @classmethod
    def _find_router(cls, value: str) -> str:
        """A name of ROUTERS, or what may be a formula: `router.find_spec` reads it."""
        if value not in read_router_names() and "," not in value:
            choices = ", ".join(map(repr, read_router_names()))
            raise PydanticCustomError(
                "literal_error", "Input should be {c}, or a formula with commas", {"c": choices}
            )
        return value


class Mix(dict[str, float]):
    """Weights by the name of a set, sorted by name.

    Equal if the parts are: {a = 6, b = 4} is {a = 0.6, b = 0.4}.

    Hashable and with a short text, as all values of settings are.
    """

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__(sorted(weights.items()))

    def __hash__(self) -> int:  # pyrefly: ignore[bad-override]  # nobody changes the settings of a run
        return hash(tuple(self._parts().items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self._parts() == Mix(other)._parts()

    def __ne__(self, other: object) -> bool:  # dict has one of its own
        return not self == other

    def _parts(self) -> dict[str, float]:
        most = max(self.values(), default=1.0)
        # finite, whatever the weights
        return {name: round(weight / most, 12) for name, weight in self.items()}

    def __str__(self) -> str:
        return " + ".join(f"{name} {weight:g}" for name, weight in self.items())


class Data(Section):
    """The corpus."""

    name: str = Field(
        "books3", pattern=f"^{FILE_NAME}$", description="prepared corpus, a folder in data.dir"
    )
    dir: str = Field("data", min_length=1, description="folder that holds all prepared corpora")
    mix: Annotated[
        dict[Annotated[str, Field(pattern=f"^{FILE_NAME}$")], Annotated[float, Field(gt=0)]],
        AfterValidator(Mix),
    ] = Field(
        {},
        validate_default=True,
        description="weights of several corpora, by name, instead of data.name",
    )
    document_mask: bool = Field(
        False, description="attention and positions restart at each document of a window"
    )

    @property
    def sets(self) -> dict[str, float]:
        """The prepared sets and their parts of the windows, which sum to 1."""
        most = max(self.mix.values(), default=1.0)
        total = sum(weight / most for weight in self.mix.values())  # finite, whatever the weights
        return {name: weight / most / total for name, weight in self.mix.items()} or {
            self.name: 1.0
        }

    @property
    def folders(self) -> list[Path]:
        return [Path(self.dir, name) for name in self.sets]

    @property
    def label(self) -> str:
        return str(self.mix) or self.name


class Train(Section):
    """Batches, precision, parallelism, auxiliary losses and checkpoints."""

    batch_size: int = Field(
        256, ge=1, le=2**24, description="sequences per optimizer step, over all ranks"
    )
    micro_batch_size: int = Field(
        32, ge=1, le=2**24, description="sequences per rank and forward pass"
    )
    max_steps: int = Field(50_000, ge=1, description="optimizer steps of the run")
    init_from: str = Field(
        "", description="folder of initial weights, of this project or in HF format; empty: random"
    )
    match_gates: bool = Field(
        True, description="init_from with another router: its gates get the old ones' mean size"
    )
    branch_from: str = Field(
        "", description="run with schedule wsd whose state at branch_step this run decays"
    )
    branch_step: int = Field(
        0, ge=0, description="step of the branch, sets decay_fraction; 0: where the decay begins"
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = Field(
        "auto",
        description="autocast; auto: float16 on CUDA, on a CPU the faster of bfloat16 and float32",
    )
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: cuda if there is a GPU, else cpu"
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="torch.compile every block; auto: on CUDA"
    )
    parallel: Literal["auto", "ddp", "zero2", "fsdp", "hsdp"] = Field(
        "auto",
        description="ddp: a full copy per rank; zero2: optimizer and gradients sharded; fsdp: weights, too; hsdp: fsdp "
        "(zero2 if a step is one micro-batch) within a node, ddp across nodes; auto: the first that fits",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="type in which gradients are summed over ranks; bfloat16 sends half the bytes, and rounds",
    )
    activation_checkpointing: bool = Field(
        False, description="keep only blocks' inputs and recompute the rest"
    )
    timeout_minutes: float = Field(
        10.0, gt=0, le=7 * 24 * 60, description="longest time a rank waits for the others"
    )
    balance_loss_coef: float = Field(
        0.0, ge=0, description="weight of the balance loss, mean over layers; 0 disables"
    )
    balance_loss_scope: Literal["global", "sequence", "micro_batch"] = Field(
        "global",
        description="tokens whose loads are balanced: of the step, of each sequence, or of each micro-batch",
        json_schema_extra={"before": "micro_batch", "with": "train.balance_loss_coef"},
    )
    z_loss_coef: float = Field(
        0.0, ge=0, description="weight of the router z-loss, mean over layers; 0 disables"
    )
    bias_update: Literal["sign", "quantile"] = Field(
        "sign",
        description="selection bias: moves by bias_update_rate, or to where the step's loads would be balanced",
    )
    bias_update_rate: float = Field(
        0.0, ge=0, description="step of the selection bias under sign; 0 disables"
    )
    loss_spike: Literal["off", "warn", "skip"] = Field(
        "off", description="on a loss spike: warn, or skip the step"
    )
    spike_sigma: float = Field(
        6.0, gt=0, description="a spike: deviations above the mean of the last 128 losses"
    )
    max_skipped_steps: int = Field(
        20, ge=1, description="consecutive skipped steps that stop the run"
    )
    checkpoint_interval: int = Field(
        -1, ge=-1, description="steps between checkpoints; -1: max_steps / 10, 0 disables"
    )
    checkpoint_minutes: float = Field(
        10.0, ge=0, description="minutes between checkpoints; 0 disables"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of latest checkpoints kept on disk")
    keep_steps: str = Field(
        "", pattern=r"^(\d+(,\d+)*)?$", description="steps whose checkpoints stay, as 800,1600"
    )
    on_save_error: Literal["stop", "warn"] = Field(
        "stop", description="when a checkpoint cannot be written"
    )
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="decay per step of the weights' running mean; 0 disables"
    )
    deterministic: bool = Field(
        False,
        description="deterministic torch operations only: a run repeats bit for bit; on a GPU, attention then takes "
        "flash attention or plain products, never cuDNN's",
    )

    @field_validator("branch_from")
    @classmethod
    def _spell_one_way(cls, value: str) -> str:
        return value and str(Path(value))

    @field_validator("compile", mode="before")
    @classmethod
    def _read_bool(cls, value: Any) -> Any:
        """Configs of before "auto" have true and false, which an override gives as text."""
        return (
            {"true": "on", "false": "off"}.get(str(value).lower(), value)
            if isinstance(value, bool | str)
            else value
        )

    @property
    def kept_steps(self) -> frozenset[int]:
        return frozenset(map(int, filter(None, self.keep_steps.split(","))))


class Optim(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the blocks' matrices, routers excepted"
    )
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    momentum: float = Field(
        0.95, ge=0, lt=1, description="decay of Muon's running mean of gradients; Nesterov's form"
    )
    router_lr_ratio: float = Field(
        1.0, ge=0, description="routers' learning rate as a fraction of lr; 0 freezes them"
    )
    expert_out_lr_ratio: float = Field(
        1.0, ge=0, description="learning rate of experts' w_out as a fraction of lr"
    )
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="after warm-up: a cosine, or constant, then decay"
    )
    decay_fraction: float = Field(
        0.2, ge=0, le=1, description="wsd: steps of the decay, as a fraction of max_steps"
    )
    decay: Literal["linear", "sqrt"] = Field(
        "linear", description="wsd: factor after a part p: 1 - p or 1 - sqrt(p)"
    )
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="final learning rate of the schedule, as a fraction of lr"
    )
    warmup_steps: int = Field(500, ge=0, description="steps of linear warm-up")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the gradient's running mean")
    beta2: float = Field(
        0.95, ge=0, lt=1, description="decay of the squared gradient's running mean"
    )
    eps: float = Field(1e-8, gt=0, description="added to AdamW's denominator")
    weight_decay: float = Field(0.1, ge=0, description="decoupled weight decay, matrices only")
    grad_clip: float = Field(1.0, ge=0, description="maximum global gradient norm; 0 disables")

    def decay_start(self, max_steps: int) -> int:
        """The step at which the decay of schedule "wsd" begins."""
        return max_steps - round(self.decay_fraction * max_steps)


class Eval(Section):
    """Validation and scores during training."""

    interval: int = Field(1000, ge=1, description="steps between evaluations")
    windows: int = Field(
        2048, ge=1, description="validation windows of block_size tokens, the same every time"
    )
    spread: Literal["documents", "tokens"] = Field(
        "documents",
        description="windows from many documents, or evenly spaced",
        json_schema_extra={"before": "tokens"},
    )
    tasks: str = Field(
        "",
        pattern=r"^([A-Za-z0-9_.+-]+(,[A-Za-z0-9_.+-]+)*)?$",
        description='tasks of lm-evaluation-harness to score, as ["arc_easy", "sciq"] or arc_easy,sciq; empty: none',
    )
    task_interval: int = Field(
        0, ge=0, description="steps between scores, at evaluations; 0: at each of them"
    )
    task_limit: int = Field(0, ge=0, description="documents of each task, the first ones; 0: all")
    tasks_dir: str = Field(
        "", description="folder of local files TASK.jsonl; empty: from the Hugging Face hub"
    )

    @field_validator("tasks", mode="before")
    @classmethod
    def _join_names(cls, value: Any) -> Any:
        """A list of names, also as the text of one, becomes a text with each name once."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            value = ",".join(value)
        if isinstance(value, str):
            value = ",".join(dict.fromkeys(re.findall(r'[^][,"\s]+', value)))
        return value

    @property
    def task_names(self) -> list[str]:
        return [*filter(None, self.tasks.split(","))]


class Log(Section):
    """Metrics, Weights & Biases, TensorBoard."""

    interval: int = Field(10, ge=1, description="steps between lines of metrics")
    wandb: Literal["online", "offline", "disabled"] = Field(
        "disabled", description="Weights & Biases mode"
    )
    project: str = Field("nanokern", min_length=1, description="Weights & Biases project")
    group: str = Field("", description="Weights & Biases group; empty: the config file's name")
    tensorboard: bool = Field(False, description="TensorBoard files in runs/NAME/tensorboard, too")


class Config(Section):
    """All settings of one run. `configure.load` builds it and also runs `find_conflicts`."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    eval: Eval = Eval()
    log: Log = Log()


SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
# Dotted key -> its JSON schema: type, bounds, choices, default, description; before: what runs did
# whose config.toml is older than the key, where that is not the default.
KEYS: dict[str, dict[str, Any]] = {
    f"{section}.{name}": schema
    for section, model in SECTIONS.items()
    for name, schema in model.model_json_schema()["properties"].items()
}
