"""Which module may import which, from the code's own imports: arrows point down only, and there is no circle."""

import ast
import functools
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("input_pipeline", "interop", "observability", "runtime")

# A module or package -> what of ours it may import. Whatever is not listed here must not be there.
MAY_IMPORT = {
    "schema": set(),
    "runtime": {"schema"},
    "input_pipeline": {"runtime", "schema"},
    "packing": set(),
    "vit": {"packing", "runtime", "schema"},
    "vit_te": {"schema", "vit"},
    "interop": {"runtime", "schema", "vit"},
    "modeling": {"interop", "schema", "vit", "vit_te"},
    "optim": {"runtime", "schema"},
    "observability": {"runtime", "schema"},
    "imagenet_dataset": {"input_pipeline", "packing", "runtime", "schema"},
    "checkpoint": {"interop", "optim", "runtime", "schema"},
    "distillation": {"interop", "runtime", "schema"},
    "trainer": {
        "checkpoint", "imagenet_dataset", "input_pipeline", "observability", "optim", "packing", "runtime", "schema"
    },
    "launch": {"imagenet_dataset", "interop", "observability", "runtime", "schema", "vit_te"},
    "infer": {"input_pipeline", "interop", "launch", "runtime", "schema"},
}  # fmt: skip
for entrypoint in ("train_ddp", "train_fsdp2", "train_mfsdp"):
    MAY_IMPORT[entrypoint] = {"checkpoint", "imagenet_dataset", "launch", "modeling", "optim", "runtime", "schema"}
    MAY_IMPORT[entrypoint] |= {"distillation", "trainer"}
# Libraries that a module or package must not need, imported anywhere in it.
MUST_NOT_NEED = {
    "schema": {"hydra", "omegaconf", "timm", "torch", "torchvision"},
    "vit": {"megatron_fsdp", "transformer_engine", "transformers"},
    "runtime/preemption": {"timm", "torch"},  # at its top: launch.py listens before torch is imported
    "runtime/parameter_names": {"timm", "torch", "transformer_engine", "transformers"},
    "runtime/step_folders": {"torch"},
}


def modules(root):
    """Name of each module, "vit" or "runtime/files" -> its file."""
    files = [*root.glob("*.py"), *(file for package in PACKAGES for file in (root / package).glob("*.py"))]
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in files}


@functools.cache
def imported(text, *, only_top=False):
    """The dotted names that a file's text imports; with `only_top` those of its first level, not of its functions."""
    tree = ast.parse(text)
    names = set()
    for node in tree.body if only_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_of(name):
    """The package, or the module at the top, that a module's name or a dotted import belongs to."""
    return name.replace("/", ".").split(".")[0]


def arrows(root):
    """(importer, imported) for modules of ours, "runtime/session" -> "runtime/preemption"."""
    known = modules(root)
    found = set()
    for name, file in known.items():
        dotted = {each.replace(".", "/") for each in imported(file.read_text())}
        found |= {(name, each) for each in dotted & known.keys() if each != name}
    return found


def forbidden(root):
    """A line for each arrow that must not be, circle and library that is not needed."""
    lines = []
    for importer, target in sorted(arrows(root)):
        a, b = room_of(importer), room_of(target)
        if a != b and b not in MAY_IMPORT.get(a, set()):
            lines.append(f"{importer} imports {target}")
    lines += [f"{name} has no place in MAY_IMPORT" for name in modules(root) if room_of(name) not in MAY_IMPORT]
    for name, libraries in MUST_NOT_NEED.items():
        names = imported((root / f"{name}.py").read_text(), only_top=name == "runtime/preemption")
        needed = {each.split(".")[0] for each in names}
        lines += [f"{name} imports {library}" for library in sorted(libraries & needed)]
    return lines + [f"a circle: {' -> '.join(path)}" for path in circles(arrows(root))]


def circles(pairs):
    """Paths of module names that end where they begin; at most one a module."""
    targets = {}
    for importer, target in pairs:
        targets.setdefault(importer, set()).add(target)

    def path_back(start):
        stack = [(start, [start])]
        seen = set()
        while stack:
            name, path = stack.pop()
            for target in targets.get(name, ()):
                if target == start:
                    return [*path, start]
                if target not in seen:
                    seen.add(target)
                    stack.append((target, [*path, target]))
        return None

    return [path for start in sorted(targets) if (path := path_back(start))]


def test_arrows_point_down():
    assert forbidden(ROOT) == []


def test_every_room_is_there():
    assert {room_of(name) for name in modules(ROOT)} == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("where", "line", "complaint"),
    [
        ("schema.py", "import torch", "schema imports torch"),
        ("schema.py", "from runtime.files import write_json", "schema imports runtime/files"),
        ("vit.py", "import vit_te", "vit imports vit_te"),
        ("vit.py", "from interop import weights_in", "vit imports interop/weights_in"),
        ("optim.py", "import imagenet_dataset", "optim imports imagenet_dataset"),
        ("observability/profiling.py", "    from imagenet_dataset import run_sizes", "observability/profiling imports"),
        ("runtime/files.py", "from runtime.run_folder import set_status", "a circle: runtime/files -> "),
        ("input_pipeline/decode.py", "from launch import launch", "input_pipeline/decode imports launch"),
    ],
)
def test_a_planted_import_is_found(tmp_path, where, line, complaint):
    for name, file in modules(ROOT).items():
        copy = tmp_path / f"{name}.py"
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    assert forbidden(tmp_path) == []
    planted = f"def planted() -> None:\n{line}\n" if line.startswith(" ") else f"{line}\n"
    (tmp_path / where).write_text((tmp_path / where).read_text() + planted)
    assert any(found.startswith(complaint) for found in forbidden(tmp_path)), forbidden(tmp_path)


if __name__ == "__main__":  # make checks: no pytest, no torch
    sys.exit("\n".join(forbidden(ROOT)) or None)
