"""Finding out what a chat template takes as a message's content.

Tried rather than read: every role is rendered with a marked text, once as a string and once as a list of one text
part.  A form works when the mark comes out as text; a list that came out as Python's or JSON's spelling of a list, or
not at all, or raised, does not.  Templates that refuse every trial (they want variables nobody has yet) are read
instead: one that loops over a message's content takes lists.  `pipeline.template` is the only user.
"""

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

_MARK = "mediagate-probe"
_SPELT_OUT = re.compile(rf"""["']text["']\s*:\s*["']{_MARK}""")


class ContentForm(enum.Enum):
    """What one role's content must be."""

    STRING = enum.auto()
    LIST = enum.auto()
    EITHER = enum.auto()


class TemplateProbe:
    """The trials of one template.  `render`: messages to text, raising what the template raises."""

    def __init__(self, render: Callable[[Sequence[Mapping[str, Any]]], str]) -> None:
        self._render = render
        self.rendered = False  # whether any trial of a user's message came through

    def forms(self) -> dict[str, ContentForm]:
        """The form of each role; one whose trials say nothing (a template may drop a role) follows the user's."""
        user = self._form("user")
        self.rendered = user is not None
        users = user or ContentForm.STRING
        return {"user": users, **{role: self._form(role) or users for role in ("system", "assistant", "tool")}}

    def _form(self, role: str) -> ContentForm | None:
        takes_string = self._shows(role, _MARK)
        takes_list = self._shows(role, [{"type": "text", "text": _MARK}])
        if takes_string and takes_list:
            return ContentForm.EITHER
        if takes_string or takes_list:
            return ContentForm.STRING if takes_string else ContentForm.LIST
        return None

    def _shows(self, role: str, content: Any) -> bool:
        return any(self._came_through(conversation) for conversation in _conversations(role, content))

    def _came_through(self, conversation: Sequence[Mapping[str, Any]]) -> bool:
        try:
            text = self._render(conversation)
        except Exception:  # a template may raise anything about a form or a role it does not take
            return False
        return _MARK in text and not _SPELT_OUT.search(text)


def _conversations(role: str, content: Any) -> list[list[dict[str, Any]]]:
    """Conversations that show `content` in a message of `role`, as templates expect turns to follow each other."""
    tried = {"role": role, "content": content}
    if role == "user":
        return [[tried], [{"role": "system", "content": "s"}, tried]]
    if role == "system":
        return [[tried, _user("string")], [tried, _user("list")]]
    if role == "assistant":
        return [[_user(form), tried, _user(form)] for form in ("string", "list")]
    call = {"id": "call_000000000", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {**tried, "name": "f", "tool_call_id": "call_000000000"}
    return [[_user(form), asked, result] for form in ("string", "list")]


def _user(form: str) -> dict[str, Any]:
    return {"role": "user", "content": "u" if form == "string" else [{"type": "text", "text": "u"}]}


def loops_over_content(environment: jinja2.Environment, source: str) -> bool:
    """Whether a template walks the parts of a message's content: directly, through a variable, or through a macro."""
    tree = environment.parse(source)
    known: set[str] = set()  # names that stand for a content

    def is_content(node: nodes.Node) -> bool:
        if isinstance(node, nodes.Name):
            return node.name in known
        if isinstance(node, nodes.Getattr):
            return node.attr == "content" or is_content(node.node)
        if isinstance(node, nodes.Getitem):
            named = isinstance(node.arg, nodes.Const) and node.arg.value == "content"
            return named or is_content(node.node)
        return isinstance(node, nodes.Filter) and node.node is not None and is_content(node.node)

    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    while True:
        before = len(known)
        for assignment in tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name) and is_content(assignment.node):
                known.add(assignment.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            if macro is not None:
                known.update(name.name for name, value in zip(macro.args, call.args, strict=False) if is_content(value))
        if len(known) == before:
            return any(is_content(loop.iter) for loop in tree.find_all(nodes.For))
