"""Any config file or command line: it runs no code, and every error names its place.
Hypothesis generates the values, the same ones in each run."""

import json
import math
import tomllib

import pytest
import tomli_w
from conftest import fuzz
from hypothesis import given
from hypothesis import strategies as st

from configure import Config, ConfigError, dumps, load, sweep_points
from configure.schema import KEYS, SECTIONS

ANY_TEXT = st.text(max_size=12)
TOML_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = (
    st.integers()
    | st.floats()
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 10**400, -(10**400), 1e308, 5e-324])
)
CHOICES = st.sampled_from([value for schema in KEYS.values() for value in schema.get("enum", [])])
TOML = st.recursive(
    st.booleans() | NUMBERS | TOML_TEXT | st.datetimes() | st.dates() | st.times() | CHOICES,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TOML_TEXT, values, max_size=3),
    max_leaves=5,
)
NAMES = st.one_of(st.sampled_from([key.split(".")[1] for key in KEYS]), TOML_TEXT)
LITERALS = st.text("[]{}\"'=,.0123456789#\n")
SECTION = st.dictionaries(NAMES, TOML, max_size=3)
SETTING = st.tuples(st.sampled_from(list(KEYS)), TOML)
TABLE = st.dictionaries(
    st.one_of(st.sampled_from([*SECTIONS, "sweep"]), TOML_TEXT), SECTION | TOML, max_size=3
)


def outcome(file, overrides=(), world_size=1):
    """A Config, or the error message of a refused input; nothing else may happen."""
    try:
        sweep_points(file, overrides)
        config = load(file, overrides, world_size)
    except ConfigError as error:
        for line in str(error).splitlines():  # its place, or the keys that clash
            commands = ("train all: ", "train one: ", "plan one: ")
            assert line.strip().startswith((str(file), "command line: ", *commands, *KEYS))
        return str(error)
    assert Config.model_validate(tomllib.loads(dumps(config))) == config
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


SIZE = st.one_of(
    st.tuples(st.just(key), st.integers(schema["minimum"], schema.get("maximum", 10**6)))
    for key, schema in KEYS.items()
    if schema["type"] == "integer"
)


@fuzz
@given(sizes=st.lists(SIZE, max_size=4), world_size=st.integers(1, 4096))
def test_sizes_each_valid_alone(config_file, sizes, world_size):
    config_file.write_text("")
    result = outcome(config_file, [f"--{key}={size}" for key, size in sizes], world_size)
    assert isinstance(result, Config) or any(f"set --{key}=" in result for key in KEYS)


@fuzz
@given(
    table=TABLE,
    key=st.sampled_from(list(KEYS)) | ANY_TEXT,
    value=ANY_TEXT | NUMBERS.map(str) | LITERALS,
)
def test_any_table_and_any_override(config_file, table, key, value):
    config_file.write_text(tomli_w.dumps(table), encoding="utf-8")
    outcome(config_file)
    config_file.write_text("")
    result = outcome(config_file, [f"--{key}={value}"])
    assert isinstance(result, Config) or str(config_file) not in result


@pytest.mark.parametrize("payload", ["__import__('pathlib').Path('canary').touch()", "../canary"])
def test_text_of_a_config_is_never_run(tmp_path, monkeypatch, payload):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    file = tmp_path / "config.toml"
    for key in ("run.name", "run.dir", "model.router", "model.n_layer", "x"):
        file.write_text(f"{key} = {json.dumps(payload)}\nsweep.run.seed = [1, 2]")
        for overrides in ([], [f"--{key}={payload}", "--run.seed=1"]):
            result = outcome(file, overrides)
            if isinstance(result, Config):  # text stays text
                assert result.run.dir == payload and key == "run.dir"
        file.write_text(f"{key} = {payload}")
        assert isinstance(outcome(file), str)
    assert sorted(tmp_path.rglob("*")) == [file, tmp_path / "folder"]
