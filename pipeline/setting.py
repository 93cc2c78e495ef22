"""How a setting is declared: what stands in a field's annotation, and the walk over all of them.

A declaration has one sentence, one range, one default, its flags and its variables.  Help, checks, docs and tests read
the same declarations, so they cannot drift apart.  `pipeline.sections` holds them, `pipeline.resolve` the precedence.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

# The groups of --help, in the order of a request.
LISTENING = "Listening"
TLS = "TLS"
ADMISSION = "Admission"
MODEL = "Model and prompt"
MEDIA = "Media"
POOL = "Preprocessing pool"
TRANSPORT = "Tensor transport"
WORKERS = "Engine workers"
ROUTING = "Choosing a worker"
PAIRS = "Disaggregated serving"
RETRIES = "Retries and circuit breakers"
RESPONSES = "Kept responses"
STOPPING = "Stopping"
OBSERVING = "Logs, metrics and timing"
GROUPS = (
    LISTENING,
    TLS,
    ADMISSION,
    MODEL,
    MEDIA,
    POOL,
    TRANSPORT,
    WORKERS,
    ROUTING,
    PAIRS,
    RETRIES,
    RESPONSES,
    STOPPING,
    OBSERVING,
)

Source = Literal["flag", "env", "legacy env", "default"]
MOST_SHOWN = 100  # characters of a value in the line of the start; lists of workers have no end


class Setting(msgspec.Struct, frozen=True):
    """Where a field's value comes from; without flags and variable it is fixed.

    variable, legacy  the environment variable and its older name
    deprecated        the variable works and warns
    stops             a bad variable stops the start instead of warning
    bad_variable      what is said of a bad variable, where SMG's words are kept ("{value}" is put in)
    unit, scale       of the flag's number; times `scale` it is the field's value
    computed          words for a default that depends on the machine or on other settings
    refusal           what follows " - " when the value is out of range
    in_parser         out of range is a usage error
    later             known values this version does not have yet, and what is missing
    never             known values that there will not be, and the sentence that says why
    inverted          the flag switches the field off
    comma             the flag takes one list with commas
    words             the flag stands once for each value of a list, which has these words (names for --help)
    secret            never shown
    """

    group: str
    flags: tuple[str, ...] = ()
    variable: str = ""
    legacy: str = ""
    deprecated: bool = False
    stops: bool = False
    bad_variable: str = ""
    unit: str = ""
    scale: float = 1.0
    computed: str = ""
    refusal: str = ""
    in_parser: bool = False
    later: Mapping[str, str] = {}
    never: Mapping[str, str] = {}
    inverted: bool = False
    comma: bool = False
    words: str = ""
    secret: bool = False


def setting(group: str, flags: str, text: str, *, ge: float | None = None, le: float | None = None, **more: Any) -> Any:
    """A field's annotation: its sentence `text`, its range and its Setting.  `flags` are separated by blanks."""
    return msgspec.Meta(ge=ge, le=le, description=text, extra={"setting": Setting(group, tuple(flags.split()), **more)})


def seconds(group: str, flags: str, text: str, *, ge: float = 0, **more: Any) -> Any:
    """A duration in seconds."""
    return setting(group, flags, text, ge=ge, unit="s", **more)


def size(group: str, flags: str, text: str, *, ge: float = 1, **more: Any) -> Any:
    """A number of bytes."""
    return setting(group, flags, text, ge=ge, unit="bytes", **more)


class Declared(msgspec.Struct, frozen=True):
    """One field as declared.  `kind` is int, float, bool, str or tuple; `choices` are a Literal's words."""

    section: str
    name: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    default: Any
    ge: float | None
    le: float | None
    text: str
    setting: Setting

    @property
    def key(self) -> str:
        """How the setting is called in listings and in `Config.sources`."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        return self.setting.flags[0] if self.setting.flags else ""

    @property
    def field(self) -> str:
        """How error messages call it: the flag in field form, as SMG does, else the variable."""
        if self.setting.inverted or not self.flag:
            return self.setting.variable or self.name
        return "worker_url" if self.flag == "--worker-urls" else self.flag[2:].replace("-", "_")

    @property
    def title(self) -> str:
        """How listings call it: what it is set with, or the field in words when nothing sets it."""
        words = f"{self.section} {self.name.removesuffix('_s')}".replace("_", " ")
        return self.flag or self.setting.variable or words

    @property
    def is_fixed(self) -> bool:
        return not self.setting.flags and not self.setting.variable

    @property
    def known(self) -> tuple[str, ...]:
        """Every word the command line knows, those that are refused by name included."""
        return (*self.choices, *self.setting.later, *self.setting.never)

    def shown(self, value: Any) -> str:
        """A value in the flag's own unit and sense, as help, listings and docs print it."""
        if self.setting.secret and value is not None:
            return "set"
        if value is None:
            return self.setting.computed or "unset"
        if isinstance(value, bool):
            return "on" if value != self.setting.inverted else "off"
        if isinstance(value, tuple):
            return (", " if self.setting.comma or self.setting.words else " ").join(value) or "none"
        if isinstance(value, float):
            return f"{value / self.setting.scale:.10g}"
        return str(value)

    def shown_default(self) -> str:
        return self.setting.computed or self.shown(self.default)

    def misfit(self, value: float) -> str:
        """Why the number is out of range; empty when it is not.  `value` is in the flag's unit."""
        low, high = self.ge, self.le
        if (low is None or value >= low) and (high is None or value <= high):
            return ""
        if self.setting.refusal:
            return self.setting.refusal
        if low is not None and high is not None:
            return f"Must be between {low:.15g} and {high:.15g}"
        return f"Must be at least {low:.15g}" if low is not None else f"Must be at most {high:.15g}"


def _declared(section: str, field: msgspec.structs.FieldInfo, hint: Any) -> Declared | None:
    """`hint` is Annotated[kind, setting(...)], or that | None."""
    optional = get_origin(hint) in (Union, types.UnionType)
    annotated = get_args(hint)[0] if optional else hint
    if get_origin(annotated) is not Annotated:
        return None
    kind, meta = get_args(annotated)[:2]
    choices = tuple(get_args(kind)) if get_origin(kind) is Literal else ()
    return Declared(
        section=section,
        name=field.name,
        kind=str if choices else (get_origin(kind) or kind),
        optional=optional,
        choices=choices,
        default=field.default,
        ge=meta.ge,
        le=meta.le,
        text=meta.description,
        setting=meta.extra["setting"],
    )


class Resolved(msgspec.Struct, frozen=True):
    """What a struct of sections is as well once every setting has its value.

    `sources` has a key "section.field" for each setting; `warnings` are to be logged at WARN, once, at start.
    """

    sources: Mapping[str, Source] = {}
    warnings: tuple[str, ...] = ()

    @classmethod
    def declared(cls) -> tuple[Declared, ...]:
        """The settings it has."""
        raise NotImplementedError

    def shown(self, one: Declared) -> str:
        """A value as a line of text shows it, with its unit."""
        value = getattr(getattr(self, one.section), one.name)
        return one.shown(value) + (f" {one.setting.unit}" if one.setting.unit and value is not None else "")

    def listing(self) -> list[str]:
        """Every setting with its source, one a line."""
        return [f"{one.title} = {self.shown(one)} ({self._source(one)})" for one in self.declared()]

    def checked(self) -> str:
        """What --check-config prints: every setting, then what is warned of."""
        return "\n".join([*self.listing(), *(f"warning: {line}" for line in self.warnings)]) + "\n"

    def summary(self) -> str:
        """What somebody has set, in one line, and where."""
        given = [one for one in self.declared() if self._source(one) not in ("default", "fixed")]
        words = [f"{one.title}={_short(self.shown(one))} ({self._source(one)})" for one in given]
        return f"settings: {', '.join(words) or 'none given'}; all others have their defaults, see --check-config"

    def _source(self, one: Declared) -> str:
        return "fixed" if one.is_fixed else self.sources.get(one.key, "default")


def _short(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def declarations(config: type[msgspec.Struct]) -> Iterator[Declared]:
    """Every declared setting of a struct of sections, in order."""
    for section in msgspec.structs.fields(config):
        if not (isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)):
            continue
        hints = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            one = _declared(section.name, field, hints[field.name])
            if one is not None:
                yield one
