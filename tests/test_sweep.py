"""scripts/sweep.py: points in sequence, in parallel, as a Slurm array; totals, rehearsals, failures, stop signals."""

import itertools
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

import configure
from runtime.metrics import read_metrics
from runtime.signals import EXIT_CODE, Stop
from scripts import plan, sweep

REPO_ROOT = Path(__file__).parents[1]


@pytest.fixture
def sweep_file(tiny_file):
    axes = '\n[sweep]\n"model.router" = ["dense", "kern"]\n"run.seed" = [0, 1]\n'
    tiny_file.write_text(tiny_file.read_text().replace('name = "tiny"\ndir', "dir", 1) + axes)
    return tiny_file


def commands(out):
    """(number, words) of each command printed."""
    found = (re.match(r"\[(\d+/\d+)\] (python|torchrun) (.*?)(; log: .*)?$", line) for line in out.splitlines())
    return [(match[1], shlex.split(f"{match[2]} {match[3]}")) for match in found if match]


def test_dry_run_prints_the_commands_and_runs_none(sweep_file, capsys, monkeypatch):
    monkeypatch.setattr(sweep, "TRAIN", "no such program")
    assert sweep.main([str(sweep_file), "--optim.lr=1e-3", "--dry-run"]) == 0
    printed = commands(capsys.readouterr().out)
    assert [number for number, _ in printed] == ["1/4", "2/4", "3/4", "4/4"]
    for (_, words), (router, seed) in zip(printed, itertools.product(["dense", "kern"], [0, 1]), strict=True):
        python, script, file, *overrides = words
        assert (python, script, file) == ("python", "train.py", str(sweep_file))
        config = configure.load(file, overrides)
        assert (config.model.router, config.run.seed, config.optim.lr) == (router, seed, 1e-3)


FAKE = """\
import json, os, signal, sys, time
from pathlib import Path
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
point = " ".join(word.partition("=")[2] for word in sys.argv if word.startswith(("--model.router", "--run.seed")))
note = {"point": point, "start": time.time(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "threads": os.environ.get("OMP_NUM_THREADS"), "group": os.getpgid(0)}
with Path(sys.argv[0]).with_suffix(".jsonl").open("a") as file:
    file.write(json.dumps(note) + "\\n")
print("says", point, flush=True)
end = time.time() + float(os.environ.get("SECONDS", 0))
while time.time() < end and not asked:
    time.sleep(0.02)
sys.exit(75 if asked else "dense" in point)
"""


@pytest.fixture
def fake_trainer(tmp_path, monkeypatch):
    """Replace train.py by a program that notes how it was started, runs for `SECONDS`, and fails if the router is dense
    or exits with 75 when asked to stop. Returns a function that reads those notes."""
    trainer = tmp_path / "fake" / "trainer.py"
    trainer.parent.mkdir()
    trainer.write_text(FAKE)
    monkeypatch.setattr(sweep, "TRAIN", trainer)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    notes = trainer.with_suffix(".jsonl")
    return lambda: [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []


# ---- in sequence


def test_sweep_trains_every_point_and_skips_finished_ones(sweep_file, tmp_path, monkeypatch, capfd):
    arguments = [str(sweep_file), "--run.seed=0", "--train.max_steps=2"]
    assert sweep.main(arguments) == 0
    assert "2 points, 0 finished; to do: 0.00 M tokens" in capfd.readouterr().out
    runs = [tmp_path / "runs" / f"tiny-{router}" for router in ("dense", "kern")]
    assert sorted((tmp_path / "runs").iterdir()) == runs
    assert [read_metrics(run / "metrics.jsonl")[-1]["step"] for run in runs] == [2, 2]
    monkeypatch.setattr(sweep, "TRAIN", "no such program")
    assert sweep.main(arguments) == 0
    out = capfd.readouterr().out
    assert all(f"finished already: {run}\n" in out for run in runs) and "2 points, 2 finished\n" in out
    assert sweep.main([str(sweep_file), "--train.max_steps=2", "--run.seed=[0,1]", "--dry-run"]) == 0
    assert [number for number, _ in commands(capfd.readouterr().out)] == ["2/4", "4/4"]  # the new seeds alone
    assert sweep.main([*arguments, "--optim.lr=1e-4"]) == 1  # other settings: for train.py to refuse
    assert "finished already" not in capfd.readouterr().out


def test_sweep_continues_after_a_failed_point_and_names_it(sweep_file, fake_trainer, capfd):
    assert sweep.main([str(sweep_file), "--run.seed=0"]) == 1
    said = capfd.readouterr()
    assert [note["point"] for note in fake_trainer()] == ["0 dense", "0 kern"]
    assert "says 0 kern\n" in said.out  # in sequence, output goes to the terminal
    (line,) = said.err.splitlines()
    assert line == f"failed: python train.py {sweep_file} --run.seed=0 --model.router=dense"


def test_sweep_refuses_bad_input(sweep_file, capsys):
    def error(*arguments):
        assert sweep.main(list(arguments)) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    file = str(sweep_file)
    assert "did you mean 'optim.lr'?" in error(file, "--optim.lrr=1")
    assert "one config file is needed, found none" in error()
    assert "set another --run.dir" in error(file, "--fresh")
    assert "--parallel 0: expected 1 or more" in error(file, "--parallel", "0")
    for scale in ("0", "1", "-1", "nan"):
        assert f"--scale {scale}: expected a number between 0 and 1" in error(file, "--scale", scale)
    assert "--mfu 2: expected" in error(file, "--mfu", "2")
    assert "unknown key" in error(file, "--dry=1")  # options are not guessed at
    assert sweep.main(["--config", file, "--run.seed", "0", "--dry-run"]) == 0  # the forms train.py takes
    assert "[2/2]" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        sweep.main(["--help"])
    assert "python -m scripts.sweep" in capsys.readouterr().out


# ---- totals


def test_totals_are_of_what_is_left(sweep_file, monkeypatch, capsys, tmp_path):
    assert (
        sweep.main([str(REPO_ROOT / "config/paper/sparsity.toml"), "--dry-run", "--gpu", "A100", "--mfu", "0.5"]) == 0
    )
    out = capsys.readouterr().out
    configs = [
        configure.load(REPO_ROOT / "config/paper/sparsity.toml", point)
        for point in configure.sweep_points(REPO_ROOT / "config/paper/sparsity.toml")
    ]
    assert "16 points, 0 finished; to do: 104.86 B tokens" in out  # 16 times 50,000 steps of 256 x 512
    hours = sum(plan.estimate_hours(config, 1, 312e12, 0.5) for config in configs)
    assert f"{hours:,.1f} GPU hours (A100, MFU 0.50)" in out
    # 12 bytes a parameter, 2 checkpoints a run, 4 runs of each size: kern's counts of docs/paper.md, softmax's beside
    total = sum(24 * sweep.count_parameters(config.model)[0] for config in configs) / 2**30
    assert f"checkpoints: {total:.1f} GiB at the end, {12 * 1_881_659_136 / 2**30:.1f} GiB more while" in out
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 0, 10**9))
    assert sweep.main([str(REPO_ROOT / "config/paper/sparsity.toml"), "--dry-run"]) == 0
    assert "warning: too little disk" in capsys.readouterr().out
    point = sweep.list_points(str(sweep_file), [])[0]
    monkeypatch.setattr(sweep.checkpoint, "steps", lambda folder: [3])
    args = type("Args", (), {"gpu": "H100", "mfu": "0.4"})
    assert point.steps_done() == 3 and "to do: 0.00 M tokens" in sweep.format_totals([point], [point], args, [[]])
    assert f"{8 * 32 / 1e6:.4f}" == "0.0003"  # one step of four is left: too few tokens to show, so counted here
    monkeypatch.setattr(plan, "count_tokens", lambda config: 4e9)
    assert "to do: 1.00 B tokens" in sweep.format_totals([point], [point], args, [[]])


# ---- rehearsals


def test_a_rehearsal_scales_steps_and_intervals_in_a_folder_of_its_own(sweep_file, capsys):
    file = str(REPO_ROOT / "config/paper/books3_512.toml")
    assert sweep.main([file, "--scale", "0.01", "--dry-run", "--run.dir=there"]) == 0
    out = capsys.readouterr().out
    assert "327.68 M tokens" in out  # a hundredth of 32.77 B
    for _, (_, _, file, *overrides) in commands(out):
        config = configure.load(file, overrides)
        assert (config.train.max_steps, config.optim.warmup_steps, config.train.checkpoint_interval) == (500, 5, 50)
        assert (config.eval.interval, config.eval.windows, config.log.interval) == (10, 20, 1)
        assert config.run.dir == "there/rehearsal-0.01" and config.log.group.endswith("-rehearsal-0.01")
        assert config.run.name == f"books3_512-{config.model.router}"
    assert sweep.main([str(sweep_file), "--scale", "0.001", "--dry-run", "--train.checkpoint_interval=0"]) == 0
    for _, (_, _, file, *overrides) in commands(capsys.readouterr().out):
        config = configure.load(file, overrides)
        assert (config.train.max_steps, config.optim.warmup_steps, config.train.checkpoint_interval) == (1, 1, 0)
        assert (config.eval.interval, config.eval.windows, config.log.interval) == (1, 1, 1)


# ---- in parallel


def test_parallel_points_have_separate_logs_and_threads(sweep_file, tmp_path, fake_trainer, monkeypatch, capfd):
    runs = tmp_path / "runs"
    monkeypatch.setenv("SECONDS", "3")
    assert sweep.main([str(sweep_file), "--parallel", "2"]) == 1
    notes = fake_trainer()
    starts = sorted(note["start"] for note in notes)
    assert starts[1] - starts[0] < 3 <= starts[2] - starts[0]  # two at once, not three
    assert len({note["group"] for note in notes} | {os.getpgid(0)}) == 5  # Ctrl-C reaches only the sweep
    cores = len(os.sched_getaffinity(0))
    assert {note["threads"] for note in notes} == {str(max(1, cores // 2))}
    said = capfd.readouterr()
    assert "says" not in said.out
    names = {"tiny-dense": "dense 0", "tiny-dense-seed1": "dense 1", "tiny-kern": "kern 0", "tiny-kern-seed1": "kern 1"}
    for name, point in names.items():
        assert (runs / name / "train.log").read_text() == f"says {point}\n"
    assert len(commands(said.out)) == 4
    assert re.search(rf"\[1/4\] failed with exit code 1: {runs}/tiny-dense: step 0 of 4$", said.out, re.MULTILINE)
    assert re.search(rf"\[4/4\] finished: {runs}/tiny-kern-seed1: step 0 of 4$", said.out, re.MULTILINE)
    failed = said.err.splitlines()
    assert len(failed) == 2 and all(line.endswith(f"/{name}/train.log)") for line, name in zip(
        sorted(failed), ("tiny-dense", "tiny-dense-seed1"), strict=True
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "parallel", "shares"),
    [
        ("", 1, [[]]),
        ("", 3, [[], [], []]),
        ("0 1 2 3", 1, [["0", "1", "2", "3"]]),
        ("0 1 2 3", 2, [["0", "1"], ["2", "3"]]),
        ("4 5 7", 2, [["4"], ["5"]]),
        ("GPU-a GPU-b", 3, [["GPU-a"], ["GPU-b"], ["GPU-a"]]),
    ],
)
def test_gpus_are_split_evenly(gpus, parallel, shares):
    assert sweep.split_gpus(gpus.split(), parallel) == shares


def test_gpus_are_those_visible_to_this_process(sweep_file, monkeypatch):
    points = sweep.list_points(str(sweep_file), ["--train.device=auto"])
    monkeypatch.setattr(sweep.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sweep.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sweep.find_gpus(points) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
    assert sweep.find_gpus(points) == ["3", "GPU-b"]
    assert sweep.find_gpus(sweep.list_points(str(sweep_file), [])) == []  # train.device = cpu


def test_a_point_on_two_gpus_runs_under_torchrun(sweep_file, fake_trainer, monkeypatch, capfd):
    monkeypatch.setattr(sweep, "find_gpus", lambda points: ["4", "5", "6", "7"])
    arguments = [str(sweep_file), "--model.router=kern", "--parallel", "2", "--train.micro_batch_size=4"]
    assert sweep.main(arguments) == 0
    ranks = sorted((note["point"], note["gpus"]) for note in fake_trainer())
    assert ranks == [("kern 0", "4,5"), ("kern 0", "4,5"), ("kern 1", "6,7"), ("kern 1", "6,7")]
    words = commands(capfd.readouterr().out)[0][1]
    assert words[:4] == ["torchrun", "--standalone", "--nproc_per_node=2", "train.py"]
    assert sweep.main([*arguments[:-1], "--train.micro_batch_size=8"]) == 2  # 8 sequences are too few for 2 ranks of 8
    assert "times 2 rank(s) = 16" in capfd.readouterr().err


# ---- stop signals


@pytest.mark.parametrize("gpus", [[], ["0", "1", "2", "3"]], ids=["processes", "torchrun"])
def test_all_running_points_are_stopped(sweep_file, tmp_path, fake_trainer, monkeypatch, gpus, capfd):
    monkeypatch.setattr(sweep, "find_gpus", lambda points: gpus)
    monkeypatch.setenv("SECONDS", "100")

    ranks, started = 4 if gpus else 2, time.time()

    class Asked(Stop):
        """Asked once all ranks of the first two points have started."""

        asked = property(lambda self: len(fake_trainer()) == ranks, lambda self, value: None)

    assert sweep.main([str(sweep_file), "--parallel=2", "--train.micro_batch_size=4"], Asked()) == EXIT_CODE
    assert time.time() - started < 90
    said = capfd.readouterr()
    assert len(fake_trainer()) == ranks and "kern" not in str(fake_trainer())  # the other two were not started
    assert "failed: " not in said.err
    assert gpus or said.out.count("stopped: ") == 2


def test_ctrl_c_saves_all_points_and_they_resume(sweep_file, tmp_path):
    """With the real train.py: 75 and checkpoints; the same command finishes."""
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "scripts.sweep", str(sweep_file), "--parallel=2", "--run.seed=0"]
    long = ["--train.max_steps=100_000", "--eval.interval=1000_000", "--train.checkpoint_interval=0"]
    process = subprocess.Popen([*command, *long], cwd=REPO_ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    metrics = [runs / f"tiny-{router}" / "metrics.jsonl" for router in ("dense", "kern")]
    deadline = time.time() + 120
    while (
        not all(read_metrics(file)[-1:] and read_metrics(file)[-1]["step"] > 2 for file in metrics)
        and time.time() < deadline
    ):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    assert process.wait(timeout=120) == EXIT_CODE
    saved = [sweep.checkpoint.steps(file.parent / "checkpoints") for file in metrics]
    assert all(len(steps) == 1 and 2 < steps[0] < 100_000 for steps in saved)
    stop = max(saved)[0] + 5
    assert sweep.main([*command[3:], "--eval.interval=1000_000", f"--train.max_steps={stop}"]) == 0
    for file, (step,) in zip(metrics, saved, strict=True):
        assert f"from step {step}" in (file.parent / "train.log").read_text()


# ---- Slurm


def test_slurm_array_has_a_task_for_each_point_left(sweep_file, tmp_path, capsys):
    script = tmp_path / "new" / "array.sbatch"
    assert sweep.main([str(sweep_file), "--train.max_steps=3", "--slurm", str(script), "--parallel=3"]) == 0
    assert f"sbatch {script}" in capsys.readouterr().out
    text = script.read_text()
    assert re.findall(r"^#SBATCH --(?:array|output|signal)=.*$", text, re.MULTILINE) == [
        "#SBATCH --signal=B:USR1@120", "#SBATCH --array=0-3%3", "#SBATCH --output=nanokern-%A_%a.out",
    ]  # fmt: skip
    subprocess.run(["bash", "-n", script], check=True)
    head = text.index("\nset -uo")
    assert all(
        line.startswith("#") for line in text[:head].splitlines()
    )  # sbatch reads options up to the first command
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, does in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo host1"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{does}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host1", "SLURM_CPUS_PER_TASK": "4", "SLURM_NNODES": "1"}
    for i, point in enumerate(configure.sweep_points(sweep_file, ["--train.max_steps=3"])):
        ran = subprocess.run(
            ["bash", script],
            env=os.environ | slurm | {"SLURM_ARRAY_TASK_ID": str(i), "PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert ran.returncode == 0, ran.stderr
        words = ran.stdout.splitlines()
        assert words[words.index("train.py") :] == ["train.py", str(sweep_file), *point]


def test_slurm_array_without_limit_and_without_points(sweep_file, tmp_path, monkeypatch, capsys):
    script = tmp_path / "array.sbatch"
    assert sweep.main([str(sweep_file), "--slurm", str(script)]) == 0
    assert "#SBATCH --array=0-3\n" in script.read_text()
    script.unlink()
    monkeypatch.setattr(sweep.Point, "steps_done", lambda self: 4)
    assert sweep.main([str(sweep_file), "--slurm", str(script)]) == 0
    assert "nothing to do" in capsys.readouterr().out and not script.exists()
