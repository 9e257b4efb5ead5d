"""Puts and reads through every fault of a network and a store; the server behind them is a real one."""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dfexp.errors import StoreConflict, StoreError, StoreTaken, StoreUnavailable
from dfexp.store.bucket import Bucket
from tests.store.conftest import Place
from tests.store.proxy import Proxy
from tests.store.server import KEY, SECRET

BODY = b"row\n" * 50_000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(bucket: Bucket, data: bytes = BODY, key: str = "k") -> Any:
    return bucket.put_once(key, data, sha256(data))


@pytest.mark.parametrize(
    "fault",
    ["slow_down", "internal", "timeout", "busy", "false_success", "html", "bad_gateway", "cut", "lost_answer",
     "corrupt", "wrong_checksum", "stall", "failed", "empty", "nothing"],
)  # fmt: skip
def test_a_put_survives(fault: str, place: Place) -> None:
    with Proxy(place.url, lambda method, path, before: fault if method == "PUT" and before < 2 else None) as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url, timeout_s=1), "r")
        found = put(bucket)
        assert put(bucket).is_new is False
    assert place.read("expansion/r/k") == BODY
    assert found.etag == place.s3.head_object(Bucket=place.name, Key="expansion/r/k")["ETag"]


@pytest.mark.parametrize("fault", ["slow_down", "cut", "cut_answer", "html", "wrong_checksum", "bad_gateway"])
def test_a_read_survives(fault: str, place: Place) -> None:
    place.put("expansion/r/k", BODY)
    with Proxy(place.url, lambda method, path, before: fault if method == "GET" and before < 2 else None) as proxy:
        got = Bucket(place.group(endpoint_url=proxy.url, timeout_s=1), "r").get("k")
    assert got is not None
    assert got.data == BODY


def test_without_a_limit_it_waits_for_as_long_as_it_takes(place: Place) -> None:
    stopped, told = threading.Event(), list[StoreError | None]()
    with Proxy(place.url, lambda method, path, before: "slow_down") as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r", limit_s=None, stopped=stopped, told=told.append)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(put, bucket)
            while proxy.seen["PUT", f"/{place.name}/expansion/r/k"] < 4:
                assert not waiting.done()
                time.sleep(0.01)
            proxy.rule = lambda method, path, before: None
            assert waiting.result().is_new
    assert told[-1] is None
    assert all(isinstance(error, StoreUnavailable) for error in told[:-1])


def test_with_a_limit_it_gives_up_and_says_what_was_answered(place: Place) -> None:
    with Proxy(place.url, lambda method, path, before: "slow_down") as proxy:
        with pytest.raises(StoreUnavailable, match=r"SlowDown \(HTTP 503\)") as raised:
            put(Bucket(place.group(endpoint_url=proxy.url), "r", limit_s=0.5))
        assert place.name in str(raised.value)


def test_twenty_foreign_objects_stay_as_they_are(place: Place) -> None:
    foreign = {f"completions/completions_{number:06d}.jsonl": f"foreign {number}".encode() for number in range(20)}
    for key, data in foreign.items():
        place.put(f"expansion/r/{key}", data)
    bucket, errors = Bucket(place.group(), "r"), list[str]()
    for key in foreign:
        with pytest.raises(StoreConflict) as raised:
            put(bucket, key=key)
        errors.append(str(raised.value))
    for error, (key, data) in zip(errors, foreign.items(), strict=True):
        assert [text in error for text in (place.name, key, sha256(data), sha256(BODY))] == [True] * 4
        assert place.read(f"expansion/r/{key}") == data
    assert len(set(errors)) == 20


def test_of_sixteen_at_once_one_writes_and_the_same_content_is_success_for_all(place: Place) -> None:
    bucket = Bucket(place.group(concurrency=16), "r")
    with ThreadPoolExecutor(16) as pool:
        same = list(pool.map(lambda _: put(bucket).is_new, range(16)))
        outcomes = list(pool.map(lambda number: _outcome(bucket, f"content {number}".encode()), range(16)))
    assert sum(same) == 1
    assert sorted(outcomes) == ["conflict"] * 15 + ["new"]


def _outcome(bucket: Bucket, data: bytes) -> str:
    try:
        return "new" if put(bucket, data, "other").is_new else "there"
    except StoreConflict:
        return "conflict"


def test_only_ones_own_version_is_replaced(place: Place) -> None:
    bucket = Bucket(place.group(), "r")
    first = bucket.replace("m", b"one", sha256(b"one"), None)
    second = bucket.replace("m", b"two", sha256(b"two"), first)
    with pytest.raises(StoreTaken, match="replaced by another process"):
        bucket.replace("m", b"three", sha256(b"three"), first)
    with pytest.raises(StoreTaken):
        bucket.replace("m", b"three", sha256(b"three"), None)
    assert place.read("expansion/r/m") == b"two"
    assert bucket.replace("m", b"three", sha256(b"three"), second)


def test_a_replacement_whose_answer_was_lost_is_not_taken_for_another_process(place: Place) -> None:
    first = Bucket(place.group(), "r").replace("m", b"one", sha256(b"one"), None)
    with Proxy(
        place.url, lambda method, path, before: "lost_answer" if method == "PUT" and not before else None
    ) as proxy:
        etag = Bucket(place.group(endpoint_url=proxy.url), "r").replace("m", b"two", sha256(b"two"), first)
    assert etag == place.s3.head_object(Bucket=place.name, Key="expansion/r/m")["ETag"]


@pytest.mark.parametrize("fault", ["gone", "failed", "empty", "nothing", "false_success", "html", "cut_answer", "busy"])
def test_a_replacement_survives(fault: str, place: Place) -> None:
    """None of it is another process."""
    first = Bucket(place.group(), "r").replace("m", b"one", sha256(b"one"), None)
    with Proxy(place.url, lambda method, path, before: fault if method == "PUT" and before < 2 else None) as proxy:
        etag = Bucket(place.group(endpoint_url=proxy.url), "r").replace("m", b"two", sha256(b"two"), first)
    assert etag == place.s3.head_object(Bucket=place.name, Key="expansion/r/m")["ETag"]
    assert place.read("expansion/r/m") == b"two"


def test_what_is_gone_is_created_anew_and_told(place: Place) -> None:
    told = list[StoreError | None]()
    bucket = Bucket(place.group(), "r", told=told.append)
    first = bucket.replace("m", b"one", sha256(b"one"), None)
    place.s3.delete_object(Bucket=place.name, Key="expansion/r/m")
    assert bucket.replace("m", b"two", sha256(b"two"), first)
    assert place.read("expansion/r/m") == b"two"
    assert [str(error).rpartition("/")[2] for error in told if error] == ["m is gone; it is put anew"]


def test_a_store_that_implements_nothing_is_told_in_words(place: Place) -> None:
    with Proxy(place.url, lambda *_: "unknown") as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r")
        assert not bucket.probe()
        with pytest.raises(StoreError, match=r"NotImplemented \(HTTP 501\)"):
            put(bucket)


@pytest.mark.parametrize(
    ("fault", "words"),
    [("no_conditions", r"NotImplemented \(HTTP 501\)"), ("redirect", "redirects without an end"),
     ("failed", "answered without replacing it"), ("nothing", "answered without replacing it")],
)  # fmt: skip
def test_an_odd_answer_to_a_replacement_is_told_in_words(fault: str, words: str, place: Place) -> None:
    first = Bucket(place.group(), "r").replace("m", b"one", sha256(b"one"), None)
    hit = ("PUT", "HEAD") if fault == "redirect" else ("PUT",)
    with Proxy(place.url, lambda method, path, before: fault if method in hit else None) as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r", limit_s=10.0 if fault == "redirect" else 0.5)
        with pytest.raises(StoreError, match=words):
            bucket.replace("m", b"two", sha256(b"two"), first)
    assert place.read("expansion/r/m") == b"one"


def test_the_checksum_that_a_put_is_answered_with_is_compared(place: Place) -> None:
    """An answer that repeats another one is no success: the object itself is looked at."""
    with Proxy(place.url, lambda method, path, before: "wrong_checksum" if method == "PUT" else None) as proxy:
        assert not put(Bucket(place.group(endpoint_url=proxy.url), "r")).is_new
        assert proxy.seen["HEAD", f"/{place.name}/expansion/r/k"] >= 1


def test_a_store_with_conditions_is_known_and_nothing_is_left_of_the_probe(place: Place) -> None:
    assert Bucket(place.group(), "r").probe()
    assert place.all_keys() == []


def test_an_old_gateway_is_known_and_looked_at_before_each_put(place: Place) -> None:
    with Proxy(place.url, is_old=True) as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r")
        assert not bucket.probe()
        bucket.is_conditional = False
        place.put("expansion/r/k", b"foreign")
        with pytest.raises(StoreConflict):
            put(bucket)
        assert put(bucket, key="free").is_new
        etag = bucket.replace("m", b"one", sha256(b"one"), None)
        with pytest.raises(StoreTaken):
            bucket.replace("m", b"two", sha256(b"two"), None)
        assert bucket.replace("m", b"two", sha256(b"two"), etag)
    assert place.read("expansion/r/k") == b"foreign"
    assert place.all_keys() == ["expansion/r/free", "expansion/r/k", "expansion/r/m"]


def test_a_store_that_refuses_conditions_is_used_without_where_that_is_allowed(place: Place) -> None:
    with Proxy(place.url, lambda method, path, before: "no_conditions") as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r")
        assert not bucket.probe()
        bucket.is_conditional = False
        assert put(bucket).is_new
        assert not put(bucket).is_new


def test_what_nobody_can_wait_out_is_told_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="NoSuchBucket") as raised:
        Bucket(place.group(bucket="no-such-bucket"), "r").sizes()
    assert not raised.value.retryable
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        Bucket(place.group(), "r").sizes()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY"):
        Bucket(place.group(), "r")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreError, match="no credentials"):
        Bucket(place.group(), "r")


def test_a_place_where_nobody_listens_is_away(place: Place) -> None:
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        Bucket(place.group(endpoint_url="http://127.0.0.1:9"), "r", limit_s=0.3).sizes()


def test_no_secret_is_in_an_error_even_if_the_store_repeats_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "very-secret-session")
    with Proxy(place.url, lambda method, path, before: "denied") as proxy:
        bucket = Bucket(place.group(endpoint_url=proxy.url), "r")
        with pytest.raises(StoreError) as raised:
            put(bucket)
    error: BaseException | None = raised.value
    while error is not None:
        assert not any(secret in str(error) for secret in (SECRET, "very-secret-session", f"Credential={KEY}"))
        error = None if error.__suppress_context__ else error.__context__


def test_more_objects_than_a_page_holds_are_listed(place: Place) -> None:
    for number in range(7):
        place.put(f"expansion/r/{number}", b"x" * number)
    place.put("expansion/r2/other", b"x")
    with Proxy(place.url, page=3) as proxy:
        assert Bucket(place.group(endpoint_url=proxy.url), "r").sizes() == {str(number): number for number in range(7)}
        assert proxy.seen["GET", f"/{place.name}"] == 3


def test_a_storage_class_is_passed_on(place: Place) -> None:
    put(Bucket(place.group(storage_class="STANDARD_IA", path_style=True, region="eu-central-1"), "r"))
    assert place.s3.head_object(Bucket=place.name, Key="expansion/r/k")["StorageClass"] == "STANDARD_IA"
