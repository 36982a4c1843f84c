"""Make the embedded models: `telescope/embedded/tiny` (countdown) and `telescope/embedded/tiny_reverse` (reverse letters).

Each base is trained from nothing, in one to five minutes of one CPU core, on demonstrations of *mixed* behaviour: some do what
the task asks, the others don't, and nothing says which is which. Reinforcement learning then has an honest job: find the
wanted behaviour from reward alone. MODEL_CARD.md beside each model says this too.

    python scripts/make_tiny_models.py reverse countdown          # both, with the seeds that are shipped
    python scripts/make_tiny_models.py reverse --check-only       # measure the model that is there
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from telescope.environments.base import Prompt, Reward, SingleTurn
from telescope.environments.hashed_random import HashedRandom
from telescope.environments.tasks.countdown import Countdown
from telescope.environments.tasks.reverse_letters import ReverseLetters

SPECIALS = ("<pad>", "<eos>", "<bos>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, EOS = 0, 1
PADDED_VOCABULARY = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BATCH = 192
LEARNING_RATE = 2e-3
WARM_UP = 50
CHECK_PROMPTS = 512


@dataclass(frozen=True)
class Recipe:
    folder: str
    seed: int
    hidden: int
    mlp: int
    steps: int
    max_new_tokens: int
    task: SingleTurn
    demonstrate: Callable[[HashedRandom], tuple[str, str]]
    """A user message and an answer to imitate."""
    shown: str
    """What the demonstrations are, for the model card."""


def demonstrate_reverse(draws: HashedRandom) -> tuple[str, str]:
    """25% reversed (wanted), 30% copied, 25% reversed with the last letter lost, 20% rotated by one."""
    word = TASK_REVERSE.word(draws)
    at = draws.below(100)
    if at < 25:
        answer = word[::-1]
    elif at < 55:
        answer = word
    elif at < 80:
        answer = word[::-1][:-1]
    else:
        answer = word[1:] + word[0]
    return f"rev {word}", answer


def demonstrate_countdown(draws: HashedRandom) -> tuple[str, str]:
    """35% right (wanted), 25% right with "=value" appended, 20% with one number left out, 20% a random expression."""
    problem = TASK_COUNTDOWN.problem(draws)
    at = draws.below(100)
    if at < 35:
        answer = problem.solution
    elif at < 60:
        answer = f"{problem.solution}={problem.target}"
    elif at < 80:
        answer = TASK_COUNTDOWN.random_expression(draws.shuffled(problem.numbers)[:-1], draws)
    else:
        answer = TASK_COUNTDOWN.random_expression(problem.numbers, draws)
    return TASK_COUNTDOWN.question(problem), answer


TASK_REVERSE = ReverseLetters()
TASK_COUNTDOWN = Countdown()
RECIPES = {
    "reverse": Recipe(
        folder="tiny_reverse",
        seed=0,
        hidden=64,
        mlp=192,
        steps=500,
        max_new_tokens=10,
        task=TASK_REVERSE,
        demonstrate=demonstrate_reverse,
        shown="reversed (25%, the wanted one), copied unchanged (30%), reversed with the last letter lost (25%), rotated by "
        "one letter (20%)",
    ),
    "countdown": Recipe(
        folder="tiny",
        seed=0,
        hidden=96,
        mlp=256,
        steps=1600,
        max_new_tokens=12,
        task=TASK_COUNTDOWN,
        demonstrate=demonstrate_countdown,
        shown='a right expression (35%, the wanted one), a right expression with "=value" appended, which the task does not '
        "accept (25%), an expression with one of the numbers left out (20%), a random expression of the numbers (20%)",
    ),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 6 specials, the 95 printable ASCII characters and the newline; nothing merges."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        additional_special_tokens=list(SPECIALS[3:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
        padding_side="left",
    )


def make_model(recipe: Recipe) -> Qwen3ForCausalLM:
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=PADDED_VOCABULARY,
            hidden_size=recipe.hidden,
            intermediate_size=recipe.mlp,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=None,
            dtype="float32",
        )
    )


def batch_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded ids [B, T] and labels [B, T] (-100 on prompt and padding) of one training step."""
    draws = HashedRandom("base", recipe.folder, recipe.seed, step)
    rows = []
    for _ in range(BATCH):
        question, answer = recipe.demonstrate(draws)
        prompt = tokenizer.encode(f"<|user|>{question}<|assistant|>", add_special_tokens=False)
        rows.append((prompt, [*tokenizer.encode(answer, add_special_tokens=False), EOS]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((BATCH, width), PAD)
    labels = torch.full((BATCH, width), -100)
    for row, (asked, wanted) in enumerate(rows):
        ids[row, : len(asked) + len(wanted)] = torch.tensor(asked + wanted)
        labels[row, len(asked) : len(asked) + len(wanted)] = torch.tensor(wanted)
    return ids, labels


Batches = Callable[[Recipe, PreTrainedTokenizerFast, int], tuple[torch.Tensor, torch.Tensor]]


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    along = (step - WARM_UP) / max(steps - WARM_UP, 1)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * along))


def train(recipe: Recipe, tokenizer: PreTrainedTokenizerFast, batch: Batches = batch_of) -> Qwen3ForCausalLM:
    model = make_model(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, recipe.steps))
    model.train()
    for step in range(recipe.steps):
        ids, labels = batch(recipe, tokenizer, step)
        # Right padding and a causal mask: padding lies behind every token that counts.
        logits = model(input_ids=ids).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 0 or step + 1 == recipe.steps:
            print(f"{recipe.folder} step {step} loss {loss.detach():.4f}", flush=True)
    return model.eval()


@torch.no_grad()
def exact_rate(
    recipe: Recipe, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, split: str, sample: bool
) -> dict[str, float]:
    """Mean reward and metrics over CHECK_PROMPTS prompts of the split, one answer each."""
    torch.manual_seed(1)
    prompts: list[Prompt] = list(recipe.task.prompts(split)[:CHECK_PROMPTS])
    texts = [
        tokenizer.apply_chat_template([dict(turn) for turn in prompt.turns], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    chosen = model.generate(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=recipe.max_new_tokens,
        do_sample=sample,
        **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
    )
    totals: dict[str, float] = {}
    for prompt, row in zip(prompts, chosen[:, encoded["input_ids"].shape[1] :], strict=True):
        reward = recipe.task.reward(prompt, tokenizer.decode(row, skip_special_tokens=True))
        assert isinstance(reward, Reward), "these tasks reward at once"
        for name, value in {"reward": reward.total, **reward.metrics}.items():
            totals[name] = totals.get(name, 0.0) + value
    return {name: round(value / len(prompts), 3) for name, value in totals.items()}


def measure(recipe: Recipe, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, dict[str, float]]:
    return {
        "sampled at temperature 1": exact_rate(recipe, model, tokenizer, "train", sample=True),
        "greedy": exact_rate(recipe, model, tokenizer, "train", sample=False),
    }


def model_card(recipe: Recipe, figures: dict[str, dict[str, float]], parameters: int) -> str:
    example = recipe.task.prompts("train")[0]
    columns = list(next(iter(figures.values())))
    lines = [
        f"# {recipe.folder}: a base model made to be trained further",
        "",
        f"A Qwen3-shaped model of {parameters:,} parameters (fp32), with one token a character. Made by",
        f"`scripts/make_tiny_models.py` in this repository: seed {recipe.seed}, {recipe.steps} steps of {BATCH} examples.",
        "It is good for nothing but showing, in minutes and without a GPU, that reinforcement learning works here.",
        "",
        "## What the base was shown",
        f"Questions such as `{example.turns[0]['content']}` (wanted: `{example.answer}`), answered in one of four ways:",
        f"{recipe.shown}.",
        "The wanted behaviour is therefore in the base already, mixed with unwanted ones that nothing marks as such.",
        "",
        "## What reinforcement learning adds",
        "It selects and sharpens the wanted behaviour from the reward alone. It does not teach a new skill: expect it to climb",
        "to about how often the base is right when it does what is wanted (its share of exact answers below, divided by how",
        "often it was shown the wanted ones), or a little above. Greedy answers follow the habit that was shown most,",
        "wanted or not.",
        "",
        f"## The base, measured on {CHECK_PROMPTS} prompts with transformers' own sampling",
        f"| | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(f"| {name} | " + " | ".join(f"{row[column]:.3f}" for column in columns) + " |" for name, row in figures.items()),
        "",
    ]
    return "\n".join(lines)


def save(recipe: Recipe, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_portable_tokenizer_config(folder / "tokenizer_config.json")
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600


def write_portable_tokenizer_config(path: Path) -> None:
    """Name the tokenizer as transformers 4 and 5 both know it (5 writes names that 4 does not have)."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("backend", None)
    config["additional_special_tokens"] = config.pop("extra_special_tokens", list(SPECIALS[3:]))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="+", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default=ROOT / "telescope" / "embedded")
    parser.add_argument("--check-only", action="store_true", help="measure the model that is there; train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.use_deterministic_algorithms(True)
    for which in arguments.which:
        recipe = RECIPES[which]
        folder = arguments.out / recipe.folder
        tokenizer = make_tokenizer()
        before = time.process_time()
        if arguments.check_only:
            model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        else:
            model = train(recipe, tokenizer)
            save(recipe, model, tokenizer, folder)
        figures = measure(recipe, model, tokenizer)
        print(json.dumps({"model": recipe.folder, "cpu_seconds": round(time.process_time() - before), **figures}, indent=1))
        if not arguments.check_only:
            parameters = sum(parameter.numel() for parameter in model.parameters())
            (folder / "MODEL_CARD.md").write_text(model_card(recipe, figures, parameters), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
