"""What other versions or SMG can do and this version cannot: every such flag, and what is said of it.

A flag of SMG's is never "unrecognized": it is refused with a sentence.
"""

from collections.abc import Mapping

# What is missing -> its flags.  These come with a later version.
LATER_FLAGS: Mapping[str, str] = {
    "a rate limit": "--rate-limit-tokens-per-second",
    "tenant keys": "--tenant-api-key",
    "configurable buckets": "--prometheus-duration-buckets",
    "log files": "--log-dir",
    "a port of its own for health checks": "--health-check-port",
    "an admission window of prefill and decode workers": "--prefill-max-inflight-requests-per-worker "
    "--prefill-queue-size --prefill-queue-timeout-secs --pd-admission-wait-secs --pd-pairing-mode",
    "discovery from a file": "--discovery-provider --discovery-file --discovery-check-interval-secs",
    "tracing": "--enable-trace --otlp-traces-endpoint",
    "routing keys": "--routing-key-override --sticky-sessions --routing-key-headers",
}

# The same for what never comes: it is not what this gateway is for.
NEVER_FLAGS: Mapping[str, str] = {
    "a mesh of gateways": "--enable-mesh --mesh-server-name --mesh-host --mesh-advertise-host --mesh-port "
    "--mesh-peer-urls --mesh-tls-ca-cert --mesh-tls-cert --mesh-tls-key",
    "WebAssembly": "--enable-wasm --storage-hook-wasm-path",
    "an MCP tool loop": "--mcp-config-path",
    "the RL control plane": "--enable-rl --rl-control-timeout-secs --rl-fanout-concurrency",
    "a database for responses": "--schema-config --storage-context-headers --oracle-wallet-path --oracle-tns-alias "
    "--oracle-connect-descriptor --oracle-username --oracle-password --oracle-external-auth --oracle-pool-min "
    "--oracle-pool-max --oracle-pool-timeout-secs --postgres-db-url --postgres-pool-max --postgres-op-timeout-secs "
    "--redis-url --redis-pool-max --redis-retention-days --redis-op-timeout-secs",
    "the priority scheduler": "--priority-scheduler-enabled --priority-scheduler-default-max-class "
    "--priority-scheduler-config --priority-scheduler-tenant-metric-top-n",
    "limits for tenants": "--tenant-rate-limit-enabled --tenant-rate-limit-config --trust-tenant-header "
    "--tenant-header-name",
    "control-plane keys and JWT": "--control-plane-api-keys --control-plane-audit-enabled --jwt-issuer --jwt-audience "
    "--jwt-jwks-uri --jwt-role-mapping",
    "Kubernetes discovery": "--service-discovery --service-discovery-port --service-discovery-namespace --selector "
    "--encode-selector --prefill-selector --decode-selector --router-selector --model-id-from "
    "--kv-connector-annotation --kv-engine-id-annotation",
    "overload and warm-up tuning": "--overload-token-usage-threshold --worker-overload-waiting-requests "
    "--worker-overload-token-usage --worker-overload-protection --disable-worker-overload-protection "
    "--worker-overload-shed --worker-stall-secs --worker-wedge-secs --worker-stale-secs --worker-warmup-secs "
    "--worker-warmup-share --worker-warmup-blocks --worker-warmup-thin-ratio --worker-warmup-divert-every "
    "--load-monitor-interval",
    "tuning of policies it does not have": "--least-load-kv-pressure-weight --least-load-default-throughput "
    "--least-load-mean-prefill-tokens --least-load-max-waiting-requests --power-of-two-load-metric "
    "--selection-policy --selection-accounting-ttl-ms --overlap-decay --selection-temperature "
    "--bucket-adjust-interval-secs --max-idle-secs --sticky-key-idle-secs --assignment-mode",
    "routing by what engines tell of their caches": "--balance-token-usage-threshold --kv-index",
    "another index of prompts than its own, which is bounded at every request": "--eviction-interval-secs "
    "--cache-boundaries --cache-index",
    "HTTP engine workers": "--upstream-http2 --upstream-pool-idle-timeout-secs --health-check-endpoint --backend "
    "--max-buffered-request-bytes --stream-body-stall-timeout-secs",
    "direct ZMQ workers": "--zmq-engine-count",
    "scheduling of data-parallel ranks by tokens": "--dp-minimum-tokens-scheduler",
    "a mode for several models; it always serves several": "--enable-igw",
    "a job queue of workers": "--job-queue-capacity --job-queue-concurrency --worker-startup-delay "
    "--remove-unhealthy-workers --no-remove-unhealthy-workers --worker-auto-recovery --no-worker-auto-recovery",
    "another tokenizer cache or parser engine": "--disable-tokenizer-autoload --parser --tokenizer-cache-enable-l0 "
    "--tokenizer-cache-l0-max-entries --tokenizer-cache-enable-l1 --tokenizer-cache-l0-max-memory "
    "--tokenizer-cache-l1-max-memory",
    "a heap profiler": "--jemalloc-prof-dir",
    "a limit for queued jobs; see --max-concurrent-requests and --max-inflight-body-bytes": "--pool-max-queue",
}

# Switches of SMG's whose effect is always in force here.
MOOT_FLAGS: Mapping[str, str] = {
    "--disable-load-monitoring": "Accepted for SMG's command lines; engines are not polled for their load.",
}

# Formats of calls and of reasoning that SMG knows and this version does not.
LATER_CALL_FORMATS = ("mistral", "step3", "cohere", "sarashina", "inkling")
LATER_THINKING_FORMATS = ("base", "kimi", "step3", "cohere_cmd", "nano_v3", "inkling")

# Read by the engine's servicer, never by the gateway.
ENGINE_VARIABLES = (
    "SMG_VLLM_MM_PROCESSOR",
    "SMG_VLLM_MM_MAX_INFLIGHT",
    "SMG_VLLM_MM_MAX_ITEMS",
    "SMG_VLLM_MM_MAX_ITEM_BYTES",
    "SMG_VLLM_MM_REDIS_URL",
    "SMG_VLLM_MM_SIDECAR_TIMEOUT_MS",
    "SMG_VLLM_MM_SIDECAR_MAX_QUEUE",
    "SMG_VLLM_MM_SIDECAR_NAMESPACE",
    "SMG_VLLM_MM_MAX_VIDEO_FRAMES",
    "SMG_VLLM_MM_MAX_RESULT_BYTES",
)


def refusal_of(flag: str) -> str:
    """The sentence for a flag of the tables above; KeyError for any other."""
    return _REFUSALS[flag]


def refused_flags() -> tuple[str, ...]:
    return tuple(_REFUSALS)


def _refusals() -> dict[str, str]:
    found = {}
    for what, flags in LATER_FLAGS.items():
        found.update(dict.fromkeys(flags.split(), f"this version does not yet have {what}"))
    for what, flags in NEVER_FLAGS.items():
        found.update(dict.fromkeys(flags.split(), f"not part of this gateway ({what})"))
    return {flag: f"{flag}: {sentence}" for flag, sentence in found.items()}


_REFUSALS = _refusals()
