"""Every nn.Linear of a transformers model through this kernel, without a change to the model's code.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python examples/kernelize_model.py

After `make build`; without a GPU with TRITON_INTERPRET=1, in a small size.
"""

import torch
from kernels import (
    LayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from transformers import LlamaConfig, LlamaForCausalLM

device = "cuda" if torch.cuda.is_available() else "cpu"
width, heads = (4096, 32) if device == "cuda" else (64, 4)
config = LlamaConfig(
    hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, vocab_size=1024
)
config.num_attention_heads = config.num_key_value_heads = heads
model = LlamaForCausalLM(config).to(device, torch.bfloat16).eval().requires_grad_(False)
tokens = torch.arange(8, device=device)[None]
before = model(tokens).logits

# The name under which the mapping speaks of torch's own class. A third argument may say which modules to take.
replace_kernel_forward_from_hub(torch.nn.Linear, "Linear")
linear = LayerRepository("kernels-test/gemm-triton-autotune", layer_name="Linear", revision="v1")
with use_kernel_mapping({"Linear": {device: linear}}, inherit_mapping=False):
    model = kernelize(model, mode=Mode.INFERENCE, device=device)

after = model(tokens).logits
replaced = [module for module in model.modules() if "forward" in vars(module)]
print(f"{len(replaced)} layers replaced")
print(
    f"largest difference of the logits: {(after - before).abs().max():.3g} of {before.abs().max():.3g}"
)
