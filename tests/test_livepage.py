"""A run as a line and as a page: what is known, over which window, and nothing that servers could smuggle in."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dfexp.livepage import html, line
from tests.finished_run import status

FINDING: dict[str, Any] = {
    "kind": "client-limited", "server": None, "severity": "limit", "numbers": {}, "window": [0.0, 1.0], "gain": 1.12,
    "evidence": "8 of 8 servers, such as 127.0.0.1:30000: 64 requests run, 72 can, 0 wait.",
    "change": "generation.concurrency: 72", "is_binding": True,
}  # fmt: skip
GAUGES: dict[str, Any] = {
    "num_running_reqs": 64.0, "num_queue_reqs": 3.0, "full_token_usage": 0.42, "mamba_usage": 0.591,
    "gen_throughput": 1180.0, "server_tok_per_s": 1234.0,
}  # fmt: skip


def test_a_line_has_counts_rate_window_and_time_left_with_its_bounds() -> None:
    assert line(status()) == (
        "running: 40 of 100 done, 2 failed, 8 in flight, 1,234 tok/s (client, last 20 s),"
        " 1 of 2 servers away (127.0.0.1:8081: quarantined), about 2 min 05 s left (1 min 40 s to 2 min 30 s)"
    )
    assert line(status("ended", done=98)) == "ended: 98 of 100 done, 2 failed"
    assert ", 3 object(s) to upload" in line(status("draining", not_uploaded=3))
    assert ", 40 object(s) to upload" in line(status(not_uploaded=40))
    assert "upload" not in line(status(not_uploaded=3)) + line(status("draining", not_uploaded=0))
    assert line(None) == "waiting for the run's first report"


def test_a_line_has_the_servers_own_rate_where_they_tell_it_and_the_first_finding_cut_short() -> None:
    told = line(status(server_tok_per_s=9400.0, findings=[{**FINDING, "evidence": "y" * 500}, FINDING]))
    assert "9,400 tok/s (servers, last 20 s)" in told
    assert "client-limited: generation.concurrency: 72: yyy" in told
    assert told.endswith("y...")
    assert len(told) < 350
    assert "client-limited" not in line(status("stopped", findings=[FINDING]))


def test_a_disk_that_refuses_is_told_and_so_is_a_status_that_got_old_since_a_full_one_takes_none() -> None:
    refused = status(disk_refuses="cannot append to x: No space left on device.")
    old = status(silent_s=75.0)
    for shown, words in ((refused, "cannot append to x"), (old, "nothing told for 1 min 15 s: is its disk full?")):
        assert words in line(shown)
        assert words in html(shown)
    for fine in (status(silent_s=5.0), status("ended", silent_s=75.0)):
        assert "disk" not in line(fine) + html(fine)


def test_a_line_without_a_rate_yet_says_nothing_of_the_time_left() -> None:
    assert "left" not in line(status(eta_s=None, eta_low_s=None, eta_high_s=None))


def test_the_time_left_says_of_which_rows_where_others_are_left_for_later() -> None:
    whole = {"whole_eta_s": 223_200.0, "whole_eta_low_s": 200_000.0, "whole_eta_high_s": 250_000.0}
    part = status(rows_of_start=200, rows_of_later_starts=654_476, **whole)
    assert line(part).endswith(
        "2 min 05 s left of this start's 200 rows (1 min 40 s to 2 min 30 s), of all rows 2 d 14 h"
    )
    page = html(part)
    assert "left of this start's 200 rows<br>1 min 40 s to 2 min 30 s" in page
    assert "2 d 14 h</div>" in page
    assert "left of all rows<br>2 d 07 h to 2 d 21 h" in page
    all_of_it = status(rows_of_start=200, rows_of_later_starts=0, **whole)
    assert "this start's" not in line(all_of_it) + html(all_of_it)
    assert "all rows" not in line(all_of_it) + html(all_of_it)


def test_a_simulated_run_is_shown_as_one() -> None:
    simulated = status(engine="simulated")
    assert line(simulated).startswith("running (simulated): 40 of 100 done")
    assert "about 2 min 05 s of simulated time left" in line(simulated)
    page = html(simulated)
    assert "running (simulated)</b>" in page
    assert "left of simulated time" in page
    assert "simulated" not in line(status(engine="sglang")) + html(status(engine="sglang"))


def test_the_page_says_which_rate_over_which_window() -> None:
    page = html(status(server_tok_per_s=9400.0))
    assert "9,400</div>" in page
    assert "tok/s decoded<br>servers, last 20 s" in page
    assert "tok/s of whole answers<br>client, last 20 s" in page
    assert "50 to 61, in flight included" in page
    assert "quarantined" in page
    assert "Failed:</b> refused 2" in page


def test_the_page_has_gauges_of_servers_and_dashes_for_what_they_do_not_tell() -> None:
    servers = [{**status()["servers"][0], **GAUGES}, status()["servers"][1]]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html(status(servers=servers)))
    first, second = cells[:12], cells[12:]
    assert first == [
        "127.0.0.1:8080",
        "ready",
        "64/4",
        "3",
        "0.42",
        "0.59",
        "1,234",
        "server",
        "4/5",
        "20",
        "0",
        "0",
    ]
    assert second[1:9] == ["quarantined", "-/4", "-", "-", "-", "634", "client", "4/5"]


def test_a_look_from_before_the_first_request_is_no_number() -> None:
    """It says that nothing runs, beside requests in flight; once a server has answered that is worth knowing."""
    empty = {**GAUGES, "num_running_reqs": 0.0, "num_queue_reqs": 0.0, "full_token_usage": 0.0, "mamba_usage": 0.0}
    server = {**status()["servers"][0], **empty, "done": 0}
    for changes, shown in (
        ({}, "-/4"), ({"done": 1}, "0/4"), ({"in_flight": 0}, "0/4"), ({"num_running_reqs": 2.0}, "2/4"),
    ):  # fmt: skip
        young = status(servers=[{**server, **changes}], window_s=3.0, elapsed_s=3.0)
        assert f">{shown}<" in html(young)
    assert ">0/4<" in html(status(servers=[server], window_s=60.0, elapsed_s=90.0))


def test_the_page_has_findings_with_their_gain_and_change_while_the_run_goes_on() -> None:
    page = html(status(findings=[FINDING]))
    assert "<b>client-limited</b>" in page
    assert "<b>generation.concurrency: 72</b> (+12%)" in page
    assert "client-limited" not in html(status("ended", findings=[FINDING]))


def test_the_rate_over_time_is_a_line_from_zero_to_its_highest() -> None:
    page = html(status(history={"step_s": 30.0, "tok_per_s": [0.0, 500.0, 1000.0]}))
    (points,) = re.findall(r"<polyline points='([^']*)'", page)
    assert [float(pair.split(",")[1]) for pair in points.split()] == [37.0, 19.5, 2.0]
    assert "tok/s, 0 to 1,000, over 1 min 30 s" in page
    assert "svg" not in html(status(history={"step_s": 1.0, "tok_per_s": [5.0]}))


@pytest.mark.parametrize("rates", [[0.0, 0.0], [1.0] * 119])
def test_any_history_makes_a_drawing(rates: list[float]) -> None:
    assert "<polyline" in html(status(history={"step_s": 1.0, "tok_per_s": rates}))


def test_the_page_escapes_everything() -> None:
    hostile = "<script>x</script>"
    servers = [{**status()["servers"][0], "name": hostile, "state": hostile}]
    finding = {**FINDING, "kind": hostile, "evidence": hostile, "change": hostile, "severity": hostile}
    changes = {"reason": hostile, "servers": servers, "failures_by_kind": {hostile: 1}, "findings": [finding]}
    page = html(status(**changes)) + html(status(hostile))
    assert "<script>" not in page
    assert page.count("&lt;script&gt;") >= 8
