"""The engine: `initialize` makes one out of a model and a JSON, and its loop is call, backward, step."""

from zero.engine.arguments import add_config_arguments
from zero.engine.engine import Engine
from zero.engine.initialize import initialize

__all__ = ["Engine", "add_config_arguments", "initialize"]
