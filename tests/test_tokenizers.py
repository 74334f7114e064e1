"""What people bring: tokenizer.json of every kind against AutoTokenizer, and what one loses."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from corpora import BYTES, documents_of, jsonl, snapshot, write_tree
from hypothesis import given
from hypothesis import strategies as st
from test_hf_open_moe import OURS, SHAPE
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from data import DataError
from data.bins import read_meta
from data.round_trip import Loss, count_changes, show_difference
from data.tokenizer import ByteTokenizer, find_eot, load_tokenizer, token_bytes
from data.verify import main as verify
from eval.val_loss import list_byte_counts, open_text
from hf.export import export
from hf.init_from import read_initial_weights
from runtime import RunError
from runtime.folder import path_of
from runtime.runs import check_is_run

pytest_plugins = ["corpora"]  # its fixtures
END = "<|end|>"
SPECIALS = ["<unk>", END, "</s>"]
PADDING = {"byte level": ["[PAD]"], "strange": ["<|padding|>"]}  # of these kinds
SCRIPTS = [
    "The quick brown fox",
    "Straße über naïve",
    "日本語の文",
    "Привет, мир",
    "🙂 👩‍👩‍👧",
    "עברית",
]
LATIN = [f"{i} quick brown foxes, isn't it? (no) a-b x=1" for i in range(80)]
MIXED = [f"{text} {i}: the end.\n  and more\t{text}" for i in range(34) for text in SCRIPTS][:200]


def build(kind: str) -> Tokenizer:
    """One real tokenizer of each kind, trained here."""
    texts = LATIN + MIXED[:60]
    specials = [*SPECIALS, *PADDING.get(kind, [])]
    model, train, options = models.BPE(), trainers.BpeTrainer, {}
    parts = {
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    if kind == "Metaspace":
        specials += [f"<0x{i:02X}>" for i in range(256)]
        model = models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
        normalizer = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        decoder.append(decoders.Strip(" ", 1, 0))
        parts = {
            "normalizer": normalizers.Sequence(normalizer),
            "decoder": decoders.Sequence(decoder),
        }
    elif kind == "WordPiece":
        model, train = models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer
        parts = {
            "normalizer": normalizers.BertNormalizer(lowercase=True),
            "pre_tokenizer": pre_tokenizers.WhitespaceSplit(),
            "decoder": decoders.WordPiece(cleanup=False),
        }
    elif kind == "Unigram":
        model, train, options = models.Unigram(), trainers.UnigramTrainer, {"unk_token": "<unk>"}
        parts = {
            "normalizer": normalizers.NFKC(),
            "pre_tokenizer": pre_tokenizers.Metaspace(),
            "decoder": decoders.Metaspace(),
        }
    elif kind == "</w>":
        options = {"end_of_word_suffix": "</w>"}
        model = models.BPE(unk_token="<unk>", **options)
        parts = {
            "normalizer": normalizers.Replace(Regex(r"\s+"), " "),
            "pre_tokenizer": pre_tokenizers.WhitespaceSplit(),
            "decoder": decoders.BPEDecoder(suffix="</w>"),
        }
    elif kind == "no alphabet":
        texts = LATIN
    else:
        options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    made = Tokenizer(model)
    for name, part in parts.items():
        setattr(made, name, part)
    trainer = train(vocab_size=700, special_tokens=specials, show_progress=False, **options)
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", made.token_to_id("</s>"))]
    )
    return made


KINDS = ["byte level", "Metaspace", "WordPiece", "Unigram", "</w>", "no alphabet", "strange"]


def write_folder(folder: Path, kind: str) -> Path:
    made = build(kind)
    if kind == "strange":  # two added tokens are text, of which one is in the vocabulary
        made.enable_truncation(max_length=8)
        made.enable_padding(length=64)
        words = [token for token in made.get_vocab() if token.isascii() and token.isalpha()]
        made.add_tokens([max(words, key=len), "a \u2603"])
    body = json.loads(made.to_str())
    model = body["model"]
    settings = {"config.json": {"eos_token_id": made.token_to_id(END)}}
    if kind == "Unigram":  # two ids of one text
        model["vocab"][9:9] = [["fox", -9.0], ["fox", -9.5]]
    if kind == "strange":
        # seven ids are of no token; the end and one called padding are not special, as in some
        # chat models
        model["vocab"] = {token: i if i < 300 else i + 7 for token, i in model["vocab"].items()}
        model["dropout"] = 0.5
        for token in body["added_tokens"]:
            token["id"] = model["vocab"].get(token["content"], 1 + max(model["vocab"].values()))
            token["special"] = token["content"] in ("<unk>", "</s>")
        settings = {
            "tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": END}}
        }
    return write_jsons(folder, {"tokenizer.json": body, **settings})


def write_jsons(folder: Path, files: dict[str, dict]) -> Path:
    return write_tree(folder, {name: json.dumps(body).encode() for name, body in files.items()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("kinds")
    return {kind: write_folder(place / kind.strip("</>"), kind) for kind in KINDS}


SPELLINGS = ["{}", "a {} b", "a{}", "x\n{}\ny"]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_auto_tokenizer(folders, kind):
    """All are below the vocabulary's size; no text spells a special token."""
    own = load_tokenizer(str(folders[kind]))
    theirs = AutoTokenizer.from_pretrained(folders[kind])
    if kind == "strange":
        theirs.backend_tokenizer.model.dropout = None
    assert own.vocab_size == len(token_bytes(own)) == 1 + max(theirs.get_vocab().values())
    for text in [*MIXED, *LATIN, "", " ", " a", "x\n\n\n  y"]:
        assert own.encode(text) == theirs(text, add_special_tokens=False)["input_ids"], text
    special = {own.file.token_to_id(token) for token in SPECIALS} - {own.unk}
    for text in [spelling.format(token) for token in SPECIALS[1:] for spelling in SPELLINGS]:
        ids = own.encode(text)
        assert special.isdisjoint(ids), text
        if kind in ("byte level", "Metaspace", "strange"):
            assert own.decode(ids) == text
        elif own.unk not in ids and kind != "no alphabet":
            assert own.decode(ids).split() == text.split()


def test_a_set_is_of_one_tokenizer(run, folders, tmp_path, small_batches, stop_at):
    """Its folder changes while the set is unfinished, or after that."""
    folder = shutil.copytree(folders["byte level"], tmp_path / "tokenizer")
    first = snapshot(folder)
    (tmp_path / "in.jsonl").write_bytes(jsonl(MIXED[:60]))
    args = ("text", "--source", tmp_path / "in.jsonl", "--tokenizer", folder)
    args += ("--val-fraction", 0.3)
    stop_at(9, *args)
    other_end = {"config.json": b'{"eos_token_id": 2}'}
    for changed in ({"tokenizer.json": first["tokenizer.json"] + b" "}, other_end):
        write_tree(folder, first | changed)
        assert "(tokenizer_files was " in run(*args, code=2)
    write_tree(folder, first)
    assert "resuming after" in run(*args) and "already there" in run(*args)
    write_tree(folder, other_end)
    assert "was made with other arguments or files (tokenizer_files was " in run(*args, code=2)
    (folder / "tokenizer.json").unlink()  # a set does not need the files that it was made of
    assert "already there" in run(*args)


ENDS = [  # eos_token_id, eos_token; the end of a document, or what is said
    ([2, 1], END, 2),
    (None, END, 1),
    (None, {"content": "</s>"}, 2),
    ("COMMA", END, r"eos_token_id is \d+, .*eos_token 1;"),
    ("COMMA", None, "is none of added_tokens, so texts may contain it"),
    (0, None, "eos_token_id 0 also stands for unknown text"),
    (None, None, "neither config.json's eos_token_id nor"),
    ([99999], None, "eos_token_id 99999 is none of added_tokens"),
    (True, None, "eos_token_id True is none of added_tokens"),
]


@pytest.mark.parametrize(("number", "token", "wanted"), ENDS)
def test_the_end_of_a_document(folders, number, token, wanted):
    body = json.loads((folders["</w>"] / "tokenizer.json").read_text())
    if number == "COMMA":
        number = body["model"]["vocab"][","]
    contents = body, {"eos_token_id": number}, {"eos_token": token}
    if isinstance(wanted, int):
        assert find_eot(*contents) == wanted
        return
    with pytest.raises(DataError, match=wanted) as error:
        find_eot(*contents)
    assert f"1 ({END})" in str(error.value) and "(</s>)" in str(error.value)


def test_ids_that_do_not_fit_are_refused(folders, tmp_path):
    """As those of most models of 2024 and later; before any text is read."""
    body = json.loads((folders["byte level"] / "tokenizer.json").read_text())
    files = {"tokenizer.json": body, "config.json": {"eos_token_id": 1}}
    body["model"]["vocab"]["t"] = 65535
    assert load_tokenizer(str(write_jsons(tmp_path / "fits", files))).encode("t") == [65535]
    body["model"]["vocab"]["t"] = 65536
    folder = write_jsons(tmp_path / "large", files)
    with pytest.raises(DataError, match=f"^{folder}: it has 65537 ids, shards hold 65536"):
        load_tokenizer(str(folder))


def test_documents_are_compared_throughout(run, tmp_path, monkeypatch, small_batches):
    """The first of each file, and each 31st after it; of these the first of 31 pieces."""
    encode = mock.Mock(side_effect=BYTES.encode)
    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    monkeypatch.setattr("data.round_trip.PIECE", 50)
    texts = [f"{i:02} " * 600 for i in range(66)]
    files = {"a.jsonl": jsonl(texts[:33]), "b.jsonl": jsonl(texts[33:])}
    run("text", "--source", write_tree(tmp_path / "in", files), "--val-fraction", 0.3)
    pieces = [texts[i][start : start + 50] for i in (0, 31, 33, 64) for start in (0, 1550)]
    assert encode.mock_calls == [*map(mock.call, pieces)]


class NoDigits(ByteTokenizer):
    """Digits do not come back."""

    name = "no digits"

    def decode(self, ids):
        return re.sub(r"\d", "", super().decode(ids))


def test_losses(run, tmp_path, monkeypatch, small_batches):
    """Up to a thousandth of the characters are said, and kept in meta.json; more are refused, also
    if they come late. What is done resumes with --allow-loss.
    """
    for module in ("prepare", "tokenizer"):
        monkeypatch.setattr(f"data.{module}.load_tokenizer", lambda *_: NoDigits())
    file = tmp_path / "in.jsonl"
    args = ("text", "--source", file, "--val-fraction", 0.3)
    rows = ["x" * i for i in range(1, 321)]
    file.write_bytes(jsonl([*rows, *["text 1"] * 60]))
    share = 200 / (12 + sum(range(1, 321, 31)))
    says = f"differs for 2 of 13 documents compared, in {share:.3g}% of their characters, first "
    assert f"{says}{file}: line 342: 'text 1' becomes 'text '" in run(*args, code=2)
    assert "resuming after" in run(*args, "--allow-loss")
    text = "b" * 20 + "7" + "c" * 979
    file.write_bytes(jsonl([text[1:], *rows[:30]]))
    assert "differs for 1 of 1 documents compared" in run(*args, "--force", code=2)
    file.write_bytes(jsonl([text, *rows[:30]]))
    loss = "decode(encode(x)) differs for 1 of 1 documents compared, in 0.1% of their characters, "
    loss += f"first {file}: line 1: '{'b' * 15}7{'c' * 14}' becomes '{'b' * 15}{'c' * 15}'"
    assert f"warning: tokenizer no digits: {loss}\n" in run(*args, "--force")
    assert read_meta(tmp_path / "out/text").source["losses"] == [loss]
    assert f"warning: {loss}\n" in run("text", main=verify)


def test_a_space_at_the_start_is_no_loss():
    """Which many tokenizers add or drop; more of them are one."""
    for decoded, lost in {"  x": 0, " x": 0, "   x": 0, "x": 2, "    x": 2, "  X": 1}.items():
        loss = Loss()
        fake = SimpleNamespace(encode=str, decode=lambda text, decoded=decoded: decoded)
        loss.compare(fake, "  x", "here")
        assert loss.counts["lost"] == lost and loss.counts["characters"] == 3


@given(text=st.text(max_size=40), decoded=st.text(max_size=40))
def test_changes_are_counted(text, decoded):
    """At least one where texts differ; letters in another order are a loss."""
    added = sum(max(0, decoded.count(c) - text.count(c)) for c in {*decoded})
    missing = sum(max(0, text.count(c) - decoded.count(c)) for c in {*text})
    if text != decoded:
        assert count_changes(text, decoded) == max(1, added, missing)
        kept, _, found = show_difference(text, decoded).partition(" becomes ")
        assert kept != found


def test_a_text_that_a_tokenizer_cannot_encode(run, tmp_path, small_batches, many_workers):
    """Is told in a line: here in the last document, which is not compared."""
    body = json.loads(build("Unigram").to_str())
    body["model"]["unk_id"] = None
    write_jsons(tmp_path / "no unk", {"tokenizer.json": body, "config.json": {"eos_token_id": 1}})
    rows = [f"quick brown fox {i}" for i in range(40)]
    (tmp_path / "in.jsonl").write_bytes(jsonl([*rows, "\u4e00\u9fff\u2603"]))
    args = ("--source", tmp_path / "in.jsonl", "--tokenizer", tmp_path / "no unk")
    out = run("text", *args, "--val-fraction", 0.3, "--workers", 2, code=2)
    error = out[out.index("error: ") :]
    assert error.startswith("error: tokenizer no unk cannot encode a text (Encountered an unk")
    assert error.count("\n") == 1 and not (tmp_path / "out/text").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_text_file_and_of_the_tokens_of_a_set(folders, tmp_path, kind):
    """A file's are its own. A set's are those of each document, with the space that a tokenizer
    puts before it, or none at all.
    """
    own = load_tokenizer(str(folders[kind]))
    texts = [*LATIN[:20], *MIXED[:30], " a\n"]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    corpus = open_text(tmp_path / "a.jsonl", own, 8, 3)
    assert corpus.bytes == sum(len(text.encode()) for text in texts)
    ids = np.concatenate([scored for _, scored in corpus.pairs])
    assert ids.tolist() == [i for text in texts for i in own.encode(text)]
    counts = list_byte_counts(own)
    assert counts[own.eot] == 0 and (own.unk is None or counts[own.unk] == 0)
    texts[-1] = "a \u2603\U0001d11e b"  # whose bytes may be tokens
    for text in LATIN if kind == "no alphabet" else texts:
        ids = own.encode(text)
        if kind in ("WordPiece", "</w>"):
            assert counts[ids].sum() == 0
        elif own.unk not in ids:
            assert counts[ids].sum() == len(text.encode()) + (kind in ("Metaspace", "Unigram"))


# what is lost
# spaces between Japanese characters; characters outside the alphabet; white space becomes a space
LOSSY = ["WordPiece", "no alphabet", "</w>"]


# what leaves, and other projects' folders
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_and_an_export_of_each_kind(run, folders, tmp_path, tiny, call, kind):
    """docs/data.md: 200 documents of six scripts come back, or are refused with the reason.

    The padding of an export is a token that no text has. Runs start from it if the ids are the
    same.
    """
    (tmp_path / "in.jsonl").write_bytes(jsonl(MIXED))
    args = ("text", "--source", tmp_path / "in.jsonl", "--tokenizer", folders[kind])
    args += ("--val-fraction", 0.3)
    if kind in LOSSY:
        out = run(*args, code=2)
        assert "decode(encode(x)) differs for " in out and "--allow-loss" in out
        assert not (tmp_path / "out/text").exists()
        assert "warning: tokenizer" in run(*args, "--allow-loss")
    else:
        assert "differs" not in run(*args)
        read = documents_of(tmp_path / "out/text")
        assert sorted(read["train"] + read["val"]) == sorted(MIXED)
    own = load_tokenizer(str(folders[kind]))
    settings = [f"data.dir={tmp_path}/out", "data.name=text", "train.max_steps=1"]
    settings += ["eval.windows=2", f"model.vocab_size={own.vocab_size + 7}", *SHAPE, *OURS["olmoe"]]
    config = tiny(*settings)
    train.train(config)
    out = tmp_path / "export"
    assert "note: " not in call(export.main, path_of(config), out, "--check")
    theirs = AutoTokenizer.from_pretrained(out)
    padding = theirs.pad_token_id
    for text in MIXED:
        ids = own.encode(text)
        assert theirs.encode(text) == ids and padding not in ids
    if kind == "strange":
        text = f"  ä\n\n 日本 {END} 🙂"
        assert theirs(text, split_special_tokens=True)["input_ids"] == own.encode(text)
    others = {"byte level": "[PAD]", "strange": f"<|padding {padding}|>"}
    assert theirs.pad_token == others.get(kind, "<|padding|>")
    assert (padding < own.vocab_size) == (kind == "byte level") and padding != own.eot
    model = AutoModelForCausalLM.from_pretrained(out)
    for each in (model.config, model.generation_config, theirs):
        ids = (each.bos_token_id, each.eos_token_id, each.pad_token_id)
        assert ids == (own.eot, own.eot, padding)
    end = theirs.eos_token
    assert theirs(f"fox {end}")["input_ids"][-1] == own.eot  # and not padding
    names = {}  # of the card's example
    exec((out / "README.md").read_text().split("```")[1][6:].replace("PATH", str(out)), names)
    assert names["ids"]["input_ids"][0].tolist() == [own.eot, *own.encode("The ")]
    again = tiny(*settings, "run.name=again", f"train.init_from={out}")
    read_initial_weights(again)
    shutil.copy(folders[kind] / "tokenizer.json", out)  # as another project has it
    read_initial_weights(again)


def test_a_folder_of_nanogpt_is_called_so(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/ckpt.pt").write_bytes(b"PK")
    with pytest.raises(RunError, match="a folder of nanoGPT, whose ckpt.pt"):
        check_is_run(tmp_path / "out")
