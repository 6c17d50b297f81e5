"""Words, values and protocols that every Coppice service shares.

`coppice.LLM` serves a model in this process. It and what it takes, gives and raises are attributes of this package that
are imported when they are first asked for, because the model brings torch. Errors and results bring nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice.errors import CoppiceError, UnavailableError, UsageError
    from coppice_offline.answers.generation_stream import GenerationStream
    from coppice_offline.interface.beam_search import BeamSearchOptions
    from coppice_offline.interface.errors import EngineBroken, PromptError, RequestFailed
    from coppice_offline.interface.options import SamplingOptions
    from coppice_offline.interface.results import (
        Completion,
        Generation,
        Piece,
        TokenLogprob,
        ToolCall,
        ToolCallPiece,
        Usage,
    )
    from coppice_offline.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchOptions",
    "Completion",
    "CoppiceError",
    "EngineBroken",
    "Generation",
    "GenerationStream",
    "Piece",
    "PromptError",
    "RequestFailed",
    "SamplingOptions",
    "TokenLogprob",
    "ToolCall",
    "ToolCallPiece",
    "UnavailableError",
    "Usage",
    "UsageError",
    "__version__",
]
__version__ = "0.1.0"

_RESULTS = ("Completion", "Generation", "Piece", "TokenLogprob", "ToolCall", "ToolCallPiece", "Usage")
_HOMES = {
    "LLM": "coppice_offline.llm",
    "GenerationStream": "coppice_offline.answers.generation_stream",
    "BeamSearchOptions": "coppice_offline.interface.beam_search",
    "SamplingOptions": "coppice_offline.interface.options",
    **dict.fromkeys(_RESULTS, "coppice_offline.interface.results"),
    **dict.fromkeys(("EngineBroken", "PromptError", "RequestFailed"), "coppice_offline.interface.errors"),
    **dict.fromkeys(("CoppiceError", "UnavailableError", "UsageError"), "coppice.errors"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'coppice' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from coppice.errors import UnavailableError

        raise UnavailableError(
            f"coppice.{name} needs {error.name}, which is not installed", hint="pip install 'coppice[up]'"
        ) from error
