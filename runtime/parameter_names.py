"""Every name that a parameter can have, and timm's.

The one place where the names of wrappers, TransformerEngine's layers and Hugging Face's model are undone. Strings only:
none of these libraries is needed.
"""

import re

# Parts of a name that DDP and Megatron-FSDP, torch.compile, Lightning, and torch's first FSDP and its wrapper for
# recomputation add.
WRAPPERS = {"module", "_orig_mod", "model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# TransformerEngine's fused layers hold a norm beside a linear layer, or a whole MLP: their names, and timm's.
TE_NAMES = {
    "attn.qkv.layer_norm_weight": "norm1.weight",
    "attn.qkv.layer_norm_bias": "norm1.bias",
    "attn.q_proj.layer_norm_weight": "norm1.weight",
    "attn.q_proj.layer_norm_bias": "norm1.bias",
    "mlp.layer_norm_weight": "norm2.weight",
    "mlp.layer_norm_bias": "norm2.bias",
    "mlp.fc1.layer_norm_weight": "norm2.weight",
    "mlp.fc1.layer_norm_bias": "norm2.bias",
    "mlp.fc1_g.layer_norm_weight": "norm2.weight",
    "mlp.fc1_g.layer_norm_bias": "norm2.bias",
    "mlp.fc1_weight": "mlp.fc1.weight",
    "mlp.fc1_bias": "mlp.fc1.bias",
    "mlp.fc2_weight": "mlp.fc2.weight",
    "mlp.fc2_bias": "mlp.fc2.bias",
}

# A layer in timm -> the same in Hugging Face's ViT. The first name is transformers 4's, which 5 writes to files, too;
# the second one is that of transformers 5's modules. q, k and v are the thirds of timm's attn.qkv.
HUGGING_FACE_BLOCK = {
    "norm1": ("layernorm_before",),
    "attn.q": ("attention.attention.query", "attention.q_proj"),
    "attn.k": ("attention.attention.key", "attention.k_proj"),
    "attn.v": ("attention.attention.value", "attention.v_proj"),
    "attn.proj": ("attention.output.dense", "attention.o_proj"),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense", "mlp.fc1"),
    "mlp.fc2": ("output.dense", "mlp.fc2"),
}
HUGGING_FACE_REST = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "norm.weight": "vit.layernorm.weight",
    "norm.bias": "vit.layernorm.bias",
    "head.weight": "classifier.weight",
    "head.bias": "classifier.bias",
}


def without_wrappers(name: str) -> str:
    """The name without the parts that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def timm_name(name: str) -> str:
    """A parameter's name in timm's model, whatever wrapper, block or implementation holds it."""
    name = without_wrappers(name)
    if name.startswith("hugging_face."):  # interop.baselines.HuggingFaceViT
        return from_hugging_face_name(name.removeprefix("hugging_face."))
    parts = name.split(".", 2)
    if parts[0] == "blocks":
        parts[2] = TE_NAMES.get(parts[2], parts[2])
    return ".".join(parts)


def from_hugging_face_name(name: str) -> str:
    """A parameter's name in timm, of one in Hugging Face's ViT; what timm lacks, and names of others, stay.

    Queries, keys and values, which are thirds of timm's attn.qkv, become attn.q, attn.k and attn.v.
    """
    rest = {theirs.removeprefix("vit."): ours for ours, theirs in HUGGING_FACE_REST.items()}
    layers = {theirs: ours for ours, names in HUGGING_FACE_BLOCK.items() for theirs in names}
    short = name.removeprefix("vit.")
    match = re.fullmatch(r"(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)", short)
    if match and match[2] in layers:
        return f"blocks.{match[1]}.{layers[match[2]]}.{match[3]}"
    return rest.get(short, name)
