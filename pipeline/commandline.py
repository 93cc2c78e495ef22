"""A command line made of declared settings, with its help; the same for the gateway and the sidecar.

Nothing here prints or exits: what cannot be read is a ConfigError with exit status 2.
"""

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from pipeline.config import EXIT_CODES, EXIT_USAGE, ConfigError
from pipeline.resolve import read
from pipeline.setting import TLS, Declared

ALONE = "Instead of serving"  # the group of flags that are actions
_ALIKE = 0.75  # of two flags without their dashes, as difflib measures


class Parser(argparse.ArgumentParser):
    """Flags of `declared` settings, in the order of `groups`, with help; `actions` are flags that print and stop.

    `refused` flags are taken, with whatever follows them, and stand in the namespace's list of that name: they are
    answered after parsing.
    """

    def __init__(
        self,
        prog: str,
        usage: str,
        description: str,
        *,
        declared: Sequence[Declared],
        groups: Sequence[str],
        actions: Mapping[str, str],
        refused: Iterable[str],
        examples: str,
    ) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=_epilog(declared, examples),
            formatter_class=_HelpFormat,
            add_help=False,
            allow_abbrev=False,
        )
        self.groups = {title: self.add_argument_group(title) for title in (*groups, ALONE)}
        for one in declared:
            if one.flag:
                self.groups[one.setting.group].add_argument(*one.setting.flags, dest=one.key, **_flag_shape(one))
        self.set_defaults(refused=[])
        for flag in refused:
            self.add_argument(flag, action=_Refused, nargs="*", dest="refused", help=argparse.SUPPRESS)
        for flag, text in actions.items():
            names = ("-h", flag) if flag == "--help" else (flag,)
            self.groups[ALONE].add_argument(*names, action="store_true", help=text)

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """What is on the command line, by destination; ConfigError when it cannot be read."""
        found, unknown = self.parse_known_args(list(argv))
        if unknown:
            hints = [f"did you mean {near}?" for word in unknown if (near := self._near(word))]
            self.error("; ".join([f"unrecognized arguments: {' '.join(unknown)}", *dict.fromkeys(hints)]))
        return vars(found)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: error: {message}\nTry python {self.prog} --help.", EXIT_USAGE)

    def _near(self, word: str) -> str | None:
        """The flag that was meant: one that begins so, else the one most alike."""
        bare = word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()
        if not word.startswith("-") or len(bare) < 3:
            return None
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        flags = [flag.removeprefix("--") for action in shown for flag in action.option_strings]
        longer = [flag for flag in flags if flag.startswith(bare)]
        near = longer[:1] or difflib.get_close_matches(bare, flags, 1, _ALIKE)
        return f"--{near[0]}" if near else None


class _HelpFormat(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class _OneMore(argparse.Action):
    """A flag that stands once for each value: the words behind it, joined by a blank."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), " ".join(values)))


class _Refused(argparse.Action):
    """A flag that is known and not served: remembered, with whatever follows it."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        namespace.refused = [*namespace.refused, option]


def _flag_shape(one: Declared) -> dict[str, Any]:
    """How argparse takes the flag.  Nothing is stored unless the flag is given."""
    facts: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _flag_help(one)}
    if one.kind is bool and one.optional:
        return {**facts, "action": argparse.BooleanOptionalAction}
    if one.kind is bool:
        return {**facts, "action": "store_const", "const": not one.setting.inverted}
    if one.known:
        return {**facts, "type": _chooser(one), "metavar": "{" + ",".join(one.choices) + "}"}
    if one.setting.words:
        names = tuple(one.setting.words.split())
        alone = len(names) == 1
        return {**facts, "action": _OneMore, "nargs": 1 if alone else "+", "metavar": names[0] if alone else names}
    if one.kind is tuple and not one.setting.comma:
        words = {"workers.urls": "URL", "tls.ca_cert_paths": "FILE", "model.aliases": "ALIAS=MODEL"}
        return {**facts, "action": "extend", "nargs": "*", "metavar": words.get(one.key, "WORD")}
    return {**facts, "type": _reader(one), "metavar": _metavar(one)}


def _chooser(one: Declared) -> Any:
    """Takes what is known, to be refused with a sentence where this version does not have it; offers what works."""

    def choose(text: str) -> str:
        if text in one.known:
            return text
        offered = ", ".join(map(repr, one.choices))
        near = difflib.get_close_matches(text.lower().replace("-", "_"), one.choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {offered}){hint}")

    return choose


def _reader(one: Declared) -> Any:
    def read_flag(text: str) -> Any:
        if not text and (one.setting.secret or one.setting.group == TLS):  # an unset "$KEY" must not open the gateway
            raise argparse.ArgumentTypeError("is empty; leave the flag out when that is meant")
        try:
            value = read(one, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"expected {error}, got {text!r}") from error
        if one.setting.in_parser and one.misfit(value):
            raise argparse.ArgumentTypeError(f"expected a non-negative integer, got {text!r}")
        return value

    return read_flag


def _metavar(one: Declared) -> str:
    named = {"bytes": "BYTES", "s": "SECONDS", "ms": "MS", "MiB": "MIB"}.get(one.setting.unit)
    return named or ("N" if one.kind in (int, float) else "HOSTS" if one.setting.comma else one.name.upper())


def _flag_help(one: Declared) -> str:
    facts = [one.setting.unit] if one.setting.unit else []
    if not one.setting.inverted:
        facts.append(f"default {one.shown_default()}")
    if one.setting.variable:
        facts.append(f"variable {one.setting.variable}")
    if one.setting.legacy:
        facts.append(f"older {one.setting.legacy}")
    return (f"{one.text} [{'; '.join(facts)}]" if facts else one.text).replace("%", "%%")


def _epilog(declared: Sequence[Declared], examples: str) -> str:
    alone = [one for one in declared if one.setting.variable and not one.flag]
    variables = "\n".join(f"  {one.setting.variable:<31} {_flag_help(one).split('; variable')[0]}]" for one in alone)
    codes = ", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
    return f"variables without a flag:\n{variables}\n\nexit status: {codes}\n\nexamples:\n{examples}".replace("%", "%%")
