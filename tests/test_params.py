from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfexp.errors import ParamsError
from dfexp.params import (
    ExternalFleet,
    GenerationGroup,
    LlamacppFleet,
    RunSpec,
    SglangFleet,
    SimulatedFleet,
    load,
    merge,
    parse_override,
    read_yaml,
    validate,
)

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data" / "params"
GOOD: dict[str, Any] = {"run": "r", "fleet": {"engine": "llamacpp"}, "prompts": {"path": "p.jsonl"}}
RUN = "(name of the run and of its folder under outputs/: letters, digits and . _ -)"
QUOTES = "Put it in quotes: YAML does not read it as text."
NUMBER = "YAML reads it as text: remove the quotes; 1e-3 is written 1.0e-3."
ENGINES = "'llamacpp' or 'sglang' or 'simulated' or 'external'"


def mistakes(tree: dict[str, Any]) -> list[str]:
    """The lines of the error that a tree gives, without the first."""
    with pytest.raises(ParamsError) as caught:
        validate(tree, "p.yaml")
    first, *lines = str(caught.value).split("\n  ")
    assert first == f"p.yaml: {len(lines)} wrong parameter(s); nothing was started."
    return lines


def mistake(**groups: Any) -> str:
    (line,) = mistakes(merge(GOOD, groups))
    return line


# ------------------------------------------------------------------------------------------- wrong files


WRONG_FILES = {
    "misspelt_key": ["generation.max_token = 64: unknown key. Did you mean generation.max_tokens?"],
    "key_of_another_group": ["temperature = 0.7: unknown key. Did you mean generation.temperature?"],
    "wrong_type": [
        "generation.max_tokens = 'none': must be 'fit' or a valid integer. "
        "(per answer; fit: all the room the prompt leaves)"
    ],
    "number_as_text": [f"generation.temperature = '1e-1': must be a valid number. {NUMBER} (default: the engine's)"],
    "out_of_range": ["generation.top_p = 1.5: must be less than or equal to 1. (default: the engine's)"],
    "run_is_a_number": [f"run = 1: must be a valid string. {QUOTES} {RUN}"],
    "run_is_a_word_for_true": [f"run = true: must be a valid string. {QUOTES} {RUN}"],
    "unknown_engine": [f"fleet.engine = 'lamacpp': must be {ENGINES}."],
    "missing_keys": [
        "fleet.urls: missing, and it has no default. (base URLs such as http://127.0.0.1:30000, without user or key)",
        "fleet.servers = 2: unknown key. It belongs to engine llamacpp.",
        "prompts: missing, and it has no default. (where the prompts come from: at least the key path)",
    ],
    "secrets": [
        r"fleet.urls.0 = 'http://***@10.0.0.7:30000': String should match pattern '^https?://[^/\s@]+(/[^\s@]*)?$'. "
        "(base URLs such as http://127.0.0.1:30000, without user or key)",
        "fleet.api_key_env = (hidden): String should match pattern '^[A-Za-z_][A-Za-z0-9_]*$'. "
        "(NAME of the environment variable that holds the API key)",
        "fleet.api_key = (hidden): unknown key. Did you mean fleet.api_key_env?",
        "generation.extra_body = {lora: 'hunter2-lora', max_tokens: 5, nested: {auth: [{token: (hidden)}]}}: "
        "max_tokens is set by dfexp. Use the parameter of that name, or remove it.",
    ],
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_says_file_key_value_and_fix(name: str) -> None:
    path, lines = DATA / f"{name}.yaml", WRONG_FILES[name]
    with pytest.raises(ParamsError) as caught:
        load(path)
    head = f"{path}: {len(lines)} wrong parameter(s); nothing was started."
    assert str(caught.value).split("\n  ") == [head, *lines]


KEYS = "must hold `key: value` lines (run, outputs, fleet, prompts, generation, store, report, quality, plan, limits,"
KEYS += " notify); found"
UNREADABLE_FILES = {
    "tab": "tab.yaml:3:1: not valid YAML: found character '\\t' that cannot start any token.",
    "key_twice": "key_twice.yaml:5:3: not valid YAML: key 'servers' is given twice.",
    "colon_in_text": "colon_in_text.yaml:3:15: not valid YAML: mapping values are not allowed here.",
    "a_list": f"a_list.yaml {KEYS} [{{run: 'wrong'}}, 'fleet'].",
    "empty": f"empty.yaml {KEYS} nothing.",
    "latin1": "latin1.yaml: 'utf-8' codec can't decode byte 0xe9 in position 6: invalid continuation byte. "
    "Give a file of UTF-8 text.",
    "absent": "absent.yaml'. Give a file of UTF-8 text.",
}


@pytest.mark.parametrize("name", UNREADABLE_FILES)
def test_a_file_that_is_no_yaml_mapping_says_where_and_why(name: str) -> None:
    with pytest.raises(ParamsError) as caught:
        load(DATA / f"{name}.yaml")
    assert str(caught.value).endswith(f"/{UNREADABLE_FILES[name]}")


@pytest.mark.parametrize(
    "text",
    [
        "run: 2024-13-45",
        "run: !!python/object/apply:os.system [ls]",
        "run: \x07",
        "[" * 5000,
        "? [a]\n: b",
        "a: *nowhere",
    ],
)
def test_odd_yaml_is_a_params_error_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ParamsError, match=r"x\.yaml"):
        load(tmp_path / "x.yaml")


def test_a_yaml_error_does_not_quote_the_file_which_may_hold_a_secret(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("fleet:\n  api_key: hunter2: oops\n")
    with pytest.raises(ParamsError) as caught:
        load(tmp_path / "x.yaml")
    assert "hunter2" not in str(caught.value)


def test_a_recursive_alias_ends_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("run: r\nfleet: {engine: llamacpp}\nprompts: &p\n  path: p\n  system: *p\n")
    with pytest.raises(ParamsError, match=r"prompts\.system = .*: must be a valid string\."):
        load(tmp_path / "x.yaml")


def test_merge_keys_and_anchors_of_yaml_work(tmp_path: Path) -> None:
    text = "run: r\nfleet: {engine: llamacpp}\nprompts: {path: p}\n"
    (tmp_path / "x.yaml").write_text(text + "report: &base {seed: 3}\ngeneration: {<<: *base, max_tokens: 5}\n")
    assert load(tmp_path / "x.yaml").generation.seed == 3


# ------------------------------------------------------------------------------------------- single mistakes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_tokens", -5, "-5: must be 'fit' or greater than or equal to 1. (per answer"),
        ("max_tokens", 5.0, "5.0: must be 'fit' or a valid integer. (per answer"),
        ("max_tokens", None, "nothing: must be 'fit' or a valid integer. A key without a value is nothing"),
        ("concurrency", "fast", "'fast': must be 'auto' or a valid integer. ("),
        ("seed", 2**31, "2147483648: must be less than 2147483648. ("),
        ("seed", "7", f"'7': must be a valid integer. {NUMBER}"),
        ("top_k", "1e-9", f"'1e-9': must be a valid integer. {NUMBER}"),
        ("stop", "END", "'END': must be a valid list. ("),
        ("enable_thinking", "yes", "'yes': must be a valid boolean. ("),
        ("enable_thinking", 1, "1: must be a valid boolean. ("),
        ("drain_s", True, "true: must be a valid number. ("),
        ("drain_s", "", "'': must be a valid number. ("),
        ("give_up_s", math.inf, "inf: must be a finite number. ("),
        ("on_orphan", False, f"false: must be 'stop' or 'continue'. {QUOTES}"),
        ("extra_body", {"n": 2}, "{n: 2}: n is set by dfexp."),
        ("extra_body", {"messages": []}, "{messages: []}: messages is set by dfexp."),
        ("extra_body", {"seed": 2}, "{seed: 2}: seed is set by dfexp. Use the parameter of that name, or remove it."),
    ],
)
def test_a_wrong_value_says_what_would_be_right(key: str, value: object, message: str) -> None:
    line = mistake(generation={key: value})
    assert line.startswith(f"generation.{key} = {message}")
    assert line.endswith(f"({GenerationGroup.model_fields[key].description})") or key == "extra_body"


def test_what_json_cannot_carry_is_no_extra_body() -> None:
    assert mistake(generation={"extra_body": {"a": [datetime.date(2024, 5, 1)]}}).startswith(
        "generation.extra_body.a.0 = 2024-05-01: input was not a valid JSON value."
    )
    assert mistake(generation={"extra_body": {"x": math.nan}}).startswith(
        "generation.extra_body.x = nan: must be a finite number."
    )


def test_an_item_of_a_list_is_named_by_its_place_and_the_list_is_not_blamed_too() -> None:
    assert mistake(prompts={"path": ["a", 5]}) == (
        f"prompts.path.1 = 5: must be a valid string. {QUOTES} (JSONL, Parquet or text files, by suffix)"
    )
    assert mistake(prompts={"path": []}).startswith("prompts.path = []: must be a valid string or List should have")


@pytest.mark.parametrize("fleet", ["llamacpp", ["llamacpp"]])
def test_a_fleet_that_is_no_group_says_so(fleet: object) -> None:
    (line,) = mistakes({**GOOD, "fleet": fleet})
    assert line.endswith(": must be a group of keys. (the servers: at least the key engine)")


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        (None, "fleet: missing, and it has no default. (the servers: at least the key engine)"),
        ({}, f"fleet.engine = nothing: must be {ENGINES}."),
        ({"engine": "External"}, f"fleet.engine = 'External': must be {ENGINES}."),
        ({"engine": True}, f"fleet.engine = true: must be {ENGINES}."),
        ({"engine": "llamacpp", "servrs": 2}, "fleet.servrs = 2: unknown key. Did you mean fleet.servers?"),
        (
            {"engine": "llamacpp", "max_tokens": 2},
            "fleet.max_tokens = 2: unknown key. Did you mean generation.max_tokens?",
        ),
        ({"engine": "llamacpp", "llamacpp": 2}, "fleet.llamacpp = 2: unknown key. Known keys: name, servers, host,"),
        (
            {"engine": "llamacpp", "urls": ["http://a"]},
            "fleet.urls = ['http://a']: unknown key. It belongs to engine external.",
        ),
        (
            {"engine": "llamacpp", "url": ["http://a"]},
            "fleet.url = ['http://a']: unknown key. Did you mean fleet.urls? It belongs to engine external.",
        ),
        (
            {"engine": "external", "urls": ["localhost:30000"]},
            "fleet.urls.0 = 'localhost:30000': String should match pattern",
        ),
        (
            {"engine": "external", "urls": ["http://a:1", "http://A:1/v1/"]},
            "fleet.urls = ['http://a:1', 'http://A:1/v1/']: it names a server twice. Name each once.",
        ),
    ],
)
def test_mistakes_in_the_fleet(fleet: object, message: str) -> None:
    (line,) = mistakes({**GOOD, "fleet": fleet})
    assert line.startswith(message)


@pytest.mark.parametrize(
    ("group", "key", "right"),
    [
        ("prompts", "pth", "prompts.path"),
        ("prompts", "max_tokens", "generation.max_tokens"),
        ("generation", "max_new_tokens", "generation.max_tokens"),
        ("generation", "row_per_shard", "generation.rows_per_shard"),
        ("generation", "context_length", "fleet.context_length"),
        ("report", "temperatur", "generation.temperature"),
    ],
)
def test_the_nearest_right_key_is_found_in_the_group_and_beyond(group: str, key: str, right: str) -> None:
    assert mistake(**{group: {key: 1}}) == f"{group}.{key} = 1: unknown key. Did you mean {right}?"


def test_a_key_near_to_nothing_gets_the_list_of_keys() -> None:
    assert mistake(prompts={"wibble": 1}) == (
        "prompts.wibble = 1: unknown key. Known keys: path, hf, column, id_column, system, system_column, role_key, "
        "content_key, roles, turns, draw, sources, limit, seed, on_bad, filters, duplicates."
    )
    assert mistake(store={"wibble": 1}).startswith("store.wibble = 1: unknown key. Known keys: bucket, prefix, ")


@pytest.mark.parametrize("name", ["..", "a/b", "", "-x", "a b"])
def test_a_run_cannot_leave_its_folder(name: str) -> None:
    assert mistake(run=name).endswith(f" {RUN}")


def test_mistakes_deep_in_the_plan_are_named_too() -> None:
    lines = mistakes({**GOOD, "plan": {"modell": "m", "prompt": {"token": 5}, "completion": {"tokens": "1e3"}}})
    assert "plan.gpu: missing, and it has no default. (kind of GPU, such as rtx-pro-6000)" in lines
    assert "plan.modell = 'm': unknown key. Did you mean plan.model?" in lines
    assert "plan.prompt.token = 5: unknown key. Did you mean plan.prompt.tokens?" in lines
    assert f"plan.completion.tokens = '1e3': must be a valid number. {NUMBER} (every request has this many)" in lines


@pytest.mark.parametrize(
    "tree",
    [
        {"fleet": {"api_key": "S3CRET"}},
        {"fleet": {"password": "S3CRET"}},
        {"fleet": {"hf_token": ["S3CRET"]}},
        {"fleet": {"server": "http://user:S3CRET@host"}},
        {"fleet": {"server": "http://S3CRET@host"}},
        {"fleet": {"server": "http://user:p@S3CRET@host"}},
        {"fleet": {"server": "http://host/?api_key=S3CRET&x=1"}},
        {"fleet": {"headers": {"Authorization": "S3CRET"}}},
        {"fleet": {"headers": "Bearer S3CRET"}},
        {"fleet": {"model": ["sk-S3CRETS3CRET"]}},
        {"generation": {"extra_body": {"n": 1, "a": {"b": [{"client_secret": "S3CRET"}]}}}},
        {"generation": {"extra_body": {"n": 1, "a": {"aws_credentials": {"x": "S3CRET"}}}}},
    ],
)
def test_a_secret_is_never_shown(tree: dict[str, Any]) -> None:
    assert "S3CRET" not in mistake(**tree)


def test_counts_of_tokens_are_no_secrets_but_numbers_can_be() -> None:
    assert mistake(fleet={"password": 1234}).startswith("fleet.password = (hidden): unknown key.")
    assert "max_tokens: 77" in mistake(generation={"extra_body": {"n": 1, "max_tokens": 77}})


def sglang(**keys: Any) -> dict[str, Any]:
    return {**GOOD, "fleet": {"engine": "sglang", "model": "/models/m", **keys}}


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("env", "HF_TOKEN", "S3CRET"),
        ("env", "GH_PAT", "S3CRET"),
        ("env", "DB_PASS", "S3CRET"),
        ("env", "API_KEY_2", "S3CRET"),
        ("env", "HTTPS_PROXY", "http://user:S3CRET@host"),
        ("env", "ANY", "hf_S3CRETS3CRET"),
        ("flags", "model_loader_extra_config", '{"token": "S3CRET"}'),
        ("flags", "model_loader_extra_config", '{"auth": "hf_S3CRETS3CRET"}'),
        ("flags", "lora_paths", ["a", "hf_S3CRETS3CRET"]),
        ("flags", "api_key", "S3CRET"),
    ],
)
def test_no_secret_gets_into_a_fleet_by_name_or_value(group: str, name: str, value: Any) -> None:
    (line,) = mistakes(sglang(**{group: {"A": "1", name: value}}))
    assert line.endswith(f": {name} looks like a secret, which no parameter file holds. Export it instead.")
    assert "S3CRET" not in line


def test_what_only_sounds_like_a_secret_is_taken() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "CUDA_HOME": "/usr/local/cuda", "SGLANG_CLIP_MAX_NEW_TOKENS": "1"}
    env |= {"HF_HOME": "/data/hf_datasets"}
    env |= {"PATH": "/bin", "CONDA_ENV": "x", "KEYS_PER_HEAD": "1", "HTTPS_PROXY": "http://proxy:8080", "EMPTY": ""}
    flags = {"tokenizer_path": "/t", "bucket_time_to_first_token": [0.1], "model_loader_extra_config": '{"a": 1}'}
    spec = validate(sglang(env=env, flags=flags), "p.yaml")
    assert isinstance(spec.fleet, SglangFleet)
    assert (spec.fleet.env, spec.fleet.flags) == (env, flags)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"env": {"CUDA_VISIBLE_DEVICES": "1"}},
            "CUDA_VISIBLE_DEVICES is set by dfexp for each server. Leave it out; use",
        ),
        ({"env": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}, "CUDA_DEVICE_ORDER is set by dfexp for each server"),
        ({"gpus": [0, 1, 0]}, "fleet.gpus = [0, 1, 0]: it names a GPU twice. Name each once."),
        ({"env": {"A": "a\0b"}}, "A holds a NUL character"),
        ({"flags": {"dtype": "a\0b"}}, "dtype holds a NUL character"),
        ({"flags": {"lora_paths": ["a", "a\0b"]}}, "lora_paths holds a NUL character"),
        *(({"model": model}, "fleet.model = ") for model in ("", "/", ".", "models/..", "//", " ", "a\0b", "a\0/b")),
        *(({"python": python}, "fleet.python = ") for python in ("", "/", "a\0b")),
    ],
)
def test_what_servers_cannot_be_given(keys: dict[str, Any], words: str) -> None:
    (line,) = mistakes(sglang(**keys))
    assert words in line


@pytest.mark.parametrize("model", ["m", "/models/m", "models/m/", "Qwen/Qwen3-8B", "../m", "./m.v2", "~/m", "/a b/m\n"])
def test_names_and_folders_of_models_are_taken(model: str) -> None:
    assert validate(sglang(model=model, gpus=[1, 0], python="python3"), "p.yaml").fleet.model == model


# ------------------------------------------------------------------------------------------- simulated servers


PLAN: dict[str, Any] = {"gpu": "rtx-pro-6000", "prompt": {"tokens": 150}, "completion": {"tokens": 900}}


def simulated(*faults: dict[str, Any], **keys: Any) -> dict[str, Any]:
    fleet = {"engine": "simulated", "model": "m", "servers": 2, "faults": list(faults), **keys}
    return {**GOOD, "fleet": fleet, "plan": PLAN}


EVERY_KIND: list[dict[str, Any]] = [
    {"kind": "crash", "server": 1, "at_s": 60},
    {"kind": "crash", "share": 0.1, "at_s": 5, "for_s": 5, "times": 2},
    {"kind": "hang", "at_s": 60, "for_s": 30},
    {"kind": "slow"},
    {"kind": "slow", "factor": 2},
    {"kind": "health", "status": 200},
    {"kind": "status", "status": 429, "retry_after_s": 3, "contains": "x"},
    *({"kind": kind, "share": 1} for kind in ("html", "garbage", "cut", "never")),
    {"kind": "oom_at_start", "times": 2},
]


def test_a_simulated_fleet_has_the_plan_of_its_file_and_survives_a_round_trip() -> None:
    spec = validate(simulated(*EVERY_KIND, speed=50), "p.yaml")
    assert isinstance(spec.fleet, SimulatedFleet)
    assert (spec.fleet.plan, spec.plan is None) == (spec.plan, False)
    assert [fault.kind for fault in spec.fleet.faults] == [fault["kind"] for fault in EVERY_KIND]
    assert validate(spec.model_dump(mode="json"), "run.json") == spec
    own = validate(simulated(plan={**PLAN, "gpu": "h100"}), "p.yaml")
    assert isinstance(own.fleet, SimulatedFleet)
    assert own.fleet.plan
    assert own.plan
    assert (own.fleet.plan.gpu, own.plan.gpu) == ("h100", "rtx-pro-6000")


def test_a_simulated_fleet_without_any_plan_says_what_is_missing() -> None:
    tree = {**simulated(), "plan": None}
    assert mistakes(tree) == [
        "fleet.engine = 'simulated': it simulates what a `plan` group says, and there is none. Add one with at least"
        " plan.gpu, plan.prompt and plan.completion."
    ]
    assert mistakes({**simulated(), "plan": {**PLAN, "gpu": 6000}}) == [
        f"plan.gpu = 6000: must be a valid string. {QUOTES} (kind of GPU, such as rtx-pro-6000)"
    ]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "crash"}, ": a crash needs at_s, or share or contains for the requests that cause it."),
        (
            {"kind": "crash", "at_s": 3, "factor": 2},
            ": factor means nothing for a crash at a time, which happens once. It",
        ),
        (
            {"kind": "crash", "at_s": 3, "for_s": 2},
            ": for_s means nothing for a crash at a time, which happens once. It",
        ),
        ({"kind": "hang", "share": 0.5}, ": share means nothing for hang. It takes server, at_s, for_s."),
        ({"kind": "oom_at_start", "at_s": 1}, ": at_s means nothing for oom_at_start. It takes server, times."),
        ({"kind": "status", "status": 200}, ": status 200 is no failure. Give 400 to 599."),
        ({"kind": "slow", "facter": 3}, ".facter = 3: unknown key. Did you mean fleet.faults.factor?"),
        ({"kind": "slow", "factor": "3"}, f".factor = '3': must be a valid number. {NUMBER} (slow: factor on all"),
        ({"kind": "hang", "at_s": math.inf}, ".at_s = inf: must be a finite number. (when it begins;"),
        ({"kind": "bang"}, ".kind = 'bang': must be 'crash', 'hang', "),
        ({}, ".kind: missing, and it has no default. (what happens: "),
    ],
)
def test_a_fault_that_means_nothing_says_what_is_right(fault: dict[str, Any], message: str) -> None:
    (line,) = mistakes(simulated({"kind": "slow"}, fault))
    assert line.startswith("fleet.faults.1")
    assert message in line


def test_a_fault_names_a_server_that_there_is() -> None:
    (line,) = mistakes(simulated({"kind": "crash", "at_s": 1, "server": 2}))
    assert line.endswith(": there is no server 2: fleet.servers is 2, counted from 0.")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"speed": "fast"}, "fleet.speed = 'fast': must be 'max' or a valid number. (simulated seconds per second;"),
        ({"speed": 0}, "fleet.speed = 0: must be 'max' or greater than 0. ("),
        ({"device": "cpu"}, "fleet.device = 'cpu': unknown key. It belongs to engine sglang."),
        ({"flags": {"api_key": "x"}}, "fleet.flags = {api_key: (hidden)}: api_key looks like a secret"),
    ],
)
def test_a_wrong_key_of_a_simulated_fleet_is_explained(keys: dict[str, Any], message: str) -> None:
    (line,) = mistakes(simulated(**keys))
    assert line.startswith(message)


# ------------------------------------------------------------------------------------------- overrides


def test_overrides_are_laid_over_the_file_and_their_values_are_yaml() -> None:
    spec = load(
        ROOT / "params" / "demo.yaml",
        [
            "generation.max_tokens=fit",
            "generation.temperature=0",
            "generation.extra_body={top_logprobs: 2}",
            "prompts.path=[a.jsonl, b.jsonl]",
            'run="001"',
            "fleet.model=",
            "prompts.system=a = b",
        ],
    )
    assert (spec.generation.max_tokens, spec.generation.temperature, spec.generation.seed) == ("fit", 0, 1)
    assert spec.generation.extra_body == {"top_logprobs": 2}
    assert spec.prompts.path == ["a.jsonl", "b.jsonl"]
    assert (spec.run, spec.prompts.system) == ("001", "a = b")
    assert isinstance(spec.fleet, LlamacppFleet)
    assert (spec.fleet.model, spec.fleet.servers) == (None, 2)


@pytest.mark.parametrize("text", ["generation.max_tokens", "=5", "generation.=5", ".max_tokens=5", "a..b=1", ""])
def test_a_malformed_override_says_the_form(text: str) -> None:
    with pytest.raises(ParamsError, match=r"is not group\.key=value, such as generation\.max_tokens=4096"):
        parse_override(text)


def test_a_wrong_override_is_named() -> None:
    path = ROOT / "params" / "demo.yaml"
    with pytest.raises(ParamsError) as caught:
        load(path, ["generation.max_token=5", "run=r"])
    assert str(caught.value) == (
        f"{path} with --set generation.max_token, run: 1 wrong parameter(s); nothing was started.\n"
        "  generation.max_token = 5: unknown key. Did you mean generation.max_tokens?"
    )
    with pytest.raises(ParamsError, match=r"^--set generation\.stop:1:\d+: not valid YAML"):
        load(path, ["generation.stop=[a"])
    with pytest.raises(ParamsError, match=r"generation\.max_tokens = \{x: 1\}: must be 'fit' or a valid integer"):
        load(path, ["generation.max_tokens.x=1"])
    with pytest.raises(ParamsError, match=r"generation = 5: must be a group of keys"):
        load(path, ["generation=5"])


# ------------------------------------------------------------------------------------------- defaults and merging


@pytest.mark.parametrize("name", ["demo", "external"])
def test_the_shipped_files_are_right_and_survive_a_round_trip(name: str) -> None:
    spec = load(ROOT / "params" / f"{name}.yaml")
    assert spec.run == name
    assert spec.fleet_name == name
    assert validate(spec.model_dump(mode="json"), "run.json") == spec


def test_the_external_example_names_eight_servers_and_a_variable() -> None:
    fleet = load(ROOT / "params" / "external.yaml").fleet
    assert isinstance(fleet, ExternalFleet)
    assert fleet.urls == [f"http://127.0.0.1:{port}" for port in range(30000, 30008)]
    assert fleet.api_key_env == "SGLANG_API_KEY"


def test_a_group_given_in_part_keeps_its_other_defaults_and_an_empty_one_all() -> None:
    spec = validate({**GOOD, "generation": {"temperature": 1}, "report": None}, "p.yaml")
    assert spec.generation == GenerationGroup(temperature=1)
    assert (spec.generation.max_tokens, spec.report.examples) == ("fit", 10)
    assert spec == RunSpec.model_validate({**GOOD, "generation": {"temperature": 1}})


def test_merge_goes_key_by_key_through_groups_and_replaces_the_rest() -> None:
    base = {"a": {"b": 1, "c": {"d": 2}}, "l": [1, 2]}
    top = {"a": {"c": {"e": 3}}, "l": [3], "n": None}
    assert merge(base, top) == {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "l": [3], "n": None}
    assert (base, top["l"]) == ({"a": {"b": 1, "c": {"d": 2}}, "l": [1, 2]}, [3])


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*RunSpec.model_fields, "other"]), trees, max_size=4),
    st.sampled_from([*LlamacppFleet.model_fields, *ExternalFleet.model_fields, *GenerationGroup.model_fields]),
    trees,
)
def test_any_tree_gives_a_spec_or_a_params_error(tree: dict[str, Any], key: str, value: object) -> None:
    for candidate in (
        tree,
        merge(GOOD, {"generation": {key: value}}),
        merge(GOOD, {"fleet": {key: value}}),
        {**GOOD, "fleet": {"engine": "external", "urls": ["http://a"], key: value}},
    ):
        try:
            outcome: object = validate(candidate, "p.yaml")
        except ParamsError as error:
            outcome = str(error)
        assert isinstance(outcome, RunSpec) or str(outcome).startswith("p.yaml: ")


def test_read_yaml_takes_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xef\xbb\xbfrun: r\r\n")
    assert read_yaml(tmp_path / "x.yaml") == {"run": "r"}


# ------------------------------------------------------------------------------------------- another engine
@pytest.mark.parametrize("first", [0, 1])
def test_another_engine_on_top_takes_nothing_from_the_first(tmp_path: Path, first: int) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("run: x\nfleet: {engine: llamacpp, servers: 2, threads: 3}\nprompts: {path: p.jsonl}\n")
    overrides = ["fleet.engine=external", "fleet.urls=['http://127.0.0.1:9']"]
    spec = load(path, [overrides[first], overrides[1 - first]])
    assert spec.fleet.model_dump(exclude_defaults=True) == {"engine": "external", "urls": ["http://127.0.0.1:9"]}


def test_the_same_engine_on_top_keeps_the_other_keys() -> None:
    base = {"fleet": {"engine": "llamacpp", "servers": 2}}
    assert merge(base, {"fleet": {"engine": "llamacpp", "threads": 1}})["fleet"]["servers"] == 2
    assert merge(base, {"fleet": {"threads": 1}})["fleet"]["servers"] == 2


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"rows": 0}, "limits.rows = 0: must be greater than or equal to 1."),
        ({"rows": 1.5}, "limits.rows = 1.5: must be a valid integer."),
        ({"hours": 0}, "limits.hours = 0: must be greater than 0."),
        ({"hours": math.inf}, "limits.hours = inf: must be a finite number."),
        ({"days": 1}, "limits.days = 1: unknown key."),
    ],
)
def test_a_limit_is_a_number_of_rows_or_hours(limits: dict[str, Any], message: str) -> None:
    assert mistake(limits=limits).startswith(message)


@pytest.mark.parametrize(
    "line",
    [
        'curl -H "Authorization: Bearer $NTFY_TOKEN" -d "$DFEXP_MESSAGE" https://example.org/topic',
        "curl https://user:${PASSWORD}@example.org -d @-",
        "./tell.sh --token=$TOKEN",
        "cat >> events.txt",
    ],
)
def test_a_command_takes_its_secrets_from_the_environment(line: str) -> None:
    assert validate({**GOOD, "notify": line}, "test").notify == line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('curl -H "Authorization: Bearer abcdefgh"', "it seems to hold a secret"),
        ("curl https://user:abcdefgh@example.org", "it seems to hold a secret"),
        ("/usr/bin/tell --token=abcdefgh", "it seems to hold a secret"),
        ("  ", "String should match pattern"),
        (["cat"], "must be a valid string"),
    ],
)
def test_a_command_with_a_secret_or_without_words_is_wrong(line: object, message: str) -> None:
    said = mistake(notify=line)
    assert message in said
    assert "abcdefgh" not in said
