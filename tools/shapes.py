"""Which weights to tune: from a file, or from a model's configuration.

A model is built on torch's meta device, where it takes no memory, and its linear layers are looked at. What
serves it (vLLM, SGLang) multiplies by some of them at once, and splits them over the GPUs of a tensor-parallel
group: both are done here as there (vllm/model_executor/layers/linear.py in vllm-project/vllm).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .report import first_line

# Layers of one parent that are one product when served.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# How a layer is split where its model's plan does not say: by outputs, or by inputs.
_BY_OUTPUTS = re.compile(
    r"(q|k|v|qkv|gate|up|gate_up)_proj|query_key_value|c_attn|c_fc|fc1|fc_in|w1|w3|dense_h_to_4h|lm_head"
)
_BY_INPUTS = re.compile(r"(o|down|out|c)_proj|fc2|fc_out|w2|dense_4h_to_h|dense|wo")
# vLLM and SGLang pad the vocabulary to a multiple of this before they split it.
_VOCABULARY_MULTIPLE = 64


class Layer(NamedTuple):
    """A weight of N outputs and K inputs, in how many layers of which name."""

    name: str
    N: int
    K: int
    layout: str | None = None  # None: whatever is asked for
    count: int = 1


def read_shapes(path: Path) -> list[Layer]:
    """The weights in a text file, one a line: N and K, then a name if there is one; `#` begins a comment.

    Raises: ValueError that names the line.
    """
    layers = []
    for number, line in enumerate(path.read_text("utf-8-sig").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"([1-9]\d*)\s*[x,\s]\s*([1-9]\d*)(?:\s+(\S.*))?", text)
        if match is None:
            raise ValueError(f"{path}:{number}: expects N and K, as in '4096 14336', got {text!r}")
        layers.append(Layer(match[3] or "", int(match[1]), int(match[2])))
    if not layers:
        raise ValueError(f"{path} names no weight: expects N and K in a line, as in '4096 14336'")
    return layers


def model_layers(name: str, tensor_parallel: Sequence[int] = (1,)) -> list[Layer]:
    """The weights of a model: a folder, a `config.json`, or an id on the Hub.

    Raises: ValueError if it cannot be had, built or split so.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        raise ValueError("--model needs transformers; run `pip install transformers`") from None
    if name.startswith(("/", ".")) and not Path(name).exists():
        raise ValueError(f"--model expects a folder, a configuration or an id; there is no {name}")
    try:
        config = AutoConfig.from_pretrained(name)
        model = build_on_meta(config)
    # An id that is none, no network, an architecture that is not known: each has its own exception.
    except Exception as error:
        raise ValueError(
            f"cannot build {name} from its configuration: {first_line(error)}"
        ) from None
    return [layer for tp in tensor_parallel for layer in merged(layers_of(model, config, tp))]


def build_on_meta(config: Any) -> torch.nn.Module:
    """The model of a transformers configuration, without memory for its weights."""
    import transformers

    classes = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel")
    for name in classes:
        try:
            with torch.device("meta"):
                return getattr(transformers, name).from_config(config)
        except ValueError:  # not a configuration of this kind of model
            if name == classes[-1]:
                raise
    raise AssertionError("unreachable")


def layers_of(model: torch.nn.Module, config: Any = None, tp: int = 1) -> Iterator[Layer]:
    """Each linear layer of ``model``, with its siblings where they are fused, as one of ``tp`` GPUs has it.

    Raises: ValueError if a size cannot be split so.
    """
    suffix = f", TP {tp}" if tp > 1 else ""
    plan = _split_plan(model)
    kv_heads = _key_value_heads(config)
    for parent_name, parent in model.named_modules():
        linear = {name: child for name, child in parent.named_children() if _size(child)}
        for fused, names in FUSED.items():
            if all(name in linear for name in names):
                K = _size(linear[names[0]])[1]
                children = [linear.pop(name) for name in names]
                own = [_size(child)[0] for child in children]
                # Fewer heads of keys and values than of queries, and perhaps than GPUs.
                heads = [None] + [kv_heads if own[0] > N else None for N in own[1:]]
                N = sum(_split_outputs(*each, tp) for each in zip(names, own, heads))
                yield Layer(fused + suffix, N, K, "NT")
        for name, child in linear.items():
            N, K = _size(child)
            how = _how_split(f"{parent_name}.{name}".lstrip("."), name, plan) if tp > 1 else None
            if how == "outputs":
                N = _split_outputs(name, N, None, tp)
            elif how == "inputs":
                K = _divide(name, "inputs", K, tp)
            yield Layer(name + suffix, N, K, _layout(child))


def merged(layers: Iterable[Layer]) -> list[Layer]:
    """Each shape once, with the names of all layers that have it."""
    found: dict[tuple, list[Layer]] = {}
    for layer in layers:
        found.setdefault((layer.N, layer.K, layer.layout), []).append(layer)
    return [
        Layer(
            " | ".join(dict.fromkeys(layer.name for layer in own)),
            *key,
            sum(each.count for each in own),
        )
        for key, own in found.items()
    ]


def _size(module: torch.nn.Module) -> tuple[int, int] | None:
    """N and K of a linear layer; None for anything else."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features, module.in_features
    # GPT-2's layers, of transformers: a (K, N) weight.
    if type(module).__name__ == "Conv1D" and getattr(module, "weight", None) is not None:
        return module.weight.shape[1], module.weight.shape[0]
    return None


def _layout(module: torch.nn.Module) -> str:
    return "NT" if isinstance(module, torch.nn.Linear) else "NN"


def _split_plan(model: torch.nn.Module) -> dict[str, str]:
    """What transformers says of tensor parallelism: patterns of names, and how they are split."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return {pattern: str(how) for pattern, how in plan.items()}


def _how_split(path: str, name: str, plan: dict[str, str]) -> str | None:
    for pattern, how in plan.items():
        # `*` stands for the number of a layer.
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path):
            return "outputs" if "col" in how else "inputs" if "row" in how else None
    if _BY_OUTPUTS.fullmatch(name):
        return "outputs"
    return "inputs" if _BY_INPUTS.fullmatch(name) else None


def _key_value_heads(config: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "num_key_value_heads", None)


def _split_outputs(name: str, N: int, heads: int | None, tp: int) -> int:
    if name == "lm_head" and tp > 1:
        N = -(-N // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    if heads and heads < tp and tp % heads == 0:
        return N // heads  # each GPU has one head, and several have the same
    return _divide(name, "outputs", N, tp)


def _divide(name: str, what: str, size: int, tp: int) -> int:
    if size % tp:
        raise ValueError(f"{name} has {size} {what}, which cannot be split over {tp} GPUs")
    return size // tp
