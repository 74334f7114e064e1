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
FORMS = {"one": "1GB", "shards": "20KB"}  # a model is saved in one file, and in shards


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a model in each form; below `other`, another model in each form."""
    place = tmp_path_factory.mktemp("saved")
    model = make_gpt2()
    for folder in (place, place / "other"):
        for form, size in FORMS.items():
            model.save_pretrained(folder / form, max_shard_size=size)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(-1)
    return place


def compare_with_transformers(tiny, monkeypatch, folder, chosen):
    """A run starts with from_pretrained's weights, from the same files, and names the others."""
    from transformers import AutoModelForCausalLM, modeling_utils

    opened = set()

    def open_and_note(file, *args, **kwargs):
        opened.add(os.path.relpath(file, folder))
        return safe_open(file, *args, **kwargs)

    safe_open = modeling_utils.safe_open
    monkeypatch.setattr(modeling_utils, "safe_open", open_and_note)
    theirs = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    model, words = start(tiny(*DENSE, f"train.init_from={folder}"))
    own = FORMATS["gpt2"].from_own(model.state_dict())
    assert theirs.keys() - own.keys() == {"lm_head.weight"}  # tied
    for name, tensor in own.items():
        assert torch.equal(tensor, theirs[name]), name
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    strays = files - opened - {chosen, "config.json", "generation_config.json"}
    strays = {name for name in strays if not name.endswith(".metadata")}  # of hf download
    note = f"reads {chosen}, as from_pretrained does; not read: {', '.join(sorted(strays))}"
    assert words.endswith(f"; {note}" if strays else "a model of class GPT2LMHeadModel")


# form of the folder, files copied into it from the other model's, the file that is read first
STRAYS = {
    "none": ("shards", {f".cache/{INDEX}.metadata": INDEX}, INDEX),
    "older shards": (
        "shards",
        {f"model-0000{number}-of-00009.safetensors": ONE for number in (1, 2, 9)},
        INDEX,
    ),
    "EMA": ("shards", {"model_ema.safetensors": ONE}, INDEX),
    "EMA of one file": ("one", {"model_ema.safetensors": ONE, "ema.pt": ONE}, ONE),
    "one file, newer or older": ("shards", {ONE: ONE}, ONE),
    "an index": ("one", {INDEX: INDEX}, ONE),
    "a shard": ("one", {"model-00001-of-00001.safetensors": ONE}, ONE),
    "variants": (
        "shards",
        {"model.fp16.safetensors": ONE, "model.safetensors.index.fp16.json": INDEX},
        INDEX,
    ),
    "variants of one file": (
        "one",
        {"model.a.safetensors": ONE, "model-bf16.safetensors": ONE, "model_1.safetensors": ONE},
        ONE,
    ),
    "pickles": ("shards", {"pytorch_model.bin": ONE, "training_args.bin": ONE}, INDEX),
    "pickles of one file": (
        "one",
        {"pytorch_model.bin.index.json": INDEX, "pytorch_model-1.bin": ONE, "ckpt.pt": ONE},
        ONE,
    ),
    "other programs": (
        "shards",
        {
            "consolidated.safetensors": ONE,
            "adapter_model.safetensors": ONE,
            "model.gguf": ONE,
            "tf_model.h5": ONE,
            "flax_model.msgpack": ONE,
        },
        INDEX,
    ),
    "subfolders": (
        "one",
        {f"checkpoint-5/{ONE}": ONE, "original/consolidated.00.pth": ONE, f"ema/{INDEX}": INDEX},
        ONE,
    ),
}


FORM_OF = {ONE: "one", INDEX: "shards"}


@pytest.mark.parametrize("kind", STRAYS)
def test_strays_are_named_and_not_read(tiny, tmp_path, saved, monkeypatch, kind):
    form, copies, chosen = STRAYS[kind]
    folder = shutil.copytree(saved / form, tmp_path / "copy")
    for name, source in copies.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(saved / "other" / FORM_OF[source] / source, folder / name)
    compare_with_transformers(tiny, monkeypatch, folder, chosen)


@pytest.mark.parametrize("source", ["model_ema.safetensors", "ema.safetensors.index.json"])
def test_config_may_name_the_weights(tiny, tmp_path, saved, monkeypatch, source):
    folder = shutil.copytree(saved / "one", tmp_path / "copy")
    for path in (saved / "other/shards").glob("model-*"):
        shutil.copy(path, folder)
    shutil.copy(saved / "other/one" / ONE, folder / "model_ema.safetensors")
    shutil.copy(saved / "other/shards" / INDEX, folder / "ema.safetensors.index.json")
    edit(folder / "config.json", transformers_weights=source)
    compare_with_transformers(tiny, monkeypatch, folder, source)


@pytest.fixture
def shards(saved, tmp_path):
    return shutil.copytree(saved / "shards", tmp_path / "copy")


FIRST, SECOND, LAST = (f"model-0000{number}-of-00005.safetensors" for number in (1, 2, 5))


def edit_index(folder, names):
    """Let the index name the files `names`, in turn."""
    table = json.loads((folder / INDEX).read_text())["weight_map"]
    edit(folder / INDEX, weight_map=dict(zip(table, cycle(names), strict=False)))


def move_into_subfolder(folder):
    (folder / "parts").mkdir()
    names = [path.name for path in folder.glob("model-*")]
    for name in names:
        (folder / name).rename(folder / "parts" / name)
    edit_index(folder, [f"parts/{name}" for name in names])


def link_to_blobs(folder):
    """As the hub's cache: each file is a link to one of another name, beside the folder."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")


def save_again(folder, file, change, source=FIRST):
    """Write the tensors of a shard, changed, into another one too."""
    copies = {name: change(tensor) for name, tensor in load_file(folder / source).items()}
    save_file(load_file(folder / file) | copies, folder / file, {"format": "pt"})


ODD = {
    "subfolder": move_into_subfolder,
    "links": link_to_blobs,
    "tensors in other shards": lambda folder: edit_index(
        folder, sorted(path.name for path in folder.glob("model-*"))
    ),
    "equal tensors in two shards": lambda folder: save_again(folder, SECOND, torch.clone),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_indexes_are_read_as_transformers_does(tiny, shards, monkeypatch, kind):
    ODD[kind](shards)
    compare_with_transformers(tiny, monkeypatch, shards, INDEX)


def remove_index(folder):
    (folder / INDEX).unlink()
    (folder / "pytorch_model.bin").touch()
    for path in folder.glob("model-*"):
        path.rename(folder / "model_ema.safetensors")


def name_file_outside(folder):
    shutil.copy(folder / FIRST, folder.parent)
    edit_index(folder, [f"../{FIRST}"])


def name_in_config(name):
    return lambda folder: edit(folder / "config.json", transformers_weights=name)


# by the words of the error
HARMS = {
    f"{INDEX} names {LAST}, and no such file is in the folder; download it": lambda folder: (
        folder / LAST
    ).unlink(),
    f"{LAST} cannot be read (": lambda folder: os.truncate(folder / LAST, 900),
    f"differs between {FIRST} and {LAST}, so they were not saved together": lambda folder: (
        save_again(folder, LAST, torch.neg)
    ),
    f"differs between {FIRST} and {SECOND}, so": lambda folder: save_again(
        folder, SECOND, torch.Tensor.half
    ),
    f"differs between {SECOND} and {LAST}, so": lambda folder: save_again(
        folder, LAST, torch.neg, SECOND
    ),
    f"{INDEX} names ../{FIRST}, and no such": name_file_outside,
    f"{INDEX} names ., and no such": lambda folder: edit_index(folder, [".", FIRST]),
    f"{INDEX}: weight_map names no files": lambda folder: edit_index(folder, [[]]),
    f"{INDEX}: weight_map names no files; download": lambda folder: edit(
        folder / INDEX, weight_map={}
    ),
    f"{INDEX} is unreadable (": lambda folder: os.truncate(folder / INDEX, 99),
    "from_pretrained adds this adapter": lambda folder: (folder / "adapter_config.json").touch(),
    "is of a distributed checkpoint": lambda folder: (
        folder / "shard-00001-model-00001-of-00001.safetensors"
    ).touch(),
    f"{ONE} nor {INDEX} (other files of weights: model_ema.safetensors, pytorch": remove_index,
    "config.json names ema.safetensors, and no such": name_in_config("ema.safetensors"),
    "config.json names ../one.safetensors, and no such": name_in_config("../one.safetensors"),
    "transformers_weights is 'model.bin', neither a file": name_in_config("model.bin"),
    "transformers_weights is 3, neither a file": name_in_config(3),
}


@pytest.mark.parametrize("words", HARMS)
def test_incomplete_and_ambiguous_folders_are_refused(tiny, shards, words):
    HARMS[words](shards)
    assert words in refused(tiny(*DENSE, f"train.init_from={shards}"))
