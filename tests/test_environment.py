"""What is left in a shell by a launcher, and the order of flags and overrides on the command line."""

import launch

import pytest
from hydra._internal.utils import get_args_parser

import schema

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch):
    """A function: variables -> they alone are set, of those that a launcher sets."""

    def set_to(**variables):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize("variables", [{}, WHOLE, {"GLOO_SOCKET_IFNAME": "lo"}, {"MASTER_ADDR": "node7"}])
def test_whole_ones_and_none_are_right(environment, variables):
    environment(**variables)
    launch.check_environment()


@pytest.mark.parametrize(
    ("variables", "fragments"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "no RANK", "MASTER_ADDR", "unset WORLD_SIZE"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=", "unset WORLD_SIZE"]),
        ({"RANK": "1"}, ["RANK=1", "no WORLD_SIZE", "unset RANK"]),
        ({"WORLD_SIZE": "1", "RANK": "0"}, ["no MASTER_ADDR and no MASTER_PORT", "unset RANK WORLD_SIZE"]),
        (WHOLE | {"WORLD_SIZE": ""}, ["WORLD_SIZE=''", "no number"]),
        (WHOLE | {"MASTER_PORT": "29500/"}, ["MASTER_PORT='29500/'"]),
        (WHOLE | {"RANK": "2"}, ["RANK=2 WORLD_SIZE=2", "no such rank"]),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ["GLOO_SOCKET_IFNAME=ib0", "lo"]),
    ],
)
def test_left_over_ones_are_one_line_that_names_them(environment, variables, fragments):
    environment(**variables)
    with pytest.raises(schema.ConfigError) as caught:
        launch.check_environment()
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.lr=1e-3", "--config-name", "cifar10_vit", "seed=1"],
        ["--config-name", "cifar10_vit", "--cfg", "job", "optimizer.lr=1e-3"],
        ["optimizer.lr=1e-3", "-cn", "cifar10_vit", "--cfg=job", "--resolve"],
        ["~wandb", "+a=b", "--info", "searchpath", "seed=1"],
        [],
    ],
)
def test_flags_and_overrides_may_be_mixed(arguments):
    """As Hydra's own parser takes them when it lets them be mixed."""
    flags, overrides = launch._flags_and_overrides(arguments)
    parsed = get_args_parser().parse_args([*flags, *overrides])
    assert vars(parsed) == vars(get_args_parser().parse_intermixed_args(arguments))


def test_home_is_the_home_in_yaml_too(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = launch.load_config("L0_sanity", ['output_dir="~/run"', 'checkpoint.init_from="~/w.pth"', 'data.path="~/d"'])
    assert cfg.output_dir == f"{tmp_path}/run"
    assert cfg.checkpoint.ckpt_dir == f"{tmp_path}/run/checkpoints"
    assert (cfg.checkpoint.init_from, cfg.data.path) == (f"{tmp_path}/w.pth", f"{tmp_path}/d")


@pytest.mark.parametrize("value", ["runs/lr=1e-3", "runs/a(1)", "runs/a#1", "~/runs"])
def test_a_value_that_wants_quotes_is_told_how(value):
    with pytest.raises(schema.ConfigError) as caught:
        launch.load_config("L0_sanity", [f"output_dir={value}"])
    proposed = str(caught.value).split("quotes of its own: '")[1].removesuffix("'")
    cfg = launch.load_config("L0_sanity", [proposed])
    assert cfg.output_dir.endswith(value.removeprefix("~"))
