"""The sections of a run's configuration whose owners live on floors 3 and 4. Pure data: each field says what it means.

Plug-ins (algorithm, backend, environment) keep their settings in their own files. A setting stands here only if code acts on
it.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator

from telescope.config.cluster import ClusterSettings as ClusterSettings
from telescope.config.eval_measure import EvalMeasure
from telescope.config.secrets import parse_reference
from telescope.config.words import typed
from telescope.flow.curriculum import PassRatePool, PassRateRules
from telescope.maths.support import Support
from telescope.settings import Settings

DEFAULT_PORT = 8100
Dtype = Literal["float32", "float16", "bfloat16"]


class LoraSettings(Settings):
    rank: int = Field(default=16, ge=1, le=512)
    """Rank of the update of each matrix."""
    alpha: int = Field(default=32, ge=1, le=65536)
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Last names of the matrices that get an adapter; each must be there in the model."""


class ModelSettings(Settings):
    name: str = "tiny"
    """Hugging Face id, a local folder, or an embedded model (`tiny`, `tiny_reverse`, `tiny_turns`)."""
    dtype: Dtype = "float32"
    """Precision of the master weights. bfloat16 and float16 are for model.lora, whose adapters are float32 all the same: in
    full training bfloat16 loses small steps, and float16 is refused."""
    chat_template: str | None = None
    """Jinja template in place of the tokenizer's, the text itself and no file's path; needed for base models without one."""
    enable_thinking: bool = False
    """Passed to the chat template."""
    trust_remote_code: bool = False
    """Run Python code that the model's repository ships. Opt-in."""
    lora: LoraSettings | None = None
    """Train LoRA adapters and push only these; the model itself is frozen. null: train all weights. `'model.lora={rank:16}'`"""

    @field_validator("chat_template")
    @classmethod
    def _template_is_jinja(cls, chat_template: str | None) -> str | None:
        if chat_template is not None and "{{" not in chat_template and "{%" not in chat_template:
            raise ValueError(
                f"model.chat_template={typed(chat_template)} is not a Jinja template, and every prompt would be this text: "
                "give the template itself, not a file's path (in a preset of your own as `chat_template: |` with the text "
                "below)"
            )
        return chat_template


class CurriculumPool(Settings):
    name: str = Field(min_length=1, max_length=100)
    """What the pool is called."""
    up_to: float = Field(gt=0, le=1)
    """Highest pass rate of its prompts; the lowest is that of the pool before."""
    share: float = Field(default=1.0, ge=0, le=1_000_000)
    """Weight of the pool among those that have a prompt."""


class CurriculumSettings(Settings):
    """Draw an environment's prompts by how often their samples passed. `curriculum: {}` takes the defaults."""

    pools: tuple[CurriculumPool, ...] = (
        CurriculumPool(name="hard", up_to=0.2, share=1.0),
        CurriculumPool(name="medium", up_to=0.8, share=3.0),
        CurriculumPool(name="easy", up_to=1.0, share=0.5),
    )
    """Pools in order of up_to, the last one's 1."""
    new_share: float = Field(default=3.0, gt=0, le=1_000_000)
    """Weight of the prompts that were never played, as long as there are any."""
    window: int = Field(default=2, ge=1, le=1_000)
    """Latest groups of a prompt whose mean is its pass rate."""
    pass_above: float = 0.0
    """A sample passes with a training reward above this."""

    @field_validator("pools")
    @classmethod
    def _pools_cover_every_rate(cls, pools: tuple[CurriculumPool, ...]) -> tuple[CurriculumPool, ...]:
        PassRateRules(tuple(PassRatePool(pool.name, pool.up_to, pool.share) for pool in pools))
        return pools


class EnvironmentEntry(Settings):
    name: str
    """Which environment: a file name in telescope/environments/tasks, or in a folder of your own."""
    weight: float = Field(default=1.0, gt=0)
    """Share of prompts drawn from this entry, relative to the other entries."""
    reward_min: float | None = Field(default=None, allow_inf_nan=False)
    """Lower end of the rewards expected of it, with reward_max for `rollout.normalize_rewards` and for charts; null: what the
    environment states, if it does."""
    reward_max: float | None = Field(default=None, allow_inf_nan=False)
    """Upper end of the rewards expected of it; likewise."""
    temperature: float | None = Field(default=None, ge=0.01, le=2)
    """Its rollouts are sampled, and trained, at this temperature; null: `rollout.temperature`."""
    max_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Sampled tokens of one turn of its rollouts, at most, not above `rollout.max_tokens`; null: that."""
    curriculum: CurriculumSettings | None = None
    """Draw prompts by their pass rates; null: each once an epoch."""
    set_up_timeout_s: float = Field(default=300.0, gt=0, le=1_000_000)
    """Seconds that its `set_up` may take in a worker, which ends after them."""
    tear_down_timeout_s: float = Field(default=10.0, gt=0, le=15)
    """Seconds that its `tear_down` may take. No more than 15: workers still there 20 s after a run's end are killed."""

    kwargs: dict[str, Any] = Field(default_factory=dict)
    """The environment's own typed settings; a typo is refused."""


NEVER_STALE = 1_000_000
"""Versions that no run reaches."""


class OrchestratorSettings(Settings):
    max_concurrent_prompts_per_server: int = Field(default=32, ge=1, le=1_000_000)
    """Prompt groups in flight a server: times group_size sample lanes with individual lanes, as many group lanes without."""
    prompts_batch_size_for_trainer: int = Field(default=16, ge=1, le=1_000_000)
    """Groups in a training batch (P)."""
    max_async_rollout: int = Field(default=2, ge=0, le=1_000_000)
    """Steps that inference may run ahead of training (M); 0 = synchronous."""
    take_order: Literal["completion", "admission"] = "completion"
    """Which complete groups may be trained now; rule 5 of docs/architecture.md gives the staleness bound of each."""
    max_off_policy_steps: int | None = Field(default=8, ge=1, le=NEVER_STALE)
    """Retire an incomplete group whose first dispatch is this many versions old (D); null: never."""
    discard_group_zero_advantage: bool = True
    """Drop groups whose rewards are all equal, and generate others for them. In the default run that costs a third more
    generation and gains 0.009 of reward a trained rollout."""
    enable_prompt_prefetch: bool = True
    """Workers make and tokenise the next prompts ahead, off their event loop."""
    prompt_prefetch_buffer_size: int = Field(default=24, ge=1, le=1_000)
    """Prompts made ready beyond the last one sent out."""
    enable_individual_sample_lanes: bool = True
    """A concurrency slot is a sample; false: a group."""
    free_lane_after_generation: bool = True
    """A sample's slot is free once its last token is there, before its reward. Needs individual lanes."""
    adaptive_concurrency: bool = False
    """Slots follow what the engines report: fewer where a KV cache is full, requests are thrown out of it or a queue lasts,
    more again (up to max_concurrent_prompts_per_server) where it is calm. Needs individual lanes."""
    kv_soft: float = Field(default=0.85, gt=0, le=1)
    """Share of a server's KV cache in use from which groups avoid it; with adaptive_concurrency none starts for it."""
    kv_hard: float = Field(default=0.95, gt=0, le=1)
    """Share from which adaptive_concurrency takes slots away, a quarter at once; must not be below kv_soft."""
    stuck_s: float = Field(default=600.0, gt=0, le=1_000_000)
    """A peer that beats without progress on its orders for this long is stuck: a server is started again, any other one ends
    the run with its name. Give it more than weight_sync.update_timeout_s, within which an update breaks off by itself."""
    silent_s: float = Field(default=15.0, ge=1, le=1_000_000)
    """A peer that is not heard for this long is lost; each is heard five times as often."""


class RolloutSettings(Settings):
    group_size: int = Field(default=8, ge=1, le=100_000)
    """Samples of one prompt (G)."""
    min_group_size: int = Field(default=2, ge=1, le=100_000)
    """Scored survivors below which a group fails."""
    temperature: float = Field(default=1.0, ge=0.01, le=2)
    """Logits are divided by it, in the sampler and in the trainer alike. Below 0.01 vLLM would take 0.01 all the same.
    `environments.<name>.temperature` sets it for one environment."""
    top_k: int | None = Field(default=None, ge=2, le=10_000_000)
    """Sample from so many of the likeliest tokens; the trainer normalises over the same rule's tokens. null: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the likeliest tokens with this share of the probability; likewise. null: all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Sample from tokens at least this times as likely as the likeliest; likewise."""
    stop: tuple[str, ...] = Field(default=(), max_length=16)
    """Texts behind which an answer ends. They belong to the answer: what was sampled is what is trained."""
    max_tokens: int = Field(default=3700, ge=1, le=100_000_000)
    """Sampled tokens of one turn, at most; `environments.<name>.max_tokens` may be lower."""
    timeout_s: float = Field(default=600.0, gt=0, le=1_000_000)
    """Time limit of one rollout, generation and reward together."""
    max_attempts: int = Field(default=3, ge=1, le=1_000_000)
    """Tries of one rollout that fails for infrastructure reasons, before it leaves its group."""
    retry_backoff_s: float = Field(default=1.0, ge=0, le=60)
    """Pause before the second try of such a rollout, doubled before each further one, 60 s at most; 0 = at once."""
    normalize_rewards: bool = False
    """Train on (r - reward_min) / (reward_max - reward_min) of each environment, so that several weigh alike."""

    @field_validator("stop")
    @classmethod
    def _stops_are_texts(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("rollout.stop has an empty text, behind which every answer would end at once: leave it out")
        return stop

    @property
    def support(self) -> Support:
        """The tokens that can be sampled."""
        return Support(self.top_k or 0, 1.0 if self.top_p is None else self.top_p, self.min_p)


ROW_TOKENS = 4096
"""Of a packed row on a CPU, where `trainer.seq_len` is auto."""


class TrainerSettings(Settings):
    learning_rate: float = Field(default=1e-6, ge=0)
    """AdamW's rate after warm-up; 0 leaves the weights as they are."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment."""
    grad_clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; larger ones are scaled down to it."""
    lr_scheduler: Literal["none", "constant", "linear", "cosine"] = "constant"
    """none: fixed; constant: warm-up, then flat; linear, cosine: warm-up, then down to min_lr_ratio at the last step."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """The first of n warm-up steps runs at 1/n of the rate, not at 0."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where linear and cosine end, as a share of learning_rate."""
    number_of_minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Optimiser updates a step: its groups are cut into so many parts, each with its own update. Schedules count steps."""
    keep_batches: int = Field(default=4, ge=0, le=1_000_000)
    """Latest steps with an update left out, as its gradient was no finite number, whose batches are kept (`kept/`) for
    `telescope replay RUN_DIR --step N`; 0: none. A step that ends in an error is kept too."""
    keep_batches_every: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Also keep the batch of every so many steps; null: no other."""
    max_broken_steps: int = Field(default=32, ge=1, le=1_000_000_000)
    """So many steps in a row without one finite gradient, in which no weight moves, end the run."""
    epochs_per_batch: int = Field(default=1, ge=1, le=1_000)
    """Times that a step runs over its batch, cut into minibatches anew each time. Schedules count steps."""
    seq_len: Literal["auto"] | Annotated[int, Field(ge=8, le=100_000_000)] = "auto"
    """Tokens of a packed row. auto: 4,096, and on a GPU of known memory as many as train fastest; in both cases
    inference.max_model_len at least; where longer samples are truncated, 4,096. Decided once, where the run starts."""
    overlong: Literal["refuse", "truncate"] = "refuse"
    """What becomes of a sample longer than seq_len. refuse: inference.max_model_len must not be above seq_len. truncate: its
    prompt and first sampled tokens are trained, up to seq_len, and `overlong_samples` and `truncated_tokens` count the rest."""
    pad_to_multiple_of: int = Field(default=64, ge=1, le=100_000_000)
    """Row lengths are rounded up to it, so that few shapes occur; must divide seq_len."""
    router_replay: bool = False
    """Train each token through the experts that its server recorded when it sampled, rather than those that the router chooses
    now. For models with experts; servers then record them, or refuse to start."""
    entropy_chunk_size: int = Field(default=1024, ge=1, le=100_000_000)
    """Tokens whose [chunk, vocabulary] logits exist at once when log-probs and entropy are computed."""
    peak_flops: float | None = Field(default=None, gt=0)
    """Operations a second that one card could do, for the metric `mfu`; null: by the card's name, and no mfu on a CPU."""

    @property
    def row_tokens(self) -> int:
        """`seq_len` as a number; where nobody has decided `auto` yet, what it is on a CPU for samples that fit."""
        return self.pad(ROW_TOKENS) if self.seq_len == "auto" else self.seq_len

    def pad(self, tokens: int) -> int:
        """The next length of a row that `pad_to_multiple_of` allows."""
        return -(-tokens // self.pad_to_multiple_of) * self.pad_to_multiple_of

    @property
    def updates_per_step(self) -> int:
        return self.number_of_minibatches * self.epochs_per_batch

    @field_validator("betas")
    @classmethod
    def _betas_are_decay_rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(
                f"trainer.betas={list(betas)} must lie in [0, 1): 1 would never forget, and usual are 0.9 and 0.999"
            )
        return betas


_LOOPBACK = ipaddress.IPv4Network("127.0.0.0/8")


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can reach `host`: localhost, an address in 127.0.0.0/8, ::1, or None, where a server binds by
    itself. Any other name is taken for an open one, whatever it begins with."""
    if host is None or host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address in _LOOPBACK if isinstance(address, ipaddress.IPv4Address) else address == ipaddress.IPv6Address("::1")


def find_url_mistake(url: str) -> str:
    """What can't stand in the address of a server, as the end of a sentence that does not show it; empty for none."""
    try:
        address = urlsplit(url)
    except ValueError:
        return "is not an address: what stands within [] is not an IPv6 one"
    if "@" in address.netloc:  # it would be written down with the settings
        return (
            "must hold no user name and no password: --key-env names the variable that holds a key (inference.remote.api_key)"
        )
    if not address.hostname:
        return "names no host: give one such as http://host:8000/v1"
    if address.query or address.fragment:  # keys, as some have them
        return "must end with its path: nothing behind ? or # has a place in it"
    return ""


class RemoteServer(Settings):
    """An OpenAI-compatible server of somebody else's, which evals play against."""

    url: str = Field(pattern=r"^https?://\S+$")
    """Where its API begins, e.g. `http://host:8000/v1`."""
    model: str = Field(min_length=1)
    """The model that it is asked for."""
    api_key: str | None = None
    """Sent as a bearer token, as a reference: `'${oc.env:OPENAI_API_KEY}'`; null: none."""
    send_seed: bool = True
    """Send each answer's seed, which most servers take; false: for those that refuse it."""

    @field_validator("url")
    @classmethod
    def _url_is_an_address_alone(cls, url: str) -> str:
        if mistake := find_url_mistake(url):
            raise ValueError(f"inference.remote.url {mistake}")
        return url

    @field_validator("api_key")
    @classmethod
    def _key_is_a_reference(cls, api_key: str | None) -> str | None:
        if api_key is not None and parse_reference(api_key) is None:
            raise ValueError(
                "inference.remote.api_key must not stand in a configuration: put it into an environment variable and give "
                "inference.remote.api_key='${oc.env:OPENAI_API_KEY}'"
            )
        return api_key


class InferenceSettings(Settings):
    engine: Literal["vllm", "fake", "remote"] = "vllm"
    """What generates: vLLM, or answers made up from the seed (for tests). `inference=vllm|fake` sets it. remote: a server of
    somebody else's, for evals alone (`telescope eval URL`)."""
    remote: RemoteServer | None = None
    """With engine=remote: which server, as `{url:…,model:…}`."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Precision served; auto: bfloat16 on a GPU, model.dtype on CPU."""
    host: str | None = None
    """Where the OpenAI-compatible HTTP binds; null = loopback. At any other address requests need a key (inference.api_key)."""
    base_port: int = Field(default=DEFAULT_PORT, ge=0, le=65535)
    """HTTP port of server 0, server i gets base_port + i. 8100, the default: or the next free one, where a second run on this
    machine holds it; another port: that one or none; 0: any free port. The run directory's servers/ says which it was."""
    api_key: str | None = None
    """What HTTP requests must give as a bearer token, as a reference: `'${oc.env:VLLM_API_KEY}'`. null: no check on loopback,
    elsewhere a key that the run makes, in `http.key` of its directory."""
    http: bool = True
    """Serve the OpenAI-compatible HTTP API beside the link."""
    http_sequences: int = Field(default=16, ge=1, le=1_000_000)
    """Answers to HTTP requests that a server samples at once, at most; further ones wait. Rollouts come first."""
    quantization: Literal["fp8"] | None = None
    """fp8: linear layers are served in 8-bit floats, quantised anew at each update. Needs a GPU that has them (Hopper)."""
    tool_call_parser: str | None = None
    """vLLM's parser of tool calls in HTTP chat answers, e.g. `hermes`; null: tool calls stay text."""
    reasoning_parser: str | None = None
    """vLLM's parser that splits reasoning off HTTP chat answers, e.g. `qwen3`; null: it stays in the text."""
    enable_tracing: bool = False
    """vLLM sends OpenTelemetry spans of every request to an OTLP receiver on this machine (http/protobuf)."""
    otlp_receiver_port: int = Field(default=4318, ge=1, le=65535)
    """Port of that receiver."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """GPUs (workers) of one server, each with its slice of every layer; must divide cluster.inference_num_workers."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory that a server takes for weights and KV cache."""
    sleep_while_training: Literal["off", "keep_weights", "drop_weights"] = "off"
    """A server gives its GPU's memory back while the trainer trains, for a GPU that both share. The KV cache goes; the weights
    go to host memory (keep_weights) or are dropped, as the next version brings all of them (drop_weights: faster, and no host
    memory). Needs orchestrator.max_async_rollout=0."""
    cpu_kv_cache_mb: int = Field(default=128, ge=8, le=100_000_000)
    """KV cache of a server on CPU."""
    max_model_len: int = Field(default=4096, ge=8, le=100_000_000)
    """Prompt and completion tokens of one sequence, at most."""
    scheduling_policy: Literal["priority", "fcfs"] = "priority"
    """Which waiting request runs next. priority: earlier turns first, requests of one turn as they came; fcfs: as they came."""
    max_num_seqs: int | None = Field(default=None, ge=1, le=1_000_000)
    """Sequences in one engine step, at most; null: the lanes of the server, up to 256 on a CPU and 1,024 on a GPU."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1, le=100_000_000)
    """Tokens in one engine step, at most; null: 8,192 on a CPU, the engine's own choice on a GPU."""
    cuda_graphs: Literal["auto", "full_decode", "default", "off"] = "auto"
    """full_decode: whole decode steps as graphs, nothing compiled, the fastest start; default: vLLM's own way (compiles);
    off: eager. auto: full_decode on a GPU. A CPU has none."""
    max_loras: int = Field(default=4, ge=2, le=64)
    """With model.lora: versions of the adapter in use at once. Where the next would be one too many, requests of the oldest are
    aborted and their rollouts tried again."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of prompts that begin alike, such as the samples of one group."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine (`AsyncEngineArgs`) by their names, e.g. `inference.vllm.max_num_partial_prefills=2`;
    those that a setting of Telescope's stands for are refused. Of a mapping, as compilation_config, the keys given count."""
    fake_token_s: float = Field(default=0.0, ge=0, le=1_000)
    """Seconds that the fake engine takes for a token."""
    fake_weights_s: float = Field(default=0.0, ge=0, le=1_000)
    """Seconds that the fake engine takes to prepare a version of the weights."""
    fake_kv_tokens: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Tokens that the fake engine says its KV cache holds; null: no end of them."""

    @property
    def makes_http_key(self) -> bool:
        """Whether the run makes the key of its HTTP: other machines can reach it, and the user gave none."""
        return self.http and self.engine == "vllm" and self.api_key is None and not is_loopback(self.host)

    @field_validator("api_key")
    @classmethod
    def _key_is_a_reference(cls, api_key: str | None) -> str | None:
        if api_key is not None and parse_reference(api_key) is None:
            raise ValueError(
                "inference.api_key must not stand in a configuration: put it into an environment variable and give "
                "inference.api_key='${oc.env:VLLM_API_KEY}'"
            )
        return api_key


class WeightSyncSettings(Settings):
    transport: str = "auto"
    """How weights travel: auto, nccl, gloo, cuda_ipc, shared_memory, disk, or a file of your own. auto: nccl between GPUs,
    cuda_ipc within one, shared_memory on CPUs and where only some GPUs are shared. gloo: nccl's way, on CPUs. disk: files in a
    folder that all hosts see."""
    transport_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of a transport of your own; a typo is refused."""
    mode: Literal["flattened_bucket", "per_tensor"] = "flattened_bucket"
    """Pieces of a broadcast: buckets of many tensors laid out flat, or every tensor for itself."""
    bucket_mb: int = Field(default=256, ge=1, le=100_000)
    """Size of a bucket, two of which are held on each side; a larger tensor is a bucket of its own."""
    dtype: Literal["auto", "master", "bfloat16", "float16", "float32"] = "auto"
    """Precision on the way. auto: on GPUs what is served, on CPUs master; master: as the trainer holds them (model.dtype)."""
    cpu_staging: bool = False
    """Gather each version into the host memory of trainer rank 0 and broadcast it from there: to send it again
    needs no other rank."""
    pin_memory: bool = True
    """Whether that memory is pinned, so that a GPU reads it without a copy in between."""
    compare: Literal["sample", "all"] = "sample"
    """Tensors whose checksums trainer and servers compare at each version, computed where they lie: 16 that change with
    the version, or all. Where weights go through host memory or files, all bytes are compared always."""
    dir: str | None = None
    """Folder for transport=disk, seen by all hosts; null: the run directory."""
    init_timeout_s: float = Field(default=60.0, gt=0, le=1_000_000)
    """Until the members of a new broadcast group have found each other; the missing are then named."""
    update_timeout_s: float = Field(default=300.0, gt=0, le=1_000_000)
    """Deadline of each of publish, prepare and commit."""
    max_retries: int = Field(default=3, ge=0, le=1_000)
    """How often an update that no server could take is tried again, the old version serving on, before the run ends; or, where
    others serve the version and only late ones can't take it, before these are started again."""
    in_flight: Literal["continue", "recompute", "abort"] = "continue"
    """What an update does to running generations: continue (no pause; they keep keys and values of the old weights), recompute
    (these are computed anew under the new weights), or abort and retry their rollouts."""
    reset_prefix_cache: bool = True
    """No request after an update uses prefixes cached under earlier weights."""
    staging: Literal["full", "host", "none"] = "full"
    """Where a server keeps a new version until it is served: full (a buffer on its GPU as large as the model, taken from
    inference.gpu_memory_utilization), host (pinned memory; longer pause), none (received in place while paused)."""

    @property
    def bucket_bytes(self) -> int:
        """Of a bucket of a broadcast, at most; 0: each tensor is one."""
        return self.bucket_mb * 2**20 if self.mode == "flattened_bucket" else 0


def _zero_if_false(value: Any) -> Any:
    return 0 if value is False else value


class CheckpointSettings(Settings):
    every: Annotated[int, BeforeValidator(_zero_if_false)] = Field(default=0, ge=0, le=1_000_000_000)
    """Save a checkpoint after each so many steps; false or 0: only as checkpoint.at_end says."""
    at_end: Literal["auto", "weights", "state", "none"] = "auto"
    """What is saved after the last step, and when the run is asked to stop. auto: with checkpoint.every what each checkpoint
    has; else the weights after the last step (a sweep keeps those of its best point, one in Slurm none), and at a stop the
    training state, or the weights where that does not fit. weights: the weights alone; state: all that a run goes on from;
    none: nothing."""
    save_training_state: bool = True
    """Save optimiser, random states and the orchestrator's part too, so that a run can be resumed exactly; false: weights
    alone, for export."""
    resume: bool | Annotated[int, Field(ge=1, le=1_000_000_000)] = False
    """Go on in the run directory of an earlier run: from its latest checkpoint with the training state (true), or that of a
    step."""
    dir: str | None = None
    """Folder of the checkpoints, an absolute path, seen by all trainer hosts and used by this run alone; null: `checkpoints` in
    the run directory."""
    keep_last: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """Delete older checkpoints than the last so many, once a newer one is complete; null: keep all."""
    keep_every: int | None = Field(default=None, ge=1, le=1_000_000_000)
    """With keep_last: checkpoints whose step it divides are never deleted."""
    keep_best: str | None = None
    """An eval and which way is better, `countdown:max` (its reward) or `countdown/pass@4:max`: a checkpoint is made at each
    step that it is due at too, and the one with the best score is never deleted."""
    async_save: bool = True
    """Training goes on as soon as the state is copied to host memory, while it is written from there; false: it waits until
    all is written, and no second copy is held."""
    timeout_s: float = Field(default=1800.0, gt=0, le=1_000_000)
    """Deadline of a save, from the order until all is written; one that takes longer has failed, and the run goes on."""
    verify: bool = True
    """Read all bytes of a checkpoint before it is used, and compare them with those that were written; false: only the files'
    lengths."""
    stop_timeout_s: float = Field(default=120.0, gt=0, le=1_000_000)
    """A run that is told to stop (Ctrl-C, SIGTERM, the walltime's warning) waits no longer than this for its step and its
    checkpoint. On Slurm cluster.slurm.stop_before_s must have room for it."""
    max_restarts: int = Field(default=3, ge=0, le=1_000_000)
    """On one host: attempts that begin by themselves after a part of the run has died (a trainer rank, a worker), each from a
    newer checkpoint than the last one did; 0: none."""

    @field_validator("keep_best")
    @classmethod
    def _keep_best_is_a_measure(cls, text: str | None) -> str | None:
        if text is not None:
            EvalMeasure.parse(text)
        return text

    @field_validator("dir")
    @classmethod
    def _dir_is_absolute(cls, directory: str | None) -> str | None:
        if directory is not None and not directory.startswith("/"):
            raise ValueError(
                f"checkpoint.dir={directory!r} must be an absolute path, as every host and every attempt must find the same "
                "folder; or leave it out for the run directory's"
            )
        return directory

    @property
    def best(self) -> EvalMeasure | None:
        """By which the best checkpoint is kept."""
        return None if self.keep_best is None else EvalMeasure.parse(self.keep_best)


class WireSettings(Settings):
    direct: bool = False
    """Workers bring their requests straight to the servers, with a grant of the orchestrator, instead of through it."""


class LoggingSettings(Settings):
    use_wandb: bool | None = None
    """Mirror the step metrics to W&B; null: where a login or WANDB_MODE exists."""
    wandb_project: str = "telescope"
    """W&B project that the run appears in."""
    wandb_run_name: str | None = None
    """null: the name of the run."""
    wandb_group: str | None = None
    """W&B group of the run; null: of a sweep's points the sweep's folder, else none."""
    wandb_tags: tuple[str, ...] = ("telescope",)
    """W&B tags of the run."""
    track_gpu_events: bool = True
    """Store each phase of each rank's train step (`spans` of the run directory); on a GPU by CUDA events, read once a step."""
    torch_memory_sample_interval_seconds: float = Field(default=0.1, ge=0, le=3_600)
    """How often a trainer rank reads its memory, without waiting for the device (`memory` of the run directory); 0: never."""
    torch_memory_drain_interval_seconds: float = Field(default=0.5, gt=0, le=3_600)
    """How often what was read is stored."""
    log_to_console: bool = False
    """Copy the components' logs to the launcher's stderr."""
    progress: bool = True
    """Show the progress line on the launcher's terminal."""
    verbose: bool = False
    """Show all of summary.json at the end of a run, not its main lines alone; `telescope run --verbose` sets it."""
    token_groups: int = Field(default=1, ge=0)
    """Groups of each step whose exact tokens are kept in the run directory, for `python -m telescope env audit`; 0: none."""
