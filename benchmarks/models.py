"""Whole models: logits, decode, prefill and training with every nn.Linear replaced, against the original.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python benchmarks/models.py --json models.json

Llama, Qwen3 and Gemma from transformers' own classes, of real widths with few layers and random weights: nothing
is downloaded. The replaced model is the same module tree over the same parameters. Times are wall clock, the two
interleaved, medians; a ratio above 1 is faster than the original. `--tiny` runs all of it at toy sizes, also on a
CPU in Triton's interpreter, where times mean nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import torch
import transformers

import machine
import tables
from results_file import conditions

REPO_ID = "kernels-test/gemm-triton-autotune"
gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)

# The widths of Llama 3.1 8B, Qwen3 8B and Gemma 3 4B.
MODELS = {
    "Llama 3.1 8B": transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
    "Qwen3 8B": transformers.Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936,
    ),
    "Gemma 3 4B": transformers.Gemma3TextConfig(
        hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, vocab_size=262208, sliding_window=1024,
    ),
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128,
}  # fmt: skip
ROUNDS = 9
CONTEXT = 512


class Sizes:
    """How much of everything is run."""

    def __init__(self, tiny: bool) -> None:
        self.layers = 1 if tiny else 4
        self.batches = (2,) if tiny else (1, 8, 64)
        self.prompt = 8 if tiny else 2048
        self.context = 4 if tiny else CONTEXT
        self.steps = 1 if tiny else 10
        self.rounds = 1 if tiny else ROUNDS
        self.training_steps = 1 if tiny else 60
        self.training_shape = (2, 4) if tiny else (8, 256)


def make_model(config: Any, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """A model with random weights and, where its kind has them, sliding and full attention by turns."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = sizes.layers
    if getattr(config, "layer_types", None):
        kinds = sorted(set(config.layer_types), reverse=True)
        config.layer_types = [kinds[layer % len(kinds)] for layer in range(sizes.layers)]
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def replaced(model: torch.nn.Module, mode: kernels.Mode) -> torch.nn.Module:
    """The model over the same parameters, with the forward of every nn.Linear from this kernel."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    model = copy.deepcopy(model, shared)
    device = next(model.parameters()).device
    backend = gemm_kernel.device.device_properties(device).backend
    linear = kernels.LayerRepository(REPO_ID, layer_name="Linear", revision="v1")
    kernels.replace_kernel_forward_from_hub(torch.nn.Linear, "Linear")
    with kernels.use_kernel_mapping({"Linear": {backend: linear}}, inherit_mapping=False):
        kernels.kernelize(model, mode=mode, use_fallback=kernels.KernelizeFallback.NO_LAYER)
    left = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and "forward" not in vars(module)
    ]
    if left:
        raise RuntimeError(f"kernelize left {left} as they were")
    return model


def weight_shapes(model: torch.nn.Module) -> set[tuple[int, int]]:
    return {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}


def untuned(shapes: set[tuple[int, int]], device: torch.device) -> list[str]:
    """The weight shapes for which there is no tuned file: these run with the default."""
    tuning = gemm_kernel.tuning
    return [
        f"{N}x{K}" for N, K in sorted(shapes) if not tuning._load_tuned_configs(N, K, device, "NT")
    ]


def logit_errors(original: Any, ours: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Largest errors of the logits, over the largest logit, of both models to the same one in float32."""
    with torch.no_grad():
        logits = [model(tokens, use_cache=False).logits.float() for model in (original, ours)]
        exact = copy.deepcopy(original).float()(tokens, use_cache=False).logits
    scale = exact.abs().max()
    names = ("original_error", "our_error")
    return {name: ((one - exact).abs().max() / scale).item() for name, one in zip(names, logits)}


class Decode:
    """Steps of one token for each sequence of a batch, on a static cache that holds a context."""

    def __init__(self, model: Any, batch: int, sizes: Sizes, device: torch.device) -> None:
        self._model, self._sizes = model, sizes
        # No step of a round, warm-up or capture may fall off the end of the cache.
        self._cache = transformers.StaticCache(model.config, max_cache_len=sizes.context + 64)
        tokens = torch.randint(100, (batch, sizes.context), device=device)
        with torch.no_grad():
            model(tokens, past_key_values=self._cache, logits_to_keep=1)
        self._token = tokens[:, :1].contiguous()
        self._position = torch.full((batch, 1), sizes.context, device=device)

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self._model(
                self._token, past_key_values=self._cache, position_ids=self._position
            ).logits

    def rewind(self) -> None:
        """Back to the end of the context."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._sizes.context)
            if hasattr(layer, "cumulative_length_int"):
                layer.cumulative_length_int = self._sizes.context


class Prefill:
    """One prompt, and the logits of its last token."""

    def __init__(self, model: Any, sizes: Sizes, device: torch.device) -> None:
        self._model = model
        self._tokens = torch.randint(100, (1, sizes.prompt), device=device)

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self._model(self._tokens, use_cache=False, logits_to_keep=1).logits

    def rewind(self) -> None:
        pass


def graphed(call: Any) -> Callable[[], Any]:
    """``call`` as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    call.rewind()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.out = call()
    return graph.replay


def interleaved_ms(calls: list[Any], runs: list[Callable], sizes: Sizes) -> list[list[float]]:
    """Milliseconds of a step of each, in rounds that take them in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(sizes.rounds + 1):
        for call, run, own in zip(calls, runs, times):
            call.rewind()
            synchronize()
            start = time.perf_counter()
            for _ in range(sizes.steps):
                run()
            synchronize()
            own.append((time.perf_counter() - start) / sizes.steps * 1e3)
    return [own[1:] for own in times]  # the first round warms up


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_model(name: str, models: list[Any], sizes: Sizes, device: torch.device) -> list[dict]:
    """One row for each regime."""
    regimes = {
        f"decode, batch {batch}": lambda model, batch=batch: Decode(model, batch, sizes, device)
        for batch in sizes.batches
    }
    regimes[f"prefill, {sizes.prompt} tokens"] = lambda model: Prefill(model, sizes, device)
    rows = []
    for regime, make in regimes.items():
        calls = [make(model) for model in models]
        # transformers attends differently in a capture of many tokens: only decoding is captured.
        captured = device.type == "cuda" and isinstance(calls[0], Decode)
        for how in ("eager", "graph") if captured else ("eager",):
            runs = calls if how == "eager" else [graphed(call) for call in calls]
            original, ours = interleaved_ms(calls, runs, sizes)
            rows.append(
                {
                    "model": name, "regime": regime, "how": how,
                    "original_ms": statistics.median(original), "our_ms": statistics.median(ours),
                    "ratio": statistics.median(a / b for a, b in zip(original, ours)),
                }
            )  # fmt: skip
    return rows


def loss_curves(
    config: Any, sizes: Sizes, device: torch.device, tiny: bool
) -> dict[str, list[float]]:
    """A small model in float32, trained under autocast to continue arithmetic sequences, in both forms."""
    narrow = TINY if tiny else {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 4096}
    config = copy.deepcopy(config)
    config.update({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128} | narrow)
    original = make_model(config, sizes, device, torch.float32)
    curves = {}
    for form in ("original", "ours"):
        model = copy.deepcopy(original).train()
        if form == "ours":
            model = replaced(model, kernels.Mode.TRAINING)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        generator = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(sizes.training_steps):
            start, step = torch.randint(1, 97, (2, sizes.training_shape[0], 1), generator=generator)
            tokens = (start + step * torch.arange(sizes.training_shape[1])) % config.vocab_size
            tokens = tokens.to(device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves[form] = torch.stack(losses).tolist()
    return curves


def save(path: Path | None, result: dict) -> None:
    """What there is until now: a run takes minutes."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def report(result: dict) -> str:
    environment = result["environment"]
    more = (
        f"transformers {environment['transformers']}, {environment['layers']} layers of each model"
    )
    title = f"{conditions(environment)}, {more}"
    parts = [title, tables.model_times(result["rows"]), tables.model_errors(result["models"])]
    parts.append(tables.training_line(result["training"], result["training_difference"]))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="toy sizes: does it run at all?")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, help="write everything here, after each model")
    arguments = parser.parse_args()

    sizes = Sizes(arguments.tiny)
    device = gemm_kernel.tuning.resolve_device(None)
    result: dict[str, Any] = {
        "environment": machine.environment(
            device,
            "benchmarks/models.py",
            protocol="wall clock, the two interleaved, medians",
            dtype="bfloat16",
            transformers=transformers.__version__,
            layers=sizes.layers,
        ),
        "models": {},
        "rows": [],
    }
    for name in arguments.models:
        config = copy.deepcopy(MODELS[name])
        if arguments.tiny:
            config.update(TINY)
        original = make_model(config, sizes, device, torch.bfloat16)
        ours = replaced(original, kernels.Mode.INFERENCE)
        tokens = torch.randint(100, (1, 16 if arguments.tiny else 64), device=device)
        result["models"][name] = {
            "shapes": sorted(weight_shapes(original)),
            "untuned": untuned(weight_shapes(original), device),
            **logit_errors(original, ours, tokens),
        }
        result["rows"] += time_model(name, [original, ours], sizes, device)
        save(arguments.json, result)
        print(name, file=sys.stderr)
        del original, ours
    llama = MODELS["Llama 3.1 8B"]
    result["training"] = curves = loss_curves(llama, sizes, device, arguments.tiny)
    result["training_difference"] = max(
        abs(a - b) / a for a, b in zip(curves["original"], curves["ours"])
    )
    save(arguments.json, result)
    print(report(result))
    # Both are roundings of one model: ours may be no further from it than the original, within chance.
    wrong = [
        n for n, one in result["models"].items() if one["our_error"] > 2 * one["original_error"]
    ]
    if wrong or result["training_difference"] > 0.02:
        print(f"wrong: {', '.join(wrong) or 'the training curves differ'}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
