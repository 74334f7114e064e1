"""scripts.sweep: points in sequence, in parallel, as a Slurm array; totals, failures,
stop signals.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
from fake_runs import add_checkpoint
from runs import REPO_ROOT, wait_until
from runs import run as train_run

import configure
from configure.schema import replace
from runtime import folder
from runtime.distributed import GPUS
from runtime.launch import EXIT_CODE, Stop
from runtime.memory import count_parameters, flops_per_token
from runtime.step_time import estimate_mfu
from scripts import sweep

HANG = 300  # seconds after which a test that waits for something has failed


@pytest.fixture
def sweep_file(tiny_file):
    axes = '\n[sweep]\n"model.router" = ["dense", "kern"]\n"run.seed" = [0, 1]\n'
    tiny_file.write_text(tiny_file.read_text().replace('name = "tiny"\ndir', "dir", 1) + axes)
    return tiny_file


def commands(out):
    lines = re.findall(r"^\[(\d+/\d+)\] ((?:python|torchrun) .*?)(?:    # log: .*)?$", out, re.M)
    return [(number, shlex.split(command)) for number, command in lines]


FAKE = """\
import json, os, signal, sys, time
from pathlib import Path
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
named = [word for word in sys.argv if word.startswith(("--model.router", "--run.seed"))]
point = " ".join(word.partition("=")[2] for word in named)
note = {"point": point, "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"), "group": os.getpgid(0)}
print("says", point, flush=True)
with Path(sys.argv[0]).with_suffix(".jsonl").open("a") as file:
    file.write(json.dumps(note) + "\\n")
event = Path(os.environ.get("WAIT_FOR", "/"))
while not asked and not event.exists() and Path(sys.argv[0]).exists():
    time.sleep(0.02)
time.sleep(bool(asked) * point.count("1"))  # of points that are stopped one ends first
if asked:
    sys.exit(int(os.environ.get("STOPPED_CODE", 75)))
sys.exit(int(os.environ.get("EXIT_CODE", "dense" in point)))
"""


@pytest.fixture
def fake_trainer(tmp_path, monkeypatch):
    """Replace train.py by a program that notes how it was started, and return a function that
    reads those notes.

    The program waits until the file `WAIT_FOR`, if it is set, exists, or this test ends. Its exit
    code is `EXIT_CODE`, by default 1 for dense, or `STOPPED_CODE`, 75, when asked to stop.
    """
    trainer = tmp_path / "fake" / "trainer.py"
    trainer.parent.mkdir()
    trainer.write_text(FAKE)
    monkeypatch.setattr(sweep, "TRAIN", trainer)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notes = trainer.with_suffix(".jsonl")

    def read_notes():
        lines = notes.read_text().splitlines() if notes.exists() else []
        return [json.loads(line) for line in lines]

    yield read_notes
    trainer.unlink()


# ---- in sequence
def test_finished_points_are_skipped_and_others_are_not(
    sweep_file, fake_trainer, call, tmp_path, capsys
):
    points = sweep.list_points(str(sweep_file), [])
    for point in points[:2]:
        train_run(point.config)
    out = call(sweep.main, sweep_file, "--dry-run")
    assert "4 points, 2 finished" in out
    assert [number for number, _ in commands(out)] == ["3/4", "4/4"]
    assert f"[1/4] finished already: {points[0].folder}\n" in out
    assert points[0].steps_done() == 4 and points[2].steps_done() == 0
    nothing = call(sweep.main, sweep_file, "--model.router=dense", "--slurm", tmp_path / "x")
    assert nothing == "2 points, 2 finished\n" and not (tmp_path / "x").exists()
    for steps, done in ((6, 4), (3, 3)):
        first = sweep.list_points(str(sweep_file), [f"--train.max_steps={steps}"])[0]
        assert first.steps_done() == done
    (points[0].folder / "metrics.jsonl").write_text('{"step": 2, "tokens": 9, "val/loss": 2.0}\n')
    assert points[0].steps_done() == 3  # its last evaluation is left to do
    other = ["--optim.lr=1e-4", "--run.seed=0", "--model.router=dense"]
    assert sweep.main([str(sweep_file), *other]) == 1
    report = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert [note["point"] for note in fake_trainer()] == ["0 dense"]  # of another config: it trains
    first = sweep.list_points(str(sweep_file), ["--optim.lr=1e-4"])[0]
    assert first.overrides[-1] == f"--run.name={points[0].folder.name}-lr0.0001"
    chosen = [*other, f"--run.name={points[0].folder.name}"]  # train.py refuses it
    assert sweep.list_points(str(sweep_file), chosen)[0].steps_done() == 0
    # the run of the other config in the point's folder is not reported
    assert report == ["python", "-m", "scripts.report", str(first.folder)]


def test_a_failed_point_is_named_and_a_stopped_one_stops_the_sweep(
    sweep_file, fake_trainer, monkeypatch, capfd
):
    assert sweep.main([str(sweep_file), "--run.seed=0"]) == 1
    said = capfd.readouterr()
    assert [note["point"] for note in fake_trainer()] == ["0 dense", "0 kern"]
    assert "says 0 kern\n" in said.out and "no runs in " in said.out
    assert said.err == f"failed: python train.py {sweep_file} --run.seed=0 --model.router=dense\n"
    monkeypatch.setenv("EXIT_CODE", str(EXIT_CODE))
    assert sweep.main([str(sweep_file), "--run.seed=1"]) == EXIT_CODE
    # points that wait are not started
    assert [note["point"] for note in fake_trainer()[2:]] == ["1 dense"]
    said = "".join(capfd.readouterr())
    assert "failed: " not in said and "no runs in" not in said  # no table: it is not finished


def test_a_list_for_any_key_is_an_axis_with_its_values_in_the_names(sweep_file, call):
    words = ["--run.seed=0", "--optim.lr=[1e-3,2e-3]", "--model.router=[kern,tanh]"]
    points = sweep.list_points(str(sweep_file), words)
    names = [f"tiny-{router}-seed0-lr{lr}" for router in ("kern", "tanh") for lr in (0.001, 0.002)]
    assert sorted(point.folder.name for point in points) == names
    assert len(call(sweep.main, sweep_file, *words, "--dry-run").splitlines()) == 5


def test_the_quickstart_reports_the_folders_of_its_sweep(tmp_path):
    """With programs in place of Python's and of the installation that note how they are called."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "quickstart.sh").write_text((REPO_ROOT / "scripts/quickstart.sh").read_text())
    (scripts / "setup.sh").write_text("")
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$*" >> notes\ncase "$*" in *--dry-run)\n'
        'echo "2 points, 2 finished"\n'
        'echo "[1/2] finished already: runs/quickstart-dense"\n'
        'echo "[2/2] finished already: runs/quickstart-kern-lr0.1";;\n'
        'esac\n[ -t 1 ] && echo "in a terminal" >> notes\nexit 0\n'
    )
    python.chmod(0o755)
    environment = dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}")
    command = shlex.join(["bash", str(scripts / "quickstart.sh")])
    # script's terminal: the tables of a report fit it
    in_terminal = ["script", "-qec", command, "/dev/null"]
    done = subprocess.run(
        in_terminal, cwd=tmp_path, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    page, _, activate = done.stdout.splitlines()[-3:]
    assert "runs/report-quickstart/report.html" in page
    assert activate.endswith(": source .venv/bin/activate")
    notes = (tmp_path / "notes").read_text()
    folders = "runs/quickstart-dense runs/quickstart-kern-lr0.1"
    page = f"scripts.report {folders} --out runs/report-quickstart\nin a terminal\n"
    assert page in notes
    assert "scripts.sample runs/quickstart-kern-lr0.1 --prompt" in notes


@pytest.mark.parametrize(
    "words, says",
    [
        # options are not guessed at
        (["--optim.lrr=1"], "did you mean 'optim.lr'?"),
        (["--dry=1"], "unknown key"),
        (["--parallel", "0"], "--parallel 0: expected 1 or more"),
    ],
)
def test_sweep_refuses_bad_input(sweep_file, call, words, says):
    assert says in call(sweep.main, sweep_file, *words, code=2)
    assert "one config file is needed, found none" in call(sweep.main, code=2)


def test_a_slurm_script_has_no_name_with_a_newline(sweep_file, tmp_path, call):
    odd = sweep_file.with_name("a\nb.toml")
    shutil.copy(sweep_file, odd)
    for file, script in ((odd, tmp_path / "x"), (sweep_file, tmp_path / "x\ny")):
        said = call(sweep.main, file, "--slurm", script, code=2)
        assert "has a newline" in said and "\\n" in said and said.count("\n") == 1
        assert not script.exists()


def test_missing_data_and_trunks_are_found_before_the_first_point_starts(
    sweep_file, fake_trainer, call, tiny
):
    assert "the model's vocab_size is 100" in call(
        sweep.main, sweep_file, "--model.vocab_size=100", code=2
    )
    same = ["model.router=kern", "run.seed=0", "optim.schedule=wsd"]
    of_trunk = [*same, "run.name=trunk", "train.max_steps=10", "train.keep_steps=4"]
    trunk = tiny(*of_trunk)
    words = [f"--{word}" for word in same]
    words += [f"--train.branch_from={folder.path_of(trunk)}", "--train.max_steps=[5,8]"]
    assert "[2/2]" in call(sweep.main, sweep_file, *words, "--dry-run")
    assert "no config.toml there, so not a run; train it first" in call(
        sweep.main, sweep_file, *words, code=2
    )
    points = sweep.list_points(str(sweep_file), words)
    first = sweep.Point("1/3", [f"--{word}" for word in of_trunk], trunk)
    sweep.check_points(str(sweep_file), [first, *points], 1, with_files=True)
    copies = [add_checkpoint(point.folder, 2) for point in points]  # they resume without a trunk
    sweep.check_points(str(sweep_file), points, 1, with_files=True)
    for copy in copies:
        shutil.rmtree(copy)
    train_run(trunk)
    assert "no checkpoint of step 6" in call(sweep.main, sweep_file, *words, code=2)
    sweep_file.write_text(sweep_file.read_text() + '"data.name" = ["tiny", "void"]\n')
    assert "/void: no such data set" in call(sweep.main, sweep_file, code=2)
    assert fake_trainer() == []


# ---- totals
@pytest.mark.parametrize("branch_step, done, left", [(0, 0, 1), (30_000, 0, 0.4), (5, 20_000, 0.6)])
def test_totals_are_of_what_is_left(monkeypatch, branch_step, done, left):
    file = str(REPO_ROOT / "config/paper/books3_512.toml")
    (point,) = sweep.list_points(file, ["--model.router=kern", "--train.keep_steps=7"])
    point = point._replace(config=replace(point.config, "train", branch_step=branch_step))
    monkeypatch.setattr(sweep.Point, "steps_done", lambda self: done)
    line = sweep.format_totals([point, point], [point])
    assert f"2 points, 1 finished; to do: {50_000 * 256 * 512 * left / 1e6:,.2f} M tokens" in line
    mfu = estimate_mfu(point.config, GPUS["H100"], 1)
    hours = left * 50_000 * 256 * 512 * flops_per_token(point.config.model) / (mfu * 989e12) / 3600
    # 12 bytes per parameter, 3 checkpoints
    total = 36 * count_parameters(point.config.model)[0] / 2**30
    assert f"{hours:,.1f} GPU hours (H100, MFU estimated), {total:.1f} GiB of checkpoints" in line


# ---- in parallel
class Hook(Stop):
    """A Stop that calls `hook` each time the sweep looks at it, and is asked once that returns
    True.
    """

    def __init__(self, hook):
        self.hook, self.deadline = hook, time.monotonic() + HANG

    def look(self):
        assert time.monotonic() < self.deadline
        return self.hook()

    asked = property(look, lambda self, value: None)


def test_parallel_points_have_separate_logs_and_threads(
    sweep_file, tmp_path, fake_trainer, monkeypatch, capfd
):
    runs, done, looks = tmp_path / "runs", tmp_path / "done", []
    monkeypatch.setenv("WAIT_FOR", str(done))
    monkeypatch.setattr(sweep, "count_cores", lambda: 7)
    earlier = runs / "tiny-dense-seed0/train.log"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("earlier\n")

    def let_go():
        """Let all points end, several looks after two have started: so a third could have."""
        assert done.exists() or len([*runs.glob("*/train.log")]) <= 2  # one is of an earlier sweep
        looks.append(len(fake_trainer()))
        if looks.count(2) == 10:
            done.touch()

    assert sweep.main([str(sweep_file), "--parallel", "2"], Hook(let_go)) == 1
    notes = fake_trainer()
    assert len(notes) == 4
    # Ctrl-C reaches only the sweep
    assert len({note["group"] for note in notes} | {os.getpgid(0)}) == 5
    assert {note["threads"] for note in notes} == {"3"}
    said = capfd.readouterr()
    assert "says" not in said.out
    for point in ("dense 0", "dense 1", "kern 0", "kern 1"):
        name = f"tiny-{point}".replace(" ", "-seed")
        before = "earlier\n" if point == "dense 0" else ""
        assert (runs / name / "train.log").read_text() == f"{before}says {point}\n"
    assert len(commands(said.out)) == 4
    assert (
        f"[1/4] exit code 1: {runs}/tiny-dense-seed0\n" in said.out and "exit code 0: " in said.out
    )
    failed = sorted(line.rpartition("# log: ")[2] for line in said.err.splitlines())
    assert failed == [f"{runs}/tiny-dense-seed0/train.log", f"{runs}/tiny-dense-seed1/train.log"]


@pytest.mark.parametrize(
    ("gpus", "parallel", "shares"),
    [
        ("", 1, [[]]),
        ("", 3, [[], [], []]),
        ("0 1 2 3", 1, [["0", "1", "2", "3"]]),
        ("4 5 7", 2, [["4"], ["5"]]),
    ]
    + [
        ("0 1 2 3", 2, [["0", "1"], ["2", "3"]]),
        ("GPU-a GPU-b", 3, [["GPU-a"], ["GPU-b"], ["GPU-a"]]),
    ],
)
def test_gpus_are_split_evenly(gpus, parallel, shares):
    assert sweep.split_gpus(gpus.split(), parallel) == shares


def test_gpus_are_those_visible_to_this_process(sweep_file, monkeypatch, call):
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    some_on_cpu = sweep.list_points(str(sweep_file), [])
    some_on_cpu += sweep.list_points(str(sweep_file), ["--train.device=auto"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep.find_gpus(some_on_cpu) == ["0", "1"]
    for visible, wanted in (("", ["0", "1"]), ("3,GPU-b,5", ["3", "GPU-b"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert (
            sweep.find_gpus(sweep.list_points(str(sweep_file), ["--train.device=auto"])) == wanted
        )
    assert sweep.find_gpus(sweep.list_points(str(sweep_file), [])) == []  # train.device = cpu
    words = [sweep_file, "--train.device=auto", "--dry-run"]
    launch = commands(call(sweep.main, *words, "--train.micro_batch_size=4"))[0][1][:4]
    assert launch == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    # 8 sequences are too few for 2 ranks of 8
    assert "times 2 rank(s) = 16" in call(sweep.main, *words, code=2)


# ---- stop signals
@pytest.mark.parametrize(
    "gpus, code",
    [
        ([], EXIT_CODE),
        (["0", "1"], 1),
        pytest.param(["0", "1", "2", "3"], EXIT_CODE, marks=pytest.mark.integration),
    ],
    ids=["processes", "no save, one GPU each", "torchrun"],
)
def test_all_running_points_are_stopped(
    sweep_file, tmp_path, fake_trainer, monkeypatch, gpus, code, capfd
):
    """A point that was stopped has not failed, whatever its exit code."""
    monkeypatch.setenv("STOPPED_CODE", str(code))
    monkeypatch.setattr(sweep, "find_gpus", lambda points: gpus)
    monkeypatch.setenv("WAIT_FOR", str(tmp_path / "never"))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    ranks = max(2, len(gpus))

    def all_started():
        """Return True once all ranks of the first two points have started; others never may."""
        assert len(fake_trainer()) <= ranks
        return len(fake_trainer()) == ranks

    arguments = [str(sweep_file), "--parallel=2", "--train.micro_batch_size=4"]
    assert sweep.main(arguments, Hook(all_started)) == EXIT_CODE
    said = capfd.readouterr()
    notes = fake_trainer()
    # kern was not started
    assert len(notes) == ranks and {note["point"] for note in notes} == {"dense 0", "dense 1"}
    visible = {4: {"0,1", "2,3"}, 2: {"0", "1"}, 0: {os.environ.get("CUDA_VISIBLE_DEVICES")}}
    assert {note["gpus"] for note in notes} == visible[len(gpus)]
    assert {note["threads"] for note in notes} == {"5"}  # the user's
    assert "failed: " not in said.err
    assert len(gpus) == 4 or said.out.count(f"exit code {code}: ") == 2


@pytest.mark.integration
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, EXIT_CODE), (signal.SIGTERM, EXIT_CODE), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_point_outlives_the_sweep(sweep_file, tmp_path, fake_trainer, number, code):
    """However the sweep ends, its point is asked to stop: then nobody holds their stdout."""
    script = "import sys; from runtime.launch import Stop; from scripts import sweep; "
    script += "sweep.TRAIN = sys.argv.pop(1); "
    script += "sys.exit(sweep.main(sys.argv[1:], Stop().listen()))"
    command = [sys.executable, "-c", script, str(sweep.TRAIN), str(sweep_file)]
    env = os.environ | {"WAIT_FOR": str(tmp_path / "never")}
    process = subprocess.Popen(command, cwd=REPO_ROOT, env=env, stdout=subprocess.PIPE)
    wait_until(fake_trainer, lambda: process.poll() is None)
    process.send_signal(number)
    process.communicate(timeout=HANG)
    assert process.returncode == code and [note["point"] for note in fake_trainer()] == ["dense 0"]


# ---- Slurm
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "host1",
    "SLURM_CPUS_PER_TASK": "4",
    "SLURM_NNODES": "1",
}
# stand-ins: srun runs its command here, scancel signals torchrun, lets it end and sees it end
PROGRAMS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": '[ "$1" = show ] && echo host1 || echo "$@" > requeued',
    "scancel": """
echo "$@" > canceled
kill -USR1 "$(cat pid)"
touch done
while kill -0 "$(cat pid)"; do :; done""",
    "torchrun": f"""
printf "%s\\n" "$@" > arguments
echo "$OMP_NUM_THREADS $$" > started
echo $$ > pid
[ -z "$WAIT" ] || for i in {{1..{10 * HANG}}}; do [ -e done ] && break; sleep 0.1; done
exit ${{CODE:-0}}""",
}


@pytest.fixture
def slurm(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    env = os.environ | SLURM | {"PATH": f"{programs}:{os.environ['PATH']}"}
    for name in ("WAIT", "CODE", "OMP_NUM_THREADS"):
        env.pop(name, None)
    return env


def test_slurm_array_has_a_task_for_each_point_left(sweep_file, tmp_path, slurm, call):
    script = tmp_path / "new" / "array.sbatch"
    out = call(sweep.main, sweep_file, "--train.max_steps=3", "--slurm", script, "--parallel=3")
    assert out.endswith(f"sbatch {script}    # 4 tasks\n")
    head = script.read_text().partition("\ncase ")[0].splitlines()
    assert head[1].startswith("# 4 points, one task each. ")
    assert "#SBATCH --output=nanokern-%A_%a.out" in head
    # sbatch reads options up to the first command
    assert all(line.startswith("#") for line in head)
    assert {"#SBATCH --signal=B:USR1@120", "#SBATCH --array=0-3%3"} <= {*head}
    for i, point in enumerate(configure.sweep_points(sweep_file, ["--train.max_steps=3"])):
        task = slurm | {
            "SLURM_ARRAY_TASK_ID": str(i),
            "SLURM_RESTART_COUNT": "2",
            "SLURM_GPUS_ON_NODE": "4",
        }
        subprocess.run(["bash", script], env=task, cwd=tmp_path, check=True)
        words = (tmp_path / "arguments").read_text().splitlines()
        assert words[words.index("train.py") :] == ["train.py", str(sweep_file), *point]
        assert words[:3] == ["--nnodes=1", "--nproc_per_node=4", "--rdzv_id=7-2"]
        assert words[4] == "--rdzv_endpoint=host1:20007"
        assert (tmp_path / "started").read_text().startswith("4 ")


@pytest.mark.parametrize("code", [75, 0])
def test_slurm_job_is_requeued_if_time_ended_it_before_it_finished(tmp_path, slurm, code):
    """The signal before the time limit reaches torchrun, which ignores it, and its ranks, which
    save and end.
    """
    job = slurm | {"CODE": str(code), "WAIT": "1"}
    process = subprocess.Popen(
        ["bash", sweep.SBATCH, "x.toml"], env=job, cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    wait_until((tmp_path / "pid").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=HANG) == code
    assert (tmp_path / "canceled").read_text() == "--signal=USR1 7\n"
    assert (tmp_path / "requeued").exists() == (code == 75)
    assert code == 0 or (tmp_path / "requeued").read_text() == "requeue 7\n"
