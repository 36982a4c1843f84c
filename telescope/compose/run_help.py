"""The texts of `--help` and `--hydra-help`: what can be chosen, how to change a setting, where to read on. Composes nothing."""

from __future__ import annotations

import textwrap

from telescope.compose.options import GROUPS, NOT_COMPOSED, Places

_TEXT = """\
Trains a language model with reinforcement learning. Without arguments: the embedded Countdown model, on this machine.

    python -m telescope.run [group=option …] [section.setting=value …]

Groups (* is the default):
{groups}

Examples:
    python -m telescope.run algorithm=cispo algorithm.clip_high=0.3
    python -m telescope.run 'env=[countdown,reverse_letters]' environments.countdown.weight=2
    python -m telescope.run model=any model.name=/data/my-model number_of_steps=100
    python -m telescope.run experiment=reverse_letters seed=1 run_dir=/data/runs/first
    python -m telescope.run -m algorithm=grpo,rloo seed=0,1,2

Options:
    -h, --help          this text
    --cfg job           print the configuration and start nothing (--resolve: with interpolations followed;
                        --package NAME: this part alone). --info: how it comes about; --hydra-help says more
    --config-dir DIR    a folder of your own: presets in DIR/<group>/*.yaml,
                        Python files in DIR/plugins/{{algorithms,backends,environments,sandboxes,transports}}/*.py
    -m, --multirun      run every combination of values given as a,b,c, one after another (cluster=slurm: as an
                        array); all are checked before the first starts. hydra/sweeper=… chooses points itself
    --objective NAME    the number of summary.json that a sweep is about (default: reward_policy_last)
    --verbose           the whole summary at the end of a run, not its main lines alone
    --version           of Telescope and of Hydra
    --new-key FILE      make the key that hosts without a shared folder know each other by (cluster.key_file)

Every setting with its default and meaning: docs/settings/. Top level and sections:
{sections}.
Exit codes: 0 done · 1 wrong configuration, or an error that you have to mend · 2 wrong usage ·
    70 a part failed for good · 75 stopped in good order, by Ctrl-C or before its
    walltime: go on with `telescope runs resume` · 129, 130, 143 interrupted
"""
_DEFAULTS = {
    "algorithm": "grpo",
    "backend": "fsdp",
    "inference": "vllm",
    "env": "countdown",
    "cluster": "local",
    "model": "tiny",
    "logging": "default",
}


INSTEAD = {
    "hydra.launcher": "Telescope launches its runs itself: leave it out, and type cluster=slurm to submit one to Slurm "
    "(cluster.slurm.partition=… and so on; with -m an array)",
    "hydra.sweeper": "a sweeper chooses the points of a sweep: add -m (and hydra/sweeper=…)",
    "hydra.run": "run_dir=… names the run's directory",
    "hydra.sweep": "run_dir=… names the sweep's directory",
    "hydra.searchpath": "use --config-dir to add a folder of your own",
    "hydra.job.name": "name=… names the run",
    "hydra.verbose": "debug=true logs in more detail",
}
"""What to type in place of settings of Hydra's own."""
OTHER_SETTINGS = "Hydra only composes here, so its own settings act on nothing, but for hydra/sweeper with -m; leave it out"
_HYDRA_TEXT = """\
Telescope composes its configuration with Hydra {version}, from the files in {conf}.

Options of Hydra that work here:
    --cfg job|hydra|all         -c   print the run's configuration, Hydra's own, or both, and start nothing
    --package NAME              -p   with --cfg: this part alone, e.g. --package trainer
    --resolve                        with --cfg job: with interpolations followed
    --info [TOPIC]              -i   how the configuration comes about; TOPIC is all, config, defaults, defaults-tree,
                                     plugins or searchpath
    --config-dir DIR            -cd  a folder of your own
    --multirun                  -m   a run for every combination of values; hydra/sweeper=… chooses points itself
    --hydra-help, --version, --help

In place of what else you may know:
{instead}
    --config-name, --config-path     experiment=…, a file of your own below --config-dir
    --experimental-rerun             telescope runs resume RUN_DIR
    --shell-completion               telescope completion bash|zsh|fish

More: docs/hydra.md.
"""


def hydra_help_text(places: Places, version: str) -> str:
    """What of Hydra works here, and what to type in place of the rest."""
    instead = "\n".join(
        line
        for name, said in INSTEAD.items()
        for line in textwrap.wrap(f"{name:<32} {said}", 110, initial_indent="    ", subsequent_indent=" " * 37)
    )
    return _HYDRA_TEXT.format(version=version, conf=places.conf.resolve(), instead=instead)


def help_text(places: Places) -> str:
    """The whole text, options as found in the folders now."""
    from telescope.config.run import RunConfig

    names = ", ".join(name for name in RunConfig.model_fields if name not in NOT_COMPOSED)
    sections = textwrap.fill(names, width=110, initial_indent="    ", subsequent_indent="    ")
    return _TEXT.format(groups="\n".join(_line(group, places.options(group)) for group in GROUPS), sections=sections)


def _line(group: str, options: list[str]) -> str:
    marked = [f"{option}*" if option == _DEFAULTS.get(group) else option for option in options]
    return f"    {group:<11} {'  '.join(marked)}"
