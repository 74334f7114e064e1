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
ROPE = [{"rope_theta": 500.0, "rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}, {"rope_theta": "1"}]
VALUES = [GONE, None, -1, 0, 1, 2, 4, 16, 33, 300, 2**70, 1e-5, 0.5, 1.0, 500.0, True, False, "true", "", "gelu_new"]
VALUES += ["silu", "default", "yarn", [], [0], ["full_attention", "sliding_attention"], {}, {"a": 1}, *ROPE]
KEYS = ["sliding_window", "use_sliding_window", "rope_scaling", "rope_parameters", "rope_theta"]
KEYS += ["partial_rotary_factor", "head_dim", "quantization_config", "norm_topk_prob", "clip_qkv"]
KEYS += ["attention_bias", "max_window_layers", "decoder_sparse_step", "mlp_only_layers", "num_experts"]
KEYS += ["num_local_experts", "num_key_value_heads", "tie_word_embeddings", "layer_types", "dtype", "n_inner"]
KEYS += ["n_ctx", "text_config", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"]
KEYS += ["reorder_and_upcast_attn", "pretraining_tp", "model_type"]
HARMS = {  # of a weight
    "missing": lambda weight: GONE,
    "0-d": lambda weight: weight.sum(),
    "one row more": lambda weight: torch.cat([weight, weight[:1]]),
    "a column less": lambda weight: weight[..., :-1].contiguous(),
    "transposed": lambda weight: weight[None].mT.contiguous().squeeze(),
    "empty": lambda weight: weight[:0],
    "NaN": lambda weight: weight * torch.nan,
    **{
        str(dtype): lambda weight, dtype=dtype: weight.to(dtype) for dtype in (torch.float16, torch.float64, torch.int8)
    },
    **{str(dtype): lambda weight, dtype=dtype: weight.to(dtype) for dtype in (torch.float8_e4m3fn, torch.bool)},
}
OTHER_PLACES = {r"\.\d+\.": ".9.", r"experts\.\d+": "experts.8", r"weight$": "bias2", "^": "x."}  # copies of a weight


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Settings and weights of a small model of each class."""
    out = {}
    for kind in OWN:
        place = tmp_path_factory.mktemp(kind)
        (make_gpt2() if kind == "gpt2" else make_model(kind)).save_pretrained(place)
        out[kind] = json.loads((place / "config.json").read_text()), load_file(place / "model.safetensors")
    return out


def read(tiny, place, overrides):
    """The Config under which a run starts from `place` and changes nothing, or why the folder is refused."""
    for _ in range(4):
        config = tiny(*overrides, f"train.init_from={place}")
        try:
            notes = "; ".join(read_initial_weights(config).notes)
        except RunError as error:
            needed, notes = remedy(str(error)), str(error)
        else:
            needed = [f"model.{key}={old}" for key, old in re.findall(r"model\.(\w+) changes from (\S+) to", notes)]
            if not needed:
                return config
        if not needed:
            return notes
        overrides = [*overrides, *needed]
    raise AssertionError(f"no end of overrides: {overrides}")


def assert_agreement(tiny, place, kind):
    """Refused with a remedy in one line, or the logits of transformers, if that reads the folder."""
    from transformers import AutoModelForCausalLM

    config = read(tiny, place, OWN[kind])
    if isinstance(config, str):
        assert config.startswith(f"train.init_from = {place}: ") and "\n" not in config
        assert re.search(r"; (use|download|set) |; download|Prepare the text", config), config
        return
    idx = ids(min(32, config.model.block_size)) % config.model.vocab_size
    try:
        theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(idx).logits
    except Exception:  # a key that plays no role here has a type that it refuses
        return
    model, words = start(config)
    limit = 5e-3 if "computed as exact GELU" in words else LOGITS
    assert_near(logits(model, idx)[..., : theirs.shape[-1]], theirs, limit, f"{kind}")


def change_folder(kind, folders, draw):
    """The settings and weights of `kind` with one key or one tensor changed."""
    table, state = folders[kind]
    if draw(st.booleans()):
        return table | {draw(st.sampled_from(sorted({*table, *KEYS}))): draw(st.sampled_from(VALUES))}, state
    name, harm = draw(st.sampled_from(sorted(state))), draw(st.sampled_from([*HARMS, *OTHER_PLACES]))
    if harm in HARMS:
        return table, state | {name: HARMS[harm](state[name])}
    return table, state | {re.sub(harm, OTHER_PLACES[harm], name, count=1): state[name].clone()}


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
