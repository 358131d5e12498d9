"""Every private name of torch that zero uses, with what we need of it.

Nothing public tells these things: who else holds a storage, which backward runs on this thread and when it ends, and
how to set back the version counter of a tensor whose memory has come again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.optim._muon import _adjust_lr as muon_learning_rate  # noqa: F401  (lr, adjust_lr_fn or None, shape) -> lr
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz  # noqa: F401  may write into a bf16 one
from torch.utils._python_dispatch import _disable_current_modes as without_modes  # noqa: F401  of __torch_dispatch__
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Metadata reads and calls inside run as if the classes of tensors had no `__torch_function__`.
without_torch_function = torch._C.DisableTorchFunctionSubclass

# On lists of tensors; on a GPU one launch, where each list is of one dtype and strides agree. Adding wants one for all.
copy_each, add_each, multiply_each = torch._foreach_copy_, torch._foreach_add_, torch._foreach_mul_
zero_each = torch._foreach_zero_


def storage_id(tensor: torch.Tensor) -> int | None:
    """The identity of a tensor's memory, equal for all views of one storage; None where it has none."""
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:  # a sparse tensor, or one inside vmap
        return None


def offset_in_file(tensor: torch.Tensor) -> int:
    """The byte at which a tensor begins in the file of torch.save out of which it was loaded on the meta device."""
    return tensor.untyped_storage()._checkpoint_offset + tensor.storage_offset() * tensor.itemsize


def tensors_of_storage(storage: torch.UntypedStorage) -> int:
    """How many C++ tensors refer to the storage, the caller's Python object included."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_references(tensor: torch.Tensor) -> int:
    """How many tensors and variables hold this tensor's memory; only differences mean something."""
    storage = tensor.untyped_storage()
    return tensors_of_storage(storage) + sys.getrefcount(storage)


def tensor_references(tensor: torch.Tensor) -> int:
    """How many hold the tensor, graphs among them; only differences mean something."""
    return tensor._use_count()


def version_of(tensor: torch.Tensor) -> int:
    """How often something has written into it; 0 for inference tensors, which count nothing."""
    return 0 if tensor.is_inference() else tensor._version


def require_torch(least: tuple[int, int], what: str) -> None:
    """Raise RuntimeError below a version of torch that `what` wants."""
    if least > VERSION:
        wanted = ".".join(map(str, least))
        raise RuntimeError(f"{what} want torch {wanted} or later; there is {torch.__version__}; install a later one")


def repeat_changed(later: Any) -> bool:
    """Have what torch's selective checkpoint keeps, and something has written into since, be computed again.

    later: the second of its contexts. False where this torch can only repeat all.
    """
    again = getattr(torch.utils.checkpoint, "_RECOMPUTE", None)
    for kept in later.storage.values():
        for at, entry in list(kept.items() if isinstance(kept, dict) else enumerate(kept)):
            of_tensors = (leaf for leaf in tree_leaves(entry) if getattr(leaf, "version", None) is not None)
            if any(leaf.val._version != leaf.version for leaf in of_tensors):
                if again is None:
                    return False
                kept[at] = again
    return True


def operators_run(later: Any) -> Mapping[Any, int]:
    """How often a recomputation ran each operator, as far as torch tells."""
    return getattr(later, "func_counter", {})


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Set the version counters that autograd checks saved tensors against."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def backward_task() -> int:
    """The number of the innermost backward that runs on this thread (one may run inside another), or -1."""
    return torch._C._current_graph_task_id()


def backward_node() -> Any | None:
    """The node of the graph whose backward runs on this thread, or None."""
    return torch._C._current_autograd_node()


def after_backward(call: Callable[[], None]) -> None:
    """Have `call` run when the backward that runs on this thread ends; not when it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def backward_keeps_graph() -> bool:
    """Whether the backward that runs was asked to keep its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def saves_tensors_by_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` are in effect on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def view_base(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that this one is a view of, or None."""
    return tensor._base if tensor._is_view() else None


def hook_first(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> None:
    """As `tensor.register_hook(hook)`, to run before the hooks that the tensor has."""
    earlier = list((tensor._backward_hooks or {}).items())
    tensor.register_hook(hook)
    if earlier:
        hooks = tensor._backward_hooks
        last = hooks.popitem()
        hooks.clear()  # moving the entry would not do: autograd reads the order of insertion
        hooks.update([last, *earlier])


class _FirstRunsLast(OrderedDict):
    """Hooks by their numbers, of which the first that comes stays behind the others."""

    first: int | None = None

    def __setitem__(self, number: int, hook: Any) -> None:
        super().__setitem__(number, hook)
        if self.first not in self:
            self.first = number
        elif number != self.first:
            super().__setitem__(self.first, self.pop(self.first))


def hook_last(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """As `tensor.register_post_accumulate_grad_hook(hook)`, to run after hooks that are registered later, too.

    Where the tensor has hooks already it runs after those, and before later ones: their handles know a plain dict.
    """
    if not tensor._post_accumulate_grad_hooks:
        tensor._post_accumulate_grad_hooks = _FirstRunsLast()
    return tensor.register_post_accumulate_grad_hook(hook)


def run_post_accumulate_hooks(tensor: torch.Tensor) -> None:
    """Run what autograd does not run where a gradient was added without it."""
    for hook in [*(tensor._post_accumulate_grad_hooks or {}).values()]:
        hook(tensor)


def pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The module's forward pre-hooks, in order."""
    return list(module._forward_pre_hooks.values())


def take_off(owner: nn.Module | torch.Tensor, handles: Collection[RemovableHandle]) -> None:
    """Remove hooks of a module's forward, or those that run after a tensor's gradient has come.

    Their handles cannot, once the garbage collector has found them in a circle: they know the owner weakly, and weak
    references in what it collects are cut before anything in there may act.
    """
    tables: list[Any] = [getattr(owner, "_post_accumulate_grad_hooks", None)]
    if isinstance(owner, nn.Module):
        tables = [owner._forward_pre_hooks, owner._forward_pre_hooks_with_kwargs, owner._forward_hooks]
        tables += [owner._forward_hooks_with_kwargs, owner._forward_hooks_always_called]
    for handle in handles:
        handle.remove()
        for table in filter(None, tables):
            table.pop(handle.id, None)
    if isinstance(tables[0], _FirstRunsLast) and not tables[0]:
        owner._post_accumulate_grad_hooks = OrderedDict()  # None would leave the old one where autograd has it


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` or `torch.compile(module)` was called."""
    return module._compiled_call_impl is not None or isinstance(getattr(module, "_orig_mod", None), nn.Module)


def parameter_of_class(kind: type, data: torch.Tensor) -> torch.Tensor:
    """A tensor of class `kind`, which needs no gradient, on the memory of `data`."""
    return torch.Tensor._make_subclass(kind, data, False)


@functools.cache
def before_messages(kind: type, ask: Callable[[Any], None]) -> None:
    """Have torch.distributed `ask` about tensors of class `kind`: its backends read memory past a class."""
    c10d = dist.distributed_c10d
    one, several = c10d._check_single_tensor, c10d._check_tensor_list

    def check_one(param: Any, name: str) -> None:
        if isinstance(param, kind):
            ask(param)
        one(param, name)

    def check_several(param: Any, name: str) -> None:
        for each in param if isinstance(param, (list, tuple)) else ():
            if isinstance(each, kind):
                ask(each)
        several(param, name)

    c10d._check_single_tensor, c10d._check_tensor_list = check_one, check_several


def before_compiling(do: Callable[[Any], None]) -> None:
    """Have torch's compiler, which must have been loaded, `do` this before it looks at anything, until it is reset."""
    from torch._dynamo.callback import callback_handler

    if do not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(do)


def untransformed(work: Callable[..., Any]) -> Callable[..., Any]:
    """`work` on our own tensors as it is, also where a transform of `torch.func` runs: that would make them its own."""

    @functools.wraps(work)
    def called(*args: Any, **kwargs: Any) -> Any:
        active = torch._C._are_functorch_transforms_active()
        with torch._C._DisableFuncTorch() if active else contextlib.nullcontext():
            return work(*args, **kwargs)

    return called


def profiler_runs() -> bool:
    """Whether a profiler of torch runs, which another one would end."""
    return torch.autograd.profiler._is_profiler_enabled


def all_threads() -> Any:
    """For `torch.profiler.profile(experimental_config=...)`: every thread, not only the one that starts it."""
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def nccl_options(timeout: timedelta) -> Any | None:
    """Options of one new group, whose messages go before what computes; None where torch has no NCCL."""
    if not dist.is_nccl_available():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout  # torch takes the one it is given, and warns where this one differs
    return options


_groups_made: Counter[str] = Counter()  # by name


def group_of_members(name: str, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """A new group that only its ranks make; the others know nothing of it. `options`: of `torch.distributed.new_group`.

    name: what all of its ranks call it; they make their groups of one name and the same ranks in one order. In torch's
    own name is the number of all groups that a process has, and ranks with different numbers would wait forever. And
    where the default group is bound to a device, torch would split that group's communicator, and wait for all ranks.
    """
    digest = hashlib.blake2b(repr((name, *ranks)).encode(), digest_size=16).hexdigest()
    _groups_made[digest] += 1
    torchs, world = dist.distributed_c10d, dist.group.WORLD
    device, naming = world.bound_device_id, torchs._hash_ranks_to_str
    world.bound_device_id, torchs._hash_ranks_to_str = None, lambda ranks: f"zero {digest} {_groups_made[digest]}"
    try:
        return dist.new_group(list(ranks), use_local_synchronization=True, **options)
    finally:
        world.bound_device_id, torchs._hash_ranks_to_str = device, naming


def shape_of_gradient(param: torch.Tensor) -> tuple[int, ...]:
    """The shape of gradients that the graph expects of a leaf: the one it had as its node was made, if that lives."""
    return tuple(torch.autograd.graph.get_gradient_edge(param).node._input_metadata[0].shape)
