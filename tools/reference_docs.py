"""Write docs/configuration.md, sidecar-settings.md, errors.md and metrics.md from the tables in the code.

    python tools/reference_docs.py            write them
    python tools/reference_docs.py --check    say which are out of date, status 1 if any is

A test does the second, so the pages cannot drift from the code.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline import absent  # noqa: E402
from pipeline.config import DECLARED, EXIT_CODES  # noqa: E402
from pipeline.errors import ENGINE_CODES, ENGINE_STATUS, STATUS_OF_CODE, kind_of_status  # noqa: E402
from pipeline.flags import ACTIONS, SHORTHANDS  # noqa: E402
from pipeline.metric_table import DECLARATIONS  # noqa: E402
from pipeline.setting import GROUPS, Declared  # noqa: E402
from pipeline.sidecar import settings as sidecar  # noqa: E402
from tools.usage import Usage  # noqa: E402

_WRITTEN = "<!-- written by tools/reference_docs.py; change the code, not this page -->"

# What each code means to whoever gets it, one sentence; a code without a sentence stops this tool.
MEANINGS: Mapping[str, str] = {
    "unsupported_content_part": "A content part of a type the gateway does not take, or media where none can be.",
    "invalid_multimodal_request": "The model takes no media, not this modality, or not this many items.",
    "multimodal_prompt_contract_mismatch": "The rendered prompt does not hold exactly one anchor for each media item.",
    "multimodal_processing_failed": "A media item could not be fetched, decoded or preprocessed; the message names it.",
    "multimodal_not_supported": "The engine that would serve the request does not take this modality, or, with "
    "`--mm-processing worker`, no reference can bring it there (sound, an encode worker).",
    "multimodal_worker_processing_unsupported_model": "`--mm-processing worker`, and vLLM cannot expand this model's "
    "anchor of this modality.",
    "multimodal_hint_unsupported_in_worker_mode": "`--mm-processing worker`, and a part carries `fps` or "
    "`max_long_side_pixel`.",
    "media_ref_too_large": "A `data:` URL that would be forwarded to a worker is larger than media may be.",
    "media_ref_scheme_not_accepted": "No worker that takes references fetches URLs of this scheme.",
    "no_media_ref_capable_worker": "`--mm-processing worker`, and no worker of the model runs a media processor.",
    "multimodal_payload_too_large": "The request's preprocessed media are more than the gateway may hold at all.",
    "multimodal_inflight_budget": "The gateway holds its budget of preprocessed media; try again after `Retry-After`.",
    "malformed_request": "What came is not HTTP, its head is over the limits, or the chunks of its body are broken.",
    "expectation_failed": "The header `Expect` asks for something other than `100-continue`.",
    "invalid_json": "The body is not JSON.",
    "json_parse_error": "The content type is not `application/json`.",
    "missing_required_parameter": "A required field is absent; `param` names it.",
    "invalid_type": "A field has the wrong type; `param` names it.",
    "invalid_value": "A field has a value that is not among those allowed; `param` names it.",
    "empty_array": "An array that must not be empty is.",
    "array_above_max_length": "An array has too many elements.",
    "integer_above_max_value": "An integer is too large.",
    "integer_below_min_value": "An integer is too small.",
    "decimal_above_max_value": "A number is too large.",
    "decimal_below_min_value": "A number is too small.",
    "top_logprobs_requires_logprobs": "`top_logprobs` without `logprobs`.",
    "stream_options_requires_stream": "`stream_options` without `stream`.",
    "tool_choice_requires_tools": "`tool_choice` without `tools`.",
    "input_items_empty": "Responses: `input` has no items.",
    "convert_request_failed": "Responses: a function's output holds media.",
    "previous_response_not_found": "Responses: the response to continue, or one before it, is not kept (any more).",
    "response_already_completed": "Responses: one that is complete cannot be cancelled.",
    "not_found": "Responses, conversations: none of that id is kept.",
    "tokenizer_not_found": "Tokenizing: no worker serves the model.",
    "no_workers": "No worker is registered.",
    "thinking_budget_exceeds_max_tokens": "Messages: `thinking.budget_tokens` is not below `max_tokens`.",
    "thread_unsupported_request": "Messages: no conversation is kept for `thread`; SDKs then send all of it each time.",
    "tool_choice_function_not_found": "`tool_choice` names a function that is not among `tools`.",
    "unsupported_parameter": "A field this version cannot honour; it is refused rather than ignored.",
    "process_messages_failed": "The chat template could not render the messages.",
    "context_length_exceeded": "The prompt, placeholders expanded, is longer than the model's window.",
    "invalid_api_key": "No key, or a wrong one.",
    "model_not_found": "No worker serves the model.",
    "unknown_url": "There is no such route.",
    "method_not_allowed": "The route does not take this method; `Allow` names those it takes.",
    "request_body_too_large": "The body is larger than `--max-payload-size`.",
    "admission_queue_full": "Every place is taken and the queue is full.",
    "admission_queue_timeout": "No place became free within `--queue-timeout-secs`.",
    "no_available_workers": "Workers serve the model, but none is healthy.",
    "no_models_available": "No worker is registered.",
    "tokenizer_not_ready": "The model's tokenizer is still being loaded.",
    "request_timeout": "The request took longer than `--request-timeout-secs`; 408: its head or body came too slowly.",
    "internal_error": "A fault of the gateway; its log has the request's id.",
    "shutting_down": "The gateway was stopped before the answer was complete; another one may serve it.",
    "background_responses_limit_reached": "Responses: `--max-background-responses` run already.",
    "mutually_exclusive_parameters": "Responses: `previous_response_id` and `conversation` at once.",
    "conversation_not_found": "Responses: there is no such conversation (any more).",
    "resolve_input_failed": "Generate: there is no prompt, or more than one.",
    "start_generation_failed": "The engine refused the request or could not be reached.",
    "worker_stream_failed": "The engine failed after it had started.",
    "prefill_worker_failed_to_start": "The prefill worker of a pair refused the request or could not be reached.",
    "prefill_stream_error": "The prefill worker of a pair failed after it had started.",
    "decode_worker_failed_to_start": "The decode worker of a pair refused the request or could not be reached.",
    "runtime_pd_not_supported": "The model's prefill workers run an engine that does not work in pairs.",
    "no_compatible_pd_pair": "No prefill worker of the model hands keys and values over as any decode worker takes "
    "them; the message says what differs.",
    "pd_decode_language_model_only_mrope": "The decode workers are language-model-only, and this model's positions "
    "need the grids of the media.",
    "pd_decode_language_model_only_media_refs": "The decode workers are language-model-only and take no media "
    "references.",
    "pd_decode_language_model_only_n_samples": "The decode workers are language-model-only and take media for one "
    "choice only, not for `n`.",
    "pd_decode_missing_kv_transfer_params": "The prefill worker handed nothing over, and the decode worker is "
    "language-model-only and cannot compute the prompt itself; not repeated.",
}


def configuration() -> str:
    parts = [
        "# Configuration",
        _WRITTEN,
        _CONFIGURATION_RULES,
        *(_group(title) for title in GROUPS),
        "## Shorthands and other ways to run",
        _table(("flag", "meaning"), [(f"`{flag}`", text) for flag, text in {**SHORTHANDS, **ACTIONS}.items()]),
        "## Accepted without effect",
        "SMG's switches for what is always so here.",
        _table(("flag", "meaning"), [(f"`{flag}`", text) for flag, text in absent.MOOT_FLAGS.items()]),
        "## Not in this version",
        "These flags of SMG are known and stop the start with a sentence (exit status 1).",
        _table(("what", "flags"), _sorted_flags(absent.LATER_FLAGS)),
        "## Not part of this gateway",
        "These flags of SMG are known and stop the start with a sentence (exit status 1).",
        _table(("what", "flags"), _sorted_flags(absent.NEVER_FLAGS)),
        "## The engine's own variables",
        "Read by the vLLM servicer on the worker's side. The gateway does not look at them: "
        + ", ".join(f"`{name}`" for name in absent.ENGINE_VARIABLES)
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


_CONFIGURATION_RULES = f"""Run as `python gateway.py [flags]`; `--check-config` prints what would be in force and why, `--help` the same table for a terminal.
Flags and variables are called as in SMG 1.11, so that its command lines carry over.

* **Precedence**: flag, then variable, then the older variable, then the default. A flag that is given silences its variables.
* **A bad flag** stops the start before anything is bound: status 2 for what cannot be read, 1 for what is read and wrong.
* **A bad variable** is ignored with a WARN that names it; `SMG_MM_PROCESSING` and `SMG_VIDEO_DECODE_BACKEND` stop the start.
  An empty variable is unset; white space around a value is trimmed; switches are `1`, `true`, `yes`, `on` and their opposites.
* **Deprecated and older variables** work and log one WARN.
* **What this version does not have** is refused, never parsed and ignored.
* A misspelt flag stops the start and the flag that was meant is named; a variable that begins as ours and is none of them is told at WARN.
* **Signals**: SIGTERM drains, SIGINT does so without the settle time for balancers; a second one of either ends at once. One that comes within half a
  second of the first is the same one: shells, `timeout` and service managers signal a process and then its group. SIGHUP renews the pool processes.
* Everything is read once, before the first process is forked. A line at the start tells every setting that somebody gave, and whether by a flag,
  a variable or an older one; `--check-config` and `--log-level debug` tell all of them.

Exit status: {", ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())}."""  # noqa: E501


def sidecar_settings() -> str:
    parts = [
        "# Settings of the media sidecar",
        _WRITTEN,
        "Run as `python gateway.py sidecar [flags]`; what it does: [sidecar.md](sidecar.md). Flags and variables are "
        "called as the published sidecar's and vLLM's; precedence and bad values are as in "
        "[configuration.md](configuration.md).",
        *(_group(title, sidecar.DECLARED) for title in sidecar.GROUPS),
        "## Other ways to run",
        _table(("flag", "meaning"), [(f"`{flag}`", text) for flag, text in sidecar.ACTIONS.items()]),
        "## Flags of vLLM that are refused",
        _table(("flag", "why"), [(f"`{flag}`", text) for flag, text in sidecar.REFUSED.items()]),
    ]
    return "\n\n".join(parts) + "\n"


def _group(title: str, declared: Sequence[Declared] = DECLARED) -> str:
    rows = [_setting_row(one) for one in declared if one.setting.group == title]
    return f"## {title}\n\n" + _table(("flag", "variable", "default", "range", "meaning"), rows)


def _setting_row(one: Declared) -> tuple[str, ...]:
    names = [f"`{flag}`" for flag in one.setting.flags]
    if one.kind is bool and one.optional:
        names.append(f"`--no-{one.flag[2:]}`")
    variable = f"`{one.setting.variable}`" if one.setting.variable else ""
    if one.setting.deprecated:
        variable += " (deprecated)"
    if one.setting.legacy:
        variable += f"; older `{one.setting.legacy}`"
    default = one.shown_default()
    if one.setting.unit and not one.setting.computed:
        default += f" {one.setting.unit}"
    flags = ", ".join(names) or ("" if variable else "(fixed)")
    return flags, variable, default, _range(one), one.text


def _range(one: Declared) -> str:
    if one.known:
        kinds = (("", one.choices), ("; not yet: ", one.setting.later), ("; never: ", one.setting.never))
        return "".join(start + ", ".join(f"`{word}`" for word in words) for start, words in kinds if words)
    low, high = one.ge, one.le
    if one.is_fixed or (low is None and high is None):
        return ""
    return f"{low:.15g} to {high:.15g}" if high is not None else f"at least {low:.15g}"


def _sorted_flags(table: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(what, " ".join(f"`{flag}`" for flag in flags.split())) for what, flags in table.items()]


def errors() -> str:
    rows = []
    for code, status in sorted(STATUS_OF_CODE.items(), key=lambda row: (row[1], row[0])):
        shown = "the engine's" if code in ENGINE_CODES else str(status)
        kind = "by status" if shown != str(status) else f"`{kind_of_status(status)}`"
        rows.append((shown, f"`{code}`", kind, MEANINGS[code]))
    engine = [
        (f"`{name}`", str(status), "yes" if again else "no") for name, (status, again) in sorted(ENGINE_STATUS.items())
    ]
    parts = [
        "# Errors",
        _WRITTEN,
        'Every error is `{"error": {"type", "code", "message", "param"}}`; `code` is also in the header '
        "`X-SMG-Error-Code`. Branch on `code` and status: messages are for people and may change. `param` is the path "
        "of the field concerned, where there is one. 429 and 503 carry `Retry-After` where waiting helps. Messages "
        "never hold payloads, queries of URLs or addresses of the internal network.",
        'The routes under `/v1/messages` answer in Anthropic\'s shape, `{"type": "error", "error": {"type", "message", '
        '"code", "param"}, "request_id"}`, with the same codes and statuses; `/workers` in `{"error": text, "code"}` '
        'with codes of its own, in capitals; `/parse/*` of a parser it does not know in `{"error": text, "success": '
        "false}`.",
        'In a stream, whose status is told before its end, a failure is the last event: `data: {"error": ...}` and '
        "`[DONE]`; `event: error` of Messages; `response.failed` of Responses. So is `shutting_down`; a stream that "
        "ends with neither such an event nor its API's closing one lost its connection.",
        _table(("status", "code", "type", "meaning"), rows),
        "## What an engine's status becomes",
        "For the codes whose status is the engine's. An attempt is repeated, on a worker chosen anew, "
        "only before the first byte of the answer.",
        _table(("gRPC status", "HTTP", "repeated"), engine),
    ]
    return "\n\n".join(parts) + "\n"


def metrics() -> str:
    rows = [
        (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.help) for one in DECLARATIONS
    ]
    buckets = [
        (f"`{one.name}`", ", ".join(f"{edge:.10g}" for edge in one.buckets)) for one in DECLARATIONS if one.buckets
    ]
    parts = [
        "# Metrics",
        _WRITTEN,
        "`GET /metrics` on a listener of its own (`--prometheus-host`, `--prometheus-port`), in Prometheus' text "
        "format. `smg_*` names and labels are SMG's, so dashboards and alerts carry over. `path` is a route template, "
        "`model` a name of the registry (1,024 at most, then `other`), `error_code` one of [errors](errors.md); every "
        "other label is bounded too. The process metrics (`process_*`) are the frontend's.",
        _table(("name", "kind", "labels", "meaning"), rows),
        "## Buckets",
        _table(("histogram", "upper edges"), buckets),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration,
    "docs/sidecar-settings.md": sidecar_settings,
    "docs/errors.md": errors,
    "docs/metrics.md": metrics,
}


def main() -> int:
    parser = Usage(__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = [name for name, page in PAGES.items() if not _is_current(name, page())]
    for name in stale:
        print(f"{name}: {'out of date' if check else 'written'}")
        if not check:
            (ROOT / name).write_text(PAGES[name]())
    return 1 if check and stale else 0


def _is_current(name: str, text: str) -> bool:
    path = ROOT / name
    return path.exists() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
