"""Which folders are checkpoints: step_XXXXXXXX, renamed to that name when all was written."""

import re
from pathlib import Path

STEP_FOLDER = re.compile(r"step_(\d{8,})")


def is_complete(folder: Path) -> bool:
    """Whether a folder holds what a checkpoint of ours holds: DCP's index and our state.json."""
    return (folder / ".metadata").is_file() and (folder / "state.json").is_file()


def step_folders(ckpt_dir: Path) -> dict[int, Path]:
    """Step -> folder, ascending, of the complete checkpoints in a folder; empty if it is not there."""
    found = {int(match[1]): path for path in ckpt_dir.glob("step_*") if (match := STEP_FOLDER.fullmatch(path.name))}
    return {step: found[step] for step in sorted(found) if is_complete(found[step])}


def newest_step(path: Path) -> Path | None:
    """`path` itself if it is a complete checkpoint, else the newest one in it; None if there is none."""
    if is_complete(path):
        return path
    complete = step_folders(path)
    return complete[max(complete)] if complete else None
