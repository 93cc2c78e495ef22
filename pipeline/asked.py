"""What a request asks of its tensors: which distinct ones, how large, and the job that makes each."""

import msgspec
import numpy as np

from engines.base import ITEM_BYTES, Form
from pipeline.cache import Key
from pipeline.intake import Item
from pipeline.jobs import Encode, Inspected
from pipeline.models.base import Measured
from pipeline.plan import ServedModel
from pipeline.ticket import Ticket
from pool.spans import Lease


class Look(msgspec.Struct, frozen=True):
    """What is known of a distinct item before it is decoded."""

    item: Item
    facts: Inspected
    measured: Measured


class Wanted(msgspec.Struct, frozen=True):
    """A distinct tensor of a request.  `job` lacks its sinks; `looks`: the items it is the tensor of."""

    job: Encode
    nbytes: int
    looks: tuple[int, ...]


class Asked(msgspec.Struct, frozen=True):
    """One request's tensors in one form."""

    model: ServedModel
    looks: tuple[Look, ...]
    form: Form
    inputs: Lease
    ticket: Ticket

    def wanted(self, *, in_file: bool) -> dict[Key, Wanted]:
        """By key, so that two items that turn out to be the same picture are one."""
        found: dict[Key, Wanted] = {}
        for index, look in enumerate(self.looks):
            job = Encode(
                item=look.item.positions[0],
                model=self.model.key,
                modality=look.item.modality,
                source=look.item.source,
                nbytes=look.facts.nbytes,
                hints=look.item.hints,
                measured=msgspec.structs.replace(look.measured, seconds=()),  # hundreds, and of no use to the job
                form=self.form.of(look.item.modality),
                sinks=(),
            )
            key = Key.of(look.facts.content_hash, job, in_file=in_file)
            known = found.get(key)
            found[key] = Wanted(
                known.job if known else job,
                tensor_bytes(look, self.form),
                (*(known.looks if known else ()), index),
            )
        return found

    @property
    def total(self) -> int:
        """Bytes of all tensors, by position."""
        return sum(tensor_bytes(look, self.form) * len(look.item.positions) for look in self.looks)


def tensor_bytes(look: Look, form: Form) -> int:
    """Of one item's primary tensor, in the form its modality has."""
    if not form.tensors:
        return 0
    return int(np.prod(look.measured.primary_shape)) * ITEM_BYTES[form.of(look.item.modality).dtype]
