"""nano.py: the losses of train.py, the text and settings of the quickstart, within 200 lines."""

import ast
import re
import subprocess
import sys
import sysconfig

import numpy as np
import pytest
import torch
from corpora import write_tree
from numerics import SEED, SHARE, assert_near, seeded, tolerance
from runs import REPO_ROOT, column, run

import configure
import nano
from data.bins import open_tokens
from data.encode import Encoder
from data.loader import Loader
from data.readers import read_documents
from data.sources import STDLIB_SKIPS, stdlib_inputs
from data.tokenizer import ByteTokenizer
from model import GPT
from router import KERN, Router

FILE = REPO_ROOT / "nano.py"
QUICKSTART = REPO_ROOT / "config/quickstart.toml"
SMALL = {
    "model.n_embd": 32,
    "model.block_size": 32,
    "model.n_expert": 32,
    "model.top_k": 4,
    "train.batch_size": 4,
    "train.max_steps": 50,
    "optim.warmup_steps": 20,
}


def rename(model):
    """The parameters of a model.GPT under the names of nano.GPT."""
    weights = {}
    for name, p in model.named_parameters():
        if name.startswith("blocks."):
            _, block, part, own = name.split(".", 3)
            layer = 2 * int(block) + (part in ("ln_2", "mlp"))
            if part.startswith("ln_"):
                own = f"norm.{own}"
            name = f"layers.{layer}.{own}".replace("experts.", "").replace("router.gamma", "gamma")
        weights[name.replace("ln_f", "norm")] = p.detach()
    return weights


@pytest.fixture
def small(monkeypatch, tmp_path, corpus):
    """Settings of a small KERN run of the quickstart on the tiny corpus; nano.py gets its sizes."""
    others = {
        "model.router": "kern",
        "data.name": "tiny",
        "data.dir": corpus,
        "run.dir": tmp_path,
        "run.seed": SEED,
        "train.micro_batch_size": 4,
        "train.device": "cpu",
        "train.checkpoint_interval": 5000,
        "eval.interval": 50,
        "eval.windows": 4,
        "log.interval": 1,
    }
    for key, value in SMALL.items():
        monkeypatch.setattr(nano, key.split(".")[1], value)
    return configure.load(QUICKSTART, [f"{key}={value}" for key, value in (SMALL | others).items()])


@pytest.mark.numerics
def test_the_losses_are_those_of_train(small):
    losses_of_train = column(run(small), "train/loss")
    model = nano.GPT()
    torch.manual_seed(small.run.seed)  # the weights that train.py began with
    model.load_state_dict(rename(GPT(small.model)))
    tokens = open_tokens(small.data.folders[0], "train")
    loader = Loader([tokens], small.model.block_size, small.train.batch_size, small.run.seed)
    batches = [
        torch.from_numpy(np.c_[inputs, targets[:, -1:]])  # (B, T + 1)
        for inputs, targets in map(loader.batch, range(small.train.max_steps))
    ]
    losses = list(nano.train(model, batches))
    assert len(losses) == 50 and losses[0] > 5 > 3 > losses[-1]
    assert losses == pytest.approx(losses_of_train, abs=1e-5 * SHARE, rel=0)


@pytest.mark.numerics
@pytest.mark.parametrize("size", [1e-8, 0])
def test_gates_are_those_of_the_router(size):
    """Where logits are as small as ε it halves the gates."""
    moe = nano.MoE()
    router = Router(nano.n_embd, nano.n_expert, nano.top_k, KERN)
    weight = torch.randn(router.weight.shape, generator=seeded(0))
    moe.router.weight.data = weight
    router.weight.data = weight
    x = size / 128 * torch.randn(200, nano.n_embd, generator=seeded(1))
    routing = router(x)
    gates = torch.zeros(200, nano.n_expert).scatter(1, routing.experts, routing.weights)
    assert_near(moe.route(x), gates, tolerance(torch.float32, nano.n_embd, roundings=4))


def test_the_first_weights_are_distributed_as_in_model_py():
    weights = nano.GPT().state_dict()
    wanted = rename(GPT(configure.load(QUICKSTART, ["model.router=kern"]).model))
    assert weights.keys() == wanted.keys()
    for name, weight in weights.items():
        assert weight.shape == wanted[name].shape, name
        if weight.dim() == 1:
            assert weight.equal(wanted[name]), name
        else:
            ratio = weight.std() / wanted[name].std()
            assert 0.95 < ratio < 1.05 and abs(weight.mean()) < 0.05 * weight.std(), name


def test_the_settings_are_those_of_the_quickstart():
    config = configure.load(QUICKSTART, ["model.router=kern"])
    wanted = dict(config.model) | dict(config.train) | dict(config.optim)
    wanted["end_of_text"] = ByteTokenizer.eot
    wanted["skips"] = STDLIB_SKIPS
    statements = [part for part in ast.parse(FILE.read_text()).body if isinstance(part, ast.Assign)]
    settings = {part.targets[0].id: ast.literal_eval(part.value) for part in statements}
    assert settings.pop("min_lr") == pytest.approx(config.optim.lr * config.optim.min_lr_ratio)
    assert settings.pop("temperature") == 0.8  # the default of scripts/sample.py
    assert len(settings) == 19
    assert settings == {name: wanted[name] for name in settings}


def test_the_text_is_that_of_the_quickstart(tmp_path, monkeypatch):
    modules = ["a.py", "a/b.py", "a-b.py", "B.py", "test/a.py", "a/site-packages/b.py", "c.txt"]
    texts = {name: f"{name} = 'é'\n" for name in modules} | {"empty.py": "", "blank.py": " \n"}
    write_tree(tmp_path, {name: text.encode() for name, text in texts.items()})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    raw = [part for file in stdlib_inputs() for part in read_documents(file, "text")]
    prepared = Encoder(ByteTokenizer(), val_fraction=0.5)(raw)
    wanted = torch.cat([torch.from_numpy(ids).long() for ids in prepared.ids.values()])
    ends = (wanted == ByteTokenizer.eot).sum()
    assert ends == 4
    assert split_documents(nano.read_text()) == split_documents(wanted)


def test_no_window_of_validation_is_trained_on():
    """By the statements of the command that choose windows, on tokens 0, 1, 2, …"""
    pattern = r"^    ((?:train_|val_)?(?:windows|rows|batches) = .*\n)"
    statements = re.findall(pattern, FILE.read_text(), re.MULTILINE)
    n_window = 2400
    tokens = torch.arange(nano.block_size * n_window + 1)
    scope = vars(nano) | {"read_text": lambda: tokens}
    exec("".join(statements), scope)
    trained = torch.cat(list(scope["batches"]))
    assert trained.shape == (nano.max_steps * nano.batch_size, nano.block_size + 1)
    first_token = nano.block_size * (n_window - 2000)
    assert trained.max() <= first_token <= scope["val_windows"].min()
    assert len(trained.unique(dim=0)) == n_window - 2000 and len(scope["val_windows"]) == 125


def split_documents(tokens):
    """The tokens of each document, sorted."""
    ends = (tokens == ByteTokenizer.eot).nonzero().flatten() + 1
    return sorted(part.tolist() for part in tokens.tensor_split(ends))


def test_it_needs_torch_alone():
    packages = re.findall(r"^(?:from|import) (\w+)", FILE.read_text(), re.MULTILINE)
    assert {*packages} - sys.stdlib_module_names == {"torch"}


@pytest.mark.integration
def test_the_command_prints_losses_and_a_sample(tmp_path):
    command = [sys.executable, FILE, "--steps", "2"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert printed.returncode == 0, printed.stderr
    losses, text = printed.stdout.split("\n", 1)
    assert re.fullmatch(r"step 1: loss 5\.\d{4}, validation loss 5\.\d{4}", losses)
    assert text.startswith("class Stack:\n    def ") and len(text) > 200
    assert list(tmp_path.iterdir()) == []
