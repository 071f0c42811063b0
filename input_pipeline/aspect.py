"""Images in their own aspect ratio (`data.packing`): which part of one, at how many pixels; and its patches.

By timm's functions for NaFlex: an image becomes as large as so many patches allow, height and width each to the next
multiple of a patch.
"""

import torch
from PIL import Image
from timm.data.naflex_transforms import RandomResizedCropToSequence, get_image_size_for_seq, patchify_image
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from schema import DataConfig

Size = tuple[int, int]  # height and width


def random_crop(image: torch.Tensor, cfg: DataConfig, patch: Size, patches: int) -> torch.Tensor:
    """A random part of an image (C, Y, X), of at most so many `patches`.

    `data.crop_scale` is its share of the area, `data.crop_ratio` its aspect ratio over the image's.
    """
    interpolation = InterpolationMode(cfg.interpolation)
    box, size, _ = RandomResizedCropToSequence.get_params(
        image,
        cfg.crop_scale,
        cfg.crop_ratio,
        patch_h=patch[0],
        patch_w=patch[1],
        max_seq_len=patches,
        interpolation=interpolation,
    )
    return F.resized_crop(image, *box, list(size), interpolation=interpolation, antialias=True)


def whole(image: Image.Image, interpolation: str, patch: Size, patches: int) -> torch.Tensor:
    """All of an image, (C, Y, X), uint8, of at most so many `patches`."""
    size = list(size_of((image.height, image.width), patch, patches))
    resize = v2.Resize(size, interpolation=InterpolationMode(interpolation), antialias=True)
    return F.pil_to_tensor(resize(image))


def size_of(image: Size, patch: Size, patches: int) -> Size:
    """Height and width that an image of such a size gets."""
    _, size = get_image_size_for_seq(image, patch, patches)
    return size


def patches_of(image: torch.Tensor, patch: Size) -> torch.Tensor:
    """(C, Y, X) -> (N, C height width), in rows of the image, each as the weights of a patch embedding have it."""
    patches = patchify_image(image, patch, pad=False, include_info=False, channels_last=False)
    assert isinstance(patches, torch.Tensor)  # without include_info
    return patches
