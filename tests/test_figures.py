"""The figures of the README and of docs/, and tools/figures.py: each from a file that says how it was measured."""

import json
import math
import re

import pytest

import figures

CITED = [
    (page, block) for page in figures.pages() for block in figures.blocks(page.read_text()) if figures.cited(block)
]
# Columns of what was set, or follows from two figures.
NOT_MEASURED = re.compile(r"epochs|steps|card|hardware|commit|pixels|against|/ 1$|config|run|blocks|decoder|file in|^$")


def test_every_cited_file_is_there_and_every_file_is_in_the_index():
    named = {name for _, block in CITED for name in figures.cited(block)}
    there = {path.name for path in figures.FOLDER.iterdir() if path.suffix != ".sh"}
    index = (figures.ROOT / "docs/results.md").read_text().split(figures.INDEX)[1]
    assert len(named) > 40
    assert named <= there
    assert set(figures.cited(index)) == there


@pytest.mark.parametrize(
    "name", sorted(path.name for path in figures.FOLDER.iterdir() if path.suffix not in (".png", ".sh"))
)
def test_every_file_says_how_it_was_measured(name):
    found = figures.provenance(name)
    assert all(found[key] for key in figures.KEYS), [key for key in figures.KEYS if not found[key]]
    assert len(found["commit"]) == len(found["date"])
    assert figures.commits(name)
    assert isinstance(figures.measured(name), tuple)


def test_every_code_that_was_measured_is_there():
    """A file that has moved since is listed under its new name."""
    for name in {path for paths in figures.MEASURED.values() for path in paths}:
        assert (figures.ROOT / name).is_file(), name


def test_the_commit_stands_beside_each_figure():
    """Code changes, and figures are not measured again each time: then it is known whose they are."""
    for page, block in CITED:
        for name in figures.cited(block):
            if not name.endswith(".png"):
                assert any(commit[:7] in block for commit in figures.commits(name)), (page.name, name, block)


def test_the_index_names_each_files_commits():
    for line in (figures.ROOT / "docs/results.md").read_text().split(figures.INDEX)[1].splitlines():
        for name in figures.cited(line)[:1]:
            if not name.endswith(".png"):
                assert all(commit[:7] in line for commit in figures.commits(name)), line


def numbers(value):
    """All numbers of a result, those inside its texts too."""
    if isinstance(value, dict):
        return [found for item in value.items() for found in numbers(item)]
    if isinstance(value, list | tuple):
        return [found for item in value for found in numbers(item)]
    if isinstance(value, str):
        return [float(found) for found in re.findall(r"\d+\.?\d*(?:[eE][-+]\d+)?", value)]
    return [float(value)] if isinstance(value, int | float) else []


def quoted(cell):
    """(value, half of its last digit) of each number of a table's cell; 1 min 52 s is 112."""
    cell = re.sub(r"(\d+) min (\d+) s", lambda match: str(60 * int(match[1]) + int(match[2])), cell)
    for text in re.findall(r"\d[\d,]*\.?\d*", cell):
        digits = text.replace(",", "").rstrip(".")
        last = -len(digits.partition(".")[2]) or len(digits) - len(digits.rstrip("0"))
        yield float(digits), 0.5 * 10.0**last


def test_the_numbers_of_a_table_are_in_the_rows_file():
    """Where a row names its file, each measured number of it is one of that file's, rounded."""
    checked = 0
    for page in figures.pages():
        header = []
        for line in page.read_text().split(figures.INDEX)[0].splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            header = (header or cells) if cells else []
            files = [name for name in figures.cited(line) if name.endswith(".json")]
            if not cells or not files:
                continue
            known = [n for name in files for n in numbers(json.loads((figures.FOLDER / name).read_text()))]
            for title, cell in zip(header, cells, strict=True):
                for value, half in () if NOT_MEASURED.search(title) else quoted(cell):
                    checked += 1
                    assert any(math.isclose(value, n, abs_tol=half * 1.01, rel_tol=0) for n in known), (line, value)
    assert checked > 60


def test_lines_changed_since_a_commit_are_counted_where_a_file_has_moved_too(monkeypatch, tmp_path):
    monkeypatch.setattr(figures, "ROOT", tmp_path)

    def commit():
        figures.git("add", "-A")
        figures.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x")
        return figures.git("rev-parse", "HEAD").strip()

    figures.git("init", "-q")
    for name in ("decode.py", "vit.py"):
        (tmp_path / name).write_text("".join(f"{name} line {i}\n" for i in range(20)))
    first = commit()
    (tmp_path / "input_pipeline").mkdir()
    (tmp_path / "input_pipeline/decode.py").write_text((tmp_path / "decode.py").read_text() + "one more\n")
    (tmp_path / "decode.py").unlink()
    second = commit()
    assert figures.lines_changed(first) == {"input_pipeline/decode.py": 1}
    assert figures.lines_changed(second) == {}
    monkeypatch.setattr(figures, "commits", lambda name: [second, first])
    assert figures.changed_since("odd_files.json") == {"input_pipeline/decode.py": 1}
    assert figures.changed_since("step_h200_h14.json") == {}
