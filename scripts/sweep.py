"""Run the points of a config's [sweep] one after another.

    python -m scripts.sweep config/quickstart.toml [--section.key=value ...] [--dry-run]

Each point is `train.py` with the point's overrides. One that is finished is passed over, one that was cut off goes
on from its last checkpoint. A point that fails is reported at the end and the others go on; the exit code is then 1.
Asked to stop (SIGTERM, SIGUSR1, Ctrl-C), the point under way saves and the sweep ends, with exit code 75.
"""

import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import configure
from runtime import RunError, checkpoint, folder
from runtime.signals import EXIT_CODE, Stop

TRAIN = Path(__file__).parent.parent / "train.py"


def main(argv, stop=None):
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    dry_run = "--dry-run" in argv
    if "--fresh" in argv:
        print("a sweep goes on with its runs; for new ones set another --run.dir", file=sys.stderr)
        return 2
    try:
        file, overrides = configure.split_command_line([word for word in argv if word != "--dry-run"])
        points = configure.sweep_points(file, overrides)
    except configure.ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    failed, stop = [], stop or Stop()
    for number, overrides in enumerate(points, 1):
        command = ["train.py", file, *overrides]
        print(f"[{number}/{len(points)}] python {shlex.join(command)}", flush=True)
        config = configure.load(file, overrides)
        if is_finished(config):
            print(f"  finished already: {config.run.dir}/{config.run.name}")
        elif not dry_run:
            code = run(command[1:], stop)
            if stop.asked or code == EXIT_CODE:
                return EXIT_CODE
            if code:
                failed.append(command)
    for command in failed:
        print(f"failed: python {shlex.join(command)}", file=sys.stderr)
    return 1 if failed else 0


def run(arguments, stop):
    """The exit code of train.py, which is asked to stop when this process is."""
    process, asked = subprocess.Popen([sys.executable, TRAIN, *arguments]), False
    while process.poll() is None:
        if stop.asked and not asked:
            process.terminate()
            asked = True
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(0.2)
    return process.returncode


def is_finished(config):
    try:
        folder.changes(config)
        step = max(checkpoint.steps(folder.path_of(config) / "checkpoints"), default=0)
        return folder.is_finished(config, step)
    except (RunError, configure.ConfigError):  # another config's run: train.py says it better
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Stop().listen()))
