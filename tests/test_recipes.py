"""The primary configs: each, shrunk, takes two steps, evaluates, saves and exports; what they hold; how two differ."""

import launch

import math
import re
import shutil
import subprocess
import sys

import pytest
import timm
import torch
import yaml
from conftest import ROOT, TINY, read_metrics, run_tasks, started_once
from weight_files import write_teacher

import diff_config
import schema

SECOND = {  # configs that begin with what another one left
    "cifar10_vit_48": "cifar10_vit",
    "deit3_b16_224": "deit3_b16",
    "deit3_l16_224": "deit3_l16",
    "deit3_h14_224": "deit3_h14",
    "vit_b16_finetune_384": "vit_b16_pretrain",
}
NAMES = sorted(
    (file.stem for file in (ROOT / "config").glob("*.yaml") if file.stem != "defaults"), key=lambda n: (n in SECOND, n)
)
# Once shrunk, these differ from another one in next to nothing.
LIKE_ANOTHER = [
    name
    for name in NAMES
    if re.match(r"deit3_[lhs]1|deit_(small|tiny)|bigvision_s16_300|vit_10b|vit_gig|vit_te_(huge|large)", name)
]
SHRUNK = [
    *(override for override in TINY if override.startswith("model.")),
    "model.transformer_engine=false",  # which needs CUDA
    "global_batch_size=24",
    "num_train_steps=2",
    "num_epochs=null",
    "data.num_workers=0",
    "data.resident=false",  # for images of one size
    "compile=false",
    "cuda_graphs=false",  # which needs a GPU
    "logger.frequency=1",
]


@pytest.fixture(scope="module")
def runs(image_folder, tmp_path_factory):
    """A function: of LIKE_ANOTHER or of the others -> (outcomes, folder)."""

    @started_once
    def start(are_like_another):
        folder = tmp_path_factory.mktemp("recipes")
        teacher = write_teacher(folder / "teacher")
        tasks = []
        for i, name in enumerate(n for n in NAMES if (n in LIKE_ANOTHER) == are_like_another):
            overrides = [*SHRUNK, f"data.path={image_folder}", f"output_dir={folder / name}"]
            if name in SECOND:
                overrides.append(f"checkpoint.init_from={folder / SECOND[name]}/checkpoints")
                overrides.append("model.img_size=24")
            if name.endswith("_distilled"):  # in place of one from the hub
                overrides.append(f"distillation.teacher={teacher}")
            script = ("train_ddp", "train_fsdp2")[i % 2]
            tasks.append({"name": name, "script": script, "overrides": overrides, "config_name": name})
        return run_tasks(tasks, nproc=1, folder=folder, strict=False), folder

    return start


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_ANOTHER)) for name in NAMES]
)
def test_two_steps(runs, name):
    outcomes, folder = runs(name in LIKE_ANOTHER)
    for rank in outcomes[name]:
        assert "error" not in rank, rank["error"]
        assert rank["metrics"]["train/loss"] > 0
    steps = read_metrics(folder / name)
    cfg = launch.load_config(name, [*SHRUNK, "data.path=unused", f"output_dir={folder / name}"])
    assert sorted(steps) == [1, 2]
    assert all(math.isfinite(steps[step]["train/loss"]) for step in steps)
    assert steps[2]["val/images"] == 23
    assert ("val/ema_top1" in steps[2]) == (cfg.ema.decay is not None)
    sizes = schema.RunSizes.of(cfg, world_size=1, num_train_images=60, num_val_images=23)
    start, warmup = cfg.lr_scheduler.warmup_start_lr, sizes.num_warmup_steps
    if warmup:
        assert steps[1]["train/lr"] == pytest.approx(start + (schema.peak_lr(cfg) - start) / warmup)
    log = (folder / name / "train.log").read_text()
    assert ("loaded " in log) == (name in SECOND)
    exported = folder / name / "checkpoints/final_model"
    assert exported.exists() == cfg.checkpoint.save_final_model
    if exported.exists():
        model = timm.create_model(f"local-dir:{exported}", pretrained=True).eval()
        size = schema.pair(cfg.model.img_size if name not in SECOND else 24)
        assert model(torch.zeros(1, 3, *size)).isfinite().all()


# What a primary config holds

PAPER = re.compile(  # what a paper states, and a recipe repeats although it inherits the same
    r"num_epochs|num_train_steps|global_batch_size|max_grad_norm|precision|model\.drop_path_rate"
    r"|(optimizer|lr_scheduler|loss|ema|distillation)\..*"
    r"|data\.(repeated_augmentation|crop_.*|.flip|auto_augment|color_jitter|random_erasing|mixup.*|cutmix|interpolation)"
)


def values(name):
    """Dotted key -> value of a primary config."""
    return diff_config.flatten(schema.to_plain(launch.load_config(name, ["data.path=unused"])))


def own_keys(name):
    """The keys that stand in the primary config itself, its parents not among them."""
    content = yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())
    return set(diff_config.flatten({key: value for key, value in content.items() if key != "defaults"}))


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A copy of config/, which is read once."""
    return shutil.copytree(ROOT / "config", tmp_path_factory.mktemp("copied") / "config")


@pytest.mark.parametrize("name", NAMES)
def test_a_config_repeats_what_a_paper_states_and_nothing_else(name, copied, monkeypatch):
    file = copied / f"{name}.yaml"
    file.write_text(yaml.safe_dump({"defaults": yaml.safe_load(file.read_text())["defaults"]}))
    whole = values(name)
    monkeypatch.setattr(launch, "CONFIG_DIR", copied)
    inherited = values(name)
    shutil.copy2(ROOT / f"config/{name}.yaml", file)  # others inherit from it
    repeated = {key for key in own_keys(name) if inherited[key] == whole[key]}
    assert {key for key in repeated if not PAPER.fullmatch(key) or whole[key] == "null"} == set()


@pytest.mark.parametrize("name", NAMES)
def test_a_config_in_epochs_takes_steps_on_the_command_line(name):
    for epochs_key in {key for key in own_keys(name) if key.endswith("_epochs")} - {"num_epochs"}:
        section, key = epochs_key.replace("_epochs", "_steps").split(".")
        cfg = launch.load_config(name, ["data.path=unused", f"{section}.{key}=7"])
        assert getattr(getattr(cfg, section), key) == 7
        assert getattr(getattr(cfg, section), epochs_key.split(".")[1]) is None


# tools/diff_config.py


def diff(capsys, *arguments):
    """What the tool prints, line by line."""
    diff_config.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_diff_is_every_key_that_differs(capsys):
    configs = [launch.load_config(name, ["data.path=/x"], script="train_ddp") for name in ("deit_b16", "L0_sanity")]

    def value(cfg, key):
        for part in key.split("."):
            cfg = cfg[part] if isinstance(cfg, dict) else getattr(cfg, part)
        return cfg

    leaves = {key for key in schema.known_keys() if not any(k.startswith(f"{key}.") for k in schema.known_keys())}
    differ = {key for key in leaves if value(configs[0], key) != value(configs[1], key)}
    lines = diff(capsys, "deit_b16", "L0_sanity", "data.path=/x")
    assert {line.split(": ")[0] for line in lines} == differ
    assert len(lines) == len(differ)
    assert "model.drop_path_rate: 0.1 -> 0.0" in lines
    assert "max_grad_norm: null -> 1.0" in lines
    assert "compile: true -> false" in lines
    assert "data.mean: [0.485, 0.456, 0.406] -> [0.286]" in lines
    assert "precision: bf16 -> fp32" in lines
    assert not any(line.startswith("data.path") for line in lines)


def test_diff_of_a_config_whose_path_is_open(capsys):
    path = launch.load_config("L0_sanity").data.path
    assert f"data.path: {path} -> (not given)" in diff(capsys, "L0_sanity", "deit_b16")
    assert diff(capsys, "deit3_l16", "deit3_b16", "output_dir=o") == [
        "model.embed_dim: 1024 -> 768",
        "model.depth: 24 -> 12",
        "model.num_heads: 16 -> 12",
        "model.drop_path_rate: 0.45 -> 0.2",
    ]


def test_overrides_apply_to_both_names(capsys):
    lines = diff(capsys, "L0_sanity", "bigvision_s16_90ep", "seed=3", "optimizer.lr=7e-3", "output_dir=o")
    assert not {"seed", "optimizer.lr", "output_dir"} & {line.split(":")[0] for line in lines}
    assert diff(capsys, "deit_b16", "deit_b16", "seed=3") == []


@pytest.mark.parametrize("name", ["deit_b16", "vit_b16_finetune_384"])
def test_diff_with_a_run(capsys, runs, image_folder, name):
    run = runs(False)[1] / name
    written = yaml.safe_load((run / "config.yaml").read_text())
    overrides = [*SHRUNK, f"data.path={image_folder}", f"output_dir={run}", "seed=5"]
    overrides += [f"checkpoint.init_from={written['checkpoint']['init_from'] or 'null'}"]
    overrides += [f"model.img_size={written['model']['img_size']}"]
    for source in (run, run / "config.yaml"):
        assert diff(capsys, name, source, *overrides) == ["seed: 5 -> 0"]
        assert diff(capsys, source, name, *overrides) == ["seed: 0 -> 5"]
        assert diff(capsys, source, run) == []


def test_key_of_one_side_only_is_absent(capsys, tmp_path):
    plain = schema.to_plain(launch.load_config("L0_sanity"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    del plain["evaluation"]["every_n_epochs"]
    (tmp_path / "older.yaml").write_text(yaml.safe_dump(plain | {"gone": 1}))
    assert diff(capsys, tmp_path, tmp_path / "older.yaml") == [
        "evaluation.every_n_epochs: null -> (absent)",
        "gone: (absent) -> 1",
    ]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["L0_sanity"], ["required", "B"]),
        (["L0_sanity", "nope"], ["nope", "config"]),
        (["README.md", "L0_sanity"], ["README.md", "config.yaml"]),
        (["config", "L0_sanity"], ["config is neither"]),
        (["config/deit_b16.yaml", "L0_sanity"], ["config/deit_b16.yaml", "name"]),
        (["L0_sanity", "deit_b16", "optimzer.lr=1"], ["optimzer.lr", "did you mean optimizer.lr?"]),
        (["L0_sanity", "deit_b16", "seed"], ["seed", "command line"]),
        (["L0_sanity", "deit_b16", "num_train_steps=3", "num_epochs=1"], ["num_epochs=1.0", "exactly one", "null"]),
        (["runs/a", "runs/b", "seed=1"], ["seed=1", "leave them out"]),
        (["L0_sanity", "deit_b16", "--bogus"], ["--bogus"]),
    ],
)
def test_mistake_is_one_line_and_exit_code_2(capsys, monkeypatch, arguments, fragments):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as caught:
        diff_config.main(arguments)
    out, err = capsys.readouterr()
    assert (caught.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("error: ")
    for fragment in fragments:
        assert fragment in err


def test_diff_needs_no_torch(tmp_path):
    code = (
        "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__');"
        "assert not {'torch', 'timm', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    command = [sys.executable, "-c", code, ROOT / "tools/diff_config.py", "deit_b16", "deit3_b16"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "optimizer.name: adamw -> lamb" in done.stdout.splitlines()
