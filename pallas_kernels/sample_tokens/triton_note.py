"""Keeping a step's tokens in the rows' slots."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.sample_tokens.arrays import IN_OUTPUT, SamplingRows, SlotState
from pallas_kernels.triton_import import jax_triton, tl, triton

_IN_OUTPUT = tl.constexpr(IN_OUTPUT)


def note_tokens(token_ids: Int32[Array, "B"], rows: SamplingRows, state: SlotState) -> SlotState:
    num_recent = state.recent_tokens.shape[1]
    memory = (state.last_token, state.token_flags, state.output_counts, state.recent_tokens)
    refs = tuple(jax.new_ref(array) for array in memory)
    jax_triton.triton_call(
        token_ids,
        rows.slots,
        rows.samples.astype(jnp.int32),
        *refs,
        kernel=_note,
        out_type=(),
        grid=(len(token_ids),),
        num_warps=1,
        V=state.token_flags.shape[1],
        RECENT=num_recent,
        RECENT_PAD=triton.next_power_of_2(num_recent),
    )
    last_token, token_flags, output_counts, recent_tokens = (jax.freeze(ref) for ref in refs)
    return state._replace(
        last_token=last_token,
        token_flags=token_flags,
        output_counts=output_counts,
        recent_tokens=recent_tokens,
    )


@triton.jit
def _note(
    token_ids,
    slots,
    samples,
    last_token,
    token_flags,
    output_counts,
    recent_tokens,
    V: tl.constexpr,
    RECENT: tl.constexpr,
    RECENT_PAD: tl.constexpr,
):
    """Keep the token of a row that samples in its slot."""
    row = tl.program_id(0)
    if tl.load(samples + row) != 0:
        token = tl.load(token_ids + row)
        slot = tl.load(slots + row).to(tl.int64)
        tl.store(last_token + slot, token)
        place = slot * V + token
        tl.store(output_counts + place, tl.load(output_counts + place) + 1)
        tl.store(token_flags + place, tl.load(token_flags + place) | _IN_OUTPUT)
        index = tl.arange(0, RECENT_PAD)
        place = recent_tokens + slot * RECENT + index
        newer = tl.load(place + 1, mask=index < RECENT - 1, other=0)
        tl.debug_barrier()  # A lane's neighbour has read before it writes.
        tl.store(place, tl.where(index == RECENT - 1, token, newer), mask=index < RECENT)
