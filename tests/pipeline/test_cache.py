"""The pixel cache and what is shared in flight: never a wrong byte, never in the way, nothing held in the end."""

import asyncio
import contextlib
import os
import random
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache import Entry, InSpan, Key
from pipeline.errors import GatewayError
from pipeline.jobs import Encoded
from pipeline.models.base import Hints
from pool.mapping import PAGE
from tests.pipeline.pixel_stand import Request, Stand

KINDS = [False, True]  # spans, segments


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with standing(tmp_path) as one:
        yield one


@contextlib.asynccontextmanager
async def standing(directory: Path, **sizes: int) -> AsyncIterator[Stand]:
    stand = Stand(directory, **sizes)
    yield stand
    await stand.close()
    await turns()
    assert stand.outputs.used == 0 and stand.inputs.used == 0
    assert os.listdir(directory) == []


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to that")


async def served(stand: Stand, *pictures: int, **settings: object) -> None:
    """A whole request: answered, consumed as an engine does, gone."""
    request = stand.ask(*pictures, **settings)
    await consume(stand, request)


async def consume(stand: Stand, request: Request) -> None:
    pixels = await request.result()
    for name, data in request.publish(pixels):
        assert (stand.directory / name).read_bytes()[: len(data)] == data
        os.unlink(stand.directory / name)
    request.check(pixels)
    await request.leave()


@pytest.mark.parametrize("by_segment", KINDS)
async def test_found_again_without_a_copy(stand: Stand, by_segment: bool) -> None:
    await served(stand, 1, by_segment=by_segment)
    first, second = stand.ask(1, by_segment=by_segment), stand.ask(1, by_segment=by_segment)
    one, two = await first.result(), await second.result()
    assert (stand.encoded, stand.copied) == (1, 0)
    assert (stand.count("pixel_cache_hits_total"), stand.count("pixel_cache_misses_total")) == (2, 1)
    if by_segment:
        assert one.segment is not None and two.segment is not None and one.segment.name == two.segment.name
        assert one.segment is not two.segment
    else:
        assert stand.outputs.used == stand.cache.used_bytes == 2 * PAGE
    await first.leave()
    await second.leave()


@pytest.mark.parametrize("by_segment", KINDS)
async def test_two_at_once_are_one_job(stand: Stand, by_segment: bool) -> None:
    stand.pool.is_quick = False
    first = stand.ask(1, by_segment=by_segment)
    await until(lambda: stand.pool.running)
    second = stand.ask(1, by_segment=by_segment)
    await turns()
    assert not first.task.done() and not second.task.done()
    stand.pool.finish_all()
    await first.result()
    await second.result()
    assert stand.encoded == 1 and stand.count("pixels_shared_total") == 1
    await first.leave()
    await second.leave()
    assert len(stand.cache) == 1


@pytest.mark.parametrize("by_segment", KINDS)
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pictures", [(1,), (1, 2)])
async def test_the_first_leaves_and_the_second_is_served(
    stand: Stand, by_segment: bool, is_late: bool, pictures: tuple[int, ...]
) -> None:
    """Also when the job writes into the segment of the one that leaves, and has not even opened it."""
    stand.pool.is_quick = False
    stand.pool.begins_late = lambda: is_late
    first = stand.ask(*pictures, by_segment=by_segment)
    await until(lambda: len(stand.pool.running) == len(pictures))
    second = stand.ask(1, by_segment=by_segment)
    await turns()
    await first.leave(consumed=False)
    await turns()
    assert not second.task.done()
    stand.pool.is_quick = True
    stand.pool.finish_all()
    await consume(stand, second)
    assert stand.encoded == len(pictures)


@pytest.mark.parametrize("by_segment", KINDS)
async def test_the_second_leaves_and_the_first_is_served(stand: Stand, by_segment: bool) -> None:
    stand.pool.is_quick = False
    first = stand.ask(1, by_segment=by_segment)
    await until(lambda: stand.pool.running)
    second = stand.ask(1, by_segment=by_segment)
    await turns()
    await second.leave(consumed=False)
    stand.pool.finish_all()
    await consume(stand, first)


@pytest.mark.parametrize("by_segment", KINDS)
async def test_what_nobody_waits_for_is_withdrawn_and_not_kept(stand: Stand, by_segment: bool) -> None:
    stand.pool.is_quick = False
    requests = [stand.ask(1, by_segment=by_segment) for _ in range(2)]
    await until(lambda: stand.pool.running)
    await turns()
    for request in requests:
        await request.leave(consumed=False)
    await turns()
    (withdrawn,) = stand.pool.running
    assert withdrawn.outcome.cancelled()
    if not by_segment:
        assert stand.outputs.used == 2 * PAGE  # as long as the process writes there
    later = stand.ask(1, by_segment=by_segment)  # not what is being withdrawn
    await until(lambda: len(stand.pool.running) == 2)
    stand.pool.finish(stand.pool.running[1])
    await later.result()
    stand.pool.finish(withdrawn)  # the late write hits nobody
    later.check(await later.result())
    await consume(stand, later)
    assert len(stand.cache) == 1 and stand.outputs.used == (0 if by_segment else 2 * PAGE)


@pytest.mark.parametrize("by_segment", KINDS)
async def test_a_failure_is_told_to_all_who_wait_and_not_remembered(stand: Stand, by_segment: bool) -> None:
    stand.pool.broken.add(7)
    stand.pool.is_quick = False
    first = stand.ask(7, by_segment=by_segment)
    await until(lambda: stand.pool.running)
    second = stand.ask(3, 7, by_segment=by_segment)
    await until(lambda: len(stand.pool.running) == 2)
    stand.pool.finish_all()
    for request, item in ((first, 0), (second, 1)):
        with pytest.raises(GatewayError) as caught:
            await request.task
        assert (caught.value.code, caught.value.item) == ("multimodal_processing_failed", item)
        await request.leave(consumed=False)
    await turns()
    stand.pool.is_quick = True
    stand.pool.broken.clear()
    encoded = stand.encoded
    await served(stand, 7, by_segment=by_segment)
    assert stand.encoded == encoded + 1


@pytest.mark.parametrize("by_segment", KINDS)
async def test_every_setting_is_its_own_tensor(stand: Stand, by_segment: bool) -> None:
    settings = (
        {},
        {"model": 2},
        {"dtype": "uint8"},
        {"hints": Hints(max_long_side=28)},
        {"pages": 1},  # another measured shape, as a family makes of pictures that must agree
    )
    for one in settings:
        await served(stand, 1, by_segment=by_segment, **one)
    assert stand.encoded == len(settings)
    assert stand.count("pixel_cache_hits_total") == 0
    await served(stand, 1, by_segment=not by_segment)
    assert stand.encoded == len(settings) + 1  # another kind of place


async def test_pictures_of_a_request_are_kept_each_on_its_own(stand: Stand) -> None:
    await served(stand, 1, 2, by_segment=True, pages=1)
    await served(stand, 2, by_segment=True, pages=1)
    assert (stand.encoded, stand.copied) == (2, 0)
    await served(stand, 2, 3, 1, 2, by_segment=True, pages=1)
    assert (stand.encoded, stand.copied) == (3, 2)
    await served(stand, 3, by_segment=True, pages=1)
    assert (stand.encoded, stand.copied) == (3, 2)


async def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    """Room for four."""
    async with standing(tmp_path, limit_pages=8) as stand:
        for picture in (1, 2, 3, 4, 1, 5):
            await served(stand, picture)
        assert stand.count("pixel_cache_evictions_total") == 1 and stand.cache.used_bytes == 8 * PAGE
        encoded = stand.encoded
        for picture in (1, 3, 4, 5):
            await served(stand, picture)
        assert stand.encoded == encoded
        await served(stand, 2)
        assert stand.encoded == encoded + 1


async def test_what_is_given_up_while_it_is_used_drains_first(tmp_path: Path) -> None:
    async with standing(tmp_path, limit_pages=8) as stand:
        reading = stand.ask(1)
        pixels = await reading.result()
        for picture in range(2, 8):
            await served(stand, picture)
        assert stand.count("pixel_cache_evictions_total") == 3
        reading.check(pixels)
        assert stand.outputs.used == stand.cache.used_bytes + 2 * PAGE
        await reading.leave()
        assert stand.outputs.used == stand.cache.used_bytes


async def test_a_tensor_larger_than_the_cache_is_not_kept(tmp_path: Path) -> None:
    async with standing(tmp_path, limit_pages=8) as stand:
        await served(stand, 1, pages=9)
        await served(stand, 1, by_segment=True)  # its file has 64 KiB
        assert len(stand.cache) == 0 and stand.outputs.used == 0


async def test_without_a_cache_nothing_is_kept_or_counted(tmp_path: Path) -> None:
    async with standing(tmp_path, limit_pages=0) as stand:
        for by_segment in KINDS:
            await served(stand, 1, by_segment=by_segment)
            await served(stand, 1, by_segment=by_segment)
        assert stand.encoded == 4 and len(stand.cache) == 0 and stand.outputs.used == 0
        assert stand.count("pixel_cache_misses_total") == 0


async def test_nobody_waits_for_what_is_only_kept(tmp_path: Path) -> None:
    async with standing(tmp_path, arena_pages=8, limit_pages=8) as stand:
        for picture in range(4):
            await served(stand, picture)
        assert stand.outputs.used == 8 * PAGE
        request = stand.ask(9, pages=5)
        await turns()
        assert request.task.done()
        await consume(stand, request)
        assert stand.outputs.used == 7 * PAGE  # the oldest made room, one stayed


async def test_requests_with_found_tensors_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Each finds three pages of eight and needs three more: with full hands neither would ever go on."""
    async with standing(tmp_path, arena_pages=8, limit_pages=8) as stand:
        holders = [stand.ask(picture, pages=3) for picture in (1, 2)]
        for holder in holders:
            await holder.result()
        first, second = stand.ask(1, 4, pages=3), stand.ask(2, 5, pages=3)
        await turns()
        assert stand.outputs.waiting == 2 and len(stand.cache) == 0
        for holder in holders:
            await holder.leave()
        await consume(stand, first)
        await consume(stand, second)


async def test_what_is_being_made_is_joined_past_those_who_wait(tmp_path: Path) -> None:
    async with standing(tmp_path, arena_pages=8, limit_pages=8) as stand:
        stand.pool.is_quick = False
        first = stand.ask(1, pages=4)
        await until(lambda: stand.pool.running)
        large = stand.ask(2, pages=8)
        await turns()
        second = stand.ask(1, pages=4)
        await turns()
        assert stand.outputs.waiting == 1
        stand.pool.is_quick = True
        stand.pool.finish_all()
        await consume(stand, first)
        await consume(stand, second)
        await consume(stand, large)
        assert stand.encoded == 2


async def test_what_another_began_meanwhile_is_found_after_the_wait(tmp_path: Path) -> None:
    async with standing(tmp_path, arena_pages=8, limit_pages=8) as stand:
        holder = stand.ask(1, pages=8)
        await holder.result()
        first, second = stand.ask(2), stand.ask(2, 3)
        await turns()
        assert stand.outputs.waiting == 2
        await holder.leave()
        await consume(stand, first)
        await consume(stand, second)
        assert stand.encoded == 3


async def test_an_entry_that_ends_is_not_joined_any_more(stand: Stand) -> None:
    """From the very moment its last request leaves it, or its job fails."""

    def entry(key: Key, work: Coroutine[Any, Any, Encoded]) -> Entry:
        leases = stand.cache.try_spans([1])
        assert leases is not None
        return stand.cache.begin(key, InSpan(leases[0]), work, [])

    async def fail() -> Encoded:
        raise OSError

    left, failed = Key("a", b"", False), Key("b", b"", False)
    leave = stand.cache.join(entry(left, asyncio.sleep(60, Encoded(0.0, 0.0))))
    assert stand.cache.find(left) is not None
    leave()
    assert stand.cache.find(left) is None
    failing = entry(failed, fail())
    while not failing.making.done():
        assert stand.cache.find(failed) is failing
        await asyncio.sleep(0)
    assert stand.cache.find(failed) is None
    await turns()
    assert stand.outputs.used == 0


async def test_a_steady_stream_of_hits_starves_nobody(tmp_path: Path) -> None:
    async with standing(tmp_path, arena_pages=8, limit_pages=8) as stand:
        hitting = stand.ask(1, pages=4)
        await hitting.result()
        large = stand.ask(2, pages=8)
        await turns()
        for _ in range(20):  # without end somebody who uses it
            following = stand.ask(1, pages=4)
            await turns()
            await hitting.leave()
            await turns()
            if large.task.done():
                break
            hitting = following
        await consume(stand, large)
        await following.result()
        await following.leave()


async def test_a_tensor_that_never_fits_is_refused(stand: Stand) -> None:
    await served(stand, 1)
    request = stand.ask(1, 2, pages=17)
    with pytest.raises(GatewayError) as caught:
        await request.task
    assert caught.value.code == "multimodal_payload_too_large"
    await request.leave(consumed=False)


async def test_kept_segments_make_room_and_leave_half(tmp_path: Path) -> None:
    mib = 1 << 20
    async with standing(tmp_path, limit_pages=16 * mib // PAGE, shm_bytes=4 * mib, arena_pages=4096) as stand:
        for picture in range(6):
            await served(stand, picture, by_segment=True, pages=mib // 2 // PAGE)
        assert 0 < stand.cache.used_bytes <= 2 * mib
        large = stand.ask(9, by_segment=True, pages=7 * mib // 2 // PAGE)
        assert (await large.result()).segment is not None
        await large.leave()
        assert stand.segments.failures == 0


@pytest.mark.parametrize("is_clean", [True, False])
async def test_a_kept_segment_is_written_again_only_after_good_ends(stand: Stand, is_clean: bool) -> None:
    kept = stand.ask(1, by_segment=True)
    pixels = await kept.result()
    assert pixels.segment is not None
    master, name = pixels.segment.name, pixels.segment.publish()
    if is_clean:
        os.unlink(stand.directory / name)
    await kept.leave(consumed=is_clean)
    again = stand.ask(1, by_segment=True)  # it is read on all the same
    assert (found := (await again.result()).segment) is not None and found.name == master
    os.unlink(stand.directory / found.publish())
    await again.leave()
    stand.cache.close()
    new = stand.ask(2, by_segment=True)
    assert (found := (await new.result()).segment) is not None and (found.name == master) is is_clean
    await new.leave()


async def test_no_segment_to_be_had_goes_inline_and_is_kept_there(tmp_path: Path) -> None:
    async with standing(tmp_path, shm_bytes=PAGE) as stand:
        for _ in range(2):
            request = stand.ask(1, by_segment=True)
            assert (await request.result()).segment is None
            await request.leave()
        assert stand.encoded == 1 and stand.cache.used_bytes == 2 * PAGE


# -- for an engine that hands names on ---------------------------------------------------------------------------------


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder of a file system whose files the kernel gives leases of."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
async def plain(shm: Path) -> AsyncIterator[Stand]:
    """Without a cache."""
    async with standing(shm, limit_pages=0) as one:
        yield one


async def in_files(stand: Stand, *pictures: int, **settings: object) -> dict[int, str]:
    """A whole request: which of its items were written into a file, and into which one."""
    request = stand.ask(*pictures, apart=True, **settings)
    found = {position: segment.name for position, segment in (await request.result()).apart.items()}
    await consume(stand, request)
    return found


async def test_new_files_are_copied_into_and_idle_ones_written(plain: Stand) -> None:
    assert await in_files(plain, 1, 2) == {}
    files = set(os.listdir(plain.directory))
    assert {(plain.directory / name).stat().st_size for name in files} == {2 * PAGE}
    assert set((await in_files(plain, 3, 4)).values()) == files
    assert len(await in_files(plain, 5, 6, 7)) == 2  # there was no third
    assert set((await in_files(plain, 1, 2, 3)).values()) == set(os.listdir(plain.directory)) > files
    assert plain.outputs.used == 0 and plain.encoded == 10


async def test_a_picture_that_stands_twice_is_one_file_with_two_names(plain: Stand) -> None:
    await served(plain, 1, apart=True)
    request = plain.ask(2, 2, apart=True)
    pixels = await request.result()
    assert pixels.apart[0] is pixels.apart[1]
    assert len({name for name, _ in request.publish(pixels)}) == 2 and plain.encoded == 2
    await request.leave(consumed=False)
    assert await in_files(plain, 3) == {}, "nobody read them"


async def test_what_is_too_small_to_go_by_segment_is_in_spans(plain: Stand) -> None:
    await served(plain, 1, apart=True)
    assert await in_files(plain, 2, min_bytes=2 * PAGE + 1) == {}
    assert len(await in_files(plain, 2, min_bytes=2 * PAGE)) == 1


async def test_a_file_that_its_reader_keeps_is_not_written_again(plain: Stand) -> None:
    await served(plain, 1, apart=True)
    for picture in (2, 3):
        request = plain.ask(picture, apart=True)
        [(name, data)] = request.publish(await request.result())
        kept = os.open(plain.directory / name, os.O_RDONLY)
        os.unlink(plain.directory / name)
        await request.leave()
        assert await in_files(plain, 9) == {}
        assert os.pread(kept, len(data) + 1, 0) == data
        os.close(kept)
        assert len(await in_files(plain, 8)) == 1


@pytest.mark.parametrize("is_late", [False, True])
async def test_two_at_once_share_a_file(plain: Stand, is_late: bool) -> None:
    await served(plain, 1, apart=True)
    plain.pool.is_quick = False
    plain.pool.begins_late = lambda: is_late
    first = plain.ask(2, apart=True)
    await until(lambda: plain.pool.running)
    second = plain.ask(2, apart=True)
    await turns()
    await first.leave(consumed=False)
    plain.pool.finish_all()
    pixels = await second.result()
    assert list(pixels.apart) == [0] and plain.encoded == 2
    await consume(plain, second)


async def test_spans_are_waited_for_beside_files(shm: Path) -> None:
    async with standing(shm, limit_pages=0, arena_pages=4) as stand:
        await served(stand, 1, apart=True)
        full = stand.ask(7, 8)
        await full.result()
        waiting = stand.ask(2, 3, apart=True)
        await turns()
        assert not waiting.task.done() and len(stand.pool.begun) == 4, "what has a file is being made"
        await full.leave()
        assert list((await waiting.result()).apart) == [0]
        await consume(stand, waiting)
        cancelled = stand.ask(4, 5, 6, apart=True)
        await cancelled.leave(consumed=False)


async def test_kept_tensors_are_found_where_they_are(shm: Path) -> None:
    async with standing(shm) as stand:
        assert await in_files(stand, 1) == {}  # kept in a span, and a file is idle now
        kept = await in_files(stand, 2)
        for _ in range(2):
            assert await in_files(stand, 2) == kept
            assert await in_files(stand, 1) == {}
            both = await in_files(stand, 1, 2)
            assert both == {1: kept[0]}
        assert stand.encoded == 2
        stand.cache.close()
        assert set((await in_files(stand, 3)).values()) <= set(os.listdir(shm))


class Readers:
    """They open names, unlink them, and keep some open."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._kept: list[tuple[int, bytes]] = []

    def read(self, named: list[tuple[str, bytes]], *, keep: bool) -> None:
        for name, data in named:
            fd = os.open(self._directory / name, os.O_RDONLY)
            os.unlink(self._directory / name)
            assert os.pread(fd, len(data), 0) == data
            if keep:
                self._kept.append((fd, data))
            else:
                os.close(fd)

    def check(self) -> None:
        assert all(os.pread(fd, len(data) + 1, 0) == data for fd, data in self._kept)

    def close_oldest(self) -> None:
        os.close(self._kept.pop(0)[0])

    def __len__(self) -> int:
        return len(self._kept)


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_bytes_are_right_and_everything_comes_back(shm: Path, seed: int) -> None:
    """Requests come, wait, fail, leave at any moment; jobs end in any order; memory is scarce; engines that hand names
    on keep files open.
    """
    chance = random.Random(seed)
    sizes = {"arena_pages": 12, "limit_pages": chance.choice([0, 9, 40, 100]), "shm_bytes": 1 << 19}
    readers = Readers(shm)
    async with standing(shm, **sizes) as stand:
        stand.pool.is_quick = False
        stand.pool.broken = {5}
        stand.pool.begins_late = lambda: chance.random() < 0.5
        open_requests: list[Request] = []
        for _ in range(400):
            step = chance.random()
            if step < 0.35 and len(open_requests) < 8:
                pictures = [chance.randrange(6) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
                kind = chance.choice([{}, {"by_segment": True}, {"apart": True}, {"apart": True, "is_late": True}])
                open_requests.append(stand.ask(*pictures, **kind, pages=chance.choice([1, 2])))
            elif step < 0.75 and stand.pool.running:
                stand.pool.finish(chance.choice(stand.pool.running))
            elif open_requests:
                request = open_requests.pop(chance.randrange(len(open_requests)))
                await end(request, readers, consumed=chance.random() < 0.7, keep=chance.random() < 0.3)
            await asyncio.sleep(0.001 if chance.random() < 0.1 else 0)
            for request in open_requests:
                if request.task.done() and not request.task.cancelled() and not request.task.exception():
                    request.check(request.task.result())
            readers.check()
            if len(readers) > 4:
                readers.close_oldest()
            assert stand.cache.used_bytes <= stand.cache.limit_bytes
            assert not (stand.outputs.waiting and stand.keeps_spans)
        stand.pool.is_quick = True
        stand.pool.finish_all()
        for request in open_requests:
            await end(request, readers, consumed=True, keep=False)
        await turns()
        stand.pool.finish_all()
        await turns()
        assert stand.outputs.used + stand.segments.bytes >= stand.cache.used_bytes
        assert stand.outputs.waiting == 0 and stand.inputs.used == 0
    while readers:
        readers.check()
        readers.close_oldest()


async def end(request: Request, readers: Readers, *, consumed: bool, keep: bool) -> None:
    """As an engine and a client would: read and unlinked, or not, or gone before there was anything."""
    task = request.task
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        assert (
            isinstance(error, GatewayError) and error.item is not None and request.jobs[error.item].source.offset == 5
        )
        consumed = False
    elif task.done() and consumed:
        pixels = task.result()
        readers.read(request.publish(pixels), keep=keep and pixels.segment is None)
    elif not task.done():
        consumed = False
    await request.leave(consumed=consumed)
