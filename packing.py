"""Several images in a row of tokens (`data.packing`): the batch, who attends to whom, positions, pooling.

As NaViT (arXiv 2307.06304) and timm's NaFlexVit have it: images keep their aspect ratio, each is a grid of patches of
its own, and a row holds the patches of `data.packing.images_per_row` images. What is at which place of a row follows
from the grids alone, on the device, and shapes never change: nothing here waits for the device.
Shapes in the comments: `R` rows of `T` tokens, `B` images, `D` width, `H` heads, `K` width of a head.
"""

import dataclasses
import functools
import heapq
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch.nn.attention.varlen import varlen_attn


@dataclasses.dataclass(frozen=True)
class Packed:
    """A batch of images in rows, in the place of a tensor of images: R x images_per_row = B.

    Attributes:
        patches: (R, T, pixels of a patch), uint8, after `normalized` float32; a patch is (C, height, width), flattened.
            An image has first a place for each class and register token, then its patches in rows of the image; what is
            left at the end of a row is padding.
        grids: (B, 2), int64: rows and columns of patches, of the images in the order of their labels.
        longest: tokens that an image has at most, in all batches of a run.
    """

    patches: torch.Tensor
    grids: torch.Tensor
    longest: int

    def __len__(self) -> int:
        return len(self.grids)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Packed":
        """The same on a device."""
        patches, grids = (each.to(device, non_blocking=non_blocking) for each in (self.patches, self.grids))
        return Packed(patches, grids, self.longest)

    def pin_memory(self) -> "Packed":
        """The same in memory that a GPU copies from; a loader asks for it."""
        return Packed(self.patches.pin_memory(), self.grids.pin_memory(), self.longest)

    def normalized(self, mean: torch.Tensor, std: torch.Tensor) -> "Packed":
        """Pixels as floats of mean 0 and deviation 1; both have a value for all channels, or one a channel."""
        patches = self.patches.float().unflatten(2, (mean.numel(), -1))  # one value: all pixels are its own
        patches = (patches - mean.view(-1, 1)) / std.view(-1, 1)
        return Packed(patches.flatten(2), self.grids, self.longest)

    def padding_fraction(self, num_prefix_tokens: int) -> torch.Tensor:
        """Share of the tokens that no image has, a float32 scalar on the device."""
        used = self.grids.prod(dim=1).sum() + num_prefix_tokens * len(self)
        return 1 - used.float() / self.patches.shape[:2].numel()


def longest_image(tokens_per_row: int, images_per_row: int) -> int:
    """Tokens that an image has at most, of a row that hands on what others leave: half as many again as its share."""
    return tokens_per_row // images_per_row * 3 // 2


def even_rows(lengths: Sequence[int], images_per_row: int) -> list[list[int]]:
    """Places of images of these lengths, so many in each row, all rows about as long as each other.

    The longest image comes first, each to the row that is the shortest so far of those that have a place left.
    """
    rows: list[list[int]] = [[] for _ in range(len(lengths) // images_per_row)]
    shortest = [(0, number) for number in range(len(rows))]
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length, number = heapq.heappop(shortest)
        rows[number].append(place)
        if len(rows[number]) < images_per_row:
            heapq.heappush(shortest, (length + lengths[place], number))
    return rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where in the rows of a batch which image is.

    The padding at the end of a row is images here, too, none longer than `longest`: a kernel that is told of shorter
    ones leaves memory unwritten. Most of them have no token.

    Attributes:
        images_per_row: without those of padding, which follow them.
        image: (R, T), int64: the image of each token.
        place: (R, T), int64: of each token within its image.
        grids: (R, all images of a row, 2): rows and columns of patches; of padding 1 and 1.
        is_image: (R, T), bool: the token is no padding.
        is_patch: (R, T), bool: the token is a patch of an image.
        boundaries: (images + 1,), int32: the first token of each image, in all rows one after the other, and the end.
        longest: tokens that an image has at most.
        mask: (R, 1, T, T), bool: who attends to whom; None where `varlen_attn` needs none.
    """

    images_per_row: int
    image: torch.Tensor
    place: torch.Tensor
    grids: torch.Tensor
    is_image: torch.Tensor
    is_patch: torch.Tensor
    boundaries: torch.Tensor
    longest: int
    mask: torch.Tensor | None

    @classmethod
    def of(cls, batch: Packed, num_prefix_tokens: int, dtype: torch.dtype) -> "Rows":
        """The rows of a batch whose tokens have `dtype`; `varlen_attn` takes half precision only, on a GPU."""
        num_rows, tokens = batch.patches.shape[:2]
        device = batch.patches.device
        per_row = len(batch) // num_rows
        longest = batch.longest
        grids = batch.grids.view(num_rows, per_row, 2)
        lengths = grids.prod(dim=2) + num_prefix_tokens
        starts_of_padding = torch.arange(0, tokens, longest, device=device)
        padding = tokens - lengths.sum(dim=1, keepdim=True) - starts_of_padding
        lengths = torch.cat([lengths, padding.clamp(0, longest)], dim=1)
        grids = F.pad(grids, (0, 0, 0, len(starts_of_padding)), value=1)
        ends = lengths.flatten().cumsum(0)
        images = torch.arange(lengths.numel(), device=device)
        image = images.repeat_interleave(lengths.flatten(), output_size=num_rows * tokens)
        place = torch.arange(num_rows * tokens, device=device) - (ends - lengths.flatten())[image]
        image, place = image.view(num_rows, tokens), place.view(num_rows, tokens)
        is_image = image % grids.shape[1] < per_row
        has_kernel = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
        return cls(
            images_per_row=per_row,
            image=image,
            place=place,
            grids=grids,
            is_image=is_image,
            is_patch=is_image & (place >= num_prefix_tokens),
            boundaries=F.pad(ends, (1, 0)).int(),
            longest=longest,
            mask=None if has_kernel else (image[:, :, None] == image[:, None, :])[:, None],
        )

    def position_weights(self, grid: tuple[int, int], num_prefix_tokens: int) -> torch.Tensor:
        """(R, T, prefix tokens + positions): what share of each class or register token and position a token gets.

        A patch gets the positions of the learned `grid` as bicubic interpolation to its image's grid mixes them, as in
        timm's NaFlexVit. That is linear, and separable: one matrix product serves images of all grids at once.
        """
        place = (self.place - num_prefix_tokens).clamp(min=0)
        rows, columns = self.grids.flatten(0, 1)[self.image].unbind(2)
        y, x = place // columns, place % columns
        of_rows, of_columns = (resampling(side, self.longest, place.device) for side in grid)
        y = y.clamp(max=self.longest - 1)  # of padding
        weights = of_rows[rows, y][..., :, None] * of_columns[columns, x][..., None, :]
        prefix = F.one_hot(self.place.clamp(max=num_prefix_tokens), num_prefix_tokens + 1)[..., :-1]
        return torch.cat([prefix * self.is_image[..., None], weights.flatten(2) * self.is_patch[..., None]], dim=2)

    def pool(self, x: torch.Tensor, global_pool: str) -> torch.Tensor:
        """(R, T, D) -> (B, D): of each image the first token, or the mean of its patches.

        A matrix product, so that its gradient is summed in one order always.
        """
        numbers = torch.arange(self.images_per_row, device=x.device)
        is_own = (self.image % self.grids.shape[1])[:, None, :] == numbers[:, None]  # R images T
        is_meant = self.place == 0 if global_pool == "token" else self.is_patch
        with torch.autocast(x.device.type, enabled=False):  # what a norm left in FP32 stays so, as without rows
            sums = (is_own & is_meant[:, None, :]).to(x.dtype).bmm(x)
        if global_pool != "token":
            sums = sums / self.grids[:, : self.images_per_row].prod(dim=2, keepdim=True)
        return sums.flatten(0, 1)


@functools.lru_cache(maxsize=8)
def resampling(old: int, longest: int, device: torch.device) -> torch.Tensor:
    """(longest + 1, longest, old), float32: at [n, i] what share of the old positions is in the i-th of n new ones.

    As torch interpolates: bicubic, antialiased.
    """
    table = torch.zeros(longest + 1, longest, old)
    # A channel for each position. Of images one pixel wide torch (2.14.1) makes the first row over and over.
    each = torch.eye(old)[None, :, :, None].repeat(1, 1, 1, 2)
    for new in range(1, longest + 1):
        table[new, :new] = F.interpolate(each, (new, 2), mode="bicubic", antialias=True)[0, :, :, 0].T
    return table.to(device)


def attention(attn: Attention, x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """The forward pass of `attn`, (R, T, D) -> (R, T, D), each image's tokens among themselves.

    On a GPU in half precision by torch's kernel for sequences of several lengths, else with a mask.
    """
    if rows.mask is not None:
        return attn(x, attn_mask=rows.mask)
    q, k, v = attn.qkv(x).unflatten(2, (3, attn.num_heads, attn.head_dim)).flatten(0, 1).unbind(1)  # R*T H K
    q, k = attn.q_norm(q).to(v.dtype), attn.k_norm(k).to(v.dtype)  # autocast norms in FP32
    y = varlen_attn(q, k, v, rows.boundaries, rows.boundaries, rows.longest, rows.longest)
    assert isinstance(y, torch.Tensor)  # nothing else was asked for
    y = attn.norm(y.reshape(*x.shape[:2], -1))
    return attn.proj_drop(attn.proj(y))
