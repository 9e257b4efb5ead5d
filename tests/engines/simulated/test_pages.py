"""Log lines and pages of simulated servers beside those that real ones printed."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from benchmarks.capacity_checks import MORE
from dfexp.capacity.shape import GIB
from dfexp.capacity.startup_log import read_startup
from dfexp.engines.pages import limits_from
from dfexp.engines.sglang_servers import from_log
from dfexp.engines.simulated.core import Line, Simulator
from dfexp.engines.simulated.server import pages
from dfexp.engines.simulated.server.spec import ServerSpec, read_spec
from dfexp.engines.simulated.server.text import Writer
from dfexp.metrics import from_log_line, from_metrics

DATA = Path(__file__).parents[2] / "data"
KEY = "sk-very-secret"
STRATEGY = {"0.5.12": "--mamba-scheduler-strategy", "0.5.23": "--mamba-radix-cache-strategy"}
NO_BUFFER = {
    "0.5.12": ["--mamba-scheduler-strategy", "no_buffer"],
    "0.5.23": ["--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"],
}
VERSIONS = pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
Maker = Callable[..., ServerSpec]


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Makes the spec of a server: `make(version, *flags, model=...)`."""

    def made(version: str, *flags: str, model: str = "Qwen3.6-27B") -> ServerSpec:
        lengths = {"prompt": {"median": 150.0, "p95": 600.0}, "completion": {"median": 1900.0, "sigma": 0.5}}
        plan = {"model": model, "gpu": "rtx-pro-6000", **lengths, "flags": {"mem_fraction_static": 0.9}}
        said = {"version": version, "index": 0, "servers": 1, "seed": 1, "speed": "max", "load_s": 60.0}
        simulation = {**said, "thinking": True, "plan": plan, "faults": []}
        (tmp_path / "key.yaml").write_text(f'api-key: "{KEY}"\n')
        (tmp_path / "simulation.json").write_text(json.dumps(simulation))
        argv = ["--model-path", f"/models/{model}", "--served-model-name", model, "--host", "127.0.0.1", "--port"]
        argv += ["30000", "--enable-metrics", "--config", "key.yaml", "--simulation", "simulation.json"]
        return read_spec([*argv, "--context-length", "8192", *flags], tmp_path)

    return made


def recorded(name: str, version: str) -> Any:
    return json.loads((DATA / "sglang" / f"{name}_{version}.json").read_bytes())


def startup(spec: ServerSpec) -> list[str]:
    before, after = pages.startup_lines(spec)
    return [*before, *after]


def skeleton(line: str) -> str:
    """A line without its stamp, numbers and names, so that those of different servers are alike."""
    line = re.sub(r"^\[[^\]]*\] ", "", line)
    line = re.sub(r"type=\w+|torch\.\w+", "NAME", line).replace("available_cpu_mem", "available_gpu_mem")
    return re.sub(r"\d+(\.\d+)?", "0", line).rstrip()


CASES = {
    "no_buffer": ("Qwen3.6-27B", NO_BUFFER, ["--max-running-requests", "128", "--mamba-ssm-dtype", "bfloat16"]),
    "no radix": ("Qwen3.6-27B", {}, ["--disable-radix-cache", "--max-running-requests", "155"]),
    "extra_buffer": ("Qwen3.6-27B", {v: [flag, "extra_buffer"] for v, flag in STRATEGY.items()}, []),
    "fp8 KV": ("Qwen3.6-35B-A3B", NO_BUFFER, ["--kv-cache-dtype", "fp8_e4m3", "--max-running-requests", "64"]),
    "plain": ("Qwen3-8B", {}, ["--chunked-prefill-size", "2048"]),
}


@VERSIONS
@pytest.mark.parametrize("case", CASES)
def test_a_startup_log_is_read_back(make: Maker, version: str, case: str) -> None:
    model, by_version, flags = CASES[case]
    spec = make(version, *by_version.get(version, []), *flags, model=model)
    before, after = pages.startup_lines(spec)
    memory, log = spec.config.memory, read_startup([*before, *after], MORE)
    limits = from_log(log)
    assert limits.max_running_requests == memory.max_running_requests
    assert limits.max_total_num_tokens == memory.max_total_num_tokens
    assert limits.max_mamba_cache_size == (memory.max_mamba_cache_size or None)
    assert limits.context_length == 8192
    assert limits.state_bytes
    for part, size in (("weights", memory.weights_bytes), ("kv", memory.kv_bytes), ("state", memory.state_bytes)):
        assert limits.state_bytes.get(part, 0) == pytest.approx(size, abs=0.011 * GIB)
    assert log.server_args["max_running_requests"] == memory.resolved.max_running_requests
    assert log.server_args["port"] == 30000
    assert log.get("load_begin_gib") == pytest.approx(log.get("load_end_gib") + memory.weights_bytes / GIB, abs=0.01)
    assert log.get("available_gpu_mem_gib") == log.get("pool_end_gib") > 0
    assert ["Load weight end" in line for line in before] == [False] * len(before)
    assert "Load weight end" in after[0]
    assert after[-1].endswith("ready to roll!")


@VERSIONS
def test_free_memory_is_the_plans(make: Maker, version: str) -> None:
    log = read_startup(startup(make(version, *NO_BUFFER[version])), MORE)
    assert log.get("load_begin_gib") == 94.8  # free on this card, by the table of GPUs


@VERSIONS
def test_the_key_is_nowhere(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version])
    gauges = Simulator(spec.config).gauges(0.0)
    assert spec.key == KEY
    for page in (pages.startup_lines(spec), pages.server_info(spec, gauges)):
        assert KEY not in str(page)


@pytest.mark.parametrize(
    ("log", "model"),
    [
        ("0.5.12_hybrid", "Qwen3.6-27B"),
        ("0.5.23_hybrid_pressure", "Qwen3.6-27B"),
        ("0.5.23_dense_retraction", "Qwen3-8B"),
    ],
)
def test_every_startup_line_is_worded_like_a_real_one(make: Maker, log: str, model: str) -> None:
    version = log[:6]
    flags = [*NO_BUFFER[version], "--max-running-requests", "999"] if model == "Qwen3.6-27B" else []
    real = (DATA / "capacity" / "logs" / f"{log}.log").read_text()
    # The log ends with the line of sizes; what follows was the same in both versions.
    real += "INFO:     Waiting for application startup.\nINFO:     Application startup complete.\n"
    real += "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)\n"
    real += "The server is fired up and ready to roll!\n"
    known = [skeleton(line) for line in real.split("\n")]
    ours = [skeleton(line) for line in startup(make(version, *flags, model=model))]
    places = []
    for line in ours:
        words = line[:25] if line.startswith("server_args=") else line  # of the arguments only the form is compared
        found = [known_line.startswith(words) for known_line in known]
        assert any(found), line
        places.append(found.index(True))
    assert places == sorted(places)


@VERSIONS
def test_echoed_arguments_have_real_names(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version], "--attention-backend", "flashinfer", "--reasoning-parser", "qwen3")
    real, args = recorded("server_info", version), pages.server_args(spec)
    assert set(args) - set(real) <= {"cuda_graph_bs"}
    assert args["attention_backend"] == "flashinfer"
    assert args["reasoning_parser"] == "qwen3"
    assert args["disable_overlap_schedule"] is True
    assert args[STRATEGY[version][2:].replace("-", "_")] == "no_buffer"


def test_a_latent_cache_is_one_size(make: Maker) -> None:
    spec = make("0.5.23", model="Qwen3-8B")
    memory = replace(spec.config.memory, pools={"k": 3 * GIB, "v": 0})
    after = pages.startup_lines(replace(spec, config=replace(spec.config, memory=memory)))[1]
    assert any(line.endswith(f"#tokens: {memory.max_total_num_tokens}, KV size: 3.00 GB") for line in after)
    assert read_startup(after).get("kv_gib") == 3.0


def numbers(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"([#\w][\w\- ()/]*?): (\d+(?:\.\d+)?)(?=,|$)", line)}


@pytest.mark.parametrize(
    ("log", "model"),
    [("hybrid_0.5.12", "Qwen3.6-27B"), ("hybrid_0.5.23", "Qwen3.6-27B"), ("dense_0.5.23", "Qwen3-8B")],
)
def test_batch_lines_are_those_of_a_real_server(make: Maker, log: str, model: str) -> None:
    version = log.split("_")[1]
    flags = NO_BUFFER[version] if model == "Qwen3.6-27B" else []
    spec, seen = make(version, *flags, "--disable-cuda-graph", model=model), set()
    for stamped in (DATA / "sglang" / f"batches_{log}.log").read_text().splitlines():
        real = re.sub(r"^\[[^\]]*\] ", "", stamped).replace("cpu graph", "cuda graph")
        is_cached = "cached-token" in real and "#cached-token: 0," not in real
        if is_cached or not re.match("Prefill|Decode", real):
            continue
        at, usage = numbers(real), "full token usage" if "full" in real else "token usage"
        gauges = {
            "num_running_reqs": at["#running-req"],
            "num_queue_reqs": at["#queue-req"],
            "full_token_usage": at[usage],
            "mamba_usage": at.get("mamba usage", 0.0),
            "mamba_used_tokens": at.get("mamba num", 0.0),
            "kv_used_tokens": at.get("#full token", at.get("#token", 0.0)),
            "gen_throughput": at.get("gen throughput (token/s)", 0.0),
        }
        rate, new = at.get("input throughput (token/s)", 1.0), int(at.get("#new-token", 0))
        line = Line(at_s=100 + new / rate, gauges=gauges, new_seqs=int(at.get("#new-seq", 0)), new_tokens=new)
        assert pages.batch_line(spec, line, pending=int(at.get("#pending-token", 0)), before_s=100.0) == real
        seen.add(real[:6])
    assert seen == {"Prefil", "Decode"}


def test_a_retraction_is_worded_like_a_real_one() -> None:
    real = (DATA / "sglang" / "batches_dense_0.5.23.log").read_text()
    assert f"] {pages.retract_line(1, 80)}, #new_token_ratio: " in real


@VERSIONS
def test_cuda_graphs_end_at_the_largest(make: Maker, version: str) -> None:
    spec = make(version, "--disable-radix-cache", "--max-running-requests", "99")
    gauges = Simulator(spec.config).gauges(0.0)

    def line(running: int) -> str:
        one = Line(at_s=1.0, gauges={**gauges, "num_running_reqs": running}, new_seqs=0, new_tokens=0)
        return pages.batch_line(spec, one, pending=0, before_s=0.0)

    assert "cuda graph: True" in line(256)
    assert "cuda graph: False" in line(257)


def test_the_stamp_is_sglangs() -> None:
    assert pages.stamp(datetime(2026, 4, 14, 16, 8, 44, 999999, tzinfo=UTC)) == "[2026-04-14 16:08:44] "


@VERSIONS
def test_pages_have_the_fields_of_real_ones_and_are_read_back(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version], "--max-running-requests", "128")
    gauges, memory = Simulator(spec.config).gauges(0.0), spec.config.memory
    info, models = pages.server_info(spec, gauges), pages.models_page(spec, 1_795_970_170)
    real = recorded("server_info", version)
    assert set(info) <= set(real)
    assert set(info["internal_states"][0]) <= set(real["internal_states"][0])
    assert set(info["internal_states"][0]["memory_usage"]) <= set(real["internal_states"][0]["memory_usage"])
    assert info["max_req_input_len"] == real["max_req_input_len"] == 8186
    assert models.keys() == recorded("v1_models", version).keys()
    assert models["data"][0].keys() == recorded("v1_models", version)["data"][0].keys()
    limits = limits_from(json.loads(pages.packed(models)), json.loads(pages.packed(info)))
    assert limits.max_running_requests == memory.max_running_requests < 128
    assert limits.max_total_num_tokens == memory.max_total_num_tokens
    assert limits.context_length == 8192
    assert limits.model == "Qwen3.6-27B"
    assert limits.engine_version == f"sglang {version}"


@VERSIONS
def test_refusals_are_those_of_a_real_server(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version])
    read = {
        name: (DATA / "sglang" / f"error_{name}_{version}.json").read_bytes() for name in ("too_long", "max_tokens")
    }
    assert pages.too_long(spec, 9012) == (400, read["too_long"])
    assert pages.over_context(spec, 12, 100_000) == (400, read["max_tokens"])
    status, body = pages.refused(400, 'no "messages"')
    assert (status, json.loads(body)["message"], json.loads(body)["type"]) == (400, 'no "messages"', "BadRequestError")


def completion(spec: ServerSpec, real: dict[str, Any], prompt: int = 13) -> pages.Completion:
    return pages.Completion(spec=spec, id=real["id"], created=real["created"], model=real["model"], prompt=prompt)


def ordered(body: bytes | str) -> Any:
    """JSON whose comparison minds the order of keys."""
    return json.loads(body, object_pairs_hook=lambda pairs: pairs)


@VERSIONS
def test_an_answer_is_that_of_a_real_server(make: Maker, version: str) -> None:
    raw = (DATA / "sglang" / f"chat_{version}.json").read_bytes()
    real = json.loads(raw)
    text = real["choices"][0]["message"]["content"]
    body = completion(make(version, *NO_BUFFER[version]), real).body(text, 16, "length")
    assert ordered(body) == ordered(raw)


@VERSIONS
def test_a_stream_is_that_of_a_real_server(make: Maker, version: str) -> None:
    raw = (DATA / "sglang" / f"chat_stream_{version}.txt").read_text()
    real = [line.removeprefix("data: ") for line in raw.split("\n") if line]
    parts = [json.loads(line)["choices"][0]["delta"]["content"] for line in real[1:-3]]
    one, text = completion(make(version, *NO_BUFFER[version]), json.loads(real[0])), "".join(parts)
    edges = [len("".join(parts[:number])) for number in range(len(parts) + 1)]
    stream = one.first() + b"".join(one.piece(text, *edge) for edge in pairwise(edges))
    stream += one.last("length") + one.usage(8) + pages.DONE
    ours = [line.removeprefix("data: ") for line in stream.decode().split("\n") if line]
    created = json.loads(real[0])["created"]
    assert stream.count(b"\n\n") == raw.count("\n\n")
    assert ours[-1] == real[-1] == "[DONE]"
    for one_line, real_line in zip(ours[:-1], real[:-1], strict=True):
        wanted = re.sub(r'"created":\d+', f'"created":{created}', real_line)  # the clock went on in the real one
        assert ordered(one_line) == ordered(wanted)


def test_an_answer_that_was_not_cut_has_met_a_stop_token(make: Maker) -> None:
    one = pages.Completion(spec=make("0.5.12", *NO_BUFFER["0.5.12"]), id="a", created=1, model="m", prompt=5)
    choice = json.loads(one.body("Fine.", 2, "stop"))["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", pages.STOP_TOKEN)


@VERSIONS
@pytest.mark.parametrize("cut", [4, 60, 190, 210, 300])
def test_a_parser_tells_thought_and_answer_apart(make: Maker, version: str, cut: int) -> None:
    spec = make(version, *NO_BUFFER[version], "--reasoning-parser", "qwen3")
    one = pages.Completion(spec=spec, id="a", created=1, model="m", prompt=5)
    text = Writer(1).answer(9, cut, thinking=True, whole=300)
    message = json.loads(one.body(text, cut, "length"))["choices"][0]["message"]
    thought, answer = message["reasoning_content"], message["content"] or ""
    assert text.startswith(f"<think>\n{thought}")
    assert text.endswith(answer)
    assert "think>" not in thought + answer
    assert bool(answer) == (cut > 200)
    deltas = [
        json.loads(one.piece(text, start, start + 7).removeprefix(b"data: "))["choices"][0]["delta"]
        for start in range(0, len(text), 7)
    ]
    assert "".join(delta["reasoning_content"] or "" for delta in deltas) == thought
    assert "".join(delta["content"] or "" for delta in deltas) == answer


def worked(spec: ServerSpec) -> Simulator:
    """A server after some requests."""
    simulator = Simulator(spec.config)
    for one in range(60):
        simulator.submit(0.0, one, 150, 800, 4096)
    while (at_s := simulator.next_event_s()) is not None:
        simulator.advance(at_s)
    return simulator


def samples(page: str) -> dict[tuple[str, tuple[str, ...]], tuple[str, float]]:
    """(name, labels) to (type, value summed over their values)."""
    found: dict[tuple[str, tuple[str, ...]], tuple[str, float]] = {}
    for family in families(page):
        for sample in family.samples:
            place = sample.name, tuple(sorted(sample.labels))
            found[place] = family.type, found.get(place, ("", 0.0))[1] + sample.value
    return found


@VERSIONS
def test_metrics_have_names_types_and_labels_of_real_ones(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version])
    simulator, totals = worked(spec), {"num_requests": 60, "prompt_tokens": 9_000, "generation_tokens": 48_000}
    finished = Counter({(name, is_stream): total // 2 for name, total in totals.items() for is_stream in (True, False)})
    ours = samples(pages.metrics_page(spec, simulator.gauges(0.0), simulator.counters, finished))
    real = samples((DATA / "metrics" / f"{version}_hybrid_busy.prom").read_text())
    assert {place: kind for place, (kind, _) in ours.items()} == {place: real[place][0] for place in ours}
    values = {name: value for (name, _), (_, value) in ours.items()}
    assert values["sglang:num_requests_total"] == 60
    assert values["sglang:prompt_tokens_total"] == 9_000
    assert values["sglang:generation_tokens_total"] == 48_000
    assert values["sglang:max_total_num_tokens"] == spec.config.memory.max_total_num_tokens


@VERSIONS
def test_series_that_never_happened_are_absent(make: Maker, version: str) -> None:
    spec = make(version, *NO_BUFFER[version])
    simulator = Simulator(spec.config)
    page = pages.metrics_page(spec, simulator.gauges(0.0), simulator.counters, Counter())
    names = {name for name, _ in samples(page)}
    assert "sglang:num_running_reqs" in names
    assert not {name for name in names if name.endswith("_total")}


def test_retractions_and_aborts_show_once_there_are_some(make: Maker) -> None:
    spec = make("0.5.23", model="Qwen3-8B")
    simulator = Simulator(spec.config)
    counters = {"num_retracted_requests_total": 3, "num_aborted_requests_total": 2, "num_requests_total": 9}
    ours = samples(pages.metrics_page(spec, simulator.gauges(0.0), counters, Counter()))
    real = samples((DATA / "metrics" / "0.5.23_dense_retraction.prom").read_text())
    retracted = next(place for place in ours if place[0] == "sglang:num_retracted_requests_total")
    assert ours[retracted] == ("counter", 3.0)
    assert retracted in real
    assert ours["sglang:num_aborted_requests_total", ("engine_type", "model_name")] == ("counter", 2.0)
    assert "sglang:num_requests_total" not in {name for name, _ in ours}  # those are counted where they are answered


@VERSIONS
@pytest.mark.parametrize("model", ["Qwen3.6-27B", "Qwen3-8B"])
def test_lines_and_metrics_are_read_back_as_samples(make: Maker, version: str, model: str) -> None:
    spec = make(version, *(NO_BUFFER[version] if model == "Qwen3.6-27B" else []), model=model)
    simulator = Simulator(spec.config)
    for number in range(300):
        simulator.submit(0.0, number, 150, 400, 4096)
    lines = [
        told for _ in range(8) for told in simulator.advance(simulator.next_event_s() or 0.0) if isinstance(told, Line)
    ]
    assert {bool(line.new_seqs) for line in lines} == {False, True}
    for line in lines:
        words = pages.stamp(datetime(2026, 4, 14, tzinfo=UTC)) + pages.batch_line(spec, line, pending=0, before_s=0.0)
        said = from_log_line(words, server="a", tz=UTC)
        assert said
        assert said.num_running_reqs == line.gauges["num_running_reqs"]
        assert said.num_queue_reqs == line.gauges["num_queue_reqs"]
        assert said.full_token_usage == pytest.approx(line.gauges["full_token_usage"], abs=0.005)
        if not line.new_seqs:
            assert said.kv_used_tokens == line.gauges["kv_used_tokens"]
            assert said.gen_throughput == pytest.approx(line.gauges["gen_throughput"], abs=0.005)
        if model == "Qwen3.6-27B":
            assert said.mamba_usage == pytest.approx(line.gauges["mamba_usage"], abs=0.005)
    gauges = simulator.gauges(simulator.next_event_s() or 0.0)
    sample = from_metrics(
        pages.metrics_page(spec, gauges, simulator.counters, Counter()), at=1.0, server="a"
    )  # fmt: skip
    assert sample
    known = {name for name in gauges if model == "Qwen3.6-27B" or not name.startswith("mamba_")} - {"token_usage"}
    assert {name: getattr(sample, name) for name in known} == {name: gauges[name] for name in known}
    assert sample.max_total_num_tokens == spec.config.memory.max_total_num_tokens
    assert sample.num_requests_total is None
