"""Write a run's numbers to TensorBoard files as well (log.tensorboard). Nothing here can stop a run that has begun."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from common.text import first_line
from configure import Config
from runtime import RunError
from runtime.tracker import Line, flatten_line


class TensorBoard:
    """Writes lines of metrics.jsonl to a folder, under their names. Raises whatever torch's SummaryWriter raises."""

    name, remedy = "tensorboard", ""

    def __init__(self, folder: Path, resume_step: int, first_layer: int = 0) -> None:
        """Steps after `resume_step`, which an earlier start may have written, are purged: TensorBoard hides them.

        `first_layer` is the first with experts.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.first_layer = first_layer
        self.is_first = not any(folder.glob("events.*"))
        self.writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def recall(self, lines: Sequence[Line]) -> None:
        """Write the `lines` of earlier starts, if those wrote no files."""
        for line in lines if self.is_first else ():
            self.log(line)

    def log(self, line: Line) -> None:
        """Write one line, so that a kill does not lose it."""
        for name, value in flatten_line(line, self.first_layer).items():
            if name not in ("step", "tokens"):
                self.writer.add_scalar(name, value, line["step"])
        self.writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        """Close the file."""
        self.writer.close()


def require_tensorboard(config: Config) -> None:
    """Raise RunError with the remedy if log.tensorboard needs a package that is missing."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise RunError("log.tensorboard = true: tensorboard not installed: pip install tensorboard")


def start_tensorboard(config: Config, folder: Path, resume_step: int) -> TensorBoard | None:
    """Begin a file of the run in `folder`; None without log.tensorboard, or if that fails, which costs a printed line.

    Args:
        config: the run's.
        folder: the run's folder.
        resume_step: of the checkpoint that the run resumes from; -1 at the start.
    """
    if not config.log.tensorboard:
        return None
    try:
        return TensorBoard(folder / "tensorboard", resume_step, config.model.n_dense_layer)
    except Exception as error:
        print(f"tensorboard: no files ({first_line(error)}): continuing without; metrics.jsonl has every number")
        return None
