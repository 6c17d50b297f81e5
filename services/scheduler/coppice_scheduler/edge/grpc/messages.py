"""Messages of the gRPC API to what the front door takes, and back."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format

from coppice.messages.reuse import Reuse
from coppice_rpc.v1 import scheduler_pb2 as pb
from coppice_scheduler.edge.base.errors import invalid
from coppice_scheduler.edge.frontend.generation_spec import (
    MAX_LOGIT_BIASES,
    MAX_MESSAGES,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPLATE_BYTES,
    ChatPrompt,
    Endpoint,
    GenerationSpec,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from coppice_scheduler.edge.grpc.tools import call_delta, calls_of, tool_use_of, tools_of
from coppice_scheduler.edge.text.chat import ChatMessage, PromptEnd
from coppice_scheduler.edge.text.detokenizer import TokenTexts
from coppice_scheduler.edge.text.logprobs import TokenLogprob
from coppice_scheduler.edge.text.output_format import MAX_FORMAT_CHOICES, FormatKind, OutputFormat
from coppice_scheduler.edge.text.text_stream import Delta

_REUSE = {
    pb.PROMPT_REUSE_UNSPECIFIED: Reuse.UNKNOWN,
    pb.PROMPT_REUSE_LIKELY: Reuse.LIKELY,
    pb.PROMPT_REUSE_UNLIKELY: Reuse.UNLIKELY,
}


def spec_of(request: pb.GenerateRequest, timeout_s: float) -> GenerationSpec:
    """`timeout_s` is what is left of the call's deadline. Raises ApiError."""
    if not request.model:
        raise invalid("model is required.", param="model", code="missing")
    _at_most("logit_bias", len(request.logit_bias), MAX_LOGIT_BIASES, "entries")
    _at_most("stop", len(request.stop), MAX_STOPS, "strings")
    _at_most("stop_token_ids", len(request.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")

    def given(name: str) -> bool:
        return request.HasField(name)  # type: ignore[arg-type]

    prompt = _prompt(request)
    return GenerationSpec(
        model=request.model,
        prompts=(prompt,),
        n=request.n if given("n") else 1,
        max_tokens=request.max_tokens if given("max_tokens") else None,
        fills_context=request.fill_context,
        min_tokens=request.min_tokens,
        temperature=request.temperature if given("temperature") else None,
        top_p=request.top_p if given("top_p") else None,
        top_k=request.top_k if given("top_k") else None,
        min_p=request.min_p,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty if given("repetition_penalty") else 1.0,
        logit_bias=dict(request.logit_bias),
        seed=request.seed if given("seed") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens if given("skip_special_tokens") else True,
        best_of=request.best_of if given("best_of") else None,
        uses_beams=request.use_beam_search,
        length_penalty=request.length_penalty if given("length_penalty") else 1.0,
        num_logprobs=request.num_logprobs if given("num_logprobs") else None,
        num_prompt_logprobs=request.num_prompt_logprobs if given("num_prompt_logprobs") else None,
        echo=_echo(request),
        priority=request.priority,
        timeout_s=timeout_s,
        reuse=_reuse(request),
        retain_ms=request.prompt_cache_ttl_ms,
        output_format=_output_format(request),
        tool_use=tool_use_of(request, prompt.tools if isinstance(prompt, ChatPrompt) else ()),
        cache_salt=request.cache_salt if given("cache_salt") else None,
        endpoint=Endpoint.CHAT if isinstance(prompt, ChatPrompt) else Endpoint.COMPLETIONS,
    )


def _reuse(request: pb.GenerateRequest) -> Reuse:
    """What it says itself counts more than its key."""
    if request.prompt_reuse not in _REUSE:
        raise invalid(f"prompt_reuse has the unknown value {request.prompt_reuse}.", param="prompt_reuse")
    said = _REUSE[request.prompt_reuse]
    return Reuse.LIKELY if said is Reuse.UNKNOWN and request.prompt_cache_key else said


def _output_format(request: pb.GenerateRequest) -> OutputFormat | None:
    match request.WhichOneof("output_format"):
        case None:
            return None
        case "json_object":
            return OutputFormat(FormatKind.JSON_OBJECT, "", "json_object") if request.json_object else None
        case "json_schema":
            return OutputFormat(FormatKind.JSON, request.json_schema, "json_schema")
        case "regex":
            return OutputFormat(FormatKind.REGEX, request.regex, "regex")
        case "choice":
            _at_most("choice", len(request.choice.texts), MAX_FORMAT_CHOICES, "strings")
            return OutputFormat(FormatKind.CHOICE, tuple(request.choice.texts), "choice")
    return OutputFormat(FormatKind.GRAMMAR, request.grammar, "grammar")


def _echo(request: pb.GenerateRequest) -> bool:
    if request.echo and request.WhichOneof("prompt") == "chat":
        raise invalid("echo is only for text and token_ids.", param="echo")
    return request.echo


def tokenize_prompt(request: pb.TokenizeRequest) -> Prompt:
    """Raises ApiError."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "chat":
        if request.add_special_tokens:
            raise invalid("A chat has the special tokens of its template.", param="add_special_tokens")
        return _chat(request.chat)
    raise invalid("prompt is required: text or chat.", param="prompt", code="missing")


def _prompt(request: pb.GenerateRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(request.text)
    if kind == "token_ids":
        return TokenPrompt(request.token_ids.tokens)
    if kind == "chat":
        return _chat(request.chat)
    raise invalid("prompt is required: text, token_ids or chat.", param="prompt", code="missing")


def _at_most(name: str, length: int, most: int, entries: str) -> None:
    """Looked at before the entries are made Python's."""
    if length > most:
        raise invalid(f"{name} has {length} {entries}; at most {most} are taken", param=name)


def _chat(chat: pb.ChatMessages) -> ChatPrompt:
    _at_most("messages", len(chat.messages), MAX_MESSAGES, "entries")
    messages = tuple(_message(message) for message in chat.messages)
    return ChatPrompt(messages, _template_values(chat), tools_of(chat), _prompt_end(chat))


def _prompt_end(chat: pb.ChatMessages) -> PromptEnd:
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None
    return PromptEnd.asked(opens, chat.continue_final_message)


def _template_values(chat: pb.ChatMessages) -> dict[str, Any]:
    num_bytes = chat.chat_template_kwargs.ByteSize()
    if num_bytes > MAX_TEMPLATE_BYTES:
        message = f"chat_template_kwargs has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are taken"
        raise invalid(message, param="chat_template_kwargs")
    try:
        values = json_format.MessageToDict(chat.chat_template_kwargs)
    except (json_format.Error, ValueError, RecursionError) as error:
        raise invalid(f"chat_template_kwargs cannot be read: {error}", param="chat_template_kwargs") from error
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    """A Struct has no integers; a template should show what is one as one."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _message(message: pb.ChatMessage) -> ChatMessage:
    name = message.name if message.HasField("name") else None
    reasoning = message.reasoning_content if message.HasField("reasoning_content") else None
    call_id = message.tool_call_id if message.HasField("tool_call_id") else None
    return ChatMessage(message.role, message.content, name, reasoning, calls_of(message), call_id)


def response_of(delta: Delta, texts: TokenTexts, num_prompt_logprobs: int | None) -> pb.GenerateResponse:
    """Raises ApiError."""
    prompt = delta.prompt.entries(num_prompt_logprobs or 0) if delta.prompt is not None else ()
    response = pb.GenerateResponse(
        text=delta.text,
        tokens=delta.tokens,
        index=delta.index,
        logprobs=[_logprob(entry, texts) for entry in delta.all_logprobs],
        reasoning_content=delta.reasoning,
        tool_calls=[call_delta(piece) for piece in delta.calls],
        prompt_logprobs=[_logprob(entry, texts) for entry in prompt],
    )
    if delta.ending is not None:
        response.finish_reason = delta.ending.reason
        response.stop = delta.ending.stop or ""
        usage = delta.ending.usage
        response.usage.prompt_tokens = usage.prompt_tokens
        response.usage.cached_tokens = usage.cached_tokens
        response.usage.completion_tokens = usage.completion_tokens
        response.usage.cache_write_tokens = usage.written_tokens
        response.usage.reasoning_tokens = usage.reasoning_tokens
    return response


def _logprob(entry: TokenLogprob, texts: TokenTexts) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=entry.token_id,
        logprob=entry.logprob,
        rank=entry.rank,
        token=texts.bytes_of(entry.token_id),
        text_offset=entry.text_offset,
        top=[pb.LikelyToken(token_id=token_id, logprob=logprob) for token_id, logprob in entry.top],
    )
