"""The config: read, checked, completed and frozen. No torch in here."""

from zero.config.check import load
from zero.config.errors import ConfigError
from zero.config.file import Config
from zero.config.schema import json_schema

__all__ = ["Config", "ConfigError", "json_schema", "load"]
