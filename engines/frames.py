"""HTTP/2 frames of a plain call, written and read without h2's machinery: two thirds of what a call costs the loop.

A call that goes well is always the same few frames: HEADERS and DATA out, HEADERS, DATA, WINDOW_UPDATE and HEADERS
(trailers) in.  They are handled here, by the letter of RFC 9113, upon h2's own stream objects, windows and header
table; whatever is not plain (padding, priorities, CONTINUATION, a closed window, an unknown stream, a frame that is not
whole, all other types) goes to h2, byte for byte and in its order.  So h2 decides in every doubt, and its state is
always true.

The request's header block uses no dynamic table, so it is made once for a method.  A received block is decoded by h2
the first time; as long as the decoder's table does not change, the same bytes mean the same headers.

h2 and hpack are pinned in setup.cfg: this file knows their insides.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from typing import Protocol

from grpclib.metadata import USER_AGENT, encode_metadata
from grpclib.protocol import Connection
from h2.connection import AllowedStreamIDs, ConnectionInputs, H2Connection
from h2.stream import H2Stream, StreamClosedBy, StreamState
from h2.windows import WindowManager
from hpack import Encoder, NeverIndexedHeaderTuple

Headers = tuple[tuple[str, str], ...]

LAST_STREAM_ID = (1 << 31) - 1
"""A connection that has used it takes no more calls."""

_MOST_KNOWN = 64  # header blocks remembered, by connection
_FRAME_HEAD = struct.Struct(">HBBBL")
_DATA, _HEADERS, _WINDOW_UPDATE = 0, 1, 8
_LARGEST_WINDOW = (1 << 31) - 1
_END_STREAM, _END_HEADERS = 1, 4


class Receiver(Protocol):
    """A call as frames see it.  `headers`, `trailers`: None until they have come."""

    id: int
    headers: Headers | None
    trailers: Headers | None

    def opened(self, headers: Headers) -> None: ...
    def arrived(self, data: bytes, acknowledgeable: int) -> None: ...
    def ended(self) -> None: ...


@functools.lru_cache(maxsize=256)
def request_block(scheme: str, authority: str, path: str, metadata: Headers) -> bytes:
    """The header block of a call; ValueError or TypeError for metadata that gRPC does not allow."""
    headers = (
        (":method", "POST"),
        (":scheme", scheme),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", USER_AGENT),
        *encode_metadata(metadata),
    )
    block = Encoder().encode([NeverIndexedHeaderTuple(*header) for header in headers])
    if len(block) > 16384:
        raise ValueError(f"the metadata of a call take {len(block)} bytes, more than one frame")
    return block


def has_room(h2: H2Connection) -> bool:
    """Whether the peer allows another stream."""
    most = h2.remote_settings.max_concurrent_streams
    return len(h2.streams) < most or h2.open_outbound_streams < most


def open_stream(h2: H2Connection) -> H2Stream:
    """A stream whose request headers count as sent; the caller sends them, before anything else.  h2's errors."""
    h2.state_machine.process_input(ConnectionInputs.SEND_HEADERS)
    stream = h2._begin_new_stream(h2.get_next_available_stream_id(), AllowedStreamIDs.ODD)
    machine = stream.state_machine
    machine.state, machine.client, machine.headers_sent = StreamState.OPEN, True, True
    return stream


def headers_frame(h2: H2Connection, stream: H2Stream, block: bytes) -> bytes:
    if h2.encoder.header_table.resized:  # the peer changed its table's size: that has to be confirmed once
        block = h2.encoder.encode([]) + block
    return _FRAME_HEAD.pack(len(block) >> 8, len(block) & 0xFF, _HEADERS, _END_HEADERS, stream.stream_id) + block


def last_data_frame(h2: H2Connection, stream: H2Stream, data: bytes) -> bytes | None:
    """`data` as the only DATA frame of the stream, with END_STREAM; None when it does not fit now."""
    nbytes = len(data)
    if nbytes > min(stream.outbound_flow_control_window, h2.outbound_flow_control_window, h2.max_outbound_frame_size):
        return None
    stream.outbound_flow_control_window -= nbytes
    h2.outbound_flow_control_window -= nbytes
    stream.state_machine.state = StreamState.HALF_CLOSED_LOCAL
    return _FRAME_HEAD.pack(nbytes >> 8, nbytes & 0xFF, _DATA, _END_STREAM, stream.stream_id) + data


def acknowledge(connection: Connection, stream_id: int, nbytes: int) -> None:
    """Give `nbytes` that were consumed back to the peer's windows; h2 sends updates when they are due."""
    h2 = connection._connection
    stream = h2.streams.get(stream_id)
    managers = [h2._inbound_flow_control_window_manager]
    if stream is not None:
        managers.append(stream._inbound_window_manager)
    if any(_is_due(manager, nbytes) for manager in managers):
        connection.ack(stream_id, nbytes)
        return
    for manager in managers:
        manager._bytes_processed += nbytes


def _is_due(manager: WindowManager, nbytes: int) -> bool:
    return manager.current_window_size <= 0 or manager._bytes_processed + nbytes >= manager.max_window_size // 2


class FrameReader:
    """Reads one connection's bytes.  `calls` by stream; `by_h2` takes everything that is not plain, and says whether
    the connection lives on.
    """

    def __init__(
        self,
        h2: H2Connection,
        calls: Mapping[int, Receiver],
        by_h2: Callable[[bytes], bool],
        window_opened: Callable[[], None],
    ) -> None:
        self._h2 = h2
        self._calls = calls
        self._window_opened = window_opened
        self._by_h2 = by_h2
        self._is_over = False
        self._known: dict[tuple[int, bytes], Headers] = {}
        self._table = self._table_now()  # the header table for which they are known

    def read(self, data: bytes) -> None:
        at, end = 0, len(data)
        while end - at >= _FRAME_HEAD.size and not self._is_amid():
            high, low, kind, flags, stream_id = _FRAME_HEAD.unpack_from(data, at)
            begin = at + _FRAME_HEAD.size
            after = begin + (high << 8 | low)
            if after > end:
                break
            if not self._take(kind, flags, stream_id, data[begin:after]):
                self._leave(data[at:after])
            if self._is_over:
                return
            at = after
        if at < end:
            self._leave(data[at:] if at else data)

    def _leave(self, data: bytes) -> None:
        """To h2."""
        self._is_over = not self._by_h2(data)

    def _is_amid(self) -> bool:
        """Whether h2 holds the beginning of a frame or of a header block: what follows belongs to it."""
        buffer = self._h2.incoming_buffer
        return bool(buffer._data or buffer._headers_buffer)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bool:
        """Handle a plain frame; False leaves it, untouched, to h2."""
        if kind == _WINDOW_UPDATE and len(payload) == 4:
            return self._take_window_update(stream_id, int.from_bytes(payload))
        call = self._calls.get(stream_id)
        if call is None or len(payload) > self._h2.max_inbound_frame_size:
            return False
        stream = self._h2.streams.get(stream_id)
        if stream is None or stream._expected_content_length is not None:
            return False
        if kind == _DATA:
            return flags == 0 and self._take_data(call, stream, payload)
        if kind == _HEADERS and flags in (_END_HEADERS, _END_HEADERS | _END_STREAM):
            return self._take_headers(call, stream, flags, payload)
        return False

    def _take_data(self, call: Receiver, stream: H2Stream, payload: bytes) -> bool:
        machine, nbytes = stream.state_machine, len(payload)
        windows = (self._h2._inbound_flow_control_window_manager, stream._inbound_window_manager)
        is_due = machine.headers_received and machine.state in (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL)
        if not is_due or nbytes > min(window.current_window_size for window in windows):
            return False
        for window in windows:
            window.current_window_size -= nbytes
        call.arrived(payload, nbytes)
        return True

    def _take_window_update(self, stream_id: int, increment: int) -> bool:
        """Of the connection; of a stream that is open to us.  What is over the limit, or zero, is an error."""
        window: H2Connection | H2Stream | None = self._h2
        if stream_id:
            stream = window = self._h2.streams.get(stream_id)
            if stream is None or stream.state_machine.state not in (StreamState.OPEN, StreamState.HALF_CLOSED_LOCAL):
                return False
        if window is None or not 0 < increment <= _LARGEST_WINDOW - window.outbound_flow_control_window:
            return False
        window.outbound_flow_control_window += increment
        self._window_opened()
        return True

    def _take_headers(self, call: Receiver, stream: H2Stream, flags: int, block: bytes) -> bool:
        machine, is_last = stream.state_machine, bool(flags & _END_STREAM)
        if machine.state is not StreamState.HALF_CLOSED_LOCAL or is_last is not bool(machine.headers_received):
            return False
        table = self._table_now()
        if not self._is_same(table):
            self._known.clear()
            self._table = table
        headers = self._known.get((flags, block))
        if headers is None:
            self._learn(call, stream, flags, block)
            return True
        if not is_last:
            machine.headers_received = True
            call.opened(headers)
            return True
        machine.state, machine.trailers_received = StreamState.CLOSED, True
        machine.stream_closed_by = StreamClosedBy.RECV_END_STREAM
        del self._h2.streams[stream.stream_id]
        self._h2._closed_streams[stream.stream_id] = StreamClosedBy.RECV_END_STREAM
        call.trailers = headers
        call.ended()
        return True

    def _learn(self, call: Receiver, stream: H2Stream, flags: int, block: bytes) -> None:
        """Have h2 read the block, and remember what it says if that did not change the table."""
        self._leave(_FRAME_HEAD.pack(len(block) >> 8, len(block) & 0xFF, _HEADERS, flags, stream.stream_id) + block)
        headers = call.trailers if flags & _END_STREAM else call.headers
        is_resize = not block or block[0] & 0xE0 == 0x20
        if headers is None or is_resize or stream._expected_content_length is not None:
            return
        if self._is_same(self._table_now()) and len(self._known) < _MOST_KNOWN:
            self._known[flags, block] = headers

    def _table_now(self) -> tuple[object, int]:
        """Every new entry of a header table stands at its head."""
        entries = self._h2.decoder.header_table.dynamic_entries
        return (entries[0] if entries else None), len(entries)

    def _is_same(self, table: tuple[object, int]) -> bool:
        return table[0] is self._table[0] and table[1] == self._table[1]
