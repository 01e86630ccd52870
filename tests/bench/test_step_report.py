"""Bytes of kernels, read from a program's text, and the rows of a step's report."""

from types import SimpleNamespace

import pytest

from jaxserve.bench.device_events import StepKernel

HLO = """\
HloModule jit_step, is_scheduled=true

%fused_product (param_0.1: bf16[32,896], param_1.1: bf16[896,9728]) -> bf16[32,9728] {
  %param_0.1 = bf16[32,896]{1,0} parameter(0)
  %param_1.1 = bf16[896,9728]{1,0} parameter(1)
  ROOT %dot.1 = bf16[32,9728]{1,0} dot(%param_0.1, %param_1.1), lhs_contracting_dims={1}
}

%fused_gather (param_0.2: bf16[1000,896], param_1.2: s32[32]) -> bf16[32,896] {
  %param_1.2 = s32[32]{0} parameter(1)
  %param_0.2 = bf16[1000,896]{1,0} parameter(0)
  %bitcast.1 = bf16[1000,1,896]{2,1,0} bitcast(%param_0.2)
  ROOT %gather.1 = bf16[32,896]{1,0} gather(%bitcast.1, %param_1.2), offset_dims={1}
}

%fused_update (param_0.3: f32[512,64], param_1.3: f32[2,64], param_2.3: s32[]) -> f32[512,64] {
  %param_0.3 = f32[512,64]{1,0} parameter(0)
  %param_1.3 = f32[2,64]{1,0} parameter(1)
  %param_2.3 = s32[] parameter(2)
  ROOT %dus.1 = f32[512,64]{1,0} dynamic-update-slice(%param_0.3, %param_1.3, %param_2.3, %param_2.3)
}

ENTRY %main (x: bf16[32,896], w: bf16[896,9728]) -> bf16[32,9728] {
  %x = bf16[32,896]{1,0} parameter(0)
  %w = bf16[896,9728]{1,0} parameter(1)
  %table = bf16[1000,896]{1,0} parameter(2)
  %cache = f32[512,64]{1,0} parameter(3)
  %norm = (bf16[32,896]{1,0}, /*index=1*/s32[32]{0}) custom-call(%x), custom_call_target="own"
  %new = f32[2,64]{1,0} constant({...})
  %index = s32[] constant(0)
  %loop_gather_fusion = bf16[32,896]{1,0} fusion(%table, %norm#1), kind=kLoop, calls=%fused_gather
  %update.3 = f32[512,64]{1,0} fusion(%cache, %new, %index), kind=kLoop, calls=%fused_update
  ROOT %gemm_fusion_dot.2 = bf16[32,9728]{1,0} fusion(%norm#0, %w), kind=kCustom, calls=%fused_product, backend_config={"a": 1}
}
"""  # noqa: E501


def test_bytes_of_fusions(script):
    found = script("tools", "hlo_bytes").kernel_bytes(HLO)
    assert found == {
        "gemm_fusion_dot_2": 2 * (32 * 896 + 896 * 9728 + 32 * 9728),
        # What is gathered, not the table; and the indices.
        "loop_gather_fusion": 2 * (2 * 32 * 896) + 4 * 32,
        # What is new is read and written; the rest stays where it is.
        "update_3": 2 * (4 * 2 * 64) + 4,
    }


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[32,896]{1,0}", 32 * 896 * 2),
        ("(f32[4]{0}, s32[], pred[8]{0})", 16 + 4 + 8),
        ("f8e4m3fn[16]{0}", 16),
        ("u64[2]{0}", 16),
    ],
)
def test_bytes_of_shapes(script, shape, size):
    assert script("tools", "hlo_bytes").shape_bytes(shape) == size


def test_rows_have_bytes_only_where_they_are_known(script):
    found = {
        "_attend": StepKernel(24.0, 0.24),
        "nvjet_x": StepKernel(48.0, 0.5),
        "loop_add": StepKernel(1.0, 0.002),
    }
    rows = script("tools", "step_report").kernel_rows(
        found, {"loop_add": 4e6}, {"_attend": 20e6}, 4e12
    )
    shown = ("kernel", "bytes", "bytes_from", "percent_of_copy")
    assert [tuple(row[name] for name in shown) for row in rows] == [
        ("nvjet_x", None, None, None),
        ("_attend", 20e6, "model", 50.0),
        ("loop_add", 4e6, "hlo", 50.0),
    ]


def decode_phase(script, **fields):
    args = SimpleNamespace(input_len=512, output_len=512, batch_size=256, seed=0)
    args.__dict__.update(fields)
    return script("tools", "step_report").decode_phase(args, vocab_size=50, budget=8192)


def test_a_decode_steps_contexts_are_those_of_the_profile(script):
    phase = decode_phase(script)
    # 16 steps of prompts: the average request is 8 steps ahead of the last.
    assert (phase.timed_steps, phase.profiled_steps) == ((64, 512), (272, 288))
    assert (phase.steps_after, phase.context_tokens) == (64, 256 * (512 + 288))
    assert len(phase.requests(280)) == phase.num_tokens == 256
    with pytest.raises(ValueError, match="prompts of 512 tokens take 63 steps"):
        decode_phase(script, batch_size=1000, output_len=128)


def test_bytes_of_attention(script):
    model = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128, hidden_size=4096)
    found = script("tools", "step_report").model_bytes(model, 2, decode_phase(script))
    context, rows = 256 * 800 * 2 * 8 * 128 * 2, 2 * 256 * 4096 * 2
    assert found["paged_decode"] == found["_attend"] == context + rows
