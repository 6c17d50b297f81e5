"""Words, values and protocols that every Coppice service shares."""

__version__ = "0.1.0"
