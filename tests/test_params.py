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
    load,
    merge,
    parse_override,
    read_yaml,
    validate,
)

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data" / "params"
GOOD: dict[str, Any] = {"run": "r", "fleet": {"engine": "llamacpp"}, "prompts": {"path": "p.jsonl"}}
NAME = "must be a name of letters, digits, '.', '_' and '-' that begins with a letter or digit."
RUN = "(name of the run, and of its folder under outputs/)"
ENGINES = "'llamacpp' or 'external'"


def mistakes(tree: dict[str, Any]) -> list[str]:
    """The lines of the error that a tree gives, without the first."""
    with pytest.raises(ParamsError) as caught:
        validate(tree, "p.yaml")
    first, *lines = str(caught.value).split("\n  ")
    count = f"{len(lines)} wrong parameter{'s' if len(lines) > 1 else ''}"
    assert first == f"p.yaml: {count}; nothing was started."
    return lines


def mistake(**groups: Any) -> str:
    (line,) = mistakes(merge(GOOD, groups))
    return line


# ------------------------------------------------------------------------------------------- wrong files


WRONG_FILES = {
    "misspelt_key": ["generation.max_token = 64: unknown key. Did you mean generation.max_tokens?"],
    "key_of_another_group": ["temperature = 0.7: unknown key. Did you mean generation.temperature?"],
    "wrong_type": [
        "generation.max_tokens = 'none': must be 'fit' or a whole number of at least 1. "
        "(tokens an answer may have; fit: all the room that the prompt leaves)"
    ],
    "number_as_text": [
        "generation.temperature = '1e-1': must be a number from 0 to 2. YAML reads it as text: write 0.1. "
        "(default: the engine's)"
    ],
    "out_of_range": ["generation.top_p = 1.5: must be a number above 0 and at most 1. (default: the engine's)"],
    "run_is_a_number": [f"run = 1: {NAME} YAML reads it as a number: put it in quotes. {RUN}"],
    "run_is_a_word_for_true": [
        f"run = true: {NAME} YAML reads yes, no, on and off as true or false: put the word in quotes. {RUN}"
    ],
    "unknown_engine": [f"fleet.engine = 'lamacpp': must be {ENGINES}. Did you mean llamacpp?"],
    "missing_keys": [
        "fleet.urls: missing, and it has no default. Write `urls: ...` under `fleet:`: a list of 1 or more texts. "
        "(base URLs, such as http://127.0.0.1:30000 (with or without /v1))",
        "fleet.servers = 2: unknown key. Only fleet.engine llamacpp has it.",
        "prompts: missing, and it has no default. Write a group `prompts:` with the key path.",
    ],
    "secrets": [
        "fleet.urls = ['http://***@10.0.0.7:30000']: 'http://***@10.0.0.7:30000': a URL must not hold a user or "
        "password. Name the variable of the API key with fleet.api_key_env.",
        "fleet.api_key_env = (hidden): must be the name of an environment variable, never the key itself. "
        "(NAME of the environment variable that holds the API key)",
        "fleet.api_key = (hidden): unknown key. A secret never stands in a file: name its environment variable with "
        "fleet.api_key_env.",
        "generation.extra_body = {lora: 'hunter2-lora', max_tokens: 5, nested: {auth: [{token: (hidden)}]}}: "
        "max_tokens has a parameter of its own: write generation.max_tokens.",
    ],
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_says_file_key_value_and_fix(name: str) -> None:
    path, lines = DATA / f"{name}.yaml", WRONG_FILES[name]
    with pytest.raises(ParamsError) as caught:
        load(path)
    count = "1 wrong parameter" if len(lines) == 1 else f"{len(lines)} wrong parameters"
    assert str(caught.value).split("\n  ") == [f"{path}: {count}; nothing was started.", *lines]


UNREADABLE_FILES = {
    "tab": ":3:1: not valid YAML: found character '\\t' that cannot start any token. Indent with spaces, never with "
    "tabs, and put text that begins with @, ` or % in quotes.",
    "key_twice": ":5:3: not valid YAML: key 'servers' is given twice. Keep one of the two.",
    "colon_in_text": ":3:15: not valid YAML: mapping values are not allowed here. Put a text that holds a colon in "
    "quotes, and line up the keys of a group.",
    "a_list": " must hold `key: value` lines (run, outputs, fleet, prompts, generation, store, report, plan); found "
    "[{run: 'wrong'}, 'fleet'].",
    "empty": " must hold `key: value` lines (run, outputs, fleet, prompts, generation, store, report, plan); found nothing.",
    "latin1": " is not UTF-8 text: 'utf-8' codec can't decode byte 0xe9 in position 6: invalid continuation byte. "
    "Save it as UTF-8.",
}


@pytest.mark.parametrize("name", UNREADABLE_FILES)
def test_a_file_that_is_no_yaml_mapping_says_where_and_why(name: str) -> None:
    path = DATA / f"{name}.yaml"
    with pytest.raises(ParamsError) as caught:
        load(path)
    assert str(caught.value) == f"{path}{UNREADABLE_FILES[name]}"


def test_a_file_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(
        ParamsError, match=r"there is no parameter file .*secret\.yaml\. Did you mean .*secrets\.yaml\?"
    ):
        load(DATA / "secret.yaml")
    with pytest.raises(ParamsError, match=r"there is no parameter file /nowhere/x\.yaml\. Check the path\."):
        load(Path("/nowhere/x.yaml"))
    with pytest.raises(ParamsError, match="Is a directory"):
        load(DATA)


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
    with pytest.raises(ParamsError, match=r"prompts\.system = .*: must be text\."):
        load(tmp_path / "x.yaml")


def test_merge_keys_and_anchors_of_yaml_work(tmp_path: Path) -> None:
    text = "run: r\nfleet: {engine: llamacpp}\nprompts: {path: p}\n"
    (tmp_path / "x.yaml").write_text(text + "report: &base {seed: 3}\ngeneration: {<<: *base, max_tokens: 5}\n")
    assert load(tmp_path / "x.yaml").generation.seed == 3


# ------------------------------------------------------------------------------------------- single mistakes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("max_tokens", -5, "-5: must be 'fit' or a whole number of at least 1."),
        ("max_tokens", 5.0, "5.0: must be 'fit' or a whole number of at least 1. Write 5, without the point."),
        (
            "max_tokens",
            None,
            "nothing: must be 'fit' or a whole number of at least 1. A key without a value is nothing",
        ),
        ("concurrency", "fast", "'fast': must be 'auto' or a whole number from 1 to 100000."),
        ("seed", 2**31, "2147483648: must be a whole number of at least 0 and below 2147483648."),
        ("seed", "7", "'7': must be a whole number of at least 0 and below 2147483648. It is text: remove the quotes."),
        ("top_k", "1e-9", "'1e-9': must be a whole number of at least -1. YAML reads it as text: write 1.0e-09."),
        ("stop", "END", "'END': must be a list of texts. Write a list, even of one: [END]."),
        ("enable_thinking", "yes", "'yes': must be true or false. Write true or false, without quotes."),
        ("enable_thinking", 1, "1: must be true or false."),
        ("drain_s", True, "true: must be a number of at least 0."),
        ("drain_s", "", "'': must be a number of at least 0."),
        ("give_up_s", math.inf, "inf: must be a number above 0. It must be finite."),
        ("on_orphan", False, "false: must be 'stop' or 'continue'. YAML reads yes, no, on and off as true or false"),
        ("extra_body", {"n": 2}, "{n: 2}: n is set by the run itself: remove it."),
        (
            "extra_body",
            {"d": datetime.date(2024, 5, 1)},
            "{d: 2024-05-01}: it must be fit for JSON: Object of type date",
        ),
        ("extra_body", {"x": math.nan}, "{x: nan}: it must be fit for JSON: Out of range float"),
    ],
)
def test_a_wrong_value_says_what_would_be_right(key: str, value: object, message: str) -> None:
    line = mistake(generation={key: value})
    assert line.startswith(f"generation.{key} = {message}")
    description = GenerationGroup.model_fields[key].description
    assert line.endswith(f"({description})") or key == "extra_body"


def test_an_item_of_a_list_is_named_by_its_place_and_the_list_is_not_blamed_too() -> None:
    assert mistake(prompts={"path": ["a", 5]}) == (
        "prompts.path.1 = 5: must be text. YAML reads it as a number: put it in quotes."
    )
    assert mistake(prompts={"path": []}).startswith("prompts.path = []: must be text or a list of 1 or more texts.")
    assert (
        mistake(generation={"extra_body": {1: 2}}) == "generation.extra_body.1: the key must be text; put it in quotes."
    )


@pytest.mark.parametrize("fleet", [None, "llamacpp", ["llamacpp"]])
def test_a_fleet_that_is_no_group_says_which_there_are(fleet: object) -> None:
    (line,) = mistakes({**GOOD, "fleet": fleet})
    assert f": must be a group of keys with engine: {ENGINES}." in line


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ({}, f"fleet.engine: missing, and it has no default. Write `engine: ...` under `fleet:`: {ENGINES}."),
        ({"engine": "External"}, f"fleet.engine = 'External': must be {ENGINES}. Did you mean external?"),
        ({"engine": True}, f"fleet.engine = true: must be {ENGINES}."),
        ({"engine": "llamacpp", "servrs": 2}, "fleet.servrs = 2: unknown key. Did you mean fleet.servers?"),
        (
            {"engine": "llamacpp", "llamacpp": 2},
            "fleet.llamacpp = 2: unknown key. Known keys: fleet.name, fleet.engine,",
        ),
        (
            {"engine": "llamacpp", "urls": ["http://a"]},
            "fleet.urls = ['http://a']: unknown key. Only fleet.engine external has it.",
        ),
        (
            {"engine": "llamacpp", "url": ["http://a"]},
            "fleet.url = ['http://a']: unknown key. Did you mean fleet.urls? Only fleet.engine external has it.",
        ),
        (
            {"engine": "external", "urls": ["localhost:30000"]},
            "fleet.urls = ['localhost:30000']: 'localhost:30000' must be an http or https URL, such as http://",
        ),
        (
            {"engine": "external", "urls": ["http://a:1", "http://A:1/v1/"]},
            "fleet.urls = ['http://a:1', 'http://A:1/v1/']: 'http://a:1' and 'http://A:1/v1/' are the same server.",
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
        "prompts.wibble = 1: unknown key. Known keys: prompts.path, prompts.column, prompts.id_column, prompts.system, "
        "prompts.limit."
    )
    assert mistake(store={"wibble": 1}).startswith("store.wibble = 1: unknown key. ")


def test_a_run_cannot_take_the_folder_of_fleets_or_leave_its_own() -> None:
    assert mistake(run="fleets") == "run = 'fleets': the folder outputs/fleets is where fleets live. Take another name."
    for name in ("..", "a/b", "", "-x", "a b"):
        assert NAME in mistake(run=name)


@pytest.mark.parametrize(
    "tree",
    [
        {"fleet": {"api_key": "S3CRET"}},
        {"fleet": {"password": "S3CRET"}},
        {"fleet": {"hf_token": ["S3CRET"]}},
        {"fleet": {"server": "http://user:S3CRET@host"}},
        {"fleet": {"server": "http://S3CRET@host"}},
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
    with pytest.raises(ParamsError, match=r"is not of the form group\.key=value, such as generation\.max_tokens=4096"):
        parse_override(text)


def test_a_wrong_override_is_named() -> None:
    path = ROOT / "params" / "demo.yaml"
    with pytest.raises(ParamsError) as caught:
        load(path, ["generation.max_token=5", "run=r"])
    assert str(caught.value) == (
        f"{path} with --set generation.max_token, run: 1 wrong parameter; nothing was started.\n"
        "  generation.max_token = 5: unknown key. Did you mean generation.max_tokens?"
    )
    with pytest.raises(ParamsError, match=r"^--set generation\.stop:1:\d+: not valid YAML"):
        load(path, ["generation.stop=[a"])
    with pytest.raises(ParamsError, match=r"generation\.max_tokens = \{x: 1\}: must be 'fit' or a whole number"):
        load(path, ["generation.max_tokens.x=1"])
    with pytest.raises(ParamsError, match=r"generation = 5: must be a group of keys \(max_tokens, temperature,"):
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
