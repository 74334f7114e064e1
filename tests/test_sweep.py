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
from pathlib import Path

import pytest
from corpora import write_tree
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
    reads what they say of a key.

    The program waits until the file `WAIT_FOR`, if it is set, exists, or this test ends. Its exit
    code is `EXIT_CODE`, by default 1 for dense, or `STOPPED_CODE`, 75, when asked to stop.
    """
    trainer = tmp_path / "fake" / "trainer.py"
    trainer.parent.mkdir()
    trainer.write_text(FAKE)
    monkeypatch.setattr(sweep, "TRAIN", trainer)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notes = trainer.with_suffix(".jsonl")
    notes.touch()
    yield lambda key: [json.loads(line)[key] for line in notes.read_text().splitlines()]
    trainer.unlink()


# ---- in sequence
def test_finished_points_are_skipped_and_others_are_not(sweep_file, call, tmp_path):
    points = sweep.list_points(str(sweep_file), [])
    for point in points[:2]:
        train_run(point.config)
    out = call(sweep.main, sweep_file, "--dry-run")
    assert out.startswith("4 points, 2 finished")
    assert [number for number, _ in commands(out)] == ["3/4", "4/4"]
    assert f"[1/4] finished already: {points[0].folder}\n" in out
    nothing = call(sweep.main, sweep_file, "--model.router=dense", "--slurm", tmp_path / "x")
    assert nothing == "2 points, 2 finished\n" and not (tmp_path / "x").exists()
    # runs of another length are other runs
    for max_steps, done in ((6, [0, 0, 0, 0]), (3, [0, 0, 0, 0]), (4, [4, 4, 0, 0])):
        points = sweep.list_points(str(sweep_file), [f"--train.max_steps={max_steps}"])
        assert [point.steps_done() for point in points] == done
    (points[0].folder / "metrics.jsonl").write_text('{"step": 2, "tokens": 9, "val/loss": 2.0}\n')
    assert points[0].steps_done() == 3  # its last evaluation is left to do


def test_points_of_an_added_axis_leave_runs_of_another_length_alone(sweep_file):
    words = ["--optim.lr=[1e-3,2e-3]", "--model.router=dense", "--run.seed=0"]
    points = sweep.list_points(str(sweep_file), words)
    train_run(points[0].config)
    first, second = sweep.list_points(str(sweep_file), [*words, "--train.max_steps=6"])
    assert first.folder == points[0].folder.with_name(f"{points[0].folder.name}-max_steps6")
    assert first.overrides[-1] == f"--run.name={first.folder.name}"
    assert second.folder == points[1].folder and second.steps_done() == 0


def test_a_point_whose_folder_has_another_configs_run_trains_beside_it(
    sweep_file, fake_trainer, call, tiny
):
    other = tiny("run.seed=0", "model.router=dense")
    write_tree(folder.path_of(other), {"config.toml": configure.dumps(other).encode()})
    words = [sweep_file, "--optim.lr=1e-4", "--run.seed=[0]", "--model.router=dense"]
    out = call(sweep.main, *words, "--dry-run")
    assert commands(out)[0][1][-1] == f"--run.name={other.run.name}-lr0.0001"
    chosen = [*map(str, words[1:]), f"--run.name={other.run.name}"]  # train.py refuses it
    assert sweep.list_points(str(sweep_file), chosen)[0].steps_done() == 0


def test_a_failed_point_is_named_and_a_stopped_one_stops_the_sweep(
    sweep_file, fake_trainer, monkeypatch, capfd
):
    assert sweep.main([str(sweep_file), "--run.seed=0"]) == 1
    said = capfd.readouterr()
    assert fake_trainer("point") == ["0 dense", "0 kern"]
    assert "says 0 kern\n" in said.out
    place = sweep_file.with_name("runs")
    folders = f"{place}/tiny-dense-seed0 {place}/tiny-kern-seed0"
    # instead of a table: train.py made no runs
    assert re.search(rf"\nno runs in .*\n\npython -m scripts.report {folders}\n$", said.out)
    assert said.err == f"failed: python train.py {sweep_file} --run.seed=0 --model.router=dense\n"
    monkeypatch.setenv("EXIT_CODE", str(EXIT_CODE))
    assert sweep.main([str(sweep_file), "--run.seed=1"]) == EXIT_CODE
    # points that wait are not started
    assert fake_trainer("point")[2:] == ["1 dense"]
    said = "".join(capfd.readouterr())
    assert "failed: " not in said and "no runs in" not in said  # no table: it is not finished


QUICK_PYTHON = """
[ -t 1 ] && terminal=" in a terminal"
echo "$*$terminal" >> notes
case "$*" in *--dry-run)
    echo "2 points, 2 finished"
    echo "[1/2] finished already: runs/quickstart-dense"
    echo "[2/2] finished already: runs/quickstart-kern-lr0.1";;
esac
"""


def test_the_quickstart_reports_the_folders_of_its_sweep(tmp_path):
    """With programs in place of Python's and of the installation that note how they are called."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(REPO_ROOT / "scripts/quickstart.sh", scripts)
    (scripts / "setup.sh").touch()
    environment = add_programs(tmp_path, python=QUICK_PYTHON)
    # script's terminal: the tables of a report fit it
    command = ["script", "-qec", f"bash {scripts}/quickstart.sh", "/dev/null"]
    out = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True)
    page, _, activate = out.splitlines()[-3:]
    assert "runs/report-quickstart/report.html" in page
    assert activate.endswith(": source .venv/bin/activate")
    notes = (tmp_path / "notes").read_text()
    folders = "runs/quickstart-dense runs/quickstart-kern-lr0.1"
    assert f"scripts.report {folders} --out runs/report-quickstart in a terminal\n" in notes
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


def test_missing_data_is_found_before_the_first_point_starts(sweep_file, fake_trainer, call):
    sweep_file.write_text(sweep_file.read_text() + '"data.name" = ["tiny", "void"]\n')
    of_another = ["--model.vocab_size=100", "--data.name=tiny"]
    for words, says in (
        ([], "/void: no such data set"),
        (of_another, "the model's vocab_size is 100"),
    ):
        assert says in call(sweep.main, sweep_file, *words, code=2)
        assert sweep.main([str(sweep_file), *words, "--dry-run"]) == 0
    assert fake_trainer("point") == []


def test_missing_trunks_are_found_before_the_first_point_starts(sweep_file, call, tiny):
    same = ["--model.router=kern", "--run.seed=0", "--optim.schedule=wsd"]
    of_trunk = [*same, "--run.name=trunk", "--train.max_steps=10", "--train.keep_steps=4"]
    trunk = sweep.Point("1/3", of_trunk, tiny(*of_trunk))
    words = [*same, f"--train.branch_from={trunk.folder}", "--train.max_steps=[5,8]"]
    assert "[2/2]" in call(sweep.main, sweep_file, *words, "--dry-run")
    missing = "no config.toml there, so not a run; train it first"
    assert missing in call(sweep.main, sweep_file, *words, code=2)
    points = sweep.list_points(str(sweep_file), words)
    sweep.check_points(str(sweep_file), [trunk, *points], 1, with_files=True)
    train_run(trunk.config)
    assert "no checkpoint of step 6" in call(sweep.main, sweep_file, *words, code=2)
    for point in points:
        add_checkpoint(point.folder, 2)  # they resume without a trunk
    sweep.check_points(str(sweep_file), points, 1, with_files=True)


# ---- totals
@pytest.mark.parametrize("branch_step, done, left", [(0, 0, 1), (30_000, 0, 0.4), (5, 20_000, 0.6)])
def test_totals_are_of_what_is_left(monkeypatch, branch_step, done, left):
    file = str(REPO_ROOT / "config/paper/books3_512.toml")
    (point,) = sweep.list_points(file, ["--model.router=kern", "--train.keep_steps=7"])
    config = replace(point.config, "train", branch_step=branch_step)
    monkeypatch.setattr(sweep.Point, "steps_done", lambda self: done)
    line = sweep.format_totals([point, point], [point._replace(config=config)])
    tokens = 50_000 * 256 * 512 * left
    speed = estimate_mfu(config, GPUS["H100"], 1) * 989e12 * 3600
    hours = tokens * flops_per_token(config.model) / speed
    # 12 bytes per parameter, 3 checkpoints
    disk = 36 * count_parameters(config.model)[0] / 2**30
    assert line == (
        f"2 points, 1 finished; to do: {tokens / 1e6:,.2f} M tokens, "
        f"{hours:,.1f} GPU hours (H100, MFU estimated), {disk:.1f} GiB of checkpoints"
    )


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
    write_tree(runs, {"tiny-dense-seed0/train.log": b"earlier\n"})

    def let_go():
        """Let all points end, several looks after two have started: so a third could have."""
        looks.append(len(fake_trainer("point")))
        assert done.exists() or looks[-1] <= 2
        if looks.count(2) == 10:
            done.touch()

    assert sweep.main([str(sweep_file), "--parallel", "2"], Hook(let_go)) == 1
    # Ctrl-C reaches only the sweep
    assert len({*fake_trainer("group"), os.getpgid(0)}) == 5
    assert fake_trainer("threads") == ["3"] * 4
    said = capfd.readouterr()
    ends = re.findall(r"(?m)^\[(\d/4)\] exit code (\d): (.*)", said.out)
    logs = {number: (code, Path(run, "train.log").read_text()) for number, code, run in ends}
    assert logs == {
        "1/4": ("1", "earlier\nsays dense 0\n"),
        "2/4": ("1", "says dense 1\n"),
        "3/4": ("0", "says kern 0\n"),
        "4/4": ("0", "says kern 1\n"),
    }
    failed = [f"{run}/train.log" for _, code, run in ends if code == "1"]
    assert re.findall("# log: (.*)", said.err) == failed
    assert len(commands(said.out)) == 4 and "says" not in said.out


@pytest.mark.parametrize(
    ("gpus", "parallel", "shares"),
    [
        ("", 3, [[], [], []]),
        ("4 5 7", 1, [["4", "5", "7"]]),
        ("0 1 2 3 4", 2, [["0", "1"], ["2", "3"]]),
        ("GPU-a GPU-b", 3, [["GPU-a"], ["GPU-b"], ["GPU-a"]]),
    ],
)
def test_gpus_are_split_evenly(gpus, parallel, shares):
    assert sweep.split_gpus(gpus.split(), parallel) == shares


@pytest.mark.parametrize(
    ("devices", "visible", "gpus"),
    [
        (["cpu", "auto"], "", ["0", "1"]),
        (["auto"], "3,GPU-b,5", ["3", "GPU-b"]),
        (["cpu", "cpu"], "", []),
    ],
)
def test_gpus_are_those_visible_to_this_process(
    two_gpus, tiny, monkeypatch, devices, visible, gpus
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    points = [sweep.Point("", [], tiny(f"train.device={device}")) for device in devices]
    assert sweep.find_gpus(points) == gpus


def test_a_point_takes_all_gpus_by_torchrun(two_gpus, sweep_file, call):
    words = [sweep_file, "--train.device=auto", "--dry-run"]
    launch = commands(call(sweep.main, *words, "--train.micro_batch_size=4"))[0][1][:4]
    assert launch == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    # 8 sequences are too few for 2 ranks of 8
    assert "times 2 rank(s) = 16" in call(sweep.main, *words, code=2)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)


# ---- stop signals
@pytest.mark.parametrize(
    "gpus, code, visible",
    [
        ([], EXIT_CODE, {"all"}),
        (["0", "1"], 1, {"0", "1"}),
        pytest.param(
            ["0", "1", "2", "3"], EXIT_CODE, {"0,1", "2,3"}, marks=pytest.mark.integration
        ),
    ],
    ids=["processes", "no save, one GPU each", "torchrun"],
)
def test_all_running_points_are_stopped(
    sweep_file, tmp_path, fake_trainer, monkeypatch, gpus, code, visible, capfd
):
    """A point that was stopped has not failed, whatever its exit code."""
    monkeypatch.setattr(sweep, "find_gpus", lambda points: gpus)
    more = {"STOPPED_CODE": str(code), "WAIT_FOR": str(tmp_path / "never"), "OMP_NUM_THREADS": "5"}
    monkeypatch.setattr(os, "environ", os.environ | more | {"CUDA_VISIBLE_DEVICES": "all"})
    ranks = max(2, len(gpus))

    def all_started():
        """Return True once all ranks of the first two points have started; others never may."""
        assert len(fake_trainer("point")) <= ranks
        return len(fake_trainer("point")) == ranks

    arguments = [str(sweep_file), "--parallel=2", "--train.micro_batch_size=4"]
    assert sweep.main(arguments, Hook(all_started)) == EXIT_CODE
    said = capfd.readouterr()
    started = {key: {*fake_trainer(key)} for key in ("point", "gpus", "threads")}
    # kern was not started; the threads are the user's
    assert started == {"point": {"dense 0", "dense 1"}, "gpus": visible, "threads": {"5"}}
    assert "failed: " not in said.err
    assert len(gpus) == 4 or said.out.count(f"exit code {code}: ") == 2


LISTENING = """
import sys
from runtime.launch import Stop
from scripts import sweep
sweep.TRAIN, file = sys.argv[1:]
sys.exit(sweep.main([file], Stop().listen()))
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, EXIT_CODE), (signal.SIGTERM, EXIT_CODE), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_point_outlives_the_sweep(sweep_file, fake_trainer, monkeypatch, number, code):
    """However the sweep ends, its point is asked to stop: then nobody holds their stdout."""
    monkeypatch.setenv("WAIT_FOR", "/never")
    command = [sys.executable, "-c", LISTENING, sweep.TRAIN, sweep_file]
    with subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE) as process:
        wait_until(lambda: fake_trainer("point"), lambda: process.poll() is None)
        process.send_signal(number)
        process.communicate(timeout=HANG)
    assert process.returncode == code and fake_trainer("point") == ["dense 0"]


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
printf "%s\\0" "$@" > arguments
echo "$OMP_NUM_THREADS $$" > started
echo $$ > pid
[ -z "$WAIT" ] || for i in {{1..{10 * HANG}}}; do [ -e done ] && break; sleep 0.1; done
exit ${{CODE:-0}}""",
}


def add_programs(folder, **programs):
    """Write scripts of Bash; return an environment in which they are found first."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job, with stand-ins for Slurm's programs."""
    (tmp_path / "bin").mkdir()
    env = add_programs(tmp_path / "bin", **PROGRAMS) | SLURM
    del env["OMP_NUM_THREADS"]
    return env


def test_slurm_array_has_a_task_for_each_point_left(sweep_file, tmp_path, slurm, capsys):
    """Also from a file and into a script whose names have a newline."""
    file = shutil.copy(sweep_file, tmp_path / "a\nb's.toml")
    script = tmp_path / "new" / "array\n1.sbatch"
    words = ["--train.max_steps=3", "--model.router=[kern,dense]", "--train.micro_batch_size=4"]
    assert sweep.main([str(file), *words, "--slurm", str(script), "--parallel=3"]) == 0
    out, warning = capsys.readouterr()
    assert "warning: [1/4] train.batch_size = 8 is not a multiple" in warning
    assert warning.count("or sbatch --gpus-per-node=N") == 1  # all points have this fault
    assert out.endswith(f"sbatch {shlex.quote(str(script))}    # 4 tasks\n")
    head = script.read_text().partition("\ncase ")[0]
    assert not re.search("(?m)^[^#]", head)  # sbatch reads options up to the first command
    options = re.findall("--(?:signal|array|output)=.*", head)
    assert options == ["--signal=B:USR1@120", "--array=0-3%3", "--output=nanokern-%A_%a.out"]
    on_host = slurm | {"SLURM_RESTART_COUNT": "2", "SLURM_GPUS_ON_NODE": "4"}
    launch = ["--nnodes=1", "--nproc_per_node=4", "--rdzv_id=7-2", "--rdzv_backend=c10d"]
    launch += ["--rdzv_endpoint=host1:20007", "train.py", str(file)]
    for i, point in enumerate(configure.sweep_points(file, words)):
        task = on_host | {"SLURM_ARRAY_JOB_ID": "4", "SLURM_ARRAY_TASK_ID": str(i)}
        subprocess.run(["bash", script], env=task, cwd=tmp_path, check=True)
        arguments = (tmp_path / "arguments").read_text().split("\0")
        assert arguments == [*launch, *point, ""]
        assert (tmp_path / "started").read_text().startswith("4 ")


ARRAY = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}  # 7 alone names all tasks


@pytest.mark.parametrize(
    "code, array, job", [(75, {}, "7"), (75, ARRAY, "7_3"), (0, {}, "7")], ids=str
)
def test_slurm_job_is_requeued_if_time_ended_it_before_it_finished(
    tmp_path, slurm, code, array, job
):
    """The signal before the time limit reaches torchrun, which ignores it, and its ranks, which
    save and end.
    """
    env = slurm | array | {"CODE": str(code), "WAIT": "1"}
    process = subprocess.Popen(["bash", sweep.SBATCH, "x.toml"], env=env, cwd=tmp_path)
    wait_until((tmp_path / "pid").exists)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=HANG) == code
    assert (tmp_path / "canceled").read_text() == f"--signal=USR1 {job}\n"
    requeued = [file.read_text() for file in tmp_path.glob("requeued")]
    assert requeued == ([f"requeue {job}\n"] if code else [])
