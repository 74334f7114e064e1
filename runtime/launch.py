"""Start and end of train.py as a command: signals, early checks, errors, exit codes, torchrun.

It imports torch only within `launch`: a typo or missing data is reported before.
"""

import ctypes
import io
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from runtime import RankError, RunError, Stopped

if TYPE_CHECKING:  # functions import what needs time: a signal is noted before
    from configure import Config

# ---- requests to stop: SIGTERM (scheduler), SIGUSR1 (Slurm), SIGINT (Ctrl-C), SIGHUP (terminal)
EXIT_CODE = 75  # asked to stop, saved, to be started again: EX_TEMPFAIL of sysexits.h
OUTPUT_LOG = "output.log"  # in a run's folder
PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


class Output(io.FileIO):
    """stdout or stderr that may be lost: a closed terminal, a `tee` that died, a full disk.

    What cannot be written is dropped, and a line goes to OUTPUT_LOG in the run's folder.
    """

    folder: Path | None = None  # of the run, once it is known
    is_noted = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            self._note(error)
            return len(data)

    def _note(self, error: OSError) -> None:
        """Write the line, once; it is tried again with the next output."""
        if Output.is_noted or Output.folder is None:
            return
        name = {1: "stdout", 2: "stderr"}.get(self.fileno(), "output")
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(OSError), (Output.folder / OUTPUT_LOG).open("a") as log:
            log.write(f"{now} {name} cannot be written ({error.strerror}); the run goes on\n")
            Output.is_noted = True


def protect_output() -> None:
    """Let no print raise: of text that nobody reads, or that the terminal has no letters for."""
    for descriptor, name in enumerate(("stdout", "stderr"), 1):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
            continue
        buffer = io.BufferedWriter(Output(descriptor, "w", closefd=False))
        text = io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, text)


class Stop:
    """`asked` becomes True when this process is asked to stop, once `listen` was called."""

    def __init__(self) -> None:
        self.asked = False
        self.launcher: int | None = None  # the process of torchrun

    def listen(self) -> Self:
        """Make signals set `asked` instead of ending the process.

        A second Ctrl-C is a KeyboardInterrupt.
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._note)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(signal.SIGHUP, self._note)
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun may be killed
            self.launcher = os.getppid()
            end_with_parent(self.launcher)
        return self

    def check_launcher(self) -> None:
        """Raise Stopped if torchrun has died: its ranks would wait for it to let them meet."""
        if self.launcher and os.getppid() != self.launcher:
            raise Stopped(
                "torchrun was killed before its ranks met, so no step was trained. The same "
                "command starts the run again"
            )

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_with_parent(parent: int) -> None:
    """Have Linux send SIGTERM when `parent` dies for any reason; train.py then saves and ends."""
    with suppress(OSError, AttributeError):  # no Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


NEXT = """\
next:
  python -m scripts.report {run}
  python -m eval.val_loss {run}
  python -m scripts.sample {run} --prompt "The \""""


def check_command(argv: Sequence[str]) -> None:
    """Exit with 2 if the command line is wrong, or if the data sets of a new run do not fit.

    Data are checked only if the job has one rank.
    """
    import configure
    from common.files import exists
    from data import DataError
    from data.loader import check_sets

    config = configure.from_command_line(argv)
    if os.environ.get("WORLD_SIZE", "1") != "1" or exists(Path(config.run.dir, config.run.name)):
        return
    try:
        check_sets(config.data.folders, config.model.vocab_size)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def describe_next(run: Path) -> str:
    """Commands to type after a run, also those that open or send its trackers' files."""
    lines = [NEXT.format(run=run)]
    if any(run.glob("wandb/offline-run-*")):
        lines.append(f'  for part in {run}/wandb/offline-run-*; do wandb sync "$part"; done')
    return "\n".join(lines)


def launch(argv: list[str], start: "Callable[[Config], None]") -> int:
    """Call `start` with the config of a command line.

    Every error that a user can fix is one message. Returns the exit code.
    """
    import configure
    from data import DataError
    from runtime import distributed  # imports torch
    from runtime.folder import find_or_rename, path_of, rename_fresh

    config = configure.from_command_line(argv)
    try:
        if "--fresh" in argv:
            config = rename_fresh(config)
        elif not configure.is_name_chosen(*configure.split_command_line(argv)):
            config = find_or_rename(config)
        Output.folder = path_of(config)
        distributed.pick_device(config.train.device)  # also raises for a finished run
        with describe_torch_errors():
            start(config)
        distributed.print_once(describe_next(path_of(config)))
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
    except Exception:  # most often another rank is lost
        if distributed.world_size() == 1:
            raise
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


@contextmanager
def describe_torch_errors() -> Iterator[None]:
    """Turn errors of torch that a user can fix into a RankError with the remedy."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        amounts = re.split(" Process | Of the allocated", str(error))[0]  # then: its allocator
        raise RankError(
            f"{amounts} Set a smaller --train.micro_batch_size, "
            "--train.activation_checkpointing=true, or --train.parallel=fsdp on more GPUs, and "
            "start again"
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = " ".join(str(error).splitlines()[:2])  # "backend='inductor' raised:" is first
        raise RankError(
            f"torch cannot compile the model ({reason}): set --train.compile=off and start again"
        ) from error


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
