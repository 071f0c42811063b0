"""The Docker image, the devcontainer and the notices: their files agree with the repository's."""

import itertools
import json
import re
from pathlib import Path

from conftest import ROOT
from packaging.requirements import Requirement

# The image


def ignored(path):
    """Whether .dockerignore keeps a file out: the last pattern that matches it or a folder above it counts."""
    from fnmatch import fnmatchcase

    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.lstrip("!")
        names = ["/".join(path.parts[: i + 1]) for i in range(len(path.parts))]
        if pattern.startswith("**/"):
            matches = any(fnmatchcase(part, pattern[3:]) for part in path.parts)
        else:  # an asterisk does not match a slash
            matches = any(n.count("/") == pattern.count("/") and fnmatchcase(n, pattern) for n in names)
        if matches:
            out = not line.startswith("!")
    return out


def instructions():
    text = (ROOT / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]


def test_what_the_image_copies_is_there_and_small():
    copied = [rest.split() for name, rest in instructions() if name == "COPY"]
    sources = [source for words in copied for source in [w for w in words if not w.startswith("--")][:-1]]
    assert sources == ["requirements.txt", "requirements-gpu.txt", "."]
    for source in sources:
        assert (ROOT / source).exists()
        assert source == "." or not ignored(Path(source))
    files = [p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file() and not set(p.parts) & {".git", ".venv"}]
    context = [path for path in files if not ignored(path)]
    assert sum((ROOT / path).stat().st_size for path in context) < 8 * 2**20
    needed = {*ROOT.glob("*.py"), *ROOT.glob("config/**/*.yaml"), *ROOT.glob("tools/*.py"), ROOT / "NOTICE"}
    needed |= {ROOT / "data/fashion_mnist_demo.tar.gz", ROOT / "LICENSE"}
    assert {path.relative_to(ROOT) for path in needed} <= set(context)
    for left in ("runs/x/metrics.jsonl", ".git/HEAD", "__pycache__/a.pyc", "data/fashion_mnist_demo/a.jpg", ".venv/x"):
        assert ignored(Path(left)), left


def test_what_the_image_installs_is_in_the_requirements():
    installs = re.findall(
        r"pip install (.*?)(?:&&|$)", " ".join(rest for name, rest in instructions() if name == "RUN")
    )
    assert len(installs) == 2
    for arguments in installs:
        words = arguments.split()
        files = [word for flag, word in itertools.pairwise(words) if flag == "-r"]
        options = [word for word in words if word.startswith("-")]
        assert len(words) == len(options) + len(files) + words.count("-c")  # and no package by its name
        assert files
        assert all((ROOT / file).is_file() for file in files)
    pins = [line.split("#")[0].strip() for line in (ROOT / "requirements-gpu.txt").read_text().splitlines()]
    assert "transformer-engine" in [Requirement(pin).name for pin in pins if pin and not pin.startswith("-r")]
    (base,) = [rest for name, rest in instructions() if name == "FROM"]
    version = re.match(r"pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn9-devel$", base)[1]  # with a compiler
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    (torchs,) = [Requirement(line) for line in lines if re.match(r"torch\b", line)]
    assert torchs.specifier.contains(version)


def test_the_image_does_not_run_as_root_and_says_how_it_is_run():
    names = [name for name, _ in instructions()]
    users = [rest for name, rest in instructions() if name == "USER"]
    assert users[-1] == "${UID}"
    assert names.index("USER") < names.index("CMD")
    header = (ROOT / "Dockerfile").read_text().split("FROM")[0]
    assert "docker run --rm --gpus=all --shm-size=16G" in header
    assert "torchrun --standalone --nproc-per-node 8 train_fsdp2.py" in header


def test_the_devcontainer_is_the_image():
    text = re.sub(r"^//.*$", "", (ROOT / ".devcontainer/devcontainer.json").read_text(), flags=re.MULTILINE)
    container = json.loads(text)
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert (ROOT / ".devcontainer" / container["build"]["context"]).resolve() == ROOT
    assert f'useradd --create-home --uid "${{UID}}" {container["remoteUser"]}' in (ROOT / "Dockerfile").read_text()
    assert container["runArgs"] == ["--gpus=all", "--shm-size=16G"]


def test_notices_name_whose_work_is_used():
    notice = (ROOT / "NOTICE").read_text()
    assert "timm" in notice
    assert "Fashion-MNIST" in notice
    assert (ROOT / re.search(r"data/\w+LICENSE", notice)[0]).is_file()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
