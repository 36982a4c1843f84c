"""The mutants: small mistakes in the product, each of which the ordinary tests must notice. Data alone.

A mutant names a function by the end of its dotted name (`Slots.has_room`), so that a file that moves needs no change here.
Where several functions have that name, the one that holds `old` is meant. `old` stands exactly once in it; spaces and line
breaks count as equal. `nearest` are the test files that are asked, the cheapest that should notice.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    name: str
    """What goes wrong, in words; also the name on the command line."""
    where: str
    old: str
    new: str
    nearest: tuple[str, ...]


MUTANTS = (
    Mutant(
        "admission: one group more than the bound is admitted",
        where="Slots.has_room",
        old="alive < self._limit",
        new="alive <= self._limit",
        nearest=("tests/flow/test_core.py",),
    ),
    Mutant(
        "batches: discards of a batch are counted again in the next",
        where="BatchBuilder.enter",
        old="self._discarded, []",
        new="self._discarded, list(self._discarded)",
        nearest=("tests/flow/test_runs.py",),
    ),
    Mutant(
        "placement: a server one version too old is taken",
        where="Placement._takes",
        old="known.version >= group.v_start",
        new="known.version + 1 >= group.v_start",
        nearest=("tests/flow/test_core.py",),
    ),
    Mutant(
        "placement: a sticky server is kept though older than the group's first version",
        where="Placement._choose",
        old="known.version < v_start or",
        new="",
        nearest=("tests/flow/test_runs.py",),
    ),
    Mutant(
        "aggregation: sequence means are divided by groups instead of sequences",
        where="aggregate",
        old="denominators.sequences",
        new="denominators.groups",
        nearest=("tests/digits/test_losses.py",),
    ),
    Mutant(
        "GSPO: the sequence ratio has no gradient",
        where="GSPO.token_losses",
        old="means.exp()",
        new="means.exp().detach()",
        nearest=("tests/digits/test_losses.py",),
    ),
    Mutant(
        "relay: a peer may abort another's request",
        where="Relay.abort",
        old="request.asked.peer != peer",
        new="not peer",
        nearest=("tests/orchestrator/test_wrong_messages.py",),
    ),
    Mutant(
        "weight updates: where all servers are unfit, all are fenced instead of the update failing",
        where="WeightUpdate._find_unfit",
        old="if len(unfit) < len(self.servers) or self.others_held else in_the_way",
        new="",
        nearest=("tests/orchestrator/test_weight_update.py",),
    ),
    Mutant(
        "wire: an answered order's credit is not returned",
        where="MessageChannel._settle",
        old="question.kind, -1",
        new="question.kind, 0",
        nearest=("tests/wire/test_session.py",),
    ),
    Mutant(
        "play: every turn of a rollout has the same seed",
        where="make_turn_seed",
        old="turn == 0",
        new="turn >= 0",
        nearest=("tests/workers/test_play.py",),
    ),
    Mutant(
        "chat: the end token is missing from the history's text",
        where="TokenDialogue._commit",
        old="answer + self._end_text",
        new="answer",
        nearest=("tests/environments/test_chat.py",),
    ),
    Mutant(
        "optimisers: norms are given weight decay",
        where="make",
        old='"weight_decay": 0.0',
        new='"weight_decay": trainer.weight_decay',
        nearest=("tests/backends/test_fsdp.py",),
    ),
    Mutant(
        "restarts: no wait between restarts",
        where="RestartBudget.spend",
        old="len(spent) == 1",
        new="len(spent) >= 1",
        nearest=("tests/process/test_server_restarts.py",),
    ),
    Mutant(
        "trainer: steps out of order are accepted",
        where="TrainerService._train",
        old="order.step != self._step + 1",
        new="order.step < 0",
        nearest=("tests/trainer/test_process.py",),
    ),
    Mutant(
        "batches: groups are dealt to minibatches unshuffled",
        where="_shuffle_groups",
        old="recipe.minibatches == 1",
        new="recipe.minibatches >= 1",
        nearest=("tests/orchestrator/test_batch.py",),
    ),
    Mutant(
        "packing: a missing log-prob counts as a number",
        where="_place",
        old="if missing:",
        new="if missing < 0:",
        nearest=("tests/digits/test_packing.py",),
    ),
    Mutant(
        "packing: position ids run on across samples",
        where="_padding",
        old="- np.repeat(boundaries[:-1], sizes)",
        new="",
        nearest=("tests/digits/test_packing.py",),
    ),
    Mutant(
        "versions: a new request keeps the old weight version",
        where="TokenVersions.commit_is_sent",
        old="self.current = version",
        new="self.current = min(self.current, version)",
        nearest=("tests/inference/test_versions.py",),
    ),
    Mutant(
        "adaptive concurrency: a second cut follows at once",
        where="ServerLanes.hear",
        old="now >= self._next_cut",
        new="now >= 0",
        nearest=("tests/flow/test_placement.py",),
    ),
    Mutant(
        "record: tokens_per_s is tokens a step",
        where="Recorder.record_step",
        old="count / max(seconds, 1e-9)",
        new="float(count)",
        nearest=("tests/orchestrator/test_recorder.py",),
    ),
    Mutant(
        "progress line: lag shows the queue",
        where="format_status",
        old='"lag", "lag',
        new='"queue", "lag',
        nearest=("tests/process/test_progress.py",),
    ),
    Mutant(
        "runs list: a lost run is called running",
        where="_state_of_files",
        old='else "lost"',
        new='else "running"',
        nearest=("tests/cli/test_runs.py",),
    ),
)
