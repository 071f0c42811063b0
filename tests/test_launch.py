"""The way in: versions, what a script or a machine cannot honour, the command line; in real processes too."""

import launch

import importlib.metadata
import json
import re
import sys

import pytest
import torch
import yaml
from configs import load, schema_leaves, small, with_values, yaml_leaves
from conftest import ROOT, SCRIPTS, TINY, error_of, run_command, started_once, tiny_config
from packaging.requirements import Requirement
from packaging.version import Version

import schema
from input_pipeline.decode import UnreadableError

# What a script or a machine cannot honour


@pytest.fixture(params=[False, True], ids=["without CUDA", "with CUDA"])
def cuda(request, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


def axes(**sizes):
    return with_values(small(), precision="bf16", distributed=sizes)


@pytest.mark.parametrize(
    ("values", "there", "used"),
    [
        ({"global_batch_size": 24}, 4, 4),
        ({"global_batch_size": 24}, 7, 6),
        ({"global_batch_size": 1024}, 24, 16),
        ({"global_batch_size": 24, "micro_batch_size": 8}, 2, 1),
        ({"global_batch_size": 2}, 7, 2),
        ({"global_batch_size": 24, "distributed": {"dp_shard": 2, "dp_outer": None}}, 7, 2),
        ({"global_batch_size": 24, "distributed": {"dp_shard": 2, "dp_outer": 2}}, 7, 4),
    ],
)
def test_as_many_ranks_train_as_the_batch_and_the_mesh_take(values, there, used):
    axes = {"stand_by": True} | values.get("distributed", {})
    cfg = with_values(small(), **values | {"distributed": axes})
    assert launch.ranks_to_use(cfg, "train_fsdp2", there) == used
    without = with_values(cfg, distributed={"stand_by": False})
    assert launch.ranks_to_use(without, "train_fsdp2", there) == there


def test_as_many_ranks_train_as_every_stage_takes():
    change = "data.size_schedule=[{epoch:2,img_size:24,global_batch_size:8}]"
    cfg = tiny_config("global_batch_size=12", change, "distributed.stand_by=true")
    assert launch.ranks_to_use(cfg, "train_ddp", 6) == 4
    assert launch.ranks_to_use(tiny_config("global_batch_size=12", "distributed.stand_by=true"), "train_ddp", 6) == 6


def test_what_no_number_of_ranks_mends_is_said(monkeypatch):
    cfg = with_values(small(), global_batch_size=24, micro_batch_size=7, distributed={"stand_by": True})
    assert launch.ranks_to_use(cfg, "train_ddp", 3) == 3
    assert "micro_batch_size=7 x 3 ranks" in error_of(schema.split_batch, cfg, 3)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("key", ["dp_shard", "dp_outer"])
@pytest.mark.parametrize("value", [2, 4])
def test_ddp_refuses_to_shard_and_names_the_key(key, value):
    text = error_of(launch.check_script, axes(**{key: value}), "train_ddp", value)
    assert f"distributed.{key}={value}" in text
    assert "null" in text
    assert "train_fsdp2.py" in text


@pytest.mark.parametrize("script", ["train_fsdp2", "train_mfsdp"])
@pytest.mark.parametrize(
    ("dp_outer", "dp_shard", "world_size"),
    [(2, 2, 2), (2, 2, 8), (None, 3, 4), (None, 2, 4), (3, None, 4), (2, None, 1), (4, 4, 1), (None, 2, 1)],
)
def test_axes_that_are_not_the_world_are_refused(monkeypatch, script, dp_outer, dp_shard, world_size):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    text = error_of(launch.check_script, axes(dp_outer=dp_outer, dp_shard=dp_shard), script, world_size)
    assert f"distributed.dp_outer={dp_outer or 1}" in text
    assert f"distributed.dp_shard={dp_shard or 'null'}" in text
    assert f"world size of {world_size}" in text


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("script", "sizes", "world_size"),
    [
        *((script, {}, n) for script in SCRIPTS[:2] for n in (1, 2, 7)),
        ("train_fsdp2", {"dp_outer": 2}, 4),
        ("train_fsdp2", {"dp_shard": 2, "dp_outer": 2}, 4),
        ("train_fsdp2", {"dp_shard": 4}, 4),
        ("train_fsdp2", {"dp_outer": 4}, 4),
        ("train_ddp", {"tp": 1}, 4),
        ("train_fsdp2", {"tp": 1, "dp_outer": 1}, 3),
    ],
)
def test_axes_that_make_the_world_are_accepted(script, sizes, world_size):
    launch.check_script(axes(**sizes), script, world_size)


def test_megatron_fsdp_needs_cuda(cuda):
    cfg = axes()
    if cuda:
        launch.check_script(cfg, "train_mfsdp", 2)
    else:
        text = error_of(launch.check_script, cfg, "train_mfsdp", 2)
        assert "train_mfsdp.py" in text
        assert "CUDA" in text
        assert "train_fsdp2.py" in text


def test_megatron_fsdp_refuses_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    text = error_of(launch.check_script, with_values(axes(), precision="fp32"), "train_mfsdp", 1)
    assert "precision=fp32" in text
    assert "train_fsdp2.py" in text


@pytest.mark.parametrize(
    ("key", "value"),
    [("global_pool", "avg"), ("reg_tokens", 2), ("init_values", 0.1), ("drop_path_rate", 0.1), ("pos_drop_rate", 0.1)],
)
def test_hugging_faces_model_refuses_what_it_cannot_be(key, value):
    cfg = with_values(small(), model={"class_token": True, "global_pool": "token", "implementation": "hf"})
    launch.check_script(cfg, "train_ddp", 1)
    text = error_of(launch.check_script, with_values(cfg, model={key: value}), "train_ddp", 1)
    assert f"model.{key}={value}" in text
    assert "model.implementation=hf" in text


@pytest.mark.parametrize(
    "values",
    [{"freeze": "backbone"}, {"freeze": "patch_embed"}, {"pos_embed": "sincos"}, {"implementation": "timm"}],
)
def test_megatron_fsdp_refuses_what_it_cannot_keep(monkeypatch, values):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cfg = with_values(axes(), model=values)
    (key, value), *_ = values.items()
    text = error_of(launch.check_script, cfg, "train_mfsdp", 1)
    assert f"model.{key}={value}" in text
    assert "train_fsdp2.py" in text
    launch.check_script(cfg, "train_fsdp2", 1)


def test_cuda_graphs_are_refused_where_they_cannot_be(monkeypatch):
    cfg = with_values(axes(), cuda_graphs=True)
    assert "cuda_graphs=true needs a CUDA GPU" in error_of(launch.check_script, cfg, "train_ddp", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for script in ("train_ddp", "train_fsdp2"):
        launch.check_script(cfg, script, 1)
    for value, shown in ((True, "true"), ("selective", "selective")):
        recomputed = with_values(cfg, activation_checkpointing=value)
        text = error_of(launch.check_script, recomputed, "train_ddp", 1)
        assert f"cuda_graphs=true records no activation_checkpointing={shown}" in text
    offloaded = with_values(cfg, fsdp2={"cpu_offload": True})
    assert "cuda_graphs=true records no fsdp2.cpu_offload=true" in error_of(
        launch.check_script, offloaded, "train_fsdp2", 1
    )


@pytest.mark.parametrize("sizes", [{"dp_outer": 4}, {"dp_outer": 4, "dp_shard": 1}])
def test_megatron_fsdp_refuses_replicas_of_one_rank(monkeypatch, sizes):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cfg = axes(**sizes)
    text = error_of(launch.check_script, cfg, "train_mfsdp", 4)
    for said in ("distributed.dp_outer=4", "multiplies gradients by 4", "dp_outer=null", "train_fsdp2.py"):
        assert said in text
    launch.check_script(cfg, "train_fsdp2", 4)
    launch.check_script(axes(dp_outer=2), "train_mfsdp", 4)
    launch.check_script(axes(), "train_mfsdp", 1)


@pytest.mark.parametrize(("dp_outer", "is_allowed"), [(None, False), (1, False), (2, True)])
def test_megatron_fsdps_outer_sharding_needs_an_outer_axis(monkeypatch, dp_outer, is_allowed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cfg = with_values(axes(dp_outer=dp_outer), mfsdp={"outer_dp_sharding_strategy": "optim"})
    if is_allowed:
        launch.check_script(cfg, "train_mfsdp", 4)
    else:
        text = error_of(launch.check_script, cfg, "train_mfsdp", 4)
        assert "mfsdp.outer_dp_sharding_strategy=optim" in text
        assert "distributed.dp_outer" in text


def test_cpu_offload_needs_cuda(cuda):
    cfg = with_values(axes(), fsdp2={"cpu_offload": True})
    launch.check_script(cfg, "train_ddp", 2)  # which does not read that section
    if cuda:
        launch.check_script(cfg, "train_fsdp2", 2)
    else:
        text = error_of(launch.check_script, cfg, "train_fsdp2", 2)
        assert "fsdp2.cpu_offload=true" in text
        assert "CUDA" in text


def test_compiling_needs_a_compiler(cuda, monkeypatch, tmp_path):
    """C++ on a CPU, where torch looks for it; C on a GPU, where Triton does."""
    cfg = with_values(small(), compile=True)
    launch.check_script(cfg, "train_ddp", 1)
    with torch._inductor.config.patch({"cpp.cxx": (None, "/none/g++")}):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        wanted = "C compiler (CC, gcc or clang)" if cuda else "C++ compiler (/none/g++)"
        text = error_of(launch.check_script, cfg, "train_ddp", 1)
        assert text.startswith(f"compile=true, but there is no working {wanted}: ")
        assert text.endswith("or set compile=false")
        launch.check_script(small(), "train_ddp", 1)
    monkeypatch.setenv("CC", "/none/gcc")
    if cuda:
        assert error_of(launch.check_script, cfg, "train_ddp", 1).startswith("compile=true")


# Versions


def exit_line(capsys, function, *args):
    """The one line that the call prints before it exits with 2."""
    with pytest.raises(SystemExit) as caught:
        function(*args)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("error: ")
    return err


@pytest.fixture
def lone_process(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize(
    "line", ["torch>=99.1,<100", "torch<2", "torch==1.0", "timm>=99  # the one with x", "pydantic<1"]
)
def test_package_of_another_version_is_one_line(capsys, tmp_path, line):
    file = tmp_path / "requirements.txt"
    file.write_text(f"# What runs.\n\nnumpy>=1\n{line}\n")
    text = exit_line(capsys, launch.check_versions, file)
    name = re.match(r"\w+", line)[0]
    assert f"{name} {importlib.metadata.version(name)} is installed" in text
    (needed,) = re.findall(r"pip install '(.*)'", text)
    assert Requirement(needed) == Requirement(line.split("#")[0])


@pytest.mark.usefixtures("lone_process")
@pytest.mark.parametrize("missing", ["torch", "timm", "hydra-core", "megatron-fsdp"])
def test_package_that_is_not_installed_is_one_line(capsys, monkeypatch, missing):
    version = importlib.metadata.version

    def without(name):
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    text = exit_line(capsys, launch.check_versions)
    assert f"{missing} is not installed" in text
    assert "pip install -r requirements.txt" in text


@pytest.mark.usefixtures("lone_process")
def test_python_that_is_too_old_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert "3.10" in exit_line(capsys, launch.check_versions)


@pytest.mark.parametrize("suffix", ["", "+cu128", ".dev20260101"])
def test_installed_versions_pass_in_any_build(monkeypatch, suffix):
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: Version(version(name)).public + (suffix if name == "torch" else "")
    )
    launch.check_versions()


# The command line


class RanError(Exception):
    """The entrypoint's main was called."""


@pytest.fixture
def run_launch(monkeypatch, tmp_path, capsys):
    """A function: arguments -> (exit code, standard error) of launch.launch in this process; None if main ran."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for function in ("time.sleep", "signal.signal"):  # what a rank that stays silent does
        monkeypatch.setattr(function, lambda *_: None)

    def run(*arguments, main=None, script="train_ddp.py", rank=0, local_rank=0, world_size=1):
        variables = {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size}
        for key, value in (variables | {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}).items():
            monkeypatch.setenv(key, str(value))
        monkeypatch.setattr("sys.argv", [str(ROOT / script), *arguments])

        def ran(cfg):
            raise RanError

        with pytest.raises((SystemExit, RanError)) as caught:
            launch.launch(main or ran)
        out, err = capsys.readouterr()
        assert out == ""
        return getattr(caught.value, "code", None), err

    return run


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["optimzer.lr=1"], ["optimzer.lr", "optimizer.lr"]),
        (["--config-name", "nope"], ["there is no config 'nope': see config/", "--config-dir"]),
        (
            ["--config-name", "vit_base_patch16"],
            ["there is no config 'vit_base_patch16': did you mean vit_base_patch16_224?"],
        ),
        (["--config-name=config/deit_b16.yaml"], ["config/deit_b16': did you mean deit_b16?"]),
        (["seed=1", "--config-name"], ["--config-name needs a value, as --config-name vit_base_patch16_224"]),
        (["-cn", "--cfg", "job"], ["-cn needs a value"]),
        (["--cfg"], ["--cfg needs a value, as --cfg job"]),
        (["--config-name", "vit_base_patch16_224"], ["data.path", "missing"]),
        (["seed=1,2"], ["seed"]),
        (["data.path=nowhere"], ["data.path=nowhere", "nowhere/train"]),
        (["global_batch_size=96", "micro_batch_size=7"], ["global_batch_size=96", "micro_batch_size=7"]),
        (["distributed.dp_shard=1"], ["distributed.dp_shard=1"]),
        (["num_train_steps=5", "num_epochs=1"], ["num_epochs=1", "num_train_steps"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--multirun", "seed=1,2"], ["--multirun", "one command a run"]),
        (["model=null"], ["model=null: give a file of config/model/", "vit_base_patch16_224"]),
        (["data=3"], ["data=3: give a file of config/data/", "imagenet"]),
        (["hydra/job_logging=3"], ["hydra/job_logging=3: ", "must be a string"]),
        (["--resolve"], ["--resolve: ", "--cfg"]),
        (["--shell-completion"], ["--shell-completion: ", "'install'"]),
        (["ema.use_warmup=true"], ["ema.use_warmup=true does nothing", "ema.decay=null"]),
        (["ema={use_warmup: true}"], ["ema.use_warmup=true does nothing", "ema.decay=null"]),
        (["++fsdp2.cpu_offload=true"], ["fsdp2.cpu_offload=true does nothing in train_ddp.py", "train_fsdp2.py"]),
    ],
)
def test_mistake_on_the_command_line_is_one_line_and_exit_code_2(run_launch, tmp_path, arguments, fragments):
    code, err = run_launch(*arguments)
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("error: ")
    for fragment in fragments:
        assert fragment in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "rank", "local_rank", "speaks"),
    [
        ("optimzer.lr=1", 0, 0, True),
        ("optimzer.lr=1", 1, 1, False),
        ("optimzer.lr=1", 8, 0, False),  # a mistake in the command is the same on every node
        ("data.path=nowhere", 0, 0, True),
        ("data.path=nowhere", 1, 1, False),
        ("data.path=nowhere", 8, 0, True),  # a missing folder may be one node's own
    ],
)
def test_one_rank_speaks_and_all_exit(run_launch, argument, rank, local_rank, speaks):
    code, err = run_launch(argument, rank=rank, local_rank=local_rank, world_size=16)
    assert code == 2
    assert len(err.splitlines()) == speaks


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_right_command_line_reaches_main(run_launch, image_folder):
    found = []

    def main(cfg):
        found.append(cfg)
        raise RanError

    overrides = [f"data.path={image_folder}", "global_batch_size=24", "model.in_chans=3", "output_dir=out"]
    assert run_launch(*overrides, main=main)[0] is None
    expected = launch.load_config("L0_sanity", overrides, script="train_ddp")
    assert found == [expected]


# The first commands that somebody tries

ALONE = {  # what is typed, on the default config -> what the one line must contain
    "model.implementation=hf": ["model.class_token=false", "add model.class_token=true model.global_pool=token, or"],
    "fp8_config.enabled=true": [
        "fp8_config.enabled=true with model.transformer_engine=false model.act_layer=gelu precision=fp32",
        "set model.transformer_engine=true model.act_layer=gelu_tanh precision=bf16, or",
        "--config-name vit_te_base_patch16_224",
    ],
    "model.transformer_engine=true": ["set model.act_layer=gelu_tanh precision=bf16, or"],
    "fp8_config.enabled=true --config-name vit_base_patch16_224 data.path=unused": ["gelu_tanh compile=false, or"],
}


@pytest.mark.parametrize("typed", ALONE)
def test_one_line_says_all_that_is_to_be_added(run_launch, typed):
    code, err = run_launch(*typed.split())
    assert (code, len(err.splitlines())) == (2, 1), err
    for fragment in ALONE[typed]:
        assert fragment in err
    added = re.search(r"(?:set|add) (.*), or (?!it|leave)", err)[1].split()
    _, err = run_launch(*typed.split(), *added)
    assert not re.search("with model|act_layer|precision", err), err  # but that there is no GPU, perhaps


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.parametrize("typed", ["data=synthetic", "num_epochs=1", "evaluation.every_n_epochs=1"])
def test_what_needs_nothing_more_runs_as_it_is(run_launch, typed):
    assert run_launch(typed) == (None, "")


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
@pytest.mark.parametrize(
    ("arguments", "is_said"),
    [
        (["model=vit_large_patch16_224"], True),
        (["model=micro"], False),
        (["model=vit_large_patch16_224", "--config-name", "L0_sanity"], False),
        (["model=vit_large_patch16_224", "-cn=vit_base_patch16_224", "data=synthetic", "cuda_graphs=false"], False),
    ],
)
def test_a_large_model_on_the_demos_config_is_said(run_launch, arguments, is_said):
    code, err = run_launch(*arguments)
    assert code is None
    assert ("add --config-name vit_base_patch16_224 data.path=" in err) == is_said
    assert len(err.splitlines()) == is_said


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_what_a_file_gives_without_effect_is_said_by_one_rank(run_launch, image_folder, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [L0_sanity, _self_]\nfsdp2: {cpu_offload: true}\n")
    arguments = ["--config-dir", str(tmp_path), "--config-name", "mine", f"data.path={image_folder}"]
    arguments += ["global_batch_size=24"]
    code, err = run_launch(*arguments)
    assert (code, err) == (None, "note: without effect in this run: fsdp2.cpu_offload=true in train_ddp.py\n")
    assert run_launch(*arguments, rank=1, local_rank=1, world_size=2) == (None, "")


def test_a_home_folder_that_does_not_exist_is_no_folder_called_tilde(run_launch, monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [L0_sanity, _self_]\ncheckpoint: {ckpt_dir: ~/runs}\n")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id without a name, and no HOME
    code, err = run_launch("--config-dir", str(tmp_path), "--config-name", "mine")
    assert code == 2
    assert err.startswith("error: checkpoint.ckpt_dir=~/runs: there is no such home folder (HOME is not set)")


@pytest.mark.parametrize("flag", [["--config-name", "L0_sanity.yaml"], ["-cn=L0_sanity.yaml"]])
def test_a_config_is_named_with_or_without_its_suffix(monkeypatch, flag):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    cfg, _ = launch.compose("train_ddp", flag)
    assert cfg.output_dir == "runs/L0_sanity-train_ddp"
    assert launch.load_config("L0_sanity.yaml", script="train_ddp") == cfg


@pytest.mark.parametrize("arguments", [["--info"], ["--info", "seed=1"], ["seed=1", "-i"]])
def test_info_needs_no_value(monkeypatch, capsys, arguments):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr("sys.argv", ["train_ddp.py"])
    with pytest.raises(SystemExit) as caught:
        launch.compose("train_ddp", arguments)
    assert caught.value.code == 0
    assert "Config search path" in capsys.readouterr().out


LENGTHS = {  # typed -> the lengths that the run has, of L0_sanity's or of cifar10_vit's
    ("L0_sanity", "num_epochs=3"): (("num_train_steps", None), ("num_epochs", 3)),
    ("L0_sanity", "+num_epochs=3"): (("num_train_steps", None), ("num_epochs", 3)),
    ("cifar10_vit", "num_train_steps=70"): (("num_train_steps", 70), ("num_epochs", None)),
    ("cifar10_vit", "lr_scheduler.num_warmup_steps=7"): (("lr_scheduler.num_warmup_epochs", None),),
    ("L0_sanity", "evaluation.every_n_epochs=2"): (("evaluation.every_n_steps", None),),
    ("L0_sanity", "checkpoint.save_every_n_epochs=2"): (("checkpoint.save_every_n_steps", None),),
    ("L0_sanity", "evaluation.every_n_epochs=null"): (("evaluation.every_n_steps", 200),),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_length_that_is_typed_goes_before_the_files_other_one(case):
    name, override = case
    cfg = launch.load_config(name, [override, "data.path=unused"], script="train_ddp")
    for key, value in LENGTHS[case]:
        section, _, field = key.rpartition(".")
        assert getattr(getattr(cfg, section) if section else cfg, field) == value


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # of torch's `record`, under pytest's capture
@pytest.mark.parametrize(("kind", "code"), [(schema.ConfigError, 2), (schema.RunError, 1), (UnreadableError, 1)])
def test_error_of_main_that_is_meant_for_the_user_is_one_line(run_launch, image_folder, kind, code):
    def main(cfg):
        raise kind("what happened")

    found = run_launch(f"data.path={image_folder}", "global_batch_size=24", main=main)
    speaker = "rank 0: " if kind is UnreadableError else ""  # a failure of one rank alone
    assert found == (code, f"error: {speaker}what happened\n")


# The command line, in real processes


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    """A function: name -> (finished process, its working folder)."""
    commands = {
        "typo": ("train_ddp.py", ["optimzer.lr=1"], 2),
        "flag": ("train_fsdp2.py", ["--bogus-flag"], None),
        "mfsdp": ("train_mfsdp.py", [], None),
        "cfg": ("train_fsdp2.py", ["--cfg", "job", "--resolve"], None),
        "multirun": ("train_ddp.py", ["--multirun", "seed=1,2"], None),
    }

    @started_once
    def start(name):
        script, arguments, nproc = commands[name]
        folder = tmp_path_factory.mktemp(name)
        env = {"CUDA_VISIBLE_DEVICES": ""}
        timeout = 60 if nproc else 120
        return run_command([ROOT / script, *arguments], nproc=nproc, timeout=timeout, cwd=folder, env=env), folder

    return start


@pytest.mark.slow
def test_two_ranks_say_a_mistake_once_and_before_they_meet(launches):
    done, folder = launches("typo")
    assert done.returncode != 0
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert errors == ["error: unknown key optimzer.lr: did you mean optimizer.lr?"], done.stderr
    assert not re.search(rf'File "{ROOT}/\w+\.py', done.stderr)  # no traceback of ours; torchrun prints one of its own
    assert re.search(r"exitcode +: 2\b", done.stderr)
    assert list(folder.iterdir()) == []  # a process group comes after the output folder


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        pytest.param("flag", ["--bogus-flag"], marks=pytest.mark.slow),
        pytest.param("mfsdp", ["train_mfsdp.py needs a CUDA GPU", "train_fsdp2.py"], marks=pytest.mark.slow),
        pytest.param("multirun", ["--multirun", "one command a run"], marks=pytest.mark.slow),
    ],
)
def test_lone_process_says_a_mistake_in_one_line(launches, name, fragments):
    done, folder = launches(name)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for fragment in fragments:
        assert fragment in done.stderr
    assert list(folder.iterdir()) == []


def test_config_can_be_printed(launches):
    done, folder = launches("cfg")
    assert done.returncode == 0
    assert done.stderr == ""
    printed = yaml.safe_load(done.stdout)
    assert set(yaml_leaves(printed)) == schema_leaves()
    assert printed["optimizer"]["lr"] == load().optimizer.lr
    assert list(folder.iterdir()) == []


def test_output_folder_has_the_names_of_the_config_and_the_script(launches):
    printed = yaml.safe_load(launches("cfg")[0].stdout)
    assert printed["output_dir"] == "runs/L0_sanity-train_fsdp2"
    assert printed["checkpoint"]["ckpt_dir"] == "runs/L0_sanity-train_fsdp2/checkpoints"


# What a start imports

RUN_AND_LOOK = """
import sys
sys.argv = ["train_ddp.py", *sys.argv[1:]]
import train_ddp
import gc, json
train_ddp.launch(train_ddp.main)
ran = {"modules": sorted(sys.modules), "frozen": gc.get_freeze_count(), "collects": gc.isenabled()}
from timm.data import resolve_data_config
import timm
model = timm.create_model("vit_tiny_patch16_224")
asked = [resolve_data_config(model=model)["crop_pct"], type(model).__module__, type(timm.data).__name__]
print(json.dumps(ran | {"asked": asked, "wandb": "wandb" in sys.modules}))
"""
# What a plain run has no use for: all models of timm and their way to the network, trackers, plots, a compiler.
NOT_NEEDED = {"huggingface_hub", "matplotlib", "megatron_fsdp", "pandas", "tensorboard", "transformer_engine"}
NOT_NEEDED |= {"timm.models", "timm.utils", "torch._inductor.compile_fx", "torch.utils.tensorboard", "transformers"}
NOT_NEEDED |= {"interop.baselines", "wandb"}


def test_a_run_imports_what_it_needs(image_folder, tmp_path):
    """And timm is whole once it is asked for, without wandb, which it would import here, and fail with it."""
    (tmp_path / "wandb.py").write_text("raise RuntimeError")
    overrides = [*TINY, f"data.path={image_folder}", f"output_dir={tmp_path / 'run'}", "num_train_steps=1"]
    (tmp_path / "run_and_look.py").write_text(RUN_AND_LOOK)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = run_command([tmp_path / "run_and_look.py", *overrides], env=environment)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert not NOT_NEEDED & set(got["modules"])
    assert {"timm.layers", "torch.distributed.checkpoint"} <= set(got["modules"])
    assert got["frozen"] > 100_000
    assert got["collects"]
    assert got["asked"] == [0.9, "timm.models.vision_transformer", "module"]
    assert not got["wandb"]


@pytest.mark.parametrize(
    ("script", "overrides", "text"),
    [
        ("train_fsdp2", ["distributed.tp=2"], "model.rope_type=cat with distributed.tp=2"),
        ("train_fsdp2", ["precision=bf16", "model.rope_type=mixed"], "model.rope_type=mixed with precision=bf16"),
        ("train_mfsdp", ["precision=bf16", "model.rope_type=mixed"], "model.rope_type=mixed with precision=bf16"),
    ],
)
def test_rotary_positions_are_refused_where_they_were_not_seen_to_work(monkeypatch, script, overrides, text):
    check_refusal(monkeypatch, script, ["model.rope_type=cat", *overrides], text)


def check_refusal(monkeypatch, script, overrides, text):
    cfg = launch.load_config("L0_sanity", [*overrides, "output_dir=/tmp/unused"], script=script)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    line = error_of(launch.check_script, cfg, script, 2)
    assert line.startswith(text)


@pytest.mark.parametrize(
    "option", ["block_fn=ResPostBlock", "block_fn=ParallelScalingBlock", "attn_layer=diff", "rel_pos_type=mlp"]
)
def test_other_blocks_are_refused_where_they_were_not_seen_to_work(monkeypatch, option):
    model = [f"model.{option}", "model.embed_dim=48", *(["model.pos_embed=none"] if "rel_pos" in option else [])]
    check_refusal(monkeypatch, "train_fsdp2", [*model, "distributed.tp=2"], f"model.{option} with distributed.tp=2")
