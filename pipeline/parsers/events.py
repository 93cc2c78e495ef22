"""What a parser of tool calls finds in a model's output.

The joined events do not depend on how the output was cut: whatever a parser decides, it decides at a character, never
at the end of a portion.  `pipeline.parsers.output` makes of events what a client may be told.
"""

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Ordinary text."""

    text: str


class Begun(msgspec.Struct, frozen=True):
    """A call of this function begins; its arguments follow."""

    name: str


class Arguments(msgspec.Struct, frozen=True):
    """The next characters of the arguments: compact JSON, joined one object when the call has ended."""

    text: str


class Ended(msgspec.Struct, frozen=True):
    """The call that was begun is whole."""


class Broken(msgspec.Struct, frozen=True):
    """What began like a call is none: its characters as the model wrote them, markup included."""

    text: str


CallEvent = Text | Begun | Arguments | Ended | Broken
