"""runtime/: devices and types, checkpoints, metrics.jsonl, Weights & Biases, loads in numbers."""

import json
import math
import sys
from types import SimpleNamespace
from urllib.parse import urlparse

import pytest
import torch
import wandb
from wandb.proto import wandb_internal_pb2

from model import GPT
from runtime import RunError, checkpoint, distributed
from runtime.metrics import Metrics, load_metrics, read, start_wandb
from train import build_optimizer

# ---- devices and types


@pytest.fixture
def gpus(monkeypatch):
    """`gpus(2, capability=(8, 0))`: torch believes that it has them."""

    def gpus(count, capability=(9, 0), name="NVIDIA H100 80GB HBM3"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.delenv("LOCAL_RANK", raising=False)

    return gpus


def test_pick_device(gpus, monkeypatch):
    gpus(0)
    assert distributed.pick_device("auto") == distributed.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(RunError, match="--train.device=auto"):
        distributed.pick_device("cuda")
    gpus(2)
    assert distributed.pick_device("cpu") == torch.device("cpu")
    assert distributed.pick_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert distributed.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(RunError, match="rank 2 .*--nproc_per_node=2"):
        distributed.pick_device("auto")


@pytest.mark.parametrize(
    "capabilities, dtype",
    [
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_f": True, "amx_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_dtype_auto_on_a_cpu(monkeypatch, capabilities, dtype):
    monkeypatch.setattr(distributed, "cpu_capabilities", lambda: capabilities)
    assert distributed.pick_dtype("auto", torch.device("cpu")) == dtype
    assert distributed.pick_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_dtype_auto_on_a_gpu(gpus, capability, dtype):
    gpus(1, capability)
    assert distributed.pick_dtype("auto", torch.device("cuda", 0)) == dtype


def test_cpu_without_capabilities_computes_in_float32(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert distributed.pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert distributed.device_name(torch.device("cpu")) == "CPU"


def test_peak_flops_are_of_known_devices_and_tensor_core_types(gpus):
    gpus(1)
    assert distributed.peak_flops(torch.device("cuda", 0), torch.bfloat16) == 989e12
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float32) is None
    assert distributed.peak_flops(torch.device("cpu"), torch.bfloat16) is None
    gpus(1, name="Some New Device")
    assert distributed.peak_flops(torch.device("cuda", 0), torch.float16) is None


def test_one_process_is_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.start(torch.device("cpu")) == (0, 1, torch.device("cpu"), 1)
    assert not torch.distributed.is_initialized()
    assert distributed.sum_over_ranks(torch.tensor(3.0)) == 3
    distributed.stop()


# ---- checkpoints


class Training:
    """A tiny model in the middle of its training, with a loss scale."""

    def __init__(self, config, seed):
        torch.manual_seed(seed)
        self.model = GPT(config.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + seed))
        self.idx = torch.arange(64).view(2, 32)

    def step(self):
        loss = self.model(self.idx, self.idx).loss
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    def parts(self):
        return self.model, self.optimizer, self.scaler


@pytest.fixture
def training(tiny):
    return lambda seed=0: Training(tiny(), seed)


def test_checkpoint_brings_everything_back(training, tmp_path):
    old, new = training(0), training(1)
    old.step()
    old.step()
    checkpoint.save(tmp_path, 2, *old.parts, keep=1)
    ahead = [old.step() for _ in range(3)]
    new.step()
    checkpoint.load(tmp_path, 2, *new.parts)
    assert new.scaler.get_scale() == 2.0**8
    assert [new.step() for _ in range(3)] == ahead  # weights, moments and scale, bit for bit
    for (name, a), (_, b) in zip(old.model.state_dict().items(), new.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_checkpoint_holds_buffers_and_weights_for_evaluation(training, tiny, tmp_path):
    old = training(0)
    old.step()
    old.model.blocks[1].mlp.router.selection_bias.fill_(0.5)
    checkpoint.save(tmp_path, 1, *old.parts, keep=1)
    fresh = GPT(tiny().model)
    checkpoint.load_model(tmp_path, 1, fresh)
    assert fresh.state_dict().keys() == old.model.state_dict().keys()
    for (name, a), (_, b) in zip(fresh.state_dict().items(), old.model.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_the_last_checkpoints_are_kept(training, tmp_path):
    parts = training().parts
    folder = tmp_path / "checkpoints"
    assert checkpoint.steps(folder) == []
    for step in (5, 10, 100):
        checkpoint.save(folder, step, *parts, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000010", "step_00000100"]
    assert checkpoint.steps(folder) == [10, 100]


def test_unfinished_checkpoint_counts_for_nothing(training, tmp_path):
    old, new = training(0), training(1)
    unfinished = tmp_path / "step_00000007.tmp"
    unfinished.mkdir()
    (unfinished / "__0_0.distcp").write_bytes(b"half a checkpoint")
    (tmp_path / "step_7").mkdir()
    assert checkpoint.steps(tmp_path) == []
    checkpoint.save(tmp_path, 7, *old.parts, keep=2)
    assert checkpoint.steps(tmp_path) == [7] and not unfinished.exists()
    checkpoint.load(tmp_path, 7, *new.parts)
    assert torch.equal(new.model.wte.weight, old.model.wte.weight)


def test_save_that_fails_leaves_no_checkpoint(training, tmp_path, monkeypatch):
    parts = training().parts
    checkpoint.save(tmp_path, 1, *parts, keep=1)

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "save", fail)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(tmp_path, 2, *parts, keep=1)
    assert checkpoint.steps(tmp_path) == [1]


# ---- metrics.jsonl


def test_metrics_are_numbers_line_by_line(tmp_path):
    metrics = Metrics(tmp_path, -1)
    metrics.log(0, 0, **{"val/loss": torch.tensor(2.5), "optim/lr": 0.1})
    assert read(tmp_path / "metrics.jsonl") == [{"step": 0, "tokens": 0, "val/loss": 2.5, "optim/lr": 0.1}]  # at once
    metrics.log(1, 64, **{"train/loss": math.inf})
    metrics.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [0, 1]


def test_resuming_drops_lines_after_the_checkpoint_and_a_half_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "tokens": step * 64}) for step in (0, 2, 4, 4, 6)]
    path.write_text("\n".join(lines) + '\n{"step": 8, "tok')
    assert [line["step"] for line in read(path)] == [0, 2, 4, 4, 6]
    metrics = Metrics(tmp_path, 4)
    metrics.log(5, 320)
    metrics.close()
    assert path.read_text().splitlines() == [*lines[:4], '{"step": 5, "tokens": 320}']
    Metrics(tmp_path, -1).close()  # from the start: nothing is kept
    assert path.read_text() == ""


def test_broken_line_in_the_middle_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(RunError, match="metrics.jsonl, line 2 is not JSON"):
        read(tmp_path / "metrics.jsonl")
    assert read(tmp_path / "none.jsonl") == []


def test_metrics_go_to_the_tracker_too(tmp_path):
    sent = []
    tracker = SimpleNamespace(log=lambda line, step: sent.append((step, line)), finish=lambda: sent.append("finish"))
    metrics = Metrics(tmp_path, -1, tracker)
    metrics.log(3, 96, **{"train/loss": torch.tensor(1.0)})
    metrics.close()
    assert sent == [(3, {"step": 3, "tokens": 96, "train/loss": 1.0}), "finish"]


# ---- Weights & Biases


@pytest.fixture
def fake_wandb(monkeypatch, tmp_path):
    """Stands in for the module. `calls` are the modes that were asked for; online fails with `failure` if there is
    one. The real module's errors are kept. There is no key."""
    fake = SimpleNamespace(calls=[], failure=None, errors=wandb.errors, Settings=wandb.Settings)

    def init(mode, **arguments):
        fake.calls.append(mode)
        if mode == "online" and fake.failure:
            raise fake.failure
        return SimpleNamespace(mode=mode, define_metric=lambda *args, **kwargs: None, **arguments)

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return fake


def start(mode, folder):
    return start_wandb(mode, "project", "name", folder, {"a": 1})


def test_wandb_disabled_is_not_even_imported(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import wandb raises
    assert start("disabled", tmp_path) is None
    with pytest.raises(ImportError):
        start("offline", tmp_path)


def test_wandb_without_a_key_goes_offline_in_one_line(fake_wandb, tmp_path, capsys):
    run = start("online", tmp_path)
    assert (run.mode, run.project, run.name, run.dir, run.config) == (
        "offline",
        "project",
        "name",
        str(tmp_path),
        {"a": 1},
    )
    assert fake_wandb.calls == ["offline"]  # the network was not even tried
    (line,) = capsys.readouterr().out.splitlines()
    assert "no API key" in line and "wandb login" in line


@pytest.mark.parametrize("key", ["environment", "netrc"])
def test_wandb_with_a_key_goes_online(fake_wandb, tmp_path, monkeypatch, capsys, key):
    if key == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        host = urlparse(wandb.Settings().base_url).hostname
        (tmp_path / "netrc").write_text(f"machine {host} login user password {'0' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    assert start("online", tmp_path).mode == "online"
    assert capsys.readouterr().out == ""


def test_wandb_without_a_network_goes_offline_in_one_line(fake_wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    fake_wandb.failure = wandb.errors.CommError("Run initialization has timed out after 30.0 sec.\nMore words.")
    assert start("online", tmp_path).mode == "offline"
    assert fake_wandb.calls == ["online", "offline"]
    (line,) = capsys.readouterr().out.splitlines()
    assert "timed out after 30.0 sec." in line and "offline" in line


def test_wandb_writes_offline_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = start("offline", tmp_path)
    metrics = Metrics(tmp_path, -1, run)
    metrics.log(1, 64, **{"train/loss": torch.tensor(1.5)})
    metrics.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    logged = {item.nested_key[0]: item.value_json for record in wandb_records(file) for item in record.history.item}
    assert logged["train/loss"] == "1.5"


def wandb_records(file):
    """Records of a .wandb file, which is a log of LevelDB's format: blocks of 32 KiB, the first without its first 7
    bytes; in them pieces of (checksum 4, length 2, kind 1, data), of which kinds 1 and 4 end a record."""
    data, position, record = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


# ---- loads in numbers


def test_load_metrics_by_hand():
    values = load_metrics(torch.tensor([[4, 0, 0, 0], [1, 1, 0, 2]]))  # busiest over mean: 4 and 2
    assert {name: value.item() for name, value in values.items()} == {"load_imbalance": 3.0, "dead_experts": 4}
    assert load_metrics(torch.full((1, 4), 7))["load_imbalance"] == 1
    assert load_metrics(torch.zeros(0, 4)) == {}  # dense: no layer has a router


@pytest.mark.parametrize("damage", ["cut short", "no metadata"])
def test_damaged_checkpoint_is_named_with_what_to_do(training, tmp_path, damage):
    old = training(0)
    checkpoint.save(tmp_path, 1, *old.parts, keep=2)
    checkpoint.save(tmp_path, 2, *old.parts, keep=2)
    if damage == "cut short":
        (file,) = (tmp_path / "step_00000002").glob("*.distcp")
        file.write_bytes(file.read_bytes()[:1000])
    else:
        (tmp_path / "step_00000002" / ".metadata").unlink()
    with pytest.raises(RunError, match="step_00000002 cannot be read .* remove that folder to go on from step 1"):
        checkpoint.load(tmp_path, 2, *old.parts)
    with pytest.raises(RunError, match="step_00000002 cannot be read"):
        checkpoint.load_model(tmp_path, 2, old.model)
