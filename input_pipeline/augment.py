"""What happens to a training image after its random resized crop, in a worker; and mixup and cutmix, on the device.

The operations are timm's and torchvision's, in the order of timm.data.transforms_factory.transforms_imagenet_train:
flips, auto augmentation, colour jitter, random erasing. `Augment` draws from torch's, NumPy's and Python's global
generators, which `seeding.sample` sets from (seed, sample number) around each sample; `Mixup` from a generator
of its own that follows from (seed, step). So nothing here has a state to save, and no worker, rank or resume changes
a pixel.
"""

import math
import random
from collections.abc import Callable

import timm.data.auto_augment as auto_augment  # not `from timm.data`, which would run all of it
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_pil_interp
from torchvision import transforms
from torchvision.transforms import functional as F

from runtime import seeding
from schema import Config, DataConfig, pair

PilOp = Callable[[Image.Image], Image.Image]
Box = tuple[int, int, int, int]  # top, bottom, left, right; bottom and right are outside


class Augment:
    """One training image, cropped, uint8 (C, Y, X), to the same shape and type; C is 1 or 3.

    `data.auto_augment` and `data.color_jitter` are applied together where both are given (timm's force_color_jitter).
    Grey images go through the policies as coloured ones do; Color and Desaturate leave them as they are.

    What comes closest to big_vision's randaug(2, 10) is `rand-m10-n2-p1`: timm's 15 operations are big_vision's 16
    without Cutout, at the same levels, and p1 always applies the two that are drawn, as big_vision does (timm's own
    default is each with probability 0.5). The fill is the same grey of 128 where data.mean is 0.5; timm's translation
    by 0.45 of the width is big_vision's by 100 of 224 pixels. Magnitudes of 15 and 20 are `rand-m15-n2-p1-mmax15` and
    `rand-m20-n2-p1-mmax20`. Not the same: big_vision interpolates to the nearest pixel, and its Contrast pulls towards
    a grey that follows from the image's size, not from its mean.
    """

    def __init__(self, cfg: DataConfig) -> None:
        self.flips = []
        if cfg.hflip:
            self.flips.append(transforms.RandomHorizontalFlip(cfg.hflip))
        if cfg.vflip:
            self.flips.append(transforms.RandomVerticalFlip(cfg.vflip))
        # One value of data.mean serves images of one channel and of three.
        num_channels = (1, 3) if len(cfg.mean) == 1 else (len(cfg.mean),)
        self.pil_ops = {n: _pil_ops(cfg, n) for n in num_channels}
        self.erase = RandomErasing(cfg) if cfg.random_erasing else None

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """(C, Y, X), uint8 -> the same; the argument is left as it is."""
        for flip in self.flips:
            image = flip(image)
        if ops := self.pil_ops[len(image)]:
            pil_image = F.to_pil_image(image)
            for op in ops:
                pil_image = op(pil_image)
            image = F.pil_to_tensor(pil_image)
        return self.erase(image) if self.erase else image


def _pil_ops(cfg: DataConfig, num_channels: int) -> list[PilOp]:
    """The policy and the colour jitter for images of `num_channels`."""
    ops = [auto_augment_policy(cfg, num_channels)] if cfg.auto_augment else []
    return [*ops, transforms.ColorJitter(*cfg.color_jitter)] if cfg.color_jitter else ops


def auto_augment_policy(cfg: DataConfig, num_channels: int) -> PilOp:
    """The policy of timm's that `data.auto_augment` names, with the arguments that transforms_imagenet_train gives it.

    What geometric operations uncover is filled with the data's mean. No policy uses timm's translate_const.
    """
    mean = cfg.mean * num_channels if len(cfg.mean) == 1 else cfg.mean
    arguments = {
        "img_mean": tuple(min(255, max(0, round(255 * value))) for value in mean),
        "interpolation": str_to_pil_interp(cfg.interpolation),
    }
    name = cfg.auto_augment or ""
    if name.startswith("rand"):
        policy = auto_augment.rand_augment_transform(name, arguments)
    elif name.startswith("augmix"):
        policy = auto_augment.augment_and_mix_transform(name, arguments | {"translate_pct": 0.3})
    else:
        policy = auto_augment.auto_augment_transform(name, arguments)
    for op in ops_of(policy):
        if op.aug_fn is auto_augment.posterize:
            op.aug_fn = _posterize
    return policy


def ops_of(policy: PilOp) -> list[auto_augment.AugmentOp]:
    """The operations that a policy of timm's draws from."""
    if isinstance(policy, auto_augment.AutoAugment):
        return [op for steps in policy.policy for op in steps]
    return policy.ops


def _posterize(image: Image.Image, bits_to_keep: int, **kwargs: object) -> Image.Image:
    """What timm calls with 0 bits at the strongest levels, and Pillow 13 then refuses: black, as it was before that."""
    return auto_augment.posterize(image, bits_to_keep, **kwargs) if bits_to_keep > 0 else image.point(lambda _: 0)


def crop_box(image: torch.Tensor | Image.Image, cfg: DataConfig) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random resized crop (Szegedy et al., arXiv 1409.4842).

    timm's function does what torchvision's does, in a tenth of the time.
    """
    return RandomResizedCropAndInterpolation.get_params(image, cfg.crop_scale, cfg.crop_ratio)


class RandomErasing:
    """A box of noise in a uint8 image, with probability `data.random_erasing`: timm's RandomErasing, mode "pixel".

    Box: area 2 % to a third of the image, ratio of its sides exp(U(log 0.3, log 1/0.3)), from Python's generator; up
    to ten draws until one fits (Zhong et al., arXiv 1708.04896, and timm's draws in timm's order).

    Noise: timm writes N(0, 1) into the normalised image. Here it is drawn alike, taken back to pixel values, rounded,
    and clipped to 0..255: what the device normalises has steps of 1 / (255 std), as every image has, and ends where
    black and white do (with ImageNet's mean and deviation at about -2 and 2.4; 3 % of the values lie beyond).
    """

    def __init__(self, cfg: DataConfig) -> None:
        self.probability = cfg.random_erasing
        self.mean, self.std = (255 * torch.tensor(values).view(-1, 1, 1) for values in (cfg.mean, cfg.std))

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        """(C, Y, X), uint8 -> the same; the argument is left as it is."""
        if (box := self.draw_box(*image.shape[1:])) is None:
            return image
        top, bottom, left, right = box
        noise = torch.randn(len(image), bottom - top, right - left) * self.std + self.mean
        image = image.clone()
        image[:, top:bottom, left:right] = noise.round_().clamp_(0, 255).to(torch.uint8)
        return image

    def draw_box(self, height: int, width: int) -> Box | None:
        """Where to erase, or None: not this image, or no box fitted."""
        if random.random() > self.probability:
            return None
        for _ in range(10):
            area = random.uniform(0.02, 1 / 3) * height * width
            ratio = math.exp(random.uniform(math.log(0.3), math.log(1 / 0.3)))
            rows, columns = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if rows < height and columns < width:
                top, left = random.randint(0, height - rows), random.randint(0, width - columns)
                return top, top + rows, left, left + columns
        return None


class Mixup:
    """Mixup (Zhang et al., arXiv 1710.09412) and cutmix (Yun et al., arXiv 1905.04899), one or the other a step.

    As timm's Mixup in its mode "batch", but for who is mixed with whom: position p of the global batch with p ^ 1,
    where timm reverses the batch of a rank. An even micro batch tears no pair, and lambda follows from (seed, step), so
    the result depends neither on the number of ranks nor on the accumulation. Both members of a pair are mixed, so
    lambda and 1 - lambda give the same two images: big_vision's max(lambda, 1 - lambda) makes no difference here.
    """

    def __init__(self, cfg: Config) -> None:
        self.seed = cfg.seed
        self.num_classes = cfg.model.num_classes
        self.mixup, self.cutmix = cfg.data.mixup, cfg.data.cutmix
        self.probability, self.switch_probability = cfg.data.mixup_prob, cfg.data.mixup_switch_prob
        self.image_size = pair(cfg.data.image_size)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixed images and what they show: no wait for the device, no change of the arguments.

        Args:
            images: (B, C, Y, X), normalised; B is even.
            labels: (B,), integers.
            step: of the run.

        Returns:
            Images (B, C, Y, X) and targets (B, num_classes) that sum to 1; with `data.mixup` and `data.cutmix` 0 the
            arguments themselves.
        """
        if not (self.mixup or self.cutmix):
            return images, labels
        share, box = self.draw(step)
        targets = torch.zeros(len(labels), self.num_classes, device=labels.device).scatter_(1, labels[:, None], 1.0)
        if box is not None:
            top, bottom, left, right = box
            images = images.clone()
            images[:, :, top:bottom, left:right] = _partners(images[:, :, top:bottom, left:right])
        elif share < 1:
            images = images * share + _partners(images) * (1 - share)
        return images, targets * share + _partners(targets) * (1 - share)

    def draw(self, step: int) -> tuple[float, Box | None]:
        """This step's lambda, the share of an image that stays its own, and cutmix's box (None: mixup, or neither).

        The draws are timm's, in timm's order. Lambda is Beta(alpha, alpha); the sides of cutmix's box are sqrt(1 -
        lambda) of the image's around a centre anywhere in it, and lambda becomes what the box leaves.
        """
        rng = seeding.mixing(self.seed, step)
        if rng.rand() >= self.probability:
            return 1.0, None
        both = self.mixup and self.cutmix
        is_cutmix = rng.rand() < self.switch_probability if both else bool(self.cutmix)
        alpha = self.cutmix if is_cutmix else self.mixup
        share = float(rng.beta(alpha, alpha))
        if not is_cutmix:
            return share, None
        side = math.sqrt(1 - share)
        (height, width), (rows, columns) = self.image_size, (int(size * side) for size in self.image_size)
        y, x = rng.randint(0, height), rng.randint(0, width)
        top, bottom = max(y - rows // 2, 0), min(y + (rows + 1) // 2, height)
        left, right = max(x - columns // 2, 0), min(x + (columns + 1) // 2, width)
        return 1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right)


def _partners(rows: torch.Tensor) -> torch.Tensor:
    """Row p ^ 1 in the place of row p."""
    return rows.unflatten(0, (len(rows) // 2, 2)).flip(1).flatten(0, 1)
