"""A tiny Qwen3-VL checkpoint with fixed random weights (about 80 MB), in the published layout.

Weights come from numpy's PCG64 stream, seeded by the tensor's name, never from torch: same seed, same bytes, whatever
version reads them.  Every linear map keeps unit variance and the output head is not tied to the embeddings, so that
the greedy answer depends on the picture instead of falling back to one token.  Tokenizer, template and processor
settings are the real model's.
"""

import hashlib
import json
import math
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tests.pipeline.bundles import unpack_bundle

SEED = 20
SHA256 = "880cc4a57a294ada5abb8a063c2c6624b2d8fce6515a592c45366023f29af92e"  # of model.safetensors
HIDDEN, INNER, HEAD, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 64, 128, 32, 4, 2, 3, 151936
VISION, VISION_INNER, VISION_LAYERS, POSITIONS, MERGED = 64, 128, 3, 2304, 256
TEXT_CONFIG = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "max_position_embeddings": 32768,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEY_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
    "rope_theta": 5000000,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
VISION_CONFIG = {
    "deepstack_visual_indexes": [0, 1],
    "depth": VISION_LAYERS,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": VISION,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": VISION_INNER,
    "model_type": "qwen3_vl",
    "num_heads": 2,
    "num_position_embeddings": POSITIONS,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}


def _linear(name: str, out: int, into: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, into)
    yield f"{name}.bias", (out,)


def _norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _language(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield f"{prefix}norm.weight", (HIDDEN,)
    for layer in range(LAYERS):
        at = f"{prefix}layers.{layer}."
        yield f"{at}input_layernorm.weight", (HIDDEN,)
        yield f"{at}post_attention_layernorm.weight", (HIDDEN,)
        yield f"{at}self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN)
        yield f"{at}self_attn.k_proj.weight", (KEY_HEADS * HEAD, HIDDEN)
        yield f"{at}self_attn.v_proj.weight", (KEY_HEADS * HEAD, HIDDEN)
        yield f"{at}self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD)
        yield f"{at}self_attn.q_norm.weight", (HEAD,)
        yield f"{at}self_attn.k_norm.weight", (HEAD,)
        yield f"{at}mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{at}mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{at}mlp.down_proj.weight", (HIDDEN, INNER)


def _vision(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}patch_embed.proj.weight", (VISION, 3, 2, 16, 16)
    yield f"{prefix}patch_embed.proj.bias", (VISION,)
    yield f"{prefix}pos_embed.weight", (POSITIONS, VISION)
    for layer in range(VISION_LAYERS):
        at = f"{prefix}blocks.{layer}."
        yield from _norm(f"{at}norm1", VISION)
        yield from _norm(f"{at}norm2", VISION)
        yield from _linear(f"{at}attn.qkv", 3 * VISION, VISION)
        yield from _linear(f"{at}attn.proj", VISION, VISION)
        yield from _linear(f"{at}mlp.linear_fc1", VISION_INNER, VISION)
        yield from _linear(f"{at}mlp.linear_fc2", VISION, VISION_INNER)
    for name, width in (("merger", VISION), ("deepstack_merger_list.0", MERGED), ("deepstack_merger_list.1", MERGED)):
        yield from _norm(f"{prefix}{name}.norm", width)
        yield from _linear(f"{prefix}{name}.linear_fc1", MERGED, MERGED)
        yield from _linear(f"{prefix}{name}.linear_fc2", HIDDEN, MERGED)


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint, in file order."""
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    yield from _language("model.language_model.")
    yield from _vision("model.visual.")


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of one tensor."""
    draw = np.random.Generator(np.random.PCG64([SEED, zlib.crc32(name.encode())])).standard_normal(shape, np.float32)
    if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "layernorm.weight")):
        return np.asarray(1.0 + 0.1 * draw, np.float32)
    if name.endswith(".bias"):
        return np.asarray(0.1 * draw, np.float32)
    if name.endswith("embed_tokens.weight"):
        return draw
    if name.endswith("pos_embed.weight"):
        return np.asarray(0.5 * draw, np.float32)
    gain = 2.0 if "lm_head" in name else 1.4
    return np.asarray(draw * np.float32(gain / np.sqrt(math.prod(shape[1:]))), np.float32)


Named = tuple[str, str, tuple[int, ...]]  # in the file, in the stream of weights, shape


def _write(path: Path, tensors: Sequence[Named]) -> str:
    """Write the safetensors file; its SHA-256."""
    header: dict[str, object] = {}
    offset = 0
    for name, _, shape in tensors:
        nbytes = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    header["__metadata__"] = {"format": "pt"}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for piece in (len(raw).to_bytes(8, "little"), raw, *(weights(n, s).tobytes() for _, n, s in tensors)):
            out.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def checkpoint(cache: Path) -> Path:
    """The checkpoint's folder below `cache`, made when it is not there.  ValueError: the weights came out otherwise."""
    folder = cache / f"tiny-qwen3-vl-{SEED}"
    if (folder / "complete").exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        unpack_bundle("qwen3_vl", cache).rename(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)  # no defaults: an unset field must not become top_p 0.8
    config = json.loads((folder / "config.json").read_text())
    config |= {"text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG, "tie_word_embeddings": False}
    config |= {"dtype": "float32", "architectures": ["Qwen3VLForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    digest = _write(folder / "model.safetensors", [(name, name, shape) for name, shape in shapes()])
    if digest != SHA256:
        raise ValueError(
            f"the checkpoint's digest is {digest}, not {SHA256}: the expected answers are not of these weights"
        )
    (folder / "complete").touch()
    return folder


def text_checkpoint(cache: Path) -> Path:
    """The language half alone, as a Qwen3 model with the same weights: for engines without an eye."""
    folder = cache / f"tiny-qwen3-{SEED}"
    if (folder / "complete").exists():
        return folder
    whole = checkpoint(cache)
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(whole / name, folder / name)
    config = {key: value for key, value in TEXT_CONFIG.items() if key != "rope_scaling"}
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1) + "\n")
    seen = "model.language_model."
    kept = [(name.replace(seen, "model."), name, shape) for name, shape in shapes() if "visual" not in name]
    _write(folder / "model.safetensors", kept)
    (folder / "complete").touch()
    return folder
