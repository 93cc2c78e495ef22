"""Channels of a worker against a server that misbehaves as it is told; URLs; what is imported."""

import asyncio
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from grpclib.exceptions import StreamTerminatedError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import link
from engines.base import EngineError
from engines.call import Call, Unreadable
from engines.channel import parse_url
from tests.engines.grpcio_engine import (
    CERTIFICATE,
    GENERATE,
    HEALTH,
    KEY,
    MIB,
    client_tls,
    connected,
    generate,
    health,
    request_parts,
)
from tests.engines.h2_server import listening


async def test_a_unary_call_in_vain_is_deadline_exceeded():
    async with listening() as server, connected(server.url) as channels:
        with pytest.raises(EngineError, match="no answer within 0.1 s") as caught:
            await health(channels, timeout_s=0.1)
        assert caught.value.status == "DEADLINE_EXCEEDED"
        request = await server.request()
        await request.until_reset()
        assert request.headers[":path"] == HEALTH
        assert "grpc-timeout" not in request.headers


@pytest.mark.parametrize("replies", [0, 2])
async def test_a_unary_call_has_one_reply(replies):
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.answer(*[pb.HealthCheckResponse(healthy=True)] * replies)
        with pytest.raises(EngineError, match=f"{replies} replies") as caught:
            await calling
        assert caught.value.status == "INTERNAL"


async def test_an_http_status_without_grpc():
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.peer.h2.send_headers(request.stream_id, [(":status", "503")], end_stream=True)
        request.peer.flush()
        with pytest.raises(EngineError) as caught:
            await calling
        assert caught.value.status == "UNAVAILABLE"


@pytest.mark.parametrize(
    ("payload", "text"),
    [(b"\x01\0\0\0\x01x", "ompress"), (b"\0\0\0\0\x02\x12\xff", "cannot be read"), (b"\0\0\0", "cannot be read")],
    ids=["compressed", "garbage", "short"],
)
async def test_an_answer_that_cannot_be_read(payload, text):
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        request = await server.request()
        request.respond()
        request.peer.h2.send_data(request.stream_id, payload)
        request.finish()
        with pytest.raises(EngineError, match=text) as caught:
            await calling
        assert caught.value.status == "INTERNAL"


async def test_connection_refused_names_no_address():
    async with listening() as server:
        url = server.url
    async with connected(url) as channels:
        for attempt in (lambda: health(channels), lambda: generate(channels, request_parts(10))):
            with pytest.raises(EngineError) as caught:
                await attempt()
            assert (caught.value.status, caught.value.started) == ("UNAVAILABLE", False)
            assert caught.value.message == "worker cannot be reached: Connection refused"


@pytest.mark.parametrize(
    ("answer", "scheme", "told"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "grpc", "an HTTP/1 server listens there and no gRPC engine"),
        (b"<!DOCTYPE HTML>\n<html>", "grpc", "an HTTP/1 server listens there and no gRPC engine"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "grpc", "a TLS server listens there: its URL is grpcs://, not grpc://"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "grpcs", "no TLS server listens there: its URL is grpc://, not grpcs://"),
    ],
)
@pytest.mark.parametrize("pause_s", [0, 0.05])
async def test_another_server_is_told_by_what_it_answers(answer, scheme, told, pause_s, caplog):
    """Whether it answers while the connection is made or a moment later."""

    async def other(reader, writer):
        await reader.read(1)
        await asyncio.sleep(pause_s)
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as server:
        url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with connected(url) as channels:
            for _ in range(2):
                with pytest.raises(EngineError) as caught:
                    await health(channels)
                assert caught.value.status == "UNAVAILABLE"
                assert told in caught.value.message
    assert not [record for record in caplog.records if "cannot be read" in record.getMessage()]


async def test_a_failed_call_needs_its_buffers_no_more():
    async with listening() as server:
        url = server.url
    async with connected(url) as channels:
        stream = channels.stream(GENERATE, request_parts(MIB), pb.GenerateResponse)
        with pytest.raises(EngineError):
            await stream.__aenter__()
        assert stream.sent.is_set()


async def test_connecting_takes_its_time_limit_once_for_all_callers():
    """A listener that never shakes hands: five callers, one connection, one time limit."""
    accepted = []

    async def silent(reader, writer):
        accepted.append(writer)
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with connected(f"grpcs://127.0.0.1:{port}", connect_timeout_s=0.3) as channels:
        errors = await asyncio.gather(*(health(channels) for _ in range(5)), return_exceptions=True)
        assert {error.status for error in errors} == {"UNAVAILABLE"}
        assert {error.message for error in errors} == {"worker cannot be reached: timed out"}
        assert len(accepted) == 1
        leaving = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        waiting = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        assert len(accepted) == 2  # joined the attempt that the first caller left behind
        channels.close()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"
    listener.close()
    await listener.wait_closed()


async def test_the_channel_with_the_fewest_unsent_bytes_is_taken():
    async with listening() as server, connected(server.url, sending_channels=2) as channels:
        calls, requests = [], []
        for nbytes in (3 * MIB, 2 * MIB, 2 * MIB, 100):
            calls.append(asyncio.create_task(generate(channels, request_parts(nbytes))))
            requests.append(await server.request())
        peers = [server.peers.index(request.peer) for request in requests]
        assert peers == [0, 1, 1, 0]
        assert channels.unsent_bytes > 7 * MIB
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert channels.unsent_bytes == 0


async def test_a_closed_worker():
    async with listening() as server, connected(server.url) as channels:
        waiting = asyncio.create_task(generate(channels, request_parts(MIB)))
        request = await server.request()
        await request.until_body(1000)
        channels.close()
        with pytest.raises(EngineError) as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"
        with pytest.raises(EngineError, match="closed"):
            await health(channels)
        with pytest.raises(EngineError, match="closed"):
            channels.stream(GENERATE, request_parts(1), pb.GenerateResponse)
        channels.close()


async def test_waiting_for_a_stream_ends_with_the_connection():
    """The engine allows one stream; whoever waits for the second is woken when the connection goes."""
    async with listening(settings={"MAX_CONCURRENT_STREAMS": 1}) as server, connected(server.url) as channels:
        first = asyncio.create_task(health(channels))
        request = await server.request()
        second = asyncio.create_task(health(channels))
        await asyncio.sleep(0.05)
        assert server.arrivals.empty()
        request.peer.transport.abort()
        for call in (first, second):
            with pytest.raises(EngineError) as caught:
                await call
            assert caught.value.status == "UNAVAILABLE"


async def test_waiting_for_a_stream_goes_on_when_one_is_over():
    async with listening(settings={"MAX_CONCURRENT_STREAMS": 1}) as server, connected(server.url) as channels:
        calls = [asyncio.create_task(health(channels)) for _ in range(3)]
        for _ in calls:
            (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        assert all([(await call).healthy for call in calls])


async def test_a_silent_peer_is_given_up(monkeypatch):
    monkeypatch.setattr(link, "KEEPALIVE_S", 0.1)
    monkeypatch.setattr(link, "KEEPALIVE_TIMEOUT_S", 0.6)
    async with listening() as server, connected(server.url) as channels:
        waiting = asyncio.create_task(generate(channels, request_parts(30 * 1000)))
        request = await server.request()
        await asyncio.sleep(1.2)  # pings are answered: nothing happens
        assert not waiting.done()
        request.peer.transport.pause_reading()
        with pytest.raises(EngineError, match="keepalive") as caught:
            await waiting
        assert caught.value.status == "UNAVAILABLE"


async def test_an_idle_connection_is_kept_alive(monkeypatch):
    monkeypatch.setattr(link, "KEEPALIVE_S", 0.05)
    monkeypatch.setattr(link, "KEEPALIVE_TIMEOUT_S", 0.3)
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        await calling
        pings = []
        peer = server.peers[0]
        receive = peer.h2.receive_data

        def count(data):
            pings.append(data)
            return receive(data)

        monkeypatch.setattr(peer.h2, "receive_data", count)
        await asyncio.sleep(1.2)
        assert len(pings) >= 2
        assert channels._control.is_connected


async def test_sockets_are_set_up():
    async with listening() as server, connected(server.url) as channels:
        calling = asyncio.create_task(health(channels))
        (await server.request()).answer(pb.HealthCheckResponse(healthy=True))
        await calling
        sock = channels._control._protocol._transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
        remote = server.peers[0].h2.remote_settings
        assert remote.initial_window_size == 16 * MIB
        assert server.peers[0].h2.outbound_flow_control_window > 32 * MIB - 100  # less this reply


async def test_tls_cancelled_before_a_peer_that_does_not_read():
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE, KEY)
    tls.set_alpn_protocols(["h2"])
    wide = {"settings": {"INITIAL_WINDOW_SIZE": 64 * MIB}, "connection_window": 128 * MIB}
    async with listening(tls=tls, **wide) as server:
        url = server.url.replace("grpc://", "grpcs://")
        async with connected(url, tls=client_tls()) as channels:
            stream = channels.stream(GENERATE, request_parts(20 * MIB), pb.GenerateResponse)
            calling = asyncio.create_task(stream.__aenter__())
            request = await server.request()
            request.peer.transport.pause_reading()
            await asyncio.sleep(0.2)
            calling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await calling
            request.peer.transport.resume_reading()
            await stream.sent.wait()
            await request.until_reset()


async def test_a_reply_that_was_whole_before_its_connection_went_is_given():
    call = Call(None, "/a/B", ())
    call.arrived(b"\0\0\0\0\3abc\0\0\0\0\3ab", 15)
    call.terminate("gone")
    assert await call.reply() == b"abc"
    with pytest.raises(StreamTerminatedError, match="gone"):
        await call.reply()
    call = Call(None, "/a/B", ())
    call.opened((("content-type", "application/grpc"),))
    call.arrived(b"\0\0\0\0\3abc", 8)
    with pytest.raises(Unreadable, match="headers without a status"):
        await call.reply()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("grpc://engine:50051", ("engine", 50051, False)),
        ("grpcs://engine:443", ("engine", 443, True)),
        ("10.0.0.7:9000", ("10.0.0.7", 9000, False)),
        ("[::1]:9000", ("::1", 9000, False)),
        ("grpc://[fd00::1]:9000/", ("fd00::1", 9000, False)),
    ],
)
def test_urls(url, address):
    assert parse_url(url) == address


@pytest.mark.parametrize(
    "url",
    [
        *("http://engine:80", "ipc:///tmp/x", "grpc://engine", "engine", "grpc://:1", "grpc://e:1/x", "grpc://e:99999"),
        *("", "grpc://e :1", " grpc://e:1", "grpc://:pw@e:1", "grpc://u@e:1", "grpc://e:1#f", "grpc://e:1?"),
    ],
)
def test_no_urls(url):
    with pytest.raises(ValueError):
        parse_url(url)


def test_grpcio_is_never_imported():
    code = "import sys, engines.channel, smg_grpc_proto.generated.vllm_engine_pb2; print('grpc' in sys.modules)"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
