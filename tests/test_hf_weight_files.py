"""hf/weight_files.py: the files in a folder that a run starts from are from_pretrained's."""

import json
import os
import shutil
from itertools import cycle

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_hf_init_from import DENSE, edit, make_gpt2, refused, start

from hf.formats import FORMATS

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FIRST, SECOND, LAST = (f"model-0000{number}-of-00005.safetensors" for number in (1, 2, 5))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model in one file and in shards; below `other`, another model."""
    place = tmp_path_factory.mktemp("saved")
    model = make_gpt2()
    for folder in (place, place / "other"):
        model.save_pretrained(folder / "one")
        model.save_pretrained(folder / "shards", max_shard_size="20KB")
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1)
    return place


def link_to_blobs(folder):
    """As the hub's cache: each file is a link to one of another name, beside the folder."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")


def edit_index(folder, names):
    """Let the index name the files `names`, in turn."""
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map=dict(zip(table, cycle(names), strict=False)))


def mix_index(folder):
    """Each tensor is in another shard than the index says."""
    edit_index(folder, sorted(path.name for path in folder.glob("model-*")))


# form of the folder, files of the other model that are copied into it, another change
FOLDERS = {
    "shards, of several runs": ("shards", ["model-00001-of-00009.safetensors"], None),
    "shards beside one file": ("shards", [ONE, "model_ema.safetensors"], None),
    "pickles and others": ("shards", ["pytorch_model.bin", "model.gguf", "tf_model.h5"], None),
    "one file": ("one", [INDEX, "ema.pt", "model.fp16.safetensors"], None),
    "subfolders": ("one", [f"checkpoint-5/{ONE}", "original/consolidated.00.pth"], None),
    "links": ("shards", [f".cache/{INDEX}.metadata"], link_to_blobs),
    "tensors in other shards": ("shards", [], mix_index),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_files_are_those_of_transformers(tiny, tmp_path, saved, kind):
    """A run starts with from_pretrained's weights."""
    from transformers import AutoModelForCausalLM

    form, copies, change = FOLDERS[kind]
    folder = shutil.copytree(saved / form, tmp_path / "copy")
    for name in copies:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(saved / "other/one" / ONE, folder / name)
    if change:
        change(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model, _ = start(tiny(*DENSE, f"train.init_from={folder}"))
    own = FORMATS["gpt2"].from_own(model.state_dict(), model.config)
    assert theirs.keys() - own.keys() == {"lm_head.weight"}  # tied
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]), name


def save_twice(folder):
    """A shard also has the tensors of another one."""
    both = load_file(folder / FIRST) | load_file(folder / SECOND)
    save_file(both, folder / SECOND, {"format": "pt"})


def leave_pickles(folder):
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    for path in folder.glob("model-*"):
        path.unlink()


# by the words of the error
HARMS = {
    f"{INDEX} names {LAST}, and no such file is in the folder; download": lambda folder: (
        folder / LAST
    ).unlink(),
    f"{LAST} cannot be read (": lambda folder: os.truncate(folder / LAST, 900),
    f"is in {SECOND} and in another file, so they were not saved together": save_twice,
    f"{INDEX} names ../copy/{FIRST}, and no such": lambda folder: edit_index(
        folder, [f"../copy/{FIRST}"]
    ),
    f"{INDEX} names ., and no such": lambda folder: edit_index(folder, [".", FIRST]),
    "weight_map = 3": lambda folder: edit(folder / INDEX, weight_map=3),
    "weight_map = {}": lambda folder: edit(folder / INDEX, weight_map={}),
    f"{INDEX}: damaged, not JSON": lambda folder: os.truncate(folder / INDEX, 99),
    "from_pretrained adds this adapter": lambda folder: (folder / "adapter_config.json").touch(),
    f"neither {ONE} nor {INDEX}; download it": leave_pickles,
}


@pytest.mark.parametrize("words", HARMS)
def test_incomplete_and_ambiguous_folders_are_refused(tiny, tmp_path, saved, words):
    folder = shutil.copytree(saved / "shards", tmp_path / "copy")
    HARMS[words](folder)
    assert words in refused(tiny(*DENSE, f"train.init_from={folder}"))
