"""The beam search of one prompt as requests, and searches of several prompts side by side.

    next_step   each beam is a request for one token, with its likeliest alternatives
                (all steps of all searches that are at work run together)
    take_step   what came goes to the `BeamSearch`, which is that of the REST API

What beams have in common is found in the cache: they share its whole blocks, and compute the rest of the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from coppice_offline.answers.request_stream import RequestStream
from coppice_offline.interface.errors import RequestFailed
from coppice_offline.interface.results import Completion, Generation
from coppice_offline.prompts import Read
from coppice_scheduler.core.state.request import Finish, Output, Request
from coppice_scheduler.edge.beams.search import BeamOptions, BeamSearch, Finished, Likely
from coppice_scheduler.edge.text.detokenizer import Detokenizer
from coppice_scheduler.edge.text.tokenizer import pack_tokens, unpack_tokens


class BeamStep:
    """One step of one beam."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._last: Output | None = None

    def take(self, output: Output) -> bool:
        if output.finish is not None:
            self._last = output
        return False

    @property
    def last(self) -> Output:
        """After it ended."""
        assert self._last is not None, "a step is taken when it has ended"
        return self._last


class PromptSearch:
    """Until it `has_ended`: run the requests of `next_step` to their end, `take_step`."""

    def __init__(
        self,
        prompt: Read,
        options: BeamOptions,
        num_answers: int,
        new_request: Callable[[bytes], Request],
        new_detokenizer: Callable[[], Detokenizer],
    ) -> None:
        """`new_request`: of the `num_likely` likeliest tokens behind packed tokens. `new_detokenizer`: of an answer."""
        self._prompt = prompt
        self._num_answers = num_answers
        self._new_request = new_request
        self._new_detokenizer = new_detokenizer
        self._search = BeamSearch(options)
        self._steps: list[BeamStep] = []
        self._first: Output | None = None  # what was said of the prompt
        self.num_tokens = 0  # sampled so far, for all beams
        self.width = options.width

    @property
    def has_ended(self) -> bool:
        return self._search.is_done

    def next_step(self) -> list[BeamStep]:
        """One for each beam."""
        self._steps = [BeamStep(self._new_request(self._prompt.tokens + beam.tokens)) for beam in self._search.beams]
        return self._steps

    def take_step(self) -> None:
        """When all of `next_step` have ended."""
        outputs = [step.last for step in self._steps]
        self.num_tokens += len(outputs)
        self._first = self._first or outputs[0]
        self._search.take([Likely.of(output.logprobs[0]) for output in outputs])

    def generation(self) -> Generation:
        """When it has ended. Raises RequestFailed where the vocabulary is too small for so many answers."""
        answers = self._search.best(self._num_answers)
        if len(answers) < self._num_answers:
            raise RequestFailed(f"the search found {len(answers)} answers; {self._num_answers} were asked for")
        return Generation(
            prompt=self._prompt.text,
            prompt_token_ids=unpack_tokens(self._prompt.tokens),
            outputs=tuple(self._completion(place, answer) for place, answer in enumerate(answers)),
        )

    def _completion(self, place: int, answer: Finished) -> Completion:
        assert self._first is not None, "a search has a step"
        request = self._new_request(self._prompt.tokens)
        stream = RequestStream(place, request, self._new_detokenizer(), (), tells_logprobs=False)
        stream.take(
            Output(
                request.request_id,
                answer.tokens,
                finish=Finish.LENGTH if answer.stop_token is None else Finish.STOP,
                num_cached_tokens=self._first.num_cached_tokens,
                stop_token=b"" if answer.stop_token is None else pack_tokens([answer.stop_token]),
            )
        )
        return replace(stream.completion(), score=answer.score)


def rounds(searches: Sequence[PromptSearch], num_beams: int) -> Iterator[list[BeamStep]]:
    """Steps to be run together, again and again until all searches have ended.

    Of at most `num_beams` beams, or of one search: more would wait, and what waits may lose its prompt in the cache.
    """
    waiting, at_work, num_free = deque(searches), list[PromptSearch](), num_beams
    while waiting or at_work:
        while waiting and (waiting[0].width <= num_free or not at_work):
            num_free -= waiting[0].width
            at_work.append(waiting.popleft())
        yield [step for search in at_work for step in search.next_step()]
        for search in at_work:
            search.take_step()
            num_free += search.width if search.has_ended else 0
        at_work = [search for search in at_work if not search.has_ended]
