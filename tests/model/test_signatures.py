"""What is called in packages that need a GPU has the parameters that it is called with: read from their source, as the
packages themselves may not be importable here. Other versions: install them into a folder, and put it on PYTHONPATH."""
import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ATTENTION = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"]
FLASH = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
         "window_size"]   # as transformers calls all three
CALLED = [   # package, file in it, function, parameters in use
    ("torch", "nn/attention/varlen.py", "varlen_attn", ATTENTION + ["enable_gqa"] * (torch.__version__ >= (2, 12))),
    ("bitsandbytes", "autograd/_functions.py", "matmul_4bit", ["A", "B", "quant_state", "bias"]),
    ("bitsandbytes", "functional.py", "dequantize_4bit", ["A", "quant_state"]),
    ("bitsandbytes", "functional.py", "dequantize_blockwise", ["A", "quant_state"]),
    ("bitsandbytes", "nn/modules.py", "Linear4bit.__init__", ["bias", "compute_dtype", "quant_type"]),
    ("liger_kernel", "transformers/monkey_patch.py", "_apply_liger_kernel_to_instance", ["model"]),
    ("liger_kernel", "transformers/monkey_patch.py", "apply_liger_kernel_to_qwen3",
     ["model", "cross_entropy", "fused_linear_cross_entropy", "swiglu"]),
    ("liger_kernel", "transformers/monkey_patch.py", "apply_liger_kernel_to_llama",
     ["model", "cross_entropy", "fused_linear_cross_entropy", "swiglu"]),
    ("flash_attn", "flash_attn_interface.py", "flash_attn_varlen_func", [*FLASH, "dropout_p", "softcap"]),
    ("flash_attn_interface", "", "flash_attn_varlen_func", FLASH),
    ("flash_attn", "cute/interface.py", "flash_attn_varlen_func", FLASH),
]


def parameters(source:str, function:str)->list[str]:
    "Of a function, or of a method, in a module's source"
    body = [ast.parse(source)]
    for name in function.split("."):
        body = [node for part in body for node in part.body if getattr(node, "name", "") == name]
    assert body, f"there is no {function}"
    arguments = body[-1].args
    return [a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]


@pytest.mark.parametrize("package, file, function, used", CALLED, ids=[f"{p} {f}" for p, _, f, _ in CALLED])
def test_it_takes_what_it_is_given(package, file, function, used):
    spec = find_spec(package)
    path = None if spec is None else Path(spec.origin) if not file else Path(spec.submodule_search_locations[0])/file
    if path is None or not path.exists(): pytest.skip(f"{package} is not installed, or has no {file}")
    assert not {*used} - {*parameters(path.read_text(), function)}


def test_a_parameter_that_is_gone_is_seen():
    assert parameters("class A:\n    def f(self, x, *, y=1): pass", "A.f") == ["self", "x", "y"]
    with pytest.raises(AssertionError, match="there is no g"): parameters("def f(): pass", "g")
