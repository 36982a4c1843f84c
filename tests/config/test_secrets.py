from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from telescope._launch.preflight import find_obstacles
from telescope._launch.process_environment import make_child_environment
from telescope._launch.process_plan import Host, make_plan
from telescope.compose.resolve import resolve
from telescope.config.free_text import is_free, is_free_text
from telescope.config.run import RunConfig, as_yaml, config_hash, dump_run
from telescope.config.secrets import (
    SecretMissing,
    find_references,
    is_secret_name,
    redacted,
    reveal,
    reveal_all,
    scrubbed,
    secret_values,
)
from telescope.settings import Settings
from tests.config.conftest import compose_one, sentences, write


def test_what_counts_as_a_secret_by_its_name():
    secret = [
        "api_key",
        "HF_TOKEN",
        "judge_api_key",
        "password",
        "DB_PASSWORD",
        "client-secret",
        "aws_secret_access_key",
        "key",
    ]
    harmless = ["max_tokens", "monkey", "token_count", "keyword", "num_train", "instruction", "tokenizer"]
    assert all(map(is_secret_name, secret))
    assert not any(map(is_secret_name, harmless))


def test_a_secret_given_literally_is_refused_with_the_reference_to_give():
    point = compose_one("cluster.env.HF_TOKEN=hf_abcdefgh")
    assert point.config is None
    assert "cluster.env.HF_TOKEN is a secret: give a reference and nothing else" in sentences(point)
    assert "'${oc.env:HF_TOKEN}'" in sentences(point)
    assert "hf_abcdefgh" not in sentences(point)


def test_a_reference_stays_a_reference_in_everything_written():
    environ = {"HF_TOKEN": "hf_abcdefgh"}
    config = compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN}", environ=environ).config
    assert config.cluster.env == {"HF_TOKEN": "${oc.env:HF_TOKEN}"}
    assert "hf_abcdefgh" not in dump_run(config)
    assert reveal_all(config.cluster.env, environ) == environ


def test_a_reference_to_a_variable_that_is_not_set_is_refused():
    assert "HF_TOKEN, which is not set" in sentences(compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN}"))


def test_a_reference_with_a_literal_default_is_refused():
    assert "is a secret" in sentences(compose_one("cluster.env.HF_TOKEN=${oc.env:HF_TOKEN,hf_abcdefgh}"))


def test_a_secret_variable_under_a_harmless_name_stays_a_reference():
    config = compose_one("cluster.env.WHO=${oc.env:HF_TOKEN}", environ={"HF_TOKEN": "hf_abcdefgh"}).config
    assert config.cluster.env == {"WHO": "${oc.env:HF_TOKEN}"}


def test_the_value_of_a_secret_variable_typed_in_anywhere_is_refused():
    point = compose_one("logging.wandb_project=hf_abcdefgh", environ={"HF_TOKEN": "hf_abcdefgh"})
    assert "logging.wandb_project holds the value of the environment variable HF_TOKEN" in sentences(point)
    assert "hf_abcdefgh" not in sentences(point)


def test_what_is_no_secret_is_resolved(monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    values, problems = resolve(OmegaConf.create({"a": "${oc.env:WHERE}/x", "b": ["${a}", 1], "c": {"d": "${b}"}}), {})
    assert values == {"a": "/data/x", "b": ["/data/x", 1], "c": {"d": ["/data/x", 1]}}
    assert problems == []


def test_what_can_not_be_resolved_is_listed_all_at_once():
    config = OmegaConf.create({"a": "${nowhere}", "b": "???", "c": "${oc.env:NOT_SET_ANYWHERE}", "d": 1})
    values, problems = resolve(config, {})
    assert values == {"d": 1}
    assert [problem.path for problem in problems] == ["a", "b", "c"]
    assert problems[2].sentence.endswith("refers to the environment variable NOT_SET_ANYWHERE, which is not set")


LEAK = """
from pathlib import Path
from typing import Literal
from pydantic import SecretStr, field_validator
from telescope.environments.base import SingleTurn
from telescope.settings import Settings

class Judge(Settings):
    url: str = ""
    tries: int = 1

class Leak(SingleTurn):
    note: str = ""
    notes: tuple[str, ...] = ()
    headers: dict[str, str] = {}
    judge: Judge = Judge()
    wrapped: SecretStr = SecretStr("")
    tone: Literal["plain", "loud"] = "plain"
    folder: Path = Path("/")
    url: str = "http://x"
    copied: str = ""

    @field_validator("url")
    @classmethod
    def _is_url(cls, url):
        if not url.startswith("http"):
            raise ValueError(f"url={url} is not a URL")
        return url

    def prompts(self, split):
        return []
"""
PASSWORD = {"PGPASSWORD": "s3cr3t-of-mine"}
KWARGS = "environments.leak.kwargs"


@pytest.fixture
def compose_leak(tmp_path: Path):
    write(tmp_path / "plugins" / "environments" / "leak.py", LEAK)
    return lambda *overrides, environ=PASSWORD: compose_one("env=[leak]", *overrides, config_dir=tmp_path, environ=environ)


@pytest.mark.parametrize(
    "given",
    [
        "note=${oc.env:PGPASSWORD}",
        "notes=['x ${oc.env:PGPASSWORD} y','${oc.env:PGPASSWORD}']",
        "headers={X: 'Bearer ${oc.env:PGPASSWORD}'}",
        "judge={url: 'http://me:${oc.env:PGPASSWORD}@host'}",
        "wrapped=${oc.env:PGPASSWORD}",
        "url='http://${oc.env:PGPASSWORD}'",
        "note='${environments.leak.kwargs.url}'",
    ],
)
def test_a_reference_in_free_text_stays_whatever_its_name_whole_or_embedded(compose_leak, given):
    point = compose_leak(
        f"{KWARGS}.{given}", f"{KWARGS}.url='http://${{oc.env:PGPASSWORD}}'" if "kwargs.url" in given else "seed=0"
    )
    assert not sentences(point)
    assert "PGPASSWORD}" in dump_run(point.config)
    assert "s3cr3t" not in dump_run(point.config)
    assert "s3cr3t" in json.dumps(reveal_all(point.config.environments["leak"].kwargs, PASSWORD))


@pytest.mark.parametrize("given", ["note=${oc.env:PGPASSWORD}", "judge={url: 'http://me:${oc.env:PGPASSWORD}@host'}"])
def test_an_eval_of_its_own_keeps_references_as_an_environment_does(compose_leak, monkeypatch, given):
    evals = "+evals.mine.environment=leak", f"+evals.mine.kwargs.{given}", "+evals.mine.kwargs.folder=/"
    point = compose_leak(*evals)
    assert not sentences(point)
    assert "s3cr3t" not in dump_run(point.config) + as_yaml(point.config)
    assert find_references(json.loads(dump_run(point.config))) == {"PGPASSWORD"}
    monkeypatch.setenv("PGPASSWORD", PASSWORD["PGPASSWORD"])
    assert "s3cr3t" in point.config.environment("mine").model_dump_json()


def test_a_typed_setting_of_an_eval_is_recorded_and_text_is_not():
    place = ("evals", "mine", "kwargs")
    for entry in ({"environment": "countdown"}, None):
        container = {"evals": {"mine": entry, "countdown": {}}}
        label = "mine" if entry else "countdown"
        assert not is_free_text((place[0], label, place[2], "num_train"), container)
    assert is_free_text((*place, "x"), {"evals": {"mine": {"environment": "not_there"}}})
    assert not is_free_text(("evals", "mine", "environment"), {})
    assert not is_free_text(("model", "name"), {})


def list_fields(kind: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type[Settings], str]]:
    """Every setting below a class: its place, the class that has it, its name."""
    if isinstance(kind, type) and issubclass(kind, Settings):
        for name, field in kind.model_fields.items():
            yield (*place, name), kind, name
            yield from list_fields(field.annotation, (*place, name))
    else:
        for inner in get_args(kind):
            yield from list_fields(inner, (*place, "one") if str(kind).startswith("dict") else place)


def test_no_setting_that_takes_anything_is_forgotten():
    """Each setting whose type says nothing of what stands in it keeps references: one that is added tomorrow, too. Whoever
    adds it sees to it that the process which needs its values reads them (`reveal_all`), and names it here."""
    free = set()
    for place, kind, name in list_fields(RunConfig):
        field = kind.model_fields[name]
        if is_free(name, field):
            assert is_free_text((*place, "x"), {}), place
            free.add(".".join(place))
        else:
            assert "Any" not in str(field.annotation), place
            assert "dict[str, str]" not in str(field.annotation), place
    assert free == {
        *("environments.one.kwargs", "evals.one.kwargs", "weight_sync.transport_kwargs", "inference.vllm"),
        *("inference.api_key", "inference.remote.api_key", "cluster.env", "cluster.slurm.setup"),
    }


def test_no_class_of_settings_stands_outside_the_run():
    seen = {kind for _, kind, _ in list_fields(RunConfig)}
    known, found = set(), [Settings]
    while found:
        for kind in found.pop().__subclasses__():
            found.append(kind)
            known |= {kind} if kind.__module__.startswith("telescope.config.") else set()
    assert known <= seen | {kind for one in seen for kind in one.__mro__}


TYPED = """
from dataclasses import dataclass
from typing import Any, NewType, Optional
from pydantic import AnyUrl, Json, PostgresDsn, RootModel, SecretBytes
from typing_extensions import TypeAliasType, TypedDict
from telescope.environments.base import SingleTurn

Name = NewType("Name", str)
Alias = TypeAliasType("Alias", str)

class Login(TypedDict):
    user: str
    tries: int

@dataclass
class Place:
    host: str = ""
    port: int = 0

class Typed(SingleTurn):
    url: Optional[AnyUrl] = None
    dsn: Optional[PostgresDsn] = None
    name: Name = Name("")
    alias: Alias = ""
    login: Optional[Login] = None
    place: Place = Place()
    data: bytes = b""
    root: RootModel[str] = RootModel[str]("")
    parsed: Optional[Json[Any]] = None
    hidden: Optional[SecretBytes] = None
    extra: dict[str, Any] = {}
    text: str = ""

    def prompts(self, split):
        return []
"""
TYPED_ENVIRON = {
    "PGURL": "postgres://me:hunter2Zebra@db.local/x", "PGJ": '{"password": "hunter2Zebra-quark"}', "PGPW": "hunter2Zebra-quark",
    "PORT": "5432",
}  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        "url=${oc.env:PGURL}", "dsn=${oc.env:PGURL}", "name=${oc.env:PGPW}", "alias=${oc.env:PGPW}",
        "login={user: '${oc.env:PGPW}', tries: 1}", "place={host: '${oc.env:PGPW}'}", "data=${oc.env:PGPW}",
        "root=${oc.env:PGPW}", "parsed=${oc.env:PGJ}", "hidden=${oc.env:PGPW}", "extra={a: {b: ['${oc.env:PGPW}']}}",
        "extra=${oc.env:PGJ}", 'extra="${oc.decode:${oc.env:PGJ}}"', 'extra="${oc.create:{a:${oc.env:PGPW}}}"',
        "text=['${oc.env:PGPW}']", 'text="${oc.decode:${oc.env:PGPW}}"',
    ],
)  # fmt: skip
def test_whatever_type_a_text_becomes_its_value_is_written_nowhere(tmp_path: Path, given: str):
    """It stays a reference, or the configuration is refused."""
    write(tmp_path / "plugins" / "environments" / "typed.py", TYPED)
    point = compose_one("env=[typed]", f"environments.typed.kwargs.{given}", config_dir=tmp_path, environ=TYPED_ENVIRON)
    told = sentences(point) + (dump_run(point.config) if point.config else "")
    assert "can't be imported" not in told
    assert "hunter2" not in told
    assert "oc.env:" in told or "must be" in told or "environments.typed" in sentences(point)


def test_numbers_within_records_are_resolved(tmp_path: Path):
    write(tmp_path / "plugins" / "environments" / "typed.py", TYPED)
    port = "'${oc.decode:${oc.env:PORT}}'"
    given = f"environments.typed.kwargs={{place: {{host: h, port: {port}}}, login: {{user: u, tries: {port}}}}}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PORT", "5432")
        point = compose_one("env=[typed]", given, config_dir=tmp_path, environ=TYPED_ENVIRON)
    assert not sentences(point)
    kwargs = point.config.environments["typed"].kwargs
    assert (kwargs["place"]["port"], kwargs["login"]["tries"]) == (5432, 5432)


def test_choices_numbers_paths_and_model_names_are_resolved_and_recorded(compose_leak, tmp_path, monkeypatch):
    environ = {"TONE": "loud", "N": "3", "PLACE": "/not/there", "HOME_OF_MINE": str(tmp_path), "MODEL": "tiny_turns"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = compose_leak(
        f"{KWARGS}.tone=${{oc.env:TONE}}",
        f"{KWARGS}.judge.tries='${{oc.decode:${{oc.env:N}}}}'",
        f"{KWARGS}.folder=${{oc.env:PLACE}}",
        f"{KWARGS}.note='${{oc.env:HOME_OF_MINE}}/data'",
        "model.name=${oc.env:MODEL}",
        environ=environ,
    ).config
    kwargs = config.environments["leak"].kwargs
    assert (kwargs["tone"], kwargs["judge"]["tries"], kwargs["folder"]) == ("loud", 3, "/not/there")
    assert (kwargs["note"], config.model.name) == (f"{tmp_path}/data", "tiny_turns")


def test_the_hash_does_not_follow_from_a_value(compose_leak):
    override = f"{KWARGS}.note=${{oc.env:PGPASSWORD}}"
    here, there = (compose_leak(override, environ={"PGPASSWORD": value}).config for value in ("one-value", "another-value"))
    assert config_hash(here) == config_hash(there)


def test_a_default_counts_where_the_variable_is_not_set(compose_leak):
    config = compose_leak(f"{KWARGS}.note='<${{oc.env:NOWHERE,a b}}>'", environ={}).config
    kept = config.environments["leak"].kwargs["note"]
    assert kept == "<${oc.env:NOWHERE,'a b'}>"
    assert (reveal(kept, {}), reveal(kept, {"NOWHERE": "here"})) == ("<a b>", "<here>")


def test_a_variable_in_free_text_that_is_not_set_is_refused_by_name(compose_leak):
    said = sentences(compose_leak(f"{KWARGS}.headers={{X: 'Bearer ${{oc.env:NOWHERE}}'}}"))
    assert f"{KWARGS}.headers.X refers to the environment variable NOWHERE, which is not set" in said


def test_a_node_that_lacks_a_variable_is_refused_by_name(compose_leak, monkeypatch):
    config = compose_leak(f"{KWARGS}.note=${{oc.env:PGPASSWORD}}").config
    plan = make_plan(config, (Host("here", cpus=2),))
    needs = {process.name: process.needs for process in plan.processes if process.needs}
    assert set(needs.values()) == {("PGPASSWORD",)}
    assert all(name.startswith("worker-") for name in needs)
    monkeypatch.delenv("PGPASSWORD", raising=False)
    assert "PGPASSWORD is not set on this host" in "\n".join(find_obstacles(config, plan, elsewhere=True))
    with pytest.raises(SecretMissing, match="PGPASSWORD is not set on this host"):
        make_child_environment({}, ("PGPASSWORD",))


def test_a_class_that_refuses_a_value_does_not_show_it(compose_leak):
    said = sentences(compose_leak(f"{KWARGS}.url=${{oc.env:PGPASSWORD}}"))
    assert "url=<redacted> is not a URL" in said


@pytest.mark.parametrize(
    ("override", "path"),
    [
        (f"{KWARGS}.note=sk-abcdefghijklmnop1234", f"{KWARGS}.note"),
        (f"{KWARGS}.headers={{Authorization: 'Bearer abcdefgh'}}", f"{KWARGS}.headers.Authorization"),
        (f"{KWARGS}.headers={{authtoken: my-own-words}}", f"{KWARGS}.headers.authtoken"),
        ("+cluster.env.MYSQL_PWD=my-own-words", "cluster.env.MYSQL_PWD"),
        ("+cluster.env.HERE='postgres://me:my-word@db/x'", "cluster.env.HERE"),
    ],
)
def test_a_literal_secret_is_warned_of_with_the_line_to_type(compose_leak, override, path):
    (warning,) = (said for said in compose_leak(override).warnings if "looks like a secret" in said)
    assert warning.startswith(f"{path} looks like a secret")
    assert warning.endswith(f"give {path}='${{oc.env:{path.rpartition('.')[2].upper()}}}'")
    assert "my-" not in warning
    assert "abcdefgh" not in warning


def test_ordinary_text_is_not_warned_of(compose_leak):
    given = (f"{KWARGS}.note=an ordinary sentence about authors", f"{KWARGS}.headers={{author: somebody-known}}")
    assert not [said for said in compose_leak(*given).warnings if "secret" in said]


def test_a_copy_for_mirrors_hides_literal_secrets_only():
    settings = {"judge_api_key": "abc", "list": [{"token": "x", "max_tokens": 3}], "other_key": "${oc.env:K}"}
    assert redacted(settings) == {
        "judge_api_key": "<redacted>",
        "list": [{"token": "<redacted>", "max_tokens": 3}],
        "other_key": "${oc.env:K}",
    }


def test_a_secret_is_scrubbed_without_the_white_space_around_it_and_whole_where_another_begins_it():
    secrets = secret_values({"A_TOKEN": "sk-abcdef\n", "B_TOKEN": "sk-abcdefghijk", "C_TOKEN": "short"})
    assert scrubbed("no such key: sk-abcdef", secrets) == "no such key: <redacted>"
    assert scrubbed("no such key: sk-abcdefghijk, short", secrets) == "no such key: <redacted>, short"
