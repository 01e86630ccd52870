"""The entry point of what lies between a step's logits and its tokens."""

from typing import Literal

from jaxtyping import Array, Float, Int32

from pallas_kernels.sample_tokens import reference
from pallas_kernels.sample_tokens.arrays import SamplingRows, SlotState


def sample_tokens(
    logits: Float[Array, "B V"],
    rows: SamplingRows,
    state: SlotState,
    token_masks: Int32[Array, "B W"],
    *,
    impl: Literal["reference", "triton"],
) -> tuple[Int32[Array, "B"], SlotState]:
    """One token a row, each row by its own parameters, computed in float32; and the slots with it
    noted, of rows that sample.

    The order is vLLM's: min_tokens, logit_bias and allowed_token_ids, bad_words, the grammar's
    mask, penalties; then the argmax (the lowest id where several tie), or temperature, min_p,
    top_k, top_p and a draw. Where top_k or top_p cut between equal probabilities, all of them are
    kept. A row whose parameters ban every token gets token 0; if it has a grammar, one that the
    grammar allows. Of rows that do not sample, tokens mean nothing. `token_masks` are bits of what
    the grammars allow, read in rows that have one.

    A draw is the Gumbel-max trick with `jax.random.gumbel` of the row's key, so neither the row's
    place nor its batch matters. `impl`: "reference" is plain JAX; "triton", on an NVIDIA GPU, reads
    the logits once, and again where a row's token may lie: all of them for top_p alone or a top_k
    of a thousand. Raises ValueError for another `impl`.
    """
    arrays = (logits, rows, state, token_masks)
    if impl == "reference":
        token_ids = reference.choose_tokens(*arrays)
        return token_ids, reference.note_tokens(token_ids, rows, state)
    if impl == "triton":
        # Imported here so that machines without a GPU need no triton.
        from pallas_kernels.sample_tokens import triton_kernel, triton_note

        token_ids = triton_kernel.choose_tokens(*arrays)
        return token_ids, triton_note.note_tokens(token_ids, rows, state)
    raise ValueError(f"impl={impl!r} is unknown: choose 'reference' or 'triton'")
