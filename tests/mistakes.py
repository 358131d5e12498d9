"""Mistakes in training scripts, each made by two ranks, in processes that are forked from ranks that have torch.

    zero run --num_gpus 2 mistakes.py FOLDER NAME ...

What each says and how it ends is then in FOLDER/NAME. Nothing here is about the processes but their start: each has
its own output, error file and process group, and ends as Python ends it.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    """Lines of a script that come after `START`, and what is said of it, by the rank `by`; None: once, for all ranks.

    also: what the others say, who waited for that rank.
    """

    lines: str
    says: str
    by: int | None = None
    also: str = ""


START = """
import os, torch, zero
from torch import nn
rank = int(os.environ["RANK"])
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}}
def make(**more):
    return zero.initialize(model=model, config={**config, **more})[0]
def step(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
def file(text):
    with open(f"{rank}.partial", "w") as out:
        out.write(text)
    os.replace(f"{rank}.partial", "zero.json")
    return "zero.json"
"""

CONFIGS = {
    "empty file": Mistake("zero.initialize(model=model, config=file(' '))", "the file is empty, wanted an object"),
    "file ends": Mistake(
        'zero.initialize(model=model, config=file(\'{"fp16": {\\n"enabled": true,\'))',
        "line 2: the file ends too early: '}}' is missing, the first of it for the '{' of line 1",
    ),
    "no comma": Mistake(
        'zero.initialize(model=model, config=file(\'{"a": 1 "b": 2}\'))',
        "line 1 column 9: a comma or a closing bracket is missing here",
    ),
    "True": Mistake(
        "zero.initialize(model=model, config=file('{\"a\": True}'))",
        "line 1 column 7: this is no value; JSON has numbers, true, false, null",
    ),
    "stage 7": Mistake(
        "make(zero_optimization={'stage': 7})", "zero_optimization.stage: got 7, wanted an integer from 0 to 3"
    ),
    "typo": Mistake(
        "make(zero_optimization={'stge': 3})", "zero_optimization: unknown key 'stge'; did you mean 'stage'?"
    ),
    "three sections": Mistake(
        "make(fp16={'enabled': 3}, optimizer={'type': 'AdmW'}, scheduler={'type': 'WarmupLR', 'params': {'steps': 1}})",
        "fp16.enabled: got 3, wanted true or false\noptimizer.type: unknown optimizer 'AdmW'; did you mean 'AdamW'? "
        "Known: Adam, AdamW, Lamb, Lion, Muon, ASGD, Adadelta, Adagrad, Adamax, NAdam, RAdam, RMSprop, Rprop, SGD\n"
        "scheduler.params.steps: WarmupLR has no such parameter (got 1)",
    ),
    "LBFGS": Mistake("make(optimizer={'type': 'LBFGS'})", "'LBFGS' cannot run on shards: it needs a closure and inner"),
    "OneBitAdam": Mistake("make(optimizer={'type': 'OneBitAdam'})", "cannot run on shards: it sends messages of"),
    "argument of torch": Mistake(
        "make(optimizer={'type': 'RMSprop', 'params': {'alfa': 1}})",
        "optimizer.params: torch.optim.RMSprop has no argument 'alfa'; did you mean 'alpha'?",
    ),
    "value of torch": Mistake(
        "make(optimizer={'type': 'RMSprop', 'params': {'lr': -1}})", "torch.optim.RMSprop refuses {'lr': -1}: "
    ),
    "value of a schedule": Mistake(
        "make(scheduler={'type': 'WarmupLR', 'params': {'warmup_num_steps': 'x'}})",
        "scheduler.params.warmup_num_steps: wanted an integer of at least 0, got 'x'",
    ),
    "unknown schedule": Mistake(
        "make(scheduler={'type': 'WarmupL'})", "unknown schedule 'WarmupL'; did you mean 'WarmupLR'?"
    ),
    "schedule lacks": Mistake(
        "make(scheduler={'type': 'WarmupDecayLR'})", "scheduler.params.total_num_steps: WarmupDecayLR needs it"
    ),
    "batch sizes": Mistake("make(train_batch_size=3)", "world size 2: "),
    "no batch size": Mistake(
        "zero.initialize(model=model, config={})", "the batch size is missing; set train_batch_size or"
    ),
    "auto": Mistake("make(gradient_clipping='auto')", "gradient_clipping: got 'auto', which is for Accelerate or"),
    "not built": Mistake("make(amp={'enabled': True})", "amp: apex amp is not available; use bf16"),
    "units": Mistake("make(zero={'units': ['Liner']})", "match no module of the model; did you mean 'Linear'?"),
}

ARGUMENTS = {
    "no config": Mistake("zero.initialize(model=model)", "initialize() needs a configuration: pass config=<path or"),
    "no model": Mistake("zero.initialize(config=config)", "initialize() needs model=<torch.nn.Module>; got NoneType"),
    "model first": Mistake(
        "zero.initialize(model, config=config)",
        "`args`, the first argument, is the script's parsed command line, and got a Sequential, which is the model; "
        "name the arguments, as in initialize(model=model, config=config)",
    ),
    "config second": Mistake(
        "zero.initialize(None, config, model)",
        "`model` is a torch.nn.Module, and got a dict, which is the config",
    ),
    "model for parameters": Mistake(
        "zero.initialize(model=model, model_parameters=model, config=config)",
        "`model_parameters` is model.parameters() or parameter groups, and got a Sequential, which is the model",
    ),
    "name of an optimizer": Mistake(
        "zero.initialize(model=model, optimizer='AdamW', config=config)", "initialize(optimizer=...): got a str; wanted"
    ),
    "no parameters": Mistake(
        "zero.initialize(model=model, model_parameters=[], config=config)", "model_parameters: no parameter requires a"
    ),
    "meta": Mistake("model.to('meta'); make()", "is on meta and has no values; build the model under zero.Init()"),
    "loader for a dataset": Mistake(
        "zero.initialize(model=model, training_data=torch.utils.data.DataLoader([1]), config=config)",
        "dataset: got a DataLoader; wanted the dataset itself",
    ),
    "not the same": Mistake(
        "make(gradient_clipping=1.0 + rank)",
        "the ranks do not initialize the same engine: rank 0: gradient_clipping = 1.0; rank 1: gradient_clipping = 2.0",
    ),
}

CHECKPOINTS = {
    "no tag": Mistake(
        "engine = make(); engine.save_checkpoint('a', tag='one'); engine.load_checkpoint('a', tag='two')",
        "Whole checkpoints there: 'one'; pass one of them as `tag`",
    ),
    "no folder": Mistake("make().load_checkpoint('b', tag='two')", "b is no folder; give the one that save_checkpoint"),
    "nothing whole": Mistake(
        "os.makedirs('c/one', exist_ok=True); open('c/latest', 'w').write('one'); make().load_checkpoint('c')",
        "No checkpoint there is whole, so there is nothing to go on from: begin anew, or load from another folder",
    ),
    "full disk": Mistake(
        "from types import SimpleNamespace\n"
        "os.statvfs = lambda path: SimpleNamespace(f_bavail=1, f_frsize=1, f_blocks=9)\n"
        "make().save_checkpoint('d')",
        "No space left on device: ",
    ),
    "not a folder": Mistake("make().save_checkpoint(file('x'))", "save_checkpoint() cannot write to "),
    "saved by one": Mistake(
        "engine = make(); step(engine)\nif rank == 0:\n    engine.save_checkpoint('f')",
        "perhaps save_checkpoint() was called on some ranks only: it is for all, so not inside of `if rank == 0:`",
        by=0,
    ),
}

USE = {
    "deepspeed.zero": Mistake("deepspeed = zero; deepspeed.zero.Init()", "is in zero itself here: zero.Init, "),
    "fp16_groups": Mistake("make().optimizer.fp16_groups", "which is DeepSpeed's; instead: zero keeps its state in"),
    "read when released": Mistake("make(); model[0].weight + 1", "zero.GatheredParameters"),
    "half": Mistake("make().half()", "the JSON"),
    "copied": Mistake("import copy; copy.deepcopy(make())", "an engine cannot be copied or pickled"),
    "destroyed": Mistake(
        "engine = make(); engine.destroy(); engine(torch.ones(1, 4))", "this engine was destroyed; make a"
    ),
    "own error": Mistake("raise KeyError('sample 17')", "KeyError: 'sample 17'"),
    "error of one": Mistake(
        "engine = make(); step(engine)\nif rank == 1:\n    raise KeyError('sample 17')\nstep(engine)",
        "KeyError: 'sample 17'\n",
        by=1,
        also="rank 1 has ended its program with KeyError: 'sample 17'",
    ),
    "error in a model": Mistake(
        "engine = make(); step(engine)\n"
        "model[1].register_forward_pre_hook(lambda *_: None if 1 // (1 - rank) else None)\nstep(engine)",
        "ZeroDivisionError: integer division or modulo by zero\n",
        by=1,
        also="rank 1 raised ZeroDivisionError: integer division or modulo by zero in forward",
    ),
    "fewer batches": Mistake(
        "engine = make()\nfor _ in range(1 + rank):\n    step(engine)",
        "perhaps ranks had different numbers of batches, which a loader of initialize(training_data=...)",
        by=1,
    ),
}

MISTAKES = CONFIGS | ARGUMENTS | CHECKPOINTS | USE


def _become(folder: Path) -> str:
    """Be a rank of its own in `folder`, and say which program to run."""
    import torch.distributed as dist

    # Last of what runs at exit: to take all of torch apart after it takes most of a second.
    atexit.register(lambda: os._exit(hasattr(sys, "last_value")))
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(handle, number)
    (folder / "errors" / rank).mkdir(parents=True)
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / "errors" / rank / "error.json")
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=world)
    return str(folder / "train.py")


if __name__ == "__main__":
    import torch  # noqa: F401

    import zero
    import zero.errors

    getattr(zero, "initialize")  # noqa: B009 - which imports it, before the fork
    gc.freeze()  # pages that no child writes to need no copy
    statuses = {}
    for name in sys.argv[2:]:
        place = Path(sys.argv[1], name)
        if not (pid := os.fork()):
            program = _become(place)
            if MISTAKES[name].by is None:
                zero.errors._PATIENCE = 60.0  # on a busy machine one rank ends seconds before the other
            exec(compile(Path(program).read_text(), program, "exec"), {"__name__": "__main__"})
            sys.exit(0)
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    Path(sys.argv[1], f"statuses.{os.environ['RANK']}").write_text(json.dumps(statuses))
