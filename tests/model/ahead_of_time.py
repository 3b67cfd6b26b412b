"""Compile Liger's kernels for GPUs that are not present: Triton's compiler and NVIDIA's assembler need no GPU.

    python tests/model/ahead_of_time.py 90 1          # compute capability, and number of kernels; default: all

Prints as JSON how many compiled, and the errors of the others. `test_liger.py` runs it."""
import json
import sys

import triton
from liger_kernel.ops import rms_norm, rope, swiglu
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF, FULL, INT = "*bf16", "*fp32", "i32"
NORM = dict(Y_ptr=HALF, Y_row_stride=INT, X_ptr=HALF, X_row_stride=INT, W_row_stride=INT, RSTD_ptr=FULL,
            RSTD_row_stride=INT, n_cols=INT, n_rows=INT, eps="fp32", offset="fp32", dY_ptr=HALF, dY_row_stride=INT,
            dX_ptr=HALF, dX_row_stride=INT, dW_ptr=FULL, dW_row_stride=INT, rows_per_program=INT)
ROTARY = dict(q_ptr=HALF, q_row_stride=INT, k_ptr=HALF, k_row_stride=INT, cos=HALF, cos_row_stride=INT, sin=HALF,
              sin_row_stride=INT, sl=INT)
SWIGLU = dict(a_ptr=HALF, b_ptr=HALF, c_ptr=HALF, dc_ptr=HALF, stride=INT, gate_multiplier="fp32", n_cols=INT)


def norms():
    "Norms in 16 bits with weights in 16 and 32 bits, for short and long rows, as in Llama and in Gemma"
    for weight in (HALF, FULL):
        types = NORM | dict(W_ptr=weight)
        for mode in (0, 1):
            for block, warps in ((128, 4), (4096, 8)):
                fixed = dict(casting_mode=mode, elementwise_affine=True, BLOCK_SIZE=block)
                yield "norm", rms_norm._rms_norm_forward_kernel, types, fixed, warps
                for learns in (True, False):
                    back = fixed | dict(COMPUTE_DW=learns, X_dtype=triton.language.bfloat16)
                    yield "norm, backward", rms_norm._rms_norm_backward_kernel, types, back, warps
                    if block > 128: continue
                    several = back | dict(BLOCK_ROW=16)
                    yield "norms, backward", rms_norm._block_rms_norm_backward_kernel, types, several, warps
                if block > 128: continue
                yield "norms", rms_norm._block_rms_norm_forward_kernel, types, fixed | dict(BLOCK_ROW=16), warps


def others():
    "Rotary positions for several head sizes, and the product of gate and up"
    for back in (False, True):
        for head, turned in ((128, 128), (80, 80), (96, 96), (128, 64)):
            fixed = dict(bs=1, cos_bs=1, n_qh=32, n_kh=8, hd=head, pad_n_qh=32, pad_n_kh=8, rd=turned,
                         pad_hd=triton.next_power_of_2(head), pad_rd=triton.next_power_of_2(turned), BLOCK_SIZE=32,
                         BACKWARD_PASS=back)
            yield f"rotary positions of {turned} in {head}", rope._triton_rope, ROTARY, fixed, 4
    for tiled, block, warps in (("", 16384, 16), ("_tiled", 1024, 4)):
        for way in ("forward", "backward"):
            kernel = getattr(swiglu, f"_swiglu_{way}_kernel{tiled}")
            yield f"swiglu {way}{tiled}", kernel, SWIGLU, dict(BLOCK_SIZE=block), warps


def compile_kernel(kernel, types:dict, fixed:dict, warps:int, capability:int)->None:
    "Compile a kernel; RuntimeError if it yields no machine code"
    constants = {p.name: fixed.get(p.name, 0 if types.get(p.name) is None else False)
                 for p in kernel.params if p.is_constexpr or p.name in fixed}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=warps))
    if not made.asm.get("cubin"): raise RuntimeError("no machine code")


if __name__ == "__main__":
    capability, most = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    compiled, wrong = 0, {}
    for name, *how in [*norms(), *others()][:most]:
        try:
            compile_kernel(*how, capability)
            compiled += 1
        except Exception as e: wrong[f"{name} {how[2]}"] = f"{type(e).__name__}: {str(e)[-300:]}"
    print(json.dumps(dict(compiled=compiled, wrong=wrong)))
