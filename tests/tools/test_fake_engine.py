"""The stand-in as a process, spoken to with the client library the gateway uses."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError, Status
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.exceptions import StreamTerminatedError
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from tools.fake_engine import BUNDLE
from tools.launch import fake_engine

SERVICE = "/vllm.grpc.engine.VllmEngine/"
END = 151645
TOKENIZER = Tokenizer.from_file(str(BUNDLE / "tokenizer.json"))


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine") / "journal.jsonl"


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[int]:
    with fake_engine(*arguments) as port:
        yield port


@pytest.fixture
def engine(journal: Path) -> Iterator[int]:
    with running("--journal", str(journal), "--label", "max_num_seqs=7", "--tokens-per-chunk", "5") as port:
        yield port


@pytest.fixture
async def channel(engine: int) -> AsyncIterator[Channel]:
    channel = Channel("127.0.0.1", engine)
    yield channel
    channel.close()


async def unary(channel: Channel, name: str, reply: Any) -> Any:
    return await UnaryUnaryMethod(channel, SERVICE + name, getattr(pb, name + "Request"), reply)(
        getattr(pb, name + "Request")()
    )


def ask(words: str, *, stream: bool = False, **sampling: Any) -> Any:
    prompt = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n"
    ids = TOKENIZER.encode(prompt, add_special_tokens=False).ids
    return pb.GenerateRequest(
        request_id="test-1",
        tokenized=pb.TokenizedInput(original_text=prompt, input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def generate(channel: Channel, request: Any) -> list[Any]:
    method = UnaryStreamMethod(channel, SERVICE + "Generate", pb.GenerateRequest, pb.GenerateResponse)
    return list(await method(request))


async def test_what_a_registration_reads(channel: Channel) -> None:
    assert (await unary(channel, "HealthCheck", pb.HealthCheckResponse)).healthy
    model = await unary(channel, "GetModelInfo", pb.GetModelInfoResponse)
    assert (model.model_type, model.vocab_size, list(model.eos_token_ids)) == ("qwen3_vl", 151936, [END, 151643])
    server = await unary(channel, "GetServerInfo", pb.GetServerInfoResponse)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert server.shm_namespace_id == f"{boot}:{os.stat('/dev/shm').st_dev}"
    assert server.max_num_seqs == 7
    assert (await unary(channel, "GetLoads", pb.GetLoadsResponse)).loads[0].num_running_reqs == 0


async def test_the_bundle_arrives_with_its_digest(channel: Channel) -> None:
    path = SERVICE + "GetTokenizer"
    method = UnaryStreamMethod(channel, path, common_pb2.GetTokenizerRequest, common_pb2.GetTokenizerChunk)
    chunks = await method(common_pb2.GetTokenizerRequest())
    data = b"".join(chunk.data for chunk in chunks)
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    names = set(zipfile.ZipFile(io.BytesIO(data)).namelist())
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= names


async def test_one_message_when_nothing_streams(channel: Channel, journal: Path) -> None:
    (reply,) = await generate(channel, ask("Hello"))
    complete = reply.complete
    assert complete.finish_reason == "stop" and complete.output_ids[-1] == END
    count = len(ask("Hello").tokenized.input_ids)
    assert TOKENIZER.decode(list(complete.output_ids)) == f"I received no media, {count} prompt tokens: 'Hello'."
    assert (complete.prompt_tokens, complete.completion_tokens) == (count, len(complete.output_ids))
    record = json.loads(journal.read_text().splitlines()[-1])
    assert (record["event"], record["request_id"], record["media"]) == ("generate", "test-1", [])
    ids = [token for token, repeat in record["input_ids"] for _ in range(repeat)]
    assert ids == list(ask("Hello").tokenized.input_ids)
    asked = ask("Hello").tokenized
    assert record["message"] == {"tokenized": {"original_text": asked.original_text}, "sampling_params": {}}


async def test_streaming_counts_as_the_published_servicer(channel: Channel) -> None:
    whole = list((await generate(channel, ask("Hello")))[0].complete.output_ids)
    replies = await generate(channel, ask("Hello", stream=True, n=2))
    for index in range(2):
        chunks = [r.chunk for r in replies if r.HasField("chunk") and r.chunk.index == index]
        (complete,) = [r.complete for r in replies if r.HasField("complete") and r.complete.index == index]
        assert [token for chunk in chunks for token in chunk.token_ids] == whole
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
        assert list(complete.output_ids) == list(chunks[-1].token_ids)


async def test_limits_stops_and_log_probabilities(channel: Channel) -> None:
    (short,) = await generate(channel, ask("Hello", max_tokens=4, logprobs=2))
    assert (short.complete.finish_reason, TOKENIZER.decode(list(short.complete.output_ids))) == ("length", "I re")
    rows = short.complete.output_logprobs
    assert list(rows.token_ids) == list(short.complete.output_ids)
    assert [list(row.token_ids) for row in rows.top_logprobs] == [[t, t + 1] for t in short.complete.output_ids]
    (stopped,) = await generate(channel, ask("Hello", stop=["media"]))
    assert stopped.complete.matched_stop_str == "media"
    assert TOKENIZER.decode(list(stopped.complete.output_ids)) == "I received no media"
    (by_token,) = await generate(channel, ask("Hello", stop_token_ids=[ord("c")]))
    assert by_token.complete.matched_token_id == ord("c")
    assert TOKENIZER.decode(list(by_token.complete.output_ids)) == "I rec"
    (endless,) = await generate(channel, ask("Hello", max_tokens=500, ignore_eos=True))
    assert len(endless.complete.output_ids) == 500 and END not in endless.complete.output_ids


async def test_refusals_name_the_rule(channel: Channel, journal: Path) -> None:
    request = ask("Hello")
    request.tokenized.input_ids.append(200_000)
    with pytest.raises(GRPCError) as refusal:
        await generate(channel, request)
    assert refusal.value.status is Status.INVALID_ARGUMENT
    assert "outside the vocabulary" in str(refusal.value.message)
    assert json.loads(journal.read_text().splitlines()[-1])["event"] == "refused"


async def test_scripted_refusal_happens_as_often_as_asked(channel: Channel) -> None:
    request = ask("Hello [[fault refuse=UNAVAILABLE times=1 message=busy]]")
    with pytest.raises(GRPCError) as refusal:
        await generate(channel, request)
    assert (refusal.value.status, refusal.value.message) == (Status.UNAVAILABLE, "busy")
    assert len(await generate(channel, request)) == 1
    with pytest.raises(GRPCError) as mistake:
        await generate(channel, ask("Hello [[fault refuse=MAYBE]]"))
    assert mistake.value.status is Status.INVALID_ARGUMENT


async def test_a_stream_breaks_after_some_tokens(channel: Channel) -> None:
    method = UnaryStreamMethod(channel, SERVICE + "Generate", pb.GenerateRequest, pb.GenerateResponse)
    got = 0
    with pytest.raises(GRPCError) as broken:
        async with method.open() as stream:
            await stream.send_message(ask("Hello [[fault break=INTERNAL after=10]]", stream=True), end=True)
            async for reply in stream:
                got += len(reply.chunk.token_ids)
    assert (got, broken.value.status) == (10, Status.INTERNAL)


async def test_a_dropped_connection_is_lost_but_the_engine_lives(channel: Channel) -> None:
    with pytest.raises((StreamTerminatedError, ConnectionError)):
        await generate(channel, ask("Hello [[fault drop after=5]]", stream=True))
    assert (await unary(channel, "HealthCheck", pb.HealthCheckResponse)).healthy


async def test_a_silent_engine_notes_the_cancelled_stream_and_the_abort(channel: Channel, journal: Path) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(generate(channel, ask("Hello [[fault silent]]")), 0.2)
    abort = UnaryUnaryMethod(channel, SERVICE + "Abort", pb.AbortRequest, pb.AbortResponse)
    await abort(pb.AbortRequest(request_ids=["test-1"]))
    for _ in range(50):
        events = [json.loads(line) for line in journal.read_text().splitlines()[-2:]]
        if {event["event"] for event in events} == {"abort", "cancelled"}:
            break
        await asyncio.sleep(0.02)
    assert {event["event"] for event in events} == {"abort", "cancelled"}
    (reply,) = await generate(channel, ask("Hello"))
    assert reply.complete.finish_reason == "abort"


async def test_exit_ends_the_process_and_health_follows_a_file(tmp_path: Path) -> None:
    flag = tmp_path / "ill"
    with running("--unhealthy-file", str(flag), "--fault", "exit after=3") as port:
        channel = Channel("127.0.0.1", port)
        assert (await unary(channel, "HealthCheck", pb.HealthCheckResponse)).healthy
        flag.touch()
        assert not (await unary(channel, "HealthCheck", pb.HealthCheckResponse)).healthy
        with pytest.raises((StreamTerminatedError, ConnectionError)):
            await generate(channel, ask("Hello", stream=True))
        channel.close()
        for _ in range(100):
            with contextlib.suppress(ConnectionResetError):
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except ConnectionRefusedError:
                    return
                writer.close()
            await asyncio.sleep(0.02)
        pytest.fail("the engine still listens")
