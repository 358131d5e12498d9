"""Whether drives can be read and written; zero always can."""

from deepspeed._names import finder

__getattr__ = finder(__name__, {})


class AsyncIOBuilder:
    """Has nothing to build."""

    NAME = "async_io"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it works on this machine."""
        return True
