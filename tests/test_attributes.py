"""configure/attributes.py: keys' attributes, by tables of their own and by what reports do."""

import re

import pytest
from fake_runs import with_other
from runs import REPO_ROOT

from configure import load
from configure.attributes import key as declare_key
from configure.schema import KEYS, has_effect, select_keys
from report.frame import group_runs
from runtime.runs import Run

# What moves no loss, except by rounding.
NEUTRAL = """
run.name run.dir run.seed model.backend data.dir
train.micro_batch_size train.branch_from train.branch_step train.device train.compile train.parallel
train.cuda_graph train.expert_parallel train.activation_checkpointing train.timeout_minutes

train.checkpoint_interval train.checkpoint_minutes train.keep_checkpoints train.keep_steps
train.ema_decay train.deterministic
eval.interval eval.tasks eval.task_interval eval.tasks_dir
log.interval log.wandb log.project log.group
"""
# What variants of one group may differ in.
OPTIONS = """
model.router model.n_hash_layer model.router_groups model.router_group_k
model.gate_scale model.gate_norm train.dtype train.balance_loss_coef
train.balance_loss_scope train.z_loss_coef train.bias_update train.bias_update_rate
optim.router_lr_ratio optim.expert_out_lr_ratio
"""
# Settings without effect, and under which they have one.
CONDITIONAL = {
    "model.rope_base": "model.pos=rope",
    "train.balance_loss_scope": "train.balance_loss_coef=0.1",
    "optim.muon_experts": "optim.name=muon",
    "optim.decay_fraction": "optim.schedule=wsd",
    "optim.base_width": "optim.transfer=mup",
    "optim.base_hidden": "optim.transfer=mup",
    "optim.base_layers": "optim.transfer=mup",
}
DEFAULTS = {key: schema["default"] for key, schema in KEYS.items()}
TABLES = {
    "decay_branch": "train.branch_from train.branch_step optim.decay_fraction optim.min_lr_ratio",
    "scaled": "train.max_steps train.checkpoint_interval optim.warmup_steps eval.interval "
    "eval.windows log.interval",
    "in_every_run": "run.name optim.eps log.group",
    "validation_text": "model.block_size data.name data.mix eval.spread",
    "routing_shape": "model.n_layer model.block_size model.n_expert model.top_k ",
    "fixed_by_weights": "model.n_layer model.n_head model.qk_norm model.n_embd model.activation "
    "model.gated model.norm model.pos model.tie_embeddings",
}


@pytest.fixture
def base(write):
    """A config in which every key has an effect."""
    settings = sorted({*CONDITIONAL.values()} - {"optim.transfer=mup"})
    config = load(write(), settings)
    optim = config.optim.model_copy(update={"transfer": "mup"})  # train.init_from excludes it
    return config.model_copy(update={"optim": optim})


def count_arms(*configs):
    """The number of variants of each group in a report of these runs, each of its own seed."""
    runs = []
    for seed, config in enumerate(configs):
        own = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
        losses = {step: {"step": step, "val/loss": 2.0} for step in (0, config.train.max_steps)}
        run = Run(REPO_ROOT / f"absent{seed}")
        run.config, run.metrics = own, list(losses.values())
        runs.append(run)
    return [len(group.runs) for group in group_runs(runs)[0]]


@pytest.mark.parametrize("key", KEYS)
def test_reports_compare_runs_by_what_a_key_changes(base, key):
    if key in NEUTRAL.split():
        arms = [1]
    elif key in OPTIONS.split():
        arms = [2]
    else:  # a key in no table: two groups
        arms = [1, 1]
    assert count_arms(base, with_other(base, key)) == arms


def test_a_key_without_effect_does_not_separate_runs(write):
    default = load(write())
    assert {key for key in KEYS if not has_effect(key, DEFAULTS.get)} == CONDITIONAL.keys()
    for key in CONDITIONAL:
        assert count_arms(default, with_other(default, key)) == [1]
    spikes = [load(write(), [f"train.loss_spike={value}"]) for value in ("off", "warn", "skip")]
    assert count_arms(*spikes) == [1, 1]  # "warn" moves no loss


@pytest.mark.parametrize("attribute", TABLES)
def test_keys_that_have_an_attribute(attribute):
    assert select_keys(attribute) == TABLES[attribute].split()


def test_a_new_key_is_fixed_for_a_run_and_separates_settings():
    extra = declare_key(1, "a number").json_schema_extra
    assert (extra["resume"], extra["report"]) == (False, "setting")
    assert declare_key(1, "a number", resume=True).json_schema_extra["report"] == "neutral"
    with pytest.raises(KeyError):
        select_keys("resumes")


def test_documentation_names_what_may_change():
    text = (REPO_ROOT / "docs/reliability.md").read_text()
    paragraph = re.search(r"\*\*What may change between starts.*?\n\n", text, re.DOTALL)[0]
    named = re.findall(r"`(\w+\.\w+)`", paragraph)
    assert sorted(named) == sorted(select_keys("resume"))
