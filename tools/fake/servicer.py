"""The stand-in's face: vllm.grpc.engine.VllmEngine over grpc.aio, in the published servicer's manners.

Streaming sends each new token in a chunk and repeats the last chunk's tokens in `complete`; `completion_tokens`
counts one message's tokens, not the total.  Every Generate, Abort and cancelled stream becomes one JSON line in the
journal, with the digests of the tensors, so that a test or a comparison knows what arrived.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import socket
import time
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TextIO

import grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as rpc
from tokenizers import Tokenizer

from tools.fake.faults import Fault, FaultError, Script
from tools.fake.journal import record
from tools.fake.received import Expectations, Seen, receive
from tools.fake.tensors import Reader, Refused
from tools.fake.words import Answer, answer, last_turn, logprobs, sentence, told_to_say

CHUNK_BYTES = 64 * 1024
REFERENCE_TOKENS = 64  # what an anchor is said to become: nothing is fetched here
DIGEST_MARKER = "[[digest]]"  # in a prompt: read this request in full although the stand-in is light
_BUNDLE_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How this stand-in behaves.  `text` replaces the sentence; `light`: no digests, a short answer.  `stamps`: an
    answer begins with the moment of its first chunk, in nanoseconds of the host's monotonic clock, and a pause comes
    before every further chunk only.
    """

    bundle: Path
    model: str
    labels: dict[str, Any]
    tokenizer_path: str = ""
    latency_s: float = 0.0
    token_delay_s: float = 0.0
    tokens_per_chunk: int = 1
    text: str = ""
    light: bool = False
    stamps: bool = False
    fault: str = ""
    unhealthy_file: Path | None = None
    keeps_names: bool = False


def namespace_id() -> str:
    """Identity of this host's /dev/shm: boot id, then the device number of the tmpfs."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/dev/shm').st_dev}"


def bundle_archive(directory: Path) -> bytes:
    """The tokenizer bundle as GetTokenizer sends it: a ZIP of the files an engine has."""
    names = [name for name in _BUNDLE_NAMES if (directory / name).is_file()]
    names += sorted(path.name for path in directory.iterdir() if path.suffix in (".tiktoken", ".jinja", ".model"))
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            archive.write(directory / name, name)
    return held.getvalue()


class Engine(rpc.VllmEngineServicer):
    """One fake worker."""

    def __init__(self, settings: Settings, journal: TextIO | None) -> None:
        self._settings = settings
        self._journal = journal
        self._tokenizer = Tokenizer.from_file(str(settings.bundle / "tokenizer.json"))
        self._config = json.loads((settings.bundle / "config.json").read_text())
        self._started, self._running = time.time(), 0
        self._reader, self._script = Reader(keeps_names=settings.keeps_names), Script(settings.fault)
        self._aborted: set[str] = set()
        self._archive = bundle_archive(settings.bundle)
        self._ends = _end_tokens(settings.bundle, self._config)
        self._expected = _expectations(self._config, settings.labels)

    # ---- what a gateway asks when it registers the worker

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        flag = self._settings.unhealthy_file
        healthy = flag is None or not flag.exists()
        return pb.HealthCheckResponse(healthy=healthy, message="OK" if healthy else "told to be unhealthy")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        name = self._settings.model
        reply = pb.GetModelInfoResponse(
            model_path=name,
            served_model_name=name,
            tokenizer_path=self._settings.tokenizer_path or str(self._settings.bundle),
            is_generation=True,
            supports_vision=True,
            max_context_length=262144,
            max_req_input_len=262143,
            vocab_size=self._expected.vocabulary,
            model_type=self._config.get("model_type", ""),
            architectures=self._config.get("architectures", []),
            eos_token_ids=self._ends,
        )
        return _labelled(reply, self._settings.labels)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        reply = pb.GetServerInfoResponse(
            server_type="vllm-grpc",
            data_parallel_size=1,
            shm_namespace_id=namespace_id(),
            uptime_seconds=time.time() - self._started,
            active_requests=self._running,
        )
        return _labelled(reply, self._settings.labels)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        load = pb.SchedulerLoad(num_running_reqs=self._running, num_total_reqs=self._running, max_running_requests=256)
        return pb.GetLoadsResponse(timestamp="2026-01-01T00:00:00Z", version="0", dp_rank_count=1, loads=[load])

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        digest = hashlib.sha256(self._archive).hexdigest()
        for start in range(0, len(self._archive), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(self._archive)
            data = self._archive[start : start + CHUNK_BYTES]
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest if last else "")

    async def FlushCache(self, request: Any, context: Any) -> Any:
        return common_pb2.FlushCacheResponse(success=True, message="nothing cached")

    async def Abort(self, request: Any, context: Any) -> Any:
        self._aborted.update(request.request_ids)
        self._note("abort", request_ids=list(request.request_ids))
        return pb.AbortResponse()

    # ---- generation

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        prompt = self._prompt(request)
        light = self._settings.light and DIGEST_MARKER not in prompt
        try:
            fault = self._script.next(prompt)
            seen = receive(request, self._expected, self._reader, light=light)
        except (Refused, FaultError) as error:
            self._note("refused", request_id=request.request_id, reason=str(error))
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if not light:
            self._note("generate", **record(request, seen), metadata=dict(context.invocation_metadata() or ()))
        self._running += 1
        try:
            async for reply in self._replies(request, seen, prompt, fault, context):
                yield reply
        except asyncio.CancelledError:
            self._note("cancelled", request_id=request.request_id)
            raise
        finally:
            self._running -= 1

    async def _replies(
        self, request: Any, seen: Seen, prompt: str, fault: Fault | None, context: Any
    ) -> AsyncIterator[Any]:
        delay_s = self._settings.latency_s + (fault.delay_s if fault else 0.0)
        if delay_s:
            await asyncio.sleep(delay_s)
        await self._strike(fault, 0, context)
        told = self._settings.text or ("ok" if self._settings.light else sentence(seen, last_turn(prompt)))
        text = told_to_say(last_turn(prompt)) or told
        if self._settings.stamps:
            text = f"{time.monotonic_ns()} {text}"
        whole = answer(self._tokenizer, text, request.sampling_params, self._ends)
        choices = max(1, request.sampling_params.n)
        step = self._settings.tokens_per_chunk
        last: tuple[int, ...] = ()
        for done in range(0, len(whole.token_ids), step):
            last = whole.token_ids[done : done + step]
            if self._settings.token_delay_s and (done or not self._settings.stamps):
                await asyncio.sleep(self._settings.token_delay_s)
            if request.request_id in self._aborted:
                whole = Answer(whole.token_ids[:done], "abort")
                break
            for index in range(choices) if request.stream else ():
                yield self._message(request, seen, last, index, None)
            await self._strike(fault, done + len(last), context)
        for index in range(choices):
            yield self._message(request, seen, last if request.stream else whole.token_ids, index, whole)
            await self._strike(fault, 0, context, choices=index + 1)

    async def _strike(self, fault: Fault | None, tokens: int, context: Any, *, choices: int = 0) -> None:
        """Let the fault happen when its time has come."""
        if fault is None or fault.kind == "slow" or choices != fault.choices or tokens < fault.after:
            return
        if fault.kind in ("refuse", "break"):
            await context.abort(fault.status, fault.message)
        elif fault.kind == "exit":
            os._exit(70)
        elif fault.kind == "drop":
            _shut_down(context.peer())
        await asyncio.Event().wait()  # silent; after a drop there is nobody left to talk to

    def _message(self, request: Any, seen: Seen, tokens: tuple[int, ...], index: int, end: Answer | None) -> Any:
        """A chunk, or with `end` the completion of one choice."""
        sampling = request.sampling_params
        prompt = len(seen.input_ids) + (REFERENCE_TOKENS - 1) * len(seen.references)
        facts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": len(tokens), "index": index}
        if sampling.HasField("logprobs"):
            facts["output_logprobs"] = logprobs(pb, tokens, sampling.logprobs, self._expected.vocabulary)
        if end is None:
            return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=tokens, **facts))
        if end.matched_token is not None:
            facts["matched_token_id"] = end.matched_token
        if end.matched_text is not None:
            facts["matched_stop_str"] = end.matched_text
        complete = pb.GenerateComplete(output_ids=tokens, finish_reason=end.finish_reason, **facts)
        return pb.GenerateResponse(complete=complete)

    def _prompt(self, request: Any) -> str:
        text: str = request.tokenized.original_text
        if text or not request.tokenized.input_ids:
            return text
        decoded: str = self._tokenizer.decode(list(request.tokenized.input_ids), skip_special_tokens=False)
        return decoded

    def _note(self, event: str, **facts: Any) -> None:
        if self._journal is None:
            return
        self._journal.write(json.dumps({"event": event, **facts}) + "\n")
        self._journal.flush()


def _labelled(reply: Any, labels: dict[str, Any]) -> Any:
    for name, value in labels.items():
        if name in reply.DESCRIPTOR.fields_by_name:
            setattr(reply, name, value)
    return reply


def _end_tokens(bundle: Path, config: dict[str, Any]) -> list[int]:
    path = bundle / "generation_config.json"
    stated = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if stated is None:
        stated = config.get("text_config", {}).get("eos_token_id", config.get("eos_token_id"))
    return [stated] if isinstance(stated, int) else list(stated or ())


def _expectations(config: dict[str, Any], labels: dict[str, Any]) -> Expectations:
    config = {**config, **config.get("thinker_config", {})}  # Qwen3-Omni
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    anchors = {
        word: config[f"{word}_token_{kind}"]
        for word in ("image", "video", "audio")
        for kind in ("id", "index")  # MiniMax, Llama, LLaVA: an index
        if f"{word}_token_{kind}" in config
    }
    return Expectations(
        vocabulary=text.get("vocab_size", 1 << 32),
        merge=vision.get("spatial_merge_size", 2),
        whole_range=str(config.get("model_type", "")).startswith(("qwen", "glm")),
        normalises=bool(labels.get("mm_device_do_normalize", False)),
        references=bool(labels.get("mm_processor", "")),
        anchors=anchors,
    )


def _shut_down(peer: str) -> None:
    """Shut the TCP connection to `peer` ("ipv4:127.0.0.1:41234") down, as a lost host would look to it."""
    port = int(peer.rpartition(":")[2])
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptor = os.dup(int(name))
            try:
                held = socket.socket(fileno=descriptor)
            except OSError:  # no socket
                os.close(descriptor)
                continue
            with held:
                if held.family in (socket.AF_INET, socket.AF_INET6) and held.getpeername()[1] == port:
                    held.shutdown(socket.SHUT_RDWR)
