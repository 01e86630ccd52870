"""The packed batch, unpacked, against what each token's place should be."""

import numpy as np

from jaxserve.engine.batch_builder import BatchBuilder
from jaxserve.engine.buckets import Bucket, make_buckets, pick_bucket
from jaxserve.engine.forward_batch import FROM_SLOT, BatchLayout
from jaxserve.engine.request_state import RequestState
from jaxserve.outputs import RequestMetrics
from jaxserve.sampling_params import SamplingParams
from scheduler import Request, ScheduledRequest, SchedulerOutput

BLOCK_SIZE = 8
LAYOUT = BatchLayout(Bucket(16, 4), max_blocks=4, block_size=BLOCK_SIZE)


def make_state(request_id: str, prompt_len: int, **params: object) -> RequestState:
    return RequestState(
        request=Request(request_id, list(range(100, 100 + prompt_len)), max_tokens=8),
        parent_id=request_id,
        index=0,
        params=SamplingParams(**params),
        seed=(5 << 32) | 0xFFFFFFFE,
        has_bias=False,
        bad_word_token_ids=[],
        metrics=RequestMetrics(arrival_s=0.0),
        tokenizer=None,
        detokenizer=None,
        eos_token_ids=frozenset(),
    )


def row(request_id, slot, start, num_tokens, token_ids, new_block_ids, samples, **fields):
    return ScheduledRequest(
        request_id=request_id,
        slot=slot,
        start=start,
        num_tokens=num_tokens,
        token_ids=token_ids,
        new_block_ids=new_block_ids,
        samples=samples,
        output_index=fields.get("output_index", 0),
        admitted=fields.get("admitted", False),
        num_steps=fields.get("num_steps", 1),
    )


def output(step_id, rows, num_decode):
    num_tokens = sum(r.num_tokens for r in rows)
    return SchedulerOutput(step_id, tuple(rows), num_decode, num_tokens, ())


def test_places_of_a_mixed_step():
    states = {
        "a": make_state("a", 10, temperature=0.5, top_k=7, min_tokens=3),
        "b": make_state("b", 12),
    }
    builder = BatchBuilder(max_num_seqs=4, max_blocks=4)
    first = row("a", 2, 0, 10, range(100, 110), [5, 9], True, admitted=True)
    builder.build(output(0, [first], 0), states, LAYOUT)
    decode = row("a", 2, 10, 1, None, [], True, output_index=1)
    chunk = row("b", 0, 0, 5, range(100, 105), [3], False, admitted=True)
    batch = LAYOUT.unpack(builder.build(output(1, [decode, chunk], 1), states, LAYOUT))

    attention, rows = batch.attention, batch.rows
    assert batch.token_ids[:6].tolist() == [FROM_SLOT, 100, 101, 102, 103, 104]
    assert batch.token_slots[:6].tolist() == [2, 0, 0, 0, 0, 0]
    assert attention.positions.tolist() == [10, 0, 1, 2, 3, 4] + [0] * 10
    in_block_0 = np.asarray(attention.kv_slots[6:]) < BLOCK_SIZE
    assert in_block_0.all()
    assert attention.kv_slots[:6].tolist() == [9 * 8 + 2, 24, 25, 26, 27, 28]
    assert attention.query_starts.tolist() == [0, 1, 6, 6, 6]
    assert attention.context_lens.tolist() == [11, 5, 0, 0]
    assert attention.block_tables[:2].tolist() == [[5, 9, 0, 0], [3, 0, 0, 0]]
    assert attention.num_decode_rows == 1
    assert batch.last_tokens[:2].tolist() == [0, 5]
    assert rows.samples.tolist() == [True, False, False, False]
    assert rows.slots[:2].tolist() == [2, 0]
    assert rows.temperature.tolist() == [0.5, 1.0, 0.0, 0.0]
    assert rows.top_k.tolist() == [7, 0, 0, 0]
    assert rows.seed[:2].tolist() == [[5, 0xFFFFFFFE]] * 2
    assert rows.output_index[0] == 1
    assert rows.mask_stop_tokens.tolist() == [True, False, False, False]
    assert rows.repetition_penalty.tolist() == [1.0] * 4


def test_later_steps_of_decode_rows():
    """Step by step as if each had been packed alone; a row that has had its own is padding."""
    states = {"a": make_state("a", 6, min_tokens=3), "b": make_state("b", 3)}
    layout = BatchLayout(Bucket(4, 4), max_blocks=4, block_size=BLOCK_SIZE)
    builder = BatchBuilder(max_num_seqs=4, max_blocks=4)
    prompts = [
        row("a", 2, 0, 6, range(6), [5], True, admitted=True),
        row("b", 1, 0, 3, range(3), [7], True, admitted=True),
    ]
    builder.build(output(0, prompts, 0), states, LAYOUT)
    rows = [
        row("a", 2, 6, 1, None, [9], True, output_index=1, num_steps=3),
        row("b", 1, 3, 1, None, [], True, output_index=1, num_steps=1),
    ]
    packed = builder.build(output(1, rows, 2), states, layout)
    steps = [layout.unpack(packed, step) for step in range(3)]
    assert [s.attention.context_lens.tolist() for s in steps] == [
        [7, 4, 0, 0],
        [8, 0, 0, 0],
        [9, 0, 0, 0],
    ]
    assert [s.attention.positions[:2].tolist() for s in steps] == [[6, 3], [7, 0], [8, 0]]
    slots = [s.attention.kv_slots.tolist() for s in steps]
    assert [s[0] for s in slots] == [5 * 8 + 6, 5 * 8 + 7, 9 * 8]
    assert slots[0][1] == 7 * 8 + 3
    assert max(slots[1][1:] + slots[2][1:]) < BLOCK_SIZE
    assert [s.rows.samples.tolist() for s in steps] == [
        [True, True, False, False],
        [True, False, False, False],
        [True, False, False, False],
    ]
    assert [s.rows.output_index[0].item() for s in steps] == [1, 2, 3]
    assert [s.rows.mask_stop_tokens[0].item() for s in steps] == [True, True, False]


def test_readmission_starts_a_new_table():
    states = {"a": make_state("a", 20), "b": make_state("b", 3)}
    builder = BatchBuilder(4, 4)
    builder.build(
        output(0, [row("a", 1, 0, 16, range(16), [4, 5], False, admitted=True)], 0), states, LAYOUT
    )
    packed = builder.build(
        output(1, [row("b", 1, 0, 3, range(3), [7], True, admitted=True)], 0), states, LAYOUT
    )
    assert LAYOUT.unpack(packed).attention.kv_slots[:3].tolist() == [56, 57, 58]


def test_buckets_have_no_gaps():
    for max_num_seqs, budget in ((1, 1), (8, 32), (48, 256), (300, 2000), (256, 4096)):
        buckets = make_buckets(max_num_seqs, budget)
        assert len(buckets) <= 2 * budget.bit_length()
        for num_tokens in range(1, budget + 1):
            bucket = pick_bucket(buckets, num_tokens)
            assert bucket.num_tokens >= num_tokens
            assert bucket.num_rows >= min(num_tokens, max_num_seqs)
            if num_tokens > 256:  # arithmetic takes its time
                most = 1.25 if 512 < num_tokens <= 2048 else 1.5
                assert bucket.num_tokens <= most * num_tokens
            if num_tokens <= max_num_seqs:  # they may all decode: several steps in one dispatch
                assert bucket.num_rows == bucket.num_tokens


def test_parts_lie_where_a_kernel_can_read_them():
    """Each part that a kernel may be handed as it lies begins at a multiple of 256 bytes."""
    for num_tokens, num_rows in ((1, 1), (3, 3), (37, 5), (2048, 256)):
        layout = BatchLayout(Bucket(num_tokens, num_rows), max_blocks=7, block_size=16)
        packed = np.arange(layout.size, dtype=np.int32)
        *parts, columns, block_tables = layout.split(packed)
        for part in (*parts, *columns, block_tables):
            assert part.reshape(-1)[0] * 4 % 256 == 0
        flat = np.concatenate([part.reshape(-1) for part in (*parts, columns, block_tables)])
        assert len(set(flat.tolist())) == flat.size
