"""Any config file, command line or data set: it runs no code, and every error names its place.
Hypothesis generates the values, the same ones in each run."""

import json
import math
import pickle
import shutil

import pytest
import tomli_w
from conftest import Payload, fuzz
from corpora import edit_meta, write_ids
from hypothesis import given
from hypothesis import strategies as st

from configure import Config, ConfigError, from_command_line, load, sweep_points
from configure.schema import KEYS, SECTIONS
from data import DataError, prepare
from data.bins import Meta, check_dataset, fingerprint, open_tokenizer, open_tokens, read_meta
from data.loader import Loader
from data.tokenizer import load_tokenizer

ANY_TEXT = st.text(max_size=12)
TOML_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers() | st.floats()
NUMBERS |= st.sampled_from([0, -1, 1, 2**31, 2**63 - 1, 2**63, 10**400, -(10**400), 1e308, 5e-324])
DATES = st.one_of(st.datetimes(), st.dates(), st.times())
CHOICES = st.sampled_from([value for schema in KEYS.values() for value in schema.get("enum", [])])
TOML = st.recursive(
    st.one_of(st.booleans(), NUMBERS, TOML_TEXT, DATES, CHOICES),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TOML_TEXT, values, max_size=3),
    max_leaves=5,
)
NAMES = st.one_of(st.sampled_from([key.split(".")[1] for key in KEYS]), TOML_TEXT)
SECTION = st.dictionaries(NAMES, TOML, max_size=3)
SETTING = st.sampled_from(list(KEYS)).flatmap(lambda key: st.tuples(st.just(key), TOML))
TABLE = st.dictionaries(st.one_of(st.sampled_from([*SECTIONS, "sweep"]), TOML_TEXT), SECTION | TOML, max_size=3)


def outcome(file, overrides=(), world_size=1):
    """A Config, or the error message of a refused input; nothing else may happen."""
    try:
        sweep_points(file, overrides)
        config = load(file, overrides, world_size)
    except ConfigError as error:
        for line in str(error).splitlines():  # its place, or the keys that clash
            assert line.strip().startswith((str(file), "command line: ", "train all: ", "train one: ", *KEYS))
        return str(error)
    assert isinstance(config, Config)
    return config


@pytest.fixture(scope="module")
def config_file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "fuzzed.toml"


@fuzz
@given(setting=SETTING, world_size=st.sampled_from([1, 2, 8]))
def test_any_value_of_a_known_key(config_file, setting, world_size):
    key, value = setting
    section, name = key.split(".")
    config_file.write_text(tomli_w.dumps({section: {name: value}}), encoding="utf-8")
    result = outcome(config_file, (), world_size)
    if isinstance(result, Config):
        value_read = getattr(getattr(result, section), name)
        assert value_read == type(value_read)(value) or not value  # a run without a name gets one
        assert not isinstance(value_read, float) or math.isfinite(value_read)
    else:
        assert key in result


SIZES = {key: schema for key, schema in KEYS.items() if schema["type"] == "integer"}
SIZE = st.sampled_from(list(SIZES)).flatmap(
    lambda key: st.tuples(st.just(key), st.integers(SIZES[key]["minimum"], SIZES[key].get("maximum", 10**6)))
)


@fuzz
@given(sizes=st.lists(SIZE, max_size=4), world_size=st.integers(1, 4096))
def test_sizes_each_valid_alone(config_file, sizes, world_size):
    config_file.write_text("")
    result = outcome(config_file, [f"--{key}={size}" for key, size in sizes], world_size)
    assert isinstance(result, Config) or any(f"set --{key}=" in result for key in KEYS)


@fuzz
@given(table=TABLE)
def test_any_table(config_file, table):
    config_file.write_text(tomli_w.dumps(table), encoding="utf-8")
    outcome(config_file)


@fuzz
@given(
    key=st.sampled_from(list(KEYS)) | ANY_TEXT, value=ANY_TEXT | NUMBERS.map(str) | st.text("[]{}\"'=,.0123456789#\n")
)
def test_any_override(config_file, key, value):
    config_file.write_text("")
    result = outcome(config_file, [f"--{key}={value}"])
    assert isinstance(result, Config) or "command line: " in result or any(key in result for key in KEYS)


@fuzz
@given(argv=st.lists(ANY_TEXT | st.sampled_from(["--model.n_layer", "3", "--", "--config", "fuzzed.toml"]), max_size=4))
def test_any_command_line(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        from_command_line(argv)
    assert caught.value.code in (0, 2)
    out, err = capsys.readouterr()
    assert (out if caught.value.code == 0 else err).strip()


@fuzz
@given(data=st.data())
def test_config_with_replaced_bytes(config_file, tiny_file, data):
    text = tiny_file.read_bytes()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(start + 9, len(text))))
    config_file.write_bytes(text[:start] + data.draw(st.binary(max_size=6)) + text[stop:])
    outcome(config_file)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | ANY_TEXT | st.sampled_from(["../val-00000.bin", "/etc/passwd", "uint32"]),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(ANY_TEXT, values, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def fuzzed_set(tmp_path_factory):
    """Folder of a valid set of 60 and 20 tokens, and its valid meta.json."""
    folder = write_ids(tmp_path_factory.mktemp("fuzz") / "set", range(60), range(20), 25)
    return folder, (folder / "meta.json").read_bytes()


def places(value, place=()):
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from places(part, (*place, key))


def try_set(folder, meta: bytes):
    """The data set under another meta.json: either it works, or a DataError names it; nothing else may happen."""
    (folder / "meta.json").write_bytes(meta)
    try:
        checked = check_dataset(folder, 50304)
    except DataError as error:
        assert str(folder) in str(error) and "repare" in str(error)
        return None
    assert isinstance(checked, Meta) and checked == read_meta(folder)
    assert {split: checked.splits[split].tokens for split in checked.splits} == {"train": 60, "val": 20}
    assert all(isinstance(value, str) for value in fingerprint(checked).values())
    assert Loader(open_tokens(folder, "train"), 4, 3, 0).batch(0)[0].shape == (3, 4)
    return checked


@fuzz
@given(data=st.data())
def test_any_value_anywhere_in_meta(fuzzed_set, data):
    folder, valid = fuzzed_set
    meta = {"": json.loads(valid)}
    for _ in range(data.draw(st.integers(1, 2))):
        *way, last = data.draw(st.sampled_from([place for place in places(meta) if place]))
        parent = meta
        for key in way:
            parent = parent[key]
        change = data.draw(st.sampled_from(["replace", "replace", "remove", "add", "repeat"]))
        if change == "remove":
            del parent[last]
        elif change == "add" and isinstance(parent, dict):
            parent[data.draw(ANY_TEXT)] = data.draw(JSON)
        elif change == "repeat" and isinstance(parent, list):
            parent.append(parent[last])
        else:
            parent[last] = data.draw(JSON)
        meta.setdefault("", None)
    try_set(folder, json.dumps(meta[""]).encode())


@pytest.mark.parametrize(
    "meta", [b"", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"NaN", b"null", b"\xff\xfe", b'"\\ud800"']
)
def test_invalid_meta(fuzzed_set, meta):
    assert try_set(fuzzed_set[0], meta) is None and try_set(*fuzzed_set) is not None


@pytest.fixture
def pickled(canary):
    payload = pickle.dumps(Payload(canary))
    pickle.loads(payload)
    canary.unlink()  # raises if the payload did not work
    return payload


@pytest.fixture
def copied(tmp_path, corpus):
    return shutil.copytree(corpus / "tiny", tmp_path / "data/tiny")


def test_a_pickle_as_ranks_runs_nothing(copied, pickled):
    edit_meta(copied, lambda meta: meta["tokenizer"].update(name="gpt2"))
    ranks = copied / "gpt2.tiktoken"
    ranks.write_bytes(pickled)
    for use, place in ((lambda: load_tokenizer("gpt2", ranks), ranks), (lambda: open_tokenizer(copied), copied)):
        with pytest.raises(DataError, match=f"{place}.*: not GPT-2's BPE file: sha256"):
            use()


def test_code_as_a_tokenizers_name_runs_nothing(copied, canary):
    name = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    edit_meta(copied, lambda meta: meta["tokenizer"].update(name=name))
    with pytest.raises(DataError, match="no tokenizer .*choose one of bytes, gpt2"):
        open_tokenizer(copied)


def test_a_pickle_as_a_shard_runs_nothing(copied, pickled):
    shard = copied / "train-00000.bin"
    size = shard.stat().st_size
    for data, says in ((pickled, f"expected {size} bytes"), (pickled.ljust(size, b"."), "train-00000.bin: id ")):
        shard.write_bytes(data)
        with pytest.raises(DataError, match=says):
            check_dataset(copied, 257)
    windows = Loader(open_tokens(copied, "train"), 32, 8, 0)
    with pytest.raises(DataError, match="the train split of .*tiny: id [0-9]+ at token [0-9,]+, expected below 257"):
        windows.batch(0)


def test_a_pickle_in_an_unfinished_set_runs_nothing(tmp_path, pickled, capsys):
    (tmp_path / "text.txt").write_text("some text " * 99)
    (tmp_path / "set.partial").mkdir()
    (tmp_path / "set.partial/progress.json").write_bytes(pickled)
    command = ["text", "--source", str(tmp_path / "text.txt"), "--tokenizer", "bytes", "--out", str(tmp_path)]
    assert prepare.main([*command, "--name", "set"]) == 2
    assert "progress.json cannot be read: start over with --force" in capsys.readouterr().err


PAYLOADS = ["__import__('pathlib').Path('CANARY').touch()", "exec(\"open('CANARY', 'w')\")", "$(touch CANARY)"]
PAYLOADS += ["!!python/object/apply:pathlib.Path.touch [CANARY]", "`touch CANARY`", "../CANARY"]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_text_of_a_config_is_never_run(tmp_path, monkeypatch, canary, payload):
    monkeypatch.chdir(tmp_path)
    payload = payload.replace("CANARY", str(canary))
    file = tmp_path / "config.toml"
    for key in ("run.name", "run.dir", "model.router", "model.n_layer", "x"):
        file.write_text(f"{key} = {json.dumps(payload)}\nsweep.run.seed = [1, 2]")
        for overrides in ([], ["--run.seed=1"], [f"--{key}={payload}", "--run.seed=1"]):
            result = outcome(file, overrides)
            if isinstance(result, Config):  # text stays text
                assert result.run.dir == payload and key == "run.dir"
        file.write_text(f"{key} = {payload}")
        assert isinstance(outcome(file), str)
        assert {path.name for path in tmp_path.iterdir()} == {"config.toml"}
