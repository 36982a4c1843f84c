"""What a worker refuses before it says hello, and the card by which workers are compared."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from telescope.config.models import EMBEDDED, end_ids
from telescope.config.run import RunConfig
from telescope.config.sections import EnvironmentEntry, ModelSettings
from telescope.environments.base import LazyPrompts, Prompt, SingleTurn
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.template import ChatTemplate
from telescope.workers.loading import EnvironmentBroken, load_environments, make_card, sample_prompts
from telescope.workers.prompt_lengths import leave_out_too_long
from telescope.workers.tokenizer import KNOWN, TokenizerError, find_known_class, load_template
from tests.workers.conftest import loaded

HEADER = "from telescope.environments.base import Prompt, Reward, SingleTurn\n"


def config_of(folder: Path | None = None, **environments: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "plugin_path": (str(folder),) if folder else (),
            "environments": {label: EnvironmentEntry(**entry) for label, entry in environments.items()},
            "algorithm": {"name": "grpo"},
            "backend": {"name": "fsdp"},
        },
        context={"resolved": True},  # as a process reads it: the launcher's own check has been passed
    )


def broken(folder: Path, name: str, code: str) -> str:
    """The sentence with which a file `name`.py is refused."""
    (folder / "environments").mkdir(exist_ok=True)
    (folder / "environments" / f"{name}.py").write_text(HEADER + code)
    with pytest.raises(EnvironmentBroken) as raised:
        load_environments(config_of(folder, mine={"name": name}))
    sentence = str(raised.value)
    assert "environments.mine" in sentence
    assert f"{name}.py" in sentence
    assert "\n" not in sentence
    return sentence


def test_all_entries_are_loaded_under_their_labels_with_their_settings() -> None:
    found = load_environments(
        config_of(easy={"name": "countdown"}, hard={"name": "countdown", "kwargs": {"num_numbers": 4, "num_train": 7}})
    )
    assert {label: one.card.split_sizes for label, one in found.items()} == {
        "easy": {"train": 100_000, "eval": 512},
        "hard": {"train": 7, "eval": 512},
    }
    assert found["hard"].card.name == "hard"
    assert len(found["hard"].prompts["train"][0].facts["numbers"]) == 4


def test_a_file_that_cannot_be_imported(tmp_path: Path) -> None:
    assert "ModuleNotFoundError: No module named 'nowhere_to_be_found'" in broken(
        tmp_path, "imports", "import nowhere_to_be_found\n"
    )
    assert "SyntaxError" in broken(tmp_path, "syntax", "class X(SingleTurn:\n")


def test_a_class_that_raises_while_it_makes_prompts(tmp_path: Path) -> None:
    code = "class T(SingleTurn):\n    def prompts(self, split):\n        return open('/no/such/file.jsonl').readlines()\n"
    assert "FileNotFoundError: [Errno 2]" in (sentence := broken(tmp_path, "raises", code))
    assert sentence.endswith("raises.py line 4)")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("x = 1\n", "defines no class derived from Environment"),
        ("class T(SingleTurn):\n    def prompts(self, split): return []\n", "it has no prompts in its train split"),
        (
            "class T(SingleTurn):\n    splits = ('eval',)\n    def prompts(self, split): return [1]\n",
            "no prompts in its train split",
        ),
        (
            "class T(SingleTurn):\n    def prompts(self, split): return ['text']\n    def reward(self): ...\n",
            "prompts('train') holds 'text', which is not a Prompt",
        ),
        (
            "class T(SingleTurn):\n    needed: int\n    def prompts(self, split): return []\n",
            "refuses its settings: needed: Field required",
        ),
        ("class T(SingleTurn):\n    pass\n", "T defines no prompts"),
    ],
)
def test_a_class_that_is_no_environment(tmp_path: Path, code: str, why: str) -> None:
    assert why in broken(tmp_path, f"case_{abs(hash(code))}", code)


def card(**settings: Any) -> Any:
    task = Countdown(**settings)
    return make_card("c", task, {split: task.prompts(split) for split in task.splits})


def test_cards_differ_with_settings_and_prompts_only() -> None:
    assert card() == card()
    assert card().digest == "f9ccc55e81ac84cb"
    assert len({card(**settings).digest for settings in ({}, {"seed": 1}, {"num_train": 5}, {"wrong_value_reward": 0.2})}) == 4


def test_a_card_reads_a_spread_of_a_large_split_and_all_of_a_small_one() -> None:
    made: list[int] = []

    def make(index: int) -> Prompt:
        made.append(index)
        return Prompt(())

    assert len(list(sample_prompts(LazyPrompts(256, make)))) == 256
    assert made == list(range(256))
    made.clear()
    list(sample_prompts(LazyPrompts(10**6, make)))
    assert (len(made), made[0], made[-1], len(set(made))) == (256, 0, 999_999, 256)


class Lengths(SingleTurn):
    lengths: tuple[int, ...]

    def prompts(self, split: str) -> Sequence[Prompt]:
        return [Prompt(({"role": "user", "content": "a" * length},)) for length in self.lengths]


def test_turns_that_the_template_refuses_are_refused_at_load(tmp_path: Path, template: ChatTemplate) -> None:
    class Odd(Lengths):
        def prompts(self, split: str) -> Sequence[Prompt]:
            return [Prompt(({"role": "user", "content": "a"},))]

    strict = ChatTemplate(template.tokenizer, [1], chat_template="{{ raise_exception('only one user') }}")
    with pytest.raises(EnvironmentBroken, match=r"environments.task: its prompts can't be rendered .*only one user"):
        leave_out_too_long(loaded(Odd(lengths=(1,))), strict, 10, 60)


def test_tokenizers_that_cannot_be_used_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"model\.name=mine: its tokenizer can't be loaded"):
        load_template(ModelSettings(name="mine"), tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_bytes((EMBEDDED / "tiny" / name).read_bytes())
    with pytest.raises(TokenizerError, match=r"has no chat template .* model\.chat_template"):
        load_template(ModelSettings(name="mine"), bare)
    given = load_template(ModelSettings(name="mine", chat_template="{{ messages[0].content }}!"), bare)
    assert given.text([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_template_that_writes_nothing_of_what_a_user_says_is_refused(tmp_path: Path) -> None:
    """Every prompt would be the same text, and the run would train on it without a word."""
    given = ModelSettings(name="mine", chat_template="{% if messages %}<|user|><|assistant|>{% endif %}")
    with pytest.raises(TokenizerError, match=r"^model\.chat_template writes nothing of what a user says"):
        load_template(given, folder_of(tmp_path))
    (tmp_path / "chat_template.jinja").write_text("<|assistant|>")
    with pytest.raises(TokenizerError, match=r"^model\.name=mine: its chat template writes nothing of what a user says"):
        load_template(ModelSettings(name="mine"), tmp_path)


def test_a_template_that_wants_another_dialogue_than_one_question_is_no_deaf_one(tmp_path: Path) -> None:
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{{ messages[1].content }}"
    template = load_template(ModelSettings(name="mine", chat_template=strict), folder_of(tmp_path))
    assert template.text([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]) == "hi"


def test_a_tokenizer_whose_files_are_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((EMBEDDED / "tiny" / "config.json").read_bytes())
    with pytest.raises(TokenizerError, match=r"model\.name=mine: (its tokenizer can't be loaded|.* has no tokenizer files)"):
        load_template(ModelSettings(name="mine", chat_template="{{ messages[0].content }}"), tmp_path)


def test_a_generation_config_that_is_no_json_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED / "tiny" / name).read_bytes())
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"the end tokens of .* can't be read .*generation_config\.json"):
        load_template(ModelSettings(name="mine", chat_template="{{ messages[0].content }}"), tmp_path)


def test_all_end_tokens_of_the_generation_config_end_an_answer(tmp_path: Path) -> None:
    for file in (EMBEDDED / "tiny").iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    assert load_template(ModelSettings(), tmp_path).end_texts == {1: "<eos>", 2: "<bos>"}


def test_the_example_of_the_docs_loads_and_scores(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "tally.py").write_text(text.split("```python\n")[1].split("```")[0])
    found = load_environments(config_of(tmp_path, tally={"name": "tally", "kwargs": {"numbers": [2, 3]}}))["tally"]
    assert found.card.split_sizes == {"train": 2, "eval": 2}
    reward = found.environment.reward(found.prompts["train"][1], "++")  # type: ignore[attr-defined]
    assert (reward.total, reward.metrics) == (0.5, {"exact": 0.0, "length": 2.0})


def test_a_folder_without_tokenizer_files_and_one_with_a_wrong_one_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((EMBEDDED / "tiny" / name).read_bytes())
    with pytest.raises(TokenizerError, match=rf"model\.name=mine: {tmp_path} has no tokenizer files"):
        load_template(ModelSettings(name="mine"), tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(TokenizerError, match=r"model\.name=mine: its tokenizer can't be loaded"):
        load_template(ModelSettings(name="mine"), tmp_path)


def test_prompts_of_no_tokens_are_refused(template: ChatTemplate) -> None:
    empty = ChatTemplate(template.tokenizer, [1], chat_template="{{ '' }}")
    with pytest.raises(EnvironmentBroken, match=r"environments.task: a train prompt is rendered to 0 tokens"):
        leave_out_too_long(loaded(Lengths(lengths=(3,))), empty, 10, 60)


FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def folder_of(tmp_path: Path, config: dict[str, object] | None = None, own: dict[str, object] | None = None) -> Path:
    """The embedded model's tokenizer, with other words in config.json and tokenizer_config.json."""
    for name, other in zip(FILES, (config, None, own, None), strict=True):
        text = (EMBEDDED / "tiny" / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(json.dumps(json.loads(text) | other) if other else text)
    return tmp_path


@pytest.mark.parametrize(("kind", "named"), sorted(KNOWN))
def test_a_tokenizer_whose_class_is_known_is_the_one_that_the_library_picks(tmp_path: Path, kind: str, named: str) -> None:
    from transformers import AutoTokenizer

    folder = folder_of(tmp_path, {"model_type": kind}, {"tokenizer_class": named})
    assert find_known_class(folder) == KNOWN[kind, named]
    ours, theirs = load_template(ModelSettings(name="mine"), folder).tokenizer, AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    turns = [{"role": "user", "content": "1 + 2 = 3"}]
    assert ours.apply_chat_template(turns, tokenize=True) == theirs.apply_chat_template(turns, tokenize=True)
    assert (ours.get_vocab(), ours.special_tokens_map) == (theirs.get_vocab(), theirs.special_tokens_map)


@pytest.mark.parametrize(
    ("config", "own"),
    [
        ({"auto_map": {"AutoConfig": "mine.Config"}}, None),
        (None, {"auto_map": {"AutoTokenizer": [None, "mine.Tokenizer"]}}),
        ({"model_type": "qwen2"}, None),  # the library knows that models of this kind name a wrong class
        (None, {"tokenizer_class": "LlamaTokenizer"}),
    ],
)
def test_where_a_tokenizers_files_leave_a_doubt_the_library_decides(
    tmp_path: Path, config: dict[str, object] | None, own: dict[str, object] | None
) -> None:
    assert find_known_class(folder_of(tmp_path)) == "PreTrainedTokenizerFast"
    assert find_known_class(folder_of(tmp_path, config, own)) is None


def test_a_worker_loads_the_tokenizer_of_the_embedded_model_without_torch() -> None:
    program = (
        "import sys, telescope.workers.main\n"
        "from telescope.config.models import EMBEDDED\n"
        "from telescope.config.sections import ModelSettings\n"
        "from telescope.workers.tokenizer import load_template\n"
        "print(len(load_template(ModelSettings(), EMBEDDED / 'tiny').opening([{'role': 'user', 'content': '1'}]).ids))\n"
        "print('torch' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert said.stdout.split() == ["3", "False"]


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "text_config"])
def test_worker_and_servers_read_the_same_end_tokens_wherever_they_stand(tmp_path: Path, where: str) -> None:
    """A folder without generation_config.json gave answers whose end token counted as text: half the reward was lost."""
    folder = Path(shutil.copytree(EMBEDDED / "tiny", tmp_path / "mine"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config.pop("eos_token_id", None)
    told = {"eos_token_id": [1, 2]}
    if where == "generation_config.json":
        (folder / where).write_text(json.dumps(told))
    (folder / "config.json").write_text(
        json.dumps(config | (told if where == "config.json" else {"text_config": told} if where == "text_config" else {}))
    )
    template = load_template(ModelSettings(name=str(folder)), folder)
    assert set(end_ids(folder)) == {1, 2} <= set(template.end_texts)
