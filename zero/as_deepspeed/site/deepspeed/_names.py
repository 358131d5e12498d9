"""How the modules of this package find their names: each where it lives in zero, when it is first used."""

import dis
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from deepspeed._modules import MODULES, Names
from zero.deepspeed_names import INSTEAD


def finder(module: str, homes: Mapping[str, str], refused: Sequence[str] = ()) -> Callable[[str], Any]:
    """The `__getattr__` of `module`.

    homes: name -> the module in which it has the same name; "module:" for that module itself, "module:other" for
    another name there. refused: classes and functions that programs import, or subclass, without using them; calling
    one raises NotImplementedError that says what to use. Raises AttributeError for every other name, which says what to
    use where that is known; ImportError in `from module import name`, where Python drops the text of the former.
    """

    classes = {name: type(name, (_Refused,), {"__module__": module, "_name": f"{module}.{name}"}) for name in refused}

    def find(name: str) -> Any:
        if name in homes:
            home, colon, other = homes[name].partition(":")
            found = importlib.import_module(home)
            return found if colon and not other else getattr(found, other or name)
        if name in classes:
            return classes[name]
        caller = sys._getframe(1)
        imported = caller.f_code.co_code[caller.f_lasti] == dis.opmap["IMPORT_FROM"]
        error = ImportError if imported else AttributeError
        raise error(_missing(f"{module}.{name}"), name=name)

    find.names = frozenset((*homes, *refused))
    return find


class _Refused:
    _name = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(_missing(cls._name))


def _missing(name: str) -> str:
    why = INSTEAD.get(name, "docs/deepspeed.md says what there is")
    return f"{name} is not in zero, which is here as deepspeed: {why}"


class _Modules:
    """Comes first of the finders: what `MODULES` says of a module is found in it, and its file is run if it has one."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        below = name.removeprefix("deepspeed.")
        if below == name:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _File(name, spec.origin)
        elif below in MODULES:
            spec = ModuleSpec(name, cls, is_package=True)
            spec.submodule_search_locations = [str(Path(__file__).parent.joinpath(*below.split(".")))]
        return spec

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """As usual."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        homes, refused, modules = MODULES.get(module.__name__.removeprefix("deepspeed."), Names())
        below = {name: f"{module.__name__}.{name}:" for name in modules.split()}
        module.__getattr__ = finder(module.__name__, {**homes, **below}, refused)


class _File(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _Modules.exec_module(module)  # before the file, which may have a `__getattr__` of its own
        super().exec_module(module)


class _Missing:
    """Comes last of the finders: what none of them has of `deepspeed` is an error that says what to use."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        # Whoever only asks, by importlib.util.find_spec, is told as of any other module: None.
        if name.startswith("deepspeed.") and sys._getframe(2).f_globals["__name__"] != "importlib.util":
            raise ModuleNotFoundError(_missing(name), name=name)


sys.meta_path.insert(0, _Modules)
sys.meta_path.append(_Missing)
