"""ComfyUI's compiler plans the memory that a call of a block asks for: it must hold nothing else when it returns."""

from contextlib import contextmanager, nullcontext
from functools import partial

import comfy.model_management
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from int8_dit.nodes.deferred.install import deferred_call
from support.architectures import ARCHITECTURES


class Planned(TorchDispatchMode):
    """What was asked for inside of calls, but for what was asked for outside of the plan."""

    def __init__(self):
        super().__init__()
        self.paused, self.calling, self._asked = 0, False, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _storages((args, kwargs))
        output = func(*args, **(kwargs or {}))
        if self.calling and not self.paused:
            self._asked += [StorageWeakRef(new) for at, new in _storages(output).items() if at not in given]
        return output

    def begin(self):
        self.calling, self._asked = True, []

    @contextmanager
    def outside(self):
        self.paused += 1
        yield
        self.paused -= 1

    def held(self, output):
        """How many of them still are at the end of a call, beside its output."""
        self.calling = False
        return len({ref.cdata for ref in self._asked if not ref.expired()} - _storages(output).keys())


def _storages(tree):
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in tensors)}


@pytest.fixture
def plan(monkeypatch):
    """A plan that the pack knows of, as ComfyUI's compiler makes one."""
    plan = Planned()
    monkeypatch.setattr("int8_dit.kernels.memory_plan._outside", plan.outside)
    return plan


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_deferred_call_of_a_block_holds_its_output_alone(small, plan, name):
    model, calls = small.int8_of(ARCHITECTURES[name]), []
    comfy.model_management.load_models_gpu([model])
    parents = [module for module in model.model.diffusion_model.modules() if isinstance(module, torch.nn.ModuleList)]
    blocks = [
        block for parent in parents for block in parent if any(hasattr(m, "is_fused_on") for m in block.modules())
    ]
    noting = lambda block, args, named: calls.append(partial(block, *args, **named))  # noqa: E731
    hooks = [block.register_forward_pre_hook(noting, with_kwargs=True) for block in blocks]
    small.output_of(ARCHITECTURES[name], model)
    for hook in hooks:
        hook.remove()
    assert calls
    with torch.inference_mode(), plan:
        for call in calls:
            deferred_call(call)
            plan.begin()
            assert plan.held(deferred_call(call)) == 0


@pytest.mark.parametrize("knows", (True, False))
def test_what_a_calibration_records_is_outside_of_the_plan(small, plan, monkeypatch, knows):
    if not knows:
        monkeypatch.setattr("int8_dit.kernels.memory_plan._outside", nullcontext)
    model, held = small.wan(), []
    for block in model.model.diffusion_model.blocks:
        block.register_forward_pre_hook(lambda *_: plan.begin())
        block.register_forward_hook(lambda _module, _args, output: held.append(plan.held(output)))
    with plan:
        small.recorded(model)
    assert held and any(held) != knows
