"""The tokenizer against the library's own answers: ids, look-ups, text in pieces against its decode of the whole."""

import asyncio
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from pipeline.detokenize import ByteStream, bytes_of_token
from pipeline.errors import GatewayError
from pipeline.tokenizer import THREAD_CHARACTERS, Tokenizer
from tests.pipeline.bundles import bundle

UNHURRIED = settings(deadline=None)  # the first example may load a bundle
QWEN_IDS = 151669  # vocabulary and added tokens of the qwen3_vl bundle; ids above it are unknown
WORDS = ["▁Hello", "▁world", "ll", "o", ",", "▁", "▁▁", "é", "▁日本", "語", ".", "▁Hel", "\ufffd", "x▁y"]


def metaspace() -> Tokenizer:
    """A sentencepiece-like tokenizer whose decoder drops the space of the first token only."""
    library = LibraryTokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in WORDS)], unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(library)


def llama2() -> Tokenizer:
    """Llama 2's decoder: metaspace by replacement, bytes for what the vocabulary lacks, one leading space stripped."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *WORDS[:5], "▁日", "語"]
    vocab = {"<unk>": 0, **{piece: place for place, piece in enumerate(dict.fromkeys(pieces), 1)}}
    library = LibraryTokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(library)


METASPACE, LLAMA2 = metaspace(), llama2()


def cut(ids, sizes):
    """Portions of `ids` in these sizes, over and over."""
    start, turn = 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        yield ids[start : start + size]
        start, turn = start + size, turn + 1


def streamed(tokenizer, ids, sizes, **how):
    stream = tokenizer.decode_stream(**how)
    return [*(stream.feed(portion) for portion in cut(ids, sizes)), stream.finish()]


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
# the first 256 ids are single bytes: most random runs of them are no text at all
ANY_QWEN_ID = st.one_of(st.integers(0, 255), st.integers(0, QWEN_IDS + 20), st.integers(151640, QWEN_IDS))


@UNHURRIED
@given(st.lists(ANY_QWEN_ID, max_size=120), SIZES, st.booleans())
def test_byte_level_pieces_are_the_decode_of_the_whole(ids, sizes, skip):
    tokenizer = bundle("qwen3_vl").tokenizer
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(tokenizer, ids, sizes, skip_special_tokens=skip)) == whole


@UNHURRIED
@given(st.binary(max_size=40), SIZES)
@example(b"\xed\xa0\x80\xf0\x9f\x98", [1])
@example(b"\xf0\x9f\xffx\xc0\x80\xf5", [2])
def test_broken_bytes_become_what_the_library_makes_of_them(data, sizes):
    tokenizer = bundle("kimi_k25").tokenizer  # one token for each byte
    ids = [id_of_byte(tokenizer, byte) for byte in data]
    assert "".join(streamed(tokenizer, ids, sizes)) == tokenizer.decode(ids) == data.decode("utf-8", "replace")


def id_of_byte(tokenizer, byte):
    found = next(token for token in range(256) if tokenizer.bytes_of(token) == bytes([byte]))
    return found


@UNHURRIED
@given(st.lists(st.integers(0, 20), max_size=90), SIZES, st.booleans())
def test_metaspace_pieces_are_the_decode_of_the_whole(ids, sizes, skip):
    whole = METASPACE.decode(ids, skip_special_tokens=skip)
    assert "".join(streamed(METASPACE, ids, sizes, skip_special_tokens=skip)) == whole


@UNHURRIED
@given(st.text(st.sampled_from("Hello world,日語é😀\u200d \n<s>"), max_size=60), SIZES, st.booleans())
@example("<<<<<<<\u200d\u200d\u200d😀", [9, 1], False)  # a run of twenty byte tokens, the last character cut
def test_byte_fallback_pieces_are_the_decode_of_the_whole(text, sizes, skip):
    ids = LLAMA2.encode_now(text)
    pieces = streamed(LLAMA2, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == LLAMA2.decode(ids, skip_special_tokens=skip)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_when_it_is_whole():
    tokenizer = bundle("qwen3_vl").tokenizer
    ids = tokenizer.encode_now("a 🫠 b")
    pieces = streamed(tokenizer, ids, [1])
    assert "".join(pieces) == "a 🫠 b"
    assert not any("\ufffd" in piece for piece in pieces)
    cut_off = streamed(tokenizer, ids[:3], [1])
    assert cut_off[-1] == "\ufffd" and "\ufffd" not in "".join(cut_off[:-1])
    fallback = LLAMA2.encode_now("😀")
    assert streamed(LLAMA2, fallback, [1]) == ["", "", "", "", "😀", ""]
    assert streamed(LLAMA2, fallback[:3], [1])[-1] == "\ufffd\ufffd"


def test_bytes_that_never_become_text_do_not_wait_for_ever():
    ids = [LLAMA2.id_of("<0xFF>")] * 100
    pieces = streamed(LLAMA2, ids, [1])
    assert "".join(pieces) == LLAMA2.decode(ids) == "\ufffd" * 100
    assert max(map(len, pieces)) < 40


def test_the_window_stays_short():
    decoded = []
    library = METASPACE._library
    stream = METASPACE.decode_stream()
    stream._decode = lambda ids: (decoded.append(len(ids)), library.decode(ids))[1]
    for _ in range(300):
        stream.feed([1, 2, 3])
    stream.feed([1, 2, 3] * 300)
    assert max(decoded) <= 64


def test_special_tokens_appear_when_kept():
    tokenizer = bundle("qwen3_vl").tokenizer
    end, start = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|im_start|>")
    ids = [*tokenizer.encode_now("hi"), start, end]
    assert "".join(streamed(tokenizer, ids, [1])) == "hi"
    assert "".join(streamed(tokenizer, ids, [1], kept={end})) == "hi<|im_end|>"
    assert "".join(streamed(tokenizer, ids, [1], skip_special_tokens=False)) == "hi<|im_start|><|im_end|>"
    assert "".join(streamed(METASPACE, [METASPACE.id_of("<s>"), 1, 2], [1])) == "Hello world"


def test_special_tokens_in_text_are_parsed_and_none_is_added():
    tokenizer = bundle("qwen3_vl").tokenizer
    assert tokenizer.encode_now("<|im_start|>user\nhi<|im_end|>\n") == [151644, 872, 198, 6023, 151645, 198]
    with_bos = LibraryTokenizer.from_str(METASPACE._library.to_str())
    with_bos.enable_truncation(2)
    with_bos.enable_padding(length=5)
    assert Tokenizer(with_bos).encode_now("Hello world, Hello") == METASPACE.encode_now("Hello world, Hello")
    assert len(METASPACE.encode_now("Hello world, Hello")) == 4


def test_look_ups():
    tokenizer = bundle("qwen3_vl").tokenizer
    assert tokenizer.id_of("<|image_pad|>") == 151655
    assert tokenizer.token_of(151655) == "<|image_pad|>"
    assert tokenizer.token_of(tokenizer.encode_now(" world")[0]) == "Ġworld"
    assert tokenizer.id_of("no such token") is None
    assert [tokenizer.token_of(token) for token in (QWEN_IDS, -1, 1 << 40)] == [None] * 3
    assert tokenizer.decode_stream().feed([-1, 1 << 40, QWEN_IDS]) == ""
    assert METASPACE.decode_stream().feed([-1, 1 << 40, 500]) == ""
    assert 151645 in tokenizer.special_ids and tokenizer.id_of("<think>") not in tokenizer.special_ids


def test_bytes_of_one_token():
    tokenizer = bundle("qwen3_vl").tokenizer
    assert tokenizer.bytes_of(tokenizer.encode_now("a world")[1]) == b" world"
    assert tokenizer.bytes_of(151645) == b"<|im_end|>"
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode_now("🫠日本"))) == "🫠日本".encode()
    assert tokenizer.bytes_of(QWEN_IDS) == b""
    assert METASPACE.bytes_of(METASPACE.id_of("▁world")) == b" world"
    assert METASPACE.bytes_of(METASPACE.id_of("</s>")) == b"</s>"
    assert METASPACE.bytes_of(500) == b""
    assert LLAMA2.bytes_of(LLAMA2.id_of("<0xE6>")) == b"\xe6"
    assert LLAMA2.bytes_of(LLAMA2.id_of("▁Hello")) == b" Hello"


def test_every_byte_has_its_character():
    table = {byte: token for token in range(256) for byte in [bundle("kimi_k25").tokenizer.bytes_of(token)]}
    assert len(table) == 256
    assert bytes_of_token("Ġa") == b" a"
    assert bytes_of_token("<｜User｜>") == "<｜User｜>".encode()
    assert ByteStream({1: b"\xe6", 2: b"\x97\xa5"}, ()).feed([1, 2]) == "日"


@pytest.fixture
def qwen():
    return bundle("qwen3_vl").tokenizer


async def test_long_texts_are_encoded_in_a_thread(qwen, monkeypatch):
    threads = []
    plain = qwen.encode_now

    def noting(text):
        threads.append(threading.current_thread())
        return plain(text)

    monkeypatch.setattr(qwen, "encode_now", noting)
    short, long = "word " * 10, "word " * THREAD_CHARACTERS
    assert await qwen.encode(short) == plain(short)
    assert await qwen.encode(long) == plain(long)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_the_loop_turns_while_a_long_text_is_encoded(qwen):
    encoding = asyncio.create_task(qwen.encode("some words of a long text, " * 40000))
    turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(await encoding) > 100000
    assert turns > 100


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff"])
async def test_half_a_surrogate_pair_is_refused(qwen, text):
    with pytest.raises(GatewayError, match="unpaired surrogate") as refused:
        await qwen.encode(text)
    assert refused.value.code == "process_messages_failed"
