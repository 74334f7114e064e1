"""Which run a file belongs to. Imports no torch.

A run has a random id: in its folder (the file `run_id`), in the manifests of its checkpoints, in
the first line of metrics.jsonl, in its arrays and exports. A reader refuses what has the id of
another run. Files of older versions have no id and are accepted.
"""

import re
import secrets
from pathlib import Path
from typing import NamedTuple

from common.files import read_content, write_atomic
from runtime import RunError

RUN_ID = "run_id"  # the file in a run's folder, and the key in what the run writes
ID_FORM = "[0-9a-f]{16}"


class ForeignError(RunError):
    """A file belongs to another run than its folder."""


class Identity(NamedTuple):
    """A folder that this process has claimed, and how to recognise it.

    Someone may move it away while the run trains, and start another run under its name.
    """

    folder: Path
    id: str
    inode: int

    def check(self) -> None:
        """Raise RunError if this is no longer the folder at its path: before each change there."""
        try:
            inode = self.folder.stat().st_ino
        except FileNotFoundError:
            raise RunError(
                f"{self.folder}: this run's folder was moved or removed while it trained, so it "
                "stops. Put the folder back and start the same command again"
            ) from None
        if inode != self.inode or read_id(self.folder) != self.id:
            raise RunError(
                f"{self.folder}: this run's folder was moved while it trained, and another one is "
                "there now, which is left alone. Move this run's own folder back, and start the "
                "same command again"
            )


def read_id(folder: Path) -> str:
    """The id of the run in `folder`; "" if an older version began it.

    Raises RunError if the file holds something else.
    """
    file = folder / RUN_ID
    try:
        text = read_content(file).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    if not re.fullmatch(ID_FORM, text):
        raise RunError(
            f"{file}: damaged, no id of a run; remove it: the next start writes that of the "
            "checkpoints"
        )
    return text


def check_origin(path: Path, found: str, folder: Path) -> None:
    """Raise ForeignError if `path`, which has the id `found`, is not of the run in `folder`."""
    own = read_id(folder)
    if found and own and found != own:
        raise ForeignError(
            f"{path}: of another run: its run_id is {found}, that of {folder} is {own}. Put the "
            "run's own file in its place, or move this one away"
        )


def write_id(folder: Path, known: str) -> str:
    """Write the id of a run that has none yet: `known` from its checkpoints, or a random one."""
    run_id = known or secrets.token_hex(8)
    write_atomic(folder / RUN_ID, f"{run_id}\n", durable=True)
    return run_id
