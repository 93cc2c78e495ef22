"""Kept responses: their number, size and age are bounded, and a conversation stays whole as long as it is used."""

from pipeline.protocols.responses_store import Conversation, Kept, ResponseStore


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def kept(nbytes: int = 10, previous: str | None = None) -> Kept:
    return Kept(b"r" * nbytes, b"", b"", previous)


def store(most: int = 100, most_bytes: int = 1000, clock: Clock | None = None) -> ResponseStore:
    return ResponseStore(most=most, most_bytes=most_bytes, retention_s=60, now=clock or Clock())


def test_by_number_the_least_recently_used_goes_first() -> None:
    found = store(most=2)
    found.put("a", kept())
    found.put("b", kept())
    assert found.chain("a") == [kept()]
    found.put("c", kept())
    assert found.get("b") is None and found.get("a") is not None and found.get("c") is not None
    assert (len(found), found.nbytes) == (2, 20)


def test_by_size() -> None:
    found = store(most_bytes=1000)
    for name in "abcde":
        found.put(name, kept(240))
    assert found.get("a") is None and found.get("b") is not None and found.nbytes == 960
    found.put("large", kept(251))  # more than a quarter
    assert found.get("large") is None and len(found) == 4
    assert found.takes(250) and not found.takes(251)


def test_by_age_whatever_was_used_since() -> None:
    clock = Clock()
    found = store(clock=clock)
    found.put("a", kept())
    clock.now += 59
    found.put("b", kept())
    assert found.chain("a") is not None
    clock.now += 2
    assert found.get("a") is None and found.get("b") is not None and found.nbytes == 10


def test_a_conversation_is_a_chain() -> None:
    found = store(most=3)
    found.put("a", kept(1))
    found.put("b", kept(2, "a"))
    found.put("other", kept(9))
    chain = found.chain("b")
    assert chain is not None and [one.nbytes for one in chain] == [1, 2]
    found.put("c", kept(3, "b"))  # `other` was used longest ago
    assert found.get("other") is None
    found.put("d", kept(4, "c"))
    assert found.chain("d") is None, "its beginning is gone"


def test_deleted_is_gone() -> None:
    found = store()
    found.put("a", kept())
    assert found.remove("a") and not found.remove("a") and found.nbytes == 0
    found.put("a", kept(5))
    assert found.nbytes == 5


def test_a_store_for_none_keeps_none() -> None:
    found = store(most=0)
    found.put("a", kept())
    assert not found.takes(1) and len(found) == 0


def test_conversations_share_number_and_size_with_responses() -> None:
    found = store(most=2)
    talk = Conversation(1, {"a": "b"}, (b'{"id":"x"}',))
    assert found.put("conv", talk)
    found.put("a", kept())
    assert found.conversation("conv") == talk and found.get("conv") is None and found.conversation("a") is None
    found.put("b", kept())  # the conversation was used last
    assert found.get("a") is None and found.conversation("conv") == talk
    assert found.nbytes == talk.nbytes + 10 and found.items == 1


def test_a_conversation_grows_until_it_is_too_large() -> None:
    found = store(most_bytes=1000)
    found.put("conv", Conversation(1))
    found.extend("conv", [b"x" * 20, b"y" * 20])
    found.extend("conv", [b"z" * 200])  # more than a quarter of what is kept
    talk = found.conversation("conv")
    assert talk is not None and talk.items == (b"x" * 20, b"y" * 20)
    found.extend("gone", [b"x"])
    assert found.conversation("gone") is None and len(found) == 1


def test_conversations_are_bounded_by_their_items() -> None:
    found = ResponseStore(most=9, most_bytes=10_000, retention_s=60, most_items=3, now=Clock())
    found.put("a", Conversation(1, {}, (b"1", b"2")))
    found.put("b", Conversation(1, {}, (b"3", b"4")))
    assert found.conversation("a") is None and found.items == 2
    assert not found.put("c", Conversation(1, {}, (b"1",) * 4)) and found.items == 2
