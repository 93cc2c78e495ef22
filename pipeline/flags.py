"""The command line: argparse built from the declarations of `pipeline.config`, and what the user wants done.

`parse` never prints and never exits: it returns an Invocation or raises ConfigError, and `gateway.py` acts on either.
Exit status 2 is for what cannot be read (an unknown flag, a word for a number), 1 for what is read and wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from pipeline.absent import MOOT_FLAGS, refusal_of, refused_flags
from pipeline.commandline import Parser
from pipeline.config import DECLARED, Config, ConfigError
from pipeline.resolve import resolve
from pipeline.setting import GROUPS, RETRIES, WORKERS
from pipeline.versions import versions

_DEMO_SETTINGS = {"server.host", "server.port"}
_SINGLE_ATTEMPT = "single_attempt"
# Flags that are no settings of their own, with their help.
SHORTHANDS: Mapping[str, str] = {"--disable-retries": "The same as --retry-max-retries 1."}
ACTIONS: Mapping[str, str] = {
    "--help": "Print this.",
    "--version": "Print the versions a bug report needs.",
    "--check-config": "Print every setting with its source, then stop.",
    "--demo": "Serve a built-in model and engine and ask them something.",
    "--once": "With --demo: stop after the answers, with a failure if one is wrong.",
}
_EXAMPLES = """\
  # one vLLM worker on this machine, the gateway on http://127.0.0.1:30000
  python gateway.py --worker-urls grpc://127.0.0.1:50051
  # two workers that share this machine's /dev/shm, open to the network, with a key
  MEDIAGATE_API_KEY=... python gateway.py --host 0.0.0.0 --multimodal-tensor-transport auto --worker-urls a:51 b:51
  # clients one does not trust: named media hosts only, bounded media
  python gateway.py --mm-allowed-media-domains img.example.com --multimodal-max-inflight-bytes 4000000000
  # HTTPS to clients, and workers whose certificates a private authority signed
  python gateway.py --tls-cert-path chain.pem --tls-key-path key.pem --ca-cert-paths ca.pem --worker-urls grpcs://a:443
  # what would be in force, and why
  python gateway.py --check-config --log-level debug
  # prefill and decode on engine workers of their own
  python gateway.py --pd-disaggregation --prefill grpc://p1:50051 8998 --prefill grpc://p2:50051 --decode grpc://d1:50051
  # no engine at hand: the built-in one, one answer of each kind
  python gateway.py --demo --once"""


class Invocation(msgspec.Struct, frozen=True):
    """What the command line asks for.

    `config` is there unless `action` is "help" or "version"; `text` is what those and "check_config" print on stdout.
    `once` belongs to "demo": answer, then stop.
    """

    action: Literal["run", "demo", "check_config", "version", "help"]
    config: Config | None = None
    text: str = ""
    once: bool = False


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Read `argv` (without the program's name) over `environ`; ConfigError when the gateway must not start."""
    parser = _parser()
    found = parser.read(argv)
    if found.pop("help"):
        return Invocation("help", text=parser.format_help())
    if found.pop("version"):
        return Invocation("version", text="\n".join(versions()) + "\n")
    if found["refused"]:
        sentences = [refusal_of(flag) for flag in dict.fromkeys(found["refused"])]
        raise ConfigError("\n".join(f"Configuration error: {sentence}" for sentence in sentences))
    if found["once"] and not found["demo"]:
        parser.error("argument --once: only with --demo")
    others = [one.setting.flags[0] for one in DECLARED if one.key in found and one.key not in _DEMO_SETTINGS]
    if found["demo"] and others:
        parser.error(f"argument --demo: takes --host, --port and --once only, not {others[0]}")
    if found.get(_SINGLE_ATTEMPT):
        found["workers.retry_attempts"] = 1
    config = resolve({one.key: found[one.key] for one in DECLARED if one.key in found}, environ)
    if found["check_config"]:
        return Invocation("check_config", config, text=config.checked())
    return Invocation("demo" if found["demo"] else "run", config, once=found["once"])


def _parser() -> Parser:
    parser = Parser(
        "gateway.py",
        "python gateway.py [--worker-urls URL ...] [flags]",
        "The multimodal front end of an LLM serving fleet. Every flag has a default.",
        declared=DECLARED,
        groups=GROUPS,
        actions=ACTIONS,
        refused=refused_flags(),
        examples=_EXAMPLES,
    )
    for flag, text in SHORTHANDS.items():
        parser.groups[RETRIES].add_argument(flag, dest=_SINGLE_ATTEMPT, action="store_true", help=text)
    for flag, text in MOOT_FLAGS.items():
        parser.groups[WORKERS].add_argument(flag, action="store_true", help=text)
    return parser
