"""Settings of the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from coppice.addresses import parse_address
from coppice.errors import UsageError
from coppice.settings import SessionAddressText, Variable
from coppice.tls.settings import GIVE_TLS, TlsSettings, refuse_open_hosts
from coppice_scheduler.core.state.settings import INSTANCE_BYTES, SchedulerSettings
from coppice_scheduler.edge.base.public_tls import PublicTls

_CORE = SchedulerSettings(instance=bytes(INSTANCE_BYTES))  # its defaults are ours


def _peer(text: str) -> str:
    try:
        address = parse_address(text)
    except UsageError as error:
        raise ValueError(error.line()) from None
    if not address.port:
        raise ValueError(f"{text!r} has no port that can be reached; give HOST:PORT")
    return text


class ServiceSettings(TlsSettings):
    """The scheduler: the front door (OpenAI REST and gRPC) and the planner."""

    env_prefix: ClassVar[str] = "COPPICE_SCHEDULER_"

    cache: SessionAddressText = Field(
        "127.0.0.1:7081", description="HOST:PORT or unix:/PATH where the cache service accepts sessions."
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the REST API; 0 takes a free one.")
    grpc_port: int = Field(7070, ge=0, le=65535, description="Port of the gRPC API; 0 takes a free one.")
    front_doors: int = Field(1, ge=1, le=64, description="Processes that serve REST and gRPC and know text.")
    planners: int = Field(
        1, ge=1, le=16, description="Processes that plan; the cache service shares the workers out among them."
    )
    planner_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port where front doors of other schedulers on the same cache service reach the first planner, and "
        "those above it for the others; 0 takes free ones; default: they reach none.",
    )
    planner_host: str = Field("127.0.0.1", min_length=1, description="Address of --planner-port.")
    planner_peers: tuple[Annotated[str, AfterValidator(_peer)], ...] = Field(
        (),
        description="HOST:PORT of each planner of other schedulers, which our front doors use, too. A name means all "
        "of its addresses, and is looked up every few seconds; our own planners among them are left out.",
    )
    model: str = Field(description="Checkpoint folder: tokenizer, chat template and limits are read from it.")
    model_name: str | None = Field(None, description="Name that clients use; default: the folder's name.")
    ssl_certfile: str | None = Field(
        None,
        description="PEM file of the certificate, with its chain, that clients of REST and gRPC see; "
        "--tls-cert is for connections between services.",
    )
    ssl_keyfile: str | None = Field(None, description="PEM file of its key, without password.")
    tenants: str | None = Field(None, description="tenants.yaml; without it there is one tenant and no key.")
    unknown_fields: Literal["refuse", "warn", "ignore"] = Field(
        "refuse",
        description="Fields of a body that nobody has heard of: refuse, or ignore, which a header of the answer tells; "
        "warn: ignore, and name each once in the log.",
    )
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "mistral", "mistral_args", "pythonic", "qwen3_coder", "glm45"
    ] = Field(
        "auto",
        description="How the model writes calls of tools; auto: as its chat template says; none: tools are refused.",
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral"] = Field(
        "auto",
        description="How the model writes its reasoning; auto: as its chat template says; none: it stays in the text.",
    )
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = Field(
        (),
        description="Origins of web pages whose scripts may call the REST API, such as https://chat.example; * is any.",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of operators: /metrics, /requests and /tenants; default: none, and /metrics is on the REST "
        "port while there is no tenants file.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address of --metrics-port.")
    console_origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/\s*]+$")], ...] = Field(
        (),
        description="Origins of the cache service's console, such as http://127.0.0.1:8071, whose scripts may read "
        "/requests and /tenants of --metrics-port.",
    )
    insecure_network: Annotated[bool, Variable("COPPICE_INSECURE_NETWORK")] = Field(
        False,
        description="Let --metrics-host and --planner-host be beyond loopback without TLS: whoever reaches them reads "
        "of all tenants, and has requests served as any of them.",
    )
    otlp_endpoint: str | None = Field(
        None, description="OTLP gRPC endpoint for traces: http://HOST:PORT, or https:// under --tls-cert."
    )
    trace_slow_ms: int = Field(
        1000,
        ge=0,
        description="Of the calls that OTEL_TRACES_SAMPLER leaves out, some that fail, or whose first token takes this "
        "long, are traced all the same.",
    )
    audit_log: str | None = Field(
        None, description="File that gets a JSON line for each act of an operator; default: the log."
    )
    request_log: str | None = Field(
        None,
        description="Folder that gets a JSON line for each request: who asked, what it took, why it was slow; default: "
        "a place in memory that keeps the newest.",
    )
    max_step_tokens: int = Field(_CORE.max_step_tokens, ge=1, description="Token budget of one step of one worker.")
    max_chunk_tokens: int = Field(_CORE.max_chunk_tokens, ge=1, description="Tokens of one prompt in one step.")
    contested_prefill_tokens: int = Field(
        _CORE.contested_prefill_tokens,
        ge=1,
        description="Prompt tokens of one step while several tenants wait for a first token.",
    )
    max_overtake_ms: int = Field(
        _CORE.max_overtake_ms,
        ge=0,
        description="Within a tenant, nobody is overtaken by what comes later than this after it.",
    )
    match_window: int = Field(
        _CORE.match_window,
        ge=0,
        description="Waiting requests of a tenant that are ordered by what is cached of them; 0: none.",
    )
    max_running: int = Field(_CORE.max_running, ge=1, description="Requests that hold memory at once.")
    max_queued: int = Field(
        _CORE.max_queued, ge=1, description="Requests that wait; each tenant has a share by its weight, more get 429."
    )
    max_queued_tokens: int = Field(
        _CORE.max_queued_tokens, ge=1, description="Prompt tokens of all requests that wait, shared out likewise."
    )
    queue_timeout_ms: int = Field(
        _CORE.queue_timeout_ms, ge=1, description="A request that waits for longer is refused with 429."
    )
    single_flight_wait_ms: int = Field(
        _CORE.single_flight_wait_ms,
        ge=0,
        description="Time that a request waits for others to compute its prefix; 0: it never does.",
    )
    retain_priority: int = Field(
        _CORE.retain_priority,
        ge=1,
        le=100,
        description="Of prompts that a client asked to keep: they are evicted after lower ones.",
    )
    max_retain_ms: int = Field(
        1_800_000, ge=0, description="Longest time that a client may ask to keep a prompt cached; longer ones are cut."
    )
    max_steps_in_flight: int = Field(_CORE.max_steps_in_flight, ge=1, le=8, description="Plans sent ahead per worker.")
    extend_more_blocks: int = Field(
        _CORE.extend_more_blocks,
        ge=0,
        le=64,
        description="Blocks that a request is given at once beyond those it needs soon.",
    )
    max_decode_steps: int = Field(
        _CORE.max_decode_steps,
        ge=1,
        le=64,
        description="Decode steps of one plan while no request waits; 1: a plan is one step.",
    )
    decode_burst_ms: float = Field(
        _CORE.decode_burst_ms,
        ge=0,
        description="Time that a plan of several decode steps may take; who comes meanwhile waits for it.",
    )
    drain_s: float = Field(30.0, ge=0, description="Time that requests get to end after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["text", "json"] = Field("text", description="How a line of the log is written.")

    @model_validator(mode="after")
    def _certificate_has_its_key(self) -> Self:
        if bool(self.ssl_certfile) != bool(self.ssl_keyfile):
            raise ValueError("--ssl-certfile and --ssl-keyfile belong together: give both, or none")
        return self

    @model_validator(mode="after")
    def _has_a_port_for_each_planner(self) -> Self:
        if self.planner_port and self.planner_port + self.planners - 1 > 65535:
            raise ValueError(f"--planner-port {self.planner_port} leaves no ports for {self.planners} planners")
        return self

    def check_listening(self) -> None:
        """Raises UsageError when others can reach the metrics or the planners, and nothing protects them. --host is no
        such port: its clients have keys."""
        if self.tls_cert is not None or self.insecure_network:
            return
        hint = f"{GIVE_TLS}, listen on 127.0.0.1, or say --insecure-network where nobody else reaches that network"
        if self.metrics_port is not None:
            refuse_open_hosts(
                {"--metrics-host": self.metrics_host},
                "without TLS whoever reaches it can read which tenants there are and how busy each is",
                hint,
            )
        if self.planner_port is not None:
            refuse_open_hosts(
                {"--planner-host": self.planner_host},
                "without TLS whoever reaches it can have requests served as any tenant",
                hint,
            )

    def public_tls(self) -> PublicTls | None:
        """None: clients speak without TLS, or to a proxy that has it. Raises UsageError."""
        if not self.ssl_certfile or not self.ssl_keyfile:
            return None
        return PublicTls(Path(self.ssl_certfile), Path(self.ssl_keyfile))
