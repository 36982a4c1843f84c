"""Checkpoints of a run on disk: one folder a step, whole or not there at all. Paths and files only, no torch.

    <dir>/step_00000010/            complete: trainer/ (the ranks' state), orchestrator/, complete.json
    <dir>/step_00000020.partial-<attempt>/   being written, or left by an attempt that died

Owns the names, the one rename that makes a checkpoint complete, which one is the latest, what is kept and what is swept, and
`resume.json`, by which the processes of an attempt learn where they begin. Refuses to know what the parts contain.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from telescope.records import Record
from telescope.runlog import digests
from telescope.runlog.files import DamagedFile, open_file, read_json
from telescope.runlog.layout import RunDirectory, write_atomically

log = logging.getLogger(__name__)

FORMAT = 1
TRAINER = "trainer"
ORCHESTRATOR = "orchestrator"
COMPLETE = "complete.json"
_STEP = re.compile(r"step_(\d{8,})")
_PARTIAL = re.compile(r"step_(\d{8,})\.partial-.+")
_REPLACED = re.compile(r"step_(\d{8,})\.replaced")
_ASIDE = re.compile(r"step_(\d{8,})\.before-.+")
_DELETED = ".deleted"
_OWNER = "owned-by-"


class CheckpointUnreadable(ValueError):
    """There is no such checkpoint, or it can't be read; the text names the file and the remedy."""


class Complete(Record):
    """What `complete.json` says: the checkpoint is whole, and of what."""

    format: int
    step: int
    version: int
    """Of the weights in it; the step's number."""
    run_id: str
    attempt: str
    """The attempt that wrote it."""
    config_hash: str
    world_size: int
    """Trainer ranks that wrote it; any number may read it."""
    training_state: bool
    """False: weights alone, no optimiser and no orchestrator's part."""
    nbytes: int
    """All files but complete.json."""
    seconds: float
    """From the order to the last byte of the slowest part."""
    written: str
    """ISO 8601, UTC."""
    files: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes of every file but this one, by its path in the folder; `finish` counts them. Empty in those of older versions."""
    digests: dict[str, str] = msgspec.field(default_factory=dict)
    """Of the same files (digests.py). Empty in those of older versions."""


class Resume(Record):
    """What `resume.json` says: this attempt begins after `step`, from the complete checkpoint in `folder`. Written by whoever
    starts the attempt, before its processes; without the file the run begins at step 1."""

    format: int
    step: int
    folder: str
    """Absolute."""
    training_state: bool = True


def root(run: RunDirectory, directory: str | None) -> Path:
    """Where checkpoints of the run lie; `directory` is `checkpoint.dir`."""
    return run.checkpoints if directory is None else Path(directory).absolute()


def trainer_part(folder: Path) -> Path:
    return folder / TRAINER


def orchestrator_part(folder: Path) -> Path:
    return folder / ORCHESTRATOR


def complete_folder(directory: Path, step: int) -> Path:
    return directory / f"step_{step:08d}"


def partial_folder(directory: Path, step: int, attempt: str) -> Path:
    return directory / f"step_{step:08d}.partial-{attempt}"


# ---- writing --------------------------------------------------------------------------------------------------------


def make_root(directory: Path) -> None:
    """Make the folder of the checkpoints and see that a file can be written there, before hours are trained that can't be
    saved. Raises `CheckpointUnreadable`."""
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(probe, "\n", mode=0o600)
        probe.unlink()
    except OSError as error:
        raise CheckpointUnreadable(
            f"checkpoint.dir={directory} can't be written: {error.strerror or error}; name a folder on a disk with room, or "
            "leave it out for the run directory's"
        ) from error


def begin(directory: Path, step: int, attempt: str) -> Path:
    """An empty partial folder with a place for each part. What an earlier try left is not used again: a rank that was too slow
    may still be writing there. It goes with the next sweep. Raises OSError."""
    folder = first = partial_folder(directory, step, attempt)
    for number in itertools.count(2):
        if not folder.exists():
            break
        folder = first.with_name(f"{first.name}.{number}")
    for part in (trainer_part(folder), orchestrator_part(folder)):
        part.mkdir(parents=True, mode=0o700)
    return folder


def finish(partial: Path, facts: Complete) -> Path:
    """Make the partial folder the complete checkpoint of its step; gives its new name. To be called when all parts are written.

    Every file and folder is on the disk before the one rename, and the rename before this returns. A complete checkpoint of the
    same step, as an earlier attempt may have left, is replaced. Raises OSError, and `msgspec.DecodeError` where a note of
    digests is none; the partial folder is then as it was or gone over whole. The files, their bytes and digests are put
    together here, whatever `facts` says of them.
    """
    files = _files_below(partial)
    found = digests.of_files(partial, list(files))
    facts = msgspec.structs.replace(facts, files=files, digests=found, nbytes=sum(files.values()))
    write_atomically(partial / COMPLETE, msgspec.json.format(msgspec.json.encode(facts)).decode() + "\n", mode=0o600)
    sync_below(partial)
    directory = partial.parent
    target, replaced = complete_folder(directory, facts.step), directory / f"step_{facts.step:08d}.replaced"
    if target.exists():
        _remove(replaced)
        os.rename(target, replaced)
    os.rename(partial, target)
    _sync(directory)
    _remove(replaced)
    return target


def discard(partial: Path) -> None:
    """Remove a partial folder whose save failed. What can't be removed stays for the next sweep."""
    _remove(partial)


def sync_below(folder: Path) -> None:
    """Force every file and folder below, and the folder itself, to the disk. Raises OSError."""
    for place, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(place) / name)
        _sync(Path(place))


def nbytes_below(folder: Path) -> int:
    return sum((Path(place) / name).stat().st_size for place, _, files in os.walk(folder) for name in files)


def _files_below(folder: Path) -> dict[str, int]:
    paths = (Path(place) / name for place, _, files in os.walk(folder) for name in files)
    return {str(path.relative_to(folder)): _nbytes(path) for path in sorted(paths) if path != folder / COMPLETE}


def _nbytes(path: Path) -> int:
    """Of the opened file: over NFS another host's file may be longer than a look at its name says."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size


def now() -> str:
    """For `Complete.written`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


# ---- reading --------------------------------------------------------------------------------------------------------


def steps(directory: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending; empty where there is no folder."""
    return sorted(step for step, folder in _matching(directory, _STEP) if (folder / COMPLETE).is_file())


def steps_with_state(directory: Path) -> list[int]:
    """Of `steps`, those that a run can go on from; one that can't be read is left out."""
    found = []
    for step in steps(directory):
        with contextlib.suppress(CheckpointUnreadable):
            if read(complete_folder(directory, step)).training_state:
                found.append(step)
    return found


def all_of(directory: Path, step: int) -> list[Path]:
    """Every complete checkpoint of `step`: the one that counts first, then those that went aside."""
    places = (folder for kind in (_STEP, _ASIDE) for other, folder in _matching(directory, kind) if other == step)
    return [folder for folder in places if (folder / COMPLETE).is_file()]


def latest(directory: Path) -> Path | None:
    """The complete checkpoint of the highest step, or None."""
    found = steps(directory)
    return complete_folder(directory, found[-1]) if found else None


def find(directory: Path, step: int | None = None) -> Path:
    """The complete checkpoint of `step`, or the latest. Raises `CheckpointUnreadable`, naming what there is."""
    there = steps(directory)
    if step is None and there:
        return complete_folder(directory, there[-1])
    if step is not None and step in there:
        return complete_folder(directory, step)
    wanted = "no complete checkpoint" if step is None else f"no complete checkpoint of step {step}"
    if there:
        raise CheckpointUnreadable(f"{directory} has {wanted}; there are those of the steps {', '.join(map(str, there))}")
    raise CheckpointUnreadable(
        f"{directory} has {wanted}, nor any other: a run makes one at its end, unless checkpoint.at_end=none, and on the way "
        "with checkpoint.every=10, say; it keeps them in checkpoint.dir"
    )


def read(folder: Path) -> Complete:
    """Raises `CheckpointUnreadable`."""
    file = folder / COMPLETE
    try:
        found = read_json(file, Complete)
    except OSError as error:
        raise CheckpointUnreadable(
            f"{file} can't be read ({error.strerror}): {folder} is not a complete checkpoint; name another step, or leave it "
            "out for the latest complete one"
        ) from error
    except DamagedFile as error:
        raise CheckpointUnreadable(f"{error}: remove the folder {folder} and resume from an earlier step") from error
    if found.format != FORMAT:
        raise CheckpointUnreadable(
            f"{file} is of format {found.format}, and this Telescope reads format {FORMAT}: resume with the one that wrote it"
        )
    return found


def read_whole(folder: Path, verify: bool = True) -> Complete:
    """As `read`, of a checkpoint that has all its files in full length: a part that is missing would go unnoticed by whoever
    reads the others. `verify`: and byte by byte as they were written. Raises `CheckpointUnreadable`."""
    facts = read(folder)
    try:
        there = _files_below(folder)
    except OSError as error:
        raise CheckpointUnreadable(f"{error.filename} can't be read ({error.strerror}): take another step") from error
    except DamagedFile as error:
        raise CheckpointUnreadable(f"{error}: remove the folder {folder} and take an earlier step") from error
    for name, nbytes in facts.files.items():
        if (found := there.get(name)) != nbytes:
            how = "is missing" if found is None else f"has {found} bytes of {nbytes}"
            raise CheckpointUnreadable(f"{folder / name} {how}: remove the folder {folder} and take an earlier step")
    if verify:
        _verify(folder, facts)
    return facts


def _verify(folder: Path, facts: Complete) -> None:
    if not facts.digests:
        log.warning(
            "%s has no digests, as an older version wrote it: only the lengths of its files are known to be right", folder
        )
        return
    try:
        other = digests.differing(folder, facts.digests)
    except OSError as error:
        raise CheckpointUnreadable(f"{error.filename} can't be read ({error.strerror}): take another step") from error
    if other is not None:
        raise CheckpointUnreadable(
            f"{folder / other} is damaged: its bytes are not those that were written. Remove the folder {folder} and take an "
            "earlier step; checkpoint.verify=false takes it as it is"
        )


def write_resume(run: RunDirectory, resume: Resume) -> None:
    write_atomically(run.resume_json, msgspec.json.format(msgspec.json.encode(resume)).decode() + "\n", mode=0o600)


def read_resume(run: RunDirectory) -> Resume | None:
    """None where the attempt begins at step 1. Raises `CheckpointUnreadable`."""
    try:
        return read_json(run.resume_json, Resume)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        raise CheckpointUnreadable(f"{error}: start the attempt again") from error


# ---- keeping and sweeping -------------------------------------------------------------------------------------------


def retain(
    directory: Path, keep_last: int | None, keep_every: int | None, protected: frozenset[int] = frozenset()
) -> list[int]:
    """Delete complete checkpoints that nothing keeps; gives their steps. To be called after `finish`.

    Kept are the last `keep_last` (all where it is None, and always the latest), every step that `keep_every` divides, and the
    `protected` ones.
    """
    there = steps(directory)
    if keep_last is None:
        return []
    kept = set(there[-max(keep_last, 1) :]) | {step for step in there if keep_every and step % keep_every == 0}
    gone = [step for step in there if step not in kept | protected]
    for step in gone:
        _delete(complete_folder(directory, step))
    return gone


def sweep(directory: Path) -> list[str]:
    """Remove what dead attempts left: partial folders and half deleted ones; gives their names. A checkpoint that was being
    replaced by one that never came is put back. Only one attempt of a run is alive: call it when yours begins."""
    gone = []
    for step, folder in _matching(directory, _REPLACED):
        target = complete_folder(directory, step)
        if target.exists():
            _remove(folder)
        else:
            os.rename(folder, target)
    for folder in (*(folder for _, folder in _matching(directory, _PARTIAL)), *directory.glob(f"step_*{_DELETED}")):
        gone.append(folder.name)
        _remove(folder)
    return sorted(gone)


def set_later_aside(directory: Path, step: int, attempt: str) -> list[int]:
    """Rename complete checkpoints after `step` to `step_….before-<attempt>`: an attempt that begins at an earlier step goes
    another way, and what came after it must not be taken for its latest. They are not deleted. Gives their steps."""
    later = [other for other in steps(directory) if other > step]
    for other in later:
        folder = complete_folder(directory, other)
        os.rename(folder, folder.with_name(f"{folder.name}.before-{attempt}"))
    if later:
        _sync(directory)
    return later


def of_another_run(directory: Path, run_id: str) -> str | None:
    """A sentence where the folder holds checkpoints of another run, which would be taken for this one's; else None."""
    for step in steps(directory):
        with contextlib.suppress(CheckpointUnreadable):
            facts = read(complete_folder(directory, step))
            if facts.run_id != run_id:
                return (
                    f"checkpoint.dir={directory} holds checkpoints of another run ({facts.run_id}): give each run a folder of "
                    "its own, or leave checkpoint.dir out for the run directory's"
                )
    return None


def claim(directory: Path, run_id: str) -> str | None:
    """Make a folder that was named by `checkpoint.dir` this run's, before there is a checkpoint that could say whose it is: two
    runs in one would replace and delete each other's. A sentence where it is another one's; of two that come at once, both
    get it. A folder that can't be written is for the first save to complain of."""
    if sentence := of_another_run(directory, run_id):
        return sentence
    own = directory / f"{_OWNER}{run_id}"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        was_ours = own.exists()
        own.touch(mode=0o600)
        others = sorted(path for path in directory.glob(f"{_OWNER}*") if path != own)
    except OSError as error:
        log.warning("%s can't be written: %s", directory, error)
        return None
    if not others:
        return None
    if not was_ours:
        own.unlink(missing_ok=True)
    return (
        f"checkpoint.dir={directory} is in use by another run ({others[0].name.removeprefix(_OWNER)}): give each run a folder "
        f"of its own, or leave checkpoint.dir out for the run directory's; if that run is gone for good, remove {others[0]}"
    )


def _matching(directory: Path, pattern: re.Pattern[str]) -> Iterator[tuple[int, Path]]:
    try:
        names = sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if (match := pattern.fullmatch(name)) and (directory / name).is_dir():
            yield int(match[1]), directory / name


def _delete(folder: Path) -> None:
    """Renamed first: a deletion cut short leaves nothing that looks complete."""
    doomed = folder.with_name(folder.name + _DELETED)
    _remove(doomed)
    os.rename(folder, doomed)
    _remove(doomed)


def _remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s can't be removed and stays for the next sweep: %s", folder, error)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
