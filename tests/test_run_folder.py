"""What a run's folder says of how the run was made."""

import shutil

from runtime import run_folder


def test_a_run_knows_its_commit_with_and_without_git(monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_folder._git_commit() == "unknown"
    monkeypatch.setenv("COMMIT", "v1-4-gabc")  # as the image sets it
    assert run_folder._git_commit() == "v1-4-gabc"
