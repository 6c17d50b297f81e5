"""Words, values and protocols that every Coppice service shares.

`coppice.LLM` and `coppice.SamplingOptions` serve a model in this process. They are imported when they are first asked
for, because they bring torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coppice_offline.llm import LLM
    from coppice_offline.options import SamplingOptions

__all__ = ["LLM", "SamplingOptions", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in ("LLM", "SamplingOptions"):
        raise AttributeError(f"module 'coppice' has no attribute {name!r}")
    try:
        from coppice_offline import llm
    except ModuleNotFoundError as error:
        from coppice.errors import UnavailableError

        raise UnavailableError(
            f"coppice.{name} needs {error.name}, which is not installed", hint="pip install 'coppice[up]'"
        ) from error
    return getattr(llm, name)
