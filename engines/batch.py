"""All items of one modality as one tensor of each name, for engines that take a batch.

Rule: rows follow the items' order along the first axis, and nothing is copied: a joined tensor is the list of its
items' buffers.  `engines.vllm` and `engines.sglang` use this; engines that take items one by one do not.
"""

from collections.abc import Sequence

from engines.base import MediaBatch, Tensor


def primary_tensor(batch: MediaBatch) -> Tensor:
    """All items' rows of the primary tensor, one after the other."""
    return _along_first_axis([item.primary for item in batch.items])


def side_tensors(batch: MediaBatch) -> dict[str, Tensor]:
    """All items' rows of every side tensor; a tensor that is shared by all items is the first item's."""
    split = {*batch.layout.batched, *batch.layout.flat, *batch.layout.flat.values()}
    joined = {}
    for name, first in batch.items[0].side.items():
        joined[name] = _along_first_axis([item.side[name] for item in batch.items]) if name in split else first
    return joined


def _along_first_axis(rows: Sequence[Tensor]) -> Tensor:
    first = rows[0]
    if any(row.dtype != first.dtype or row.shape[1:] != first.shape[1:] for row in rows):
        raise ValueError(f"items of one batch differ: {[(row.dtype, row.shape) for row in rows]}")
    shape = (sum(row.shape[0] for row in rows), *first.shape[1:])
    return Tensor(first.dtype, shape, tuple(buffer for row in rows for buffer in row.buffers))
