"""The checkpoint's chat template: messages to the prompt's text.

Jinja2's immutable sandbox with the settings transformers gives it (`apply_chat_template`, 5.24), so a template means
here what it means there.  The template is the operator's, the messages are anybody's: they only ever enter as
values.  Templates differ in what they take as a message's content, a list of parts or a plain string; each role is
tried once at load with both (`TemplateProbe`), and messages are brought into the form that works: parts in the
written order where lists are taken, else anchors and texts joined by newlines, media first.  `pipeline.prompt` counts
anchors afterwards.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from engines.base import Modality
from pipeline.errors import GatewayError
from pipeline.models.base import Anchor
from pipeline.template_probe import ContentForm, TemplateProbe, loops_over_content

MESSAGE_CHARACTERS = 200  # of a template's own error text
_MODALITY_WORDS = frozenset(modality.value for modality in Modality)


class ChatTemplate:
    """A compiled template.  Thread-safe; `render` is quick (about 1 ms a megabyte)."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, Any] | None = None) -> None:
        """`sources`: templates by name ("default", "tool_use", ...), none for a model without a template.
        `special_tokens`: variables every rendering has (bos_token, eos_token, ...).  Raises
        jinja2.TemplateSyntaxError.
        """
        environment = template_environment()
        self._special = dict(special_tokens or {})
        self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        main = self._choose(None)
        probe = TemplateProbe(lambda messages: self._fill(main, messages, {})) if main is not None else None
        self._forms = probe.forms() if probe is not None else {}
        if probe is not None and not probe.rendered:
            source = sources["default"] if "default" in sources else next(iter(sources.values()))
            if loops_over_content(environment, source):
                self._forms = dict.fromkeys(self._forms, ContentForm.EITHER)

    @property
    def takes_content_lists(self) -> bool:
        """Whether a user's message may be a list of parts."""
        return self._forms.get("user", ContentForm.STRING) is not ContentForm.STRING

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        anchors: Mapping[Modality, Anchor] | None = None,
        /,
        **variables: Any,
    ) -> str:
        """The prompt's text.

        `messages`: `content` is None, a string, or a list of `{"type": "text", "text": ...}` and `{"type": "image"}`
        (video, audio).  `anchors`: what stands for a media part in a template that takes strings.  `variables` are
        merged last into the template's: `tools`, `add_generation_prompt` (true unless given) and whatever the client
        adds; only the messages cannot be replaced.  Raises `process_messages_failed`.
        """
        template = self._choose(variables.get("tools"))
        if template is None:
            raise GatewayError("process_messages_failed", "the model's bundle has no chat template")
        formed = [self._formed(message, anchors or {}) for message in messages]
        try:
            return self._fill(template, formed, variables)
        except Exception as error:  # whatever a template does with whatever a client sent
            raise GatewayError("process_messages_failed", f"chat template: {_described(error)}") from error

    def _choose(self, tools: Any) -> jinja2.Template | None:
        """With tools the template of that name, as transformers does; else the default, else the only one."""
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    def _fill(self, template: jinja2.Template, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        known = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special}
        # as `template.render`, whose ChainMap of globals costs a third of a short prompt
        names = {**template.environment.globals, **known, **variables, "messages": messages}
        return "".join(template.root_render_func(template.new_context(names, shared=True)))

    def _formed(self, message: Mapping[str, Any], anchors: Mapping[Modality, Anchor]) -> Mapping[str, Any]:
        content = message.get("content")
        form = self._forms.get(str(message.get("role")), self._forms["user"])
        if form is ContentForm.STRING and not isinstance(content, str):
            return {**message, "content": _joined(content or (), anchors)}
        if form is ContentForm.LIST and isinstance(content, str):
            return {**message, "content": [{"type": "text", "text": content}]}
        if form is ContentForm.LIST and content is None:
            return {**message, "content": []}
        return message


def _joined(parts: Sequence[Mapping[str, Any]], anchors: Mapping[Modality, Anchor]) -> str:
    """A message as one string: every anchor, then every text, a newline between."""
    media = [anchors.get(Modality(part["type"])) for part in parts if part["type"] in _MODALITY_WORDS]
    texts = [str(part.get("text", "")) for part in parts if part["type"] not in _MODALITY_WORDS]
    return "\n".join([*(anchor.text for anchor in media if anchor is not None), *texts])


def _described(error: Exception) -> str:
    """One short line; a template's own words (raise_exception) as they are."""
    text = " ".join(str(error).split())
    if not isinstance(error, jinja2.TemplateError) or not text:
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= MESSAGE_CHARACTERS else text[:MESSAGE_CHARACTERS] + "..."


def template_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox as transformers sets it up."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here only its body counts."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set inside stays inside, as in transformers' call block


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps, unlike Jinja's own filter: no HTML escapes, keys as they come."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
