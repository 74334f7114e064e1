"""data.prepare --tokenizer FOLDER: a tokenizer.json of Hugging Face, from text to an export and back."""

import json

import pytest
from test_hf_init_from import refused, start
from test_hf_open_moe import OURS, SHAPE, make_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import train
from data import DataError, prepare
from data.bins import open_tokenizer, open_tokens, read_meta
from data.tokenizer import load_tokenizer, token_bytes
from runtime.folder import path_of
from scripts import export

TEXTS = [f"The {word} of page {i} is naïve, isn't it? 日本語 🙂\n" for i in range(40) for word in ("kernel", "router")]
SPECIAL = ["<pad>", "<|end|>"]


@pytest.fixture(scope="module", params=["bytes", "words"])
def folder(request, tmp_path_factory):
    """Byte-level pieces as OLMoE's, or words with ▁ and single bytes as Mixtral's; both add a token to each text."""
    place, size = tmp_path_factory.mktemp("models") / "their-model", {"vocab_size": 400, "special_tokens": SPECIAL}
    place.mkdir()
    made = Tokenizer(models.BPE(byte_fallback=request.param == "words", unk_token=None))
    if request.param == "bytes":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        size["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        made.decoder = decoders.Sequence(fallback)
        size["special_tokens"] = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    made.train_from_iterator(TEXTS[:60], trainers.BpeTrainer(**size, show_progress=False))
    made.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 0)])
    made.save(str(place / "tokenizer.json"))
    (place / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return place


@pytest.fixture
def prepared(folder, tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    words = ["text", "--source", source, "--tokenizer", folder, "--out", tmp_path / "data", "--val-fraction", "0.2"]
    assert prepare.main([*map(str, words)]) == 0
    return tmp_path / "data/text"


def test_texts_come_back(folder, prepared):
    tokenizer, meta = open_tokenizer(prepared), read_meta(prepared)
    assert (tokenizer.name, tokenizer.eot) == ("their-model", 1) == (meta.tokenizer["name"], meta.tokenizer["eot"])
    tokens = open_tokens(prepared, "train")
    ids = tokens.read(0, len(tokens)).tolist()
    assert ids[-1] == 1 and 0 not in ids and ids.count(1) == meta.splits["train"].documents
    texts = tokenizer.decode(ids).split("<|end|>")
    assert set(texts[:-1]) <= set(TEXTS)
    ids = tokenizer.encode("a <|end|> b \ud800")
    assert 1 not in ids and tokenizer.decode(ids) == "a <|end|> b \ufffd"  # as text
    of_ids = token_bytes(tokenizer)
    assert of_ids[0] == of_ids[1] == b"" and len(of_ids) == tokenizer.vocab_size
    for text in TEXTS[::9]:
        assert b"".join(of_ids[i] for i in tokenizer.encode(text)) == text.encode()


def test_a_model_of_theirs_is_trained_and_exported(folder, prepared, tiny, tmp_path, capsys):
    size = open_tokenizer(prepared).vocab_size
    make_model("olmoe", vocab_size=size, eos_token_id=1).save_pretrained(tmp_path / "olmoe")
    (tmp_path / "olmoe/tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    own = [f"data.dir={prepared.parent}", "data.name=text", f"model.vocab_size={size}", *SHAPE, *OURS["olmoe"]]
    config = tiny(f"train.init_from={tmp_path / 'olmoe'}", "train.max_steps=2", "eval.windows=2", *own)
    train.train(config)
    assert export.main([str(path_of(config)), str(tmp_path / "out"), "--check"]) == 0, capsys.readouterr().err
    again = tiny("run.name=again", f"train.init_from={tmp_path / 'out'}", *own)
    start(again)
    other = json.loads((tmp_path / "out/tokenizer.json").read_text())
    vocab = other["model"]["vocab"]
    one, two = [*vocab][-2:]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (tmp_path / "out/tokenizer.json").write_text(json.dumps(other))
    assert "its tokenizer is one whose id" in refused(again)


@pytest.mark.parametrize(
    "file, content, words",
    [("config.json", '{"eos_token_id": 99999}', "eos_token_id is 99999"), ("tokenizer.json", "{}", "cannot be read")],
)
def test_bad_folders(folder, tmp_path, file, content, words):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words):
        load_tokenizer(str(tmp_path))
