"""An agent program as a user would have it: OpenAI's SDK, two sub-agents side by side, then a conclusion."""

import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

client = OpenAI()
task = sys.stdin.read()


def ask(*messages):
    done = client.chat.completions.create(model="policy", messages=list(messages))
    return done.choices[0].message.content


def user(text):
    return {"role": "user", "content": text}


with ThreadPoolExecutor(2) as pool:
    parts = list(pool.map(lambda word: ask(user(word)), task.split()))
plan = ask(user(task))
print(ask(user(task), {"role": "assistant", "content": plan}, user(" ".join(parts))))
