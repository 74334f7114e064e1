"""scripts/: plan."""

import re

import pytest
import torch
from runs import REPO_ROOT

import configure
from model import GPT, parameter_shapes
from runtime import memory
from scripts import plan


def test_plan_of_the_largest_model(call):
    """6.9B parameters: 16 bytes each under DDP, an eighth of that on each of 8 GPUs under ZeRO-2 and FSDP2."""
    out = call(plan.main, REPO_ROOT / "config/1b3.toml", "--gpus", 8, "--memory", 80, "--mfu", 0.4)
    assert "6,952.4 M in all, 1,315.3 M active" in out and "6.55 B: 50,000 steps of 131,072" in out
    assert "checkpoint       77.7 GiB" in out and "host memory      207.2 GiB" in out  # 12 bytes, 4 on each of 8 ranks
    columns = [name.strip() for name in re.search(r"( +zero2.*)", out)[1].split("  ") if name]
    assert columns == [way + more for more in ("", ", checkpointing") for way in ("zero2", "ddp", "fsdp")]
    parts = {line.split()[0]: line.split()[1::2] for line in out.splitlines() if "iB   " in line}
    state = [sum(float(parts[part][i]) for part in ("weights", "gradients", "optimizer")) for i in (0, 1, 2)]
    assert [round(gib * 2**30 / 1e9) for gib in state] == [14, 111, 14]
    assert out.splitlines()[-1] == "--train.parallel=zero2"
    flops = configure.load(REPO_ROOT / "config/1b3.toml").train.max_steps * 131072 * 8.187e9
    hours = flops / 8 / 989e12 / 0.4 / 3600
    assert float(re.search(r"([\d.]+) h on 8 x H100", out)[1]) == pytest.approx(hours, abs=0.1)


@pytest.mark.parametrize(
    "words, last_line",
    [
        ("--gpus=16 --train.micro_batch_size=16", "--train.parallel=hsdp"),
        ("--gpus=4 --memory=24", "none fits"),
        # 43.2 GiB without checkpointing are more than 92%
        ("--gpus=8 --memory=45", "--train.activation_checkpointing=true"),
        ("--gpus=8 --memory=40 --train.micro_batch_size=16", "--train.parallel=fsdp"),
    ],
)
def test_plan_ends_with_what_to_choose(call, words, last_line):
    assert last_line in call(plan.main, REPO_ROOT / "config/1b3.toml", *words.split()).splitlines()[-1]


def test_plan_takes_the_mfu_of_a_run(tmp_path, call):
    file = REPO_ROOT / "config/125m.toml"
    lines = [f'{{"step": {i}, "tokens": {i}, "perf/mfu": {i / 10}}}\n' for i in (1, 2, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert "at an MFU of 0.20" in call(plan.main, file, "--mfu", tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "tokens": 1}\n')
    assert "has no perf/mfu" in call(plan.main, file, "--mfu", tmp_path, code=2)


@pytest.mark.parametrize(
    "words, error",
    [
        (["--gpus=16"], "set --train.batch_size=512 or --train.micro_batch_size=16, or start 1, 2, 4, 8 ranks"),
        (["--gpus=0"], "--gpus 0: expected more than 0"),
        (["--mfu=0"], "--mfu 0: expected a number above 0"),
        (["--mfu=40"], "--mfu 40: expected a number above 0"),
    ],
)
def test_plan_refuses_bad_input(call, words, error):
    assert error in call(plan.main, REPO_ROOT / "config/1b3.toml", *words, code=2)


HEADS = ["--model.n_kv_head=2", "--model.pos=rope"]
GATED = ["--model.gated=true", "--model.activation=silu"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "router, more",
    [("dense", []), ("softmax", []), ("kern", []), ("dense", GATED), ("kern", [*GATED, "--model.n_shared_expert=2"])]
    + [("dense", HEADS), ("dense", HEADS[1:]), ("dense", HEADS[:1]), ("dense", ["--model.qk_norm=all"])]
    + [("kern", [*HEADS, *GATED, "--model.qk_norm=head"]), ("dense", [HEADS[1], "--model.qk_norm=head"])],
)
def test_activations_are_what_autograd_keeps(router, more, dtype):
    """Of one block more: bytes of the tensors saved for the backward pass that are neither weights nor their casts."""

    def measure(n_layer):
        sizes = "vocab_size=64 n_embd=192 block_size=256 expert_hidden=192 n_expert=16 top_k=4"
        words = [f"--model.{word}" for word in f"router={router} n_layer={n_layer} {sizes}".split()] + more
        model = configure.load(REPO_ROOT / "config/125m.toml", words).model
        gpt, sizes, alive = GPT(model), {}, []
        shapes = {tuple(p.shape) for p in gpt.parameters() if p.dim() > 1}
        shapes |= {shape[::-1] for shape in shapes}

        def pack(tensor):
            if tuple(tensor.shape) not in shapes:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            alive.append(tensor)  # so that no address comes twice
            return tensor

        x = torch.zeros(8, 256, dtype=torch.int64).random_(64)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            gpt(x, x)
        return sum(sizes.values()), model

    (two, model), (one, _) = measure(2), measure(1)
    assert memory.activation_bytes(model, 8 * 256, dtype, router == "dense") == pytest.approx(two - one, rel=0.05)


def test_shapes_without_the_model():
    model = configure.load(REPO_ROOT / "config/quickstart.toml", ["--model.router=kern-mc"]).model
    assert parameter_shapes(model) == {name: tuple(p.shape) for name, p in GPT(model).named_parameters()}
