"""configure/: values and their precedence, error messages, sweeps, writing a Config as TOML."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from configure import Config, ConfigError, differences, dumps, from_command_line, load, sweep_points
from configure.load import CHECKOUT, help_text
from configure.schema import FILE_NAME, KEYS, ROUTER_FILE, SECTIONS, read_router_names
from router import ROUTERS

CONFIGS = Path(__file__).parents[1] / "config"


@pytest.fixture
def write(tmp_path):
    def write(text="", name="x.toml"):
        file = tmp_path / name
        file.write_text(text, encoding="utf-8")
        return file

    return write


def message(path, *overrides, world_size=1):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides, world_size)
    return str(caught.value)


# ---- values and their precedence
def test_defaults_then_file_then_overrides(write):
    file = write("[optim]\nlr = 1e-3\n[model]\nn_layer = 3\n")
    config = load(file, ["--model.n_layer=5", "model.router=tanh", "--model.router=sigmoid"])
    assert config.optim.lr == 1e-3  # file over default
    assert config.model.n_layer == 5  # override over file
    assert config.model.router == "sigmoid"  # later override over earlier, dashes optional
    assert config.model.n_head == Config().model.n_head


def test_override_text_is_read_by_the_type_of_its_key(write):
    config = load(write(), ["--train.max_steps=10_000", "--optim.lr=1", "--run.name=7", "--run.dir=a=b"])
    assert config.train.max_steps == 10_000 and (config.run.name, config.run.dir) == ("7", "a=b")
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    for word, value in (("true", True), ("yes", True), ("True", True), ("No", False), ("FALSE", False)):
        assert load(write(), [f"--train.deterministic={word}"]).train.deterministic is value


def test_compile_takes_true_and_false_of_older_configs(write):
    assert load(write()).train.compile == "auto"
    for word, value in (("true", "on"), ("false", "off"), ('"auto"', "auto"), ('"on"', "on"), ('"off"', "off")):
        assert load(write(f"train.compile = {word}")).train.compile == value
    for word, value in (("true", "on"), ("True", "on"), ("no", "off"), ("on", "on"), ("auto", "auto")):
        assert load(write(), [f"--train.compile={word}"]).train.compile == value


def test_config_is_frozen(write):
    config = load(write())
    with pytest.raises(ValidationError, match="frozen"):
        config.model.n_layer = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.model = config.model


# ---- one setting wrong
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train.lr = 1e-3", "train.lr: unknown key; did you mean 'optim.lr'?"),
        ("model.n_heads = 8", "model.n_heads: unknown key; did you mean 'model.n_head'?"),
        ("evall.interval = 8", "evall.interval: unknown key; did you mean 'eval.interval'?"),
        ("n_layer = 8", "n_layer: unknown key; did you mean 'model.n_layer'?"),
        ("[optimm]", "optimm: unknown key; did you mean 'optim'?"),
        ("xyzzy = 8", "xyzzy: unknown key"),
        ("model.router.name = 8", "model.router.name: unknown key"),
        ("train = 3", "train: found 3, expected a section: [train] in a file, or --train.KEY=VALUE"),
        ("model.n_layer = true", "model.n_layer: found True (bool), expected int >= 1"),
        ("model.n_layer = 2.0", "model.n_layer: found 2.0 (float), expected int >= 1"),
        ("model.n_layer = -1", "model.n_layer: found -1 (int), expected int >= 1"),
        ("model.vocab_size = 65537", "model.vocab_size: found 65537 (int), expected int >= 2, <= 65536"),
        ("model.dropout = 1.0", "model.dropout: found 1.0 (float), expected finite float >= 0, < 1"),
        ('optim.lr = "1e-3"', "optim.lr: found '1e-3' (str), expected finite float > 0"),
        ("optim.lr = true", "optim.lr: found True (bool), expected finite float > 0"),
        ("optim.lr = nan", "optim.lr: found nan (float), expected finite float > 0"),
        ("optim.lr = inf", "optim.lr: found inf (float), expected finite float > 0"),
        ("train.deterministic = 1", "train.deterministic: found 1 (int), expected bool, true or false"),
        ("train.compile = 1", "train.compile: found 1 (int), expected one of auto, on, off"),
        ("log.project = 1", "log.project: found 1 (int), expected printable string"),
        ('model.router = "kernel"', "model.router: found 'kernel' (str), expected one of dense, "),
        ('model.router = "kernel"', "did you mean 'kern'?"),
        ('train.dtype = "fp16"', "expected one of auto, float16, bfloat16, float32"),
        ('run.name = "a/b"', "run.name: found 'a/b' (str), expected string of letters, digits, '.', '_' and '-'"),
        ('run.name = ".."', "run.name: found '..'"),
        ('data.name = ""', "data.name: found ''"),
        ('run.dir = "a\\u0000b"', r"run.dir: found 'a\x00b' (str), expected printable string"),
        (r'"\n" = 1', r"'\n': unknown key"),
    ],
)
def test_a_wrong_line_of_a_file(write, line, says):
    file = write(line)
    text = message(file)
    assert text.startswith(f"{file}: 1 error\n  {file}: ")
    assert says in text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("--train.lr=1e-3", "command line: train.lr: unknown key; did you mean 'optim.lr'?"),
        (
            "--data.mix.books=1",
            "command line: data.mix.books: data.mix is set as a whole, as --data.mix='{books = 0.5,",
        ),
        ("--train.max_steps=1e3", "command line: train.max_steps: found 1000.0 (float), expected int >= 1"),
        ("--train.max_steps=", "command line: train.max_steps: found '' (str), expected int >= 1"),
        ("--train.deterministic=maybe", "train.deterministic: found 'maybe' (str), expected bool, true or false"),
        ("--train.compile=maybe", "command line: train.compile: found 'maybe' (str), expected one of auto, on, off"),
        ("--model.router=Kern", "command line: model.router: found 'Kern' (str), expected one of dense, "),
        ("--train=3", "command line: train: found 3, expected a section"),
        ("--train.max_steps=1\nrun.seed = 2", r"train.max_steps: found '1\nrun.seed = 2' (str), expected int >= 1"),
        ("--run.dir=caf\udce9", r"run.dir: found 'caf\udce9' (str), expected"),  # an argument that is not UTF-8
    ],
)
def test_a_wrong_override(write, override, says):
    assert says in message(write(), override)


def test_all_errors_are_reported_at_once_with_their_source(write):
    file = write("[model]\nn_layer = 0\nn_heads = 2\n[train]\ndtype = 16\n[sweep]\noptim.lr = [1e-3, 'big']\n")
    text = message(file, "--log.interval=0")
    lines = text.splitlines()
    assert lines[0] == f"{file} --log.interval=0: 5 errors"
    named = [[f"  {file}", f"{key}"] for key in ("model.n_layer", "model.n_heads", "train.dtype")]
    named += [[f"  {file} [sweep]", "optim.lr"], ["  command line", "log.interval"]]
    assert [line.split(": ")[:2] for line in lines[1:]] == named


def test_a_wrong_line_stays_wrong_under_an_override(write):
    assert "n_layer" in message(write("model.n_layer = 0"), "--model.n_layer=2")


def test_bad_toml_names_file_and_line(write):
    file = write("[model]\nrouter = kern\n")
    assert re.search(rf"{re.escape(str(file))} is not TOML: .*line 2.*strings need quotes", message(file))
    file.write_bytes(b"[model]\n\xff\xfe")
    assert f"{file} is not TOML" in message(file)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000])
def test_values_that_tomllib_cannot_read(write, value):
    assert "is not TOML: " in message(write(f"train.max_steps = {value}"))
    text = message(write(), f"--train.max_steps={value}")
    assert f"train.max_steps: found '{value[:199]}… (str), expected int" in text


def test_missing_file_names_those_nearby(write, tmp_path, monkeypatch):
    write(name="right.toml")
    assert str(tmp_path / "right.toml") in message(tmp_path / "wrong.toml")
    assert f"{tmp_path}: Is a directory; found nearby: " in message(tmp_path)
    monkeypatch.chdir(CONFIGS.parent)
    for typo in ("quickstart.toml", "config/quickstart.tml", "config/quikstart.toml"):
        assert message(typo).endswith(f"{typo}: No such file or directory; did you mean config/quickstart.toml?")
    assert "nowhere/x.toml: No such file or directory; found nearby: config/125m.toml, " in message("nowhere/x.toml")
    monkeypatch.chdir(tmp_path)
    assert f"; start from the checkout: cd {CHECKOUT}" in message("config/quickstart.toml")


# ---- settings that are wrong together


BRANCH = "--train.branch_from=x --optim.schedule=wsd"


@pytest.mark.parametrize(
    ("overrides", "world_size", "says", "remedies"),
    [
        ("--model.n_embd=100", 1, "model.n_embd = 100 does not divide into model.n_head = 12", 1),
        ("--model.n_embd=36 --model.pos=rope", 1, "heads of even width, which rope needs", 1),
        ("--model.n_expert=4", 1, "model.top_k = 8 is more than model.n_expert = 4", 2),
        ("--train.micro_batch_size=48", 4, "train.micro_batch_size = 48 times 4 rank(s) = 192", 2),
        ("--train.batch_size=100", 8, "train.batch_size = 100 is not a multiple of", 1),
        ("--optim.warmup_steps=60_000", 1, "optim.warmup_steps = 60000 is more than train.max_steps = 50000", 1),
        ("--optim.schedule=wsd --optim.warmup_steps=40_001", 1, "goes beyond step 40000, where the decay begins", 1),
        ("--train.branch_from=x", 1, "train.branch_from = x needs a decay that may follow", 1),
        ("--train.branch_step=5", 1, "train.branch_step = 5 needs a trunk", 1),
        (f"{BRANCH} --optim.decay_fraction=0.0", 1, "which is nothing here", 1),
        (f"{BRANCH} --train.branch_step=50_000", 1, "is not before train.max_steps = 50000", 1),
        (f"{BRANCH} --train.branch_step=45_000 --optim.decay_fraction=0.2", 1, "begins at step 40000", 2),
    ],
)
def test_settings_that_clash_and_every_remedy_works(write, overrides, world_size, says, remedies):
    file, overrides = write(), overrides.split()
    text = message(file, *overrides, world_size=world_size)
    assert says in text and ": 1 error\n" in text
    found = re.findall(r"--\S+=\S+", text.splitlines()[1])
    assert len(found) == remedies
    for remedy in found:
        load(file, [*overrides, remedy], world_size)


def test_two_settings_of_a_branch_give_the_third(write):
    file = write("[train]\nmax_steps = 777\n[optim]\nschedule = 'wsd'\ndecay_fraction = 0.15\nwarmup_steps = 0\n")
    for override, step, fraction in (("max_steps=777", 660, 0.15), ("branch_step=600", 600, 177 / 777)):
        config = load(file, ["--train.branch_from=runs/x", f"--train.{override}"])
        assert (config.train.branch_step, config.optim.decay_fraction) == (step, fraction)
        assert config.run.name == f"x-{step}to777" and config.optim.decay_start(777) == step
        assert load(write(dumps(config), "again.toml")) == config


def test_settings_that_do_not_clash(write):
    file = write()
    load(file, ["--model.router=dense", "--model.n_expert=1"])  # dense has no experts to choose from
    load(file, ["--model.n_embd=36"])  # odd width of a head, learned positions
    load(file, ["--model.n_expert=8"])  # top_k = n_expert
    load(file, ["--train.max_steps=500"])  # warm-up all the way
    load(file, ["--model.router=dense", "--train.balance_loss_coef=0.01"])  # dense has none, so a sweep may mix both


# ---- sweeps


SWEEP = '[sweep]\n"model.router" = ["dense", "kern"]\noptim.lr = [1e-3, 1]\n'


def test_sweep_points_are_the_product_in_file_order(write):
    file = write(SWEEP, "s.toml")
    points = sweep_points(file, ["--run.seed=1"])
    pairs = [("dense", "0.001"), ("dense", "1"), ("kern", "0.001"), ("kern", "1")]
    assert points == [["--run.seed=1", f"--model.router={router}", f"--optim.lr={lr}"] for router, lr in pairs]
    config = load(file, points[1])
    assert config.run.name == "s-dense-lr1-seed1"
    assert (config.model.router, config.optim.lr, config.run.seed) == ("dense", 1.0, 1)


def test_load_refuses_open_axes_and_names_both_commands(write):
    file = write(SWEEP)
    text = message(file)
    assert "sweeps model.router, optim.lr" in text
    assert f"python -m scripts.sweep {file}" in text
    command = re.search(r"python train.py (.*)", text)[1].split()
    assert command == [str(file), "--model.router=dense", "--optim.lr=0.001"]
    load(command[0], command[1:])
    assert "sweeps optim.lr," in message(file, "--model.router=kern")


def test_an_axis_wins_over_the_same_key_in_the_file(write):
    file = write('model.router = "tanh"\n[sweep]\n"model.router" = ["dense", "kern"]')
    assert "sweeps model.router" in message(file)
    assert len(sweep_points(file)) == 2


@pytest.mark.parametrize(
    ("sweep", "says"),
    [
        ("sweep = 3", "sweep: found 3, expected a section"),
        ("sweep.model = [{}]", "[sweep]: model: found {}, expected a section"),
        ('sweep."model.router" = []', "[sweep]: model.router: found [], expected a list of values"),
        ('sweep."model.router" = "kern"', "[sweep]: model.router: found 'kern', expected a list of values"),
        ('sweep."model.routr" = ["kern"]', "[sweep]: model.routr: unknown key; did you mean 'model.router'?"),
        ('sweep.router = ["kern"]', "[sweep]: router: unknown key; did you mean 'model.router'?"),
        ('sweep."model.router" = ["kern", "kernn"]', "[sweep]: model.router: found 'kernn'"),
        ("sweep.run.seed = [1, 2.5]", "[sweep]: run.seed: found 2.5 (float), expected int"),
    ],
)
def test_a_wrong_axis_fails_before_the_first_run(write, sweep, says):
    file = write(sweep)
    assert says in message(file, "--model.router=kern")  # even where the run itself does not need the axis
    with pytest.raises(ConfigError, match=re.escape(says)):
        sweep_points(file)


def test_a_point_that_clashes_fails_the_sweep_and_is_named(write):
    with pytest.raises(ConfigError, match=r"--model.top_k=65: 1 error"):
        sweep_points(write("sweep.model.top_k = [8, 65]"))


@pytest.mark.parametrize(
    "text, overrides",
    [("sweep.run.seed = [1, 1]", []), ("", ["--optim.lr=[1e-3,2e-3]"]), ("run.name = 'x'\nsweep.run.seed = [1, 2]", [])]
    + [('sweep."model.n_expert, model.top_k" = [[64, 16], [64, 32]]', [])],
    ids=["twice the same", "an axis of the command line", "a name is given", "linked keys"],
)
def test_points_never_share_a_folder(write, text, overrides):
    with pytest.raises(ConfigError, match=r"x.toml \[sweep\]: two points would write to runs/.*leave run.name unset"):
        sweep_points(write(text), overrides)


# ---- linked axes


LINKED = 'sweep."model.n_expert, model.top_k,model.expert_hidden" = [[32, 4, 768], [64, 8, 384], [256, 32, 96]]\n'


def test_linked_keys_take_their_values_row_by_row(write):
    file = write(LINKED + "sweep.data.name = ['books3', 'arxiv']", "g.toml")
    points = sweep_points(file)
    assert points[1] == ["--model.n_expert=32", "--model.top_k=4", "--model.expert_hidden=768", "--data.name=arxiv"]
    configs = [load(file, point) for point in points]
    shapes = [(c.model.n_expert, c.model.top_k, c.model.expert_hidden) for c in configs[::2]]
    assert shapes == [(32, 4, 768), (64, 8, 384), (256, 32, 96)]
    names = [f"g-kern-n_expert{n}-{text}" for n in (32, 64, 256) for text in ("books3", "arxiv")]
    assert [c.run.name for c in configs] == names


def test_linked_keys_are_overridden_together(write):
    file = write(LINKED)
    text = message(file)
    command = re.search(r"python train.py (.*)", text)[1].split()
    assert load(command[0], command[1:]).model.expert_hidden == 768
    text = message(file, "--model.top_k=2")
    assert "linked, but the command line sets only model.top_k" in text
    remedy = text.partition("; add ")[2].replace("VALUE", "16")
    assert load(file, ["--model.top_k=2", *remedy.split()]).model.n_expert == 16
    assert len(sweep_points(file, ["--model.top_k=2", *remedy.split()])) == 1


@pytest.mark.parametrize(
    ("axis", "says"),
    [
        ('"model.n_expert, model.top_k" = [[32, 4], [64]]', "found [64], expected lists of 2: [n_expert, top_k]"),
        ('"model.n_expert, model.top_k" = [[32, 4, 768]]', "found [32, 4, 768], expected lists of 2"),
        ('"model.n_expert, model.top_k" = [32, 4]', "found 32, expected lists of 2"),
        ('"model.n_expert, model.top_k" = 32', "found 32, expected a list of values"),
        ('"model.n_expert, model.top_k" = [[32, "4"]]', "model.top_k: found '4' (str), expected int"),
        ('"model.n_experts, model.top_k" = [[32, 4]]', "unknown key; did you mean 'model.n_expert'?"),
        ('"model.n_expert," = [[32, 4]]', "'': unknown key"),
        ('"model.n_expert" = [[32]]', "model.n_expert: found [32] (list), expected int"),
        ('"model.top_k, model.top_k" = [[4, 4]]', "model.top_k: found twice"),
        ('"model.top_k, run.seed" = [[4, 4]]\nsweep.run.seed = [1]', "run.seed: found twice (run.seed; model.top_k,"),
    ],
)
def test_a_wrong_linked_axis(write, axis, says):
    file = write(f"sweep.{axis}")
    text = message(file)
    assert f"{file} [sweep]: " in text and says in text


def test_a_run_that_is_shortened_has_a_shorter_warm_up(write, capsys):
    file = write("train.max_steps = 1000\noptim.warmup_steps = 200")
    for _ in range(2):
        assert load(file, ["--train.max_steps=150"]).optim.warmup_steps == 15
    note = "note: train.max_steps = 150 shortens optim.warmup_steps from 200 to 15\n"
    assert capsys.readouterr().err == note  # once
    assert load(write("train.max_steps = 130", "short.toml")).optim.warmup_steps == 13  # of the default of 500
    assert "optim.warmup_steps = 151 is more than" in message(file, "--train.max_steps=150", "--optim.warmup_steps=151")
    both = write("train.max_steps = 100\noptim.warmup_steps = 200", "both.toml")
    assert "optim.warmup_steps = 200 is more than train.max_steps = 100" in message(both)


def test_a_decay_without_a_schedule_that_has_one_is_noted(write, capsys):
    file = write("[sweep]\n'optim.schedule, optim.decay' = [['cosine', 'linear'], ['wsd', 'sqrt']]\n")
    assert len(sweep_points(file)) == 2
    assert capsys.readouterr().err == "note: optim.decay changes nothing with optim.schedule = cosine\n"


def test_torchrun_is_told_of_an_error(write, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        from_command_line([str(write("train.micro_batch_size = 32"))], world_size=7)
    assert capsys.readouterr().err == ""
    failure = ProcessFailure(3, 7, 2, str(tmp_path / "error.json"))
    assert "is not a multiple of train.micro_batch_size = 32 times 7 rank(s)" in str(failure.message)


# ---- seeds, and axes on the command line
def test_a_list_on_the_command_line_is_an_axis(write):
    file = write(SWEEP, "s.toml")
    points = sweep_points(file, ["--run.seed=[0, 1]", "--optim.lr=[0.5]", "--log.interval=3"])
    rows = [("dense", 0), ("dense", 1), ("kern", 0), ("kern", 1)]
    words = ("--log.interval=3", "--model.router={}", "--optim.lr=0.5", "--run.seed={}")
    assert [" ".join(point) for point in points] == [" ".join(words).format(*row) for row in rows]
    names = [load(file, point).run.name for point in points]
    assert names == ["s-dense-lr0.5", "s-dense-lr0.5-seed1", "s-kern-lr0.5", "s-kern-lr0.5-seed1"]
    assert len(sweep_points(file, ['--model.router=["kern"]'])) == 2
    with pytest.raises(ConfigError, match=r"command line: run.seed: found 'x' \(str\), expected int"):
        sweep_points(file, ['--run.seed=[0, "x"]'])
    with pytest.raises(ConfigError, match=r"command line: run.seed: found \[\], expected a list of values"):
        sweep_points(file, ["--run.seed=[]"])
    assert "command line: run.seed: found [0, 1] (list), expected int" in message(file, "--run.seed=[0, 1]")


def test_values_of_axes_are_in_the_name_also_where_the_file_has_them(write):
    axes = SWEEP + 'data.name = ["arxiv", "books3"]\nrun.seed = [0, 1]'
    file = write(f'data.name = "arxiv"\nrun.seed = 1\n{axes}', "s.toml")
    names = [load(file, point).run.name for point in sweep_points(file, ["--model.router=kern", "--optim.lr=1"])]
    assert names == [f"s-kern-lr1-{text}{end}" for text in ("arxiv", "books3") for end in ("-seed0", "")]


def test_router_and_seed_are_in_the_name_without_a_sweep(write):
    file = write("run.seed = 5")
    assert load(file).run.name == "x-kern"
    assert load(file, ["--model.router=softmax", "--run.seed=0", "--optim.lr=1"]).run.name == "x-softmax-seed0"
    assert load(file, ["--run.name=mine", "--run.seed=1"]).run.name == "mine"


@pytest.mark.parametrize(
    "stem, name",
    [("quick.start-1", "quick.start-1-kern"), ("my config!", "my-config-kern"), ("настройки", "kern")]
    + [("..x", "x-kern"), ("-x", "x-kern"), ("a\nb", "a-b-kern"), ("caf\udce9", "caf-kern")],
)
def test_name_and_group_from_any_file_name_can_be_written_and_read(write, stem, name):
    """The name is a safe folder."""
    config = load(write(name=f"{stem}.toml"))
    assert config.run.name == name and config.log.group and load(write(dumps(config), "config.toml")) == config


# ---- group
def test_group_is_the_files_name_for_every_point_and_stays_in_the_runs_own_file(write):
    file = write(SWEEP, "s.toml")
    configs = [load(file, point) for point in sweep_points(file)]
    assert {config.log.group for config in configs} == {"s"}
    assert load(write(dumps(configs[0]), "config.toml")) == configs[0]
    assert load(file, ["--model.router=kern", "--optim.lr=1", "--log.group=mine"]).log.group == "mine"


def test_a_key_that_is_younger_than_a_run_means_what_it_did(write):
    """In the run's own config.toml, which has every key of its day, but in no file that a user writes."""
    old = re.sub("spread = .*\n", "", dumps(load(write("[model]\nn_layer = 2"))))
    assert load(write(old, "config.toml")).eval.spread == "tokens"
    assert load(write(old, "config.toml"), ["--eval.spread=documents"]).eval.spread == "documents"
    assert load(write(dumps(load(write(old, "other.toml"))), "config.toml")).eval.spread == "documents"
    assert load(write("[model]\nn_layer = 2", "config.toml")).eval.spread == "documents"
    for coef, scope in ((0.1, "micro_batch"), (0, "global")):  # without a balance loss all scopes are the same
        new = dumps(load(write("[model]\nn_layer = 2"), [f"--train.balance_loss_coef={coef}"]))
        old = re.sub("balance_loss_scope = .*\n", "", new)
        assert load(write(old, "config.toml")).train.balance_loss_scope == scope


# ---- back to text


BY_TYPE = {
    "boolean": lambda schema: st.booleans(),
    "string": lambda schema: st.from_regex(schema.get("pattern", r"^[ -~éλ漢]{1,9}$"), fullmatch=True),
    "integer": lambda schema: st.integers(schema["minimum"], schema.get("maximum", 10**6)),
    "number": lambda schema: st.floats(
        schema.get("minimum", 0),
        schema.get("maximum", schema.get("exclusiveMaximum", 1e300)),
        exclude_min="exclusiveMinimum" in schema,
        exclude_max="exclusiveMaximum" in schema,
    ),  # fmt: skip
    "object": lambda schema: st.dictionaries(
        st.from_regex(FILE_NAME, fullmatch=True), st.floats(0, exclude_min=True, allow_infinity=False), max_size=3
    ),
}


@st.composite
def configs(draw):
    """Any values that are each valid alone, then fixed where they would clash."""
    values = {}
    for key, schema in KEYS.items():
        section, name = key.split(".")
        any_value = st.sampled_from(schema["enum"]) if "enum" in schema else BY_TYPE[schema["type"]](schema)
        values.setdefault(section, {})[name] = draw(any_value)
    values["run"]["name"] = values["run"]["name"] or "x"
    model, train = values["model"], values["train"]
    model["n_embd"] = 2 * model["n_head"]
    model["n_kv_head"] = min(model["n_kv_head"], 1)
    model["n_expert"] = model["top_k"]
    model["n_dense_layer"] %= model["n_layer"]
    model["bias"] &= not model["gated"]
    model["backend"] = "auto"  # triton has not all forms of experts
    model["gate_scale"] = 1.0 if model["gate_norm"] else model["gate_scale"]
    train["micro_batch_size"] = 1 + train["micro_batch_size"] % 1000
    train["batch_size"] = 3 * train["micro_batch_size"]
    train["max_steps"] += values["optim"]["warmup_steps"]
    values["optim"]["schedule"] = "cosine"  # another's warm-up must end before its decay, and a branch needs another
    train["branch_from"], train["branch_step"] = "", 0
    values["eval"]["task_interval"] *= values["eval"]["interval"]
    return Config.model_validate(values)


@settings(max_examples=10, deadline=None)
@given(config=configs())
def test_dumps_then_load_gives_the_same_config(tmp_path_factory, config):
    file = tmp_path_factory.getbasetemp() / "round_trip.toml"
    file.write_text(dumps(config), encoding="utf-8")
    again = load(file)
    assert again == config
    assert differences(config, again) == []


def test_any_text_survives_a_config_file():
    odd = 'quote " back \\ \u00e9 \U0001f41d # [x] = 1e-8'
    config = Config(log={"project": odd})
    assert tomllib.loads(dumps(config)) == config.model_dump()
    assert tomllib.loads(dumps(config))["optim"]["eps"] == 1e-8


def test_differences_names_what_changed(write):
    file = write("run.name = 'x'")
    old, new = load(file), load(file, ["--model.router=softmax", "--optim.lr=1e-3"])
    assert differences(old, new) == ["model.router: 'kern' -> 'softmax'", "optim.lr: 0.0006 -> 0.001"]
    assert differences(old, old) == []


# ---- help and the command line
def test_help_lists_every_key_with_default_and_meaning():
    text = help_text()
    flat = " ".join(text.split())
    for key, schema in KEYS.items():
        assert schema["description"] and " ".join(schema["description"].split()) in flat
        assert len(re.findall(rf"^  --{re.escape(key)} +\S", text, re.MULTILINE)) == 1
    assert re.search(r"^  --optim.lr +0.0006 +peak learning rate \(finite float > 0\)$", text, re.MULTILINE)
    assert "learned, rope" in flat
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == list(SECTIONS)
    assert max(map(len, text.splitlines())) <= 120


def test_every_router_can_be_chosen(tmp_path):
    """Names are parsed from router.py's source: a line added there is seen, anything but a dict literal is refused."""
    assert KEYS["model.router"]["enum"] == read_router_names() == list(ROUTERS)
    source, first = ROUTER_FILE.read_text(), '    "dense": None,'
    assert source.count(first) == 1
    copy = tmp_path / "router.py"
    copy.write_text(source.replace(first, '    "mine": RouterSpec("relu"),\n' + first))
    assert read_router_names(copy) == ["mine", *ROUTERS]
    copy.write_text("ROUTERS: dict = dict(dense=None)")
    with pytest.raises(LookupError, match="assigns no dict literal to ROUTERS"):
        read_router_names(copy)


@pytest.mark.parametrize(
    "command",
    ["FILE --model.router=tanh --run.seed=3", "--config FILE --model.router tanh --run.seed 3"]
    + ["--model.router tanh --run.seed=3 --config=FILE", "--run.seed 3 FILE --model.router=tanh"],
)
def test_ways_to_write_a_command_line(write, command):
    config = from_command_line(command.replace("FILE", str(write())).split())
    assert (config.model.router, config.run.seed) == ("tanh", 3)


@pytest.mark.parametrize("command", ["--help", "-h", "no_such_file.toml --model.router=x --help"])
def test_help_exits_with_0(capsys, command):
    with pytest.raises(SystemExit) as caught:
        from_command_line(command.split())
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and err == ""
    assert out.startswith("usage: python train.py FILE") and help_text() in out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "one config file is needed, found none"),
        ("a.toml b.toml", "one config file is needed, found 2: a.toml, b.toml"),
        ("a.toml model.router=kern", "(overrides start with --)"),
        ("a.toml --optim.lr", "--optim.lr has no value; write --optim.lr=VALUE"),
        ("a.toml --train.compile --optim.lr=1", "--train.compile has no value; write --train.compile=VALUE"),
        ("FILE --train.lr=1", "did you mean 'optim.lr'?"),
        ("FILE --train.micro_batch_size=100", "is not a multiple of"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_only_rank_0_prints(write, capsys, monkeypatch, command, says):
    argv = command.replace("FILE", str(write())).split()
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as caught:
            from_command_line(argv, world_size=2)
        out, err = capsys.readouterr()
        assert caught.value.code == 2 and out == ""
        assert says in err if rank == "0" else err == ""


# ---- the files we ship

PAPER_TABLE = {  # file -> layers, heads, width, learning rate; 1b3: configs/1-3B.yml of the DAPE repository
    "125m": (12, 12, 768, 6e-4),
    "350m": (24, 16, 1024, 3e-4),
    "1b3": (24, 16, 2048, 2e-4),
}


@pytest.mark.parametrize("name", PAPER_TABLE)
def test_shipped_files_match_the_papers_table(name):
    config = load(CONFIGS / f"{name}.toml", world_size=8)
    model, train, optim = config.model, config.train, config.optim
    assert (model.n_layer, model.n_head, model.n_embd, optim.lr) == PAPER_TABLE[name]
    assert (model.block_size, model.dropout, model.n_expert, model.top_k) == (512, 0.0, 64, 8)
    assert model.expert_hidden * model.top_k == 4 * model.n_embd  # equal active parameters with the dense model
    assert (train.batch_size, train.micro_batch_size) == (32 * 8, 32)
    assert (train.max_steps, train.dtype) == (50_000, "auto")
    assert (optim.beta1, optim.beta2) == (0.9, 0.95)
    assert (train.balance_loss_coef, train.z_loss_coef, train.bias_update_rate) == (0, 0, 0)


def test_quickstart_compares_dense_softmax_and_kern():
    names = [load(CONFIGS / "quickstart.toml", point).run.name for point in sweep_points(CONFIGS / "quickstart.toml")]
    assert names == ["quickstart-dense", "quickstart-softmax", "quickstart-kern"]
