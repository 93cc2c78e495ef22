"""How a declared setting becomes a flag of argparse, with its help; the same for the gateway and the sidecar.

Nothing here prints or exits: what cannot be read is a ConfigError with exit status 2.
"""

import argparse
from typing import Any, NoReturn

from pipeline.config import EXIT_USAGE, ConfigError
from pipeline.resolve import read
from pipeline.setting import TLS, Declared


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: error: {message}\nTry python {self.prog} --help.", EXIT_USAGE)


class HelpFormat(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


class _OneMore(argparse.Action):
    """A flag that stands once for each value: the words behind it, joined by a blank."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), " ".join(values)))


def flag_shape(one: Declared) -> dict[str, Any]:
    """How argparse takes the flag.  Nothing is stored unless the flag is given."""
    facts: dict[str, Any] = {"default": argparse.SUPPRESS, "help": flag_help(one)}
    if one.kind is bool and one.optional:
        return {**facts, "action": argparse.BooleanOptionalAction}
    if one.kind is bool:
        return {**facts, "action": "store_const", "const": not one.setting.inverted}
    if one.known:
        return {**facts, "choices": one.known, "metavar": "{" + ",".join(one.choices) + "}"}
    if one.setting.words:
        names = tuple(one.setting.words.split())
        alone = len(names) == 1
        return {**facts, "action": _OneMore, "nargs": 1 if alone else "+", "metavar": names[0] if alone else names}
    if one.kind is tuple and not one.setting.comma:
        words = {"workers.urls": "URL", "tls.ca_cert_paths": "FILE", "model.aliases": "ALIAS=MODEL"}
        adding = {"action": "extend"} if one.setting.repeats else {}
        return {**facts, "nargs": "*", "metavar": words.get(one.key, "WORD"), **adding}
    return {**facts, "type": _reader(one), "metavar": _metavar(one)}


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


def flag_help(one: Declared) -> str:
    facts = [one.setting.unit] if one.setting.unit else []
    if not one.setting.inverted:
        facts.append(f"default {one.shown_default()}")
    if one.setting.variable:
        facts.append(f"variable {one.setting.variable}")
    if one.setting.legacy:
        facts.append(f"older {one.setting.legacy}")
    return (f"{one.text} [{'; '.join(facts)}]" if facts else one.text).replace("%", "%%")
