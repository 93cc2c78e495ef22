"""Prompts against what the real gateway sent; templates, anchors and expansion against naive rules."""

import json
from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import Modality, Range
from pipeline.errors import GatewayError
from pipeline.models.base import Anchor, Replacement
from pipeline.prompt import Expanded, check_anchors, expand
from pipeline.template import ChatTemplate, template_environment
from pipeline.template_probe import loops_over_content
from tests.pipeline.bundles import bundle

RECORDS = {
    case["name"]: case
    for case in json.loads((Path(__file__).parent.parent / "data" / "prompts" / "qwen3_vl.json").read_text())
}
# text stands before a picture in a message of these: the records have the picture first, we keep the written order
REORDERED = {"two_images", "system_image", "video_then_image"}
ANCHOR_IDS = {"image": 151655, "video": 151656}
IMAGE = Anchor(7, "<image>")
UNHURRIED = settings(deadline=None)  # the first example may load a bundle


def recorded_ids(case):
    return [token for token, times in case["runs"] for _ in range(times)]


def messages_of(case, *, media_first=False):
    """The request's messages as `pipeline.protocols` hands them over."""
    found = []
    for message in json.loads(json.dumps(case["messages"])):
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                part if part["type"] == "text" else {"type": part["type"].removesuffix("_url")} for part in content
            ]
            message["content"] = sorted(parts, key=lambda part: part["type"] == "text") if media_first else parts
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        found.append({**message, "role": message["role"].replace("developer", "system")})
    return found


def items_of(case):
    """The modality of each item in prompt order, and what the record shows in place of its anchor."""
    ids = recorded_ids(case)
    ranges = sorted((*span, media["modality"]) for media in case["media"] for span in media["ranges"])
    return [(word, ids[offset : offset + length], Range(offset, length)) for offset, length, word in ranges]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_rendered_and_encoded_like_the_recorded_message(name):
    case, loaded = RECORDS[name], bundle("qwen3_vl")
    text = loaded.template.render(messages_of(case, media_first=name in REORDERED), tools=case.get("tools"))
    assert text == case["text"]
    ids = loaded.tokenizer.encode_now(text)
    items = items_of(case)
    expanded = expand(
        ids, [ANCHOR_IDS[word] for word, _, _ in items], [Replacement(tokens, ((0, 1),)) for _, tokens, _ in items]
    )
    assert expanded.ids == recorded_ids(case)
    assert expanded.structural == [place for _, _, place in items]


def test_parts_keep_the_written_order_where_the_recorded_gateway_moves_them():
    loaded = bundle("qwen3_vl")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert loaded.template.takes_content_lists
    two = loaded.template.render(messages_of(RECORDS["two_images"]))
    assert two == f"<|im_start|>user\nFirst:{picture} second:{picture}<|im_end|>\n<|im_start|>assistant\n"
    system = loaded.template.render(messages_of(RECORDS["system_image"]))
    assert system.startswith(f"<|im_start|>system\nBe brief.{picture}<|im_end|>\n")


def test_an_anchor_in_text_alone_is_refused():
    ids = bundle("qwen3_vl").tokenizer.encode_now(RECORDS["anchor_in_text_only"]["text"])
    counts = {
        Modality.VIDEO: (Anchor(151656, "<|video_pad|>"), 0),
        Modality.IMAGE: (Anchor(151655, "<|image_pad|>"), 0),
    }
    with pytest.raises(GatewayError) as refused:
        check_anchors(ids, counts)
    assert (refused.value.code, refused.value.status) == ("multimodal_prompt_contract_mismatch", 400)
    assert refused.value.message == (
        "rendered image anchor count mismatch: expected 0, found 1; "
        "verify the chat template contract and escape literal media anchors in user text"
    )


def test_every_modality_is_counted_and_a_shared_token_once():
    image, video = Anchor(7, "<image>"), Anchor(8, "<video>")
    check_anchors([1, 7, 8, 7], {Modality.IMAGE: (image, 2), Modality.VIDEO: (video, 1)})
    with pytest.raises(GatewayError, match="rendered video anchor count mismatch: expected 2, found 1"):
        check_anchors([1, 7, 8, 7], {Modality.IMAGE: (image, 2), Modality.VIDEO: (video, 2)})
    check_anchors([7, 7, 7], {Modality.IMAGE: (image, 1), Modality.VIDEO: (image, 2)})
    with pytest.raises(GatewayError, match="rendered video anchor count mismatch: expected 2, found 3"):
        check_anchors([7, 7, 7], {Modality.IMAGE: (image, 0), Modality.VIDEO: (image, 2)})


def naive_expand(ids, anchors, replacements):
    """Token by token, as the rule reads."""
    waiting = list(range(len(anchors)))
    out, structural, features = [], {}, {}
    for token in ids:
        item = next((item for item in waiting if anchors[item] == token), None)
        if item is None:
            out.append(token)
            continue
        waiting.remove(item)
        new = replacements[item]
        structural[item] = Range(len(out) - new.prefix, len(new.token_ids) + new.prefix)
        features[item] = tuple(Range(len(out) + offset, length) for offset, length in new.features)
        out.extend(new.token_ids)
    every = range(len(anchors))
    return Expanded(out, [structural[item] for item in every], [features[item] for item in every])


@st.composite
def expansions(draw):
    anchors = draw(st.lists(st.sampled_from([100, 101]), max_size=8))
    replacements = []
    for _ in anchors:
        tokens = draw(st.lists(st.integers(98, 102), max_size=6))
        runs = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=3))
        replacements.append(Replacement(tokens, tuple(runs), draw(st.integers(0, 1))))
    ids = [1]
    for token in draw(st.permutations(anchors)):
        ids += [*draw(st.lists(st.integers(1, 5), max_size=4)), token]
    return ids, anchors, replacements


@UNHURRIED
@given(expansions())
def test_expansion_is_the_naive_one(drawn):
    ids, anchors, replacements = drawn
    assert expand(ids, anchors, replacements) == naive_expand(ids, anchors, replacements)


def test_two_hundred_items_in_a_long_prompt():
    ids = [token for item in range(200) for token in (*range(1000, 1500), 100 + item % 2)]
    anchors = [100 + item % 2 for item in range(200)]
    replacements = [Replacement([9] * 300, ((1, 298),), 1)] * 200
    assert expand(ids, anchors, replacements) == naive_expand(ids, anchors, replacements)


@pytest.mark.parametrize(
    ("ids", "anchors", "prefix"), [([1, 2], [7], 0), ([7, 7], [7], 0), ([7], [7], 1), ([1, 7], [7, 7], 0)]
)
def test_expansion_refuses_other_anchors_than_promised(ids, anchors, prefix):
    with pytest.raises(ValueError):
        expand(ids, anchors, [Replacement([1], (), prefix)] * len(anchors))


# ---- what templates take

CHATML_STRING = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '|' }}{% endfor %}"
TRIMMED_STRING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
AS_JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}|{% endfor %}"
LISTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}|{% endfor %}"
)
EITHER = (
    "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}|{% endfor %}"
)
# the system message is trimmed as a string whatever came, other turns loop: a shape several checkpoints ship
MIXED = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content | trim }}|"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
)
STRICT_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}<{{ m.role }}>{{ m.content + '|' }}{% endfor %}"
)
PARTS = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("source", "lists", "rendered"),
    [
        (CHATML_STRING, False, "<user><image>\na\nb|"),
        (TRIMMED_STRING, False, "<user><image>\na\nb|"),
        (STRICT_TURNS, False, "<user><image>\na\nb|"),
        (LISTS_ONLY, True, "<user><image>ab|"),
        (EITHER, True, "<user>a<image>b|"),
        (MIXED, True, "<user>a<image>b|"),
    ],
)
def test_parts_come_in_the_form_a_template_takes(source, lists, rendered):
    template = ChatTemplate({"default": source})
    assert template.takes_content_lists is lists
    assert template.render([{"role": "user", "content": PARTS}], {Modality.IMAGE: IMAGE}) == rendered
    plain = template.render([{"role": "user", "content": "ab"}])
    assert plain == "<user>ab|"


def test_each_role_has_its_own_form():
    template = ChatTemplate({"default": MIXED})
    system = {"role": "system", "content": [{"type": "text", "text": "be brief"}, {"type": "text", "text": "or not"}]}
    text = template.render([system, {"role": "user", "content": PARTS}])
    assert text == "<system>be brief\nor not|<user>a<image>b|"


def test_nothing_is_a_content_too():
    call = {"role": "assistant", "content": None}
    assert ChatTemplate({"default": CHATML_STRING}).render([call]) == "<assistant>|"
    assert ChatTemplate({"default": LISTS_ONLY}).render([call]) == "<assistant>|"


def test_a_list_spelt_out_is_no_list_taken():
    # neither form comes through: a string arrives in quotes, which is this template's way, and stays one
    assert not ChatTemplate({"default": AS_JSON}).takes_content_lists


@pytest.mark.parametrize(
    ("source", "lists"),
    [
        (CHATML_STRING, False),
        (LISTS_ONLY, True),
        (EITHER, True),
        (MIXED, True),
        (AS_JSON, False),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}", False),
    ],
)
def test_templates_that_cannot_be_tried_are_read(source, lists):
    assert loops_over_content(template_environment(), source) is lists
    never = "{% if not secret is defined %}{{ raise_exception('secret') }}{% endif %}" + source
    assert ChatTemplate({"default": never}).takes_content_lists is lists


@pytest.mark.parametrize(
    ("name", "lists"),
    [("qwen3_5", True), ("llava15", True), ("kimi_k25", True), ("llama4", True), ("inkling", True), ("phi35_v", False)],
)
def test_bundles_templates(name, lists):
    assert bundle(name).template.takes_content_lists is lists


def test_a_string_template_of_a_bundle_puts_media_first():
    found = bundle("phi35_v").template.render(
        [{"role": "user", "content": PARTS}], {Modality.IMAGE: Anchor(32044, "<|image|>")}
    )
    assert found == "<|user|>\n<|image|>\na\nb<|end|>\n<|assistant|>\n"


# ---- the environment


def render(source, messages=(), **variables):
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(list(messages), **variables)


def test_environment_is_transformers():
    assert render("{{ x | tojson }}", x={"b": "é<'>&", "a": None}) == '{"b": "é<\'>&", "a": null}'
    assert render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    loop = "{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
    assert render("{% for i in range(9) %}" + loop + "{% endfor %}") == "013"
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert render("{{ bos_token }}{{ add_generation_prompt }}{{ tools is none }}") == "<s>TrueTrue"
    assert render("{% generation %}a{% set b = 1 %}{% endgeneration %}{{ b is defined }}") == "aFalse"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10


def test_variables_are_merged_last_except_messages():
    source = "{{ messages | length }}{{ bos_token }}{{ add_generation_prompt }}{{ self_ }}"
    client = {"bos_token": "B", "add_generation_prompt": False, "self_": "s", "messages": [], "self": 1, "anchors": 2}
    found = ChatTemplate({"default": source}, {"bos_token": "<s>"}).render([{"role": "user", "content": "x"}], **client)
    assert found == "1BFalses"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('No  tools\nhere') }}", "chat template: No tools here"),
        ("{{ nothing.there }}", "chat template: 'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "chat template: TypeError: unsupported operand type(s) for +: 'int' and 'str'"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__' of 'str' object is unsafe."),
        ("{% if messages.append(1) %}{% endif %}", None),
        ("{{ raise_exception('x' * 500) }}", "chat template: " + "x" * 200 + "..."),
    ],
)
def test_a_failing_template_is_a_short_refusal(source, said):
    with pytest.raises(GatewayError) as refused:
        render(source)
    assert (refused.value.code, refused.value.status) == ("process_messages_failed", 400)
    assert said is None or refused.value.message == said
    assert len(refused.value.message) < 240


def test_messages_are_values_not_templates():
    hostile = "{{ raise_exception('x') }}{% raw %}{{ ''.__class__ }}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": hostile}]) == hostile
    reaching = [{"role": "user", "content": "{0.__class__}"}]
    assert render("{{ messages[0].content.format(messages) }}", reaching) == ""


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "with tools"})
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"type": "function"}]) == "with tools"
    assert ChatTemplate({"rag": "only"}).render([]) == "only"


def test_no_template_and_a_broken_one():
    assert not ChatTemplate({}).takes_content_lists
    with pytest.raises(GatewayError, match="no chat template"):
        ChatTemplate({}).render([])
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate({"default": "{% if %}"})
