"""Prompts encoded piece by piece against the library's answer for the whole."""

import concurrent.futures
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from pipeline.pieces import LONGEST_TEXT, Cut, Pieces, cut_of
from tests.pipeline.bundles import NAMES, bundle

UNHURRIED = settings(deadline=None, max_examples=60)  # the first example may load a bundle
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            " ",
            "\n",
            "\n\n",
            " a",
            "e\u0301",
            "\u0301",
            "한국",
            "<",
            "<|",
            "|>",
            "<|im_",
            "Hello",
            "1234",
            "</s>",
        ]
    ),
)


def library_of(name: str) -> LibraryTokenizer:
    library = bundle(name).tokenizer._library
    assert isinstance(library, LibraryTokenizer)
    return library


def whole(library: LibraryTokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


def by_pieces(library: LibraryTokenizer, **options: int) -> Pieces:
    cut = cut_of(library)
    assert cut is not None
    return Pieces(cut, lambda texts: [whole(library, text) for text in texts], **options)


PIECES = {name: by_pieces(library_of(name)) for name in ("qwen3_vl", "llama4", "kimi_k25")}


@UNHURRIED
@given(st.data())
@pytest.mark.parametrize("name", PIECES)
def test_ids_are_those_of_the_whole(name: str, data: st.DataObject) -> None:
    library = library_of(name)
    tokens = st.sampled_from([token.content for token in library.get_added_tokens_decoder().values()])
    text = "".join(data.draw(st.lists(st.one_of(TEXTS, tokens), max_size=12)))
    for _ in range(2):  # the second time all pieces are known
        assert PIECES[name].ids(text) == whole(library, text)


@pytest.mark.parametrize("name", NAMES)
def test_conversations_of_every_bundle(name: str) -> None:
    """Turn by turn, the earlier ones known already."""
    library = library_of(name)
    pieces = by_pieces(library)
    tokens = [token.content for token in library.get_added_tokens_decoder().values()]
    text = ""
    for number, token in enumerate(tokens * 2):
        text += f"{token} turn {number}\n of  a conversation, café\n\n"
        assert pieces.ids(text) == whole(library, text)


def made(*tokens: AddedToken) -> LibraryTokenizer:
    vocabulary = {letter: number for number, letter in enumerate("abcdefg ▁<>|x/s")}
    library = LibraryTokenizer(models.BPE(vocabulary, []))
    library.add_tokens(list(tokens))
    return library


TWO = (AddedToken("<a>", normalized=False), AddedToken("<a><b>", normalized=False))


@given(st.lists(st.sampled_from(["<a>", "<b>", "<a", ">", "ab", " ", "<"]), max_size=14).map("".join))
def test_the_longest_token_is_cut_first(text: str) -> None:
    library = made(*TWO, AddedToken("<b><b>", normalized=True))
    assert by_pieces(library).ids(text) == whole(library, text)


@given(st.lists(st.sampled_from(["<a>", "<a><b>", "a", " b", "  ", "A", "ab "]), max_size=14).map("".join))
def test_steps_that_do_not_look_around(text: str) -> None:
    library = made(*TWO)
    library.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Prepend("▁"),
            normalizers.Replace(" ", "▁"),
        ]
    )
    assert by_pieces(library).ids(text) == whole(library, text)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_around_are_not_cut_at(flag: str) -> None:
    assert cut_of(made(*TWO)) is not None
    assert cut_of(made(*TWO, AddedToken("<s>", normalized=False, **{flag: True}))) is None


def test_steps_that_ask_for_the_place_are_not_cut_for() -> None:
    library = made(*TWO)
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert cut_of(library) is None
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()])
    assert cut_of(library) is None
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()])
    assert cut_of(library) is not None
    assert cut_of(made(*(AddedToken("a" * length, normalized=False) for length in range(1, 2000)))) is None
    library.encode_special_tokens = True
    assert cut_of(library) is None
    assert cut_of(made()) is None


def test_what_is_known_is_not_encoded_again() -> None:
    encoded: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return [list(text.encode()) for text in texts]

    pieces = Pieces(Cut({"|": 1000}), encode)
    assert pieces.ids("one|two|one") == [*b"one", 1000, *b"two", 1000, *b"one"]
    assert sorted(encoded) == ["one", "two"]
    assert pieces.ids("one|two|one|three|") == [
        *b"one",
        1000,
        *b"two",
        1000,
        *b"one",
        1000,
        *b"three",
        1000,
    ]
    assert sorted(encoded) == ["one", "three", "two"]
    assert pieces.ids("") == [] and pieces.ids("||") == [1000, 1000]


@given(st.lists(st.text("ab|", max_size=300), max_size=30))
def test_no_more_is_kept_than_there_is_room_for(texts: list[str]) -> None:
    pieces = Pieces(
        Cut({"|": 1000}),
        lambda them: [list(text.encode()) for text in them],
        most_bytes=4000,
    )
    for text in texts:
        assert pieces.ids(text) == [1000 if code == ord("|") else code for code in text.encode()]
        assert 0 <= pieces.nbytes <= 4000


def test_a_long_text_is_left_to_the_library() -> None:
    """Whole: to cut it would hold the interpreter."""
    encoded: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        encoded.extend(texts)
        return [[7] for _ in texts]

    pieces = Pieces(Cut({"|": 1000}), encode)
    longest = "|".join("a" * 1023 for _ in range(LONGEST_TEXT // 1024)) + "|"
    assert len(longest) == LONGEST_TEXT and pieces.ids(longest).count(1000) == longest.count("|")
    before = pieces.nbytes
    assert pieces.ids(longest + "b") == [7] and encoded[-1] == longest + "b" and pieces.nbytes == before


WORDS = st.lists(st.text("ab<|>_.*\\", min_size=1, max_size=6), min_size=1, max_size=12, unique=True)


@given(WORDS, st.data())
def test_the_longest_word_is_found_first(words: list[str], data: st.DataObject) -> None:
    """Against the plainest expression for the same."""
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(words), st.text("ab<|>_.*\\", max_size=4)))))
    plain = re.compile("(" + "|".join(map(re.escape, sorted(words, key=len, reverse=True))) + ")")
    assert Cut(dict.fromkeys(words, 1)).parts(text) == plain.split(text)


def test_a_thousand_tokens_that_begin_alike_are_one_branch() -> None:
    """Else a text of their beginning would be looked through a thousand times."""
    tokens = {f"<|reserved_special_token_{number}|>": number for number in range(1100)}
    pattern = Cut({**tokens, "<|end|>": 5})._pattern.pattern
    assert pattern.count("eserved_special_token_") == 1 and pattern.count("end") == 1
    text = "".join(f"{token} and " for token in tokens)
    assert Cut(tokens).parts(text)[1::2] == list(tokens)


def test_threads_share_it() -> None:
    pieces = Pieces(
        Cut({"|": 1000}),
        lambda them: [list(text.encode()) for text in them],
        most_bytes=3000,
    )
    texts = ["|".join(f"piece {(turn * step) % 40}" for step in range(20)) for turn in range(200)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for text, ids in zip(texts, threads.map(pieces.ids, texts), strict=True):
            assert ids == [1000 if code == ord("|") else code for code in text.encode()]
    assert 0 <= pieces.nbytes <= 3000
