"""A tensor in a message of vLLM or TokenSpeed: both have a TensorData of the same fields under different numbers.

Rule: bytes that go inline are never copied into the message when they are many; the caller writes the primary
tensor's behind it (`engines.wire.field`).
"""

from typing import Any, TypeVar

from smg_grpc_proto.generated import common_pb2

from engines.base import Tensor
from engines.transport import Handle, Placed, RemoteHandle

DataT = TypeVar("DataT", bound=Any)  # a TensorData

# What identifies a clip or picture to a decode worker travels by value at any threshold: both SMG versions recorded
# do so.
BY_VALUE = frozenset({"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "video_second_per_grid"})


def tensor_data(kind: type[DataT], tensor: Tensor, placed: Placed | None) -> DataT:
    """Shape, dtype and, when the bytes are elsewhere, where; the caller adds inline bytes."""
    data: DataT = kind(shape=tensor.shape, dtype=tensor.dtype)
    if isinstance(placed, Handle):
        data.shm.CopyFrom(
            common_pb2.ShmHandle(name=placed.name, offset=0, nbytes=placed.nbytes, owner_id=placed.owner_id)
        )
    elif isinstance(placed, RemoteHandle):
        data.remote.CopyFrom(
            common_pb2.RemoteTensorHandle(transport="nixl", descriptor=placed.descriptor, nbytes=placed.nbytes)
        )
    return data


def small_data(kind: type[DataT], tensor: Tensor, placed: Placed | None) -> DataT:
    """The same with its bytes, unless they are elsewhere."""
    data = tensor_data(kind, tensor, placed)
    if placed is None:
        data.inline = b"".join(tensor.buffers)
    return data
