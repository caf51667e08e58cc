"""The interface of ComfyUI 0.36 to 0.43 around attention and linears, put over an older ComfyUI in this process, and
taken off.

No complete ComfyUI of these versions can be had for tests. What differs for this pack is imitated, as public files of
them show it:

- each attention module has a child `comfy_attention` without parameters. It says what the layer prefers;
- attention functions take tensors in containers and `preferred_attention`, and a fixed order says who computes;
- `<module>.comfy_attention.config` in state dicts, and in LoRAs, whose patch `("config", (tensor,))` becomes an object
  patch;
- linears take an activation and a residual, and clones keep `fast_disk`: linears_today.py.

The older ComfyUI's own forwards run, with their attention calls rewritten. Imported only once ComfyUI can be.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import comfy.ldm.flux.layers
import comfy.ldm.flux.math
import comfy.ldm.ideogram4.model
import comfy.ldm.lightricks.model
import comfy.ldm.lumina.model
import comfy.ldm.minimax.model
import comfy.ldm.modules.attention as attention
import comfy.ldm.qwen_image.model
import comfy.ldm.wan.model
import comfy.lora
import comfy.model_management
import comfy_kitchen
import torch
from comfy.ldm.flux.math import apply_rope
from comfy.model_patcher import ModelPatcher

from .linears_today import puts

_CONFIG = ".config"
_ATTENTION_CALLS = {"optimized_attention", "optimized_attention_masked", "attention"}

LAYERS = (
    comfy.ldm.ideogram4.model.Ideogram4Attention,
    comfy.ldm.lumina.model.JointAttention,
    comfy.ldm.flux.layers.DoubleStreamBlock,
    comfy.ldm.flux.layers.SingleStreamBlock,
    comfy.ldm.qwen_image.model.Attention,
    comfy.ldm.wan.model.WanSelfAttention,
    comfy.ldm.lightricks.model.CrossAttention,
    comfy.ldm.minimax.model.Attention,
)
"""The classes that get the child; those that derive from them have it too."""

_CROSS_ATTENTIONS = (
    comfy.ldm.wan.model.WanT2VCrossAttention,
    comfy.ldm.wan.model.WanI2VCrossAttention,
    comfy.ldm.wan.model.WanT2VCrossAttentionGather,
)


class ConfigurableModule(torch.nn.Module):
    """A module without parameters whose settings are one tensor of state dicts: uint8, the UTF-8 of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.config: Any = None

    def configure(self, config: Any, name: str) -> None:
        """Take settings over; None for none."""
        self.config = config

    def with_config(self, config: torch.Tensor) -> ConfigurableModule:
        """Another one with these settings."""
        other = type(self)()
        other.configure(json.loads(config.numpy().tobytes()), "")
        return other

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        config = state_dict.pop(f"{prefix}config", None)
        self.configure(None if config is None else json.loads(config.numpy().tobytes()), prefix.rstrip("."))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.config is not None:
            content = json.dumps(self.config).encode()
            destination[f"{prefix}config"] = torch.frombuffer(bytearray(content), dtype=torch.uint8)


class ComfyAttention(ConfigurableModule):
    """What a layer prefers to compute its attention with: `function`, None for what ComfyUI does anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.function: Callable[..., torch.Tensor] | None = None

    def configure(self, config: Any, name: str) -> None:
        self.config = self.function = None
        wishes = config if isinstance(config, list) else [config]
        for wish in wishes if config is not None else ():
            method = wish.get("attention")
            if method not in ("comfy_kitchen_int8", "comfy_kitchen_sol"):
                logging.warning("Ignoring unsupported attention method %r for %s", method, name)
                continue
            self.config = config
            if self.function is None and attention.COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE:
                device = comfy.model_management.get_torch_device()
                if comfy_kitchen.int8_attention_is_available(device):
                    self.function = attention.attention_comfy_kitchen_int8
                    if method == "comfy_kitchen_sol":  # which leaves out what a threshold says
                        self.function = functools.partial(self.function, tau=wish.get("tau", 0.0))


class AttentionTensorContainer:
    """A tensor with one owner: whoever takes it."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor

    def peek(self) -> torch.Tensor:
        if self.tensor is None:
            raise RuntimeError("the tensor was taken before")
        return self.tensor

    def take(self) -> torch.Tensor:
        tensor = self.peek()
        self.tensor = None
        return tensor


def contained(tensor: Any) -> Any:
    """A tensor in a container, which is one already in some older forwards."""
    container: Any = attention.AttentionTensorContainer
    return tensor if isinstance(tensor, container) else container(tensor)


def _taken(args: tuple) -> tuple:
    if not isinstance(args[0], attention.AttentionTensorContainer):
        return args
    return (*(container.take() for container in args[:3]), *args[3:])


def wrap_attn(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """An attention function that lets others compute: the MODEL's override, the layer's choice, then itself."""

    @functools.wraps(function)
    def dispatch(*args: Any, preferred_attention: Any = None, **kwargs: Any) -> torch.Tensor:
        contains = isinstance(args[0], attention.AttentionTensorContainer)
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
            if override is not None:
                if contains and hasattr(override, "container_function"):
                    return override.container_function(*args, **kwargs)
                return override(function, *_taken(args), **kwargs)
            if preferred_attention is not None and preferred_attention.function is not None:
                return preferred_attention.function(*args, **kwargs)
        if contains and dispatch.container_function is not None:
            return dispatch.container_function(*args, **kwargs)
        return function(*_taken(args), **kwargs)

    dispatch.container_function = None
    return dispatch


@wrap_attn
def attention_comfy_kitchen_int8(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """comfy-kitchen's INT8 attention, for a ComfyUI that does not have it yet. [B, T, heads · width] or as SDPA."""
    if not skip_reshape:
        q, k, v = (tensor.unflatten(-1, (-1, q.shape[-1] // heads)).transpose(1, 2) for tensor in (q, k, v))
    output = comfy_kitchen.int8_attention(q, k, v, scale=kwargs.get("scale"), attn_mask=mask)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def _flux_attention(q, k, v, pe, mask=None, transformer_options={}, preferred_attention=None):  # noqa: B006
    q, k, v = _taken((q, k, v))
    if pe is not None:
        q, k = apply_rope(q, k, pe)
    heads = q.shape[1]
    q, k, v = map(contained, (q, k, v))  # which own them now
    return comfy.ldm.flux.math.optimized_attention(
        q,
        k,
        v,
        heads,
        skip_reshape=True,
        mask=mask,
        transformer_options=transformer_options,
        preferred_attention=preferred_attention,
    )


class _Rewriting(ast.NodeTransformer):
    """Attention calls with containers and the layer's choice."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if ast.unparse(node.func).split(".")[-1] in _ATTENTION_CALLS:
            node.args[:3] = [_expression(f"contained({ast.unparse(tensor)})") for tensor in node.args[:3]]
            node.keywords.append(ast.keyword("preferred_attention", _expression("self.comfy_attention")))
        return node


def _expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body


def _rewritten(cls: type) -> Callable[..., Any]:
    """The forward of a class as it is today."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    for part in ast.walk(tree):
        if isinstance(part, ast.FunctionDef):  # annotations name what the older module has not imported
            part.returns = None
            for argument in part.args.args:
                argument.annotation = None
    tree = ast.fix_missing_locations(_Rewriting().visit(tree))
    module = vars(sys.modules[cls.__module__])
    made: dict[str, Any] = {}
    exec(compile(tree, inspect.getfile(cls), "exec"), module, made)
    return made["forward"]


def _with_child(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def with_child(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.comfy_attention = ComfyAttention()

    return with_child


def _load_lora(own: Callable[..., dict]) -> Callable[..., dict]:
    @functools.wraps(own)
    def load_lora(lora: dict, to_load: dict, log_missing: bool = True) -> dict:
        configs = {key: ("config", (tensor,)) for key, tensor in lora.items() if key.endswith(_CONFIG)}
        rest = {key: tensor for key, tensor in lora.items() if key not in configs}
        return own(rest, to_load, log_missing) | configs

    return load_lora


def _add_patches(own: Callable[..., list]) -> Callable[..., list]:
    @functools.wraps(own)
    def add_patches(self: ModelPatcher, patches: dict, strength_patch=1.0, strength_model=1.0) -> list:
        configured = []
        for key, config in patches.items():
            if isinstance(key, str) and key.endswith(_CONFIG):
                name = key.removesuffix(_CONFIG)
                module = self.object_patches.get(name, dict(self.model.named_modules()).get(name))
                if isinstance(module, ConfigurableModule):
                    configured.append(key)
                    if strength_patch:
                        kind, (tensor,) = config
                        assert kind == "config"
                        self.add_object_patch(name, module.with_config(tensor))
        rest = {key: value for key, value in patches.items() if not (isinstance(key, str) and key.endswith(_CONFIG))}
        if not rest:  # what only chooses keeps the MODEL's `patches_uuid`
            return configured
        return [*own(self, rest, strength_patch, strength_model), *configured]

    return add_patches


def _attention_functions() -> dict[Callable, Callable]:
    """Older attention functions -> those of today."""
    replaced: dict[Callable, Callable] = {comfy.ldm.flux.math.attention: _flux_attention}
    for name, function in vars(attention).items():
        if name.startswith(("attention", "optimized_attention")) and hasattr(function, "__wrapped__"):
            new = replaced.setdefault(function, wrap_attn(function.__wrapped__))
            new.container_function = getattr(function, "container_function", None)
    return replaced


def _replace(replaced: dict[Callable, Callable]) -> None:
    """Put functions in the place of others wherever ComfyUI imported those."""
    places: list[dict] = [attention.REGISTERED_ATTENTION_FUNCTIONS]
    places += [vars(module) for name, module in sys.modules.items() if name.split(".")[0] in ("comfy", "comfy_extras")]
    for place in places:
        for name, value in list(place.items()):
            if inspect.isfunction(value) and value in replaced:
                place[name] = replaced[value]


@contextmanager
def today(linears: str = "arguments") -> Iterator[ModuleType]:
    """ComfyUI's interface of today, for what is built and loaded in here. Gives `comfy.ldm.modules.attention`. How its
    linears are asked is one of linears_today's INTERFACES.

    Where ComfyUI has it already, nothing changes.
    """
    if hasattr(attention, "ComfyAttention"):
        yield attention
        return
    with ExitStack() as undo:
        configurable = ModuleType("comfy.configurable")
        vars(configurable)["ConfigurableModule"] = ConfigurableModule
        sys.modules[configurable.__name__] = configurable  # alone: what is imported meanwhile stays
        undo.callback(sys.modules.pop, configurable.__name__)

        def put(place: Any, name: str, value: Any) -> None:
            undo.enter_context(patch.object(place, name, value, create=True))

        replaced = _attention_functions()
        for name, value in (
            ("COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", False),
            ("AttentionTensorContainer", AttentionTensorContainer),
            ("attention_comfy_kitchen_int8", attention_comfy_kitchen_int8),
        ):
            if not hasattr(attention, name):
                put(attention, name, value)
        put(attention, "ComfyAttention", ComfyAttention)
        put(attention, "wrap_attn", wrap_attn)
        for cls in (*LAYERS, *_CROSS_ATTENTIONS):
            put(sys.modules[cls.__module__], "contained", contained)
            put(cls, "forward", _rewritten(cls))
        for cls in LAYERS:
            put(cls, "__init__", _with_child(cls.__init__))
        put(comfy.lora, "load_lora", _load_lora(comfy.lora.load_lora))
        put(ModelPatcher, "add_patches", _add_patches(ModelPatcher.add_patches))
        for place, name, value in puts(linears):
            put(place, name, value)
        _replace(replaced)
        undo.callback(_replace, {new: old for old, new in replaced.items()})
        yield attention
