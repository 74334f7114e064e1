"""Runs and prepared sets that are stopped, killed, damaged and moved, again and again in any order.

Hypothesis draws the order. The oracle is a run, or a set, that nothing happened to.
"""

import os
import shutil
import signal
import tempfile
from itertools import count
from pathlib import Path
from unittest import mock

from corpora import corpus_texts, jsonl, snapshot, write_tree
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from runs import Forked, be_killed, checkpoints, content, end, flip, fork_with_fault, steps

import configure
import train
from data import encode, prepare, verify, workers
from runtime import checkpoint
from runtime.folder import path_of
from runtime.launch import Stop

MAX_STEPS = 6
SETTINGS = [  # the most state to resume
    "model.dropout=0.1",
    "model.n_layer=1",
    "train.micro_batch_size=4",
    "train.dtype=float16",
    "train.bias_update_rate=0.01",
    "train.ema_decay=0.9",
    "train.keep_checkpoints=20",
    f"train.max_steps={MAX_STEPS}",
    "eval.interval=4",
    "log.interval=3",
]
orders = settings(  # the same in each run of the tests
    max_examples=5,
    stateful_step_count=7,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def name_tensors(folder, step):
    """{file: sha256} of the tensors in a checkpoint."""
    files = checkpoint.verify(checkpoint.folder_of(folder, step))["files"]
    return {name: file["sha256"] for name, file in files.items() if name != ".metadata"}


class DisturbedRun(RuleBasedStateMachine):
    """A run with a checkpoint every two steps, and where it is asked to stop."""

    file: Path
    wanted_end: object
    wanted_tensors: dict

    @initialize()
    def choose_folder(self):
        self.root = Path(tempfile.mkdtemp())
        self.folder = self.root / "runs"
        self.damaged = {}  # {step: inode}

    @property
    def config(self):
        overrides = [f"run.dir={self.folder}", "train.checkpoint_interval=2"]
        return configure.load(self.file, [*SETTINGS, *overrides])

    def find_folder(self, step):
        return checkpoint.folder_of(checkpoints(self.config), step)

    def find_inode(self, step):
        return self.find_folder(step).stat().st_ino

    @property
    def intact(self):
        """Steps of checkpoints that are not those that were damaged, but may be written anew."""
        found = steps(self.config)
        return [step for step in found if self.find_inode(step) != self.damaged.get(step)]

    @rule(n_step=st.integers(0, MAX_STEPS), fails=st.booleans())
    def end_it(self, n_step, fails):
        """Ask it to stop, or let it fail, before the step that comes after `n_step` others.

        An exception leaves nothing behind that the next start of the process minds.
        """
        seed_step, number, stop = train.seed_step, count(), Stop()

        def end_step(*args):
            if next(number) == n_step:
                stop.asked = not fails
                if fails:
                    raise OSError("a test")
            seed_step(*args)

        try:
            with mock.patch.object(train, "seed_step", end_step):
                train.train(self.config, stop)
        except train.Stopped:
            assert self.intact
        except OSError as error:
            assert str(error) == "a test"
        else:
            assert max(self.intact) == MAX_STEPS

    @rule(number=st.integers(0, 60))
    def kill_it(self, number):
        """Before a call that changes a file."""

        def run():
            train.train(self.config)
            return 0

        code, printed = fork_with_fault(run, self.folder, number, be_killed)
        assert code == (-signal.SIGKILL if "FAULT" in printed else 0), printed

    @precondition(lambda self: len(self.intact) > 1)
    @rule(draw=st.data())
    def damage(self, draw):
        step = draw.draw(st.sampled_from(self.intact))
        file = draw.draw(st.sampled_from(sorted(self.find_folder(step).iterdir())))
        self.flip_bit(step, file, draw.draw(st.integers(0, 8 * file.stat().st_size - 1)))

    def flip_bit(self, step, file, bit):
        flip(file, bit)
        self.damaged[step] = self.find_inode(step)

    def damage_the_newest(self):
        step = max(self.intact)
        self.flip_bit(step, self.find_folder(step) / "__0_0.distcp", 999)

    @precondition(lambda self: len(self.intact) > 1)
    @rule()
    def lose_the_newest(self):
        shutil.rmtree(self.find_folder(max(self.intact)))

    @precondition(lambda self: (path_of(self.config) / "metrics.jsonl").exists())
    @rule()
    def tear_a_line(self):
        with (path_of(self.config) / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1')

    @precondition(lambda self: self.folder.exists())
    @rule()
    def move(self):
        folder = self.root / f"{self.folder.name} ü🙂"[-40:]
        os.rename(self.folder, folder)
        self.folder = folder

    @rule()
    def begin_again(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.damaged.clear()

    @rule()
    def finish(self):
        train.train(self.config)
        assert end(self.config) == self.wanted_end
        before = content(self.folder)
        train.train(self.config)  # says that it is finished
        assert content(self.folder) == before

    @invariant()
    def has_the_weights_of_its_steps(self):
        for step in self.intact:
            tensors = name_tensors(checkpoints(self.config), step)
            assert tensors == self.wanted_tensors[step], step

    def teardown(self):
        self.finish()
        shutil.rmtree(self.root)


def check_runs(file):
    """In a process of its own: pytest's capture would keep what forks print."""
    config = configure.load(file, [*SETTINGS, "train.checkpoint_interval=1"])
    train.train(config)
    DisturbedRun.file = file
    DisturbedRun.wanted_end = end(config)
    DisturbedRun.wanted_tensors = {}
    for step in steps(config):
        DisturbedRun.wanted_tensors[step] = name_tensors(checkpoints(config), step)
    assert list(DisturbedRun.wanted_tensors) == list(range(1, MAX_STEPS + 1))
    suffer_all_twice()
    run_state_machine_as_test(DisturbedRun, settings=orders)


def suffer_all_twice():
    """Each harm to a finished run, and again once it has been repaired."""
    run = DisturbedRun()
    run.choose_folder()
    run.finish()
    for harm in (run.damage_the_newest, run.lose_the_newest, run.tear_a_line, run.move):
        for _ in range(2):
            harm()
            run.finish()
            run.has_the_weights_of_its_steps()
    run.begin_again()
    for _ in range(2):
        run.end_it(1, fails=True)
        run.kill_it(40)
    run.teardown()


def test_a_run_ends_as_if_nothing_had_happened(tiny_file):
    code, printed = Forked(check_runs, tiny_file).wait(1200)
    assert code == 0, printed[-5000:]


# ---- a prepared set
TEXTS = [text[:200] for text in corpus_texts(12)]
SOURCES = [  # versions of the source
    {"a.jsonl": jsonl(TEXTS[:8]), "b.jsonl": jsonl(TEXTS[8:])},
    {"a.jsonl": jsonl(TEXTS[:8]), "b.jsonl": jsonl(["another"])},
    {"a.jsonl": jsonl(TEXTS[:8]), "b.jsonl": jsonl(TEXTS[8:]), "c.jsonl": jsonl(["more"])},
]


class DisturbedSet(RuleBasedStateMachine):
    """A set that is prepared with other settings, too, and from a source that changes."""

    root: Path
    wanted: dict  # {(source, fraction): files}

    @initialize()
    def start_anew(self):
        shutil.rmtree(self.root, ignore_errors=True)
        self.out = self.root / "out"
        self.out.mkdir(parents=True)
        self.made_from = None  # (source, fraction) of what is there, if that is known
        self.is_damaged = False
        self.set_source(0)

    @rule(version=st.integers(0, len(SOURCES) - 1))
    def set_source(self, version):
        self.version = version
        shutil.rmtree(self.root / "in", ignore_errors=True)
        write_tree(self.root / "in", SOURCES[version])

    def start(self, fraction, force, number=-1):
        """Prepare in a fork, killed before its change `number` of files."""
        command = f"text --source {self.root / 'in'} --tokenizer bytes --name set"
        command += f" --out {self.out} --val-fraction {fraction}"
        command += " --force" if force else ""
        return fork_with_fault(lambda: prepare.main(command.split()), self.out, number, be_killed)

    def assert_is_wanted(self, fraction):
        """It is the set that is prepared in an empty folder."""
        key = (self.version, fraction)
        found = snapshot(self.out)
        if key not in self.wanted:
            shutil.rmtree(self.out)
            self.out.mkdir()
            code, printed = self.start(fraction, force=False)
            assert code == 0, printed
            self.wanted[key] = snapshot(self.out)
        assert found == self.wanted[key]

    @rule(fraction=st.sampled_from([0.5, 0.7]), force=st.booleans())
    def prepare(self, fraction, force):
        before = snapshot(self.out)
        request = (self.version, fraction)
        code, printed = self.start(fraction, force)
        if code:
            assert code == 2 and before and not force and self.made_from != request, printed
            assert "--force" in printed
            assert snapshot(self.out) == before
            return
        assert force or not before or self.made_from in (request, None)
        if force or not self.is_damaged:
            self.assert_is_wanted(fraction)
            self.made_from = request
            self.is_damaged = False

    @rule(fraction=st.sampled_from([0.5, 0.7]), force=st.booleans(), number=st.integers(0, 50))
    def kill_it(self, fraction, force, number):
        code, printed = self.start(fraction, force, number)
        assert code in (-signal.SIGKILL, 0, 2), printed
        if self.made_from != (self.version, fraction):
            self.made_from = None  # it may have been replaced

    @precondition(lambda self: (self.out / "set/meta.json").exists())
    @rule(draw=st.data())
    def damage(self, draw):
        files = [file for file in (self.out / "set").glob("*.bin") if file.stat().st_size]
        file = draw.draw(st.sampled_from(sorted(files)))
        flip(file, draw.draw(st.integers(0, 8 * file.stat().st_size - 1)))
        self.is_damaged = True
        self.made_from = None

    def teardown(self):
        code, printed = self.start(0.5, force=True)
        assert code == 0, printed
        self.assert_is_wanted(0.5)
        assert verify.main(["set", "--out", str(self.out)]) == 0


def check_sets(folder):
    workers.BATCH_BYTES = 150
    prepare.SAVE_BYTES = 1
    prepare.SHARD_TOKENS = 90
    encode.FEW_DOCUMENTS = 1
    DisturbedSet.root = folder
    DisturbedSet.wanted = {}
    run_state_machine_as_test(DisturbedSet, settings=orders)


def test_a_set_is_as_if_nothing_had_happened(tmp_path):
    code, printed = Forked(check_sets, tmp_path / "set").wait(1200)
    assert code == 0, printed[-5000:]
