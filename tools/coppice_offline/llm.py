"""`coppice.LLM`: a model in this process, for scripts and notebooks. No service, no port, no thread of ours.

    with LLM("path/to/checkpoint") as llm:
        for generation in llm.generate(["Once upon", "It was"], SamplingOptions(max_tokens=20)):
            print(generation.text)
        for piece in llm.stream("Once upon", SamplingOptions(max_tokens=20)):
            print(piece.text, end="")

It is the same cache, scheduler and worker as in the services (`engine.py`), so prompts are batched, and what one call
computed for the beginning of a prompt is found again by the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from weakref import WeakSet

from coppice.errors import UsageError
from coppice.messages.sampling import COMPLETION_TOKENS
from coppice_offline.answers.generation import generation_of
from coppice_offline.answers.generation_stream import GenerationStream
from coppice_offline.answers.prompt_search import rounds
from coppice_offline.device import DeviceName, DtypeChoice, give_memory_back, load_executor
from coppice_offline.interface import checks
from coppice_offline.interface.beam_search import BeamSearchOptions
from coppice_offline.interface.errors import EngineBroken
from coppice_offline.interface.options import SamplingOptions
from coppice_offline.interface.results import Generation
from coppice_offline.loading import Loaded, load
from coppice_offline.progress import progress_bar
from coppice_offline.prompts import Message, Read, read_end, read_tools
from coppice_scheduler.edge.text.tools.tool import ToolUse
from coppice_up.checkpoint import find_checkpoint
from coppice_worker.core.batch.step_batch import StepLimits
from coppice_worker.model.executor import TorchExecutor

Prompt = str | Sequence[int] | Mapping[str, Any]  # {"prompt": text}, {"prompt_token_ids": ids}
Prompts = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
ToolChoice = str | Mapping[str, Any]
Options = TypeVar("Options", SamplingOptions, BeamSearchOptions)


class LLM:
    """One model. Serves one call at a time. `close`, or the end of a `with` around it, frees its memory."""

    def __init__(
        self,
        model: str | Path = "",
        *,
        device: DeviceName = "auto",
        dtype: DtypeChoice = "auto",
        kv_memory_mib: int = 512,
        gpu_memory_utilization: float = 0.9,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> None:
        """`model`: a checkpoint folder, a name on the Hugging Face hub, or nothing for the demo model.

        The pool has `num_blocks`, or what `kv_memory_mib` holds on a CPU, or on a GPU what is left of
        `gpu_memory_utilization` beside weights and steps. `max_running` and `max_step_tokens` bound a step;
        `max_context` shortens the model's own; `threads` are torch's on a CPU. Raises UsageError, UnavailableError.
        """
        self._streams: WeakSet[GenerationStream] = WeakSet()  # which may have to be ended
        checkpoint = find_checkpoint(str(model))
        executor = load_executor(
            checkpoint.folder,
            device=device,
            dtype=dtype,
            num_blocks=num_blocks,
            kv_memory_mib=kv_memory_mib,
            gpu_memory_utilization=gpu_memory_utilization,
            limits=StepLimits(max_running, max_step_tokens),
            block_size=block_size,
            threads=threads,
        )
        self._loaded: Loaded | None = load(
            checkpoint,
            executor,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_context=max_context,
        )
        self._executor: TorchExecutor | None = executor

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and its blocks. Open streams end; later calls raise UsageError. A second time does nothing.

        Raises UsageError while `generate` or `chat` is at work, in another thread or a signal's handler.
        """
        loaded = self._loaded
        if loaded is None:
            return
        for stream in list(self._streams):
            with suppress(EngineBroken):
                stream.fail(_closed())
        if loaded.runner.is_running:
            raise UsageError("a call of this LLM is at work, so it cannot be closed")
        # A traceback that somebody keeps refers to `loaded`; it must not keep the model.
        self._loaded = None
        loaded.engine.close()
        if self._executor is not None:
            self._executor.close()
            self._executor = None
        give_memory_back()

    def generate(
        self,
        prompts: Prompts,
        params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Continue a text, several, or token ids, or mappings with one of them. One Generation for each, in order.

        `params`: for all prompts, or one for each. `progress`: show a bar; None: on a terminal. Raises UsageError,
        RequestFailed, EngineBroken; KeyboardInterrupt after Ctrl-C, once what was at work has ended.
        """
        loaded = self._open()
        return self._serve(loaded, loaded.prompts.read(prompts), params, COMPLETION_TOKENS, progress)

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchOptions | Sequence[BeamSearchOptions],
        *,
        progress: bool | None = None,
    ) -> list[Generation]:
        """The likeliest continuations of each prompt, best first, with their scores: what `transformers` finds.

        Nothing is sampled. Prompts, `progress` and errors are those of `generate`.
        """
        loaded = self._open()
        read = loaded.prompts.read(prompts)
        _check_progress(progress)
        options = _one_each(params, len(read), BeamSearchOptions)
        searches = [loaded.requests.search_of(prompt, each) for prompt, each in zip(read, options, strict=True)]
        with progress_bar(searches, progress) as reporter:
            loaded.runner.run_rounds(rounds(searches, loaded.max_running), reporter)
        return [search.generation() for search in searches]

    def stream(self, prompt: Prompt, params: SamplingOptions | None = None) -> GenerationStream:
        """Continue one prompt, piece by piece: `for piece in llm.stream(...): print(piece.text, end="")`.

        The pieces of all continuations together are what `generate` gives: `.generation` of the stream, after the
        last. Leaving the loop, or `close` of the stream, cancels the request. Raises UsageError at once, and what
        `generate` raises from the loop.
        """
        loaded = self._open()
        return self._stream(loaded, loaded.prompts.read_one(prompt), params, COMPLETION_TOKENS)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingOptions | Sequence[SamplingOptions] | None = None,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool | None = None,
    ) -> list[Generation]:
        """Answer a conversation (messages as in OpenAI's API), or several. As `generate`.

        `tools`, `tool_choice`, `parallel_tool_calls`: what the model may call, as in OpenAI's API.
        `chat_template_kwargs`: what the checkpoint's template reads besides, such as `enable_thinking`.
        `continue_final_message`: the answer goes on from the words of the last message, and does not repeat them.
        `add_generation_prompt`: False: the prompt ends behind the last message, and begins no answer.
        """
        loaded = self._open()
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        end = read_end(add_generation_prompt, continue_final_message)
        offered = () if use is None else use.tools
        read = loaded.prompts.read_chats(messages, offered, _or_empty(chat_template_kwargs), end)
        return self._serve(loaded, read, params, loaded.chat_max_tokens, progress, use)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingOptions | None = None,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> GenerationStream:
        """Answer one conversation, piece by piece: as `stream`, with the arguments of `chat`."""
        loaded = self._open()
        use = read_tools(tools, tool_choice, parallel_tool_calls)
        end = read_end(add_generation_prompt, continue_final_message)
        offered = () if use is None else use.tools
        read = loaded.prompts.read_chat(messages, offered, _or_empty(chat_template_kwargs), end)
        return self._stream(loaded, read, params, loaded.chat_max_tokens, use)

    def check(self) -> None:
        """Raise if an invariant of the cache, the scheduler or the worker does not hold. For tests."""
        self._open().engine.check()

    def _open(self) -> Loaded:
        if self._loaded is None:
            raise _closed()
        return self._loaded

    def _serve(
        self,
        loaded: Loaded,
        prompts: list[Read],
        params: SamplingOptions | Sequence[SamplingOptions] | None,
        max_tokens: int,
        progress: bool | None,
        use: ToolUse | None = None,
    ) -> list[Generation]:
        _check_progress(progress)
        options = _one_each(SamplingOptions() if params is None else params, len(prompts), SamplingOptions)
        groups = [
            loaded.requests.streams_of(prompt, each, max_tokens, use, as_it_comes=False)
            for prompt, each in zip(prompts, options, strict=True)
        ]
        streams = [stream for group in groups for stream in group]
        with progress_bar(streams, progress) as reporter:
            loaded.runner.run(streams, reporter)
        return [
            generation_of(prompt, group, each.n) for prompt, group, each in zip(prompts, groups, options, strict=True)
        ]

    def _stream(
        self,
        loaded: Loaded,
        prompt: Read,
        params: SamplingOptions | None,
        max_tokens: int,
        use: ToolUse | None = None,
    ) -> GenerationStream:
        if params is not None and not isinstance(params, SamplingOptions):
            raise UsageError(f"params is a {type(params).__name__}; it must be SamplingOptions")
        options = params or SamplingOptions()
        if options.tells_the_best:
            raise UsageError("the best of best_of are known when all have ended, so there is no stream of them")
        group = loaded.requests.streams_of(prompt, options, max_tokens, use, as_it_comes=True)
        stream = GenerationStream(prompt, group, loaded.runner.follow(group))
        self._streams.add(stream)
        return stream


def _closed() -> UsageError:
    return UsageError("this LLM is closed", hint="make a new one")


def _or_empty(values: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return {} if values is None else values


def _check_progress(progress: bool | None) -> None:
    if progress is not None:
        checks.flag("progress", progress)


def _one_each(params: Options | Sequence[Options], count: int, kind: type[Options]) -> Sequence[Options]:
    if isinstance(params, kind):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, kind) for each in params):
        raise UsageError(f"params is {_kind(params)}; it must be {kind.__name__}, or a list with one for each prompt")
    if len(params) != count:
        raise UsageError(f"params has {len(params)} entries for {count} prompts", hint="give one, or one for each")
    return params


def _kind(params: object) -> str:
    if isinstance(params, Sequence) and not isinstance(params, str):
        return "a list with other entries"
    return f"a {type(params).__name__}"
