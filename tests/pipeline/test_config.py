"""Settings: defaults, variables, precedence, warnings, start-up failures, against tables written from SMG's documents.

The tables below are not derived from the declarations they check; what SMG 1.13 was seen to answer is quoted as seen.
"""

import re
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pipeline import config as config_module
from pipeline.absent import ENGINE_VARIABLES, LATER_FLAGS, NEVER_FLAGS, refused_flags
from pipeline.config import DECLARED, Config, ConfigError
from pipeline.flags import parse
from pipeline.machine import memory_bytes, shm_bytes, usable_cores
from pipeline.rdma_lane import rdma_settings
from pool.supervisor import EXIT_FRONTEND_DIED


def settings(*argv: str, **environ: str) -> Config:
    config = parse(argv, environ).config
    assert config is not None
    return config


def value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def failure(*argv: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse(argv, environ)
    return caught.value


# flag, key, default, another value as text, that value
FLAGS = [
    ("--host", "server.host", "127.0.0.1", "0.0.0.0", "0.0.0.0"),
    ("--port", "server.port", 30000, "8080", 8080),
    ("--api-key", "server.api_key", None, "s3cret", "s3cret"),
    ("--cors-allowed-origins", "server.cors_allowed_origins", (), "https://a.example", ("https://a.example",)),
    ("--request-id-headers", "server.request_id_headers",
     ("x-request-id", "x-correlation-id", "x-trace-id", "request-id"), "X-Mine", ("x-mine",)),
    ("--max-payload-size", "server.max_payload_bytes", 536870912, "1000", 1000),
    ("--request-timeout-secs", "server.request_timeout_s", 1800.0, "7", 7.0),
    ("--header-read-timeout-secs", "server.header_read_timeout_s", 30.0, "0", 0.0),
    ("--idle-connection-timeout-secs", "server.idle_connection_timeout_s", 90.0, "600", 600.0),
    ("--sse-keepalive-secs", "server.sse_keepalive_s", 15.0, "0", 0.0),
    ("--drain-settle-secs", "server.drain_settle_s", 5.0, "0.5", 0.5),
    ("--shutdown-grace-period-secs", "server.shutdown_grace_s", 180.0, "1", 1.0),
    ("--queue-size", "admission.queue_size", 100, "0", 0),
    ("--queue-timeout-secs", "admission.queue_timeout_s", 60.0, "2", 2.0),
    ("--max-concurrent-requests", "admission.max_concurrent_requests", max(4096, 1024 * usable_cores()), "0", 0),
    ("--max-inflight-body-bytes", "admission.max_inflight_body_bytes", 2 * 536870912, "600000000", 600000000),
    ("--max-background-responses", "responses.most_background", 1024, "0", 0),
    ("--history-memory-max-items", "responses.most_items", 100000, "5", 5),
    ("--model-alias", "model.aliases", (), "nick=some/model", ("nick=some/model",)),
    ("--mm-processing", "media.processing", "auto", "worker", "worker"),
    ("--mm-per-request-image-limit", "media.image_limit", None, "3", 3),
    ("--multimodal-max-inflight-bytes", "media.inflight_max_bytes", None, "400001", 400001),
    ("--mm-unread-bytes-per-worker", "media.unread_bytes_per_worker", 256 << 20, "0", 0),
    ("--mm-allowed-media-domains", "media.allowed_domains", None, " LocalHost , example.com,,",
     ("localhost", "example.com")),
    ("--mm-max-concurrent-fetches", "media.max_fetches", 128, "5", 5),
    ("--mm-pixel-cache-mb", "media.pixel_cache_mb", 0, "64", 64),
    ("--multimodal-tensor-transport", "transport.mode", "inline", "shm", "shm"),
    ("--multimodal-shm-min-bytes", "transport.shm_min_bytes", 65536, "0", 0),
    ("--rdma-listen-ip", "transport.rdma_listen_ip", None, "10.0.0.1", "10.0.0.1"),
    ("--rdma-slot-ttl-s", "transport.rdma_slot_ttl_s", None, "300", 300.0),
    ("--mm-shm-max-bytes", "transport.shm_max_bytes", min(shm_bytes(), memory_bytes()) // 2, "0", 0),
    ("--model-path", "model.path", None, "org/name", "org/name"),
    ("--model", "model.path", None, "org/name", "org/name"),
    ("--tokenizer-path", "model.tokenizer_path", None, "org/tokens", "org/tokens"),
    ("--tool-call-parser", "model.tool_call_parser", None, "qwen_xml", "qwen_xml"),
    ("--reasoning-parser", "model.reasoning_parser", None, "deepseek_r1", "deepseek_r1"),
    ("--worker-urls", "workers.urls", (), "grpc://a:5", ("grpc://a:5",)),
    ("--policy", "workers.policy", "cache_aware", "power_of_two", "power_of_two"),
    *[(flag, "routing.cache_threshold", 0.3, "0", 0.0) for flag in ("--cache-threshold", "--cache-match-threshold")],
    *[(flag, "routing.balance_abs", 64, "0", 0) for flag in ("--balance-abs-threshold", "--spill-abs-threshold")],
    *[(flag, "routing.balance_rel", 1.5, "2", 2.0) for flag in ("--balance-rel-threshold", "--spill-rel-threshold")],
    ("--max-tree-size", "routing.max_tree_tokens", 4194304, "1000", 1000),
    ("--block-size", "routing.block_size", 16, "64", 64),
    ("--cache-ttl-secs", "routing.cache_ttl_s", 180.0, "5", 5.0),
    ("--prefix-token-count", "routing.prefix_tokens", 256, "8", 8),
    ("--prefix-hash-load-factor", "routing.prefix_load_factor", 1.25, "3", 3.0),
    ("--prefix-hash-balance-abs-threshold", "routing.prefix_balance_abs", 10, "0", 0),
    ("--worker-startup-timeout-secs", "workers.startup_timeout_s", 1800.0, "60", 60.0),
    ("--worker-startup-check-interval", "workers.startup_check_interval_s", 30.0, "1", 1.0),
    ("--health-check-interval-secs", "workers.health_interval_s", 60.0, "1", 1.0),
    ("--health-check-timeout-secs", "workers.health_timeout_s", 5.0, "2", 2.0),
    ("--health-failure-threshold", "workers.failure_threshold", 3, "1", 1),
    ("--health-success-threshold", "workers.success_threshold", 2, "1", 1),
    ("--cb-failure-threshold", "workers.breaker_failures", 10, "2", 2),
    ("--cb-success-threshold", "workers.breaker_successes", 3, "1", 1),
    ("--cb-timeout-duration-secs", "workers.breaker_timeout_s", 60.0, "5", 5.0),
    ("--cb-window-duration-secs", "workers.breaker_window_s", 120.0, "9", 9.0),
    ("--retry-max-retries", "workers.retry_attempts", 5, "1", 1),
    ("--retry-initial-backoff-ms", "workers.retry_initial_backoff_s", 0.05, "100", 0.1),
    ("--retry-max-backoff-ms", "workers.retry_max_backoff_s", 30.0, "50", 0.05),
    ("--retry-backoff-multiplier", "workers.retry_backoff_multiplier", 1.5, "2", 2.0),
    ("--retry-jitter-factor", "workers.retry_jitter", 0.2, "1", 1.0),
    ("--history-backend", "responses.backend", "memory", "none", "none"),
    ("--history-memory-max-responses", "responses.most", 10_000, "0", 0),
    ("--history-memory-max-bytes", "responses.most_bytes", 256 << 20, "1000", 1000),
    ("--history-memory-retention-secs", "responses.retention_s", 86400.0, "60", 60.0),
    ("--pool-processes", "pool.processes", usable_cores(), "3", 3),
    ("--pool-ring-bytes", "pool.ring_bytes", memory_bytes() // 2 & ~4095, "1048576", 1048576),
    (
        "--pool-process-memory-bytes",
        "pool.process_memory_bytes",
        min(3584 << 20, memory_bytes() // 4),
        "134217728",
        134217728,
    ),
    ("--pool-job-timeout-secs", "pool.job_timeout_s", 60.0, "5", 5.0),
    ("--prometheus-host", "metrics.host", "127.0.0.1", "::1", "::1"),
    ("--prometheus-port", "metrics.port", 29000, "29001", 29001),
    ("--log-level", "log.level", "info", "warn", "warn"),
]  # fmt: skip
SWITCHES = [
    ("--server-timing", "server.server_timing", False, True),
    ("--no-page", "server.page", True, False),
    ("--mm-allow-private-media-hosts", "media.allow_private_hosts", None, True),
    ("--no-mm-allow-private-media-hosts", "media.allow_private_hosts", None, False),
    ("--log-mm-timing", "media.log_timing", False, True),
    ("--mm-pixel-rdma", "transport.pixel_rdma", False, True),
    ("--dp-aware", "workers.dp_aware", False, True),
    ("--disable-health-check", "workers.health_enabled", True, False),
    ("--disable-circuit-breaker", "workers.breaker_enabled", True, False),
    ("--pd-disaggregation", "pairs.enabled", False, True),
    ("--epd-disaggregation", "pairs.with_encoders", False, True),
    ("--log-json", "log.json", False, True),
    ("--no-page", "server.page", True, False),
]
FILES = {  # what they name must exist: tried below and in test_tls.py
    "--chat-template": "model.chat_template",
    "--tls-cert-path": "tls.cert_path",
    "--tls-key-path": "tls.key_path",
    "--client-cert-path": "tls.client_cert_path",
    "--client-key-path": "tls.client_key_path",
    "--ca-cert-paths": "tls.ca_cert_paths",
}
FIXED = [("media.fetch_timeout_s", 10.0), ("media.max_fetches_per_request", 16), ("media.inflight_wait_s", 2.0)]
# variable, key, default, text, value, text that is bad
VARIABLES = [
    ("SMG_MM_PROCESSING", "media.processing", "auto", " Router ", "router", None),
    ("SMG_IMAGE_MAX_COUNT", "media.image_max_count", None, "4", 4, "0"),
    ("SMG_IMAGE_MAX_INPUT_BYTES", "media.image_max_input_bytes", 268435456, "20000", 20000, "20k"),
    ("SMG_VIDEO_MAX_COUNT", "media.video_max_count", None, "3", 3, "many"),
    ("SMG_VIDEO_MAX_INPUT_BYTES", "media.video_max_input_bytes", 268435456, "2000", 2000, "0"),
    ("SMG_VIDEO_MAX_DECODED_BYTES", "media.video_max_decoded_bytes", 1 << 30, "100000", 100000, "-1"),
    ("SMG_VIDEO_PROCESS_TIMEOUT_SECS", "media.video_timeout_s", 30.0, "2.5", 2.5, "0"),
    ("SMG_VIDEO_DECODE_BACKEND", "media.video_backend", "auto", "PyAV", "pyav", None),
    ("SMG_AUDIO_MAX_COUNT", "media.audio_max_count", None, "3", 3, "0"),
    ("SMG_AUDIO_MAX_INPUT_BYTES", "media.audio_max_input_bytes", 268435456, "2000", 2000, "much"),
    ("SMG_AUDIO_MAX_DECODED_BYTES", "media.audio_max_decoded_bytes", 512 << 20, "100000", 100000, "0"),
    ("SMG_AUDIO_PROCESS_TIMEOUT_SECS", "media.audio_timeout_s", 30.0, "0.5", 0.5, "-1"),
    ("SMG_AUDIO_DECODE_BACKEND", "media.audio_backend", "auto", "pyav", "pyav", None),
    ("SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS", "media.allow_private_hosts", None, "YES", True, "maybe"),
    ("SMG_MM_TENSOR_TRANSPORT", "transport.mode", "inline", "auto", "auto", "bogus"),
    ("SMG_MM_SHM_MIN_BYTES", "transport.shm_min_bytes", 65536, "0", 0, "-5"),
    ("SMG_MM_PIXEL_RDMA", "transport.pixel_rdma", False, "on", True, "2"),
    ("SMG_RDMA_LISTEN_IP", "transport.rdma_listen_ip", None, "10.0.0.1", "10.0.0.1", None),
    ("SMG_RDMA_SLOT_TTL_S", "transport.rdma_slot_ttl_s", None, "300", 300.0, "0"),
    ("SMG_RDMA_LISTEN_PORT", "transport.rdma_listen_port", 18515, "18516", 18516, "0"),
    ("SMG_RDMA_POOL_SLOTS", "transport.rdma_pool_slots", 64, "2", 2, "0"),
    ("SMG_RDMA_SLOT_BYTES", "transport.rdma_slot_bytes", 33554432, "1000", 1000, "32M"),
    ("SMG_RDMA_LANDING_WAIT_S", "transport.rdma_landing_wait_s", 120.0, "5", 5.0, "0"),
    ("SMG_RDMA_READ_TIMEOUT_S", "transport.rdma_read_timeout_s", 60.0, "5", 5.0, "-1"),
    ("SMG_LOG_MM_TIMING", "media.log_timing", False, "1", True, "2"),
    ("SMG_VLLM_ENCODER_INPUT_DTYPE", "transport.vllm_dtype", None, "BF16", "bfloat16", "int8"),
    ("SMG_TOKENSPEED_ENCODER_INPUT_DTYPE", "transport.tokenspeed_dtype", None, "BF16", "bfloat16", "int8"),
    ("SMG_TOKENSPEED_IMAGE_ENCODER_INPUT_DTYPE", "transport.tokenspeed_image_dtype", None, "BF16", "bfloat16", "int8"),
    ("SMG_TOKENSPEED_VIDEO_ENCODER_INPUT_DTYPE", "transport.tokenspeed_video_dtype", None, "BF16", "bfloat16", "int8"),
    ("SMG_TOKENSPEED_AUDIO_ENCODER_INPUT_DTYPE", "transport.tokenspeed_audio_dtype", None, "BF16", "bfloat16", "int8"),
    ("SMG_MM_PIXEL_CACHE_MB", "media.pixel_cache_mb", 0, "64", 64, "abc"),
    ("MEDIAGATE_API_KEY", "server.api_key", None, "k", "k", None),
]
LEGACY = [
    ("SMG_TOKENSPEED_MM_TENSOR_TRANSPORT", "SMG_MM_TENSOR_TRANSPORT", "transport.mode", "shm", "shm"),
    ("SMG_TOKENSPEED_MM_SHM_MIN_BYTES", "SMG_MM_SHM_MIN_BYTES", "transport.shm_min_bytes", "100", 100),
]


# Only with --pd-disaggregation or --epd-disaggregation: test_pairs_of_workers, test_encode_workers.
PAIRS = {
    "--encode": "pairs.encode",
    "--encode-policy": "pairs.encode_policy",
    "--prefill": "pairs.prefill",
    "--decode": "pairs.decode",
    "--prefill-policy": "pairs.prefill_policy",
    "--decode-policy": "pairs.decode_policy",
}


def test_the_tables_name_every_declared_setting() -> None:
    keys = {row[1] for row in (*FLAGS, *SWITCHES, *VARIABLES)} | {row[0] for row in FIXED}
    keys |= {*FILES.values(), *PAIRS.values()}
    assert keys == {one.key for one in DECLARED}
    flags = {row[0] for row in (*FLAGS, *SWITCHES)} - {"--no-mm-allow-private-media-hosts"} | {*FILES, *PAIRS}
    assert flags == {flag for one in DECLARED for flag in one.setting.flags}
    variables = {row[0] for row in (*VARIABLES, *LEGACY)}
    assert variables == {name for one in DECLARED for name in (one.setting.variable, one.setting.legacy) if name}


@pytest.mark.parametrize(("flag", "key", "default", "text", "meant"), FLAGS)
def test_flag_with_its_default(flag: str, key: str, default: object, text: str, meant: object) -> None:
    assert value(settings(), key) == default
    given = settings(flag, text)
    assert value(given, key) == meant
    assert given.sources[key] == "flag"
    assert settings().sources[key] == "default"
    assert type(value(given, key)) is type(meant)


@pytest.mark.parametrize(("flag", "key", "default", "meant"), SWITCHES)
def test_switch(flag: str, key: str, default: object, meant: object) -> None:
    assert value(settings(), key) is default
    assert value(settings(flag), key) is meant
    assert settings(flag).sources[key] == "flag"


@pytest.mark.parametrize(("key", "fixed"), FIXED)
def test_fixed_limits(key: str, fixed: object) -> None:
    assert value(settings(), key) == fixed


@pytest.mark.parametrize(("name", "key", "default", "text", "meant", "bad"), VARIABLES)
def test_variable(name: str, key: str, default: object, text: str, meant: object, bad: str | None) -> None:
    given = settings(**{name: text})
    assert value(given, key) == meant
    assert given.sources[key] == "env"
    for empty in ("", "   "):
        assert settings(**{name: empty}).sources[key] == "default"
    if bad is not None:
        ignored = settings(**{name: bad})
        assert value(ignored, key) == default
        assert ignored.sources[key] == "default"
        assert [line for line in ignored.warnings if name in line], "a typo in a limit must be seen"


@pytest.mark.parametrize(("name", "canonical", "key", "text", "meant"), LEGACY)
def test_older_variable(name: str, canonical: str, key: str, text: str, meant: object) -> None:
    given = settings(**{name: text})
    assert value(given, key) == meant
    assert given.sources[key] == "legacy env"
    # the words of SMG 1.13
    assert given.warnings == (
        "Deprecated multimodal transport env var is set; migrate to the canonical name "
        f'deprecated="{name}" canonical="{canonical}"',
    )


def test_precedence() -> None:
    environ = {"SMG_TOKENSPEED_MM_TENSOR_TRANSPORT": "shm"}
    assert settings(**environ).transport.mode == "shm"
    environ["SMG_MM_TENSOR_TRANSPORT"] = "auto"
    by_variable = settings(**environ)
    assert (by_variable.transport.mode, by_variable.sources["transport.mode"]) == ("auto", "env")
    assert by_variable.warnings == ()
    by_flag = settings("--multimodal-tensor-transport", "inline", **environ)
    assert (by_flag.transport.mode, by_flag.sources["transport.mode"]) == ("inline", "flag")


def test_a_flag_silences_its_variable_bad_or_deprecated() -> None:
    assert settings("--mm-processing", "router", SMG_MM_PROCESSING="bogus").warnings == ()
    assert settings("--mm-pixel-cache-mb", "0", SMG_MM_PIXEL_CACHE_MB="abc").warnings == ()
    assert settings("--log-mm-timing", SMG_LOG_MM_TIMING="1").warnings == ()


@pytest.mark.parametrize(
    ("name", "text", "warning"),
    [
        (
            "SMG_MM_PROCESSING",
            "router",
            "SMG_MM_PROCESSING is deprecated in favour of --mm-processing; env support ends in the next minor release",
        ),
        (
            "SMG_LOG_MM_TIMING",
            "1",
            "SMG_LOG_MM_TIMING is deprecated in favour of --log-mm-timing; env support ends in the next minor release",
        ),
        ("SMG_MM_PIXEL_CACHE_MB", "abc", "SMG_MM_PIXEL_CACHE_MB is not a number; pixel cache stays off"),
        ("SMG_MM_PIXEL_CACHE_MB", "-1", "SMG_MM_PIXEL_CACHE_MB is not a number; pixel cache stays off"),
    ],
)
def test_warnings_in_the_words_of_smg(name: str, text: str, warning: str) -> None:
    assert settings(**{name: text}).warnings == (warning,)


def test_bad_variables_name_value_expectation_and_what_is_used() -> None:
    assert settings(SMG_IMAGE_MAX_COUNT="0").warnings == (
        "SMG_IMAGE_MAX_COUNT='0' is ignored, expected an integer, at least 1; using the model's limit",
    )
    assert settings(SMG_MM_TENSOR_TRANSPORT="bogus").warnings == (
        "SMG_MM_TENSOR_TRANSPORT='bogus' is ignored, expected inline|shm|auto|rdma; using inline",
    )


# The list that ends the configuration table, with the words SMG 1.13 was seen to use where it has the same check.
SMOKE = [
    ("--multimodal-max-inflight-bytes 0", 1, "field 'multimodal_max_inflight_bytes': 0 - Must be at least 1"),
    (
        "--mm-per-request-image-limit 0",
        1,
        "Configuration error: Invalid value for field 'mm_per_request_image_limit': 0 - Must be at least 1",
    ),
    (
        "--mm-processing bogus",
        2,
        "argument --mm-processing: invalid choice: 'bogus' (choose from 'auto', 'router', 'worker')",
    ),
    ("--mm-pixel-cache-mb -1", 2, "argument --mm-pixel-cache-mb: expected a non-negative integer, got '-1'"),
    ("--multimodal-tensor-transport bogus", 2, "argument --multimodal-tensor-transport: invalid choice: 'bogus'"),
    ("--multimodal-shm-min-bytes -1", 1, "field 'multimodal_shm_min_bytes': -1 - Must be at least 0"),
    ("--rdma-slot-ttl-s 0", 1, "rdma_slot_ttl_s"),
    (
        "--prometheus-port 0",
        1,
        "field 'prometheus_port': 0 - Port must be > 0 (0 would request an unstable OS-ephemeral port)",
    ),
    (
        "--retry-max-retries 0",
        1,
        "field 'retry_max_retries': 0 - Must be >= 1 (set to 1 to effectively disable retries)",
    ),
    ("--model-path /nope", 1, "Configuration error: Invalid value for field 'model_path': /nope - does not exist"),
    (
        "--chat-template /nope",
        1,
        "Configuration error: Invalid value for field 'chat_template': /nope - does not exist",
    ),
]


@pytest.mark.parametrize(("line", "status", "words"), SMOKE)
def test_start_up_failures(line: str, status: int, words: str) -> None:
    error = failure(*line.split())
    assert error.exit_code == status
    assert words in error.message


def test_start_up_failure_of_the_one_variable_that_stops() -> None:
    error = failure(SMG_MM_PROCESSING="bogus")
    assert error.exit_code == 1
    assert error.message == (
        "SMG_MM_PROCESSING: invalid multimodal processing mode 'bogus'; expected auto|router|worker"
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--port 0", "'port': 0 - Must be between 1 and 65535"),
        ("--port 70000", "'port': 70000 - Must be between 1 and 65535"),
        ("--prometheus-port 65536", "'prometheus_port'"),
        ("--prometheus-port 30000", "'prometheus_port': 30000 - Must differ from --port"),
        ("--host example.com", "'host': example.com - Must be an IPv4 or IPv6 address"),
        ("--prometheus-host nowhere", "'prometheus_host': nowhere"),
        ("--max-payload-size 0", "'max_payload_size': 0"),
        ("--request-timeout-secs 0", "'request_timeout_secs': 0"),
        ("--sse-keepalive-secs -1", "'sse_keepalive_secs': -1"),
        ("--queue-size -1", "'queue_size': -1 - Must be at least 0"),
        ("--max-concurrent-requests -2", "'max_concurrent_requests': -2 - Must be -1"),
        ("--max-inflight-body-bytes 5", "'max_inflight_body_bytes': 5 - Must be at least --max-payload-size"),
        ("--retry-backoff-multiplier 0.5", "'retry_backoff_multiplier': 0.5 - Must be at least 1"),
        ("--retry-jitter-factor 2", "'retry_jitter_factor': 2 - Must be between 0 and 1"),
        ("--retry-max-backoff-ms 10", "'retry_max_backoff_ms': 10 - Must be at least --retry-initial-backoff-ms (50)"),
        ("--health-failure-threshold 0", "'health_failure_threshold': 0"),
        ("--pool-processes 0", "'pool_processes': 0"),
        ("--pool-ring-bytes 4096", "'pool_ring_bytes': 4096 - Must be at least 1048576"),
        ("--cors-allowed-origins * https://a", "'cors_allowed_origins': * - '*' stands alone"),
        ("--cors-allowed-origins https://a/path", "'cors_allowed_origins': https://a/path"),
        ("--model-alias nick", "'model_alias': nick - Must be alias=model"),
        ("--model-alias nick=a nick=b", "'model_alias': nick=b - Must not stand for two models, the other is a"),
        ("--request-id-headers x:y", "'request_id_headers': x:y"),
        ("--mm-allowed-media-domains ,,", "'mm_allowed_media_domains': '' - Must name at least one host"),
        ("--mm-allowed-media-domains https://a.example", "Must be a host name alone"),
        ("--mm-allowed-media-domains *.example", "Must be a host name alone"),
        ("--mm-allowed-media-domains a.example:80", "Must be a host name alone"),
        ("--model-path ./absent", "'model_path': ./absent - does not exist"),
        ("--model-path a/b/c", "'model_path': a/b/c - does not exist"),
        ("--tokenizer-path /nope", "'tokenizer_path': /nope - does not exist"),
    ],
)  # fmt: skip
def test_later_checks(line: str, words: str) -> None:
    error = failure(*line.split())
    assert error.exit_code == 1
    assert words in error.message


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("grpc://10.0.0.1:50051", "grpc://10.0.0.1:50051"),
        ("grpcs://engine.example:443/", "grpcs://engine.example:443"),
        ("127.0.0.1:5", "grpc://127.0.0.1:5"),
        ("engine-1:50051", "grpc://engine-1:50051"),
        ("grpc://[::1]:50051", "grpc://[::1]:50051"),
    ],
)
def test_worker_urls(url: str, meant: str) -> None:
    assert settings("--worker-urls", url).workers.urls == (meant,)


def test_pairs_of_workers() -> None:
    line = "--pd-disaggregation --prefill a:1 9000 --prefill grpc://b:1 none --prefill c:1 --decode d:1 --decode e:1"
    pairs = settings(*line.split(), "--prefill-policy", "random").pairs
    assert pairs.enabled
    assert pairs.prefill == ("grpc://a:1 9000", "grpc://b:1", "grpc://c:1")
    assert pairs.decode == ("grpc://d:1", "grpc://e:1")
    assert (pairs.prefill_policy, pairs.decode_policy) == ("random", None)
    warnings = settings("--pd-disaggregation", "--prefill", "a:1").warnings
    assert warnings == ("--pd-disaggregation without --decode: nothing is served until POST /workers adds one",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--prefill a:1", "'prefill': grpc://a:1 - Only with --pd-disaggregation"),
        ("--encode a:1", "'encode': grpc://a:1 - Only with --epd-disaggregation"),
        ("--pd-disaggregation --encode a:1", "'encode': grpc://a:1 - Only with --epd-disaggregation"),
        ("--pd-disaggregation --epd-disaggregation", "'epd_disaggregation': on - Not with --pd-disaggregation"),
        ("--epd-disaggregation --worker-urls a:1", "'worker_url': grpc://a:1 - Not with --epd-disaggregation"),
        ("--epd-disaggregation --encode a:1 --prefill a:1", "'prefill': grpc://a:1 - Is a worker of the role encode"),
        ("--epd-disaggregation --encode ipc:///tmp/x", "'encode': ipc:///tmp/x - gRPC workers only"),
        ("--decode-policy random", "'decode_policy': random - Only with --pd-disaggregation"),
        ("--pd-disaggregation --worker-urls a:1", "'worker_url': grpc://a:1 - Not with --pd-disaggregation"),
        ("--pd-disaggregation --prefill a:1 0", "from 1 to 65535, or none"),
        ("--pd-disaggregation --prefill a:1 65536", "from 1 to 65535, or none"),
        ("--pd-disaggregation --prefill a:1 x", "from 1 to 65535, or none"),
        ("--pd-disaggregation --prefill a:1 9000 b:1", "'prefill': a:1 9000 b:1 - Names one worker each time"),
        (
            "--pd-disaggregation --prefill a:1 --decode a:1",
            "'decode': grpc://a:1 - Is a worker of the role prefill already",
        ),
        ("--pd-disaggregation --prefill ipc:///tmp/x", "'prefill': ipc:///tmp/x - gRPC workers only"),
        ("--pd-disaggregation --decode http://a:1", "'decode': http://a:1 - gRPC workers only"),
        ("--pd-disaggregation --decode-policy bucket", "--decode-policy bucket: this version"),
    ],
)
def test_pairs_that_cannot_be(line: str, words: str) -> None:
    error = failure(*line.split())
    assert error.exit_code == 1
    assert words in error.message


def test_encode_workers() -> None:
    line = "--epd-disaggregation --encode a:1 9100 --encode b:1 --prefill c:1 9000 --decode d:1 --encode-policy random"
    pairs = settings(*line.split()).pairs
    assert pairs.roles == ("encode", "prefill", "decode")
    assert (pairs.encode, pairs.encode_policy) == (("grpc://a:1 9100", "grpc://b:1"), "random")
    assert settings("--pd-disaggregation").pairs.roles == ("prefill", "decode")
    assert settings().pairs.roles == ("regular",)


def test_a_decode_worker_has_no_port() -> None:
    assert failure("--pd-disaggregation", "--decode", "a:1", "9000").exit_code == 2


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:5", "gRPC workers only"),
        ("https://127.0.0.1:5", "gRPC workers only"),
        ("ipc:///tmp/x", "gRPC workers only"),
        ("a:5,b:5", "Must be one worker; several are separated by blanks"),
        ("ftp://a:5", "URL must start with a lowercase grpc:// or grpcs:// scheme"),
        ("GRPC://a:5", "URL must start with a lowercase"),
        ("grpc://a", "Must be host:port"),
        ("grpc://a:0", "Must be host:port"),
        ("grpc://a:99999", "Must be host:port"),
        ("grpc://u@a:5", "Must be host:port"),
        ("a", "Must be host:port"),
        ("a:5/path", "Must be host:port"),
        ("[::1:5", "Must be host:port"),
    ],
)
def test_worker_urls_that_cannot_be(url: str, words: str) -> None:
    error = failure("--worker-urls", "grpc://good:1", url)
    assert error.message.startswith(f"Configuration error: Invalid value for field 'worker_url': {url} - ")
    assert words in error.message


def test_a_worker_named_twice_is_used_once_and_told() -> None:
    config = settings("--worker-urls", "a:5", "grpc://a:5", "b:5")
    assert config.workers.urls == ("grpc://a:5", "grpc://b:5")
    assert any("twice" in line for line in config.warnings)


def test_local_model_and_template(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    config = settings("--model-path", str(tmp_path), "--chat-template", str(template))
    assert config.model.path == config.model.tokenizer_path == str(tmp_path)
    assert config.model.chat_template == str(template)
    template.write_text("")
    assert "is empty" in failure("--chat-template", str(template)).message
    assert "is not a file" in failure("--chat-template", str(tmp_path)).message
    assert "is not a folder" in failure("--model-path", str(template)).message
    for flag in ("--model-path", "--tokenizer-path", "--chat-template"):  # nobody's home
        assert "does not exist" in failure(flag, "~nobody-of-this-name/x").message


def test_what_a_new_version_brings_is_refused_not_ignored() -> None:
    for line, words in [
        ("--policy least_load", "cache_aware, round_robin, random, power_of_two, consistent_hashing"),
    ]:
        error = failure(*line.split())
        assert error.exit_code == 1
        assert words in error.message


@pytest.mark.parametrize("flag", refused_flags())
def test_known_flags_are_never_unrecognized(flag: str) -> None:
    for argv in ([flag], [flag, "some", "words"], [flag, "-1"], [f"{flag}=x"]):
        error = failure("--port", "30001", *argv)
        assert error.exit_code == 1
        assert error.message.startswith(f"Configuration error: {flag}: ")


def test_every_refused_flag_is_named_at_once() -> None:
    error = failure("--enable-mesh", "--jwt-issuer", "x", "--service-discovery", "some", "words", "--enable-mesh")
    assert [line.split(": ")[1] for line in error.message.splitlines()] == [
        "--enable-mesh",
        "--jwt-issuer",
        "--service-discovery",
    ]


def test_no_flag_stands_in_two_tables() -> None:
    flags = [flag for table in (LATER_FLAGS, NEVER_FLAGS) for names in table.values() for flag in names.split()]
    assert len(flags) == len(set(flags))
    assert not set(flags) & {flag for one in DECLARED for flag in one.setting.flags}


def test_the_older_word_for_the_rdma_transport() -> None:
    assert settings("--mm-pixel-rdma").transport.mode == "rdma"
    asked = settings(SMG_MM_PIXEL_RDMA="1")
    assert asked.transport.mode == "rdma" and "--mm-pixel-rdma; env support ends" in asked.warnings[0]
    assert settings(SMG_MM_PIXEL_RDMA="0").transport.mode == "inline"
    other = settings("--mm-pixel-rdma", "--multimodal-tensor-transport", "shm")
    assert other.transport.mode == "shm"
    assert other.warnings == ("--mm-pixel-rdma is ignored: --multimodal-tensor-transport is shm",)


@pytest.mark.parametrize(("ttl", "is_ignored"), [("180", True), ("181", False)])
def test_a_slot_lives_longer_than_a_worker_holds_it(ttl: str, is_ignored: bool) -> None:
    asked = settings("--rdma-slot-ttl-s", ttl, "--rdma-listen-ip", "[::1]")
    assert bool(asked.warnings) == is_ignored
    lane = rdma_settings(asked.transport)
    assert lane is not None and lane.listen_ip == "::1"
    assert lane.ttl_s == (210 if is_ignored else 181)


def test_slots_together_are_8_gib_at_most() -> None:
    asked = settings("--rdma-listen-ip", "10.0.0.1", SMG_RDMA_SLOT_BYTES=str(1 << 30))
    lane = rdma_settings(asked.transport)
    assert lane is not None and lane.slots == 8
    assert rdma_settings(settings().transport) is None
    assert "rdma_listen_ip" in failure("--rdma-listen-ip", "a-host").message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bogus", "unsupported SMG_AUDIO_DECODE_BACKEND=bogus; expected auto, pyav, or ffmpeg"),
        (
            "Symphonia",
            "SMG_AUDIO_DECODE_BACKEND symphonia: it is a library for Rust programs, which this is none of; take auto, "
            "pyav or ffmpeg",
        ),
    ],
)
def test_a_decoder_of_sounds_that_is_not_there_stops(text: str, words: str) -> None:
    assert failure(SMG_AUDIO_DECODE_BACKEND=text).message.endswith(words)


def test_a_bad_video_backend_stops_and_a_good_one_does_not() -> None:
    error = failure(SMG_VIDEO_DECODE_BACKEND="bogus")
    assert error.exit_code == 1
    assert error.message.startswith("unsupported SMG_VIDEO_DECODE_BACKEND=bogus; expected auto,")
    for good in ("auto", "pyav", "OpenCV"):
        assert settings(SMG_VIDEO_DECODE_BACKEND=good).warnings == ()


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenCV stops the start; the ffmpeg program may come later."""
    monkeypatch.setitem(sys.modules, "cv2", None)  # as if it were not there
    assert failure(SMG_VIDEO_DECODE_BACKEND="opencv").message.startswith(
        "Configuration error: SMG_VIDEO_DECODE_BACKEND opencv: cv2 cannot be imported (pip install opencv-python-"
    )
    monkeypatch.setenv("PATH", "/nowhere")
    assert settings(SMG_VIDEO_DECODE_BACKEND="ffmpeg", SMG_AUDIO_DECODE_BACKEND="ffmpeg").warnings == (
        "SMG_VIDEO_DECODE_BACKEND is ffmpeg, which is not in PATH: clips are refused until it is",
        "SMG_AUDIO_DECODE_BACKEND is ffmpeg, which is not in PATH: sounds are refused until it is",
    )


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("SMG_IMAGE_MAX_CUONT", ". Did you mean SMG_IMAGE_MAX_COUNT?"),
        ("MEDIAGATE_APIKEY", ". Did you mean MEDIAGATE_API_KEY?"),
        ("SMG_API_KEY", ". Did you mean MEDIAGATE_API_KEY?"),
        ("MEDIAGATE_IMAGE_MAX_COUNT", ". Did you mean SMG_IMAGE_MAX_COUNT?"),
        ("smg_mm_tensor_transport", ". Did you mean SMG_MM_TENSOR_TRANSPORT?"),
        ("SGM_IMAGE_MAX_INPUT_BYTES", ". Did you mean SMG_IMAGE_MAX_INPUT_BYTES?"),
        ("MEDIGATE_API_KEY", ". Did you mean MEDIAGATE_API_KEY?"),
        ("SMG_VLLM_ENCODER_INPUT_DYTPE", ". Did you mean SMG_VLLM_ENCODER_INPUT_DTYPE?"),
        ("SMG_MAX_PAYLOAD_SIZE", ". Did you mean the flag --max-payload-size?"),
        ("SMG_COLOUR", ""),
        ("MEDIAGATE_", ""),
    ],
)
def test_variables_that_nobody_reads_are_told_and_their_values_are_not(name: str, hint: str) -> None:
    assert settings(**{name: "s3cret"}).warnings == (
        f"{name} is not a variable of this gateway; it has no effect{hint}",
    )


def test_foreign_variables() -> None:
    others = ("PATH", "HOME", "API_KEY", "OPENAI_API_KEY", "IMAGE_MAX_COUNT", "SMGX", "SMG_VLLM_SOMETHING_NEW")
    assert settings(**dict.fromkeys((*ENGINE_VARIABLES, *others), "1")).warnings == ()
    assert settings(SMG_IMAGE_MAX_CUONT=" ").warnings == ()


def test_retries_and_moot_switches() -> None:
    assert settings("--disable-retries").workers.retry_attempts == 1
    assert settings("--disable-retries", "--retry-max-retries", "4").workers.retry_attempts == 1
    assert settings("--disable-circuit-breaker", "--disable-load-monitoring").warnings == ()


def test_private_media_hosts_follow_the_bind_address() -> None:
    assert settings().private_media_hosts
    assert settings("--host", "::1").private_media_hosts
    assert settings("--host", "localhost").server.host == "127.0.0.1"
    assert not settings("--host", "0.0.0.0").private_media_hosts
    assert settings("--host", "0.0.0.0", "--mm-allow-private-media-hosts").private_media_hosts
    assert not settings("--no-mm-allow-private-media-hosts").private_media_hosts
    assert not settings("--no-mm-allow-private-media-hosts", SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS="1").private_media_hosts
    assert not settings("--host", "0.0.0.0", SMG_MM_ALLOW_PRIVATE_MEDIA_HOSTS="maybe").private_media_hosts


def test_an_open_listener_without_a_key_is_told() -> None:
    assert any("without --api-key" in line for line in settings("--host", "0.0.0.0").warnings)
    assert settings("--host", "0.0.0.0", "--api-key", "k").warnings == ()


def test_metrics_listen_where_the_gateway_does() -> None:
    assert settings("--host", "::1").metrics.host == "::1"
    assert settings("--host", "::1", "--prometheus-host", "127.0.0.1").metrics.host == "127.0.0.1"


def test_summary_tells_what_is_set_and_where_and_nothing_else() -> None:
    config = settings("--multimodal-shm-min-bytes", "1", "--no-page", SMG_MM_TENSOR_TRANSPORT="auto",
                      SMG_MM_SHM_MIN_BYTES="7", SMG_IMAGE_MAX_INPUT_BYTES="5")  # fmt: skip
    assert config.summary() == (
        "settings: --no-page=on (flag), SMG_IMAGE_MAX_INPUT_BYTES=5 bytes (env), "
        "--multimodal-tensor-transport=auto (env), --multimodal-shm-min-bytes=1 bytes (flag); "
        "all others have their defaults, see --check-config"
    )
    assert "--multimodal-shm-min-bytes=9 bytes (legacy env)" in settings(SMG_TOKENSPEED_MM_SHM_MIN_BYTES="9").summary()
    assert settings().summary().startswith("settings: none given; ")
    fleet = [f"worker-{number}.internal:50051" for number in range(100)]
    assert len(settings("--worker-urls", *fleet).summary()) < 250


def test_listing_shows_everything_but_secrets() -> None:
    for flag in ("--api-key", "--tls-cert-path", "--tls-key-path"):  # an unset variable of a unit file
        assert "is empty" in failure(flag, "").message
    config = settings("--api-key", "hunter2", "--retry-initial-backoff-ms", "20")
    listing = "\n".join(config.listing())
    assert "--retry-initial-backoff-ms = 20 ms (flag)" in listing
    assert "media fetch timeout = 10 s (fixed)" in listing
    assert "--api-key = set (flag)" in listing
    assert "--disable-health-check = off (default)" in listing  # the flag's own sense
    assert "mm_allow" not in listing and "--mm-allow-private-media-hosts = allowed, as --host is 127.0.0.1" in listing
    assert {line.split(" = ")[0] for line in config.listing()} >= {one.flag for one in DECLARED if one.flag}
    for text in (listing, repr(config), config.summary(), failure("--api-key", "hunter2 x").message):
        assert "hunter2" not in text
    assert len(config.listing()) == len(DECLARED)


def test_a_config_is_frozen_and_has_usable_struct_defaults() -> None:
    with pytest.raises(AttributeError):
        Config().server.port = 1  # type: ignore[misc]
    assert Config().server.port == 30000


def test_every_declaration_says_what_it_is() -> None:
    for one in DECLARED:
        assert one.text.endswith(".") and len(one.text) < 130, one.key
        assert one.text.count(". ") == 0, f"{one.key}: one sentence"
        if one.name.endswith(("_s", "_bytes")):
            assert one.setting.unit, one.key
        if one.default is None or one.default == "" or (one.default == 0 and one.ge == 1):
            assert one.setting.computed, f"{one.key}: what the default becomes"


def test_only_the_parser_is_given_the_environment() -> None:
    """One reader: no module of the pipeline looks at os.environ."""
    folder = Path(config_module.__file__).parent
    reading = [
        path.name for path in folder.rglob("*.py") if re.search(r"os\.environ|os\.getenv|getenv\(", path.read_text())
    ]
    assert reading == []


def test_exit_codes() -> None:
    names = ("EXIT_OK", "EXIT_CONFIG", "EXIT_USAGE", "EXIT_PORT_TAKEN", "EXIT_POOL", "EXIT_FRONTEND")
    assert [getattr(config_module, name) for name in names] == [0, 1, 2, 3, 4, EXIT_FRONTEND_DIED]
    assert list(config_module.EXIT_CODES) == [0, 1, 2, 3, 4, 5]


def test_a_config_survives_json() -> None:
    """Only plain data: what it holds can be handed on, compared and dumped."""
    config = settings("--worker-urls", "a:1")
    assert msgspec.convert(msgspec.to_builtins(config), Config) == config


NAMES = sorted({name for one in DECLARED for name in (one.setting.variable, one.setting.legacy) if name})
VALUED = sorted(one.flag for one in DECLARED if one.flag and one.kind is not bool)


@examples(deadline=None, max_examples=50)
@given(environ=st.dictionaries(st.sampled_from(NAMES), st.text(max_size=30)))
def test_no_variable_can_crash_the_start(environ: dict[str, str]) -> None:
    """Whatever it holds, it is used, told, or (SMG_MM_PROCESSING and what is absent) refused with a sentence."""
    try:
        config = parse([], environ).config
    except ConfigError as error:
        assert error.exit_code == 1 and error.message
        return
    assert config is not None
    for name, text in environ.items():
        declared = next(one for one in DECLARED if name in (one.setting.variable, one.setting.legacy))
        if name == declared.setting.legacy and environ.get(declared.setting.variable, "").strip():
            continue  # the newer name decides, good or bad
        used = config.sources[declared.key] in ("env", "legacy env")
        assert used or not text.strip() or any(name in line for line in config.warnings)


@examples(deadline=None, max_examples=50)
@given(flag=st.sampled_from(VALUED), text=st.one_of(st.text(max_size=30), st.integers().map(str), st.floats().map(str)))
def test_no_flag_can_crash_the_start(flag: str, text: str) -> None:
    try:
        invocation = parse([f"{flag}={text}"], {})
    except ConfigError as error:
        assert error.exit_code in (1, 2) and error.message
        return
    assert invocation.config is not None
