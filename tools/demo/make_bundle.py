"""Writes tools/demo/bundle/tokenizer.json: a byte-level tokenizer with Qwen3-VL's special tokens at their real ids.

No merges: byte b of a text is token b, so anybody can work out a prompt's ids by hand, which is what the demo's
reference does. The other files of the bundle are written by hand.  Run it again only when the list of special tokens
changes.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BUNDLE = Path(__file__).resolve().parent / "bundle"
FIRST_SPECIAL = 151643
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]


def byte_letters() -> list[str]:
    """The printable stand-in of every byte in byte-level vocabularies: itself where printable, else from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = (chr(256 + at) for at in range(256))
    return [chr(byte) if byte in printable else next(spare) for byte in range(256)]


def build() -> Tokenizer:
    vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())}
    vocabulary |= {text: FIRST_SPECIAL + at for at, text in enumerate(SPECIALS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    return tokenizer


if __name__ == "__main__":
    build().save(str(BUNDLE / "tokenizer.json"))
