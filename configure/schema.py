"""Every key a config file may set: its type, range, default, meaning and attributes.

`key` explains the attributes, check.py checks several keys together. To add a key, add one
`key(...)` here: `--help`, overrides, errors, reports and what may change on resume follow from it.

The defaults are the 125M-active model of *Understanding the Mixture-of-Experts with Nadaraya-Watson
Kernel*. Where the paper is silent (warm-up, final learning rate, weight decay, clipping) they
follow the 125M file of its first author's DAPE repository.

This package imports no torch, so that a typo in a config file is reported within a second.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator


def key(
    default: Any,
    description: str,
    *,
    resume: bool = False,
    decay_branch: bool = False,
    acts_if: str = "",
    report: Literal["", "setting", "option", "neutral", "router"] = "",
    label: Literal["", "first", "last"] = "",
    validation_text: bool = False,
    fixed_by_weights: bool = False,
    exported: bool = False,
    chooses: bool = False,
    other_names: str = "",
    choices: Sequence[str] = (),
    **limits: Any,
) -> Any:
    """Declare a config key. A key without attributes is fixed for a run and separates settings.

    Args:
        default: its value in a file that does not set it.
        description: its meaning, which `--help` prints.
        resume: a run may resume with another value.
        decay_branch: a branch (train.branch_from) may have another value than its trunk.
        acts_if: the key has an effect only if this one is set ("train.init_from") or has this value
            ("optim.name=muon").
        report: runs with different values are not compared ("setting"), are arms of one comparison
            ("option"), or count as equal, because the key moves no loss except by rounding
            ("neutral"). "router" is the name of an arm. By default "neutral" if a run may resume
            with another value, else "setting".
        label: where a report needs keys to name a setting, this comes "first". An option that is
            "last" is named only where arms of one router differ in nothing else.
        validation_text: losses of runs can be paired only if they have the same value.
        fixed_by_weights: initial weights (train.init_from) need the value that they had.
        exported: config.json of exports has it under its own name or transformers'.
        chooses: it sets which experts a token takes.
        other_names: what other projects call it, separated by spaces.
        choices: allowed values of a text that also has other values.
        **limits: ge, le, gt, lt, pattern and others of `pydantic.Field`.
    """
    attributes: dict[str, Any] = {
        "resume": resume,
        "decay_branch": decay_branch,
        "acts_if": acts_if,
        "report": report or ("neutral" if resume else "setting"),
        "label": label,
        "validation_text": validation_text,
        "fixed_by_weights": fixed_by_weights,
        "exported": exported,
        "chooses": chooses,
        "other_names": other_names,
    }
    if choices:
        attributes["enum"] = list(choices)
    return Field(default, description=description, json_schema_extra=attributes, **limits)


FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
ROUTER_FILE = Path(__file__).parents[1] / "router.py"


@cache
def read_router_names() -> list[str]:
    """The names in the dict literal ROUTERS, read from the source: router.py imports torch."""
    source = ROUTER_FILE.read_text(encoding="utf-8")
    routers = source.partition("\nROUTERS: ")[2].partition("\n}")[0]  # a line each
    return re.findall(r'^    "(.+?)":', routers, re.MULTILINE)


class Section(BaseModel):
    """A table of a config file, frozen and strictly checked.

    No int for a bool, no string for a number, no unknown keys, no NaN or Inf, only printable text.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _refuse_control_characters(cls, value: Any) -> Any:
        if isinstance(value, str) and not value.isprintable():
            raise ValueError("expected printable text")
        return value


class Run(Section):
    """Folder and seed of a run."""

    name: str = key(
        "",
        "folder of the run; empty: file, router, sweep",
        pattern=f"^({FILE_NAME})?$",
        resume=True,
    )
    dir: str = key(
        "runs",
        "folder that holds all runs",
        min_length=1,
        resume=True,
        other_names="out_dir output_dir",
    )
    seed: int = key(
        0, "seed of initialisation, dropout and data order", ge=0, lt=2**32, report="neutral"
    )


class Model(Section):
    """The architecture; model.py reads it."""

    n_layer: int = key(
        12,
        "transformer blocks",
        ge=1,
        le=2**10,
        fixed_by_weights=True,
        exported=True,
        other_names="layers num_layers num_hidden_layers",
    )
    n_head: int = key(
        12,
        "attention heads per block",
        ge=1,
        le=2**10,
        fixed_by_weights=True,
        exported=True,
        other_names="heads num_heads num_attention_heads",
    )
    n_kv_head: int = key(
        0,
        "heads of keys and values, shared by query heads; 0: n_head",
        ge=0,
        le=2**10,
        exported=True,
    )
    qk_norm: Literal["off", "head", "all"] = key(
        "off",
        "norm of queries and keys: per head or over all",
        fixed_by_weights=True,
        exported=True,
    )
    n_embd: int = key(
        768,
        "width of the residual stream",
        ge=1,
        le=2**17,
        label="first",
        fixed_by_weights=True,
        exported=True,
        other_names="hidden hidden_size d_model dim",
    )
    block_size: int = key(
        512,
        "context length in tokens",
        ge=1,
        le=2**20,
        exported=True,
        validation_text=True,
        other_names="seq_len max_seq_len context context_length max_position_embeddings",
    )
    vocab_size: int = key(
        50304,
        "vocabulary; GPT-2's 50257 padded to a multiple of 64",
        ge=2,
        le=2**16,
        exported=True,
        other_names="vocab",
    )
    dropout: float = key(0.0, "probability of dropping an activation", ge=0, lt=1)
    router: str = key(
        "kern",
        "how tokens choose experts; dense: no experts, one MLP with hidden width "
        "top_k * expert_hidden; a formula such as "
        '"tanh, post=l2 over topk, gamma, c=2" is also a router',
        choices=read_router_names(),
        report="router",
        exported=True,
        chooses=True,
    )
    n_expert: int = key(
        64,
        "experts per block; ignored by dense",
        ge=1,
        le=2**14,
        exported=True,
        other_names="experts num_experts num_local_experts",
    )
    top_k: int = key(
        8,
        "experts per token",
        ge=1,
        le=2**14,
        exported=True,
        chooses=True,
        other_names="topk num_experts_per_tok",
    )
    router_groups: int = key(
        1,
        "groups of consecutive experts; a token chooses within its best router_group_k groups, by "
        "the sum of a group's two largest selection scores (DeepSeek-V3), which torch operators "
        "compute also on a GPU; 1 disables",
        ge=1,
        le=2**10,
        report="option",
        exported=True,
        chooses=True,
        other_names="n_group num_expert_group",
    )
    router_group_k: int = key(
        1,
        "groups that a token's experts are chosen from",
        ge=1,
        le=2**10,
        report="option",
        exported=True,
        chooses=True,
        other_names="topk_group",
    )
    expert_hidden: int = key(384, "hidden width of one expert", ge=1, le=2**17, exported=True)
    activation: Literal["gelu", "silu"] = key(
        "gelu",
        "activation of MLPs and experts; gelu is exact",
        fixed_by_weights=True,
        exported=True,
    )
    gated: bool = key(
        False,
        "MLPs and experts compute activation(x W_gate) * (x W_up), as in SwiGLU",
        fixed_by_weights=True,
        exported=True,
    )
    n_shared_expert: int = key(
        0,
        "shared experts: every token uses them; computed as one MLP",
        ge=0,
        le=2**10,
        exported=True,
    )
    n_hash_layer: int = key(
        0,
        "number of first blocks with experts that route by token id; their loads are not balanced",
        ge=0,
        le=2**10,
        report="option",
        exported=True,
        chooses=True,
    )
    gate_scale: float = key(
        1.0,
        "constant factor on all gates, times the router's own c",
        gt=0,
        le=2**16,
        report="option",
        exported=True,
    )
    gate_norm: float = key(
        0.0,
        "size of a token's gates at the start of training; 0: the router's own",
        ge=0,
        le=2**16,
        report="option",
    )
    norm: Literal["layernorm", "rmsnorm"] = key(
        "layernorm", "rmsnorm: without mean and bias", fixed_by_weights=True, exported=True
    )
    norm_eps: float = key(1e-5, "added to the variance in each norm", gt=0, exported=True)
    pos: Literal["learned", "rope"] = key(
        "learned",
        "position embeddings: a learned table or rotary",
        fixed_by_weights=True,
        exported=True,
    )
    rope_base: float = key(
        1e4,
        "base of rotary angles: pair i turns by base^(-2i / head width)",
        ge=1,
        acts_if="model.pos=rope",
        exported=True,
    )
    tie_embeddings: bool = key(
        True, "the LM head shares the token embedding's weights", fixed_by_weights=True
    )
    bias: bool = key(
        False,
        "biases as in GPT-2: LayerNorms, attention, dense MLP; experts have none",
        exported=True,
    )
    init_std: float = key(
        0.02, "std of initial weights, / sqrt(2 n_layer) in residual projections", gt=0
    )
    router_init_ratio: float = key(
        1.0, "std of routers' initial weights, as a fraction of init_std", gt=0
    )
    backend: Literal["auto", "reference", "torch", "triton"] = key(
        "auto", "kernels of experts, LM head", report="neutral"
    )

    @property
    def has_tables(self) -> bool:
        """Return True if layers choose experts by tables, which have top_k columns."""
        return self.n_hash_layer > 0

    @property
    def active_hidden(self) -> int:
        """Hidden units of a block that act on a token."""
        return (self.top_k + self.n_shared_expert) * self.expert_hidden

    @field_validator("router")
    @classmethod
    def _find_router(cls, value: str) -> str:
        """Check for a name of ROUTERS, or what may be a formula: `router.find_spec` reads it."""
        if value not in read_router_names() and "," not in value:
            choices = ", ".join(repr(name) for name in read_router_names())
            raise ValueError(f"Input should be {choices}, or a formula with commas")
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
        largest = max(self.values(), default=1.0)
        # finite for any weights
        return {name: round(weight / largest, 12) for name, weight in self.items()}

    def __str__(self) -> str:
        return " + ".join(f"{name} {weight:g}" for name, weight in self.items())


class Data(Section):
    """The corpus."""

    name: str = key(
        "books3",
        "prepared corpus, a folder in data.dir",
        pattern=f"^{FILE_NAME}$",
        label="first",
        validation_text=True,
        other_names="dataset",
    )
    dir: str = key(
        "data",
        "folder that holds all prepared corpora",
        min_length=1,
        resume=True,
    )
    mix: Annotated[
        dict[Annotated[str, Field(pattern=f"^{FILE_NAME}$")], Annotated[float, Field(gt=0)]],
        AfterValidator(Mix),
    ] = key(
        {},
        "weights of several corpora, by name, instead of data.name",
        validate_default=True,
        label="first",
        validation_text=True,
    )
    document_mask: bool = key(False, "attention and positions restart at each document of a window")

    @property
    def sets(self) -> dict[str, float]:
        """The prepared sets and their parts of the windows, which sum to 1."""
        if not self.mix:
            return {self.name: 1.0}
        largest = max(self.mix.values())
        total = sum(weight / largest for weight in self.mix.values())  # finite for any weights
        return {name: weight / largest / total for name, weight in self.mix.items()}

    @property
    def folders(self) -> list[Path]:
        return [Path(self.dir, name) for name in self.sets]

    @property
    def label(self) -> str:
        return str(self.mix) or self.name


class Train(Section):
    """Batches, precision, parallelism, auxiliary losses and checkpoints."""

    batch_size: int = key(
        256,
        "sequences per optimizer step, over all ranks",
        ge=1,
        le=2**24,
        other_names="batch",
    )
    micro_batch_size: int = key(
        32,
        "sequences per rank and forward pass",
        ge=1,
        le=2**24,
        resume=True,
        other_names="gradient_accumulation_steps",
    )
    max_steps: int = key(
        50_000,
        "optimizer steps of the run",
        ge=1,
        resume=True,
        report="setting",
        label="first",
        other_names="steps max_iters lr_decay_iters epochs num_train_epochs",
    )
    init_from: str = key(
        "", "folder of initial weights, of this project or in HF format; empty: random"
    )
    branch_from: str = key(
        "",
        "folder of a run with schedule wsd, the trunk; this run decays its state at branch_step",
        decay_branch=True,
        report="neutral",
    )
    branch_step: int = key(
        0,
        "step of the branch, sets decay_fraction; 0: where the decay starts",
        ge=0,
        decay_branch=True,
        report="neutral",
    )
    dtype: Literal["auto", "float16", "bfloat16", "float32"] = key(
        "auto",
        "autocast; auto: float16 on CUDA, on a CPU the faster of bfloat16 and float32",
        report="option",
        label="last",
    )
    device: Literal["auto", "cuda", "cpu"] = key(
        "auto", "auto: cuda if there is a GPU, else cpu", resume=True
    )
    compile: Literal["auto", "on", "off"] = key(
        "auto", "torch.compile every block; auto: on CUDA", resume=True
    )
    cuda_graph: Literal["auto", "on", "off"] = key(
        "auto",
        "replay forward and backward pass as a CUDA graph, on one GPU; auto: where memory allows",
        resume=True,
    )
    parallel: Literal["ddp", "zero2", "fsdp", "hsdp"] = key(
        "ddp",
        "ddp: a full copy per rank; zero2: optimizer and gradients sharded; fsdp: also weights; "
        "hsdp: fsdp (zero2 if a step is one micro-batch) within a node, ddp across nodes",
        resume=True,
    )
    expert_parallel: int = key(
        1,
        "consecutive ranks that share one set of experts; tokens travel between them",
        ge=1,
        resume=True,
    )
    activation_checkpointing: bool = key(
        False, "keep only blocks' inputs and recompute the rest", resume=True
    )
    timeout_minutes: float = key(
        10.0,
        "longest time a rank waits for the others",
        gt=0,
        le=7 * 24 * 60,
        resume=True,
    )
    balance_loss_coef: float = key(
        0.0,
        "weight of the balance loss, mean over layers; 0 disables",
        ge=0,
        report="option",
    )
    balance_loss_scope: Literal["global", "sequence", "micro_batch"] = key(
        "global",
        "which loads the balance loss makes even: of the whole step, of each sequence, "
        "or of each micro-batch",
        report="option",
        acts_if="train.balance_loss_coef",
    )
    z_loss_coef: float = key(
        0.0,
        "weight of the router z-loss, mean over layers; 0 disables",
        ge=0,
        report="option",
    )
    bias_update: Literal["sign", "quantile"] = key(
        "sign",
        "how the selection bias moves: by bias_update_rate, or to where the step's loads "
        "would be balanced",
        report="option",
    )
    bias_update_rate: float = key(
        0.0,
        "step of the selection bias under sign; 0 disables",
        ge=0,
        report="option",
    )
    checkpoint_interval: int = key(
        -1,
        "steps between checkpoints; 0 disables; -1: max_steps / 10, or more where a save is slow",
        ge=-1,
        resume=True,
    )
    checkpoint_minutes: float = key(
        10.0, "minutes between checkpoints; 0 disables", ge=0, resume=True
    )
    keep_checkpoints: int = key(2, "number of latest checkpoints kept on disk", ge=1, resume=True)
    keep_steps: str = key(
        "",
        "steps whose checkpoints stay, as 800,1600",
        pattern=r"^(\d+(,\d+)*)?$",
        resume=True,
    )
    ema_decay: float = key(
        0.0,
        "decay per step of the weights' running mean, bias-corrected; 0 disables",
        ge=0,
        lt=1,
        report="neutral",
    )
    deterministic: bool = key(
        False,
        "deterministic torch operations only: a run repeats bit for bit; on a GPU, attention "
        "then uses flash attention or plain products, never cuDNN's",
        resume=True,
    )

    @field_validator("branch_from", "init_from")  # a trailing slash makes no other run
    @classmethod
    def _spell_one_way(cls, value: str) -> str:
        return value and str(Path(value))

    @property
    def kept_steps(self) -> frozenset[int]:
        return frozenset(int(step) for step in self.keep_steps.split(",") if step)


class Optim(Section):
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "muon"] = key(
        "adamw", "muon: for the blocks' matrices, routers excepted"
    )
    muon_experts: bool = key(
        True,
        "Muon trains routed experts, too; false: AdamW trains them, in less time",
        acts_if="optim.name=muon",
    )
    lr: float = key(6e-4, "peak learning rate", gt=0, label="first", other_names="learning_rate")
    router_lr_ratio: float = key(
        1.0,
        "routers' learning rate as a fraction of lr; 0 freezes them",
        ge=0,
        report="option",
    )
    expert_out_lr_ratio: float = key(
        1.0, "learning rate of experts' w_out as a fraction of lr", ge=0, report="option"
    )
    transfer: Literal["none", "mup"] = key(
        "none",
        "mup: lr and model.init_std were tuned at base_width; what each kind of parameter gets "
        "at this model's shape follows from them (docs/transfer.md)",
    )
    base_width: int = key(
        0, "mup: n_embd at which the settings were tuned", ge=0, acts_if="optim.transfer=mup"
    )
    base_hidden: int = key(
        0,
        "mup: (top_k + n_shared_expert) * expert_hidden at which they were tuned",
        ge=0,
        acts_if="optim.transfer=mup",
    )
    base_layers: int = key(
        0,
        "mup: n_layer at which they were tuned; 0: this model's",
        ge=0,
        acts_if="optim.transfer=mup",
    )
    schedule: Literal["cosine", "wsd"] = key(
        "cosine", "after warm-up: a cosine, or constant, then decay"
    )
    decay_fraction: float = key(
        0.2,
        "wsd: steps of the decay, as a fraction of max_steps",
        ge=0,
        le=1,
        decay_branch=True,
        acts_if="optim.schedule=wsd",
    )
    min_lr_ratio: float = key(
        0.1,
        "final learning rate of the schedule, as a fraction of lr",
        ge=0,
        le=1,
        decay_branch=True,
        other_names="min_lr",
    )
    warmup_steps: int = key(500, "steps of linear warm-up", ge=0)
    beta1: float = key(0.9, "decay of the gradient's running mean", ge=0, lt=1)
    beta2: float = key(0.95, "decay of the squared gradient's running mean", ge=0, lt=1)
    eps: float = key(1e-8, "added to AdamW's denominator", gt=0)
    weight_decay: float = key(0.1, "decoupled weight decay, matrices only", ge=0)
    grad_clip: float = key(1.0, "maximum global gradient norm; 0 disables", ge=0)

    def decay_start(self, max_steps: int) -> int:
        """The step at which the decay of schedule "wsd" starts."""
        return max_steps - round(self.decay_fraction * max_steps)


class Eval(Section):
    """Validation and scores during training."""

    interval: int = key(
        1000,
        "steps between evaluations",
        ge=1,
        resume=True,
    )
    windows: int = key(
        2048,
        "validation windows of block_size tokens, the same every time",
        ge=1,
    )
    tasks: str = key(
        "",
        "tasks of lm-evaluation-harness to score, "
        'as ["arc_easy", "sciq"] or arc_easy,sciq; empty: none',
        pattern=r"^([A-Za-z0-9_.+-]+(,[A-Za-z0-9_.+-]+)*)?$",
        resume=True,
    )
    task_interval: int = key(
        0,
        "steps between scores, at evaluations; 0: at each of them",
        ge=0,
        resume=True,
    )
    tasks_dir: str = key(
        "",
        "folder of local files TASK.jsonl; empty: from the Hugging Face hub",
        resume=True,
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
        return [name for name in self.tasks.split(",") if name]


class Log(Section):
    """Metrics, Weights & Biases."""

    interval: int = key(10, "steps between lines of metrics", ge=1, resume=True)
    wandb: Literal["online", "offline", "disabled"] = key(
        "disabled",
        "Weights & Biases mode",
        resume=True,
        other_names="wandb_log",
    )
    project: str = key("nanokern", "Weights & Biases project", min_length=1, resume=True)
    group: str = key(
        "",
        "Weights & Biases group; empty: the config file's name",
        resume=True,
    )


class Config(Section):
    """All settings of one run. `configure.load` builds it and also runs `find_conflicts`."""

    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    eval: Eval = Eval()
    log: Log = Log()

    @property
    def steps_before_decay(self) -> int:
        """Steps before the decay of schedule "wsd"; of a cosine, all."""
        steps = self.train.max_steps
        return self.optim.decay_start(steps) if self.optim.schedule == "wsd" else steps


def replace(config: Config, section: str, **values: Any) -> Config:
    """`config` with other values in one section. They are not checked."""
    changed = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: changed})


SECTIONS: dict[str, Any] = {name: field.annotation for name, field in Config.model_fields.items()}
# Dotted key -> its JSON schema: type, bounds, choices, default, description, and the attributes
# that `key` explains.
KEYS: dict[str, dict[str, Any]] = {
    f"{section}.{name}": schema
    for section, model in SECTIONS.items()
    for name, schema in model.model_json_schema()["properties"].items()
}


def select_keys(attribute: str, value: Any = True) -> list[str]:
    """The keys whose attribute has a value, in the schema's order."""
    return [name for name, schema in KEYS.items() if schema[attribute] == value]


def select_model_keys(attribute: str, value: Any = True) -> list[str]:
    """The names of such keys of [model], without the section."""
    keys = select_keys(attribute, value)
    return [name.removeprefix("model.") for name in keys if name.startswith("model.")]


def has_effect(name: str, read: Callable[[str], Any]) -> bool:
    """Return False if another key makes this one meaningless; `read` gives the value of a key."""
    other, _, needed = KEYS[name]["acts_if"].partition("=")
    if not other:
        return True
    return read(other) == needed if needed else bool(read(other))
