"""What zero needs of private names of torch: each is asked here, so that a release that changes one is noticed."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero.core import torch_private as private

ROOT = Path(__file__).parents[2]
NAMES = re.compile(
    r"torch\._(?!dynamo|_version__)\w+|\._cdata\b|\._use_count\b|_execution_engine|\._backward_hooks\b(?!\.__)"
)


def test_they_stand_in_one_file():
    files = [path for path in (ROOT / "zero").rglob("*.py") if path.name != "torch_private.py"]
    lines = [f"{path.name}: {line.strip()}" for path in files for line in path.read_text().splitlines()]
    assert len(files) > 100
    assert [line for line in lines if NAMES.search(line.split("#")[0])] == []


def test_storages_and_their_holders():
    tensor = torch.zeros(4)
    view = tensor[1:]
    assert private.storage_id(tensor) == private.storage_id(view) != private.storage_id(torch.zeros(4))
    assert private.storage_id(torch.zeros(2, 2).to_sparse()) is None
    before = private.storage_references(tensor)
    more = tensor[2:]
    assert private.storage_references(tensor) == before + 1
    del more
    assert private.storage_references(tensor) == before
    param = nn.Parameter(torch.ones(2))
    held = private.tensor_references(param)
    graph = (param * 2).sum()
    assert private.tensor_references(param) > held
    del graph
    assert private.tensor_references(param) == held
    assert private.view_base(view) is tensor and private.view_base(tensor) is None


def test_versions():
    param = nn.Parameter(torch.ones(2))
    version = param._version
    with torch.no_grad():
        param.add_(1)
    assert param._version == version + 1
    private.set_versions([param], [version])
    assert param._version == version


def test_backwards():
    param, seen = nn.Parameter(torch.ones(2)), []

    def hook(grad: torch.Tensor) -> None:
        seen.append((private.backward_task(), private.backward_keeps_graph(), private.backward_node() is not None))
        private.after_backward(lambda: seen.append("end"))

    out = param * 2
    out.register_hook(lambda grad: seen.append("second"))
    private.hook_first(out, hook)
    assert private.backward_task() == -1 and private.backward_node() is None
    out.sum().backward(retain_graph=True)
    (task, keeps, node), *rest = seen
    assert task >= 0 and keeps and node and rest == ["second", "end"]


def test_modes_and_modules():
    class Refusing(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("asked")

    param = private.parameter_of_class(Refusing, torch.ones(2))
    assert type(param) is Refusing
    with private.without_torch_function():
        assert param.numel() == 2 and not param.requires_grad
    assert not private.saves_tensors_by_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.saves_tensors_by_hooks()
    module = nn.Linear(2, 2)
    handles = [
        module.register_forward_pre_hook(print, with_kwargs=True),
        module.register_forward_hook(print, with_kwargs=True, always_call=True),
    ]
    module.register_forward_pre_hook(repr)
    assert private.pre_hooks(module) == [print, repr]
    private.take_off(module, handles)
    assert private.pre_hooks(module) == [repr]
    assert not module._forward_hooks and not module._forward_hooks_always_called
    assert not module._forward_hooks_with_kwargs and not module._forward_pre_hooks_with_kwargs
    handle = module.weight.register_post_accumulate_grad_hook(print)
    private.take_off(module.weight, [handle])
    assert not module.weight._post_accumulate_grad_hooks
    assert not private.is_compiled(module)
    module.compile(backend="eager")
    assert private.is_compiled(module)


def test_work_on_our_own_tensors_is_not_transformed():
    own, kinds = torch.ones(2), []

    @private.untransformed
    def work() -> None:
        kinds.append(torch._C._functorch.is_functorch_wrapped_tensor(own + own))

    torch.func.grad(lambda x: (work(), x.sum())[1])(torch.ones(2))
    assert kinds == [False]


def test_profilers_of_torch():
    assert not private.profiler_runs()
    with torch.profiler.profile(experimental_config=private.all_threads()) as profiler:
        assert private.profiler_runs()
        thread = threading.Thread(target=lambda: torch.ones(3).neg())
        thread.start()
        thread.join()
    assert "aten::neg" in {event.name for event in profiler.events()}


def test_options_of_nccl():
    options, limit = private.nccl_options(timedelta(seconds=7)), timedelta(seconds=7)
    if dist.is_nccl_available():
        assert (options.is_high_priority_stream, options._timeout) == (True, limit)
    else:
        assert options is None
