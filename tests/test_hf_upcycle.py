"""hf/upcycle.py: mixtures that start from dense models."""

import re

import pytest
import torch
from numerics import assert_near
from runs import column, run
from test_hf_init_from import LOGITS, MODERN, ids, logits, make_gpt2, refused, remedy, start

from eval.trained import load_model
from gate_norm import gate_sum
from runtime.folder import path_of

# Of a dense model of width 16: E experts, K chosen, hidden width of each, router
COPIES = ["model.n_expert=8", "model.top_k=3", "model.expert_hidden=16", "model.router=softmax-renorm"]
SLICES = ["model.n_expert=8", "model.top_k=2", "model.expert_hidden=8", "model.router=softmax-renorm"]
TWO_COPIES_OF_SLICES = ["model.n_expert=12", "model.top_k=8", "model.expert_hidden=4", "model.router=sigmoid-renorm"]
LAST_BLOCK = "blocks.1.mlp.experts."


def make_plain_gpt2(place, **update):
    """A GPT-2 of transformers without biases in its MLPs, saved in `place`."""
    theirs = make_gpt2(**update)
    with torch.no_grad():
        for block in theirs.transformer.h:
            block.mlp.c_fc.bias.zero_()
            block.mlp.c_proj.bias.zero_()
    theirs.save_pretrained(place)
    return theirs


@pytest.mark.numerics
@pytest.mark.parametrize("shape", [COPIES, SLICES, TWO_COPIES_OF_SLICES], ids=["copies", "slices", "copies of slices"])
@pytest.mark.parametrize("more", [[], ["model.gate_norm=3", "model.vocab_size=320", "model.block_size=20"]])
def test_a_mixture_computes_what_its_gpt2_does(tiny, tmp_path, shape, more):
    theirs = make_plain_gpt2(tmp_path / "gpt2")
    model, words = start(tiny(f"train.init_from={tmp_path / 'gpt2'}", "model.bias=true", *shape, *more))
    idx = ids(model.config.block_size)
    assert_near(logits(model, idx)[..., :257], theirs(idx).logits, LOGITS, "logits")
    before, after = re.findall(r"\d\.\d{5}", words)
    assert abs(float(before) - float(after)) < 2e-5 and "because" not in words


def train_dense(tiny, *more):
    """A run of a dense model of width 16; its losses are of few windows. Returns its folder and last loss."""
    lines = run(config := tiny("run.name=dense", "model.router=dense", "eval.windows=4", *more))
    return path_of(config), column(lines, "val/loss")[-1]


@pytest.mark.numerics
def test_a_mixture_computes_what_its_dense_run_does(tiny):
    """With gated MLPs, also with more positions. The copies differ after training."""
    place, _ = train_dense(tiny, *MODERN)
    own = [*MODERN, *SLICES, f"train.init_from={place}"]
    model, _ = start(tiny(*own, "model.block_size=64"))
    assert_near(logits(model, ids(32)), logits(load_model(place).model, ids(32)), LOGITS, "logits")
    w_in = model.state_dict()[LAST_BLOCK + "w_in"]
    assert w_in[0].equal(w_in[2]) and not w_in[0].equal(w_in[1])  # a copy of two slices after the other
    run(config := tiny(*own))
    w_in = load_model(path_of(config)).model.state_dict()[LAST_BLOCK + "w_in"]
    assert not w_in[0].equal(w_in[2])


@pytest.mark.numerics
def test_losses_of_another_function_are_printed(tiny, capsys):
    """KERN's gates have no fixed sum: their mean is divided out, and both losses are those of evaluations."""
    place, last = train_dense(tiny)
    config = tiny(*SLICES, "model.router=kern", "model.bias=true", "eval.windows=4", f"train.init_from={place}")
    loss = column(run(config), "val/loss")[0]
    words = (
        f"4 copies of its MLP's 2 slices, loss on 4 validation windows {last:.5f} -> {loss:.5f}, because the sum of a"
    )
    assert f"{words} token's kern gates varies" in capsys.readouterr().out and abs(loss - last) > 1e-4
    mine = start(config)[0].state_dict()[LAST_BLOCK + "w_out"][5]  # (H, C)
    theirs = load_model(place).model.state_dict()["blocks.1.mlp.w_out.weight"].mT[8:]
    # Two of each logit: the sum of the largest is as often there, and the norm √2 as large.
    assert_near(mine * gate_sum("kern", 4, 1, 1.0) / 2**0.5, theirs, 0.02)


def test_biases_that_experts_lack_are_named(tiny, tmp_path):
    make_gpt2().save_pretrained(tmp_path)
    _, words = start(tiny(f"train.init_from={tmp_path}", "model.bias=true", *SLICES))
    before, after = re.findall(r"\d\.\d{5}", words)
    assert words.endswith("because experts lack the biases of the MLPs") and before != after


CONFLICTS = {  # with a dense model of width 16: what makes it fit
    "model.expert_hidden=5": "expert_hidden=8",  # K slices
    "model.expert_hidden=5 model.top_k=3": "expert_hidden=16",
    "model.expert_hidden=4": "expert_hidden=8",  # 2 of 4 slices would be chosen
    "model.n_expert=9": "expert_hidden=16",
    "model.n_shared_expert=1 model.n_dense_layer=1": "n_shared_expert=0 n_dense_layer=0",
    "model.n_hash_layer=1": "n_hash_layer=0",  # whose table would choose slices of several copies
}


@pytest.mark.parametrize("other", CONFLICTS)
def test_what_does_not_fit_is_refused_with_its_remedy(tiny, tmp_path, other):
    make_plain_gpt2(tmp_path)
    config = [f"train.init_from={tmp_path}", "model.bias=true", *SLICES, *other.split()]
    needed = remedy(refused(tiny(*config)))
    assert needed == [f"--model.{word}" for word in CONFLICTS[other].split()]
    start(tiny(*config, *needed))
