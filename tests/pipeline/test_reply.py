"""Answers read back: the same text, entries and ending however the engine portions its tokens."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engines.base import Chunk, Finished, Sampling, TokenLogprob, TopLogprob
from pipeline.reply import NOTHING, ChoiceReader, Ending, ReplyRules, Tally, Usage, reply_rules
from pipeline.stops import StopMatcher
from tests.pipeline.bundles import bundle

IM_END, IM_START = 151645, 151644
UNHURRIED = settings(deadline=None)  # the first example may load a bundle


@pytest.fixture
def qwen():
    return bundle("qwen3_vl").tokenizer


# ---- stop strings


def naive_stop(text, stops, trim=True):
    """The text up to the first place where, reading on one character at a time, a stop string stands complete."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return text[: end - len(stop)] if trim else text[:end], stop
    return text, None


def pieces_of(text, cuts):
    places = sorted({min(cut, len(text)) for cut in cuts})
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


FEW = st.text(st.sampled_from("ab语😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("ab语😀"), min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 30), max_size=8)


@UNHURRIED
@given(FEW, STOPS, CUTS, st.booleans())
@example("abab语", ["abab语", "ba"], [1, 3], True)
@example("aaab", ["aab"], [1, 2, 3], True)
@example("abcd", ["abcd", "bc"], [], True)
def test_any_cut_gives_the_text_of_the_whole(text, stops, cuts, trim):
    matcher = StopMatcher(stops, trim=trim)
    shown = [matcher.feed(piece) for piece in pieces_of(text, cuts)]
    expected, stop = naive_stop(text, stops, trim)
    assert matcher.matched == stop
    assert "".join(shown) + matcher.finish() == expected


@UNHURRIED
@given(FEW, STOPS, CUTS)
def test_what_is_shown_early_is_never_part_of_a_stop_string_and_nothing_else_waits(text, stops, cuts):
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces_of(text, cuts):
        seen, shown = seen + piece, shown + matcher.feed(piece)
        if matcher.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        ends = [seen[start:] for start in range(len(seen))]
        longest = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
        assert held == longest


@UNHURRIED
@given(FEW, STOPS, st.integers(0, 30), CUTS)
def test_an_unarmed_beginning_only_counts_for_what_ends_later(text, stops, unarmed, cuts):
    matcher = StopMatcher(stops)
    first, rest = text[:unarmed], text[unarmed:]
    shown = matcher.feed(first, armed=False)
    for piece in pieces_of(rest, cuts):
        shown += matcher.feed(piece)
    shown += matcher.finish()
    ends = [
        (end, -len(stop), stop)
        for end in range(len(first) + 1, len(text) + 1)
        for stop in stops
        if text[:end].endswith(stop)
    ]
    if not ends:
        assert (shown, matcher.matched) == (text, None)
        return
    end, minus, stop = min(ends)
    assert matcher.matched == stop
    assert shown == text[: end + minus]


# ---- one choice


def logprobs_of(ids):
    return tuple(TokenLogprob(token, -0.5, (TopLogprob(token, -0.5), TopLogprob(token + 1, -2.0))) for token in ids)


def read_all(tokenizer, rules, ids, sizes, *, reason="stop", matched=None, with_logprobs=False):
    """Text, entries and ending when `ids` come in portions of these sizes; the last ones with the end, as from vLLM."""
    reader = ChoiceReader(tokenizer, rules)
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        portion = ids[start : start + sizes[turn % len(sizes)]]
        pieces.append(reader.read(Chunk(0, portion, logprobs_of(portion) if with_logprobs else ())))
        start, turn = start + len(portion), turn + 1
    pieces.append(reader.read(Finished(0, reason, matched_stop=matched)))
    endings = [piece.ending for piece in pieces if piece.ending is not None]
    assert len(endings) == 1
    assert reader.ended
    entries = tuple(entry for piece in pieces for entry in piece.logprobs)
    return "".join(piece.text for piece in pieces), entries, endings[0]


def test_hello_world_of_the_recorded_reply(qwen):
    # the recording engine's fixed answer and what the real gateway made of it (text_hi, text_stream)
    ids = [9707, 1879, 0]
    assert read_all(qwen, ReplyRules(), ids, [3])[0] == "Hello world!"
    reader = ChoiceReader(qwen, ReplyRules())
    assert [reader.read(Chunk(0, [token])).text for token in ids] == ["Hello", " world", "!"]
    assert reader.read(Finished(0, "stop")).ending == Ending("stop")


def test_end_tokens_are_left_out_by_id(qwen):
    ids = [*qwen.encode_now("Hi <b>"), IM_END]
    loaded = bundle("qwen3_vl")
    rules = reply_rules(Sampling(), loaded.eos_ids)
    assert read_all(qwen, rules, ids, [1], matched=IM_END) == ("Hi <b>", (), Ending("stop", IM_END))
    # a stop token of the request that is an ordinary word
    word = qwen.id_of("Ġ<")
    assert read_all(qwen, reply_rules(Sampling(stop_token_ids=(word,)), loaded.eos_ids), ids, [2])[0] == "Hib>"


@pytest.mark.parametrize(
    ("ignore_eos", "no_stop_trim", "skip", "text"),
    [
        (False, False, False, "Hi"),
        (False, True, True, "Hi<|im_end|>"),
        (False, True, False, "Hi<|im_end|>"),
        (True, False, True, "Hi"),  # text like any other special token's: skipped
        (True, False, False, "Hi<|im_end|>"),
        (True, True, True, "Hi"),
    ],
)
def test_end_tokens_that_stay(qwen, ignore_eos, no_stop_trim, skip, text):
    rules = reply_rules(
        Sampling(ignore_eos=ignore_eos), frozenset({IM_END}), no_stop_trim=no_stop_trim, skip_special_tokens=skip
    )
    assert read_all(qwen, rules, [*qwen.encode_now("Hi"), IM_END], [1])[0] == text


def test_other_special_tokens_follow_skip_special_tokens(qwen):
    ids = [IM_START, *qwen.encode_now("Hi")]
    assert read_all(qwen, ReplyRules(), ids, [1])[0] == "Hi"
    assert read_all(qwen, ReplyRules(skip_special_tokens=False), ids, [1])[0] == "<|im_start|>Hi"


def test_a_stop_string_ends_the_choice_before_the_engine_does(qwen):
    ids = qwen.encode_now("one two\n\nUser: three")
    reader = ChoiceReader(qwen, ReplyRules(stops=("\nUser:",)))
    pieces = [reader.feed([token]) for token in ids]
    assert "".join(piece.text for piece in pieces) == "one two\n"
    endings = [piece.ending for piece in pieces if piece.ending]
    assert endings == [Ending("stop", "\nUser:", ours=True)]
    assert pieces[-1] is NOTHING
    assert reader.finish("length") is NOTHING
    assert reader.read(Finished(0, "abort")) is NOTHING


def test_a_stop_string_may_stay(qwen):
    rules = reply_rules(Sampling(stop=("two",)), frozenset(), no_stop_trim=True)
    assert read_all(qwen, rules, qwen.encode_now("one two three"), [1]) == ("one two", (), Ending("stop", "two", True))


def test_a_beginning_of_a_stop_string_comes_out_at_the_end(qwen):
    text, _, ending = read_all(
        qwen, ReplyRules(stops=("END OF IT",)), qwen.encode_now("so END OF"), [1], reason="length"
    )
    assert (text, ending) == ("so END OF", Ending("length"))


def test_the_engines_word_stands_without_a_match_of_ours(qwen):
    ids = qwen.encode_now("text")
    assert read_all(qwen, ReplyRules(), ids, [1], reason="abort")[2] == Ending("abort")
    # the engine stopped on a string we do not find in the text: its word is passed on
    assert read_all(qwen, ReplyRules(stops=("zz",)), ids, [1], matched="zz")[2] == Ending("stop", "zz")
    # it told an id, but our stop string stands in the text
    assert read_all(qwen, ReplyRules(stops=("ex",)), ids, [1], matched=IM_END)[2] == Ending("stop", "ex", True)


def test_a_character_cut_off_by_the_limit(qwen):
    ids = qwen.encode_now("ok 🫠")[:-1]
    text, _, ending = read_all(qwen, ReplyRules(stops=("\ufffd!",)), ids, [1], reason="length")
    assert (text, ending) == ("ok \ufffd", Ending("length"))
    # what the rest turns into may itself be a stop string
    assert read_all(qwen, ReplyRules(stops=("\ufffd",)), ids, [1])[::2] == ("ok ", Ending("stop", "\ufffd", True))


def test_min_tokens_disarms_stop_strings(qwen):
    ids = qwen.encode_now(" a b a b a")
    assert len(ids) == 5
    for sizes in ([1], [2], [3, 1], [5]):
        rules = reply_rules(Sampling(stop=("b",), min_tokens=2), frozenset())
        assert read_all(qwen, rules, ids, sizes)[0] == " a b a "
    assert read_all(qwen, ReplyRules(stops=("b",), min_tokens=5), ids, [2])[0] == " a b a b a"


TEXTS = st.text(st.sampled_from("ab <>é日😀\n"), max_size=40)


@UNHURRIED
@given(TEXTS, STOPS, st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.integers(0, 6))
@example("a日b", ["日"], [1], True, 0)
def test_portions_do_not_matter(text, stops, sizes, trimmed, min_tokens):
    tokenizer = bundle("kimi_k25").tokenizer  # one token a byte: characters and stop strings are cut everywhere
    ids = [*tokenizer.encode_now(text), tokenizer.id_of("<|im_end|>")]
    rules = ReplyRules(frozenset({ids[-1]}), tuple(stops), trimmed, True, min_tokens, 1)
    whole = read_all(tokenizer, rules, ids, [len(ids)], with_logprobs=True)
    assert read_all(tokenizer, rules, ids, sizes, with_logprobs=True) == whole
    assert read_all(tokenizer, rules, ids, sizes)[::2] == whole[::2]
    if min_tokens == 0 and trimmed:
        assert whole[0] == naive_stop(text, stops)[0]
        spelt = b"".join(entry.data for entry in whole[1]).decode()
        assert spelt.startswith(whole[0])
        assert whole[2].ours or spelt == text


# ---- log-probabilities


def test_entries_have_text_bytes_and_rivals(qwen):
    ids = [*qwen.encode_now("Hi 🫠"), IM_END]
    rules = ReplyRules(frozenset({IM_END}), top_logprobs=1)
    text, entries, _ = read_all(qwen, rules, ids, [2], with_logprobs=True)
    assert text == "Hi 🫠"
    assert b"".join(entry.data for entry in entries) == text.encode()
    assert entries[0].text == "Hi" and entries[0].logprob == -0.5
    assert [(rival.text, rival.logprob) for rival in entries[0].top] == [("Hi", -0.5)]
    assert entries[-1].text.strip("\ufffd") == "" and len(entries) == len(ids) - 1
    none = read_all(qwen, ReplyRules(frozenset({IM_END})), ids, [2], with_logprobs=True)
    assert none[1] == ()
    alone = read_all(qwen, ReplyRules(frozenset({IM_END}), top_logprobs=0), ids, [2], with_logprobs=True)
    assert [entry.top for entry in alone[1]] == [()] * len(entries)


def test_entries_of_a_stop_string_are_dropped_with_it(qwen):
    ids = qwen.encode_now("one two three")
    rules = ReplyRules(stops=("wo th",), top_logprobs=0)
    for sizes in ([1], [2], [3]):
        text, entries, _ = read_all(qwen, rules, ids, sizes, with_logprobs=True)
        assert text == "one t"
        # " two" begins in the text that stays, " three" does not
        assert [entry.text for entry in entries] == ["one", " two"]


def test_an_entry_comes_with_its_text(qwen):
    reader = ChoiceReader(qwen, ReplyRules(stops=(" two three",), top_logprobs=0))
    ids = qwen.encode_now("one two four")
    pieces = [reader.feed([token], logprobs_of([token])) for token in ids]
    assert [(piece.text, [entry.text for entry in piece.logprobs]) for piece in pieces] == [
        ("one", ["one"]),
        ("", []),
        (" two four", [" two", " four"]),
    ]


def test_json_has_no_infinity(qwen):
    told = [TokenLogprob(9707, -math.inf, (TopLogprob(1, math.nan), TopLogprob(2, -12345.0)))]
    entry = ChoiceReader(qwen, ReplyRules(top_logprobs=2)).feed([9707], told).logprobs[0]
    assert [entry.logprob, *(rival.logprob for rival in entry.top)] == [-9999.0, -9999.0, -9999.0]


# ---- usage


def test_usage_sums_choices_and_counts_the_prompt_once():
    tally = Tally(91)
    for index in range(2):
        tally.see(Chunk(index, [1, 2], prompt_tokens=84))
        tally.see(Finished(index, "stop", [3], prompt_tokens=84, completion_tokens=3, cached_tokens=2))
    assert tally.usage == Usage(91, 6, 2)
    assert tally.usage.total_tokens == 97


def test_usage_by_the_workers_word():
    tally = Tally()
    assert tally.usage == Usage(0, 0, 0)
    tally.see(Chunk(0, [1], prompt_tokens=84))
    assert tally.usage == Usage(84, 1, 0)
    tally.see(Finished(0, "length", completion_tokens=5))  # what it generated while we did not listen
    tally.see(Finished(1, "length", [1, 2]))  # an engine that tells no total
    assert tally.usage == Usage(84, 7, 0)
