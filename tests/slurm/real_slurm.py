"""A real Slurm on this one machine: munged, slurmctld, and several slurmd, each a node with fake GPUs.

Owns installing (Debian packages), starting and stopping it; everything lies in one folder, nothing in /etc. Needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_ports

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
INSTALL_S, START_S, CLIENT_S, STOP_S = 300.0, 60.0, 60.0, 30.0
POLL_S = 0.1
NODES = ("n1", "n2", "n3")
CPUS = 8
GPUS = 2

CONF = """
ClusterName=telescope
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
TaskPlugin=task/none
ProctrackType=proctrack/{proctrack}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_setup_env_fail
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=60
MinJobAge=3600
SlurmdTimeout=30
InactiveLimit=0
GresTypes=gpu
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=batch Nodes=ALL Default=YES PriorityTier=1 MaxTime=INFINITE State=UP OverSubscribe=NO
PartitionName=urgent Nodes=ALL PriorityTier=10 MaxTime=INFINITE State=UP OverSubscribe=NO PreemptMode=OFF
"""
NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} "
    "State=UNKNOWN"
)


class SlurmFailed(RuntimeError):
    """Slurm could not be installed or does not start; the text has the end of its log."""


def install() -> None:
    """Debian's packages, where they are missing. Their own services are not started."""
    if all(shutil.which(program) for program in ("slurmctld", "slurmd", "munged", "sbatch", "srun")):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise SlurmFailed(f"apt-get could not install {' '.join(PACKAGES)}: {done.stderr[-2000:]}")


@dataclass
class Slurm:
    """A cluster at work. `environment` is what every client needs."""

    folder: Path
    proctrack: str = "linuxproc"
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> Slurm:
        install()
        for attempt in range(3):  # somebody may have taken a port in between
            self.configure()
            try:
                self._start_daemons()
                return self
            except SlurmFailed:
                self.stop()
                if attempt == 2:
                    raise
        raise AssertionError("unreachable")

    def configure(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir(exist_ok=True)
        ports, host = free_ports(1 + len(NODES)), socket.gethostname().split(".")[0]
        nodes = [
            NODE.format(name=name, host=host, port=port, cpus=CPUS, gpus=GPUS)
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        conf = CONF.format(host=host, ports=ports, folder=self.folder, proctrack=self.proctrack)
        (self.folder / "slurm.conf").write_text("\n".join([conf, *nodes, ""]))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{GPUS - 1}]\n")
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        for index in range(GPUS):
            device = self.folder / f"gpu{index}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        key = self.folder / "munge.key"
        if not key.exists():
            key.touch(0o600)
            key.write_bytes(os.urandom(128))

    def _start_daemons(self) -> None:
        folder = self.folder
        munge_files = {name: f"{folder}/munge.{name}" for name in ("key", "socket", "pid", "seed", "log")}
        self._daemon(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={munge_files['key']}", f"--socket={munge_files['socket']}"),
            *(f"--pid-file={munge_files['pid']}", f"--seed-file={munge_files['seed']}", f"--log-file={munge_files['log']}"),
        )
        self._wait("munged", lambda: Path(munge_files["socket"]).exists())
        self._daemon("slurmctld", "slurmctld", "-D", "-i", "-c")
        for name in NODES:
            self.start_node(name)
        self._wait("slurmctld", lambda: self._idle() == len(NODES))

    def start_node(self, name: str) -> None:
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._daemon(name, "slurmd", "-D", "-N", name)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )

    def _wait(self, name: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            dead = [daemon for daemon, process in self.daemons.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                which = dead[0] if dead else name
                raise SlurmFailed(f"{which} does not start: {(self.folder / f'{which}.out').read_text()[-3000:]}")
            time.sleep(POLL_S)

    def _idle(self) -> int:
        found = self.client("sinfo", "-h", "-N", "-p", "batch", "-o", "%T", check=False)
        return found.split().count("idle")

    def client(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        """What a client prints, with a deadline."""
        done = subprocess.run(
            ["timeout", str(CLIENT_S), *command],
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=CLIENT_S + 10,
            check=False,
        )
        if check and done.returncode:
            raise SlurmFailed(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def sbatch(self, *options: str) -> str:
        """Submit what is not a run; its number. With no file named for its output it would leave one where we stand."""
        return self.client("sbatch", "--parsable", f"--output={self.folder}/job-%j.out", *options).strip()

    def job(self, job_id: str) -> dict[str, str]:
        """`scontrol show job`, as far as its `Key=value` words go."""
        words = self.client("scontrol", "show", "job", job_id, check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        """Empty the queue first: a slurmd that is stopped under its jobs leaves their step daemons behind."""
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            try:
                self.client("scancel", "--user=root", check=False)
                deadline = time.monotonic() + STOP_S
                while self.client("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
                    time.sleep(POLL_S)
            except subprocess.TimeoutExpired:
                pass  # it does not answer; it ends below
        for process in reversed(self.daemons.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.daemons.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)
        self.daemons.clear()
