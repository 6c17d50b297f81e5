"""The cache service. Its core may be there compiled, too."""

from coppice.compiled import search_path

__path__ = search_path(__name__, __path__)
