"""configure/: values and their precedence, errors and their remedies, names of runs, help."""

import json
import os
import re
import shlex
import tomllib
from operator import attrgetter
from unittest import mock

import pytest
from conftest import fuzz
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError
from runs import REPO_ROOT
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from configure import (
    ConfigError,
    dumps,
    from_command_line,
    load,
    load_recorded,
    sweep_points,
)
from configure.check import REMOVED, build, format_toml
from configure.command_line import read_rank_variable
from configure.load import _print_note
from configure.schema import KEYS, SECTIONS, Mix, replace
from router import ROUTERS
from runtime import RunError
from runtime.preflight import plan_run


def message(path, *overrides, world_size=1):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, world_size)
    return str(caught.value)


def keys_of(errors):
    """The keys that an error's lines start with."""
    return [line.strip().split(" = ")[0] for line in errors.splitlines()]


# ---- values and their precedence
def test_defaults_then_file_then_overrides(write):
    file = write("[optim]\nlr = 1e-3\n[model]\nn_layer = 3\n")
    config = load(file, ["--model.n_layer=5", "model.router=tanh", "--model.router=sigmoid"])
    wanted = {"optim.lr": 1e-3, "model.n_layer": 5, "model.router": "sigmoid"}
    unnamed = replace(replace(config, "run", name=""), "log", group="")
    assert unnamed == build(wanted)
    with pytest.raises(ValidationError, match="frozen"):
        config.model.n_layer = 3


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.max_steps=10_000", 10_000),
        ("optim.lr=1", 1.0),
        ("run.name=7", "7"),
        ("run.dir=a=b", "a=b"),
        ("eval.tasks=b, a,b", "b,a"),
        ('eval.tasks=["b", "a", "b"]', "b,a"),
        ("data.mix={b = 2, a = 1}", {"a": 1.0, "b": 2.0}),
        ("train.branch_from=", ""),
        ("train.deterministic=True", True),
        ("train.compile=on", "on"),
        ("train.init_from=./runs//a/", "runs/a"),  # two spellings make one run
    ],
)
def test_override_is_read_by_the_type_of_its_key(write, override, value):
    section, _, name = override.partition("=")[0].partition(".")
    read = getattr(getattr(load(write(), [f"--{override}"]), section), name)
    assert read == value and isinstance(read, type(value))


@fuzz
@given(st.text(st.characters(exclude_categories=["Cs"])))
@example('a\x7f\t\n"\\é\U0001f600')
def test_any_text_is_written_as_toml(text):
    assert tomllib.loads(f"x = {format_toml({text: text})}") == {"x": {text: text}}


def test_mixtures_are_equal_if_their_parts_are():
    mix = Mix({"b": 0.6, "a": 0.1 + 0.2})
    assert str(mix) == "a 0.3 + b 0.6"
    for weights in ({"a": 0.3, "b": 0.6}, {"b": 2, "a": 1}, {"a": 1e300, "b": 2e300}):
        assert (mix != Mix(weights)) is False and {mix: 1} == {Mix(weights): 1}
    for weights in ({"a": 0.3}, {"a": 0.3, "b": 0.6, "c": 0.1}, {"a": 0.3, "b": 0.6 + 1e-9}, {}):
        assert mix != Mix(weights) and (mix == weights) is False
    assert Mix({"a": 1e-20, "b": 1}) == Mix({"a": 2e-20, "b": 1})  # to 12 digits of the largest


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("line", "overrides", "warmup"),
    [
        ("optim.warmup_steps = 200", "--train.max_steps=150", 15),
        ("optim.warmup_steps = 200", "--train.max_steps=200", 200),
        ("optim.warmup_steps = 200", "--train.max_steps=9", 0),
        # a tenth of the 180 before the decay
        (
            "optim.warmup_steps = 200",
            "--train.max_steps=300 --optim.schedule=wsd --optim.decay_fraction=0.4",
            18,
        ),
        ("train.max_steps = 130", "", 13),  # of the default of 500
        ("train.max_steps = 1000\noptim.warmup_steps = 200", "--train.max_steps=150", 15),
    ],
)
def test_a_run_that_is_shortened_has_a_shorter_warm_up(
    write, capsys, monkeypatch, line, overrides, warmup, rank
):
    _print_note.cache_clear()
    monkeypatch.setenv("RANK", rank)
    for _ in range(2):
        config = load(write(line), overrides.split())
    assert config.optim.warmup_steps == warmup
    steps, default = config.train.max_steps, 200 if "200" in line else 500
    note = f"note: train.max_steps = {steps} shortens optim.warmup_steps from {default} to {warmup}"
    is_said = rank == "0" and warmup < default
    assert capsys.readouterr().err == is_said * f"{note}\n"  # once


# ---- removed keys
def as_toml(settings):
    return "\n".join(f"{key} = {format_toml(value)}" for key, value in settings.items())


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_is_refused_but_in_the_record_of_a_run_at_its_default(write, key):
    default, instead = REMOVED[key]
    said = f"{key} = {default!r}: removed: {instead}. The last commit with it is e125ff1"
    text = default if isinstance(default, str) else format_toml(default)
    assert f"command line: {said}" in message(write(), f"--{key}={text}")
    config = load(write())
    recorded = {name: attrgetter(name)(config) for name in KEYS}
    record = as_toml(recorded | {key: default})
    for refused in (
        write(as_toml({key: default}), "config.toml"),  # no run's
        write(record, "mine.toml"),  # a user's
        write(f'sweep."{key}" = [{format_toml(default)}]', "sweep.toml"),
    ):
        assert said in message(refused)
    file = write(record, "config.toml")
    assert load_recorded(file) == config
    other = int(default) if isinstance(default, bool) else "other"  # 1 is not True
    write(as_toml(recorded | {key: other}), "config.toml")
    if key in ("eval.task_limit", "train.on_save_error", "log.tensorboard"):  # they move no loss
        assert load_recorded(file) == config
    else:
        assert f"{file}: {key} = {other!r}: " in message(file)


@pytest.mark.parametrize(
    ("changes", "without", "said"),
    [
        # Muon of 2026-11-25 (63e4928c) orthogonalized q, k and v as one matrix
        ({"optim.name": "muon"}, "optim.muon_experts", "optim.muon_split = False: removed"),
        ({"optim.name": "adamw"}, "optim.muon_experts", ""),
        ({"optim.name": "muon", "optim.muon_split": True}, "optim.muon_experts", ""),  # 2026-11-27
        # windows of 2026-11-22 (before a1a92e5d) were even over tokens
        ({}, "eval.tasks", "eval.spread = 'tokens': removed"),
        ({"eval.spread": "documents"}, "eval.tasks", ""),
    ],
)
def test_what_an_older_run_did_is_not_taken_for_what_is_done_today(write, changes, without, said):
    config = load(write())
    record = {name: attrgetter(name)(config) for name in KEYS} | changes
    del record[without]
    file = write(as_toml(record), "config.toml")
    if said:
        assert f"{file}: {said}" in message(file)
    else:
        assert load_recorded(file).optim.name == record["optim.name"]


# ---- one setting wrong
@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("train.lr = 1e-3", "train.lr = 0.001: unknown key; did you mean 'optim.lr'?"),
        ("model.n_heads = 8", "model.n_heads = 8: unknown key; did you mean 'model.n_head'? Or is"),
        ("evall.interval = 8", "did you mean 'eval.interval'?"),
        ("n_layer = 8", "did you mean 'model.n_layer'?"),
        ("model.hidden_size = 8", "did you mean 'model.n_embd'?"),  # of other projects
        ("num_experts_per_tok = 8", "did you mean 'model.top_k'?"),
        ("train.out_dir = 8", "did you mean 'run.dir'?"),
        ("train = 3", "train = 3: is a section"),
        ("model.n_layer = true", "model.n_layer = True: Input should be a valid integer"),
        ('model.router = "kernel"', "did you mean 'kern'?"),
        ('train.device = "mps"', "; a Mac trains on its CPU: leave it at 'auto'"),
        ('run.name = "a/b"', "run.name = 'a/b': String should match"),
        ("data.mix.a = -1", "data.mix = {'a': -1}: 'a': Input should be greater than 0"),
        ('data.mix."/" = 1', "data.mix = {'/': 1}: '/': '[key]': String should match"),
        ('run.dir = "a\\u0000b"', r"run.dir = 'a\x00b': expected printable text"),
        (r'"\n" = 1', r"'\n' = 1: unknown key. Or is the config of another version?"),
        ("model.router = kern", "is not TOML: "),
        ("train.max_steps = " + "9" * 5000, "is not TOML: "),
        ("train.max_steps = " + "[" * 5000, "is not TOML: "),
        ("a" + ".a" * 5000 + " = 1", "is not TOML: "),
        ("[data.mix" + ".a" * 990 + "]\na" + ".a" * 990 + " = 1", "data.mix = "),
        ("a" + ".a" * 19 + " = 1", "a" + ".a" * 19 + " = 1: unknown key"),
    ],
)
def test_a_wrong_line_of_a_file(write, line, names):
    file = write(line)
    # what is wrong in the file stays wrong under an override
    text = message(file, "--model.n_layer=2")
    assert text.startswith(f"{file}") and names in text and text.count("\n") == 0


@pytest.mark.parametrize(
    ("encoding", "fault"),
    [
        ("utf-8", ""),
        ("utf-8-sig", ""),  # Windows' byte order mark
        ("utf-16", "is not UTF-8 at byte 0: convert it with iconv -f UTF-16 -t UTF-8"),
        ("latin-1", "is not UTF-8 at byte 4: convert it with iconv -f ENCODING -t UTF-8"),
    ],
)
def test_files_as_editors_save_them(tmp_path, encoding, fault):
    file = tmp_path / "a.toml"
    file.write_bytes("# größe\r\n[model]\r\nn_layer = 3\r\n".encode(encoding))
    if fault:
        assert message(file) == f"{file} {fault}"
    else:
        assert load(file).model.n_layer == 3


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("--train.max_steps=1e3", "train.max_steps = 1000.0: Input should be a valid integer"),
        ("--train.max_steps=" + "9" * 5000, f" = '{'9' * 199}…: Input should be a valid integer"),
        (f"--optim.lr={'a' * 198}", f" = '{'a' * 198}': Input should be a valid number"),
        ("--data.mix={b = inf}", "data.mix = {'b': inf}: 'b': "),
        ("--data.mix={b: 1}", "data.mix = '{b: 1}': "),
        ("--train.max_steps=1\nrun.seed = 2", r"train.max_steps = '1\nrun.seed = 2': "),
        ("--run.dir=caf\udce9", r"run.dir = 'caf\udce9': "),  # an argument that is not UTF-8
        ("--optim.lr", "--optim.lr has no value; write --optim.lr=VALUE"),
    ],
)
def test_a_wrong_override(write, override, names):
    text = message(write(), override)
    assert text.startswith("command line: ") and names in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (".", "Is a directory; name a TOML file, such as config/quickstart.toml"),
        ("zzzz", "No such file or directory; name a TOML file, such as config/quickstart.toml"),
        ("rit.toml", "No such file or directory; did you mean FOLDER/right.toml?"),
        ("quickstrt", "No such file or directory; did you mean config/quickstart.toml?"),
        ("right.toml", "Permission denied; give yourself the right to read it"),
    ],
)
def test_a_file_that_cannot_be_read_names_those_nearby(write, tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(REPO_ROOT)
    write(name="right.toml")
    if "Permission" in says:  # root may read all
        denied = PermissionError(13, "Permission denied")
        monkeypatch.setattr("pathlib.Path.read_bytes", mock.Mock(side_effect=denied))
    path = tmp_path / name
    assert message(path) == f"{path}: {says}".replace("FOLDER", str(tmp_path))


def test_all_errors_are_reported_at_once_with_their_source(write):
    file = write(
        "model.n_layer = 0\nmodel.n_heads = 2\ntrain.dtype = 16\nsweep.optim.lr = [1e-3, 'big']\n"
    )
    assert keys_of(message(file, "--log.interval=0")) == [
        f"{file}: model.n_layer",
        f"{file}: model.n_heads",
        f"{file}: train.dtype",
        "command line: log.interval",
        f"{file} [sweep]: optim.lr",
    ]
    together = message(
        write(), "--model.top_k=65", "--model.n_embd=7", "--train.branch_step=3", world_size=7
    )
    named = ["model.n_embd", "model.top_k", "train.batch_size", "train.branch_step"]
    assert keys_of(together) == named


# ---- settings that are wrong together
BRANCH = "--train.branch_from=./x/ --optim.schedule=wsd"


# overrides, and on how many ranks: the whole message
CLASHES = """
--model.n_embd=100
    model.n_embd = 100 does not divide into model.n_head = 12 heads of equal width; set
    --model.n_embd=108
--model.n_embd=36 --model.pos=rope
    model.n_embd = 36 does not divide into model.n_head = 12 heads of even width, which rope
    needs; set --model.n_embd=48
--model.n_kv_head=64
    model.n_kv_head = 64 does not divide n_head = 12; set --model.n_kv_head=4
--model.n_expert=4
    model.top_k = 8 is more than model.n_expert = 4; set --model.top_k=4 or
    --model.n_expert=8
--model.gated=true --model.bias=true
    model.gated = true has no biases; set --model.bias=false or --model.gated=false
--model.gated=true --model.bias=true --model.router=dense
    model.gated = true has no biases; set --model.bias=false or --model.gated=false
--model.gate_norm=2 --model.gate_scale=0.5
    model.gate_norm = 2.0 and model.gate_scale = 0.5 clash; set --model.gate_scale=1 or
    --model.gate_norm=0
--model.n_hash_layer=13
    model.n_hash_layer = 13 is more than model.n_layer = 12; set --model.n_hash_layer=12
--model.n_hash_layer=1 --model.router=dense
    model.n_hash_layer = 1: a dense model has no experts; set --model.n_hash_layer=0
--model.router_groups=6
    model.router_groups = 6 does not divide model.n_expert = 64; set --model.router_groups=2
--model.router_groups=4 --model.router_group_k=5 --model.top_k=1
    model.router_group_k = 5 is more than model.router_groups = 4; set
    --model.router_group_k=4
--model.router_group_k=2
    model.router_group_k = 2 is more than model.router_groups = 1; set
    --model.router_group_k=1
--model.router_group_k=2 --model.n_hash_layer=1 --train.bias_update=quantile
    model.router_group_k = 2 is more than model.router_groups = 1; set
    --model.router_group_k=1
--model.router_groups=16 --model.router_group_k=1
    model.top_k = 8 is more than the 4 experts of model.router_group_k = 1 groups of 4; set
    --model.router_group_k=2
--model.router_groups=4 --model.router_group_k=2 --model.n_hash_layer=1
    model.router_groups = 4: the layers of model.n_hash_layer = 1 choose no experts by
    scores; set --model.n_hash_layer=0
--model.router_groups=4 --model.router_group_k=2 --train.bias_update=quantile
    train.bias_update = quantile: model.router_groups = 4 chooses experts by no one
    threshold, whose quantile it needs; set --train.bias_update=sign
--model.n_hash_layer=12 --train.balance_loss_coef=1
    model.n_hash_layer = 12 leaves no loads that train.balance_loss_coef, bias_update or
    bias_update_rate could balance; leave them out or set --model.n_hash_layer=11
--train.bias_update=quantile --train.bias_update_rate=0.1
    train.bias_update_rate = 0.1 is no setting of train.bias_update = quantile; set
    --train.bias_update_rate=0 or --train.bias_update=sign
--train.bias_update=quantile --model.top_k=64
    train.bias_update = quantile: each token takes all experts anyway; set
    --train.bias_update=sign
--train.batch_size=24 --train.micro_batch_size=8 on 4 ranks
    train.batch_size = 24 is not a multiple of train.micro_batch_size = 8 times 4 rank(s) =
    32; set --train.batch_size=32 or --train.micro_batch_size=2
--train.batch_size=100 on 8 ranks
    train.batch_size = 100 is not a multiple of train.micro_batch_size = 32 times 8 rank(s)
    = 256; set --train.batch_size=256
--optim.warmup_steps=60_000
    optim.warmup_steps = 60000 is more than the 50000 steps before the end; set
    --optim.warmup_steps=5000
--optim.schedule=wsd --optim.warmup_steps=40_001
    optim.warmup_steps = 40001 is more than the 40000 steps before the decay; set
    --optim.warmup_steps=4000
--eval.tasks=a --eval.interval=50 --eval.task_interval=120
    eval.task_interval = 120 is not a multiple of eval.interval = 50, and tasks are scored
    at evaluations; set --eval.task_interval=150
--optim.transfer=mup --optim.base_hidden=9
    optim.transfer = mup: optim.base_width = 0 is no width; set it to the model.n_embd at
    which optim.lr was tuned, as --optim.base_width=128, or set --optim.transfer=none
--optim.transfer=mup --optim.base_width=64
    optim.transfer = mup: optim.base_hidden = 0 is no width; set it to the (top_k +
    n_shared_expert) * expert_hidden at which optim.lr was tuned, as --optim.base_hidden=256
    if its ratio to n_embd was this model's
--optim.transfer=mup --optim.base_width=64 --optim.base_hidden=128 --optim.name=muon
    optim.base_hidden = 128 of optim.base_width = 64 is another ratio than 3072 of 768, and
    Muon's rates are known for one ratio; set model.expert_hidden to keep it,
    --optim.base_hidden=256 if it was kept, or --optim.name=adamw
--optim.transfer=mup optim.base_width=64 optim.base_hidden=9 optim.name=muon model.expert_hidden=1
    optim.base_hidden = 9 of optim.base_width = 64 is another ratio than 8 of 768, and Muon's
    rates are known for one ratio; set model.expert_hidden to keep it, or --optim.name=adamw
--optim.transfer=mup --optim.base_width=100 --optim.base_hidden=9
    optim.base_width = 100 does not divide into heads of this model's size, model.n_embd /
    model.n_head = 64; set --optim.base_width=128 or another model.n_head
--optim.transfer=mup --optim.base_width=64 --optim.base_hidden=256 --train.init_from=x
    train.init_from = x: optim.transfer = mup scales random initial weights, and these are
    trained; set --optim.transfer=none
--optim.transfer=mup --optim.base_width=64 --optim.base_hidden=256 --model.gate_norm=2
    model.gate_norm = 2: optim.transfer = mup makes all gates count as gates of norm
    sqrt(top_k); set --model.gate_norm=0, and --model.gate_scale for a factor on that norm
--train.branch_from=x
    train.branch_from = x needs a decay that may follow; set --optim.schedule=wsd
--train.branch_step=5
    train.branch_step = 5 needs a trunk; name it (train.branch_from), or set
    --train.branch_step=0
--train.branch_from=x --optim.schedule=wsd --optim.decay_fraction=0.0
    optim.decay_fraction = 0: a branch decays a part; set --optim.decay_fraction=0.2
--train.branch_from=x --optim.schedule=wsd --optim.decay_fraction=1 --optim.warmup_steps=0
    optim.decay_fraction = 1: a branch decays a part; set --optim.decay_fraction=0.2
--train.branch_from=x --optim.schedule=wsd --train.branch_step=50_000
    train.branch_step = 50000 is not step 40000, where the decay begins
    (optim.decay_fraction = 0.2 of train.max_steps = 50000); set --train.branch_step=40000
--train.branch_from=x --optim.schedule=wsd --optim.decay_fraction=0.3 --train.branch_step=5000
    train.branch_step = 5000 is not step 35000, where the decay begins
    (optim.decay_fraction = 0.3 of train.max_steps = 50000); set --train.branch_step=35000
--train.branch_from=x --optim.schedule=wsd --train.max_steps=600 --train.branch_step=400
    optim.warmup_steps = 500 is more than the 400 steps before the decay; set
    --optim.warmup_steps=40
--train.expert_parallel=48 --model.n_expert=64
    model.n_expert = 64 does not divide among train.expert_parallel = 48 ranks; set
    --train.expert_parallel=16
--data.mix={a=1} --data.name=b
    data.name = b would change nothing beside data.mix = a 1; add --data.mix={} to train on
    that set alone, or leave data.name out
"""
CLASHES = {
    case: " ".join(says.split())
    for case, says in re.findall(r"(?m)^(--.+)\n((?: +.+\n)+)", CLASHES)
}


@pytest.mark.parametrize("case", CLASHES)
def test_settings_that_clash_and_every_remedy_works(write, case):
    overrides, _, ranks = case.partition(" on ")
    world_size = int(ranks.partition(" ")[0] or 1)
    text = message(write(), *overrides.split(), world_size=world_size)
    assert text == CLASHES[case]
    for remedy in re.findall(r"--\S+=[^\s,;]+", text):
        load(write(), [*overrides.split(), remedy], world_size)


# settings that are just valid: the same, one step further
OF_EXPERTS = "--model.n_expert=1 --model.gate_norm=2 --model.gate_scale=2 "
OF_EXPERTS += "--train.bias_update=quantile --train.bias_update_rate=1 --model.router_groups=3"
MUP = "--optim.transfer=mup --optim.base_width=64 --optim.base_hidden=64 --model.gate_norm=2"
JUST_VALID = {
    # a sweep over routers has a dense point, which keeps the keys of experts
    f"--model.router=dense {OF_EXPERTS}": OF_EXPERTS,
    f"--model.router=dense {MUP}": MUP,
    "--model.n_embd=36": "--model.n_embd=37",  # odd width of a head, learned positions
    "--model.n_kv_head=12": "--model.n_kv_head=13",
    "--train.max_steps=500 --optim.warmup_steps=500": "--train.max_steps=500 "
    "--optim.warmup_steps=501",
    "--model.n_hash_layer=12": "--model.n_hash_layer=13",
    "--train.bias_update=quantile --train.balance_loss_coef=1 --model.n_hash_layer=11": ""
    "--train.bias_update=quantile --train.balance_loss_coef=1 --model.n_hash_layer=12",
    "--optim.schedule=wsd --optim.warmup_steps=40_000": "--optim.schedule=wsd "
    "--optim.warmup_steps=40_001",
    f"{BRANCH} --train.branch_step=49_999": f"{BRANCH} --train.branch_step=50_000",
    # 0.29 * 100 is less than 29 in floating point
    f"{BRANCH} --optim.warmup_steps=9 --train.max_steps=100 --train.branch_step=71": ""
    f"{BRANCH} --optim.warmup_steps=9 --train.max_steps=100 --train.branch_step=100",
    "--eval.interval=50 --eval.task_interval=120": "--eval.interval=50 --eval.task_interval=120 "
    "--eval.tasks=sciq",
    "--data.mix={a=1}": "--data.mix={a=0}",
    "--model.router_groups=16 --model.router_group_k=2": "--model.router_groups=16 "
    "--model.router_group_k=1",
    # groups that leave out no expert
    "--model.router_groups=4 --model.router_group_k=4 --model.n_hash_layer=1 "
    "--train.bias_update=quantile": "--model.router_groups=4 --model.router_group_k=3 "
    "--model.n_hash_layer=1 --train.bias_update=quantile",
    "--model.n_expert=64 --train.expert_parallel=64": "--model.n_expert=64 "
    "--train.expert_parallel=65",
    "--train.expert_parallel=3 --model.router=dense": "--train.expert_parallel=3",
}


@pytest.mark.parametrize("valid", JUST_VALID)
def test_settings_that_are_just_valid(write, valid):
    load(write(), valid.split())
    assert message(write(), *JUST_VALID[valid].split())


@pytest.mark.parametrize(
    "line, step, fraction",
    [
        ("train.branch_step = 802", 802, 0.2),
        ("sweep.train.branch_step = [702]", 702, 301 / 1003),
    ],
)
def test_a_branch_from_where_its_decay_starts_keeps_its_fraction(write, line, step, fraction):
    """It is derived from a step elsewhere, and only then."""
    steps = ["--train.max_steps=1003", "--optim.warmup_steps=1"]
    file = write(line)
    (point,) = sweep_points(file, [*BRANCH.split(), *steps, "--run.seed=3"])
    config = load(file, point)
    assert (config.optim.decay_fraction, config.train.branch_from) == (fraction, "x")
    assert config.run.name == f"x-{step}to1003"  # a branch has its trunk's seed


# ---- names of runs
@pytest.mark.parametrize(
    "stem, name, group",
    [
        ("quick.start-1", "quick.start-1-kern", "quick.start-1"),
        ("my config!", "my-config-kern", "my-config-"),
        ("настройки", "kern", "настройки"),
        ("..x", "x-kern", "..x"),
        ("-x", "x-kern", "-x"),
        ("a\nb", "a-b-kern", "a-b"),
        ("caf\udce9", "caf-kern", "caf-"),
    ],
)
def test_name_and_group_from_any_file_name_can_be_written_and_read(write, stem, name, group):
    config = load(write(name=f"{stem}.toml"))
    assert (config.run.name, config.log.group) == (name, group)
    assert load(write(dumps(config), "config.toml")) == config


@pytest.mark.parametrize(
    ("end", "says"),
    [
        ("[run]", "empty: it has no run.name, optim.eps, log.group, which every run's has."),
        ("[log]", "cut short: it has no log.group, which every run's has."),
    ],
)
def test_a_recorded_config_that_lost_its_end(write, end, says):
    """A file with fewer keys would be another model, by its defaults."""
    file = write(dumps(load(write())).partition(end)[0], "config.toml")
    with pytest.raises(ConfigError) as caught:
        load_recorded(file)
    assert str(caught.value).startswith(f"{file}: {says} Put back")


# ---- help and the command line
TYPES = {
    "train.dtype": "one of auto, float16, bfloat16, float32",
    "optim.decay_fraction": "number >= 0, <= 1",
    "run.seed": "integer >= 0, < 4294967296",
    "optim.lr": "number > 0",
    "data.name": "string matching ^[A-Za-z0-9_][A-Za-z0-9._-]*$",
    "train.deterministic": "boolean",
}


def test_help_lists_every_key_with_type_default_range_and_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        from_command_line(["no_such_file.toml", "--model.router=x", "--help"])
    text, err = capsys.readouterr()
    assert caught.value.code == 0 and not err and text.startswith("usage: python train.py FILE")
    assert max(map(len, text.splitlines())) <= 120
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == list(SECTIONS)
    entries = re.findall(r"(?m)^  --(\S+) +(\S+) +(.+(?:\n {9,}.+)*)", text)
    types = {}
    for (key, default, meaning), (name, schema) in zip(entries, KEYS.items(), strict=True):
        description, _, types[key] = " ".join(meaning.split()).rpartition(" (")
        wanted = (name, schema["default"], schema["description"])
        assert (key, json.loads(default), description) == wanted
    assert TYPES.items() <= {key: type_.removesuffix(")") for key, type_ in types.items()}.items()


def test_every_router_can_be_chosen():
    assert KEYS["model.router"]["enum"] == list(ROUTERS)


def test_a_formula_is_a_router(tiny_file):
    """It names the run; train.py refuses one without meaning before it writes anything."""
    config = load(tiny_file, ["--model.router=tanh, post=l2 over topk", "--run.name="])
    assert config.run.name == "tiny-tanh-post-l2-over-topk"
    with pytest.raises(RunError, match="model.router: norm 'l9' is not one of"):
        plan_run(load(tiny_file, ["--model.router=tanh, post=l9"]), None, None)


@pytest.mark.parametrize("router", ["softmax-renorm", "tanh, post=l2 over topk"])
def test_a_router_without_gradient_is_warned_of(tiny_file, capsys, router):
    overrides = [f"--model.router={router}", "--model.top_k=1"]
    plan_run(load(tiny_file, overrides), None, None)
    warning = capsys.readouterr().out
    assert warning.count("warning: model.top_k = 1 with") == 1
    for remedy in re.findall(r"--model\.\w+=\w+", warning):
        plan_run(load(tiny_file, [*overrides, remedy]), None, None)
        assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    ["{} --model.router=tanh --run.seed=3", "--model.router tanh --fresh {} --run.seed 3"],
)
def test_ways_to_write_a_command_line(write, command):
    config = from_command_line(command.format(write()).split())
    assert (config.model.router, config.run.seed) == ("tanh", 3)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "one config file is needed, found none"),
        (
            "a.toml model.router=kern",
            "found 2: a.toml, model.router=kern (overrides start with --)",
        ),
        ("FILE --optim.lr", "optim.lr = '': Input should be a valid number"),
        ("FILE --train.micro_batch_size=256", "train.batch_size = 256 is not a multiple of"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_only_rank_0_prints(
    write, capsys, monkeypatch, tmp_path, command, says, rank
):
    file = tmp_path / "error.json"
    environment = {"WORLD_SIZE": "2", "RANK": rank, "TORCHELASTIC_ERROR_FILE": str(file)}
    monkeypatch.setattr(os, "environ", os.environ | environment)
    with pytest.raises(SystemExit) as caught:
        from_command_line(command.replace("FILE", str(write())).split())
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    said = ProcessFailure(1, 7, 2, str(file)).message["message"]  # as torchrun reads it
    assert says in said and err == (f"{said}\n" if rank == "0" else "")


@pytest.mark.parametrize("name, least", [("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)])
def test_a_variable_that_torchrun_never_sets(capsys, monkeypatch, name, least):
    """Each process says so, before the file is read."""
    for text in (str(least), "999999"):
        monkeypatch.setenv(name, text)
        assert read_rank_variable(name) == int(text)
    for text in ("", "x", str(least - 1), "1000000", "1.0", "+1", " 1", "٣", "²"):
        monkeypatch.setenv(name, text)
        with pytest.raises(SystemExit, match="2"):
            from_command_line(["no_such_file.toml"])
        said = f"error: {name} = {text!r} in the environment: expected a whole number of at least "
        assert capsys.readouterr().err.startswith(f"{said}{least}, ")


def test_commands_of_a_refusal_keep_the_overrides(tmp_path):
    """Each is read as a shell and its program would read it."""
    file = tmp_path / "a file.toml"
    file.write_text('sweep."run.seed, optim.lr" = [[1, 1e-3], [2, 2e-3]]')
    given = ["--train.max_steps=600", "--run.dir=it's mine", "--model.router=[dense,kern]"]
    error = message(file, *given)
    says, *lines = error.splitlines()
    wanted = "one run needs one value of each axis: run.seed, optim.lr, model.router"
    assert says == f"{file}: {wanted}"
    words = {}
    for line in lines:
        title, _, command = line.strip().partition(": ")
        words[title] = shlex.split(command)
    first = [*given[:2], "--run.seed=1", "--optim.lr=0.001", "--model.router=dense"]
    assert words == {
        "train all": ["python", "-m", "scripts.sweep", str(file), *given],
        "train one": ["python", "train.py", str(file), *first],
        "plan one": ["python", "-m", "scripts.plan", str(file), *first],
    }
    assert sweep_points(file, given)[0] == first
