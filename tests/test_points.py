"""configure/load.py: the [sweep] of a config file, its points, their names, linked axes, errors."""

import re

import pytest

from configure import ConfigError, dumps, load, sweep_points


def refuse(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value)


SWEEP = '[sweep]\n"model.router" = ["dense", "kern"]\noptim.lr = [1e-3, 1]\n'
SHAPES = [(32, 4, 768), (64, 8, 384), (256, 32, 96)]
LINKED = f"""
[sweep]
"model.n_expert, model.top_k,model.expert_hidden" = {[list(shape) for shape in SHAPES]}
"""


def name_runs(file, *overrides):
    """The names of the runs of a sweep, in order."""
    return [load(file, point).run.name for point in sweep_points(file, overrides)]


def test_points_are_the_product_in_file_order(write):
    file = write(SWEEP)
    points = sweep_points(file, ["--run.seed=1"])
    pairs = [("dense", "0.001"), ("dense", "1"), ("kern", "0.001"), ("kern", "1")]
    assert points == [
        ["--run.seed=1", f"--model.router={router}", f"--optim.lr={lr}"] for router, lr in pairs
    ]
    config = load(file, points[1])
    assert (config.run.name, config.log.group) == ("x-dense-lr1-seed1", "x")
    assert (config.model.router, config.optim.lr, config.run.seed) == ("dense", 1.0, 1)
    assert load(write(dumps(config), "config.toml")) == config
    assert load(file, [*points[0], "--log.group=mine"]).log.group == "mine"


@pytest.mark.parametrize(
    ("axis", "names"),
    [
        ("sweep = 3", "sweep = 3: expected a list of values"),
        ("sweep.model = [{}]", "model = {}: is a section"),
        ('sweep."model.router" = []', "model.router = []: expected a list of values"),
        ('sweep.router = ["kern"]', "unknown key; did you mean 'model.router'?"),
        ('sweep."model.router" = ["kern", "kernn"]', "model.router = 'kernn'"),
        (
            'sweep."model.n_expert, model.top_k" = [[32, 4], [64]]',
            "expected a list of rows of 2 values",
        ),
        ('sweep."model.n_expert, model.top_k" = 32', " = 32: expected a list of rows of 2 values"),
        ('sweep."model.n_expert, model.top_k" = [[32, "4"]]', "model.top_k = '4': "),
        ('sweep."model.n_expert," = [[32, 4]]', "'' = 4: unknown key"),
        (
            'sweep."model.top_k, run.seed" = [[4, 4]]\nsweep.run.seed = [1]',
            "run.seed: is in the axes more than once",
        ),
    ],
)
def test_a_wrong_axis_fails_before_the_first_run(write, axis, names):
    file = write(axis)
    for text in (refuse(load, file, ["--model.router=kern"]), refuse(sweep_points, file)):
        assert text.startswith(str(file)) and names in text
    assert refuse(sweep_points, write("sweep.model.top_k = [8, 65]")).startswith(
        "model.top_k = 65 is more"
    )


@pytest.mark.parametrize(
    "text, overrides",
    [
        ("sweep.run.seed = [1, 1]", []),
        ("run.name = 'x'\nsweep.run.seed = [1, 2]", []),
        ("run.name = 'x'", ["--optim.lr=[1e-3, 2e-3]"]),
        ('sweep."model.n_expert, model.top_k" = [[64, 16], [64, 16]]', []),
    ],
)
def test_points_never_share_a_folder(write, text, overrides):
    message = refuse(sweep_points, write(text), overrides)
    assert "two points would write to runs/" in message and "leave run.name unset" in message
    assert len(sweep_points(write("run.name = 'x'\nsweep.run.dir = ['a', 'b']"))) == 2


def test_linked_keys_take_their_values_row_by_row(write):
    file = write(LINKED + 'data.name = ["books3", "arxiv"]', "g.toml")
    models = [load(file, point).model for point in sweep_points(file)]
    assert [(m.n_expert, m.top_k, m.expert_hidden) for m in models[::2]] == SHAPES
    names = [f"g-kern-n_expert{n}-{text}" for n in (32, 64, 256) for text in ("books3", "arxiv")]
    assert name_runs(file) == names
    # the first key's values repeat, the last's do not
    file = write('sweep."model.n_expert, model.top_k" = [[32, 4], [64, 8], [64, 16]]', "g.toml")
    assert name_runs(file) == [
        f"g-kern-n_expert{n}-top_k{k}" for n, k in ((32, 4), (64, 8), (64, 16))
    ]
    file = write(LINKED, "g.toml")
    given = ["--model.top_k=2"]
    text = refuse(load, file, given)  # they are overridden together
    assert "are linked, set all of them or none; add " in text
    given += [f"{override}16" for override in re.findall(r"--\S+=", text.replace("VALUE", ""))]
    assert len(given) == 3
    assert "; add --model.expert_hidden=VALUE" in refuse(load, file, given[:2])
    assert [load(file, point).model.n_expert for point in sweep_points(file, given)] == [16]


def test_a_list_on_the_command_line_is_an_axis(write):
    file = write(SWEEP)
    axes = ["--run.seed=[0, 1]", "--optim.lr=[0.5]"]
    assert name_runs(file, *axes) == [
        f"x-{router}-lr0.5-seed{seed}" for router in ("dense", "kern") for seed in (0, 1)
    ]
    point = ["--log.interval=3", "--model.router=dense", "--optim.lr=0.5", "--run.seed=0"]
    assert sweep_points(file, [*axes, "--log.interval=3"])[0] == point
    assert len(sweep_points(file, ['--model.router=["kern"]'])) == 2
    names = name_runs(write(name="y.toml"), "--model.router=[kern,tanh, dense]")
    assert names == ["y-kern", "y-tanh", "y-dense"]
    text = refuse(sweep_points, file, ['--run.seed=[0, "x"]'])
    assert text.startswith("command line: ") and "run.seed = 'x': " in text
    assert len(sweep_points(file, ["--run.seed=[0, 1]", "--run.seed=2"])) == 4  # the last one wins
    assert len(sweep_points(file, ["--run.seed=2", "--run.seed=[0, 1]"])) == 8
    assert sweep_points(write(), ["--optim.eps=[1, 2]", "--optim.eps=3"]) == [["--optim.eps=3"]]
    # several tasks are one value
    (point,) = sweep_points(write(), ['--eval.tasks=["a", "b"]'])
    assert load(write(), point).eval.task_names == ["a", "b"]
    assert "model.router = '[kern': " in refuse(sweep_points, file, ["--model.router=[kern"])
