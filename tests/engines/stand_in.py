"""An engine for tests: grpcio's asyncio server with scripted answers, in the test's own event loop.

It speaks vLLM's protocol, or with `runtime` another engine's; `chunk`, `complete` and the scripts made of them are
vLLM's, `regular_answer` is any engine's.

Each Generate takes the next action of `script`, else `otherwise`.  An action is an async generator function of
(engine, request, context) that yields replies, or bytes to be sent as they are.
"""

import asyncio
import os
from collections import Counter
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
from smg_grpc_proto.generated import (
    common_pb2,
    mlx_engine_pb2,
    sglang_scheduler_pb2,
    tokenspeed_encoder_pb2,
    tokenspeed_scheduler_pb2,
    trtllm_service_pb2,
)
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

SERVICE = "vllm.grpc.engine.VllmEngine"
ENCODER = "tokenspeed.grpc.encoder.TokenSpeedEncoder"
SERVICES = {
    "vllm": (SERVICE, pb),
    "sglang": ("sglang.grpc.scheduler.SglangScheduler", sglang_scheduler_pb2),
    "trtllm": ("trtllm.TrtllmService", trtllm_service_pb2),
    "tokenspeed": ("tokenspeed.grpc.scheduler.TokenSpeedScheduler", tokenspeed_scheduler_pb2),
    "mlx": ("mlx.grpc.engine.MlxEngine", mlx_engine_pb2),
}

MODEL_INFO = {
    "model_path": "qwen3-vl",
    "is_generation": True,
    "max_context_length": 262144,
    "vocab_size": 151936,
    "supports_vision": True,
    "served_model_name": "qwen3-vl",
    "tokenizer_path": "qwen3-vl",
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "eos_token_ids": [151645, 151643],
    "pad_token_id": 151643,
    "bos_token_id": 151643,
    "max_req_input_len": 262143,
}
SERVER_INFO = {"server_type": "vllm-grpc", "data_parallel_size": 1, "uptime_seconds": 12.5, "active_requests": 3}


def chunk(ids, index=0, **fields):
    body = pb.GenerateStreamChunk(token_ids=ids, index=index, prompt_tokens=5, completion_tokens=len(ids), **fields)
    return pb.GenerateResponse(chunk=body)


def complete(ids, index=0, **fields):
    fields = {"finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": len(ids), **fields}
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, index=index, **fields))


def answers(*ids):
    """A regular answer: streamed when the request streams."""

    async def action(engine, request, context):
        for index in range(request.sampling_params.n):
            if request.stream:
                for token in ids:
                    yield chunk([token], index)
                yield complete([], index)
            else:
                yield complete(list(ids), index)

    return action


def regular_answer(*ids, reason="stop"):
    """The same from any engine: chunks with running totals, and an end that repeats every token."""

    async def action(engine, request, context):
        kind, is_trtllm = engine.pb, engine.runtime == "trtllm"
        streams = request.streaming if is_trtllm else request.stream
        choices = (
            request.sampling_config.num_return_sequences if is_trtllm else getattr(request.sampling_params, "n", 1)
        )
        for index in range(choices):
            place = {"sequence_index" if is_trtllm else "index": index}
            for done, token in enumerate(ids if streams else (), 1):
                body = kind.GenerateStreamChunk(token_ids=[token], completion_tokens=done, prompt_tokens=5, **place)
                yield kind.GenerateResponse(chunk=body)
            place["output_token_ids" if is_trtllm else "output_ids"] = ids
            facts = {"finish_reason": reason, "prompt_tokens": 5, "completion_tokens": len(ids)}
            yield kind.GenerateResponse(complete=kind.GenerateComplete(**place, **facts))

    return action


async def accepts(engine, request, context):
    return tokenspeed_encoder_pb2.EncodeResponse(accepted=True)


def fails(status, details="because"):
    async def action(engine, request, context):
        await context.abort(getattr(grpc.StatusCode, status), details)
        yield

    return action


def sends(*messages, then=None):
    """Exactly these messages; then a status, "hang", or the end of the stream."""

    async def action(engine, request, context):
        for message in messages:
            yield message
        if then == "hang":
            await asyncio.Event().wait()
        elif then is not None:
            await context.abort(getattr(grpc.StatusCode, then), "in mid-stream")

    return action


hangs = sends(then="hang")


class Engine:
    """`received`: Generate messages in order, `encoded`: Encode messages (TokenSpeed).  `encode` answers those: a
    coroutine function of (engine, request, context).  `tensors`: bytes read from shared memory, by file name."""

    def __init__(self, *, runtime="vllm", model_info=None, server_info=None, segments: Path | None = None):
        service, self.pb = SERVICES[runtime]
        self.runtime = runtime
        self.model_info = {**MODEL_INFO, **(model_info or {})}
        self.server_info = {**(SERVER_INFO if runtime == "vllm" else {}), **(server_info or {})}
        if runtime == "trtllm":
            self.model_info |= {"model_id": self.model_info["served_model_name"]}
        self.services = [service]
        self.segments = segments
        self.script = []
        self.otherwise = answers(11, 12, 13) if runtime == "vllm" else regular_answer(11, 12, 13)
        self.healthy = True
        self.health_script = []  # what the next checks say, before `healthy` counts
        self.fail_method = {}  # method -> status name
        self.unheld = asyncio.Event()  # while it is not set, methods other than Generate do not answer
        self.unheld.set()
        self.received = []
        self.encoded = []
        self.encode = accepts
        self.aborted = []
        self.cancelled = []
        self.finished = []
        self.tensors = {}
        self.calls = Counter()
        self.bundle = [(b"PK", ""), (b"rest", "digest")]
        self.port = 0
        self._server = None

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"

    async def start(self):
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)]
        options.append(("grpc.http2.min_ping_interval_without_data_ms", 10_000))  # as the published servicers
        self._server = grpc.aio.server(options=options)
        for service in self.services:
            self._server.add_generic_rpc_handlers((self._handlers(service),))
        if self.runtime == "tokenspeed":
            encoder = tokenspeed_encoder_pb2
            method = grpc.unary_unary_rpc_method_handler(
                self._encode, encoder.EncodeRequest.FromString, encoder.EncodeResponse.SerializeToString
            )
            handler = grpc.method_handlers_generic_handler(ENCODER, {"Encode": method})
            self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return self

    async def stop(self, grace=0):
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace)

    def _handlers(self, service):
        pb = self.pb
        unary = {
            "HealthCheck": (pb.HealthCheckRequest, self._health),
            "GetModelInfo": (pb.GetModelInfoRequest, self._model_info),
            "GetServerInfo": (pb.GetServerInfoRequest, self._server_info),
            "Abort": (pb.AbortRequest, self._abort),
        }
        streams = {"Generate": (pb.GenerateRequest, self._generate), "GetTokenizer": (None, self._tokenizer)}
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._counted(name, method), request.FromString, lambda reply: reply.SerializeToString()
            )
            for name, (request, method) in unary.items()
        }
        for name, (request, method) in streams.items():
            handlers[name] = grpc.unary_stream_rpc_method_handler(
                method,
                request.FromString if request else bytes,
                lambda reply: reply if isinstance(reply, bytes) else reply.SerializeToString(),
            )
        return grpc.method_handlers_generic_handler(service, handlers)

    def _counted(self, name, method):
        async def call(request, context):
            self.calls[name] += 1
            await self.unheld.wait()
            if name in self.fail_method:
                await context.abort(getattr(grpc.StatusCode, self.fail_method[name]), "scripted")
            return await method(request, context)

        return call

    async def _health(self, request, context):
        healthy = self.health_script.pop(0) if self.health_script else self.healthy
        if self.runtime == "trtllm":
            return self.pb.HealthCheckResponse(status=" ok " if healthy else "draining")
        return self.pb.HealthCheckResponse(healthy=healthy)

    async def _model_info(self, request, context):
        known = self.pb.GetModelInfoResponse.DESCRIPTOR.fields_by_name
        return self.pb.GetModelInfoResponse(**{name: told for name, told in self.model_info.items() if name in known})

    async def _server_info(self, request, context):
        reply = self.pb.GetServerInfoResponse()
        for name, told in self.server_info.items():
            if isinstance(told, dict):
                getattr(reply, name).update(told)
            else:
                setattr(reply, name, told)
        return reply

    async def _abort(self, request, context):
        one_by_one = "request_id" in request.DESCRIPTOR.fields_by_name
        self.aborted += [request.request_id] if one_by_one else request.request_ids
        return self.pb.AbortResponse()

    async def _tokenizer(self, request, context):
        for data, digest in self.bundle:
            yield common_pb2.GetTokenizerChunk(data=data, sha256=digest)

    async def _encode(self, request, context):
        self.encoded.append(request)
        if self.segments is not None:
            self._read_segments(request)
        return await self.encode(self, request, context)

    async def _generate(self, request, context):
        self.received.append(request)
        action = self.script.pop(0) if self.script else self.otherwise
        try:
            if self.segments is not None:
                self._read_segments(request)
            async for reply in action(self, request, context):
                yield reply
        except asyncio.CancelledError:
            self.cancelled.append(request.request_id)
            raise
        self.finished.append(request.request_id)

    def _read_segments(self, request):
        """As the published servicer: open, read, unlink."""
        if self.runtime == "tokenspeed":
            batches = [(item.encoder_input, item.model_specific_tensors) for item in request.mm_inputs.items]
        else:
            told = [request.mm_inputs, *request.extra_mm_inputs]
            batches = [(batch.pixel_values, batch.model_specific_tensors) for batch in told]
        for primary, side in batches:
            for tensor in (primary, *side.values()):
                if tensor.WhichOneof("payload") == "shm":
                    path = self.segments / tensor.shm.name
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
                    self.tensors[tensor.shm.name] = os.pread(fd, tensor.shm.nbytes, tensor.shm.offset)
                    os.close(fd)
                    os.unlink(path)


@asynccontextmanager
async def engine(**options):
    made = await Engine(**options).start()
    try:
        yield made
    finally:
        await made.stop()


async def until(condition, *, within=5.0):
    """Wait for something that will be true soon."""
    async with asyncio.timeout(within):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def closing(thing):
    try:
        yield thing
    finally:
        with suppress(asyncio.CancelledError):
            await thing.close()
