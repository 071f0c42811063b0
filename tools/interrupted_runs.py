"""What kill_campaign.py and preemption_matrix.py share: phases of a run that others can read, and how two runs compare.

Their runs are the tests' tiny ones: importing this module puts tests/ on the path, for tests/conftest.py. No program.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def conftest() -> Any:
    """tests/conftest.py: tiny runs, their images, and how to read what they left. Imports torch and pytest."""
    return importlib.import_module("conftest")


def mark_phase(file: int, phase: str, owner: Any, name: str, seconds: float = 0.0, *, then: str = "step") -> None:
    """From here on a call of owner.name writes `phase` to the open file as it begins, waits, and `then` as it ends."""
    original = getattr(owner, name)

    def marked(*args: Any, **kwargs: Any) -> Any:
        os.pwrite(file, phase.ljust(10).encode(), 0)
        time.sleep(seconds)
        try:
            return original(*args, **kwargs)
        finally:
            os.pwrite(file, then.ljust(10).encode(), 0)

    setattr(owner, name, marked)


def alive(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def start_environment(**more: str) -> dict[str, str]:
    """The environment of a torchrun."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=paths) | more


def compare(code: int, life: Path, straight: Path, keys: Iterable[str]) -> str:
    """How <life>/run, whose last start ended with `code`, differs from the undisturbed <straight>/run, or `identical`.

    Of every step the metrics `keys`; the best result; the final weights.
    """
    import torch

    read_metrics, weights = conftest().read_metrics, conftest().weights
    if code:
        return f"code {code}: {(life / 'log.txt').read_text()[-2000:]}"
    got, want = read_metrics(life / "run"), read_metrics(straight / "run")
    if got.keys() != want.keys():
        return f"steps {sorted(got.keys() ^ want.keys())} differ"
    for step in want:
        for key in keys:
            if got[step].get(key) != want[step].get(key):
                return f"{key} of step {step}: {got[step].get(key)}, not {want[step].get(key)}"
    best = [json.loads((folder / "run/checkpoints/best.json").read_text()) for folder in (life, straight)]
    if best[0] != best[1]:
        return f"best {best[0]}, not {best[1]}"
    a, b = weights(life, "run"), weights(straight, "run")
    different = [name for name in b if not torch.equal(a[name], b[name])]
    return f"weights differ: {different}" if different else "identical"
