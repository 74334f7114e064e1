"""Start and end of train.py as a command: early checks, errors, exit codes, torchrun.

It imports torch only within `launch`: a typo or missing data is reported before.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import configure
from data import DataError
from data.mixture import check_sets
from runtime import RankError, RunError, Stopped
from runtime.signals import EXIT_CODE, Stop

NEXT = """\
next:
  python -m scripts.report {run}
  python -m eval.val_loss {run}
  python -m scripts.sample {run} --prompt "The \""""


def check_command(argv: Sequence[str]) -> None:
    """Exit with 2 if the command line is wrong, or if the data sets of a new run do not fit.

    Data are checked only if the job has one rank, and large sets completely only later.
    """
    config = configure.from_command_line(argv)
    if os.environ.get("WORLD_SIZE", "1") != "1" or Path(config.run.dir, config.run.name).exists():
        return
    try:
        check_sets(config.data.folders, config.model.vocab_size, reads_large=False)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def describe_next(run: Path, config: configure.Config) -> str:
    """Commands to type after a run, also those that open or send its trackers' files."""
    lines = [NEXT.format(run=run)]
    if any(run.glob("wandb/offline-run-*")):
        lines.append(f"  wandb sync {run}/wandb/offline-run-*")
    elif config.log.wandb != "disabled":
        lines.append(f"  ls {run}/wandb    # wandb's files")
    return "\n".join(lines)


def launch(argv: list[str], start: Callable[[configure.Config, list[str]], None]) -> int:
    """Call `start` with the config of a command line and notes to print.

    Every error that a user can fix is one message. Returns the exit code.
    """
    from runtime import distributed  # imports torch
    from runtime.folder import find_or_rename, path_of, rename_fresh

    config = configure.from_command_line(argv)
    notes = []
    try:
        if "--fresh" in argv:
            config = rename_fresh(config)
        elif not configure.is_name_chosen(*configure.split_command_line(argv)):
            config = find_or_rename(config, notes.append)
        distributed.pick_device(config.train.device)  # also raises for a finished run
        start(config, notes)
        distributed.print_once(describe_next(path_of(config), config))
    except Stopped as stopped:
        distributed.print_once(str(stopped))
        return EXIT_CODE
    except (RunError, DataError, configure.ConfigError, OSError) as error:
        configure.tell_torchrun(str(error))
        rank = os.environ.get("RANK", "0")
        of_this_node = isinstance(error, DataError) and distributed.local_rank() == 0
        if rank == "0":
            print(f"error: {error}", file=sys.stderr)
        elif of_this_node or isinstance(error, OSError | RankError):
            # rank 0 has the other errors as well
            print(f"error on rank {rank}: {error}", file=sys.stderr)
        code = 2
    except Exception as error:  # most often another rank is lost
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            reason = " ".join(str(error).splitlines()[:2])  # "backend='inductor' raised:" is first
            print(
                f"error: torch cannot compile the model ({reason}): set --train.compile=off and "
                "start again",
                file=sys.stderr,
            )
            code = 2
        elif distributed.world_size() == 1:
            raise
        else:
            traceback.print_exc()
            code = 1
    else:
        return 0
    # threads that still wait for a lost rank must not keep this process, or abort it
    if distributed.world_size() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def run_until_exit(main: Callable[[list[str], Stop], int], stop: Stop) -> NoReturn:
    """Exit with the code of `main`, which gets the command line and `stop`, which is listening."""
    try:
        sys.exit(main(sys.argv[1:], stop))
    except KeyboardInterrupt:
        from runtime.distributed import print_once

        print_once(
            "interrupted again: not saved. The same command resumes from the last checkpoint"
        )
        sys.exit(130)
