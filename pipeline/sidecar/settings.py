"""The sidecar's configuration and command line: `python gateway.py sidecar [flags]`.

Settings are declared as the gateway's (`pipeline.setting`) and resolved by the same precedence; flags and variables are
called as the published sidecar's and vLLM's.  What a worker may be started with and this pipeline does not have stops
the start: answers to it would be wrong, not late.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from pipeline.checks import check_address, check_domains, check_model, check_video_backend, refuse
from pipeline.commandline import Parser
from pipeline.config import DECLARED as GATEWAY_SETTINGS
from pipeline.config import Config, ConfigError
from pipeline.resolve import chosen, pool_defaults, put_in
from pipeline.sections import Log, Media, Model, Pool
from pipeline.sections.sidecar import ENGINE, JOBS, Engine, Jobs, Watch
from pipeline.setting import MEDIA, OBSERVING, POOL, STOPPING, Declared, Resolved, Source, declarations
from pipeline.sidecar.fingerprint import Fingerprint, canonical, limits_text
from pipeline.strangers import strangers
from pipeline.versions import versions

GROUPS = (JOBS, ENGINE, MEDIA, POOL, STOPPING, OBSERVING)
ACTIONS: Mapping[str, str] = {
    "--help": "Print this.",
    "--version": "Print the versions a bug report needs.",
    "--check-config": "Print every setting with its source, then stop.",
}
_PROG = "gateway.py sidecar"
# of the gateway's media settings, those a job can meet
_MEDIA_HERE = frozenset(
    {
        "image_max_input_bytes",
        "video_max_input_bytes",
        "video_max_decoded_bytes",
        "video_timeout_s",
        "video_backend",
        "allowed_domains",
        "fetch_timeout_s",
        "max_fetches",
        "max_fetches_per_request",
        "pixel_cache_mb",
    }
)
# vLLM's flags that the published sidecar takes and this one cannot follow
REFUSED: Mapping[str, str] = {
    "--allowed-local-media-path": "files of this host are not served (no file:// references)",
    "--allowed-media-domains": "say it with --mm-allowed-media-domains, separated by commas",
}
_IN_FILE = frozenset(Fingerprint.__struct_fields__)
_EXAMPLES = """\
  # next to a Redis on this machine, for a worker started with the same engine flags
  python gateway.py sidecar --model Qwen/Qwen3-VL-8B-Instruct --dtype bfloat16 --limit-mm-per-prompt '{"image": 4}'
  # what the worker's environment says of itself, and a Redis with a password
  SMG_VLLM_MM_REDIS_URL=rediss://:...@redis.internal/0 python gateway.py sidecar --fingerprint-file worker.json
  # what would be in force, and why
  python gateway.py sidecar --model m --check-config"""


class SidecarConfig(Resolved, frozen=True):
    """What a sidecar runs with; as `pipeline.config.Config`."""

    jobs: Jobs = Jobs()
    engine: Engine = Engine()
    watch: Watch = Watch()
    media: Media = Media()
    pool: Pool = Pool()
    log: Log = Log()

    def stations(self) -> Config:
        """The gateway's Config, as far as the stations of its pipeline look at it."""
        return Config(media=self.media, model=Model(path=self.bundle_source), pool=self.pool)

    @property
    def bundle_source(self) -> str:
        return self.engine.tokenizer_path or self.engine.model or ""

    @classmethod
    def declared(cls) -> tuple[Declared, ...]:
        return DECLARED


DECLARED: tuple[Declared, ...] = tuple(
    one for one in declarations(SidecarConfig) if one.section != "media" or one.name in _MEDIA_HERE
)


class SidecarInvocation(msgspec.Struct, frozen=True):
    """What the command line asks for; as `pipeline.flags.Invocation`."""

    action: Literal["run", "check_config", "version", "help"]
    config: SidecarConfig | None = None
    text: str = ""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> SidecarInvocation:
    """Read `argv`, what stands behind `sidecar`; ConfigError when the sidecar must not start."""
    parser = _parser()
    found = parser.read(argv)
    if found.pop("help"):
        return SidecarInvocation("help", text=parser.format_help())
    if found.pop("version"):
        return SidecarInvocation("version", text="\n".join(versions()) + "\n")
    for flag in found["refused"]:
        raise ConfigError(f"Configuration error: {flag}: {REFUSED[flag]}")
    config = resolve({one.key: found[one.key] for one in DECLARED if one.key in found}, environ)
    if found["check_config"]:
        return SidecarInvocation("check_config", config, text=config.checked())
    return SidecarInvocation("run", config)


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> SidecarConfig:
    """As `pipeline.resolve.resolve`, for the sidecar."""
    warnings: list[str] = []
    values, sources = chosen(DECLARED, given, environ, warnings)
    warnings.extend(strangers(environ, DECLARED, GATEWAY_SETTINGS))
    put_in(values, sources, pool_defaults())
    put_in(values, sources, {"jobs.concurrency": 2 * values["pool"]["processes"]})
    if values["engine"]["fingerprint_file"] is not None:
        _take_over_file(values["engine"], sources)
    _check(values)
    warnings.extend(check_video_backend(values["media"]["video_backend"]))
    if values["media"]["allowed_domains"] is None:
        warnings.append("no --mm-allowed-media-domains: media is fetched from any public host a job names")
    return msgspec.convert({**values, "sources": sources, "warnings": warnings}, SidecarConfig)


def _check(values: dict[str, dict[str, Any]]) -> None:
    jobs, engine, media = values["jobs"], values["engine"], values["media"]
    values["watch"]["host"] = check_address("prometheus_host", values["watch"]["host"])
    media["allowed_domains"] = check_domains(media["allowed_domains"])
    if urlsplit(jobs["redis_url"]).scheme not in ("redis", "rediss", "unix"):
        refuse("redis_url", "...", "Must begin with redis://, rediss:// or unix://")
    jobs["namespace"] = (jobs["namespace"] or "").strip() or None
    if engine["model"] is None:
        refuse("model", "", "Is needed: the worker's --model (or --fingerprint-file)")
    check_model("tokenizer_path" if engine["tokenizer_path"] else "model", engine["tokenizer_path"] or engine["model"])
    for name in ("media_io_kwargs", "mm_processor_kwargs"):
        if _object(name, engine[name]):
            refuse(name, engine[name], "Only {} is served: such a worker needs vLLM's own processors")
        engine[name] = "{}"
    limits = _object("limit_mm_per_prompt", engine["limit_per_prompt"])
    try:
        limits.pop("*", None)  # a file has limits as they are resolved
        engine["limit_per_prompt"] = limits_text(limits)
    except ValueError as error:
        refuse("limit_mm_per_prompt", engine["limit_per_prompt"], str(error))


def _take_over_file(engine: dict[str, Any], sources: Mapping[str, Source]) -> None:
    """The worker's own words; a flag that says the same thing beside them would be one word too many."""
    name = engine["fingerprint_file"]
    for one in DECLARED:
        if one.section == "engine" and one.name in _IN_FILE and sources[one.key] == "flag":
            refuse(one.field, engine[one.name], "Comes from --fingerprint-file: give one of the two")
    try:
        found = json.loads(Path(name).expanduser().read_text())
        said = msgspec.convert(found, Fingerprint)
        device = found.get("mm_device_do_normalize")
    except OSError as error:
        refuse("fingerprint_file", name, f"cannot be read: {error.strerror}")
    except (ValueError, msgspec.ValidationError) as error:
        refuse("fingerprint_file", name, f"is not as tools/vllm_fingerprint.py prints it: {error}")
    engine.update(said.fields() | {"dtype": said.dtype.removeprefix("torch.")})
    if engine["dtype"] not in ("float32", "bfloat16", "float16"):
        refuse("fingerprint_file", said.dtype, "is no dtype this sidecar makes")
    if engine["device_do_normalize"] is None:
        engine["device_do_normalize"] = device


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        refuse(name, text, "Must be a JSON object")
    return found


def fingerprint_of(engine: Engine, config: Mapping[str, Any]) -> Fingerprint:
    """What the worker must be.  `config`: the model's config.json, for a dtype of "auto".  Raises ConfigError."""
    return Fingerprint(
        model=engine.model or "",
        vllm_version=engine.vllm_version,
        dtype=f"torch.{engine.dtype if engine.dtype != 'auto' else _stated_dtype(config)}",
        video_backend=engine.video_backend,
        media_io_kwargs=canonical({}),
        mm_processor_kwargs=canonical({}),
        limit_per_prompt=engine.limit_per_prompt,
    )


def _stated_dtype(config: Mapping[str, Any]) -> str:
    """vLLM keeps 16-bit types and chooses another one for float32 by the machine, which this one cannot know."""
    texts = [config, *(part for key in ("text_config", "llm_config") if isinstance(part := config.get(key), Mapping))]
    stated = [part[key] for part in texts for key in ("dtype", "torch_dtype") if part.get(key)]
    if stated and stated[0] in ("bfloat16", "float16"):
        return str(stated[0])
    raise ConfigError(
        f"Configuration error: --dtype auto: config.json says {stated[0] if stated else 'nothing'}, "
        "which vLLM makes another dtype of; name the worker's dtype"
    )


def _parser() -> Parser:
    return Parser(
        _PROG,
        f"python {_PROG} --model MODEL [flags]",
        "The media sidecar of vLLM workers in redis mode, without vLLM, torch or a GPU.",
        declared=DECLARED,
        groups=GROUPS,
        actions=ACTIONS,
        refused=REFUSED,
        examples=_EXAMPLES,
    )
