"""The durable store: chunks in files, what is damaged, full or gone, and several processes."""
import errno
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.checkpoint import ModelError
from legacy import store
from legacy.link import RowBuffer, as_integers
from legacy.store import ChunkFiles
from legacy.tests.conftest import ROOT, chapter
from legacy.tests.test_paged import ids, in_threads

paged = chapter("02_paged_kv")
SHAPE = (3, 8, 16)                 # parts, tokens, width
LAYOUTS = ("chunked", "token-major")
WIDE = 1e12                        # a limit, and a speed, that nobody reaches


# 1. Rows in a ring -----------------------------------------------------------------------------------------------

class Ring:
    """What RowBuffer promises, told with intervals: a run follows the newest one, or begins at 0 if the end is too near, and
    a run's rows are free again when it and all older ones were given back."""

    def __init__(self, size):
        self.size, self.runs = size, []                         # [first, end, given back], oldest first

    def take(self, count):
        for first in (self.runs[-1][1], 0) if self.runs else (0,):
            end = first + count
            if end <= self.size and all(end <= other or first >= other_end for other, other_end, _ in self.runs):
                self.runs.append([first, end, False])
                return first
        return None

    def give_back(self, first):
        next(run for run in self.runs if run[0] == first and not run[2])[2] = True
        while self.runs and self.runs[0][2]:
            del self.runs[0]


@given(size=st.integers(1, 24), moves=st.lists(st.tuples(st.booleans(), st.integers(1, 24)), max_size=80))
@settings(deadline=None, max_examples=300)
def test_runs_of_rows_are_those_of_a_ring_and_never_overlap(size, moves):
    buffer, ring, held = RowBuffer(torch.zeros(size, 2)), Ring(size), {}
    for takes, number in moves:
        if takes:
            first = buffer.take(number)
            assert first == ring.take(number)
            if first is not None:
                rows = set(range(first, first + number))
                assert rows <= set(range(size)) and not any(rows & others for others in held.values())
                held[first] = rows
        elif held:
            first = sorted(held)[number % len(held)]
            buffer.give_back(first)
            ring.give_back(first)
            del held[first]
    for first in list(held):
        buffer.give_back(first)
    assert not buffer.taken and buffer.take(size) == 0 and buffer.take(1) is None


def test_more_rows_than_there_are_are_never_given():
    buffer = RowBuffer(torch.zeros(5, 2))
    assert buffer.take(6) is None and buffer.take(5) == 0
    assert RowBuffer(torch.zeros(0, 2)).take(1) is None


def test_rows_that_were_given_back_wait_for_older_ones():
    buffer = RowBuffer(torch.zeros(6, 2))
    assert [buffer.take(2) for _ in range(3)] == [0, 2, 4]
    buffer.give_back(2)
    buffer.give_back(4)
    assert buffer.take(1) is None
    buffer.give_back(0)
    assert buffer.take(6) == 0


@pytest.mark.parametrize("size", [40, 64])
def test_threads_that_share_rows_never_hold_the_same_ones(size):
    buffer, refused = RowBuffer(torch.zeros(size, 1)), Counter()

    def work(number):
        rng, taken = random.Random(number), 0
        while taken < 150:
            count = rng.randint(1, 20)
            first = buffer.take(count)
            if first is None:
                refused[number] += 1
                continue
            rows = buffer.memory[first:first + count]
            rows.fill_(number)
            for _ in range(3):
                assert bool((rows == number).all())
            buffer.give_back(first)
            taken += 1
        return taken
    assert in_threads(*(lambda number=number: work(number) for number in range(1, 5))) == [150] * 4
    assert not buffer.taken and buffer.take(size) == 0


# 2. Chunks in files ----------------------------------------------------------------------------------------------

def chain(count: int, size: int = SHAPE[1], salt: str = "", seed: int = 0, namespace: str = "a model"):
    """The prefixes of so many chunks of one text."""
    prefixes, tokens = [paged.Prefixes(namespace).salted(salt)], ids(seed, count * size)
    for start in range(0, len(tokens), size):
        prefixes.append(paged.Prefixes.extend(paged.Prefixes(namespace), prefixes[-1], tokens[start:start + size]))
    return prefixes[1:]


def contents(seed, shape=SHAPE, dtype=torch.float32):
    """Random bits [parts, tokens, width], as integers: all values, among them NaNs of all kinds."""
    numbers = numpy.random.default_rng(seed).integers(0, 256, shape[0] * shape[1] * shape[2] * dtype.itemsize, numpy.uint8)
    return numbers.view(f"<i{dtype.itemsize}").reshape(shape)


@pytest.fixture
def keep(tmp_path):
    """keep("a", "b", shape=..., dtype=..., limit=..., layout=..., content=...) -> ChunkFiles in these directories; its threads
    end with the test."""
    kept = []

    def files(*names, shape=SHAPE, dtype=torch.float32, limit=WIDE, layout="chunked", **options):
        kept.append(ChunkFiles([tmp_path / name for name in names or ("a",)], shape, dtype, limit, layout, **options))
        return kept[-1]
    yield files
    for one in kept:
        one.readers.shutdown()


def written(files, count: int, **options):
    """A chain of so many chunks, written -> its prefixes, and what was written."""
    prefixes = chain(count, files.shape[1], **options)
    states = [contents(number, files.shape, files.dtype) for number in range(count)]
    for number, prefix in enumerate(prefixes):
        files.write(prefix, number, states[number])
    return prefixes, states


def found(files, prefixes) -> list:
    return [files.find(prefix, number) for number, prefix in enumerate(prefixes)]


def read(files, chunks, part: int):
    """-> how many chunks from the first on are right, and the part [chunks, tokens, width] of all of them, as integers."""
    _, tokens, width = files.shape
    into, over, said = torch.zeros(len(chunks) * tokens, width, dtype=files.dtype), threading.Event(), []

    def done(whole, start, end):
        assert start <= end
        said.append(whole)
        over.set()
    files.read(chunks, part, into, done)
    assert over.wait(60)
    assert len(said) == 1
    return said[0], as_integers(into).reshape(len(chunks), tokens, width)


def holds(files, prefixes, states) -> bool:
    """Whether all of it is found and reads back, bit by bit."""
    chunks = found(files, prefixes)
    return None not in chunks and all(
        whole == len(chunks) and all((one == state[part]).all() for one, state in zip(into, states, strict=True))
        for part in range(files.shape[0]) for whole, into in [read(files, chunks, part)])


def names(*directories) -> list[str]:
    return sorted(path.name for directory in directories for path in directory.iterdir())


DIRECTORIES = [("a",), ("a", "b"), ("a", "b", "c")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("directories", DIRECTORIES, ids=len)
def test_what_is_written_is_found_and_read_bit_by_bit(keep, tmp_path, layout, dtype, directories):
    files = keep(*directories, dtype=dtype, layout=layout)
    prefixes, states = chain(7), [contents(number, dtype=dtype) for number in range(7)]
    assert found(files, prefixes) == [None] * 7
    for number, (prefix, state) in enumerate(zip(prefixes, states)):
        before = state.copy()
        files.write(prefix, number, state)
        assert (state == before).all()
        assert (tmp_path / directories[number % len(directories)] / f"{prefix.key.hex()}.chunk").is_file()
    assert holds(files, prefixes, states) and files.counts["file_errors"] == 0
    assert files.counts["file_writes"] == 7 and files.bytes == files.counts["file_write_bytes"] == sum(
        path.stat().st_size for path in tmp_path.glob("*/*"))
    assert holds(keep(*directories, dtype=dtype, layout=layout), prefixes, states)             # another process would, too


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("later", [("b", "a"), ("b", "c", "a"), ("c", "b", "d", "a"), ("a", "b", "c", "d", "e")])
def test_chunks_are_found_when_the_directories_are_others_or_in_another_order(keep, layout, later):
    now = tuple(name for name in later if name in ("a", "b"))[::-1] or ("a",)
    prefixes, states = written(keep(*now, layout=layout), 6)
    files = keep(*later, layout=layout)
    assert holds(files, prefixes, states) and files.counts["file_errors"] == 0


def test_what_lies_in_a_directory_that_is_gone_is_missed_and_the_rest_is_found(keep):
    prefixes, states = written(keep("a", "b", "c"), 6)
    chunks = found(keep("c", "a"), prefixes)
    assert [chunk is not None for chunk in chunks] == [True, False, True] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_that_ends_early_is_a_miss_even_unchecked(keep, monkeypatch, layout):
    files, preadv = keep("a", "b", layout=layout), os.preadv
    prefixes, _ = written(files, 3)
    chunks, files.verify = found(files, prefixes), False
    assert read(files, chunks, 1)[0] == 3
    cut = os.stat(chunks[2].path).st_ino
    monkeypatch.setattr(store.os, "preadv", lambda file, buffers, at: (
        preadv(file, buffers, at) - (os.fstat(file).st_ino == cut)))
    assert read(files, chunks, 1)[0] == 2 and files.counts["file_errors"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_chunks_of_a_chain_and_any_part_are_read_alone(keep, layout):
    files = keep("a", "b", layout=layout)
    prefixes, states = written(files, 5)
    chunks = found(files, prefixes)
    for first, count, part in itertools.product(range(5), (1, 2, 5), (2, 0, 1)):
        whole, into = read(files, chunks[first:first + count], part)
        assert whole == len(chunks[first:first + count])
        assert all((one == state[part]).all() for one, state in zip(into, states[first:first + count], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_states_in_any_order_of_memory_are_written_as_they_read(keep, layout):
    files, (prefix,), state = keep(layout=layout), chain(1), contents(1)
    strided = numpy.empty((SHAPE[1], SHAPE[0], SHAPE[2]), state.dtype).swapaxes(0, 1)
    strided[:] = state
    assert not strided.flags.c_contiguous
    files.write(prefix, 0, strided)
    assert holds(files, [prefix], [state])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape, pages", [(SHAPE, 1), ((2, 1200, 4), 2), ((1100, 1, 2), 2)])
def test_a_file_is_a_line_of_json_checksums_and_the_parts(keep, tmp_path, layout, shape, pages):
    files = keep(shape=shape, dtype=torch.bfloat16, layout=layout)
    (first, second), state = chain(2, shape[1], salt="salt"), contents(1, shape, torch.bfloat16)
    files.write(second, 1, state)
    data, begin = (tmp_path / "a" / f"{second.key.hex()}.chunk").read_bytes(), pages * 4096
    text = data[:begin - 4 * shape[0]]
    assert json.loads(text) == dict(
        format="chunk 1", key=second.key.hex(), parent=first.key.hex(), shape=list(shape), dtype="bfloat16", layout=layout,
        content="hidden states", tokens=second.tokens)
    assert text.rstrip(b" ").endswith(b"}\n") and text.count(b"\n") == 1
    assert numpy.frombuffer(data[begin - 4 * shape[0]:begin], "<u4").tolist() == [zlib.crc32(part.tobytes()) for part in state]
    assert data[begin:] == (state if layout == "chunked" else state.swapaxes(0, 1)).tobytes()
    assert holds(files, [first, second][1:], [state])


@pytest.mark.parametrize("layout, reads", [("chunked", 1), ("token-major", SHAPE[1])])
def test_a_part_of_a_chunk_is_one_read_or_one_for_each_token(keep, monkeypatch, layout, reads):
    files, calls, preadv = keep("a", "b", layout=layout), [], os.preadv

    def spied(file, buffers, at):
        size = sum(buffer.nbytes for buffer in buffers)
        calls.extend([size] if size > 4 else [])                # else a checksum
        return preadv(file, buffers, at)
    monkeypatch.setattr(store.os, "preadv", spied)
    prefixes, _ = written(files, 3)
    chunks, bytes_of_part = found(files, prefixes), SHAPE[1] * SHAPE[2] * 4
    assert not calls
    for part in range(SHAPE[0]):
        assert read(files, chunks, part)[0] == 3
        assert len(calls) == files.counts["file_reads"] == 3 * reads * (part + 1)
        assert sum(calls) == files.counts["file_read_bytes"] == 3 * bytes_of_part * (part + 1)


PART = SHAPE[1] * SHAPE[2]          # numbers of a part


def one_part(files, chunk, part: int, *progress):
    """`read_one` of it -> whether it is right, and what was read."""
    into = numpy.zeros(SHAPE[1:], "<i4")
    return files.read_one(chunk, part, into, *progress), into


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 8, 127, PART])
@pytest.mark.parametrize("part", range(SHAPE[0]))
def test_a_part_is_read_in_as_many_pieces_as_are_asked_for(keep, part, pieces):
    files, sizes = keep(), []
    prefixes, states = written(files, 2)

    def progress(size):
        sizes.append(size)
        return True
    right, into = one_part(files, files.find(prefixes[1], 1), part, progress, pieces)
    assert right and (into == states[1][part]).all()
    assert len(sizes) == files.counts["file_reads"] == pieces and sum(sizes) == files.counts["file_read_bytes"] == 4 * PART
    assert max(sizes) - min(sizes) <= 4, "they are equal, as far as that goes"
    assert files.counts["file_errors"] == 0


@pytest.mark.parametrize("pieces", [1, 2, 7, 8])
def test_what_has_come_is_in_its_place_when_progress_is_told(keep, pieces):
    files, came = keep(), 0
    prefixes, states = written(files, 1)
    into, expected = numpy.zeros(SHAPE[1:], "<i4"), states[0][1].reshape(-1)

    def progress(size):
        nonlocal came
        came += size // 4
        assert (into.reshape(-1)[:came] == expected[:came]).all() and not into.reshape(-1)[came:].any()
        return True
    assert files.read_one(files.find(prefixes[0], 0), 1, into, progress, pieces) and came == PART


@pytest.mark.parametrize("pieces,stop", [(pieces, stop) for pieces in (1, 2, 8) for stop in range(pieces)])
def test_who_stops_a_read_gets_no_chunk_and_its_file_stays(keep, tmp_path, pieces, stop):
    files, told = keep(), []
    prefixes, states = written(files, 2)

    def progress(size):
        told.append(size)
        return len(told) <= stop
    chunk = files.find(prefixes[1], 1)
    right, into = one_part(files, chunk, 2, progress, pieces)
    read = sum(told) // 4
    assert right is False and len(told) == stop + 1
    assert (into.reshape(-1)[:read] == states[1][2].reshape(-1)[:read]).all() and not into.reshape(-1)[read:].any()
    assert chunk.path.is_file() and files.counts["file_errors"] == files.counts["file_reads"] == 0
    assert holds(files, prefixes, states)


def test_a_read_that_is_stopped_or_fails_leaves_no_file_open(keep):
    files = keep()
    prefixes, _ = written(files, 2)
    chunks = found(files, prefixes)
    os.truncate(chunks[1].path, 5000)
    before = len(os.listdir("/proc/self/fd"))
    for chunk in chunks * 3:
        assert one_part(files, chunk, 2, lambda size: False, 4)[0] is False
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("pieces", [1, 3, 8])
@pytest.mark.parametrize("bad", [0, PART // 2, PART - 1])
def test_however_many_pieces_a_damaged_part_is_refused_and_goes(keep, pieces, bad):
    files = keep()
    prefixes, states = written(files, 1)
    chunk = files.find(prefixes[0], 0)
    with open(chunk.path, "r+b") as file:
        at = chunk.header_bytes + 4 * SHAPE[0] + 4 * (PART + bad)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert one_part(files, chunk, 0, lambda size: True, pieces)[0], "the part before is whole"
    assert not one_part(files, chunk, 1, lambda size: True, pieces)[0]
    assert not chunk.path.exists() and files.counts["file_errors"] == 1


@pytest.mark.parametrize("cut", [1, 4 * PART, 4 * PART + 1, 8 * PART])
def test_a_part_that_ends_in_one_of_its_pieces_is_refused_and_goes(keep, cut):
    files, told = keep(), []
    prefixes, _ = written(files, 1)
    chunk = files.find(prefixes[0], 0)
    os.truncate(chunk.path, chunk.path.stat().st_size - cut)

    def progress(size):
        told.append(size)
        return True
    assert not one_part(files, chunk, 2, progress, 4)[0] and len(told) < 4
    assert not chunk.path.exists() and files.counts["file_errors"] == 1


def test_rows_of_a_token_major_file_tell_progress_too(keep):
    files, told = keep(layout="token-major"), []
    prefixes, states = written(files, 1)

    def progress(size):
        told.append(size)
        return len(told) < 5
    right, into = one_part(files, files.find(prefixes[0], 0), 1, progress)
    assert not right and told == [4 * SHAPE[2]] * 5 and (into[:5] == states[0][1][:5]).all() and holds(files, prefixes, states)


def test_stores_of_other_contents_do_not_find_each_others_chunks(keep, tmp_path):
    """The same prefix, shape and dtype; only what the numbers are differs. Whoever looks in vain takes the place."""
    exact, packed, plain = (keep(name, **options) for name, options in (
        ("a", dict(content="K and V, 32 bit")), ("b", dict(content="K and V, 8 bit")), ("c", {})))
    prefixes, states = written(exact, 3)
    for other in (packed, plain):
        for number, prefix in enumerate(prefixes):
            shutil.copy(exact.paths(prefix, number)[0], other.paths(prefix, number)[0])
        assert found(other, prefixes) == [None] * 3 and other.counts["file_errors"] == 3
        other.write(prefixes[0], 0, states[1])
        assert holds(other, prefixes[:1], states[1:2])
    assert holds(exact, prefixes, states)
    for files, content in ((exact, "K and V, 32 bit"), (packed, "K and V, 8 bit"), (plain, "hidden states")):
        header = files.paths(prefixes[0], 0)[0].read_bytes().splitlines()[0]
        assert json.loads(header)["content"] == files.content == content


def in_place(kind: str, path: Path):
    """Something else lies where the file was."""
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(path.with_suffix(".pipe"))
        path.symlink_to(path.with_suffix(".pipe"))
    else:
        os.mkfifo(path)


ELSE = ["directory", "pipe", "link to a pipe"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("kind", ELSE)
def test_what_is_no_file_is_a_miss_and_nobody_waits_for_it(keep, kind):
    """To open a pipe is to wait until somebody writes to it."""
    files = keep("a", "b")
    prefixes, states = written(files, 3)
    in_place(kind, files.paths(prefixes[1], 1)[0])
    for _ in range(2):
        chunks, = in_threads(lambda: found(files, prefixes))
        assert [chunk is not None for chunk in chunks] == [True, False, True]
    assert files.counts["file_errors"] >= 1
    if kind != "directory":                                     # which goes, and the right one takes its place
        files.write(prefixes[1], 1, states[1])
        assert holds(files, prefixes, states)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.parametrize("kind", ELSE)
def test_what_is_no_file_any_more_when_it_is_read_is_a_miss_and_nobody_waits_for_it(keep, kind, pieces):
    files, told = keep("a"), []
    prefixes, _ = written(files, 2)
    chunk = files.find(prefixes[1], 1)
    in_place(kind, chunk.path)
    (right, _), = in_threads(lambda: one_part(files, chunk, 0, told.append, pieces))
    assert right is False and told == [] and files.counts["file_errors"] == 1
    whole, = in_threads(lambda: read(files, [files.find(prefixes[0], 0), chunk], 0)[0])
    assert whole == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
def test_a_pipe_that_somebody_writes_to_is_no_chunk_either(keep):
    files = keep("a")
    prefixes, _ = written(files, 1)
    path = files.paths(prefixes[0], 0)[0]
    content, chunk = path.read_bytes(), files.find(prefixes[0], 0)
    path.unlink()
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(pipe, content[:4096])
        (right, _), = in_threads(lambda: one_part(files, chunk, 0))
        missed, = in_threads(lambda: files.find(prefixes[0], 0))
    finally:
        os.close(pipe)
    assert right is False and missed is None


def test_directories_are_read_in_parallel(keep, monkeypatch):
    """Each waits until the other two have begun."""
    files, together = keep("a", "b", "c"), threading.Barrier(3)
    prefixes, states = written(files, 3)
    chunks, read_one = found(files, prefixes), files.read_one

    def meet(*arguments):
        together.wait(60)
        return read_one(*arguments)
    monkeypatch.setattr(files, "read_one", meet)
    whole, into = read(files, chunks, 1)
    assert whole == 3 and all((one == state[1]).all() for one, state in zip(into, states))


@contextmanager
def writing(monkeypatch, most: int | None = None, room: float = WIDE, error: int = errno.ENOSPC):
    """Files that are written take at most `most` bytes a call, and `room` in all: then there is an error."""
    class File:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            nonlocal room
            count = int(min(len(data), most or len(data), room))
            room -= count
            if not count:
                raise OSError(error, os.strerror(error))
            return self.file.write(data[:count])

    def opened(path, mode="r", **options):
        if "x" not in mode and "w" not in mode:
            return open(path, mode, **options)
        if room < 0:
            raise OSError(error, os.strerror(error), str(path))
        return File(open(path, mode, **options))
    with monkeypatch.context() as patch:
        patch.setattr(store, "open", opened, raising=False)
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_that_takes_little_at_a_time_is_written_whole(keep, monkeypatch, layout):
    files = keep(layout=layout)
    with writing(monkeypatch, most=1000):
        prefixes, states = written(files, 2)
    assert holds(files, prefixes, states)


def test_a_chunk_appears_only_when_it_is_whole(keep, tmp_path, monkeypatch):
    files, other, (prefix,), seen = keep(), keep(), chain(1), []
    replace = os.replace

    def look(*paths):
        seen.append((names(tmp_path / "a"), other.find(prefix, 0)))
        replace(*paths)
    monkeypatch.setattr(store.os, "replace", look)
    files.write(prefix, 0, contents(1))
    (there,), nothing = seen.pop()
    assert nothing is None and not seen and there.startswith(f"{prefix.key.hex()}.chunk.") and there.endswith(".tmp")
    assert names(tmp_path / "a") == [f"{prefix.key.hex()}.chunk"] and other.counts["file_errors"] == 0


# 3. Damage -------------------------------------------------------------------------------------------------------

HEADER = 4096
SIZE = HEADER + SHAPE[0] * SHAPE[1] * SHAPE[2] * 4              # of a chunk's file
LENGTHS = [0, 1, 100, HEADER - 13, HEADER - 12, HEADER - 1, HEADER, HEADER + 1, HEADER + 512, SIZE - 512, SIZE - 1, SIZE + 1,
           SIZE + 4096]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_file_of_another_length_is_a_miss_and_goes(keep, layout, length):
    files = keep("a", "b", layout=layout)
    prefixes, states = written(files, 3)
    path = files.paths(prefixes[1], 1)[0]
    os.truncate(path, length)
    assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, True]
    assert files.counts["file_errors"] == 1 and not path.exists()
    files.write(prefixes[1], 1, states[1])
    assert holds(files, prefixes, states) and files.counts["file_errors"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [length for length in LENGTHS if length < SIZE])
def test_a_file_that_is_cut_after_it_was_found_is_a_miss(keep, layout, length):
    files = keep("a", "b", layout=layout)
    prefixes, states = written(files, 3)
    chunks = found(files, prefixes)
    os.truncate(chunks[1].path, length)
    whole, into = read(files, chunks, 2)
    assert whole == 1 and (into[0] == states[0][2]).all()
    assert files.counts["file_errors"] == 1 and not chunks[1].path.exists()


def part_of(at: int, layout: str) -> int | None:
    """The part that a byte of the file belongs to, payload or checksum; None: the header's text."""
    if at < HEADER:
        return (at - (HEADER - 12)) // 4 if at >= HEADER - 12 else None
    return (at - HEADER) // (SHAPE[1] * SHAPE[2] * 4) if layout == "chunked" else (at - HEADER) // (SHAPE[2] * 4) % SHAPE[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(bit=st.integers(0, 7), at=st.one_of(
    st.integers(0, 400), st.integers(400, HEADER - 13), st.integers(HEADER - 12, HEADER - 1), st.integers(HEADER, SIZE - 1)))
@settings(deadline=None, max_examples=150)
def test_no_flipped_bit_is_ever_read(layout, at, bit):
    with tempfile.TemporaryDirectory() as folder:
        files = ChunkFiles([Path(folder)], SHAPE, torch.float32, WIDE, layout)
        (prefix,), (state,) = written(files, 1)
        path, damaged = files.paths(prefix, 0)[0], part_of(at, layout)
        with open(path, "r+b") as file:
            file.seek(at)
            byte, = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))
        chunk = files.find(prefix, 0)
        assert (chunk is None) == (damaged is None)
        if chunk is not None:
            for part in sorted(range(SHAPE[0]), key=lambda part: part == damaged):              # the damaged one last
                assert path.exists() and files.counts["file_errors"] == 0
                into = torch.zeros(SHAPE[1:], dtype=torch.float32)
                assert files.read_one(chunk, part, as_integers(into)) == (part != damaged)
                assert part == damaged or (as_integers(into) == state[part]).all()
        assert files.counts["file_errors"] == 1 and not path.exists() and files.find(prefix, 0) is None
        files.readers.shutdown()


@pytest.mark.parametrize("directories", DIRECTORIES, ids=len)
@pytest.mark.parametrize("damaged", [(0,), (2,), (6,), (3, 4), (1, 5)], ids=str)
def test_chunks_before_the_first_damaged_one_are_right(keep, directories, damaged):
    files = keep(*directories)
    prefixes, states = written(files, 7)
    chunks = found(files, prefixes)
    for number in damaged:
        with open(chunks[number].path, "r+b") as file:
            file.seek(HEADER + SHAPE[1] * SHAPE[2] * 4)
            file.write(b"damaged")
    whole, into = read(files, chunks, 0)
    assert whole == 7
    whole, into = read(files, chunks, 1)
    assert whole == damaged[0] and all((one == state[1]).all() for one, state in zip(into[:whole], states))
    assert not chunks[damaged[0]].path.exists() and 1 <= files.counts["file_errors"] <= len(damaged)
    assert all(chunk.path.exists() for number, chunk in enumerate(chunks) if number not in damaged)


def bytes_of(files, prefixes, number):
    return files.paths(prefixes[number], number)[0].read_bytes()


FOREIGN = {
    "noise": lambda files, prefixes: random.Random(0).randbytes(SIZE),
    "zeros": lambda files, prefixes: bytes(SIZE),
    "text": lambda files, prefixes: b"remember the milk\n",
    "another chunk": lambda files, prefixes: bytes_of(files, prefixes, 0),
    "JSON of something else": lambda files, prefixes: json.dumps({"format": "chunk 1"}).encode().ljust(SIZE),
    "another version": lambda files, prefixes: bytes_of(files, prefixes, 1).replace(b"chunk 1", b"chunk 2", 1),
    "other tokens": lambda files, prefixes: bytes_of(files, prefixes, 1).replace(b"tokens\": [", b"tokens\": [9", 1),
    "another parent": lambda files, prefixes: bytes_of(files, prefixes, 1).replace(
        prefixes[0].key.hex().encode(), prefixes[2].key.hex().encode(), 1),
}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_a_foreign_file_of_the_right_name_is_a_miss_and_goes(keep, foreign):
    files = keep("a", "b")
    prefixes, states = written(files, 3)
    path = files.paths(prefixes[1], 1)[0]
    path.write_bytes(FOREIGN[foreign](files, prefixes))
    assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, True]
    assert files.counts["file_errors"] == 1 and not path.exists()
    files.write(prefixes[1], 1, states[1])
    assert holds(files, prefixes, states)


def test_a_file_that_was_given_another_chunks_name_is_a_miss(keep):
    files = keep("a", "b")
    prefixes, states = written(files, 4)
    files.paths(prefixes[0], 0)[0].rename(files.paths(prefixes[2], 2)[0])
    assert [chunk is not None for chunk in found(files, prefixes)] == [False, True, False, True]
    assert files.counts["file_errors"] == 1


def test_a_damaged_file_hides_no_whole_one_in_another_directory(keep):
    files = keep("a", "b")
    prefixes, states = written(files, 2)
    good = files.paths(prefixes[1], 1)[1]
    shutil.copy(files.paths(prefixes[1], 1)[0], good)
    os.truncate(files.paths(prefixes[1], 1)[0], 5)
    assert files.find(prefixes[1], 1).path == good
    assert holds(files, prefixes, states) and files.counts["file_errors"] == 1


def test_a_directory_in_the_place_of_a_file_is_a_miss_every_time(keep):
    files = keep("a", "b")
    prefixes, states = written(files, 3)
    path = files.paths(prefixes[1], 1)[0]
    path.unlink()
    path.mkdir()
    for errors in (1, 2):
        assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, True]
        assert files.counts["file_errors"] == errors
    with pytest.raises(OSError):
        files.write(prefixes[1], 1, states[1])
    assert names(path.parent) == [path.name]


def test_a_file_that_becomes_a_directory_after_it_was_found_is_a_miss(keep):
    files = keep("a")
    prefixes, states = written(files, 3)
    chunks = found(files, prefixes)
    chunks[1].path.unlink()
    chunks[1].path.mkdir()
    assert read(files, chunks, 0)[0] == 1 and files.counts["file_errors"] == 1


@pytest.mark.parametrize("gone", [0, 1, 4])
def test_a_file_that_goes_after_it_was_found_is_a_miss(keep, gone):
    files = keep("a", "b")
    prefixes, states = written(files, 5)
    chunks = found(files, prefixes)
    chunks[gone].path.unlink()
    whole, into = read(files, chunks, 2)
    assert whole == gone and all((one == state[2]).all() for one, state in zip(into[:whole], states))
    assert files.counts["file_errors"] == 1
    assert [chunk is not None for chunk in found(files, prefixes)] == [number != gone for number in range(5)]


def test_a_directory_that_goes_takes_its_chunks_with_it(keep, tmp_path):
    files = keep("a", "b")
    prefixes, states = written(files, 4)
    chunks = found(files, prefixes)
    shutil.rmtree(tmp_path / "b")
    assert read(files, chunks, 0)[0] == 1
    assert [chunk is not None for chunk in found(files, prefixes)] == [True, False] * 2
    with pytest.raises(OSError):
        files.write(prefixes[1], 1, states[1])
    files.touch(prefixes[3], 3)
    files.write(prefixes[2], 2, states[2])
    (tmp_path / "b").mkdir()
    files.write(prefixes[1], 1, states[1])
    files.write(prefixes[3], 3, states[3])
    assert holds(files, prefixes, states)


def test_a_file_that_may_not_be_read_is_a_miss(keep, monkeypatch):
    """Whoever runs this may read everything, so the refusal is injected."""
    files = keep("a", "b")
    prefixes, states = written(files, 3)
    path = files.paths(prefixes[1], 1)[0]

    def refused(name, *arguments, **options):
        if Path(name) == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(name))
        return open(name, *arguments, **options)
    with monkeypatch.context() as patch:
        patch.setattr(store, "open", refused, raising=False)
        assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, True]
    assert files.counts["file_errors"] == 1 and path.exists()
    assert holds(files, prefixes, states)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_permissions_that_are_taken_away_are_misses_and_errors(keep, tmp_path):
    files = keep("a")
    prefixes, states = written(files, 3)
    files.paths(prefixes[1], 1)[0].chmod(0)
    assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, True] and files.counts["file_errors"] == 1
    (tmp_path / "a").chmod(0o500)
    try:
        with pytest.raises(OSError):
            files.write(prefixes[1], 1, states[1])
    finally:
        (tmp_path / "a").chmod(0o700)


@pytest.mark.parametrize("where", ["a file", "below a file", "below what cannot be made"])
def test_a_place_that_is_no_directory_is_refused_at_the_start_and_disk_is_named(keep, tmp_path, where):
    (tmp_path / "file").write_text("remember the milk")
    name = {"a file": "file", "below a file": "file/chunks", "below what cannot be made": "/proc/chunks"}[where]
    with pytest.raises(ModelError, match="--disk") as refused:
        keep("a", name)
    assert str(tmp_path / name) in str(refused.value) and (tmp_path / "file").read_text() == "remember the milk"


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(keep, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")
    monkeypatch.setattr(store.tempfile, "TemporaryFile", refuse)
    with pytest.raises(ModelError, match="Read-only file system.*--disk"):
        keep("a")


# 4. A full disk --------------------------------------------------------------------------------------------------

FAILURES = {"at the beginning": dict(room=0), "in the header": dict(room=100), "after the header": dict(room=HEADER),
            "in a part": dict(room=HEADER + 700), "at the last byte": dict(room=SIZE - 1),
            "when it is opened": dict(room=-1, error=errno.EROFS), "in the device": dict(room=3000, error=errno.EIO)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_chunk_that_cannot_be_written_leaves_nothing_behind(keep, tmp_path, monkeypatch, layout, failure):
    files = keep(layout=layout)
    prefixes, states = written(files, 2)
    before, size = names(tmp_path / "a"), files.bytes
    (prefix,) = chain(1, seed=5)
    with writing(monkeypatch, **FAILURES[failure]), pytest.raises(OSError):
        files.write(prefix, 2, states[0])
    assert names(tmp_path / "a") == before and files.bytes == size and files.counts["file_writes"] == 2
    files.write(prefix, 2, states[0])
    assert holds(files, prefixes, states) and files.find(prefix, 2)


def test_a_chunk_that_cannot_be_given_its_name_leaves_nothing_behind(keep, tmp_path, monkeypatch):
    files, (prefix,) = keep(), chain(1)

    def refuse(*_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    with monkeypatch.context() as patch:
        patch.setattr(store.os, "replace", refuse)
        with pytest.raises(OSError, match="quota"):
            files.write(prefix, 0, contents(0))
    assert names(tmp_path / "a") == [] and files.bytes == 0 and files.find(prefix, 0) is None


# 5. The limit ----------------------------------------------------------------------------------------------------

def on_disk(*directories) -> int:
    return sum(path.stat().st_size for directory in directories for path in directory.iterdir())


def age(files, prefixes, order):
    """Number order[0] was used longest ago."""
    for seconds, number in enumerate(order):
        os.utime(files.paths(prefixes[number], number)[0], (1e9 + seconds, 1e9 + seconds))


@pytest.mark.parametrize("directories", DIRECTORIES, ids=len)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_beyond_the_limit_the_least_recently_used_go_until_a_tenth_is_free(keep, tmp_path, directories, seed):
    files, order = keep(*directories, limit=10 * SIZE), random.Random(seed).sample(range(10), 10)
    prefixes, states = written(files, 10)
    assert files.counts["file_evictions"] == 0 and files.bytes == 10 * SIZE                    # as many as fit
    age(files, prefixes, order)
    (prefix,) = chain(1, seed=5)
    files.write(prefix, 0, states[0])
    assert {number for number, chunk in enumerate(found(files, prefixes)) if chunk is None} == set(order[:2])
    assert files.find(prefix, 0) and files.counts["file_evictions"] == 2 and files.counts["file_errors"] == 0
    assert files.bytes == on_disk(*files.directories) == 9 * SIZE


def test_the_end_of_a_chain_goes_before_its_beginning(keep, monkeypatch):
    files = keep("a", "b", limit=10 * SIZE)
    prefixes, states = written(files, 6)
    others, _ = written(files, 4, seed=1)
    for now, one in ((2 * 10 ** 18, others), (3 * 10 ** 18, prefixes)):
        with monkeypatch.context() as patch:
            patch.setattr(store.time, "time_ns", lambda now=now: now)
            files.touch(one[-1], len(one) - 1)
    kept = []
    for number, prefix in enumerate(chain(6, seed=2)):
        files.write(prefix, number, states[0])
        os.utime(files.paths(prefix, number)[0], (4e9, 4e9))                   # the newest, whatever the clock of the disk says
        kept.append([[chunk is not None for chunk in found(files, one)] for one in (others, prefixes)])
    for of_others, of_prefixes in kept:
        assert of_others == sorted(of_others, reverse=True) and of_prefixes == sorted(of_prefixes, reverse=True)
        assert of_prefixes == [True] * 6 or not any(of_others)
    assert kept[0][0] == [True, True, False, False] and kept[-1] == [[False] * 4, [True] * 4 + [False] * 2]


@given(seed=st.integers(0, 1 << 32), limit=st.floats(1.001, 8))
@settings(deadline=None, max_examples=25)
def test_whatever_is_written_and_used_the_limit_holds(seed, limit):
    rng, prefixes = random.Random(seed), chain(12)
    with tempfile.TemporaryDirectory() as folder:
        files = ChunkFiles([Path(folder, "a"), Path(folder, "b")], SHAPE, torch.float32, limit * SIZE)
        for _ in range(40):
            number = rng.randrange(12)
            if rng.random() < 0.6:
                files.write(prefixes[number], number, contents(number))
            elif chunk := files.find(prefixes[number], number):
                files.touch(prefixes[number], number)
                if rng.random() < 0.3:
                    chunk.path.unlink()
            assert on_disk(*files.directories) <= files.limit and on_disk(*files.directories) <= files.bytes
        there = [number for number, chunk in enumerate(found(files, prefixes)) if chunk]
        assert all(read(files, [files.find(prefixes[number], number)], 1)[0] == 1 for number in there)
        assert len(there) == on_disk(*files.directories) // SIZE and files.counts["file_errors"] == 0
        files.readers.shutdown()


@pytest.mark.parametrize("limit", [1, SIZE - 1])
def test_a_limit_below_one_chunk_is_refused(keep, limit):
    with pytest.raises(ModelError, match="A chunk takes .* choose a larger --disk-limit"):
        keep(limit=limit)


@pytest.mark.parametrize("limit, kept", [(SIZE, 1), (1.05 * SIZE, 1), (2 * SIZE, 2), (2.3 * SIZE, 2)])
def test_a_limit_around_one_chunk_keeps_what_fits(keep, tmp_path, limit, kept):
    files, state = keep(limit=limit), contents(0)
    for number, prefix in enumerate(chain(4)):
        files.write(prefix, number, state)
        assert files.find(prefix, number)
    assert len(list((tmp_path / "a").iterdir())) == kept


def test_what_others_wrote_before_is_counted(keep, tmp_path):
    prefixes, states = written(keep("a", "b"), 6)
    (tmp_path / "a" / "notes.txt").write_text("remember the milk")
    files = keep("a", "b", limit=6 * SIZE)
    assert files.bytes == 6 * SIZE
    age(files, prefixes, range(6))
    (prefix,) = chain(1, seed=5)
    files.write(prefix, 0, states[0])
    assert [chunk is not None for chunk in found(files, prefixes)] == [False] * 2 + [True] * 4 and files.find(prefix, 0)
    assert (tmp_path / "a" / "notes.txt").read_text() == "remember the milk"


def test_what_others_write_meanwhile_is_counted_when_room_is_made(keep):
    files, other = keep("a", limit=6 * SIZE), keep("a")
    prefixes, states = written(other, 8)
    age(files, prefixes, range(8))
    for number, prefix in enumerate(chain(7, seed=5)):
        files.write(prefix, number, states[0])
    assert on_disk(*files.directories) <= 6 * SIZE and found(files, prefixes) == [None] * 8


def test_several_who_write_at_once_pass_the_limit_by_a_twentieth_each(keep, tmp_path):
    several = [keep(limit=40 * SIZE) for _ in range(3)]
    for number, prefixes in enumerate(zip(*(chain(60, seed=seed) for seed in range(3)))):
        for files, prefix in zip(several, prefixes):
            files.write(prefix, number, contents(0))
        assert on_disk(tmp_path / "a") <= (40 + 3 * (40 / 20 + 1)) * SIZE
    assert on_disk(tmp_path / "a") >= 30 * SIZE


def test_what_is_there_is_not_written_again(keep):
    files, other = keep("a", "b"), keep("b", "a")
    prefixes, states = written(files, 3)
    before = [chunk.path.stat() for chunk in found(files, prefixes)]
    for one in (files, other):
        written(one, 3)
    assert [chunk.path.stat() for chunk in found(files, prefixes)] == before
    assert files.counts["file_writes"] == 3 and other.counts["file_writes"] == 0 and files.bytes == 3 * SIZE


def test_what_another_process_evicts_meanwhile_is_no_error(keep, monkeypatch):
    files = keep("a", limit=4 * SIZE)
    prefixes, states = written(files, 4)
    age(files, prefixes, range(4))
    oldest, scan = files.paths(prefixes[0], 0)[0], files.scan

    def look_and_lose():
        listed = list(scan())
        oldest.unlink(missing_ok=True)
        return listed
    monkeypatch.setattr(files, "scan", look_and_lose)
    (prefix,) = chain(1, seed=5)
    files.write(prefix, 0, states[0])
    assert [chunk is not None for chunk in found(files, prefixes)] == [False, False, True, True] and files.find(prefix, 0)
    assert files.counts["file_errors"] == 0 and files.bytes == on_disk(*files.directories) == 3 * SIZE


def test_a_file_that_cannot_be_deleted_stays_and_the_next_ones_go(keep, monkeypatch):
    files = keep("a", limit=4 * SIZE)
    prefixes, states = written(files, 4)
    age(files, prefixes, range(4))
    oldest, unlink = files.paths(prefixes[0], 0)[0], Path.unlink

    def refuse(path, *arguments, **options):
        if path == oldest:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        unlink(path, *arguments, **options)
    monkeypatch.setattr(Path, "unlink", refuse)
    (prefix,) = chain(1, seed=5)
    files.write(prefix, 0, states[0])
    assert [chunk is not None for chunk in found(files, prefixes)] == [True, False, False, True] and files.find(prefix, 0)
    assert (files.counts["file_errors"], files.counts["file_evictions"], files.bytes) == (1, 2, 3 * SIZE)


# 6. Processes ----------------------------------------------------------------------------------------------------

def test_temporary_files_that_nobody_writes_go_at_the_next_start_and_others_stay(keep, tmp_path):
    (prefix,), (state,) = written(keep(), 1)
    name, now = f"{prefix.key.hex()}.chunk", time.time()
    ages = {f"{name}.a.tmp": ChunkFiles.ABANDONED + 60, f"{name}.b.tmp": ChunkFiles.ABANDONED - 60, f"{name}.c.tmp": 0,
            "notes.tmp": 1e6, "notes.txt": 1e6}
    for other, seconds in ages.items():
        (tmp_path / "a" / other).write_text("remember the milk")
        os.utime(tmp_path / "a" / other, (now - seconds, now - seconds))
    files = keep()
    assert names(tmp_path / "a") == sorted([name, *list(ages)[1:]])
    assert files.bytes == SIZE and holds(files, [prefix], [state])


HELPER = """
import json, os, random, signal, sys, threading, traceback
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch

from legacy.link import as_integers
from legacy.store import ChunkFiles

given = json.loads(Path(sys.argv[2]).read_text())
directories, states = [Path(name) for name in given["directories"]], numpy.load(given["states"])
prefixes = [(SimpleNamespace(key=bytes.fromhex(key), parent=SimpleNamespace(key=bytes.fromhex(parent)), tokens=tokens), index)
            for key, parent, tokens, index in given["prefixes"]]


def open_files(limit=1e12):
    return ChunkFiles(directories, states.shape[1:], torch.float32, limit)


def same(files, chunk, number, part):
    # -> whether the part could be read; what is read is what was written
    into = torch.zeros(states.shape[2:])
    whole = files.read_one(chunk, part, as_integers(into))
    assert not whole or (as_integers(into) == states[number, part]).all()
    return whole


def write_for_ever(files, seed):
    rng = random.Random(seed)
    while True:
        number = rng.randrange(len(prefixes))
        files.paths(*prefixes[number])[0].unlink(missing_ok=True)              # as if another process had evicted it
        files.write(*prefixes[number], states[number])


def write_and_read(files, seed, done):
    rng = random.Random(seed)
    for _ in range(given["moves"]):
        number = rng.randrange(len(prefixes))
        if rng.random() < 0.4:
            files.write(*prefixes[number], states[number])
        elif chunk := files.find(*prefixes[number]):
            files.touch(prefixes[number][0], 0)
            done.append(same(files, chunk, number, rng.randrange(states.shape[1])))


def in_child(work):
    if child := os.fork():
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(3)


def threads(*calls):
    # an exception in one ends the process
    def call(one):
        try:
            one()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
    running = [threading.Thread(target=call, args=(one,)) for one in calls]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def temporaries():
    return {path for directory in directories for path in directory.glob("*.chunk.*.tmp")}


def kill():
    rng, left, kept = random.Random(1), 0, []
    live = temporaries()
    for number in range(50):
        def work():
            files = open_files(1e12 if number % 2 else given["limit"])
            threads(*(lambda seed=seed: write_for_ever(files, f"{number} {seed}") for seed in range(2)))
        child, seen, enough = in_child(work), set(), rng.randint(1, 25)
        while len(seen) < enough:
            seen |= temporaries() - live
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended by itself"
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        dead = temporaries() - live
        left += bool(dead)
        for path in dead:
            os.utime(path, (0, 0))                                             # long ago
        files = open_files()
        assert temporaries() == live
        there = [(number, chunk) for number, prefix in enumerate(prefixes) if (chunk := files.find(*prefix))]
        assert len(there) == sum(len(list(directory.glob("*.chunk"))) for directory in directories)
        assert all(same(files, chunk, number, part) for number, chunk in there for part in range(states.shape[1]))
        assert files.counts["file_errors"] == 0, files.counts
        kept.append(len(there))
    print(json.dumps(dict(left=left, kept=kept)))


def pair():
    limits = given["limit"], 1e12
    opened = [open_files(limit) for limit in limits]

    def work(seed):
        files, limit, done = opened[seed], limits[seed], []
        files.reject = lambda path: threads(lambda: 1 / 0)                     # nothing that is there is ever damaged
        threads(*(lambda thread=thread: write_and_read(files, f"{seed} {thread}", done) for thread in range(2)))
        assert sum(done) > 50, "little could be read"
        assert (files.counts["file_evictions"] > 0) == (limit < 1e12)
    children = [in_child(lambda: work(0)), in_child(lambda: work(1))]
    ended = [os.waitpid(child, 0)[1] for child in children]
    assert ended == [0, 0], ended
    files = open_files()
    there = [(number, chunk) for number, prefix in enumerate(prefixes) if (chunk := files.find(*prefix))]
    assert there and all(same(files, chunk, number, part) for number, chunk in there for part in range(states.shape[1]))
    assert files.counts["file_errors"] == 0 and not [path for directory in directories for path in directory.glob("*.tmp")]
    print(json.dumps(dict(kept=len(there))))


globals()[sys.argv[1]]()
"""
LARGE = (3, 64, 64)                # of the chunks below: it takes a while to write one
CHAINS = [chain(3, LARGE[1], seed=seed) for seed in range(3)]


def helped(what: str, folder: Path, directories, **more) -> tuple[list, dict]:
    """Run the helper on these directories, with the chunks of CHAINS -> [(prefix, index, states)], and what it prints."""
    chunks = [(prefix, index, contents(3 * number + index, LARGE)) for number, prefixes in enumerate(CHAINS)
              for index, prefix in enumerate(prefixes)]
    numpy.save(folder / "states.npy", numpy.array([states for *_, states in chunks]))
    (folder / "given.json").write_text(json.dumps(dict(
        directories=list(map(str, directories)), states=str(folder / "states.npy"),
        prefixes=[(prefix.key.hex(), prefix.parent.key.hex(), prefix.tokens, index) for prefix, index, _ in chunks], **more)))
    ran = subprocess.run([sys.executable, "-c", HELPER, what, str(folder / "given.json")], cwd=ROOT, capture_output=True,
                         text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ran.returncode == 0, ran.stderr
    return chunks, json.loads(ran.stdout)


def right_or_missed(files, chunks) -> int:
    """How many are there; each of those reads back, bit by bit."""
    there = [(files.find(prefix, index), states) for prefix, index, states in chunks]
    for stored, states in there:
        for part in range(LARGE[0]) if stored else ():
            whole, into = read(files, [stored], part)
            assert whole == 1 and (into[0] == states[part]).all()
    assert files.counts["file_errors"] == 0
    return sum(stored is not None for stored, _ in there)


@pytest.fixture
def crashed(tmp_path):
    directories = [tmp_path / "b", tmp_path / "c"]
    for directory in directories:
        directory.mkdir()
    return directories


LARGE_FILE = HEADER + math.prod(LARGE) * 4


def test_fifty_kills_leave_only_whole_chunks(keep, tmp_path, crashed):
    for directory in crashed:
        (directory / f"{CHAINS[0][0].key.hex()}.chunk.1.tmp").write_text("somebody who lives is writing")
    chunks, told = helped("kill", tmp_path, crashed, limit=6 * LARGE_FILE)
    assert told["left"] >= 5 and len(told["kept"]) == 50 and min(told["kept"]) >= 1, told      # some were killed while writing
    files = keep("b", "c", shape=LARGE)
    assert right_or_missed(files, chunks) == told["kept"][-1]
    for prefix, index, states in chunks:
        files.write(prefix, index, states)
    assert right_or_missed(files, chunks) == 9


def test_two_processes_share_directories_and_read_only_what_is_whole(keep, tmp_path, crashed):
    chunks, told = helped("pair", tmp_path, crashed, limit=4.5 * LARGE_FILE, moves=400)
    assert right_or_missed(keep("b", "c", shape=LARGE), chunks) == told["kept"] >= 1
