"""What the configuration says about engine workers, in the words of `engines/`, which knows no configuration."""

import ssl

from engines.base import Modality
from engines.breaker import BreakerSettings
from engines.cache_aware import CacheAwareSettings
from engines.channel import worker_tls
from engines.dispatch import DispatchSettings, RetrySettings
from engines.health import HealthSettings
from engines.policies import PolicySettings, PrefixHashSettings
from engines.registry import RegistrySettings
from engines.worker import WorkerSpec, WorkerType
from pipeline.config import Config, Tls


def tls_of_workers(tls: Tls) -> ssl.SSLContext | None:
    """None: what the system trusts, read when the first grpcs worker comes."""
    certificate = (tls.client_cert_path, tls.client_key_path) if tls.client_cert_path and tls.client_key_path else None
    return worker_tls(tls.ca_cert_paths, certificate) if certificate or tls.ca_cert_paths else None


def backend_word(config: Config) -> str:
    """SMG's word in the metrics."""
    return "epd" if config.pairs.with_encoders else "pd" if config.pairs.enabled else "regular"


def worker_specs(config: Config) -> list[WorkerSpec]:
    """The workers of the command line."""
    found = [WorkerSpec(url=url) for url in config.workers.urls]
    pairs = config.pairs
    given: dict[WorkerType, tuple[str, ...]] = {
        "encode": pairs.encode,
        "prefill": pairs.prefill,
        "decode": pairs.decode,
    }
    for role, texts in given.items():
        for text in texts:
            url, _, port = text.partition(" ")
            found.append(WorkerSpec(url=url, worker_type=role, bootstrap_port=int(port) if port else None))
    return found


def registry_settings(config: Config) -> RegistrySettings:
    workers, server = config.workers, config.server
    health = HealthSettings(
        startup_timeout_s=workers.startup_timeout_s,
        startup_check_interval_s=workers.startup_check_interval_s,
        interval_s=workers.health_interval_s,
        timeout_s=workers.health_timeout_s,
        failure_threshold=workers.failure_threshold,
        success_threshold=workers.success_threshold,
        disabled=not workers.health_enabled,
    )
    breaker = BreakerSettings(
        failure_threshold=workers.breaker_failures,
        success_threshold=workers.breaker_successes,
        timeout_duration_s=workers.breaker_timeout_s,
        window_duration_s=workers.breaker_window_s,
        disabled=not workers.breaker_enabled,
    )
    return RegistrySettings(
        health=health,
        breaker=breaker,
        dp_aware=workers.dp_aware,
        drain_settle_s=server.drain_settle_s,
        drain_grace_s=server.shutdown_grace_s,
        aliases=dict(pair.split("=", 1) for pair in config.model.aliases),
        roles=config.pairs.roles,
    )


def dispatch_settings(config: Config) -> DispatchSettings:
    workers = config.workers
    retry = RetrySettings(
        max_attempts=workers.retry_attempts,
        initial_backoff_s=workers.retry_initial_backoff_s,
        max_backoff_s=workers.retry_max_backoff_s,
        multiplier=workers.retry_backoff_multiplier,
        jitter=workers.retry_jitter,
    )
    pairs = config.pairs
    policies = {
        "encode": pairs.encode_policy or "consistent_hashing",
        "prefill": pairs.prefill_policy,
        "decode": pairs.decode_policy,
    }
    widths = config.transport
    dtypes = {"vllm": widths.vllm_dtype, "tokenspeed": widths.tokenspeed_dtype}
    tokenspeed = {
        Modality.IMAGE: widths.tokenspeed_image_dtype,
        Modality.VIDEO: widths.tokenspeed_video_dtype,
        Modality.AUDIO: widths.tokenspeed_audio_dtype,
    }
    return DispatchSettings(
        policy=workers.policy,
        policies=_policy_settings(config),
        in_pairs=config.pairs.enabled or config.pairs.with_encoders,
        with_encoders=config.pairs.with_encoders,
        role_policies={role: policy for role, policy in policies.items() if policy},
        retry=retry,
        encoder_dtypes={runtime: dtype for runtime, dtype in dtypes.items() if dtype},
        modality_dtypes={"tokenspeed": {modality: dtype for modality, dtype in tokenspeed.items() if dtype}},
    )


def _policy_settings(config: Config) -> PolicySettings:
    routing = config.routing
    cache_aware = CacheAwareSettings(
        match_threshold=routing.cache_threshold,
        balance_abs=routing.balance_abs,
        balance_rel=routing.balance_rel,
        max_tokens=routing.max_tree_tokens,
        block_size=routing.block_size,
        ttl_s=routing.cache_ttl_s,
    )
    prefix_hash = PrefixHashSettings(
        tokens=routing.prefix_tokens, factor=routing.prefix_load_factor, margin=routing.prefix_balance_abs
    )
    return PolicySettings(cache_aware, prefix_hash)
