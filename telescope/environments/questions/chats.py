"""The messages of a prompt out of a row: a question's text, or a list of messages as chat data sets have them.

Refuses what a chat template could not write, with the place of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telescope.environments.base import Turn
from telescope.environments.questions.dataset import Row, get_field, get_text, get_value, is_chat
from telescope.environments.questions.rows import NoRows, find_place, show, write_text
from telescope.environments.validate import find_message_mistake


def read_turns(row: Row, path: str, instruction: str, system_prompt: str, *, with_answer: bool) -> tuple[Turn, ...]:
    """The opening messages of a row, () where it has no question.

    A text, or the last user's message of a list, is put into the instruction's {question}. `system_prompt` stands first, unless
    the list has a system message of its own. `with_answer`: the list's last message is the right answer, and is left out.
    Raises `NoRows`.
    """
    value = get_value(row, path)
    if is_chat(value):
        turns = [_read_message(row, path, at, message) for at, message in enumerate(value, 1)]
        turns = _check_end(row, path, turns, with_answer)
        last = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
        if last < 0 or not str(turns[last]["content"]).strip():
            return ()
        turns[last] = {**turns[last], "content": instruction.replace("{question}", turns[last]["content"])}
    else:
        asked = get_text(row, path).strip()
        if not asked:
            return ()
        turns = [{"role": "user", "content": instruction.replace("{question}", asked)}]
    if system_prompt and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    return tuple(turns)


def read_answers(row: Row, path: str) -> tuple[str, ...]:
    """The right answers of a row, any of which is right: the texts of a list, a list's last message, or one text. () where
    there is none. Raises `NoRows`."""
    value = get_value(row, path)
    if is_chat(value) and value[-1].get("role") != "assistant":
        raise NoRows(
            f"{find_place(row)}: the messages in column {path!r} end with one of {value[-1].get('role')!r}, not of the "
            "assistant, which would be the right answer: set answer_field to another column, or to null where there is none"
        )
    if is_chat(value):
        value = get_field(row, path)
    elif isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(dict.fromkeys(filter(None, map(str.strip, value))))
    else:
        value = get_text(row, path)
    answer = write_text(value).strip()
    return (answer,) if answer else ()


def _read_message(row: Row, path: str, at: int, message: Any) -> dict[str, Any]:
    """One message without the fields that are null: tables give each message the fields of all."""
    kept = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else message
    shared = isinstance(kept, Mapping) and "role" not in kept and {"from", "value"} <= kept.keys()
    mistake = "it has from and value, as ShareGPT has them; write role and content" if shared else find_message_mistake(kept)
    if not mistake and not isinstance(kept.get("content", ""), str):
        mistake = f"its content is {show(kept['content'])}, not a text"
    if mistake:
        raise NoRows(f"{find_place(row)}: message {at} in column {path!r}: {mistake}: mend the row or take it out")
    return dict(kept)


def _check_end(row: Row, path: str, turns: list[dict[str, Any]], with_answer: bool) -> list[dict[str, Any]]:
    """The messages without the right answer at their end."""
    if with_answer and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    if turns and turns[-1]["role"] == "assistant":
        raise NoRows(
            f"{find_place(row)}: the messages in column {path!r} end with one of the assistant, so nothing is asked: set "
            f"answer_field={path} too where that is the right answer, or end them with the user's"
        )
    return turns
