"""The Vision Transformer: timm's, by names and by numbers.

Parameters carry the names of `timm.models.vision_transformer.VisionTransformer`, or, with rotary positions, those of
`timm.models.eva.Eva`, so that weights travel both ways, and logits and gradients equal timm's. vit_te.py has the same
model on TransformerEngine's layers, modeling.py chooses.
Shapes in the comments: `B` images, `C Y X` channels, height and width, `N` tokens, `D` width, `K` width of a head.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm.layers import (
    Attention,
    AttentionPoolLatent,
    GluMlp,
    Mlp,
    PatchDropout,
    PatchDropoutWithIndices,
    PatchEmbed,
    RelPosBias,
    RelPosMlp,
    RmsNorm,
    apply_keep_indices_nlc,
    create_rope_embed,
    get_act_layer,
    resample_abs_pos_embed,
)
from timm.layers import DiffAttention as TimmDiffAttention
from timm.layers import LayerScale as TimmLayerScale
from timm.layers.pos_embed_sincos import init_random_2d_freqs
from torch import nn

import packing
from runtime import seeding
from runtime.parameter_names import timm_name
from runtime.tensors import local_slice, to_local
from schema import ModelConfig, pair


class LayerScale(TimmLayerScale):
    """timm's LayerScale, whose FP32 gain does not turn the BF16 residual stream of autocast into FP32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, N, D)."""
        # Not `to`, which Megatron-FSDP 0.6.1 replaces on its parameters: torch.compile would stumble over it.
        return x * self.gamma.type_as(x)


class PatchProjection(nn.Conv2d):
    """The convolution of timm's PatchEmbed, whose kernels do not overlap, as one matrix product.

    cuDNN's takes 5 ms more of a step of B/16 with 512 images (H200, cuDNN 9.19; benchmarks/levers_h200x1.log).
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(B, C, Y, X) -> (B, D, rows, columns), or patches (B, N, C height width) -> (B, N, D)."""
        if input.ndim == 3:
            return self._of_patches(input)
        height, width = self.kernel_size
        x = input.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # B C Y X -> B C rows height columns width
        x = x.permute(0, 2, 4, 1, 3, 5)
        rows, columns = x.shape[1:3]
        x = self._of_patches(x.flatten(3).flatten(1, 2))
        return x.transpose(1, 2).unflatten(2, (rows, columns))

    def _of_patches(self, patches: torch.Tensor) -> torch.Tensor:
        return F.linear(patches, self.weight.flatten(1), self.bias)


class LecunLinear(nn.Linear):
    """A linear layer that starts at LeCun's normal distribution, as the first layer of the ViT paper's head does."""


class AttentionPool(AttentionPoolLatent):
    """timm's attention pooling, with the per-module initialization that meta-device builders call."""

    def reset_parameters(self) -> None:
        """Draw the latent query; the linear layers and the norm reset themselves."""
        _initialize(self, self.named_parameters(recurse=False), generator=None)


def norm_layer(cfg: ModelConfig) -> type[nn.LayerNorm]:
    """The norm with the model's epsilon; call it with the width."""
    layer = nn.RMSNorm if cfg.norm_layer == "rmsnorm" else nn.LayerNorm
    # A partial, as timm's own models pass it to its layers, whose annotations ask for a class.
    return cast(type[nn.LayerNorm], functools.partial(layer, eps=cfg.norm_eps))


def act_layer(cfg: ModelConfig) -> type[nn.Module]:
    """The class of the MLP's activation, by timm's name for it."""
    layer = get_act_layer(cfg.act_layer)
    assert isinstance(layer, type)  # timm has functions, too; schema's names are of modules
    return layer


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        norm = norm_layer(cfg)

        def scale() -> nn.Module:
            return nn.Identity() if cfg.init_values is None else LayerScale(cfg.embed_dim, cfg.init_values)

        self.norm1 = norm(cfg.embed_dim)
        self.attn = Attention(
            cfg.embed_dim,
            num_heads=cfg.num_heads,
            qkv_bias=cfg.qkv_bias,
            qk_norm=cfg.qk_norm,
            scale_norm=cfg.scale_attn_norm,
            proj_bias=cfg.proj_bias,
            attn_drop=cfg.attn_drop_rate,
            proj_drop=cfg.proj_drop_rate,
            norm_layer=norm,
        )
        self.ls1 = scale()
        self.norm2 = norm(cfg.embed_dim)
        mlp = functools.partial(GluMlp, gate_last=False) if cfg.mlp_layer == "glu" else Mlp
        self.mlp = mlp(
            cfg.embed_dim,
            int(cfg.embed_dim * cfg.mlp_ratio),
            act_layer=act_layer(cfg),
            norm_layer=norm if cfg.scale_mlp_norm else None,
            bias=cfg.proj_bias,
            drop=cfg.proj_drop_rate,
        )
        self.ls2 = scale()

    def forward(
        self,
        x: torch.Tensor,
        keep: torch.Tensor | None = None,
        *positions: torch.Tensor,
        rows: packing.Rows | None = None,
    ) -> torch.Tensor:
        """(B, N, D) -> (B, N, D), or with `rows` (R, T, D); `keep` (2, B, 1, 1) as in `VisionTransformer.drop_path`.

        `positions` are for `timm_block`: what all blocks have in common of relative ones.
        """
        y = self.norm1(x)
        y = self.attn(y, *positions) if rows is None else packing.attention(self.attn, y, rows)
        x = x + scaled(self.ls1(y), keep, 0)
        return x + scaled(self.ls2(self.mlp(self.norm2(x))), keep, 1)


class _LambdaInBuffer(nn.Module):
    """Differential attention, its first share a tensor: for a number torch.compile would compile each block anew."""

    def set_lambda_init(self, depth: int) -> None:
        """Of the block at this place."""
        cast(Any, super()).set_lambda_init(depth)
        self.first_share: float = self.__dict__.pop("lambda_init")
        self.register_buffer("lambda_init", torch.tensor(self.first_share), persistent=False)

    def init_non_persistent_buffers(self) -> None:
        """After a build on the meta device."""
        cast(torch.Tensor, self.lambda_init).fill_(self.first_share)


class DiffAttention(_LambdaInBuffer, TimmDiffAttention):
    """timm's (Differential Transformer, arXiv 2410.05258)."""


class _DropPath(nn.Module):
    """Stochastic depth in the place of timm's, by the factors that the block was called with."""

    keep: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(x, self.keep, 0)


def _norms_after(self: Any, x: torch.Tensor, keep: torch.Tensor | None = None, *positions: Any) -> torch.Tensor:
    """`Block.forward` of timm's ResPostBlock and of its kin."""
    x = x + scaled(self.norm1(self.attn(x, *positions)).to(x.dtype), keep, 0)  # autocast norms in FP32
    return x + scaled(self.norm2(self.mlp(x)).to(x.dtype), keep, 1)


def _side_by_side(self: Any, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    """`Block.forward` of timm's ParallelThingsBlock: its attentions' branches, then its MLPs'."""
    x = x + torch.stack([scaled(attn(x), keep, i) for i, attn in enumerate(self.attns)]).sum(dim=0)
    return x + torch.stack([scaled(ffn(x), keep, i) for i, ffn in enumerate(self.ffns, len(self.attns))]).sum(dim=0)


@functools.cache
def _block_class(name: str, *, is_relative: bool) -> type[nn.Module]:
    """The class of a `ModelConfig.block_fn`, timm's, called as `Block`; imported late, as in `eva_block`."""
    from timm.models import vision_transformer, vision_transformer_relpos

    if is_relative:
        base = getattr(vision_transformer_relpos, name.replace("Block", "RelPosBlock"))
    else:
        base = getattr(vision_transformer, name)

    def one_branch(self: Any, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        self.drop_path.keep = keep
        return base.forward(self, x)

    forward = {"Block": Block.forward, "ResPostBlock": _norms_after, "ParallelThingsBlock": _side_by_side}
    bases = (_LambdaInBuffer, base) if name.startswith("Diff") else (base,)
    return type(name, bases, {"forward": forward.get(name, one_branch)})


def timm_block(cfg: ModelConfig, place: int) -> nn.Module:
    """One of timm's other blocks, or its `Block` with another attention, the `place`-th; called as `Block`."""
    arguments: dict[str, Any] = {
        "mlp_ratio": cfg.mlp_ratio,
        "qkv_bias": cfg.qkv_bias,
        "qk_norm": cfg.qk_norm,
        "init_values": cfg.init_values,
        "proj_drop": cfg.proj_drop_rate,
        "attn_drop": cfg.attn_drop_rate,
        "act_layer": act_layer(cfg),
        "norm_layer": norm_layer(cfg),
    }
    if cfg.rel_pos_type:
        arguments["rel_pos_cls"] = None if cfg.shared_rel_pos else lambda **_: relative_positions(cfg)
    else:
        arguments |= {
            "scale_attn_norm": cfg.scale_attn_norm,
            "scale_mlp_norm": cfg.scale_mlp_norm,
            "proj_bias": cfg.proj_bias,
            "attn_layer": DiffAttention if cfg.attn_layer == "diff" else Attention,
            "depth": place,
        }
    block = _block_class(cfg.block_fn, is_relative=cfg.rel_pos_type is not None)(
        cfg.embed_dim, cfg.num_heads, **arguments
    )
    if cfg.num_branches() == 1:
        block.drop_path = _DropPath()
    for module in block.modules():
        if isinstance(module, TimmLayerScale):
            module.__class__ = LayerScale
    return block


def relative_positions(cfg: ModelConfig) -> nn.Module:
    """What to add to attention's logits, timm's module, whose `get_bias` gives (1, heads, N, N)."""
    sizes: dict[str, Any] = {"num_heads": cfg.num_heads, "prefix_tokens": int(cfg.class_token)}
    if cfg.rel_pos_type == "bias":
        return RelPosBias(cfg.grid_size(), **sizes)
    sizes |= {"hidden_dim": cfg.rel_pos_dim} if cfg.rel_pos_dim else {}
    positions = RelPosMlp(cfg.grid_size(), **sizes)
    # Distances are a buffer, which FSDP2 leaves in FP32, and a linear layer in BF16 takes no FP32 input.
    positions.mlp.register_forward_pre_hook(lambda mlp, given: given[0].to(cast(Any, mlp).fc1.weight.dtype))
    return positions


@functools.cache
def eva_block(*, norms_after: bool = False) -> Callable[[ModelConfig, int], nn.Module]:
    """The class `EvaBlock`, its norms before the branches or after them.

    Made when it is asked for, as timm's own comes with all of timm, a second of a start.
    """
    from timm.models import eva

    base: Any = eva.EvaBlockPostNorm if norms_after else eva.EvaBlock

    class EvaBlock(base):
        """`Block` as timm's Eva has it: rotary positions, the attention and MLP that go with them, its names."""

        def __init__(self, cfg: ModelConfig, num_kv_heads: int) -> None:
            super().__init__(
                cfg.embed_dim,
                cfg.num_heads,
                qkv_bias=cfg.qkv_bias,
                qkv_fused=cfg.qkv_fused,
                mlp_ratio=cfg.mlp_ratio,
                swiglu_mlp=cfg.mlp_layer != "mlp",
                swiglu_align_to=cfg.swiglu_align_to,
                scale_mlp=cfg.scale_mlp_norm,
                scale_attn_inner=cfg.scale_attn_norm,
                num_prefix_tokens=cfg.class_token + cfg.reg_tokens,
                attn_type=cfg.attn_type,
                rotate_half=cfg.rope_rotate_half,
                qk_norm=cfg.qk_norm,
                num_kv_heads=num_kv_heads,
                proj_drop=cfg.proj_drop_rate,
                attn_drop=cfg.attn_drop_rate,
                init_values=cfg.init_values,
                attn_only_layer_scale=cfg.attn_only_layer_scale,
                norm_layer=norm_layer(cfg),
            )
            # timm's other way to add EvaAttention's biases: the keys' zeros are a buffer, which FSDP2 leaves in FP32,
            # and a linear layer in BF16 takes no FP32 biases.
            cast(Any, self.attn).qkv_bias_separate = True

        def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (timm's has masks instead of `keep`)
            self, x: torch.Tensor, keep: torch.Tensor | None = None, rope: torch.Tensor | None = None
        ) -> torch.Tensor:
            """(B, N, D) -> (B, N, D); `keep` as `Block` has it, `rope` of `VisionTransformer.rotary`."""
            if norms_after:
                return _norms_after(self, x, keep, rope)
            x = x + scaled(times(self.attn(self.norm1(x), rope=rope), self.gamma_1), keep, 0)
            return x + scaled(times(self.mlp(self.norm2(x)), self.gamma_2), keep, 1)

    return EvaBlock


def plain_block(cfg: ModelConfig, place: int) -> nn.Module:
    """The `place`-th block of a plain model."""
    if cfg.is_eva:
        return eva_block(norms_after=cfg.block_fn == "ResPostBlock")(cfg, cfg.kv_heads()[place])
    return Block(cfg) if cfg.has_own_block else timm_block(cfg, place)


def times(x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
    """`x` (B, N, D) times the LayerScale `gain`, in x's dtype, as `LayerScale` has it."""
    return x if gain is None else x * gain.type_as(x)


def scaled(x: torch.Tensor, keep: torch.Tensor | None, branch: int) -> torch.Tensor:
    """`x` (B, N, D), what residual branch 0 or 1 of a block adds, times its factors in `keep`, if there are any."""
    return x if keep is None else x * keep[branch].to(x.dtype)


class TrainableModel(nn.Module):
    """What the entrypoints ask of a model, whoever wrote its layers.

    A subclass is called as model(images, is_first_microbatch=None), see `VisionTransformer.forward`, and its parameters
    have names that `timm_name` knows.

    Attributes:
        cfg: the section of the config that it was built from.
        scaling: live tensors of FP8's delayed scaling by name, to be saved with the weights; empty without.
    """

    cfg: ModelConfig
    scaling: dict[str, torch.Tensor]

    def shard_units(self) -> Sequence[nn.Module]:
        """The modules to shard, compile and recompute one by one."""
        raise NotImplementedError

    def reset_scaling(self) -> None:
        """Forget the values that FP8's delayed scaling has seen."""
        for name, tensor in self.scaling.items():
            tensor.fill_(1.0 if ".scale_" in name else 0.0)

    def no_weight_decay(self) -> set[str]:
        """Timm's names of the tensors of two or more dimensions that are not weights of a matrix product."""
        tokens = {"pos_embed", "cls_token", "dist_token", "reg_token", "attn_pool.latent", "rope.freqs"}
        names = {timm_name(name) for name, _ in self.named_parameters()}
        return names & tokens | {name for name in names if name.endswith("relative_position_bias_table")}

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | None = None) -> None:
        """Fill every parameter with timm's initial distribution, the same values under every strategy and world size.

        Each tensor is drawn whole, on `device` (its own if None), from a generator seeded by (seed, its name), one
        tensor at a time; a sharded parameter keeps its part. CPU and GPU generators differ, so do CPU and GPU starts.
        """
        for module_name, module in self.named_modules():
            prefix = f"{module_name}." if module_name else ""
            for name, parameter in module.named_parameters(recurse=False):
                full_name = timm_name(prefix + name)
                generator = torch.Generator(device or parameter.device)
                generator.manual_seed(seeding.tensor(seed, full_name))
                whole = torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
                _initialize(module, [(name, whole)], generator)
                if full_name == "head.bias":
                    whole.fill_(self.cfg.init_head_bias)
                _initialize_by_place(self.cfg, module, full_name, whole, generator)
                to_local(parameter).copy_(local_slice(whole, parameter))
            if hasattr(module, "init_non_persistent_buffers"):  # timm's name; in no checkpoint
                for name, buffer in module.named_buffers(recurse=False):
                    # Where a block computes, and in FP32, wherever and in whatever dtype a strategy put its weights.
                    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
                    setattr(module, name, torch.empty_like(buffer, dtype=dtype, device=device or buffer.device))
                cast(Any, module).init_non_persistent_buffers()

    def flops_per_image(self, patches: int | None = None) -> float:
        """Floating-point operations of one image's forward pass: matrix products and attention, 2 a multiply-add.

        Args:
            patches: of the image; None: of one of img_size.
        """
        cfg = self.cfg
        patches = patches or math.prod(cfg.grid_size())
        tokens = cfg.num_tokens(patches)
        attention = cfg.embed_dim**2 * sum(2 + 2 * heads / cfg.num_heads for heads in cfg.kv_heads())
        blocks = tokens * (attention + cfg.depth * (cfg.mlp_weights() + 2 * tokens * cfg.embed_dim))
        blocks *= max(1, cfg.num_branches() // 2)  # ParallelThingsBlock has two of each
        embed = patches * cfg.embed_dim * cfg.in_chans * math.prod(pair(cfg.patch_size))
        pool = 2 * tokens * cfg.embed_dim**2 if cfg.global_pool == "map" else 0
        hidden = cfg.representation_size
        head = (cfg.embed_dim + cfg.num_classes) * hidden if hidden else cfg.embed_dim * cfg.num_classes
        head *= 1 + cfg.distilled
        return 2.0 * (embed + blocks + pool + head)


class VisionTransformer(TrainableModel):
    """Images (B, C, Y, X), normalised floats, to logits (B, num_classes).

    Build it under `torch.device("meta")` or on a device, place or shard it, then call `init_weights`.
    """

    def __init__(self, cfg: ModelConfig, *, block: Callable[[ModelConfig, int], nn.Module] = plain_block) -> None:
        super().__init__()
        self.cfg = cfg
        self.scaling = {}  # vit_te.py fills it
        width, norm = cfg.embed_dim, norm_layer(cfg)
        use_fc_norm = cfg.norms_after_pooling()

        self.num_prefix_tokens = cfg.num_prefix_tokens()
        self.patch_embed = PatchEmbed(
            pair(cfg.img_size),
            pair(cfg.patch_size),  # pyright: ignore[reportArgumentType]  (timm annotates an int, and takes pairs)
            cfg.in_chans,
            width,
            bias=not cfg.pre_norm,
            strict_img_size=not cfg.dynamic_img_size,
        )
        patch = pair(cfg.patch_size)
        self.patch_embed.proj = PatchProjection(cfg.in_chans, width, patch, stride=patch, bias=not cfg.pre_norm)
        num_embeddings = self.patch_embed.num_patches + (0 if cfg.no_embed_class else self.num_prefix_tokens)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if cfg.class_token else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, width)) if cfg.distilled else None
        self.reg_token = nn.Parameter(torch.empty(1, cfg.reg_tokens, width)) if cfg.reg_tokens else None
        is_learned = cfg.pos_embed == "learn"
        self.pos_embed = (
            None
            if cfg.pos_embed == "none"
            else nn.Parameter(torch.empty(1, num_embeddings, width), requires_grad=is_learned)
        )
        self.pos_drop = nn.Dropout(cfg.pos_drop_rate)
        patch_drop = PatchDropoutWithIndices if cfg.rope_type else PatchDropout
        self.patch_drop = (
            patch_drop(cfg.patch_drop_rate, num_prefix_tokens=self.num_prefix_tokens)
            if cfg.patch_drop_rate
            else nn.Identity()
        )
        self.rope = rotary_embedding(cfg) if cfg.rope_type == "mixed" else None
        self.shared_rel_pos = relative_positions(cfg) if cfg.shared_rel_pos else None
        if self.shared_rel_pos is not None:  # called as a module, so that a strategy's hooks gather its weights
            self.shared_rel_pos.forward = cast(Any, self.shared_rel_pos).get_bias
        self.register_buffer("rope_table", None, persistent=False)
        self.norm_pre = norm(width) if cfg.pre_norm else nn.Identity()
        self.blocks = nn.Sequential(*(block(cfg, place) for place in range(cfg.depth)))
        self.norm = norm(width) if cfg.final_norm and not use_fc_norm else nn.Identity()
        self.attn_pool = (
            AttentionPool(
                width,
                num_heads=cfg.attn_pool_num_heads or cfg.num_heads,
                mlp_ratio=cfg.attn_pool_mlp_ratio or cfg.mlp_ratio,
                norm_layer=norm,
                act_layer=nn.GELU if cfg.is_eva else act_layer(cfg),
            )
            if cfg.global_pool == "map"
            else None
        )
        self.fc_norm = norm(width) if cfg.final_norm and use_fc_norm else nn.Identity()
        self.head_drop = nn.Dropout(cfg.drop_rate)
        size = cfg.representation_size
        layers = {"fc": LecunLinear(width, size), "act": nn.Tanh()} if size else {}
        self.pre_logits = nn.Sequential(collections.OrderedDict(layers)) if layers else nn.Identity()
        self.head = nn.Linear(size or width, cfg.num_classes)
        self.head_dist = nn.Linear(width, cfg.num_classes) if cfg.distilled else None
        set_fused_attn(self, cfg)
        freeze(self, cfg)
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """The table of rotary positions, on the model's device: in FP32, which a cast to BF16 would spoil."""
        if self.cfg.rope_type and self.rope is None:
            device = (self.head.weight if self.rope_table is None else self.rope_table).device
            self.rope_table = rotary_table(self.cfg, self.cfg.grid_size()).to(device)

    def forward(self, images: torch.Tensor | packing.Packed, is_first_microbatch: bool | None = None) -> torch.Tensor:
        """(B, C, Y, X), or B images in rows, -> (B, num_classes).

        With `model.distilled`, in training, both heads' logits (2, B, num_classes): the class token's, then the
        distillation token's.

        Args:
            images: normalised.
            is_first_microbatch: of those between two updates, in which the weights stay the same: FP8 quantizes them in
                the first and uses them again in the others. None: quantize. Nothing else depends on it.
        """
        if isinstance(images, packing.Packed):
            return self._forward_packed(images)
        x = images.to(self.patch_embed.proj.weight.dtype)  # BF16 where a strategy keeps BF16 copies instead of autocast
        rows, columns = (side // patch for side, patch in zip(x.shape[2:], pair(self.cfg.patch_size), strict=True))
        x = self.patch_embed(x)  # B C Y X -> B N D
        x = self.pos_drop(self._add_tokens(x, (rows, columns)))
        x, positions = self._drop_patches(x, self.rotary((rows, columns)))
        if self.shared_rel_pos is not None:
            positions = [self.shared_rel_pos()] * len(self.blocks)
        x = self.norm_pre(x).to(x.dtype)  # autocast norms in FP32, and an FP32 stream would stay one
        drops = self.training and self.cfg.drop_path_rate > 0
        keeps = self.drop_path(len(x), x.device) if drops else [None] * len(self.blocks)
        extras = ((keep,) for keep in keeps) if positions is None else zip(keeps, positions, strict=True)
        x = self.run_blocks(x, extras, is_first_microbatch)
        x = self.norm(x)
        if self.head_dist is not None:
            return self._both_heads(x, self.head_dist)
        return self.head(self.head_drop(self.pre_logits(self.fc_norm(self._pool(x)))))  # B N D -> B num_classes

    def _forward_packed(self, batch: packing.Packed) -> torch.Tensor:
        """Images in rows, each by itself as in `forward`, -> (B, num_classes)."""
        proj = cast(PatchProjection, self.patch_embed.proj)
        x = proj(batch.patches.to(proj.weight.dtype))  # R T D
        rows = packing.Rows.of(batch, self.num_prefix_tokens, x.dtype)
        x = x * rows.is_patch[..., None] + self._packed_tokens(rows).to(x.dtype)
        x = self.norm_pre(self.pos_drop(x)).to(x.dtype)
        keeps: Iterable[torch.Tensor | None] = [None] * len(self.blocks)
        if self.training and self.cfg.drop_path_rate > 0:
            drawn = self.drop_path(len(batch), x.device).view(len(self.blocks), 2, -1, rows.images_per_row)
            of_image = F.pad(drawn, (0, rows.grids.shape[1] - rows.images_per_row), value=1.0).flatten(2)
            keeps = of_image[:, :, rows.image, None]  # depth 2 R T 1
        for block, keep in zip(self.blocks, keeps, strict=True):
            x = block(x, keep, rows=rows)
        x = rows.pool(self.norm(x), self.cfg.global_pool)
        return self.head(self.head_drop(self.pre_logits(self.fc_norm(x))))

    def _packed_tokens(self, rows: packing.Rows) -> torch.Tensor:
        """(R, T, D), float32: class and register tokens at their places, positions at those of patches."""
        prefix = [t[0].float() for t in (self.cls_token, self.reg_token) if t is not None]
        none = torch.zeros(0, self.cfg.embed_dim, device=rows.place.device)
        table = prefix = torch.cat(prefix) if prefix else none
        weights = rows.position_weights(self.cfg.grid_size(), self.num_prefix_tokens)
        if self.pos_embed is None:
            weights = weights[..., : self.num_prefix_tokens]
        else:
            table = self.pos_embed[0].float()
            if self.cfg.no_embed_class:
                table = torch.cat([prefix, table])
            else:
                table = torch.cat([prefix + table[: len(prefix)], table[len(prefix) :]])
        with torch.autocast(table.device.type, enabled=False):  # positions in FP32, as everywhere
            return weights @ table

    def _both_heads(self, x: torch.Tensor, head_dist: nn.Module) -> torch.Tensor:
        """(B, N, D) -> (2, B, num_classes) in training, else their mean (B, num_classes), as timm's and DeiT's."""
        of_class, of_teacher = self.head_drop(x[:, 0]), self.head_drop(x[:, 1])
        of_class, of_teacher = self.head(of_class), head_dist(of_teacher)
        return torch.stack([of_class, of_teacher]) if self.training else (of_class + of_teacher) / 2

    def run_blocks(
        self, x: torch.Tensor, extras: Iterable[tuple[torch.Tensor | None, ...]], is_first_microbatch: bool | None
    ) -> torch.Tensor:
        """(B, N, D) -> (B, N, D); `extras` of each block: its row of `drop_path`, or None, and positions, if any."""
        for block, extra in zip(self.blocks, extras, strict=True):
            x = block(x, *extra)
        return x

    def rotary(self, grid: tuple[int, int]) -> torch.Tensor | None:
        """Sines and cosines of rotary positions, FP32: (N, 2K), or, if trained, (depth, heads, N, 2K); None: none.

        Args:
            grid: rows and columns of patches.
        """
        if self.rope is not None:
            return cast(Any, self.rope).get_embed(list(grid))
        if self.rope_table is None or grid == self.cfg.grid_size():
            return self.rope_table
        return rotary_table(self.cfg, grid).to(self.rope_table.device)

    def _drop_patches(
        self, x: torch.Tensor, rope: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor] | None]:
        """Tokens (B, N, D), in training without some patches, and for each block the positions of those that stay."""
        if rope is None:
            return self.patch_drop(x), None
        is_trained = self.rope is not None
        if self.cfg.patch_drop_rate and self.training:
            x, kept = self.patch_drop(x)
            rope = apply_keep_indices_nlc(x, rope, kept)  # B ... N 2K
            rope = rope.transpose(0, 1) if is_trained else rope[:, None]
        return x, list(rope) if is_trained else [rope] * len(self.blocks)

    def drop_path(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Factors of the residual branches (depth, branches, B, 1, 1): 0 for who loses one, else 1 / (1 - rate).

        Stochastic depth (Huang et al., arXiv 1603.09382). Drawn for all blocks at once, and a tensor: a rate that is
        an attribute of a block makes torch.compile (2.11) compile each block again until its recompile limit, then
        give up.
        """
        rate, depth = self.cfg.drop_path_rate, self.cfg.depth
        first = 0.0 if self.cfg.drop_path_schedule == "linear" else rate
        rates = torch.linspace(first, rate, depth, device=device).view(depth, 1, 1, 1, 1)
        draws = torch.rand(depth, self.cfg.num_branches(), batch_size, 1, 1, device=device)
        return (draws >= rates) / (1 - rates)

    def _add_tokens(self, x: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """Prepend the tokens and add the positions, in x's dtype: an FP32 table would promote x."""
        prefix = (self.cls_token, self.dist_token, self.reg_token)
        tokens = [t.to(x.dtype).expand(len(x), -1, -1) for t in prefix if t is not None]
        if self.pos_embed is None:
            return torch.cat([*tokens, x], dim=1)
        pos_embed = self.pos_embed
        if grid != self.cfg.grid_size():  # only with dynamic_img_size
            num_prefix = 0 if self.cfg.no_embed_class else self.num_prefix_tokens
            old = list(self.cfg.grid_size())
            pos_embed = resample_abs_pos_embed(pos_embed, list(grid), old, num_prefix_tokens=num_prefix)
        pos_embed = pos_embed.to(x.dtype)
        if self.cfg.no_embed_class:
            return torch.cat([*tokens, x + pos_embed], dim=1)
        return torch.cat([*tokens, x], dim=1) + pos_embed

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        """(B, N, D) -> (B, D)."""
        if self.cfg.global_pool == "token":
            return x[:, 0]
        patches = x[:, self.num_prefix_tokens :]
        if self.attn_pool is None:
            return patches.mean(dim=1)
        return self.attn_pool(x if self.cfg.is_eva else patches)  # as timm's two classes have it

    def shard_units(self) -> Sequence[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    def reset_parameters(self) -> None:
        """Draw this module's own tensors (tokens and positions), for builders that go module by module."""
        _initialize(self, self.named_parameters(recurse=False), generator=None)


def freeze(model: nn.Module, cfg: ModelConfig) -> None:
    """Take the gradient from what cfg.freeze names; before wrapping, so that no strategy reduces or updates it."""
    for name, parameter in model.named_parameters():
        name = timm_name(name)
        is_head = name.startswith(("head.", "head_dist.", "pre_logits."))
        if (cfg.freeze == "backbone" and not is_head) or (cfg.freeze == "patch_embed" and name.startswith(cfg.freeze)):
            parameter.requires_grad_(False)


def set_fused_attn(model: nn.Module, cfg: ModelConfig) -> None:
    """Have timm's attention, the pool's too, use torch's fused function or not; timm itself asks the environment."""
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = cfg.fused_attn  # pyright: ignore[reportArgumentType]  (torch: tensors and modules only)


def sincos_positions(cfg: ModelConfig) -> torch.Tensor:
    """Sine and cosine of each patch's column and row at embed_dim / 4 frequencies; (1, embeddings, embed_dim), float32.

    Zero for class, distillation and register tokens. Frequencies from 1 to 1 / 10000, both included, as in big_vision's
    posemb_sincos_2d (models/vit.py; arXiv 2205.01580); MoCo v3's stop one short of the last.
    """
    height, width = cfg.grid_size()
    count = cfg.embed_dim // 4
    frequencies = 10000.0 ** -(torch.arange(count, device="cpu", dtype=torch.float64) / (count - 1))
    rows, columns = (torch.arange(n, device="cpu", dtype=torch.float64)[:, None] * frequencies for n in (height, width))
    x, y = columns.repeat(height, 1), rows.repeat_interleave(width, 0)  # patches in rows of the image
    grid = torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)
    tokens = 0 if cfg.no_embed_class else cfg.num_prefix_tokens()
    return torch.cat([grid.new_zeros(tokens, cfg.embed_dim), grid])[None].float()


def rotary_embedding(cfg: ModelConfig, grid: tuple[int, int] | None = None) -> nn.Module:
    """Rotary positions, timm's, for patches in a `grid`; None: of any, trained ones."""
    options: dict[str, Any] = {"temperature": cfg.rope_temperature, "grid_indexing": cfg.rope_grid_indexing}
    if cfg.rope_type == "mixed":
        options |= {"depth": cfg.depth}
    else:
        options |= {"grid_offset": cfg.rope_grid_offset, "rotate_half": cfg.rope_rotate_half, "feat_shape": grid}
    if cfg.rope_type == "cat":
        reference = cfg.ref_feat_shape and list(pair(cfg.ref_feat_shape))
        options |= {"in_pixels": False, "ref_feat_shape": reference}
    assert cfg.rope_type is not None  # asked for where there is one
    return create_rope_embed(cfg.rope_type, dim=cfg.embed_dim, num_heads=cfg.num_heads, **options)


def rotary_table(cfg: ModelConfig, grid: tuple[int, int]) -> torch.Tensor:
    """Sines and cosines, timm's, of each patch of a `grid`: (N, 2K), float32."""
    with torch.device("cpu"):  # and not a model's meta device
        return cast(Any, rotary_embedding(cfg, grid)).get_embed()


def _initialize_by_place(
    cfg: ModelConfig, module: nn.Module, name: str, tensor: torch.Tensor, generator: torch.Generator
) -> None:
    """What timm does to a tensor of `module`, named as in the whole model, after the rule of its layer (`_initialize`).

    Source: fix_init_weight and head_init_scale of timm.models.eva.Eva; timm.layers.GluMlp.init_weights, which only
    VisionTransformer calls; ResPostBlock.init_weights. VisionTransformerRelPos leaves linear layers as torch has them.
    """
    if cfg.rel_pos_type and isinstance(module, nn.Linear) and name != "head.bias":
        bound = module.in_features**-0.5
        nn.init.uniform_(tensor, -bound, bound, generator=generator)
    if cfg.block_fn == "ResPostBlock" and cfg.init_values and name.endswith((".norm1.weight", ".norm2.weight")):
        tensor.fill_(cfg.init_values)
    if cfg.is_eva:
        if name in ("cls_token", "reg_token"):
            nn.init.normal_(tensor, std=0.02, generator=generator)
        elif name == "head.weight":
            tensor.mul_(0.001)
        elif name.startswith("blocks.") and name.endswith(("attn.proj.weight", "mlp.fc2.weight")):
            tensor.div_(math.sqrt(2.0 * (int(name.split(".")[1]) + 1)))
    elif cfg.mlp_layer == "glu" and name.endswith("mlp.fc1.weight"):
        nn.init.normal_(tensor.chunk(2)[1], std=1e-6, generator=generator)
    elif cfg.mlp_layer == "glu" and name.endswith("mlp.fc1.bias"):
        tensor.chunk(2)[1].fill_(1.0)


@torch.no_grad()
def _initialize(
    module: nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], generator: torch.Generator | None
) -> None:
    """Fill `tensors`, named as `module`'s own parameters, by timm's rule for that kind of module.

    Source: timm.models.vision_transformer.init_weights_vit_timm (its default mode) and the layers' own resets.
    timm cuts a normal distribution of deviation 0.02 off at -2 and 2. A hundred deviations out there is nothing to cut,
    but its trunc_normal_, and torch 2.11's (2.14.1's not), put one value in twenty million just there: normal_ here.
    """
    for name, tensor in tensors:
        in_fused_layer = name.startswith("layer_norm_")
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | RmsNorm) or in_fused_layer:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        elif isinstance(module, TimmLayerScale):
            tensor.fill_(module.init_values)
        elif name in ("gamma_1", "gamma_2"):
            tensor.fill_(cast(Any, module).init_values)
        elif name == "freqs":
            _, depth, heads, half = tensor.shape
            temperature = cast(Any, module).temperature
            with torch.random.fork_rng(devices=[]):  # timm's function knows no generator
                torch.manual_seed(generator.initial_seed() if generator else torch.initial_seed())
                tensor.copy_(init_random_2d_freqs(2 * half, depth, heads, temperature, device="cpu"))
        elif isinstance(module, nn.Conv2d):  # torch's default, which timm keeps: uniform within 1 / sqrt(fan in)
            bound = 1 / math.sqrt(module.in_channels * math.prod(module.kernel_size))
            nn.init.uniform_(tensor, -bound, bound, generator=generator)
        elif name == "pos_embed" and isinstance(module, TrainableModel) and module.cfg.pos_embed == "sincos":
            tensor.copy_(sincos_positions(module.cfg))
        elif isinstance(module, LecunLinear) and name == "weight":
            # Divided by the deviation that a standard normal has left when it is cut off at -2 and 2.
            std = module.in_features**-0.5 / 0.8796256610342398
            nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
        elif name in ("pos_embed", "dist_token"):
            nn.init.normal_(tensor, std=0.02, generator=generator)
        elif name in ("cls_token", "reg_token"):
            nn.init.normal_(tensor, std=1e-6, generator=generator)
        elif name == "relative_position_bias_table":
            nn.init.normal_(tensor, std=0.02, generator=generator)
        elif name.startswith("lambda_"):
            nn.init.normal_(tensor, std=0.1, generator=generator)
        elif name == "latent":
            std = tensor.shape[-1] ** -0.5
            nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
        elif name.endswith("bias"):
            tensor.fill_(0.0)
        elif name.endswith("weight"):
            nn.init.normal_(tensor, std=0.02, generator=generator)
        else:
            raise AssertionError(f"no initialization rule for {type(module).__name__}.{name}")
