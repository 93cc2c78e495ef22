"""Reading one tensor as an engine does: inline bytes, or a shared-memory segment that is read and then unlinked.

A segment is opened without following links, must be a regular file readable by its owner only, must hold every byte
the handle names, and its name is gone afterwards: the order of the published vLLM servicer.  `Light` readers keep
nothing of the pixels and use one buffer again and again, so that a benchmark measures the gateway and not this
process.
"""

import contextlib
import dataclasses
import hashlib
import os
import stat
from typing import Any

import numpy as np

SEGMENT_PREFIX = "smg-tokenspeed-"
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1, "int64": 8, "uint32": 4}
_NUMPY = {"float32": np.float32, "float16": np.float16, "uint8": np.uint8, "int64": np.int64, "uint32": np.uint32}
_SMALL = 256  # values of tensors up to this many elements are kept, and as many evenly spread ones of larger


class Refused(Exception):
    """What arrived breaks the protocol; the text says which rule."""


@dataclasses.dataclass(frozen=True)
class SeenTensor:
    """One tensor as it arrived.  `sha256` is empty in light mode; `values` only for small ones, flat, in C order;
    `sample`: some of a larger one.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    transport: str
    nbytes: int
    sha256: str
    values: tuple[int | float, ...]
    sample: tuple[int | float, ...] = ()

    def rows(self) -> list[list[int]]:
        """The values of a small 2-D integer tensor, such as a grid."""
        width = self.shape[1]
        return [[int(x) for x in self.values[at : at + width]] for at in range(0, len(self.values), width)]


class Reader:
    """Reads tensors; `light` skips digests and the look at every value.  `keeps_names`: leaves segments where they are,
    as an engine told not to unlink does.
    """

    def __init__(self, directory: str = "/dev/shm", *, keeps_names: bool = False) -> None:
        self._directory = directory
        self._keeps_names = keeps_names
        self._buffer = bytearray()

    def read(self, name: str, tensor: Any, *, light: bool) -> SeenTensor:
        """Take `tensor` (a protobuf TensorData) apart.  Raises Refused; an opened segment is unlinked in any case."""
        kind = tensor.WhichOneof("payload")
        if kind == "shm":
            data = self._segment(name, tensor.shm)
        elif kind == "inline":
            data = memoryview(tensor.inline)
        else:
            raise Refused(f"{name}: payload by {kind or 'nothing'}, this engine takes inline and shm")
        shape = tuple(tensor.shape)
        if tensor.dtype not in ITEM_BYTES:
            raise Refused(f"{name}: unknown dtype {tensor.dtype!r}")
        if not shape or 0 in shape:
            raise Refused(f"{name}: empty shape {shape}")
        count = int(np.prod(shape, dtype=np.int64))
        if len(data) != count * ITEM_BYTES[tensor.dtype]:
            raise Refused(f"{name}: {len(data)} bytes do not make {tensor.dtype} {shape}")
        small = count <= _SMALL and tensor.dtype in _NUMPY
        values = tuple(np.frombuffer(data, _NUMPY[tensor.dtype]).tolist()) if small else ()
        if not light:
            _look_at_every_value(name, tensor.dtype, data)
        digest = "" if light else hashlib.sha256(data).hexdigest()
        sample = () if light or values else _sample(tensor.dtype, data)
        return SeenTensor(name, tensor.dtype, shape, kind, len(data), digest, values, sample)

    def _segment(self, name: str, handle: Any) -> memoryview:
        if not handle.name.startswith(SEGMENT_PREFIX) or "/" in handle.name:
            raise Refused(f"{name}: bad segment name {handle.name!r}")
        path = f"{self._directory}/{handle.name}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(f"{name}: segment {handle.name} cannot be opened: {error.strerror}") from None
        try:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or stat.S_IMODE(facts.st_mode) & 0o077:
                raise Refused(f"{name}: segment {handle.name} is not a regular file of mode 0600")
            return self._fill(name, descriptor, handle.offset, handle.nbytes)
        finally:
            os.close(descriptor)
            if not self._keeps_names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def _fill(self, name: str, descriptor: int, offset: int, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        view = memoryview(self._buffer)[:nbytes]
        done = 0
        while done < nbytes:
            got = os.preadv(descriptor, [view[done:]], offset + done)
            if not got:
                raise Refused(f"{name}: segment is short, {done} of {nbytes} bytes")
            done += got
        return view


def _sample(dtype: str, data: memoryview) -> tuple[int | float, ...]:
    """Values evenly spread over a tensor; none of a type numpy does not have."""
    if dtype not in _NUMPY:
        return ()
    whole = np.frombuffer(data, _NUMPY[dtype])
    return tuple(whole[np.linspace(0, whole.size - 1, min(_SMALL, whole.size)).astype(int)].tolist())


def _look_at_every_value(name: str, dtype: str, data: memoryview) -> None:
    """A float that is not finite is never a pixel."""
    if dtype in ("float32", "float16"):
        fine = bool(np.isfinite(np.frombuffer(data, _NUMPY[dtype])).all())
    elif dtype == "bfloat16":  # all exponent bits set: infinity or not a number
        fine = bool(((np.frombuffer(data, np.uint16) & 0x7F80) != 0x7F80).all())
    else:
        return
    if not fine:
        raise Refused(f"{name}: a value is not finite")
