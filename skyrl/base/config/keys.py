"""The keys of a server's configuration: each with its type, its default and its bounds, and what follows from them.

`readable_url` checks a database URL that an operator wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Literal, get_args

from pydantic import Field, PrivateAttr, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from skyrl.base.config import skyrl_keys
from skyrl.base.config.backend import LAST_PORT, BackendConfig, Strict, parse_backend_config
from skyrl.base.config.base_models import TRAIN_AND_SAMPLE, BaseModelKeys, BaseModelSlot, Modes, Use

BackendName = Literal["fsdp", "none"]
TINY = "tiny"
"""The name of the model that ships with skyrl. Write `./tiny` for a directory of that name."""
MIN_KEY = 16
STOP_GRACE_S = 20.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKENDS: tuple[str, ...] = ("fsdp", "none")
NO_VALUE = ("none", "null")
"""What operators write, in any case, for a key that shall have no value: flags, variables and TOML have no null."""
STORE_SCHEMES = ("file", "s3", "gs", "az")


class LossesConfig(Strict):
    """`stable_reinforce` has no published formula. It is refused, or computed as cispo; sessions and metrics then say
    so."""

    stable_reinforce: Literal["refuse", "cispo"] = "refuse"

    @property
    def undecided(self) -> str | None:
        """What an operator should know who has not set `stable_reinforce`, in one sentence; None if it is set."""
        if "stable_reinforce" in self.model_fields_set:
            return None
        return (
            "the loss stable_reinforce, the default of several cookbook recipes, is refused; clients send loss_fn=ppo, "
            'or set losses.stable_reinforce = "cispo" to compute cispo under that name ("refuse" ends this message)'
        )


class AgentsConfig(Strict):
    """Bounds of agent sessions. A session may ask for less than `turns`, `tokens`, `seconds` and `idle_s`, and has them
    if it asks for nothing."""

    turns: int = Field(2_000, ge=1)
    tokens: int = Field(10_000_000, ge=1, lt=2**53)
    """Of a session: those sampled, and those of its prompts, each counted once."""
    seconds: float = Field(86_400.0, gt=0)
    bytes: int = Field(256 * 2**20, ge=2**20)
    """Of the messages and tokens of a session: messages may hold more than the model sees of them."""
    idle_s: float = Field(3_600.0, gt=0)
    """A session without a request for this long ends."""
    sessions: int = Field(10_000, ge=1)
    """Of each tenant, those that have not ended."""
    retention_s: float = Field(7 * 86_400.0, gt=0)
    """How long a session and its trajectory can be read after its end."""


def ray_cluster(address: str) -> str:
    """`auto`, `local` or HOST:PORT, as it is. Raises ValueError for anything else."""
    if address in ("auto", "local"):
        return address
    if address.startswith("ray://"):
        raise ValueError(
            f"{address!r} is the address of a Ray client server; give HOST:PORT of the cluster's head (by default "
            "port 6379), and start this server on a node of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= LAST_PORT:
        raise ValueError(f"{address!r} is not auto, local or HOST:PORT")
    return address


class ServerKeys(BaseSettings):
    """All keys of `skyrl serve`, each checked for itself. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix="SKYRL_", extra="forbid", frozen=True)

    base_model: str | None = None
    """Directory or hub name of the base model; None or "tiny" serves the tiny model that ships with skyrl."""
    served_model_names: tuple[str, ...] = ()
    """Names that clients may use for the base model; empty means `base_model` (`tiny` for the tiny model)."""
    tokenizer_id: str | None = None
    """The name by which clients load the tokenizer, if they cannot load it by the base model's name: a hub name, or a
    directory on their machines."""
    uses: tuple[Use, ...] = TRAIN_AND_SAMPLE
    """What the base model is for. `sample` alone is for entries of `base_models`."""
    devices: tuple[str, ...] | None = None
    """The GPUs of the trainer and of the vLLMs, as in CUDA_VISIBLE_DEVICES; None means all of this machine. Has no
    effect on a CPU or on a Ray cluster."""
    base_models: tuple[BaseModelKeys, ...] = ()
    """Several base models, in place of `base_model`: one entry for each, with keys of its own (`BaseModelKeys`)."""
    losses: LossesConfig = Field(default_factory=LossesConfig)  # pyright: ignore[reportArgumentType]
    backend: BackendName = "fsdp"
    backend_config: BackendConfig = Field(default_factory=BackendConfig)
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    api_processes: int = Field(1, ge=1, le=64)
    """How many processes answer requests and forward samples, all at one address. More than one needs PostgreSQL."""
    api_keys: Literal["open", "managed"] = "open"
    """`open`: any API key is accepted, and each key is a tenant. `managed`: only keys from `skyrl keys create` are."""
    allow_remote: bool = False
    """Allow a `host` that other machines can reach although `api_keys` is `open`, so that any API key is accepted."""
    jwt_auth: bool = False
    """Tell clients to exchange their API key for tokens that expire, so that they need not send the key every time."""
    ray_address: str | None = None
    """The Ray cluster that runs the vLLMs and the trainer's ranks: `local` starts one on this machine, `auto` is the
    cluster of which this machine is a node, HOST:PORT is that of this address. None: Ray is used only if the trainer
    has several ranks (as `local`) or several nodes (as `auto`)."""
    state_dir: Path = Path("~/.local/share/skyrl")
    database_url: str | None = None
    """SQLAlchemy URL; None means a SQLite file in `state_dir`."""
    checkpoint_store: str | None = None
    """Where checkpoints are stored: file:///dir, s3://bucket/prefix, gs://... or az://...; None means `state_dir`."""
    checkpoint_store_options: dict[str, str] = Field(default_factory=dict)
    """Options of the object store (endpoint, region...). Better leave credentials to the environment."""
    presigned_downloads: bool = True
    """Give clients signed URLs of the object store. Otherwise this server streams exported files to them."""
    public_url: str | None = None
    """How download links begin; None means with the address that the client has used."""
    external_inference_url: str | None = None
    """Base URL of a vLLM-compatible server that somebody else runs. Samples go there. Without one, a gateway
    (`--backend none`) uses the vLLMs of the server that trains on the same database, and needs `inference_api_key`."""
    external_inference_api_key: str | None = None
    """Sent to that server as a bearer token."""
    external_inference_priority: bool = False
    """Send priorities, so that tenants share that server fairly. It needs vLLM's `--scheduling-policy priority`."""
    inference_api_key: str | None = None
    """The key of this server's vLLMs and of the router in front of them; None draws one at each start. Gateways that
    use them need the same key. It opens everything in the vLLMs, so keep it as secret as the database's password."""
    inference_host: str = "127.0.0.1"
    """The address at which gateways on other hosts reach the router in front of this server's vLLMs: one of this
    machine's own, not 0.0.0.0. It needs `inference_api_key`."""
    forwarding_inference_max_connections: int | None = Field(None, ge=1)
    """How many requests each API process has at the inference server at a time. None: for vLLMs that this server runs,
    what they can take on (`skyrl.sampling.slots`); for others any number."""
    forwarding_deadline_s: float = Field(600.0, gt=0)
    """How long one sample may take from its first try, including retries and restarts of vLLM."""
    sample_use_retrieve_futures: bool = False
    """Tell clients to wait for all samples of a sampling client with one long poll, instead of one for each sample."""
    openai_grammars: bool = False
    """Accept regular expressions and grammars for answers to OpenAI clients. Some keep vLLM busy for seconds at every
    token, and all tenants wait; JSON schemas without patterns do not."""
    forwarding_zero_fill_logprobs: bool = False
    """Compatibility mode: missing logprobs of sampled tokens become 0.0 with a warning, and do not fail the sample."""
    max_pending_samples: int = Field(20_000, ge=1)
    max_pending_sample_bytes: int = Field(512 * 2**20, ge=2**20)
    max_stored_image_bytes: int = Field(8 * 2**30, ge=2**20)
    """Files of images in the database, each once for a tenant: those of unfinished requests and of the last minutes."""
    max_body_bytes: int = Field(256 * 2**20, ge=2**20, le=400 * 2**20)
    """No database takes much larger ones."""
    session_timeout_s: float = Field(300.0, gt=0)
    """A session without a heartbeat for this long is closed: its models are unloaded and its requests fail."""
    missing_seq_id_timeout_s: float = Field(60.0, gt=0)
    """How long commands wait for an earlier number of their model that has not arrived, before they fail."""
    result_retention_s: float = Field(3600.0, gt=0)
    """How long a client can retrieve the outcome of a request after it has ended."""
    agents: AgentsConfig = Field(default_factory=AgentsConfig)  # pyright: ignore[reportArgumentType]
    quota_requests_in_flight: int | None = Field(None, ge=1, lt=2**63)
    """Samples in flight of each tenant; None means no quota. `skyrl quotas` makes exceptions for single tenants."""
    quota_tokens_per_minute: int | None = Field(None, ge=1, lt=2**63)
    """Tokens that each tenant may sample and train on in a minute. Requests beyond it wait."""
    quota_models: int | None = Field(None, ge=0, lt=2**63)
    """Models of each tenant in training."""
    quota_stored_bytes: int | None = Field(None, ge=0, lt=2**63)
    """Stored bytes of each tenant: checkpoints, and weights saved for sampling without a name."""
    max_sessions_per_tenant: int = Field(10_000, ge=1, lt=2**63)
    """Active sessions of one tenant. No quota can raise this bound or the next two."""
    max_sampling_sessions_per_tenant: int = Field(100_000, ge=1, lt=2**63)
    """Sampling sessions in one tenant's active sessions. Each sampling client and each unnamed save makes one."""
    max_models_per_tenant: int = Field(1_000, ge=1, lt=2**63)
    """Models of one tenant in training."""
    unnamed_saves_idle_s: float = Field(6 * 3600.0, ge=300)
    """Weights saved for sampling without a name are deleted when nobody has sampled from them for this long. The four
    newest versions of a model are kept. API processes write once a minute which weights were sampled from."""
    min_free_disk_bytes: int = Field(2**30, ge=0, lt=2**63)
    """Saves are refused while a disk that they are written to has less free space than this."""
    adapter_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of adapters saved for sampling. Training state is always float32; full weights have vLLM's dtype."""
    snapshot_interval_s: float = Field(30.0, gt=0)
    """After a crash of the engine at most this much of a model's training is repeated, and the command that ran."""
    stop_grace_s: float = Field(STOP_GRACE_S, ge=5)
    """At a stop, how long the engine may take to end the turn that runs and to snapshot the models in training."""
    threads: int = Field(1, ge=1)
    """CPU threads of the trainer and of vLLM (OMP_NUM_THREADS). Has no effect on a GPU. Where it is not given,
    `skyrl serve` takes the machine's cores, up to 16."""
    otlp_endpoint: str | None = None
    """An OpenTelemetry collector to send traces to, for example http://127.0.0.1:4318; needs skyrl[traces]. None: none
    are sent."""
    trace_ratio: float = Field(0.01, ge=0, le=1)
    """The part of the requests that is traced, of those whose caller does not decide with a `traceparent` header."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    """The format of all processes' log lines, vLLM's too."""
    access_log: bool = False
    """Log each request that an API process answers, except long polls."""
    log_file_bytes: int = Field(100 * 2**20, ge=2**16, lt=2**63)
    """A longer file in the state directory's `logs` is emptied after it was copied."""
    log_files_kept: int = Field(5, ge=0, le=1000)
    """How many copies of each file are kept."""

    _role: BaseModelSlot | None = PrivateAttr(default=None)

    @field_validator("*", mode="before")
    @classmethod
    def _reads_no_value(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        # A directory may be called "none", so that is a base model
        may_lack = name != "base_model" and NoneType in get_args(cls.model_fields[name].annotation)
        return None if may_lack and isinstance(value, str) and value.lower() in NO_VALUE else value

    @field_validator("base_models", "backend_config", mode="before")
    @classmethod
    def _parse_json(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"not JSON: {error}") from error
        if info.field_name == "backend_config" and isinstance(value, dict):
            return parse_backend_config(value)
        return value

    @field_validator("backend", mode="before")
    @classmethod
    def _known_backend(cls, value: object) -> object:
        entry = skyrl_keys.BACKENDS.get(value) if isinstance(value, str) else None
        name = entry.becomes if entry is not None and entry.becomes else value
        if name not in BACKENDS:
            why = f" ({entry.why})" if entry is not None else ""
            raise ValueError(f"no backend {value!r}; there are: {', '.join(BACKENDS)}{why}")
        return name

    @field_validator("checkpoint_store")
    @classmethod
    def _known_store(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme not in STORE_SCHEMES or not rest.strip("/") or (scheme == "file" and not rest.startswith("/")):
            raise ValueError(f"{value!r} is not file:///directory or one of s3://, gs://, az:// with a bucket's name")
        return value

    @field_validator("ray_address")
    @classmethod
    def _known_cluster(cls, value: str | None) -> str | None:
        return None if value is None else ray_cluster(value)

    @field_validator("database_url")
    @classmethod
    def _readable_database_url(cls, value: str | None) -> str | None:
        return None if value is None else readable_url(value)

    @field_validator("external_inference_url")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("holds a user or a password; a key goes into external_inference_api_key")
        return value

    @field_validator("inference_api_key")
    @classmethod
    def _is_a_key(cls, value: str | None) -> str | None:
        if value is not None and len(value) < MIN_KEY:
            raise ValueError(f"is shorter than {MIN_KEY} characters")
        return value

    @field_validator("external_inference_api_key", "inference_api_key")
    @classmethod
    def _fits_a_header(cls, value: str | None) -> str | None:
        if value is not None and not (value.isascii() and value.isprintable()):
            raise ValueError("must be printable ASCII, without a line's end")
        return value

    @field_validator("public_url", "otlp_endpoint")
    @classmethod
    def _absolute_url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} does not begin with http:// or https://")
        return value

    @field_validator("state_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def modes(self) -> Modes:
        """What this server does. Other modules ask this instead of `backend`, `colocate_all` and the external URL."""
        external = self.external_inference_url is not None
        trains = self.backend != "none" and "train" in self.uses
        return Modes(
            trains=trains,
            forwards=external or not trains or not self.backend_config.trainer.placement.colocate_all,
            manages_inference=self.backend != "none" and not external,
            shares_inference=self.backend == "none" and not external,
        )

    @property
    def role(self) -> BaseModelSlot:
        """Which of the server's base models this configuration is of."""
        return self._role or BaseModelSlot(state_keys=("", *self.served_names))

    def take_role(self, role: BaseModelSlot) -> None:
        """For `skyrl.base.config.several`, which makes the configurations of several base models."""
        self._role = role

    @property
    def full_finetuning(self) -> bool:
        """Whether this server trains all parameters of one model at a time, in place of many adapters."""
        return self.backend_config.trainer.full_finetuning

    @property
    def ray(self) -> str | None:
        """The Ray cluster that is used, as in `ray_address`; None if Ray is not used."""
        if self.ray_address is not None or not self.modes.trains:
            return self.ray_address
        placement = self.backend_config.trainer.placement
        if placement.policy_num_nodes > 1:
            return "auto"
        return "local" if placement.ranks > 1 else None

    @property
    def weights_travel(self) -> bool:
        """Whether weights to sample from go to the nodes of this server's vLLMs by the checkpoint store."""
        return self.ray is not None and self.modes.manages_inference

    @property
    def routed(self) -> bool:
        """Whether this server's samples go through a router: with several vLLMs; where Ray places them, so that the
        address stays the same when a vLLM comes up on another node; or for gateways on other hosts."""
        several = self.backend_config.inference.num_engines > 1
        remote = self.inference_host not in LOOPBACK
        return self.modes.manages_inference and (several or remote or self.ray is not None)

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.state_dir / 'skyrl.db'}"

    @property
    def adapters_dir(self) -> Path:
        """Adapters in PEFT format, one directory for each version; a version never changes."""
        return self.state_dir / "adapters"

    @property
    def full_weights_dir(self) -> Path:
        """Versions of the full weights in Hugging Face format, one directory each. Committed versions never change."""
        return self.state_dir / "full-weights"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints, unless `checkpoint_store` is set."""
        return self.state_dir / "checkpoints"

    @property
    def snapshots_dir(self) -> Path:
        """The last snapshot of each model in training. After a crash the engine continues from there."""
        return self.state_dir / "snapshots"

    @property
    def running_file(self) -> Path:
        """What the engine runs now, and how often it died while it ran each command
        (`skyrl.engine.crash_ledger`)."""
        return self.state_dir / f"{self.role.process('running')}.json"

    @property
    def base_model_path(self) -> str:
        """The directory or hub name to load: the tiny model's directory for `tiny` and for no name."""
        if self.base_model in (None, TINY):
            from skyrl.base.tiny import model_path

            return str(model_path())
        directory = Path(self.base_model).expanduser()
        return str(directory.absolute()) if directory.is_dir() else self.base_model

    @property
    def served_names(self) -> tuple[str, ...]:
        if self.served_model_names:
            return self.served_model_names
        return (TINY if self.base_model is None else self.base_model,)


def readable_url(text: str) -> str:
    """The URL, with `postgresql://` in place of `postgres://`.

    Raises ValueError when the password cannot be told from the host, or when the port is not a number.
    """
    scheme, separator, rest = text.partition("://")
    if scheme.startswith("sqlite") or not separator:
        return text
    if rest.count("@") > 1:
        raise ValueError(
            "has more than one @, so that the password cannot be told from the host: percent-encode the password "
            "(@ is %40, / is %2F, : is %3A, % is %25)"
        )
    host = rest.rpartition("@")[2].partition("?")[0].partition("/")[0]
    _, _, port = host.rpartition("]")[2].partition(":")  # an IPv6 address stands in brackets
    if port and not port.isdecimal():
        raise ValueError("the port is not a number; a password must be percent-encoded (: is %3A, / is %2F)")
    return f"{'postgresql' if scheme == 'postgres' else scheme}://{rest}"
