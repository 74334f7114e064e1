"""hf/: a folder with any one setting or weight changed is refused with a remedy, or computed as transformers does."""

import json
import re

import pytest
import torch
from conftest import fuzz
from hypothesis import given, settings
from hypothesis import strategies as st
from numerics import assert_near
from safetensors.torch import load_file
from test_hf_init_from import DENSE, LOGITS, logits, make_gpt2, remedy, start
from test_hf_open_moe import OURS, SHAPE, ids, make_model, write_folder

from hf.init_from import read_initial_weights
from runtime import RunError

OWN = {kind: ["model.norm_eps=1e-4", *SHAPE, *more] for kind, more in OURS.items()} | {"gpt2": DENSE}
GONE = object()
VALUES = [GONE, None, -1, 0, 1, 2, 4, 16, 33, 300, 2**70, 1e-5, 0.5, 1.0, 500.0, True, False, "true", "", "gelu_new"]
VALUES += ["silu", "default", "yarn", [], [0], ["full_attention", "sliding_attention"], {}, {"a": 1}]
VALUES += [{"rope_theta": 500.0, "rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, {"rope_theta": "1"}]
KEYS = ["sliding_window", "use_sliding_window", "rope_scaling", "rope_theta", "head_dim", "quantization_config"]
KEYS += ["partial_rotary_factor", "clip_qkv", "mlp_only_layers", "num_experts", "layer_types", "n_inner", "n_ctx"]
HARMS = {  # of a weight
    "missing": lambda weight: GONE,
    "0-d": lambda weight: weight.sum(),
    "one row more": lambda weight: torch.cat([weight, weight[:1]]),
    "a column less": lambda weight: weight[..., :-1].contiguous(),
    "transposed": lambda weight: weight[None].mT.contiguous().squeeze(),
    "NaN": lambda weight: weight * torch.nan,
}
DTYPES = [torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn, torch.bool]
COPIES = {r"\.\d+\.": ".9.", r"experts\.\d+": "experts.8", r"weight$": "bias2", "^": "x."}  # a weight is there twice


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Settings and weights of a small model of each class."""
    out = {}
    for kind in OWN:
        place = tmp_path_factory.mktemp(kind)
        (make_gpt2() if kind == "gpt2" else make_model(kind)).save_pretrained(place)
        out[kind] = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
    return out


def find_settings(tiny, place, overrides):
    """The Config under which `place` fits and changes nothing, and its notes; or which refuses it, and the message."""
    config, needed = tiny(*overrides, f"train.init_from={place}"), []
    try:
        words = "; ".join(read_initial_weights(config).notes)
        needed = [f"model.{key}={old}" for key, old in re.findall(r"model\.(\w+) changes from (\S+) to", words)]
    except RunError as error:
        words, needed = str(error), remedy(str(error))
    return find_settings(tiny, place, [*overrides, *needed]) if needed else (config, words)


def assert_agreement(tiny, place, kind):
    """Refused with a remedy in one line, or the logits of transformers, if that reads the folder."""
    from transformers import AutoModelForCausalLM

    config, words = find_settings(tiny, place, OWN[kind])
    if words.startswith(f"train.init_from = {place}: "):
        assert re.search(r"; (use|download) |Prepare the text", words) and "\n" not in words, words
        return
    idx = ids(min(32, config.model.block_size)) % config.model.vocab_size
    try:
        theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(idx).logits
    except Exception:  # a key that plays no role here has a type that it refuses
        return
    model, _ = start(config)
    limit = 5e-3 if "computed as exact GELU" in words else LOGITS
    assert_near(logits(model, idx)[..., : theirs.shape[-1]], theirs, limit, kind)


def change_folder(kind, folders, draw):
    """The settings and weights of `kind` with one key or one tensor changed."""
    table, state = folders[kind]
    if draw(st.booleans()):
        key = draw(st.sampled_from(KEYS) | st.sampled_from(sorted(table)))
        return table | {key: draw(st.sampled_from(VALUES))}, state
    name, harm = draw(st.sampled_from(sorted(state))), draw(st.sampled_from([*HARMS, *DTYPES, *COPIES]))
    if harm in COPIES:
        return table, state | {re.sub(harm, COPIES[harm], name, count=1): state[name].clone()}
    return table, state | {name: state[name].to(harm) if harm in DTYPES else HARMS[harm](state[name])}


@pytest.mark.numerics
@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_change_is_refused_or_computed(tiny, tmp_path, folders, examples):
    @settings(fuzz, max_examples=examples)
    @given(st.data(), st.sampled_from(sorted(OWN)))
    def check(data, kind):
        table, state = change_folder(kind, folders, data.draw)
        table, state = ({key: value for key, value in part.items() if value is not GONE} for part in (table, state))
        write_folder(tmp_path / "theirs", table, state)
        assert_agreement(tiny, tmp_path / "theirs", kind)

    check()
