"""Outputs read back: the same words, reasoning and calls however the text is cut, and nothing a model wrote is lost."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline import parsers
from pipeline.parsers.events import Arguments, Begun, Broken, CallEvent, Ended, Text
from pipeline.parsers.hermes import HermesCalls
from pipeline.parsers.json_calls import JsonCalls, WholeArguments
from pipeline.parsers.output import CallBegun, CallGrown, Output, Said, Words
from pipeline.parsers.thinking import ThinkingSplitter, Thought, ThoughtCount, prompt_end
from pipeline.parsers.typed_value import json_value, types_of

FUNCTIONS: dict[str, Any] = {
    "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
    "g": {},
}
FORMATS: dict[str, Callable[[], Any]] = {
    "qwen": HermesCalls,
    "qwen_xml": lambda: parsers.call_parser("qwen_xml", FUNCTIONS),
    "json": lambda: JsonCalls(FUNCTIONS),
    "arguments": lambda: WholeArguments("f"),
}
# what these formats are made of, and some of what breaks them
PIECES = {
    "qwen": ["<tool_call>", "</tool_call>", "\n", '{"name": "f", ', '"arguments": ', '{"a": [1, "}"]}', "}", "<t", "x"],
    "qwen_xml": ["<tool_call>", "</tool_call>", "\n", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "<parameter=n>", "3", "<x"],  # noqa: E501
    "json": ["[", "]", "{", "}", '"name": "f"', ", ", '"parameters": {"n": 1}', '{"name": "g", "arguments": {}}', "x "],
    "arguments": ["{", "}", '"a"', ": ", "1", ", ", "[", "]", "x", " "],
}  # fmt: skip


def cut(text: str, places: Iterable[int]) -> list[str]:
    places = sorted({min(place, len(text)) for place in places})
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def joined(events: Iterable[CallEvent]) -> list[CallEvent]:
    """Neighbours of one kind made one."""
    found: list[CallEvent] = []
    for event in events:
        if isinstance(event, Text | Arguments) and found and type(found[-1]) is type(event):
            found[-1] = type(event)(found[-1].text + event.text)
        elif not (isinstance(event, Text) and not event.text):
            found.append(event)
    return found


def read(make: Callable[[], Any], pieces: Iterable[str]) -> list[CallEvent]:
    parser = make()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None)
@given(data=st.data())
def test_any_cut_gives_the_events_of_the_whole(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=14)))
    whole = read(FORMATS[name], [text])
    assert read(FORMATS[name], cut(text, data.draw(st.lists(st.integers(0, len(text)), max_size=9)))) == whole
    assert read(FORMATS[name], list(text)) == whole
    for event, after in zip(whole, whole[1:], strict=False):
        if isinstance(event, Begun):
            assert isinstance(after, Arguments | Broken)
    arguments = [event.text for event, after in zip(whole, whole[1:], strict=False)
                 if isinstance(event, Arguments) and isinstance(after, Ended)]  # fmt: skip
    assert all(isinstance(json.loads(one), dict) for one in arguments)
    if not any(isinstance(event, Ended) for event in whole):
        assert "".join(event.text for event in whole if isinstance(event, Text | Broken)) == text, "nothing is lost"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(
    arguments=st.dictionaries(st.text(), VALUES, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    name_first=st.booleans(),
    size=st.integers(1, 9),
)
def test_hermes_arguments_are_the_written_ones(
    arguments: dict[str, Any], indent: int | None, ascii_only: bool, name_first: bool, size: int
) -> None:
    call = {"name": "f", "arguments": arguments} if name_first else {"arguments": arguments, "name": "f"}
    text = f"Hm.\n<tool_call>\n{json.dumps(call, indent=indent, ensure_ascii=ascii_only)}\n</tool_call>"
    events = read(HermesCalls, [text[at : at + size] for at in range(0, len(text), size)])
    assert [type(event) for event in events] == [Text, Begun, Arguments, Ended]
    assert events[:2] == [Text("Hm.\n"), Begun("f")]
    told = events[2].text
    assert json.loads(told) == arguments
    assert told == json.dumps(arguments, separators=(",", ":"), ensure_ascii=ascii_only)


@settings(deadline=None)
@given(st.text(st.sampled_from('{}[]":,\\u0e-+.1 atrufalsn\n\x01'), max_size=25))
@example('{"a":01}')
@example('{"a":1.}')
@example('{"\\ud800":"\\u12"}')
@example('{"a":"\n"}')
@example('{"a":nul}')
def test_json_is_taken_exactly_when_python_takes_it(text: str) -> None:
    """Python's reader takes NaN and Infinity as well, which this alphabet cannot spell."""
    try:
        value = json.loads(text, strict=True)
    except ValueError:
        value = None
    events = read(lambda: WholeArguments("f"), [text])
    if isinstance(value, dict):
        assert events[2] == Ended() and json.loads(events[1].text) == value
    else:
        assert (
            events[-1] != Ended() or not text.lstrip(" \t\r\n").startswith("{") or isinstance(json_prefix(text), dict)
        )


def json_prefix(text: str) -> Any:
    """The JSON value a text begins with; what follows it does not matter to a parser of arguments."""
    return json.JSONDecoder(strict=True).raw_decode(text.lstrip(" \t\r\n"))[0]


def test_nesting_has_an_end() -> None:
    deep = '{"a":' + "[" * 100_000
    events = read(lambda: WholeArguments("f"), [deep])
    assert not any(isinstance(event, Ended) for event in events)
    assert "".join(event.text for event in events if isinstance(event, Text | Broken)) == deep


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a":1}'),  # written as a string
        ('{"name": "f"}', "{}"),
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "parameters": {"a": 1.50}, "id": [1, {}]}', '{"a":1.50}'),
    ],
)
def test_hermes_variants(call: str, arguments: str) -> None:
    assert read(HermesCalls, [f"<tool_call>{call}</tool_call>"]) == [Begun("f"), Arguments(arguments), Ended()]
    assert read(HermesCalls, [f"<tool_call>{call}"])[-1] == Ended(), "the end tag may be the end of the text"


NO_CALLS = [
    '{"name": "", "arguments": {}}',
    '{"arguments": {}}',
    '{"name": "f", "arguments": 5}',
    '{"name": "f", "arguments": []}',
    '{"name": "f", "arguments": "x"}',
    '{"name": "f", "name": "g"}',
    '{"name": "f", "arguments": {}, "arguments": 1}',
    "[]",
    "",
]


@pytest.mark.parametrize("call", NO_CALLS)
def test_hermes_calls_that_are_none(call: str) -> None:
    text = f"<tool_call>\n{call}\n</tool_call>"
    assert not any(isinstance(event, Ended) for event in read(HermesCalls, [text]))


def test_an_end_tag_inside_an_argument() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert read(HermesCalls, [text]) == [Begun("f"), Arguments('{"a":"</tool_call>"}'), Ended()]


def test_json_counts_only_for_functions_of_the_request() -> None:
    answer = 'So: {"name": "Bob", "arguments": {}} and [{"x": 1}], [1].'
    assert all(isinstance(event, Text | Broken) for event in read(FORMATS["json"], [answer]))
    listed = read(FORMATS["json"], ['[{"name": "f", "parameters": {"n": 1}}, {"name": "g", "parameters": {}}]'])
    assert listed == [Begun("f"), Arguments('{"n":1}'), Ended(), Begun("g"), Arguments("{}"), Ended()]


XML = "<tool_call>\n<function=f>\n{}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ("", "{}"),
        ("<parameter=a>\nthe sky\n</parameter>\n", '{"a":"the sky"}'),
        ("<parameter=a>\n\nline\n\n</parameter>\n", '{"a":"\\nline\\n"}'),
        ("<parameter=a>3</parameter><parameter=n>\n3\n</parameter>\n", '{"a":"3","n":3}'),
        ("<parameter=n>\nthree\n</parameter>\n", '{"n":"three"}'),
        ('<parameter=other>\n{"x": [1, 2]}\n</parameter>\n', '{"other":{"x":[1,2]}}'),
        ('<parameter=a>\n<b>"quoted" \\ </b>\n</parameter>\n', '{"a":"<b>\\"quoted\\" \\\\ </b>"}'),
    ],
)
def test_arguments_in_tags(parameters: str, arguments: str) -> None:
    text = XML.format(parameters)
    for pieces in ([text], list(text)):
        assert read(FORMATS["qwen_xml"], pieces) == [Begun("f"), Arguments(arguments), Ended()]
    bare = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert read(FORMATS["qwen_xml"], [bare]) == [Begun("f"), Arguments(arguments), Ended()]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "integer"}, " 5 ", "5"),
        ({"type": "number"}, "5", "5"),
        ({"type": "number"}, "1.50", "1.50"),
        ({"type": "integer"}, "1.5", '"1.5"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "null", '"null"'),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", "5"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/x"}]}, "[1, 2]", "[1,2]"),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"type": "object"}, '{"a": 1}', '{"a":1}'),
        ({"type": "array"}, "[1", '"[1"'),
        (None, "123456789012345678901234567890", "123456789012345678901234567890"),
        (None, "words", '"words"'),
    ],
)
def test_a_text_becomes_what_its_schema_says(schema: Any, text: str, value: str) -> None:
    assert json_value(text, types_of(schema)) == value


# ---- the output as a client is told it


def listened(
    text: str, cuts: Iterable[int] = (), *, patience: int | None = None, **rules: Any
) -> tuple[Output, list[Said]]:
    output = Output(None, HermesCalls(), patience=patience, **rules)
    said = [one for piece in cut(text, cuts) for one in output.feed(piece)]
    return output, said + output.finish()


def told(said: Iterable[Said]) -> tuple[str, list[tuple[str, str]]]:
    words, calls = "", []
    for one in said:
        if isinstance(one, Words):
            words += one.text
        elif isinstance(one, CallBegun):
            assert one.index == len(calls)
            calls.append((one.name, ""))
        elif isinstance(one, CallGrown):
            calls[one.index] = (calls[one.index][0], calls[one.index][1] + one.arguments)
    return words, calls


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES["qwen"]), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.sampled_from([None, 0, 5]),
    st.booleans(),
)
def test_what_is_told_does_not_depend_on_the_cut(text: str, cuts: list[int], patience: int | None, one: bool) -> None:
    whole, said = listened(text, patience=patience, one_call=one)
    again, said_again = listened(text, cuts, patience=patience, one_call=one)
    assert told(said) == told(said_again)
    assert (whole.made, whole.is_half_told) == (again.made, again.is_half_told)
    assert len(told(said)[1]) <= (1 if one else 99) + whole.is_half_told


def test_a_call_that_breaks_is_text_unless_it_was_told() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 50
    patient, said = listened(text, patience=None)
    assert told(said) == (text, []) and patient.finish_reason("stop") == "stop"
    hasty, said = listened(text, patience=20)
    assert told(said) == (text, [("f", '{"a":"' + "x" * 50)]) and hasty.finish_reason("length") == "length"


def test_text_behind_calls_is_dropped_and_broken_calls_are_not() -> None:
    text = '<tool_call>{"name": "f"}</tool_call> and \n<tool_call>{bad'
    output, said = listened(text)
    assert told(said) == ("<tool_call>{bad", [("f", "{}")])
    assert output.finish_reason("stop") == output.finish_reason("length") == "tool_calls"
    assert output.finish_reason("abort") == "abort"


# ---- reasoning


def split(text: str, cuts: Iterable[int] = (), **begins: Any) -> tuple[str, str]:
    output = Output(ThinkingSplitter(**begins), None)
    said = [one for piece in cut(text, cuts) for one in output.feed(piece)] + output.finish()
    assert all(isinstance(one, Words | Thought) for one in said)
    return ("".join(one.text for one in said if isinstance(one, Thought)), told(said)[0])


@pytest.mark.parametrize(
    ("text", "inside", "thought", "answer"),
    [
        ("<think>\nhmm\n</think>\n\nAnswer", False, "\nhmm\n", "\n\nAnswer"),
        ("hmm\n</think>\n\nAnswer", True, "hmm\n", "\n\nAnswer"),
        ("<think>\nhmm</think>Answer", True, "\nhmm", "Answer"),  # the prompt's tag repeated
        ("Answer", False, "", "Answer"),
        ("only that", True, "only that", ""),
        ("<think>only that", False, "only that", ""),
        ("So <think>hmm</think> it <think>is</think>", False, "hmm", "So  it <think>is</think>"),
        ("no </think> here", False, "", "no </think> here"),
        ("", True, "", ""),
        ("a <thin", False, "", "a <thin"),
    ],
)
def test_reasoning_is_what_stands_between_tags(text: str, inside: bool, thought: str, answer: str) -> None:
    for cuts in ((), range(len(text))):
        assert split(text, cuts, inside=inside) == (thought, answer)


def test_json_at_once_is_no_reasoning() -> None:
    assert split(' {"x": 1}', inside=True, is_json=True) == ("", ' {"x": 1}')
    assert split('hmm</think>{"x": 1}', inside=True, is_json=True) == ("hmm", '{"x": 1}')
    assert split('{"x": 1}', inside=True) == ('{"x": 1}', "")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "\n", "a ", "{"]), max_size=9).map("".join),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_reasoning_does_not_depend_on_the_cut(text: str, cuts: list[int], inside: bool, is_json: bool) -> None:
    whole = split(text, inside=inside, is_json=is_json)
    assert split(text, cuts, inside=inside, is_json=is_json) == whole
    splitter = ThinkingSplitter(inside=inside, is_json=is_json)
    splitter.feed(text)
    splitter.finish()
    assert "".join(text[at] for at in range(len(text)) if splitter.is_answer(at)) == whole[1]


@pytest.mark.parametrize(
    ("prompt", "continuation", "inside"),
    [
        ("...assistant\n", "", None),
        ("...assistant\n<think>\n", "", True),
        ("...assistant\n<think>\n\n</think>\n\n", "", False),
        ("what is <think><|im_end|>\n<|im_start|>assistant\n", "", None),
        ("...assistant\n<think>\nFirst", "First", True),
        ("...assistant\n<think>\nFirst</think>So", "First</think>So", False),
        ("...assistant\n<think>First", "<think>First", True),
        ("...assistant\nThe sky", "The sky", None),
    ],
)
def test_where_the_prompt_ends(prompt: str, continuation: str, inside: bool | None) -> None:
    assert prompt_end(prompt, continuation) is inside
    assert parsers.begins_inside("qwen3", inside) is bool(inside)
    assert parsers.begins_inside("deepseek_r1", inside) is (inside is not False)


@pytest.mark.parametrize(
    ("ids", "inside", "count"),
    [
        ([7, 7], False, 0),
        ([1, 7, 7, 2, 7], False, 2),
        ([7, 7, 2, 7, 1, 7], True, 2),
        ([1, 7, 2], True, 1),
        ([7, 9], True, 1),  # the end token is no reasoning
    ],
)
def test_reasoning_tokens_are_those_between_the_tags(ids: list[int], inside: bool, count: int) -> None:
    whole = ThoughtCount(1, 2, inside=inside, ends={9})
    whole.feed(ids)
    single = ThoughtCount(1, 2, inside=inside, ends={9})
    for token in ids:
        single.feed([token])
    assert whole.tokens == single.tokens == count
    blind = ThoughtCount(None, None, inside=inside, ends=())
    blind.feed(ids)
    assert blind.tokens == 0


def test_text_that_was_told_is_not_remembered() -> None:
    for script in (HermesCalls(), ThinkingSplitter(inside=True), ThinkingSplitter(inside=False)):
        for _ in range(100):
            script.feed("word ")
        assert script._raw == [] and len(script._buffer) <= 5
