"""Samples out of real pages and logs of servers, and out of what is no page, or half of one."""

import json
import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dfexp.metrics import from_log, from_log_line, from_metrics, stretches
from dfexp.records import EngineSample

DATA = Path(__file__).parent / "data"
PAGES = {path.name: path.read_text() for path in sorted((DATA / "metrics").glob("*.prom"))}
LOGS = {path.stem: path.read_text() for path in sorted((DATA / "metrics").glob("*.log"))}


def said(text: str) -> dict[str, float]:
    """What a page says, without what every sample has."""
    sample = from_metrics(text, at=5.0, server="a:1")
    assert sample is not None
    values = sample.to_json()
    assert (values.pop("at"), values.pop("server")) == (5.0, "a:1")
    return values


def logged(line: str) -> dict[str, float] | None:
    sample = from_log_line(line, server="a:1", tz=UTC)
    return sample and {name: value for name, value in sample.to_json().items() if name not in ("at", "server")}


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (
            "0.5.12_hybrid_busy.prom",
            {
                "num_running_reqs": 16,
                "num_queue_reqs": 8,
                "gen_throughput": 142.09406792969125,
                "token_usage": 0.09,
                "full_token_usage": 0.08705,
                "mamba_usage": 0.0005589129143815279,
                "mamba_used_tokens": 32,
                "mamba_available_tokens": 57211,
                "mamba_evictable_tokens": 11,
                "kv_used_tokens": 1741,
                "kv_available_tokens": 18169,
                "kv_evictable_tokens": 90,
                "max_total_num_tokens": 20000,
                "cache_hit_rate": 0,
                "num_retracted_reqs": 0,
                "prompt_tokens_total": 82,
                "generation_tokens_total": 58,
                "num_requests_total": 7,
                "realtime_decode_tokens_total": 1667,
                "realtime_prefill_tokens_total": 863,
            },
        ),
        (
            "0.5.23_dense_retraction.prom",  # no state pool: not a word of it, though the page says zeros
            {
                "num_running_reqs": 3,
                "num_queue_reqs": 0,
                "gen_throughput": 19.054160540552022,
                "token_usage": 0.42,
                "full_token_usage": 0.42142857142857143,
                "kv_used_tokens": 295,
                "kv_available_tokens": 61,
                "kv_evictable_tokens": 344,
                "max_total_num_tokens": 700,
                "cache_hit_rate": 0,
                "num_retracted_reqs": 0,
                "prompt_tokens_total": 1082,
                "generation_tokens_total": 2467,
                "num_requests_total": 23,
                "num_retracted_requests_total": 1,
                "realtime_decode_tokens_total": 2594,
                "realtime_prefill_tokens_total": 1127,
            },
        ),
        (
            "sglang_docs_llama-3.1-8b.prom",
            {
                "num_running_reqs": 162,
                "num_queue_reqs": 2826,
                "gen_throughput": 86.50814177726902,
                "token_usage": 0.28,
                "cache_hit_rate": 0.007507552643049313,
                "prompt_tokens_total": 8128902,
                "generation_tokens_total": 7557572,
            },
        ),
        (
            "saturated_retracting_sglang_0.5.17_real.prom",
            {
                "token_usage": 0.85,
                "full_token_usage": 0.8506,
                "mamba_evictable_tokens": 0,
                "kv_used_tokens": 27876,
                "kv_available_tokens": 2888,
                "kv_evictable_tokens": 2004,
                "cache_hit_rate": 0,
                "num_retracted_reqs": 1,
                "num_retracted_requests_total": 48,
            },
        ),
        (
            "hybrid_live_gauges_real.prom",
            {
                "mamba_usage": 0.093,
                "mamba_used_tokens": 4,
                "mamba_available_tokens": 17,
                "mamba_evictable_tokens": 22,
            },
        ),
        (
            "llamacpp_busy.prom",
            {"num_running_reqs": 2, "num_queue_reqs": 2, "prompt_tokens_total": 71, "generation_tokens_total": 10},
        ),
        (
            "FIXTURE_priority_series.prom",
            {
                "num_running_reqs": 3,
                "kv_used_tokens": 300000,
                "kv_available_tokens": 600000,
                "kv_evictable_tokens": 100000,
                "max_total_num_tokens": 1000000,
                "num_retracted_reqs": 0,
                "num_retracted_requests_total": 2,
            },
        ),
        (
            "FIXTURE_tp4_replicated_gauges.prom",
            {"num_running_reqs": 16, "token_usage": 0.915, "max_total_num_tokens": 262144},
        ),
        (
            "FIXTURE_v0.5.20_labels.prom",
            {
                "num_running_reqs": 12,
                "num_queue_reqs": 3,
                "token_usage": 0.74,
                "full_token_usage": 0.91,
                "mamba_usage": 0,
                "kv_used_tokens": 48000,
                "cache_hit_rate": 0.61,
            },
        ),
    ],
)
def test_a_page(page: str, expected: dict[str, float]) -> None:
    assert said(PAGES[page]) == expected


IDLE = dict.fromkeys(
    ["num_running_reqs", "num_queue_reqs", "gen_throughput", "token_usage", "full_token_usage", "mamba_usage",
     "mamba_used_tokens", "kv_used_tokens", "cache_hit_rate", "num_retracted_reqs"], 0.0,
)  # fmt: skip
IDLE |= {
    "mamba_evictable_tokens": 3, "kv_available_tokens": 19967, "kv_evictable_tokens": 33, "max_total_num_tokens": 20000,
    "prompt_tokens_total": 25, "generation_tokens_total": 8, "num_requests_total": 1,
    "realtime_decode_tokens_total": 7, "realtime_prefill_tokens_total": 28,
}  # fmt: skip
FULL = {"token_usage": 0.6, "mamba_usage": 0.6, "mamba_used_tokens": 12}


@pytest.mark.parametrize(
    ("page", "differing"),
    [
        ("0.5.12_hybrid_idle.prom", {"mamba_available_tokens": 57251}),
        ("0.5.23_hybrid_idle.prom", {"mamba_available_tokens": 57601}),
        ("0.5.12_hybrid_pressure.prom",
         {**FULL, "num_running_reqs": 6, "num_queue_reqs": 7, "gen_throughput": 29.2183930836437,
          "full_token_usage": 0.5285714285714286, "mamba_available_tokens": 3, "mamba_evictable_tokens": 5,
          "kv_used_tokens": 370, "kv_available_tokens": 259, "kv_evictable_tokens": 71, "max_total_num_tokens": 700,
          "prompt_tokens_total": 62, "generation_tokens_total": 19, "num_requests_total": 2,
          "realtime_decode_tokens_total": 192, "realtime_prefill_tokens_total": 351}),
        ("0.5.23_hybrid_pressure.prom",
         {**FULL, "num_running_reqs": 1, "num_queue_reqs": 18, "full_token_usage": 0.1125, "mamba_available_tokens": 5,
          "kv_used_tokens": 225, "kv_available_tokens": 1742, "max_total_num_tokens": 2000,
          "realtime_prefill_tokens_total": 296}),
    ],
)  # fmt: skip
def test_a_hybrid_page_idle_and_full(page: str, differing: dict[str, float]) -> None:
    assert said(PAGES[page]) == IDLE | differing
    assert said(PAGES[page].replace("\n", "\r\n")) == IDLE | differing


@pytest.mark.parametrize(
    ("name", "looks", "slots", "most"),
    [
        ("0.5.12_hybrid_pressure", 28, 20, 6),
        ("0.5.23_hybrid_pressure", 141, 20, 6),
        ("0.5.23_dense_retraction", 9, 0, 4),
    ],
)
def test_a_series_of_real_pages(name: str, looks: int, slots: int, most: int) -> None:
    pages = [part.partition("\n")[2] for part in (DATA / "metrics" / f"{name}_series.txt").read_text().split("--- t=")]
    samples = [said(page) for page in pages[1:]]
    assert len(samples) == looks
    assert {sum(value for key, value in each.items() if "mamba" in key and "tokens" in key) for each in samples} == {
        slots
    }
    assert max(each["num_running_reqs"] for each in samples) == most
    retracted = [each.get("num_retracted_requests_total", 0) for each in samples]
    assert retracted == sorted(retracted)


def test_a_sum_without_a_part_is_not_said() -> None:
    series = 'sglang:{}{{dp_rank="{}",model_name="{}"}} {}\n'
    page = series.format("num_running_reqs", 0, "m", 4) + series.format("num_running_reqs", 1, "m", "NaN")
    page += series.format("num_requests_total", 0, "m", "+Inf") + series.format("num_queue_reqs", 0, "m", -1)
    page += series.format("kv_used_tokens", 0, "m", 1e3) + series.format("kv_used_tokens", 0, "n", "2E+3")
    page += series.format("prompt_tokens_total", 0, "m", 5) * 2 + series.format("prompt_tokens_total_total", 0, "m", 7)
    assert said(page) == {"kv_used_tokens": 3000, "prompt_tokens_total": 5}


def test_labels_without_end_cost_nothing() -> None:
    page = "sglang:num_running_reqs{" + ",".join(f'a{nth}="b"' for nth in range(500_000)) + "} 3\n"
    foreign = 'python_seconds_bucket{le="1",model_name="m"} 1.0\n' * 100_000
    assert said(page + foreign + "sglang:token_usage 0.5\n") == {"token_usage": 0.5}


@pytest.mark.parametrize(
    ("before", "running"),
    [
        ("\x1b[32m[2026-03-14 04:59:11 DP0 TP0]\x1b[0m ", 4),
        ("[2026-03-14 04:59:11] \x1b[1m", 4),
        ("(Scheduler pid=3) [2026-03-14 04:59:11 DP0 TP0] ", 4),
        ("[2026-03-14 04:59:11] INFO scheduler.py:12: ", 4),
        ("[2026-03-14T04:59:11 TP0 EP0] ", 4),
        ("Loading 100%\r[2026-03-14 04:59:10] INFO: up[2026-03-14 04:59:11] ", 4),
        ("[2026-03-14 04:59:11] Receive: obj=GenerateReqInput(text='", None),  # quoted
        ("[2026-03-14 04:59:11] Receive: text=' #retracted_reqs: 9 ", None),
    ],
)
def test_what_stands_before_a_line(before: str, running: int | None) -> None:
    line = before + "Decode batch [7]. #running-req: 4, #token: 151, token usage: 1e-02, #queue-req: 8\r"
    told = {
        "num_running_reqs": 4,
        "num_queue_reqs": 8,
        "token_usage": 0.01,
        "full_token_usage": 0.01,
        "kv_used_tokens": 151,
    }
    assert logged(line) == (told if running else None)


def test_ranks_repeat_each_other_and_streaming_is_a_part() -> None:
    values = said(PAGES["FIXTURE_tp2_hybrid_swa_full_label_set.prom"])
    assert (values["num_running_reqs"], values["num_queue_reqs"]) == (8, 3)
    assert (values["prompt_tokens_total"], values["generation_tokens_total"]) == (10000, 6000)
    assert (values["num_requests_total"], values["num_aborted_requests_total"]) == (500, 11)
    assert (values["realtime_decode_tokens_total"], values["realtime_prefill_tokens_total"]) == (9000, 4400)
    assert said(PAGES["0.5.23_hybrid_busy.prom"])["num_requests_total"] == 7  # 6 of them not streamed


def test_data_parallel_ranks_add_up_and_of_fractions_the_fullest_counts() -> None:
    series = 'sglang:{name}{{tp_rank="{tp}",dp_rank="{dp}",pp_rank="0",moe_dp_rank="{tp}"}} {value}\n'
    page = "".join(
        series.format(name=name, tp=tp, dp=tp // 2, value=values[tp])
        for name, values in {
            "num_running_reqs": (4, 5, 7, 7),
            "kv_used_tokens": (10, 10, 30, 30),
            "gen_throughput": (100.5, 0, 50, 0),
            "full_token_usage": (0.1, 0.1, 0.3, 0.3),
            "num_retracted_requests_total": (1, 1, 2, 2),
        }.items()
        for tp in range(4)
    )
    assert said(page) == {
        "num_running_reqs": 12,
        "kv_used_tokens": 40,
        "gen_throughput": 150.5,
        "full_token_usage": 0.3,
        "num_retracted_requests_total": 3,
    }


def test_priorities_without_a_total_are_added_up_and_a_counter_has_no_total() -> None:
    series = 'sglang:{}{{priority="{}",dp_rank="{}"}} {}\n'
    running = [("10", 0, 2), ("20", 0, 1), ("10", 1, 5), ("", 1, 6)]
    page = "".join(series.format("num_running_reqs", *parts) for parts in running)
    page += "".join(series.format("num_requests_total", *parts) for parts in running)
    assert said(page) == {"num_running_reqs": 9, "num_requests_total": 14}


def test_what_is_no_number_is_not_said() -> None:
    page = "sglang:num_running_reqs NaN\nsglang:num_queue_reqs{} 3 1795970219000\n  sglang:token_usage\t0.5\r\n"
    page += 'sglang:gen_throughput{tp_rank="0"} NaN\nsglang:gen_throughput{tp_rank="1"} 7.5\n'
    page += 'sglang:kv_used_tokens +Inf\nsglang:mamba_usage x\nsglang:kv_available_tokens{a="b} 1\n'
    page += 'sglang:num_used_tokens 3\nsglang:realtime_tokens_total{mode="prefill_cache"} 9\n'
    assert said(page) == {"num_queue_reqs": 3, "token_usage": 0.5, "gen_throughput": 7.5}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "<!DOCTYPE html>\n<html><body>502 Bad Gateway</body></html>\n",
        '{"error": "not found"}',
        "# HELP sglang:num_running_reqs The number of running requests\n",
        "python_gc_objects_collected_total 3\n",
        "sglang:num_running_reqs NaN\n",
        "sglang:num_running_reqs 1",  # of 16
    ],
)
def test_no_page_is_no_sample(text: str) -> None:
    assert from_metrics(text, at=0, server="a") is None


@settings(max_examples=60, deadline=None)
@given(page=st.sampled_from(sorted(PAGES)), cut=st.integers(0))
def test_a_page_that_was_cut_says_nothing_wrong(page: str, cut: int) -> None:
    text = PAGES[page]
    sample, whole = from_metrics(text[: cut % len(text)].rstrip("\n"), at=5.0, server="a:1"), said(text)
    found = sample.to_json() if sample else {}
    differing = {name for name, value in found.items() if whole.get(name) != value} - {"at", "server"}
    # Whether the zeros of the state pool mean that there is none is seen on the whole page alone.
    assert {name for name in differing if found[name] or not name.startswith("mamba_")} == set()


@settings(max_examples=200, deadline=None)
@given(
    line=st.text(st.characters(blacklist_categories=["Cs"]) | st.sampled_from('{}"=, \\\n#0')),
    name=st.sampled_from(["sglang:num_running_reqs", "sglang:realtime_tokens_total", "llamacpp:requests_deferred"]),
)
def test_no_line_can_break_the_reading(line: str, name: str) -> None:
    sample = from_metrics(f"{name}{line}\n{name}{{{line}\nsglang:token_usage 0.5\n", at=0, server="a")
    assert sample is not None
    assert sample.token_usage == 0.5
    assert all(math.isfinite(value) for value in sample.to_json().values() if isinstance(value, int | float))


STAMP = datetime(2026, 3, 14, 4, 59, 11, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "[2026-03-14 04:59:11] Decode batch, #running-req: 20, #full token: 2326796, full token usage: 0.14, "
            "mamba num: 20, mamba usage: 1.00, cuda graph: True, gen throughput (token/s): 1174.06, #queue-req: 6, ",
            {
                "num_running_reqs": 20,
                "num_queue_reqs": 6,
                "gen_throughput": 1174.06,
                "token_usage": 1,
                "full_token_usage": 0.14,
                "mamba_usage": 1,
                "mamba_used_tokens": 20,
                "kv_used_tokens": 2326796,
            },
        ),
        (
            "[2026-03-14 04:59:11 DP1 PP0 TP3 EP3] Decode batch [812], #running-req: 4, #token: 151, token usage: 0.22"
            ", accept len: 3.10, accept rate: 0.71, cpu graph: False, gen throughput (token/s): 4.42, #queue-req: 8",
            {
                "num_running_reqs": 4,
                "num_queue_reqs": 8,
                "gen_throughput": 4.42,
                "token_usage": 0.22,
                "full_token_usage": 0.22,
                "kv_used_tokens": 151,
            },
        ),
        (
            "[2026-03-14 04:59:11 TP0] Decode batch, #running-req: 1, #full token: 10, full token usage: 0.01, "
            "#swa token: 9, swa token usage: 0.30, cuda graph: True, gen throughput (token/s): 9.00, #queue-req: 0, "
            "fwd occupancy: 3.1%",
            {
                "num_running_reqs": 1,
                "num_queue_reqs": 0,
                "gen_throughput": 9,
                "token_usage": 0.3,
                "full_token_usage": 0.01,
                "kv_used_tokens": 10,
            },
        ),
        (
            "[2026-03-14 04:59:11.000 TP0] Prefill batch, #new-seq: 3, #new-token: 102, #cached-token: 34, "
            "full token usage: 0.20, swa token usage: 0.10, #running-req: 1, #queue-req: 8, #pending-token: 406, "
            "cuda graph: False, input throughput (token/s): 671.87[2026-03-14 04:59:12] INFO",
            {
                "num_running_reqs": 1,
                "num_queue_reqs": 8,
                "token_usage": 0.2,
                "full_token_usage": 0.2,
                "cache_hit_rate": 0.25,
            },
        ),
        (
            "[2026-03-14 04:59:11] Decode batch. #running-req: 1, #token: 6, token usage: 0.00, gen throughput "
            "(token/s): 1.06, #queue-req: 0",
            {
                "num_running_reqs": 1,
                "num_queue_reqs": 0,
                "gen_throughput": 1.06,
                "token_usage": 0,
                "full_token_usage": 0,
                "kv_used_tokens": 6,
            },
        ),
        (
            "[2026-03-14 04:59:11] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tokens_gained: 95"
            ", #mamba_num_gained: 2, #new_token_ratio: 0.0622 -> 0.8984",
            {"num_retracted_reqs": 2},
        ),
        ("[2026-03-14 04:59:11] INFO:     127.0.0.1:1 - 'POST /v1/chat/completions HTTP/1.1' 200 OK", None),
        ("Decode batch, #running-req: 1, #token: 6, token usage: 0.00, #queue-req: 0", None),  # of no known time
        ("[2026-13-41 04:59:11] Decode batch, #running-req: 1", None),
        ("[2026-03-14 04:59:11] Decode batch, ", None),
        ("", None),
    ],
)
def test_a_line_of_a_log(line: str, expected: dict[str, float] | None) -> None:
    assert logged(line) == expected
    if expected:
        assert from_log_line(line, server="a", tz=UTC).at == STAMP
        assert from_log_line(line, server="a", tz=timezone(timedelta(hours=2))).at == STAMP - 7200


def test_a_whole_log_of_a_server_that_retracts() -> None:
    samples = from_log(LOGS["0.5.12_hybrid_pressure"], server="a", tz=UTC)
    assert len(samples) == 32 + 10 + 2
    retracted = [sample.num_retracted_requests_total for sample in samples]
    assert [retracted.index(count) for count in (None, 1, 2)] == [0, 13, 16]
    assert retracted == sorted(retracted, key=lambda count: count or 0)
    assert max(sample.mamba_used_tokens or 0 for sample in samples) == 12
    assert {sample.gen_throughput is None for sample in samples if sample.cache_hit_rate is not None} == {True}


def test_a_log_and_a_page_of_one_server_agree() -> None:
    page = said(PAGES["0.5.23_dense_retraction.prom"])
    log = from_log(LOGS["0.5.23_dense_retraction"], server="a", tz=UTC)
    rates = [sample.gen_throughput for sample in log]
    before, after = log[rates.index(19.05) :][:2]  # the page is of the moment after the prefill that followed
    assert before.gen_throughput == round(page["gen_throughput"], 2)
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "num_retracted_requests_total"):
        assert getattr(after, name) == page[name]


def test_ranks_in_a_log() -> None:
    decode = "[2026-03-14 04:59:1{} {}] Decode batch, #running-req: {}, #token: 5, token usage: {}, #queue-req: 0\n"
    retract = "[2026-03-14 04:59:14 {}] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens: 2\n"
    log = decode.format(1, "DP0 TP0", 3, 0.5) + decode.format(2, "DP1 TP2", 4, 0.1)
    log += "".join(retract.format(f"DP{tp // 2} TP{tp}") for tp in range(4))
    log += decode.format(5, "DP0 TP0", 2, 0.2) + decode.format(6, "DP1 TP2", 9, 0.3).rstrip("\n")
    samples = from_log(log, server="a", tz=UTC)
    assert [sample.at - STAMP for sample in samples] == [0, 1, 3, 3, 4]
    assert [sample.num_running_reqs for sample in samples] == [3, 7, None, None, 6]
    assert [sample.full_token_usage for sample in samples] == [0.5, 0.5, None, None, 0.2]
    assert [sample.num_retracted_requests_total for sample in samples] == [None, None, 1, 2, 2]


def test_a_sample_is_written_and_read() -> None:
    sample = from_metrics(PAGES["0.5.12_hybrid_busy.prom"], at=5.0, server="a:1")
    line = json.dumps(sample.to_json())
    assert "null" not in line
    assert "max_running_requests" not in line
    assert EngineSample.from_json({**json.loads(line), "of_a_newer_version": 1}) == sample
    with pytest.raises(TypeError, match="server"):
        EngineSample.from_json({"at": 5.0})


def test_a_line_that_was_cut_off_takes_what_it_may_belong_to_with_it() -> None:
    """It may be the other rank's: the number of the first alone would be a wrong sum."""
    page = 'sglang:num_running_reqs{dp_rank="0"} 5\nsglang:num_queue_reqs{dp_rank="0"} 3\n'
    assert said(page) == {"num_running_reqs": 5, "num_queue_reqs": 3}
    assert said(page + "sglang:num_runn") == {"num_queue_reqs": 3}
    assert said(page + 'sglang:num_queue_reqs{dp_rank="1"} 1') == {"num_running_reqs": 5}


def test_processes_that_repeat_a_counter_say_the_same() -> None:
    page = 'sglang:num_requests_total{pid="1"} 5\nsglang:num_requests_total{pid="2"} 7\n'
    assert said(page) == {"num_requests_total": 7}


def test_a_stretch_ends_where_nobody_looked() -> None:
    """A look every 20 s: two that are missed are none, seven are, more than 30 s or not."""
    times = [*range(0, 200, 20), *range(240, 400, 20), *range(540, 700, 20)]
    found = stretches([EngineSample(at=float(at), server="a:1", num_running_reqs=1) for at in times], idle_s=30.0)
    assert [(part[0].at, part[-1].at) for part in found] == [(0, 380), (540, 680)]
