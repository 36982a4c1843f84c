"""An agent program: finds a letter by asking a model, at whatever OpenAI-compatible address its environment names.

    OPENAI_BASE_URL=… OPENAI_API_KEY=… OPENAI_MODEL=… python agent.py [--sdk] <<< '{"ask": "a-g", "letter": "d", "guesses": 3}'

Prints its guesses as JSON. Needs nothing but Python, or with `--sdk` the package openai. It is run as it stands, by
`env=letter_agent`, and by any other server of that kind.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Callable

ANSWER_S = 3600.0  # an answer waits its turn behind those of other rollouts
Ask = Callable[[list[dict[str, str]]], str]


def ask_by_sdk(messages: list[dict[str, str]]) -> str:
    from openai import DefaultHttpxClient, OpenAI

    # No proxy of the environment's: the address is this machine's own.
    client = OpenAI(timeout=ANSWER_S, http_client=DefaultHttpxClient(trust_env=False))
    said = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)  # type: ignore[arg-type]
    return said.choices[0].message.content or ""


def ask_by_hand(messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    # No proxy of the environment's: the address is this machine's own.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"] or "")


def play(ask: Ask, opening: str, letter: str, most: int) -> list[str]:
    """All guesses; the last one is right, or none is left."""
    messages, guesses = [{"role": "user", "content": opening}], list[str]()
    while len(guesses) < most and letter not in guesses:
        said = ask(messages)
        guesses.append(said.strip())
        # The answer goes back as it came, so that the conversation goes on in its exact tokens.
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": answer_guess(guesses[-1], letter)}]
    return guesses


def answer_guess(guess: str, letter: str) -> str:
    if len(guess) != 1 or not "a" <= guess <= "z":
        return "one letter"
    return "later" if guess < letter else "earlier"


def main() -> None:
    task = json.load(sys.stdin)
    guesses = play(ask_by_sdk if "--sdk" in sys.argv else ask_by_hand, task["ask"], task["letter"], task["guesses"])
    sys.stdout.write(json.dumps(guesses) + "\n")


if __name__ == "__main__":
    main()
