"""Prompts and options to requests of the engine, with what reads their answers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from msgspec.structs import replace

from coppice.errors import UsageError
from coppice.grammar import GrammarError
from coppice.ids import TOKEN_BYTES, DomainId
from coppice.messages.sampling import BIAS, COMPLETION_TOKENS
from coppice.messages.step import SamplingParams
from coppice_offline.answers.prompt_search import PromptSearch
from coppice_offline.answers.request_stream import RequestStream
from coppice_offline.grammars import KEPT_MAX, CompiledGrammars
from coppice_offline.interface.beam_search import BeamSearchOptions
from coppice_offline.interface.options import Defaults, SamplingOptions, sampling_of, stop_token_ids_of
from coppice_offline.prompts import Read
from coppice_scheduler.core.state.request import Request
from coppice_scheduler.edge.base.errors import ApiError
from coppice_scheduler.edge.beams.search import BeamOptions, num_stop_tokens_max
from coppice_scheduler.edge.frontend.admission import check_goes_on
from coppice_scheduler.edge.frontend.sampling_options import pack_bias
from coppice_scheduler.edge.text.answer_syntax import AnswerSyntax
from coppice_scheduler.edge.text.detokenizer import Detokenizer, DetokenizerFactory
from coppice_scheduler.edge.text.output_format import FormatKind, OutputFormat, grammar_of
from coppice_scheduler.edge.text.tokenizer import unpack_tokens
from coppice_scheduler.edge.text.tools.tool import ToolUse

DOMAIN = DomainId("offline")
_PROMPT_TAIL_BYTES = 4 * 16


class RequestMaker:
    """Does for one process what the front door does for clients."""

    def __init__(
        self,
        syntax: AnswerSyntax,
        grammars: CompiledGrammars,
        detokenizers: DetokenizerFactory,
        defaults: Defaults,
        max_context: int,
        num_places: int,
        new_number: Callable[[], int],
    ) -> None:
        """`num_places`: tokens that the KV memory holds."""
        self._syntax = syntax
        self._grammars = grammars
        self._detokenizers = detokenizers
        self._defaults = defaults
        self._max_context = max_context
        self._num_places = num_places
        self._new_number = new_number
        self._grammar_of = lru_cache(KEPT_MAX)(self._make_grammar)

    def streams_of(
        self,
        prompt: Read,
        options: SamplingOptions,
        max_tokens: int,
        use: ToolUse | None = None,
        *,
        as_it_comes: bool,
    ) -> list[RequestStream]:
        """One for each candidate; all after the first share its prefill. Raises UsageError.

        `as_it_comes`: somebody reads each token when it is there.
        """
        grammar, biases = self._grammar(prompt, options, use), self._biases(options, use)
        ends = stop_token_ids_of(options, self._defaults)
        is_chat = prompt.opens_reasoning is not None
        streams: list[RequestStream] = []
        for index, sampling in enumerate(sampling_of(options, self._defaults)):
            number = self._new_number()
            request = Request(
                request_id=str(number),
                tenant=DOMAIN,
                domain=DOMAIN,
                tokens=prompt.tokens,
                sampling=replace(
                    sampling,
                    grammar=grammar,
                    logit_bias=biases,
                    # Told with the first; what computes the prompt again shares nothing.
                    num_prompt_logprobs=None if streams else sampling.num_prompt_logprobs,
                ),
                max_new_tokens=options.max_tokens or max_tokens,
                stop_token_ids=ends,
                number=number,
                streams=as_it_comes or bool(options.stops) or self._syntax.counts_tokens(use, is_chat=is_chat),
                fork_of=streams[0].request.request_id if streams else None,
            )
            parts = self._syntax.parts(use, prompt.opens_reasoning)
            detokenizer = self._detokenizer(prompt, keeps_markers=parts is not None)
            streams.append(
                RequestStream(
                    index,
                    request,
                    detokenizer,
                    options.stops,
                    parts,
                    is_candidate=options.tells_the_best,
                    tells_logprobs=options.logprobs is not None,
                )
            )
        return streams

    def search_of(self, prompt: Read, options: BeamSearchOptions) -> PromptSearch:
        """Answers end where the context does. Raises UsageError."""
        ends, width = stop_token_ids_of(options, self._defaults), options.beam_width
        most = num_stop_tokens_max(width)
        if len(ends) > most:
            raise UsageError(
                f"a search with {width} beams can have at most {most} stop tokens; this one has {len(ends)}",
                hint="fewer beams, fewer stop_token_ids, or ignore_eos",
            )
        num_prompt = len(prompt.tokens) // TOKEN_BYTES
        max_tokens = min(options.max_tokens or COMPLETION_TOKENS, self._max_context - num_prompt)
        num_places = num_prompt + max_tokens - 1  # no step computes what comes behind the last token
        if num_places > self._num_places:
            raise UsageError(
                f"a prompt of {num_prompt} tokens and answers of {max_tokens} need room for {num_places}; "
                f"the KV memory holds {self._num_places}",
                hint="ask for fewer max_tokens, or raise kv_memory_mib or num_blocks",
            )
        beams = BeamOptions(width, options.length_penalty, max_tokens, ends)
        sampling = SamplingParams(temperature=0.0, num_logprobs=beams.num_likely)
        return PromptSearch(
            prompt,
            beams,
            options.num_answers,
            lambda tokens: self._step_of(tokens, sampling),
            lambda: self._detokenizer(prompt, keeps_markers=False),
        )

    def _step_of(self, tokens: bytes, sampling: SamplingParams) -> Request:
        """For one token."""
        number = self._new_number()
        return Request(
            request_id=str(number),
            tenant=DOMAIN,
            domain=DOMAIN,
            tokens=tokens,
            sampling=sampling,
            max_new_tokens=1,
            number=number,
            streams=False,
        )

    def _detokenizer(self, prompt: Read, *, keeps_markers: bool) -> Detokenizer:
        return self._detokenizers.start(unpack_tokens(prompt.tokens[-_PROMPT_TAIL_BYTES:]), keeps_markers=keeps_markers)

    def _biases(self, options: SamplingOptions, use: ToolUse | None) -> bytes:
        """With that of a token which must not come: the one that opens calls, where the model may not call."""
        forbidden = None if use is None else self._syntax.tools.forbidden_token(use)
        return pack_bias(options.biases if forbidden is None else {**options.biases, forbidden: BIAS.low})

    def _grammar(self, prompt: Read, options: SamplingOptions, use: ToolUse | None) -> str:
        grammar, field = self._grammar_of(options.output_format, use, prompt.opens_reasoning, prompt.goes_on)
        if grammar:
            options.check_free_end()
            self._grammars.check(grammar, field)
        return grammar

    def _make_grammar(
        self, wanted: OutputFormat | None, use: ToolUse | None, opens_reasoning: bool | None, goes_on: bool
    ) -> tuple[str, str]:
        """The grammar of an answer, and whose errors it has. Raises UsageError."""
        field = "structured_outputs"
        try:
            if use is not None:
                wanted = self._syntax.tools.output_format(use, wanted)
            if goes_on:
                check_goes_on(wanted)
            wanted = self._syntax.behind_reasoning(wanted, opens_reasoning)
            if wanted is not None and wanted.kind is FormatKind.TOOL_CALLS:
                field = "tools"
            return ("" if wanted is None else grammar_of(wanted)), field
        except ApiError as error:
            raise UsageError(error.message) from None
        except GrammarError as error:
            raise UsageError(f"{field} cannot be used: {error}") from None
