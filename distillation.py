"""The teacher that a student learns from: built, frozen, placed or sharded, asked. The loss is `trainer.objective`.

DeiT (arXiv 2012.12877; facebookresearch/deit, engine.py and losses.py) gives the teacher the images that the student
gets, augmented and mixed. A teacher that was trained with another mean and deviation gets them with its own.
"""

import functools
import logging
from collections.abc import Iterator

import timm.data
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from interop.models import TimmModel, load_model
from interop.step_weights import first_few
from runtime.collectives import raise_on_all_ranks
from schema import Config, ConfigError, RunSizes, pair

logger = logging.getLogger(__name__)
MOST_GATHERED = 2**25  # parameters of a sharded teacher that are gathered at a time: 128 MiB


def build_teacher(cfg: Config, sizes: RunSizes, device: torch.device, mesh: DeviceMesh) -> "Teacher | None":
    """The config's teacher on `device`, or sharded over `mesh`; None without one. All ranks call it.

    Raises:
        ConfigError: on all ranks: there is no such model, it has other classes or channels, or takes no images of the
            student's size.
    """
    if cfg.distillation.kind == "none":
        return None
    # Each rank reads the whole model into host memory, a sharded one too, of which it then keeps its part.
    model = raise_on_all_ranks(functools.partial(read_model, cfg), error=ConfigError)
    teacher = Teacher(model, cfg, order_of(model, cfg, sizes), device)
    if cfg.distillation.shard_teacher:
        options = {"mesh": mesh, "reshard_after_forward": True}
        for unit in _units(model):
            fully_shard(unit, **options)
        fully_shard(model, **options)
    else:
        model.to(device)
    teacher.try_out()
    logger.info(
        "teacher: %s, %.2f M parameters%s",
        cfg.distillation.teacher,
        sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        f", sharded over {mesh.size()} ranks" if cfg.distillation.shard_teacher else "",
    )
    return teacher


def read_model(cfg: Config) -> TimmModel:
    """The config's teacher in host memory, frozen, in evaluation mode.

    Raises:
        ConfigError: there is no such model, or it has other classes or channels.
    """
    source = cfg.distillation.teacher
    assert source is not None  # schema.py sees to it
    try:
        model, _ = load_model(source)
    except ConfigError as error:
        raise ConfigError(f"distillation.teacher={source}: {error}") from error
    channels = timm.data.resolve_model_data_config(model)["input_size"][0]
    for what, theirs, key, ours in (
        ("classes", model.num_classes, "num_classes", cfg.model.num_classes),
        ("channels", channels, "in_chans", cfg.model.in_chans),
    ):
        if theirs != ours:
            raise ConfigError(
                f"distillation.teacher={source} has {theirs} {what}, model.{key}={ours}: give a teacher with as many"
            )
    return model.requires_grad_(False)


def order_of(model: TimmModel, cfg: Config, sizes: RunSizes) -> list[int] | None:
    """The teacher's output of each of the student's; None where they are the same, or one knows no names.

    Raises:
        ConfigError: the teacher does not know one of the student's classes.
    """
    names, classes = tuple(model.pretrained_cfg.get("label_names") or ()), sizes.classes
    if not names or not classes or names == classes:
        return None
    if strangers := [name for name in classes if name not in names]:
        raise ConfigError(
            f"distillation.teacher={cfg.distillation.teacher} does not know {first_few(strangers)}, of "
            f"data.path={cfg.data.path}: give a teacher of the same classes"
        )
    known = [names.index(name) for name in classes]
    others = [output for output in range(cfg.model.num_classes) if output not in known]
    return known + others[: cfg.model.num_classes - len(known)]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Parts of a model to gather one by one: the largest of at most MOST_GATHERED parameters, and what is in one."""
    for child in module.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
        if size and is_called and (size <= MOST_GATHERED or not any(child.children())):
            yield child
        elif size:
            yield from _units(child)


class Teacher:
    """A frozen model's answers to the student's images: teacher(images) -> logits (B, num_classes), float32.

    It computes in the run's precision, BF16 by autocast, and is not compiled, whatever `compile` says of the student.
    """

    def __init__(self, model: TimmModel, cfg: Config, order: list[int] | None, device: torch.device) -> None:
        """Takes a model in evaluation mode, its output of each class, and the device where it is asked."""
        self.model, self.cfg, self.order, self.device = model, cfg, order, device
        settings = timm.data.resolve_model_data_config(model)
        self.made_for = settings["input_size"][1:]
        values = (cfg.data.mean, cfg.data.std, settings["mean"], settings["std"])
        mean, std, its_mean, its_std = (torch.tensor(value).view(1, -1, 1, 1) for value in values)
        # The student's image is (pixels - mean) / std. Where both have the same, it stays as it is, in every digit.
        self.is_as_is = torch.equal(mean.expand_as(its_mean), its_mean) and torch.equal(std.expand_as(its_std), its_std)
        self.scale, self.shift = (std / its_std).to(device), ((mean - its_mean) / its_std).to(device)
        size = cfg.distillation.image_size
        self.size = None if size is None or pair(size) == pair(cfg.model.img_size) else pair(size)

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Images (B, C, Y, X) as the student gets them, normalised and mixed."""
        if not self.is_as_is:
            images = images * self.scale + self.shift
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.cfg.precision == "bf16"):
            return self.answers(images).float()

    def answers(self, images: torch.Tensor) -> torch.Tensor:
        """The model's logits, in the student's order of classes, for images of its own mean and deviation."""
        if self.size is not None:
            images = F.interpolate(images, self.size, mode="bicubic", antialias=True)
        logits = self.model(images)
        return logits if self.order is None else logits[:, self.order]

    def try_out(self) -> None:
        """Ask it once; a model of one image size refuses others only then.

        Raises:
            ConfigError: it does.
        """
        size = pair(self.cfg.model.img_size)
        try:
            self(torch.zeros(1, self.cfg.model.in_chans, *size, device=self.device))
        except (AssertionError, RuntimeError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            height, width = self.made_for
            key, given = ("model.img_size", size) if self.size is None else ("distillation.image_size", self.size)
            raise ConfigError(
                f"distillation.teacher={self.cfg.distillation.teacher} cannot take images of {given[0]} x {given[1]} "
                f"pixels, {key}={list(given)} ({str(error).strip().splitlines()[0]}): set "
                f"distillation.image_size={height if height == width else [height, width]}"
            ) from error
