"""Plain frames without h2, against h2: whatever a server sends, however the network cuts it, a call hears the same."""

import asyncio

import pytest
from grpclib.config import Configuration
from h2.config import H2Configuration
from h2.connection import H2Connection
from hpack import Decoder
from hyperframe.frame import WindowUpdateFrame
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from engines import frames
from engines.link import EngineProtocol, Handler
from engines.scatter import Drain
from tests.engines.calls import GENERATE, REPLY, body, call, worker
from tests.engines.h2_server import listening

RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]
CLIENT = H2Configuration(client_side=True, header_encoding="latin-1", validate_inbound_headers=False)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self):
        self.written = bytearray()

    def write(self, data):
        self.written += data

    def writelines(self, pieces):
        self.written += b"".join(pieces)

    def get_extra_info(self, name, default=None):
        return default

    def set_write_buffer_limits(self, **limits):
        pass

    def get_write_buffer_size(self):
        return 0

    def is_closing(self):
        return False

    def close(self):
        pass

    abort = close


class Heard:
    """What a call is told."""

    def __init__(self, stream_id):
        self.id = stream_id
        self.headers = self.trailers = None
        self.data = b""
        self.unacknowledged = 0
        self.has_ended = False
        self.reasons = []

    def opened(self, headers):
        self.headers = headers

    def arrived(self, data, acknowledgeable):
        self.data += data
        self.unacknowledged += acknowledgeable

    def ended(self):
        self.has_ended = True

    def terminate(self, reason):
        if not self.has_ended:
            self.reasons.append(reason)

    def told(self):
        return self.headers, self.data, self.trailers, self.has_ended, self.unacknowledged, self.reasons


class Side:
    """One client connection to a scripted server, with or without the short way."""

    def __init__(self, *, by_h2):
        self.wire = Wire()
        self.protocol = EngineProtocol(Handler(), Configuration().__for_client__(), CLIENT)
        self.protocol.connection_made(self.wire)
        if by_h2:
            self.protocol._frames.read = self.protocol._receive_by_h2
        self.calls = []

    def open(self):
        h2 = self.protocol.h2
        stream = frames.open_stream(h2)
        block = frames.request_block("http", "host:1", "/a.B/C", ())
        data = frames.last_data_frame(h2, stream, b"\0\0\0\0\0")
        self.protocol.write(h2.data_to_send() + frames.headers_frame(h2, stream, block) + data)
        heard = Heard(stream.stream_id)
        self.calls.append(heard)
        self.protocol.processor.enter(heard)

    def state(self):
        h2 = self.protocol.h2
        return (
            [heard.told() for heard in self.calls],
            h2.inbound_flow_control_window,
            h2.outbound_flow_control_window,
            h2.open_outbound_streams,
            {
                key: (stream.state_machine.state, stream.outbound_flow_control_window)
                for key, stream in h2.streams.items()
                if not stream.closed
            },
            bytes(self.wire.written),
        )

    def close(self):
        self.protocol.connection_lost(None)


header = st.tuples(st.sampled_from(["x-a", "x-b", "date"]), st.sampled_from(["1", "2", "three", "x" * 300]))
answer = st.fixed_dictionaries(
    {
        "headers": st.lists(header, max_size=2),
        "replies": st.lists(st.binary(max_size=60), max_size=4),
        "padding": st.sampled_from([None, None, 0, 7]),
        "status": st.sampled_from(["0", "0", "0", "13"]),
        "trailers": st.lists(header, max_size=1),
        "ending": st.sampled_from(["trailers", "trailers", "trailers", "trailers only", "reset", "open"]),
        "ping": st.booleans(),
        "window": st.sampled_from([None, 1, 1000, 2**31 - 1]),
    }
)


def played(script, table_size):
    """The bytes a server sends for `script`, one piece for each answer."""
    server = H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    client = Side(by_h2=True)
    for _ in script:
        client.open()
    client.close()
    server.receive_data(bytes(client.wire.written))
    pieces = [server.data_to_send()]
    for number, told in enumerate(script):
        stream_id = 2 * number + 1
        if number == len(script) // 2 and table_size is not None:
            server.encoder.header_table_size = table_size
        if told["ping"]:
            server.ping(b"12345678")
        if told["window"] is not None:
            update = WindowUpdateFrame(stream_id if told["ping"] else 0)  # too much for the connection ends it
            update.window_increment = told["window"] if told["ping"] else min(told["window"], 1000)
            server._data_to_send += update.serialize()
        status = [("grpc-status", told["status"]), *told["trailers"]]
        if told["ending"] == "trailers only":
            server.send_headers(stream_id, [*RESPONSE, *status], end_stream=True)
        else:
            server.send_headers(stream_id, [*RESPONSE, *told["headers"]])
            for reply in told["replies"]:
                server.send_data(stream_id, reply, pad_length=told["padding"])
            if told["ending"] == "trailers":
                server.send_headers(stream_id, status, end_stream=True)
            elif told["ending"] == "reset":
                server.reset_stream(stream_id)
        pieces.append(server.data_to_send())
    return b"".join(pieces)


@given(
    script=st.lists(answer, min_size=1, max_size=8),
    cuts=st.lists(st.integers(1, 5000), max_size=6),
    table_size=st.sampled_from([None, 0, 100]),
)
@settings(max_examples=80)
async def test_a_call_hears_what_h2_would_tell_it(script, cuts, table_size):
    sent = played(script, table_size)
    ends = sorted({min(cut, len(sent)) for cut in cuts} | {len(sent)})
    sides = [Side(by_h2=True), Side(by_h2=False)]
    for side in sides:
        for _ in script:
            side.open()
        begin = 0
        for end in ends:
            side.protocol.data_received(sent[begin:end])
            begin = end
    assert sides[0].state() == sides[1].state()
    for side in sides:
        side.close()


@given(
    noise=st.binary(min_size=1, max_size=60), script=st.lists(answer, min_size=1, max_size=2), at=st.integers(0, 999)
)
@settings(max_examples=60)
async def test_noise_is_noise_to_both(noise, script, at):
    """h2 gets it byte by byte: what came before the noise is told in any case."""
    sent = bytearray(played(script, None))
    begin = at % len(sent)
    sent[begin : begin + len(noise)] = noise
    sides = [Side(by_h2=True), Side(by_h2=False)]
    for side, step in zip(sides, (1, len(sent)), strict=True):
        for _ in script:
            side.open()
        for begin in range(0, len(sent), step):
            if side.protocol.processor.is_open:
                side.protocol.data_received(bytes(sent[begin : begin + step]))
        side.close()
    told = [[(heard.data, heard.has_ended, bool(heard.reasons)) for heard in side.calls] for side in sides]
    assert told[0] == told[1]


async def test_repeated_answers_do_not_reach_h2(monkeypatch):
    side, seen = Side(by_h2=False), []
    by_h2 = side.protocol._frames._by_h2
    side.protocol._frames._by_h2 = lambda data: (seen.append(data), by_h2(data))[1]
    plain = {"headers": [], "replies": [b"abc"], "padding": None, "status": "0", "trailers": [], "ending": "trailers"}
    script = [{**plain, "ping": False, "window": None}] * 5
    for _ in script:
        side.open()
    side.protocol.data_received(played(script, None))
    assert [heard.told()[:4] for heard in side.calls][1:] == [side.calls[0].told()[:4]] * 4
    assert len(seen) <= 8  # settings and what was new; nothing of the last two calls
    side.close()


def test_the_request_block_is_what_was_said():
    block = frames.request_block("http", "host:1", "/a.B/C", (("x-session", "a b"),))
    decoder = Decoder()
    headers = [(bytes(name).decode(), bytes(value).decode()) for name, value in decoder.decode(block, raw=True)]
    assert headers[:6] == [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/a.B/C"),
        (":authority", "host:1"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    assert headers[6][0] == "user-agent" and headers[7] == ("x-session", "a b")
    assert not decoder.header_table.dynamic_entries  # the same bytes mean the same at any time


@pytest.mark.parametrize("metadata", [(("grpc-timeout", "1S"),), (("X", "y"),), (("x", "ä"),), (("x", "y" * 60000),)])
def test_metadata_that_grpc_does_not_allow(metadata):
    with pytest.raises(ValueError):
        frames.request_block("http", "host:1", "/a.B/C", metadata)


async def test_a_changed_header_table_is_confirmed():
    async with listening(settings={"HEADER_TABLE_SIZE": 0}) as server, worker(server) as channels:
        for _ in range(2):
            calling = asyncio.create_task(call(channels, body(100)))
            request = await server.request()
            await request.until_ended()
            request.answer(REPLY)
            assert await calling == [REPLY]


async def test_a_connection_without_numbers_is_left(monkeypatch):
    monkeypatch.setattr(frames, "LAST_STREAM_ID", 5)
    async with listening(auto_grant=True) as server, worker(server) as channels:
        for number in range(5):
            calling = asyncio.create_task(call(channels, body(100)))
            request = await server.request()
            await request.until_ended()
            assert request.stream_id == 2 * (number % 3) + 1
            request.answer(REPLY)
            assert await calling == [REPLY]
        assert len(server.peers) == 2


async def test_a_small_message_waits_for_its_window():
    async with listening(settings={"INITIAL_WINDOW_SIZE": 10}) as server, worker(server) as channels:
        warm = asyncio.create_task(call(channels, [b""]))
        first = await server.request()
        await first.until_ended()
        first.answer(REPLY)
        await warm
        stream = channels.stream(GENERATE, body(1000), pb.GenerateResponse)
        calling = asyncio.create_task(stream.__aenter__())
        request = await server.request()
        await request.until_body(10)
        assert not calling.done()
        request.grant(5000)
        await calling
        assert isinstance(stream.sent, Drain)
        await asyncio.wait_for(stream.sent.wait(), 5)
        await request.until_ended()
        request.answer(REPLY)
        assert [reply async for reply in stream] == [REPLY]


async def test_what_cannot_be_sent_leaves_the_connection_alone():
    """A stream that the peer has never heard of must not be reset: that ends the connection, with all its calls."""
    async with listening(auto_grant=True) as server, worker(server) as channels:
        other = asyncio.create_task(call(channels, body(100)))
        first = await server.request()
        with pytest.raises((TypeError, BufferError)):
            await channels.stream(GENERATE, [memoryview(b"gaps")[::2]], pb.GenerateResponse).__aenter__()
        with pytest.raises(ValueError):
            await channels.stream(GENERATE, [b"x"], pb.GenerateResponse, metadata={"X": "y"}).__aenter__()
        again = asyncio.create_task(call(channels, body(100)))
        second = await server.request()
        for request in (first, second):
            await request.until_ended()
            request.answer(REPLY)
        assert await other == await again == [REPLY]
        assert len(server.peers) == 1
