"""schema.py alone: what its fields say, what importing it costs, and the numbers of a run that follow from a config."""

import launch

import ast
import re
import subprocess
import sys

import pytest
from conftest import ROOT

import schema

BASE_FILES = {"defaults.yaml": "", "model/vit_base_patch16_224.yaml": "model.", "data/imagenet.yaml": "data."}
NO_FIELDS = ("defaults", "hydra", "wandb.init_args.")  # what Hydra reads itself; names that wandb chooses

# What the fields say


def yaml_sentences(file, prefix):
    """Dotted key -> comment of a base file, "" where there is none.

    A comment goes on in the next line if that has a # in the same column. A key of the list of defaults, as in
    `- model: ...`, stands for the section.
    """
    sentences, path, column = {}, [], None
    for line in (ROOT / "config" / file).read_text().splitlines():
        content, mark, comment = line.partition("# ")
        if match := re.match(r"( *)(- )?(\w+):", content):
            path = [(indent, name) for indent, name in path if indent < len(match[1]) and not match[2]]
            path.append((len(match[1]), match[3]))
            key, column = prefix + ".".join(name for _, name in path), len(content)
            sentences[key] = comment
        elif mark and path and len(content) == column:
            sentences[key] += " " + comment
        else:
            column = None
    return {key: text for key, text in sentences.items() if not key.startswith(NO_FIELDS)}


def docstrings(name="Config", prefix=""):
    """Dotted key -> the string under the field, its whitespace made one space; "" where there is none."""
    classes = {node.name: node for node in ast.parse((ROOT / "schema.py").read_text()).body if hasattr(node, "name")}
    sentences = {}
    body = classes[name].body
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            is_string = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            sentences[prefix + field.target.id] = " ".join(after.value.value.split()) if is_string else ""
            if getattr(field.annotation, "id", None) in classes:
                sentences |= docstrings(field.annotation.id, f"{prefix}{field.target.id}.")
    return sentences


def test_every_field_says_what_the_comment_of_its_key_says():
    comments = {}
    for file, prefix in BASE_FILES.items():
        comments |= yaml_sentences(file, prefix)
    assert set(comments) == set(schema.known_keys())
    assert docstrings() == comments
    for key, sentence in comments.items():
        assert re.fullmatch(r"\S.*\.", sentence), key


# What importing it costs


def test_import_brings_no_heavy_package():
    code = (
        "import sys, time; start = time.perf_counter(); import schema; seconds = time.perf_counter() - start;"
        "print(f'{seconds:.2f} s', *{'torch', 'timm', 'hydra', 'omegaconf', 'launch'} & set(sys.modules), sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    print("import schema:", done.stdout)  # below half a second; a busy machine's time is no test
    assert re.fullmatch(r"\d+\.\d\d s", done.stdout.strip()), done.stdout


# A run's sizes


def sizes(*overrides, images=1281167, world_size=1):
    cfg = launch.load_config("L0_sanity", ["output_dir=unused", *overrides])
    return schema.RunSizes.of(cfg, world_size=world_size, num_train_images=images, num_val_images=500)


EPOCHS = {  # key in epochs -> (key in steps, name in RunSizes)
    "lr_scheduler.num_warmup_epochs": ("lr_scheduler.num_warmup_steps", "num_warmup_steps"),
    "evaluation.every_n_epochs": ("evaluation.every_n_steps", "evaluate_every"),
    "checkpoint.save_every_n_epochs": ("checkpoint.save_every_n_steps", "save_every"),
}


@pytest.mark.parametrize("key", EPOCHS)
@pytest.mark.parametrize(
    ("epochs", "images", "batch", "steps"),
    [
        ("5", 1281167, 1008, 6354),  # of 6354.995
        ("20", 1281167, 4096, 6255),  # of 6255.7
        ("0.5", 4000, 48, 41),  # of 41.7
        ("1", 60, 60, 1),
        ("4.1", 60, 2, 123),  # 122.99999999999999 in floats
        ("1e1", 50000, 1000, 500),
    ],
)
def test_epochs_are_steps_rounded_down(key, epochs, images, batch, steps):
    steps_key, name = EPOCHS[key]
    run = sizes(f"{steps_key}=null", f"{key}={epochs}", f"global_batch_size={batch}", images=images)
    assert getattr(run, name) == steps


@pytest.mark.parametrize("key", EPOCHS)
def test_steps_are_as_given(key):
    steps_key, name = EPOCHS[key]
    assert getattr(sizes(f"{steps_key}=77", f"{key}=null"), name) == 77


def test_less_than_a_step_is_no_warmup_but_an_interval_of_one_step():
    short = [item for key, (steps_key, _) in EPOCHS.items() for item in (f"{steps_key}=null", f"{key}=0.001")]
    run = sizes(*short, images=4000)
    assert (run.num_warmup_steps, run.evaluate_every, run.save_every) == (0, 1, 1)


@pytest.mark.parametrize("key", [key for key in EPOCHS if "warmup" not in key])
def test_neither_steps_nor_epochs_is_never(key):
    steps_key, name = EPOCHS[key]
    assert getattr(sizes(f"{steps_key}=null", f"{key}=null"), name) is None


REFUSED = {  # overrides -> what the one line must contain
    "warmup in both": (
        "lr_scheduler.num_warmup_steps=77 lr_scheduler.num_warmup_epochs=2.5",
        "lr_scheduler.num_warmup_steps=77",
        "lr_scheduler.num_warmup_epochs=2.5",
        "exactly one",
        "set the other to null",
    ),
    "no warmup": (
        "lr_scheduler.num_warmup_steps=null",
        "lr_scheduler.num_warmup_steps=null",
        "lr_scheduler.num_warmup_epochs=null",
        "exactly one",
    ),
    "evaluation in both": (
        "evaluation.every_n_steps=77 evaluation.every_n_epochs=2.5",
        "evaluation.every_n_steps=77",
        "evaluation.every_n_epochs=2.5",
        "at most one",
        "set the other to null",
    ),
    "saving in both": (
        "checkpoint.save_every_n_steps=77 checkpoint.save_every_n_epochs=2.5",
        "checkpoint.save_every_n_steps=77",
        "checkpoint.save_every_n_epochs=2.5",
        "at most one",
        "set the other to null",
    ),
    "warmup of 0 epochs": (
        "lr_scheduler.num_warmup_steps=null lr_scheduler.num_warmup_epochs=0",
        "lr_scheduler.num_warmup_epochs=0",
        "greater than 0",
    ),
    "0 epochs": ("evaluation.every_n_epochs=0", "evaluation.every_n_epochs=0", "greater than 0"),
    "negative epochs": ("checkpoint.save_every_n_epochs=-1", "checkpoint.save_every_n_epochs=-1", "greater than 0"),
    "no step": ("num_train_steps=null num_epochs=0.001", "num_epochs=0.001", "4000 images", "train longer"),
    "batch": ("global_batch_size=50 micro_batch_size=7", "global_batch_size=50", "micro_batch_size=7", "use "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    overrides, *fragments = REFUSED[name]
    with pytest.raises(schema.ConfigError) as caught:
        sizes(*overrides.split(), images=4000)
    assert len(str(caught.value).splitlines()) == 1
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_the_rest_follows_from_the_config():
    batch = ["global_batch_size=48", "micro_batch_size=6"]
    run = sizes("num_train_steps=null", "num_epochs=10", *batch, images=4000, world_size=2)
    assert (run.num_train_steps, run.schedule_steps, run.micro_batch_size, run.accumulation) == (833, 833, 6, 4)
    assert (run.world_size, run.num_train_images, run.num_val_images, run.classes) == (2, 4000, 500, ())
    assert sizes("lr_scheduler.num_training_steps=700").schedule_steps == 700
