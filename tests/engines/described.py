"""Any engine's message as plain values that compare: long byte strings as size and digest, key lists in order."""

import base64
import hashlib

KEPT_BYTES = 64


def describe(message):
    """Fields that are set, by name.  A byte string longer than KEPT_BYTES becomes {"nbytes", "sha256"}."""
    found = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {str(key): _one(field, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            found[field.name] = [_one(field, each) for each in value]
        else:
            found[field.name] = _one(field, value)
    return found


def _one(field, value):
    if hasattr(value, "ListFields"):
        return describe(value)
    if isinstance(value, bytes):
        if len(value) <= KEPT_BYTES:
            return {"base64": base64.b64encode(value).decode()}
        return {"nbytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return value


def is_digest(value):
    return isinstance(value, dict) and set(value) == {"nbytes", "sha256"}
