import json
import math
import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfexp.errors import CorruptShardError, StorageError
from dfexp.jsonl import (
    AppendLog,
    decode_line,
    encode_line,
    make_folder,
    read_json,
    read_log,
    repair,
    repair_text,
    write_atomic,
    write_json,
)
from tests.shards.os_tap import REAL, DieAt, RefuseAt, tapped
from tests.shards.power import Recorder

any_text = st.text(st.characters(exclude_categories=()))
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)
SEPARATORS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029\0"


@given(any_text)
def test_repaired_text_keeps_all_but_lone_surrogates(text):
    joined = re.sub(
        "[\ud800-\udbff][\udc00-\udfff]",
        lambda pair: chr(0x10000 + ((ord(pair[0][0]) - 0xD800) << 10) + ord(pair[0][1]) - 0xDC00),
        text,
    )
    expected = re.sub("[\ud800-\udfff]", "\ufffd", joined)
    assert repair_text(text) == (expected, expected != text)


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("\ud83d\ude00", "\U0001f600"),
        ("\ud83dx", "\ufffdx"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        ("x\ud83d", "x\ufffd"),
    ],
)
def test_surrogates(text, repaired):
    assert repair_text(text) == (repaired, True)


def test_repair_reaches_keys_and_nested_texts_and_leaves_sound_values_alone():
    sound = {"a": ({"b": ["c", 1, None]},)}
    assert repair(sound) == (sound, False)
    assert repair(sound)[0] is sound
    assert repair({"a": ({"\ud800": [1, "\udc00"]},)}) == ({"a": [{"\ufffd": [1, "\ufffd"]}]}, True)


@settings(deadline=None)
@given(st.dictionaries(any_text, any_json, max_size=4))
def test_a_record_is_one_ascii_line_and_comes_back(record):
    line = encode_line(record)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert line.decode().splitlines() == [line.decode()[:-1]]
    assert b"\0" not in line
    assert decode_line(line) == repair(record)[0]
    assert json.dumps(decode_line(line), ensure_ascii=False).encode()  # no lone surrogate is left


def test_nothing_that_splits_lines_tears_a_record(tmp_path):
    record = {"text": f"a{SEPARATORS}b"}
    with AppendLog(tmp_path / "log") as log:
        log.append([record, record])
    assert list(read_log(tmp_path / "log")) == [record, record]


@pytest.mark.parametrize("value", [math.nan, math.inf, object(), {1, 2}, b"x"])
def test_what_json_cannot_hold_is_refused(tmp_path, value):
    with pytest.raises((ValueError, TypeError), match=r"JSON|Out of range"):
        encode_line({"a": value})
    with pytest.raises((ValueError, TypeError), match=r"JSON|Out of range"):
        write_json(tmp_path / "x", {"a": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", [b"[]", b"1", b"", b"{", b"{} {}", b"\xff", b"null"])
def test_a_line_that_is_no_object_is_refused(tmp_path, line):
    with pytest.raises(ValueError, match=r"JSON object|Expecting|Extra data|decode"):
        decode_line(line)
    (tmp_path / "x").write_bytes(line)
    with pytest.raises(CorruptShardError, match="x is not a JSON object"):
        read_json(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(CorruptShardError, match="x:2 is not a record"):
        list(read_log(tmp_path / "x"))


def test_a_missing_file_has_no_lines(tmp_path):
    assert list(read_log(tmp_path / "none")) == []
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), max_size=6),
    cut=st.floats(0, 1),
    tail=st.sampled_from([b"", b"\0", b"\0" * 5000, b'{"n":', b"\0\n{}\n"]),
)
def test_a_log_cut_at_any_byte_keeps_its_whole_lines(tmp_path_factory, sizes, cut, tail):
    path = tmp_path_factory.mktemp("log") / "log"
    records = [{"n": number, "text": "x" * size} for number, size in enumerate(sizes)]
    with AppendLog(path) as log:
        log.append(records)
    data = path.read_bytes()[: round(cut * path.stat().st_size)]
    whole = data.count(b"\n")
    path.write_bytes(data + tail)
    assert list(read_log(path)) == records[:whole]
    with AppendLog(path, durable=False) as log:
        assert log.cut_bytes == len(data + tail) - log.size
        log.append([{"n": "new"}])
    assert list(read_log(path)) == [*records[:whole], {"n": "new"}]


def test_a_long_torn_line_and_a_late_nul_are_found_beyond_the_first_block(tmp_path):
    path = tmp_path / "log"
    line = encode_line({"text": "x" * 3_000_000})
    for tail in (line[:-1], b"\0" * 2_500_000, line[:-1] + b"\0"):
        path.write_bytes(line + tail)
        with AppendLog(path) as log:
            assert (log.size, log.cut_bytes) == (len(line), len(tail))
    path.write_bytes(line[:-1])
    with AppendLog(path) as log:
        assert (log.size, log.cut_bytes) == (0, len(line) - 1)


def test_of_a_long_log_that_may_lose_lines_only_the_end_is_read(tmp_path):
    path, line = tmp_path / "log", encode_line({"text": "x" * 100})
    path.write_bytes(line * 200_000 + line[:50])
    before = bytes_read()
    with AppendLog(path, durable=False) as log:
        assert (log.size, log.cut_bytes) == (len(line) * 200_000, 50)
        log.append([{"n": 1}])
    assert bytes_read() - before < 2 * 2**20
    assert path.read_bytes() == line * 200_000 + b'{"n":1}\n'


def bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_refused_append_takes_everything_back_and_can_be_tried_again(tmp_path):
    path = tmp_path / "log"
    with AppendLog(path) as log:
        log.append([{"n": 0}])
        for refused in ("write", "fsync"):
            with tapped(RefuseAt(1), (refused,)), pytest.raises(StorageError, match=r"cannot append to \S+log: "):
                log.append([{"n": 1}, {"n": 2}])
            assert path.read_bytes() == encode_line({"n": 0})
        log.append([{"n": 1}])
    assert list(read_log(path)) == [{"n": 0}, {"n": 1}]


def test_what_a_disk_would_not_take_back_is_cut_before_the_next_append(tmp_path):
    path = tmp_path / "log"
    with AppendLog(path) as log:
        log.append([{"n": 0}])
        with tapped(RefuseAt(1, times=2), ("write", "ftruncate")), pytest.raises(StorageError):
            log.append([{"n": 1}])
        assert path.read_bytes() != encode_line({"n": 0})
        log.append([{"n": 2}])
    assert list(read_log(path)) == [{"n": 0}, {"n": 2}]


def test_an_append_that_is_interrupted_takes_everything_back(tmp_path):
    def interrupt(name, args, kwargs):
        REAL[name](*args, **kwargs)
        raise KeyboardInterrupt

    with AppendLog(tmp_path / "log") as log:
        with tapped(interrupt, ("write",)), pytest.raises(KeyboardInterrupt):
            log.append([{"n": 1}])
        log.append([{"n": 2}])
    assert list(read_log(tmp_path / "log")) == [{"n": 2}]


def test_a_log_that_somebody_shortens_is_noticed(tmp_path):
    with AppendLog(tmp_path / "log") as log:
        log.append([{"n": 0}])
        os.truncate(tmp_path / "log", 0)
        with pytest.raises(CorruptShardError, match="was shortened from 8 to 0 bytes"):
            log.append([{"n": 1}])


def test_a_log_that_somebody_removes_is_noticed(tmp_path):
    with AppendLog(tmp_path / "log") as log:
        (tmp_path / "log").unlink()
        with pytest.raises(CorruptShardError, match="log was removed while in use"):
            log.append([{"n": 1}])


def test_a_log_in_no_folder_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"cannot open \S+missing/log: No such file"):
        AppendLog(tmp_path / "missing" / "log")


def test_a_replaced_file_is_old_or_new_wherever_the_writer_dies(tmp_path):
    path, nth, code, seen = tmp_path / "file", 0, 9, []
    while code == 9:
        nth += 1
        path.write_bytes(b"old")
        child = os.fork()
        if child == 0:
            try:
                with tapped(DieAt(nth, halfway=False)):
                    write_atomic(path, b"new bytes")
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        seen.append(path.read_bytes())
    assert code == 0
    assert set(seen) == {b"old", b"new bytes"}
    assert seen == sorted(seen, reverse=True)  # once new, never old again


def test_a_replaced_file_is_old_or_new_after_a_loss_of_power(tmp_path):
    path, recorder = tmp_path / "file", Recorder(tmp_path)
    with tapped(recorder, recorder.names):
        write_atomic(path, b"old")
        begun = len(recorder.log)
        write_atomic(path, b"new bytes")
    for length in range(begun, len(recorder.log)):
        assert {contents["file"] for contents in recorder.crash_states(length)} <= {b"old", b"new bytes"}
    assert {contents["file"] for contents in recorder.crash_states(len(recorder.log))} == {b"new bytes"}


def test_the_names_of_new_folders_are_flushed(tmp_path):
    """Each folder that got one, after it did; and that of one which a killed process may have left unflushed."""
    waiting, flushed = set(), set()

    def tap(name, args, kwargs):
        result = REAL[name](*args, **kwargs)
        if name == "mkdir":
            waiting.add(Path(args[0]).parent)
        else:
            folder = Path(os.readlink(f"/proc/self/fd/{args[0]}"))
            waiting.discard(folder)
            flushed.add(folder)
        return result

    with tapped(tap, ("mkdir", "fsync")):
        make_folder(tmp_path / "a" / "b" / "c")
        assert waiting == set()
        assert flushed == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
        flushed.clear()
        make_folder(tmp_path / "a" / "b" / "c")
    assert flushed == {tmp_path / "a" / "b"}


def test_a_refused_replacement_leaves_the_old_file_and_nothing_else(tmp_path):
    path, nth, refusal = tmp_path / "file", 0, None
    while refusal is None or refusal.refused:
        nth += 1
        path.write_bytes(b"old")
        refusal = RefuseAt(nth)
        with tapped(refusal):
            try:
                write_atomic(path, b"new")
            except StorageError as error:
                message = str(error)
        assert "Input/output error" in message
        assert path.read_bytes() in (b"old", b"new")
        assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"new"


def test_a_replaced_file_has_the_mode_asked_for(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"")
    path.chmod(0o644)
    write_atomic(path, b"secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(any_text, any_json, max_size=3))
def test_a_json_file_comes_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path) == repair(value)[0]


@pytest.mark.parametrize("tail", [b"my notes", b"1", b"[1]", b"my\0notes\n"])
def test_a_file_whose_end_no_crash_explains_is_not_cut(tmp_path, tail):
    path = tmp_path / "log"
    for before in (b"", encode_line({"n": 0})):
        path.write_bytes(before + tail)
        with pytest.raises(CorruptShardError, match=r"log ends with .* Move the file away"):
            AppendLog(path)
        assert path.read_bytes() == before + tail
