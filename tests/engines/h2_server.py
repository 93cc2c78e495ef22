"""An HTTP/2 server whose every frame a test decides: nothing is acknowledged, answered or closed unless it is told
to.

Built on the h2 library alone (no grpclib, no grpcio).  Windows and frame size are the protocol's defaults (65535
bytes, 16 KiB) unless given.  `Peer` is one connection, `Request` one stream of it.
"""

import asyncio
import hashlib
import struct
from contextlib import asynccontextmanager

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
)
from h2.settings import SettingCodes
from hyperframe.frame import GoAwayFrame


class Request:
    """One stream as the server sees it."""

    def __init__(self, peer, stream_id, headers):
        self.peer = peer
        self.stream_id = stream_id
        self.headers = dict(headers)
        self.body = bytearray()
        self.frames = []  # bytes of every DATA frame
        self.has_ended = False
        self.reset_code = None
        self.changed = asyncio.Event()

    def touch(self):
        self.changed.set()

    async def until(self, condition):
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    async def until_ended(self):
        await self.until(lambda: self.has_ended)

    async def until_reset(self):
        await self.until(lambda: self.reset_code is not None)

    async def until_body(self, nbytes):
        await self.until(lambda: len(self.body) >= nbytes)

    @property
    def message(self):
        """The one gRPC message of the body."""
        compressed, length = struct.unpack(">?I", self.body[:5])
        assert not compressed and length == len(self.body) - 5
        return bytes(self.body[5:])

    @property
    def digest(self):
        return hashlib.sha256(self.message).hexdigest()

    def grant(self, nbytes):
        self.peer.h2.increment_flow_control_window(nbytes, self.stream_id)
        self.peer.flush()

    def respond(self):
        self.peer.h2.send_headers(self.stream_id, [(":status", "200"), ("content-type", "application/grpc")])
        self.peer.flush()

    def reply(self, message):
        payload = message.SerializeToString()
        self.peer.h2.send_data(self.stream_id, struct.pack(">?I", False, len(payload)) + payload)
        self.peer.flush()

    def finish(self, status=0, text=""):
        trailers = [("grpc-status", str(status))] + ([("grpc-message", text)] if text else [])
        self.peer.h2.send_headers(self.stream_id, trailers, end_stream=True)
        self.peer.flush()

    def answer(self, *replies):
        self.respond()
        for reply in replies:
            self.reply(reply)
        self.finish()

    def refuse(self, status, text):
        """A trailers-only answer."""
        headers = [
            (":status", "200"),
            ("content-type", "application/grpc"),
            ("grpc-status", str(status)),
            ("grpc-message", text),
        ]
        self.peer.h2.send_headers(self.stream_id, headers, end_stream=True)
        self.peer.flush()

    def reset(self, code=ErrorCodes.INTERNAL_ERROR):
        self.peer.h2.reset_stream(self.stream_id, code)
        self.peer.flush()


class Peer(asyncio.Protocol):
    """One connection, server side."""

    def __init__(self, server):
        self.server = server
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding="ascii"))
        self.requests = {}
        self.pongs = 0
        self.terminated = False
        self.is_lost = False
        self.auto_grant = server.auto_grant

    def connection_made(self, transport):
        self.transport = transport
        self.server.peers.append(self)
        self.h2.initiate_connection()
        if self.server.settings:
            self.h2.update_settings(self.server.settings)
        if self.server.connection_window > 65535:
            self.h2.increment_flow_control_window(self.server.connection_window - 65535)
        self.flush()

    def data_received(self, data):
        for event in self.h2.receive_data(data):
            self.on_event(event)
        self.flush()

    def on_event(self, event):
        if isinstance(event, RequestReceived):
            request = Request(self, event.stream_id, event.headers)
            self.requests[event.stream_id] = request
            self.server.arrivals.put_nowait(request)
        elif isinstance(event, DataReceived):
            request = self.requests[event.stream_id]
            request.body += event.data
            request.frames.append(len(event.data))
            if self.auto_grant and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, StreamEnded):
            self.requests[event.stream_id].has_ended = True
        elif isinstance(event, StreamReset):
            self.requests[event.stream_id].reset_code = event.error_code
        elif isinstance(event, PingAckReceived):
            self.pongs += 1
        elif isinstance(event, ConnectionTerminated):
            self.terminated = True
        elif isinstance(event, RemoteSettingsChanged):
            return
        for request in self.requests.values():
            request.touch()

    def connection_lost(self, exc):
        self.is_lost = True
        for request in self.requests.values():
            request.touch()

    def flush(self):
        data = self.h2.data_to_send()
        if data:
            self.transport.write(data)

    def grant(self, nbytes):
        self.h2.increment_flow_control_window(nbytes)
        self.flush()

    def ping(self):
        self.h2.ping(b"12345678")
        self.flush()

    def goaway(self, code=ErrorCodes.INTERNAL_ERROR):
        """The end of the connection."""
        self.h2.close_connection(code)
        self.flush()

    def announce_end(self, last_stream_id):
        """A GOAWAY without an error: streams up to this one go on (h2 itself could not)."""
        self.transport.write(GoAwayFrame(0, last_stream_id=last_stream_id).serialize())

    def change(self, **settings):
        self.h2.update_settings({SettingCodes[name]: value for name, value in settings.items()})
        # h2 takes larger frames only from the read after the acknowledgement on
        self.h2.max_inbound_frame_size = settings.get("MAX_FRAME_SIZE", self.h2.max_inbound_frame_size)
        self.flush()


class Server:
    """Listens on a free loopback port."""

    def __init__(self, *, settings, connection_window, auto_grant):
        self.settings = settings
        self.connection_window = connection_window
        self.auto_grant = auto_grant
        self.peers = []
        self.arrivals = asyncio.Queue()

    async def request(self):
        """The next stream that a client opens."""
        return await self.arrivals.get()

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"


@asynccontextmanager
async def listening(*, settings=None, connection_window=65535, auto_grant=False, tls=None):
    """A `Server`; `auto_grant` gives back every window byte at once (h2 collects them)."""
    server = Server(
        settings={SettingCodes[name]: value for name, value in (settings or {}).items()},
        connection_window=connection_window,
        auto_grant=auto_grant,
    )
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Peer(server), "127.0.0.1", 0, ssl=tls)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        for peer in server.peers:
            peer.transport.abort()
        listener.close()
        await listener.wait_closed()


async def closed(channels):
    """Waits until the connections of closed `WorkerChannels` are gone (TLS takes its leave first)."""
    protocols = [one for channel in (channels._control, *channels._senders) for one in channel._protocols]
    async with asyncio.timeout(10):
        while not all(one._is_lost for one in protocols if hasattr(one, "processor")):
            await asyncio.sleep(0.01)
